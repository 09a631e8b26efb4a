"""How an agent that lost its connection finds a supervisor again, also while shared storage is slow."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from jurymast.agent import supervision
from jurymast.agent.agent import Agent
from jurymast.agent.real_io import node_agent
from jurymast.agent.storage_processes import NodeStorage
from jurymast.cluster.allocation import Allocation
from jurymast.core.state import messages as msg
from jurymast.core.state.settings import RunPlan
from jurymast.rundir import RunDirectory
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.endpoint import Endpoint
from jurymast.wire.handshakes import Proven
from support.wire import served

LIMIT_S = 90.0
ALLOCATION = Allocation("17", 0, ("n1",), "n1", 0.0)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    # Who waits for a limit of these has not found another way.
    monkeypatch.setattr(supervision, "CONNECT_LIMIT_S", 10 * LIMIT_S)
    monkeypatch.setattr(supervision, "FIND_LIMIT_S", 10 * LIMIT_S)
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    ALLOCATION.save(directory)
    plan = RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="local", active=1, spares=0,
        ranks_per_node=1, script="x", python=sys.executable,
    )  # fmt: skip
    made = node_agent(directory, plan, "n1", None)
    made.machine.ranks.host_starts = 1  # nothing is to be started
    return made


def at(port: int, epoch: int) -> Endpoint:
    return Endpoint(epoch, ("127.0.0.1",), port, "n1", ALLOCATION.key, os.getpid())


async def sent_home(agent: Agent, tmp_path: Path) -> int:
    """Run the agent until a supervisor that it has found sends it home; the port of that one. Its last one is
    there as well unless the agent knows of another."""
    secret = RunDirectory(tmp_path / "run").secret()

    async def serve(proven: Proven) -> None:
        supervisor = Channel.of(proven, msg.read_said)
        assert isinstance(await supervisor.receive(), msg.Hello)
        supervisor.send(msg.Leave())

    link = agent.machine.link
    async with served(serve, secret) as port:
        link._last = link._last or at(port, 1)
        endpoint.announce(tmp_path / "run" / "epochs", at(port, 2))
        await asyncio.wait_for(agent.run(), LIMIT_S)
    return port


async def test_a_slow_run_directory_keeps_no_agent_from_its_supervisor(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(endpoint, "find", lambda epochs: answered.wait(2 * LIMIT_S) and None)

    try:
        await sent_home(agent, tmp_path)
    finally:
        answered.set()  # a thread that is still at it would hold up the loop's end


def test_a_last_address_that_is_silent_keeps_no_agent_from_the_newest_supervisor(
    agent: Agent, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        agent.machine.link._last = at(silent.getsockname()[1], 1)
        port = asyncio.run(sent_home(agent, tmp_path))
    assert agent.machine.link._last == at(port, 2)


def test_a_supervisor_that_crashes_and_comes_back_elsewhere_is_found_again(
    agent: Agent, tmp_path: Path
) -> None:
    """What no hello tells waits for it: a rank that waits for an image must not wait for long."""
    directory = RunDirectory(tmp_path / "run")
    waits = msg.Unrestorable(attempt=2, rank=0, step=40, of=1, why="n5: refused")
    heard: list[msg.Said] = []

    greeted = asyncio.Event()

    async def crash(proven: Proven) -> None:
        await Channel.of(proven, msg.read_said).receive()
        greeted.set()

    async def hear(proven: Proven) -> None:
        supervisor = Channel.of(proven, msg.read_said)
        heard.extend([await supervisor.receive(), await supervisor.receive()])
        supervisor.send(msg.Leave())

    async def work() -> None:
        async with served(hear, directory.secret()) as second:
            async with served(crash, directory.secret()) as first:
                endpoint.announce(directory.epochs, at(first, 1))
                running = asyncio.ensure_future(agent.run())
                await greeted.wait()
            while agent.machine.link.connected:
                await asyncio.sleep(0.01)
            agent._driver.say(waits)
            endpoint.announce(directory.epochs, at(second, 2))
            await running

    asyncio.run(asyncio.wait_for(work(), LIMIT_S))
    assert isinstance(heard[0], msg.Hello)
    assert heard[1] == waits


async def test_what_an_agent_cannot_read_of_its_torchrun_host_is_noted(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    agent._host_said(msg.Unreadable("dance", "it is not known"))
    assert "the torchrun host: an unknown message was ignored: " in caplog.text


async def test_an_agent_ends_a_write_when_it_is_told_to(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def write(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(NodeStorage, "write", write)
    order = msg.Write(id="7", tier="shared", step=1, attempt=1, ranks=(), world=1)
    agent._obey(order)
    await asyncio.wait_for(begun.wait(), LIMIT_S)
    agent._obey(msg.CancelWrite(id="7"))
    for _ in range(3):  # turns of the loop
        await asyncio.sleep(0)
    assert ended.is_set()


@pytest.mark.parametrize(("over", "last"), [(True, "forget_local"), (False, "close")])
async def test_an_agent_that_is_sent_away_is_there_until_it_has_cleared_its_node(
    agent: Agent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool, last: str
) -> None:
    """A supervisor that sees no agent any more ends the job, and Slurm kills who still removes images; or has
    it requeued, for which Slurm needs seconds if it has to kill anybody."""
    clears, heard, cleared = asyncio.Event(), asyncio.Event(), False
    directory = RunDirectory(tmp_path / "run")

    async def clear(_: NodeStorage) -> None:
        nonlocal cleared
        clears.set()
        await heard.wait()
        cleared = True

    async def serve(proven: Proven) -> None:
        supervisor = Channel.of(proven, msg.read_said)
        assert isinstance(await supervisor.receive(), msg.Hello)
        supervisor.send(msg.Leave(over=over))
        await clears.wait()
        for _ in range(5):  # more than were under way
            assert isinstance(await supervisor.receive(), msg.Beat)
        heard.set()

    monkeypatch.setattr(NodeStorage, last, clear)
    async with served(serve, directory.secret()) as port:
        endpoint.announce(directory.epochs, at(port, 1))
        await asyncio.wait_for(agent.run(), LIMIT_S)
    assert cleared
