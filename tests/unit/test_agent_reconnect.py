"""How an agent that lost its connection finds a supervisor again, also while shared storage is slow."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from jurymast.agent import agent as agents
from jurymast.agent.agent import Agent
from jurymast.cluster.allocation import Allocation
from jurymast.core import messages as msg
from jurymast.core.settings import RunPlan
from jurymast.rundir import RunDirectory
from jurymast.wire import channel, endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.connection import Connection
from jurymast.wire.endpoint import Endpoint
from support.wire import served

LIMIT_S = 20.0
ALLOCATION = Allocation("17", 0, ("n1",), "n1", 0.0)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    # Who waits for a limit of these has not found another way.
    monkeypatch.setattr(agents, "CONNECT_LIMIT_S", 10 * LIMIT_S)
    monkeypatch.setattr(agents, "FIND_LIMIT_S", 10 * LIMIT_S)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    ALLOCATION.save(directory)
    plan = RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="local", active=1, spares=0,
        ranks_per_node=1, script="x", python=sys.executable,
    )  # fmt: skip
    made = Agent(directory, plan, "n1", None)
    yield made
    shutil.rmtree(made._temporary)
    os.close(made._lock)


def at(port: int, epoch: int) -> Endpoint:
    return Endpoint(epoch, ("127.0.0.1",), port, "n1", ALLOCATION.key, os.getpid())


def connected_to(agent: Agent, tmp_path: Path) -> tuple[bool, int]:
    """(whether the agent got a connection, port of the supervisor that listens)."""

    async def work() -> tuple[bool, int]:
        secret = RunDirectory(tmp_path / "run").secret()
        accepted: list[Channel[msg.Said]] = []

        async def serve(come: Connection) -> None:
            accepted.append(await channel.accept(come, secret, msg.read_said))

        async with served(serve) as port:
            agent._last = agent._last or at(port, 1)
            endpoint.announce(tmp_path / "run" / "epochs", at(port, 2))
            found = await agent._connect()
        if found is not None:
            found.close()
        return found is not None, port

    return asyncio.run(limited(work()))


async def limited(work: Coroutine[Any, Any, tuple[bool, int]]) -> tuple[bool, int]:
    return await asyncio.wait_for(work, LIMIT_S)


def test_a_slow_run_directory_keeps_no_agent_from_its_supervisor(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    connect = agent._connect

    async def and_let_go() -> Channel[msg.Order] | None:
        try:
            return await connect()
        finally:
            answered.set()  # a thread that is still at it would hold up the loop's end

    monkeypatch.setattr(agent, "_connect", and_let_go)
    monkeypatch.setattr(endpoint, "find", lambda epochs: answered.wait(2 * LIMIT_S) and None)
    assert connected_to(agent, tmp_path)[0]


def test_a_last_address_that_is_silent_keeps_no_agent_from_the_newest_supervisor(
    agent: Agent, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        agent._last = at(silent.getsockname()[1], 1)
        got, port = connected_to(agent, tmp_path)
    assert got
    assert agent._last == at(port, 2)


def test_what_no_hello_tells_waits_for_the_next_supervisor(agent: Agent) -> None:
    """A rank that waits for an image must not wait long because its agent reached nobody."""
    waits = msg.Unrestorable(attempt=2, rank=0, step=40, of=1, why="n5: refused")
    agent._say(waits)
    agent._say(msg.Prefetched(step=40, attempt=1, rank=1, tiers={}, seconds=1.0))
    assert agent._unsaid == [waits]
