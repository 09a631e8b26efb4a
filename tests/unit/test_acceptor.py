"""The supervisor's acceptor over real sockets: strangers keep nobody out, fill no log, use up no files."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from jurymast.core.messages import Ask, Said, read_said
from jurymast.errors import AuthenticationError
from jurymast.supervisor import supervisor
from jurymast.supervisor.supervisor import Acceptor
from jurymast.wire import channel, protocol
from jurymast.wire.channel import ACCEPTED_AT_ONCE, Connection, Listener
from jurymast.wire.protocol import MAGIC, NONCE_BYTES
from support.wire import served

SECRET = secrets.token_bytes(32)
LIMIT_S = 90.0
NODES = 2
CROWD = 400
TURNS = 20  # of the event loop


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(limited())


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """Port of a server that sends each message back."""
    entrance = Acceptor(SECRET, NODES)

    async def serve(come: Connection) -> None:
        if entered := await entrance.enter(come):
            connection, greeting = entered
            message: Said = greeting
            with suppress(ConnectionError):
                while isinstance(message, msgspec.Struct):
                    connection.send(message)
                    message = await connection.receive()
            connection.close()

    async with served(serve) as port:
        yield port


def asks(what: str) -> Ask:
    return Ask(what=what, by="ada")


async def greet(port: int) -> Said:
    connection = await channel.connect("127.0.0.1", port, SECRET, read_said)
    try:
        connection.send(asks("how"))
        return await connection.receive()
    finally:
        connection.close()


def test_strangers_who_say_nothing_are_few_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STRANGERS_MAX", 3)
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)
    most = NODES + supervisor.STRANGERS_MAX

    async def work() -> None:
        async with listening() as port:
            known = await channel.connect("127.0.0.1", port, SECRET, read_said)
            known.send(asks("first"))
            assert await known.receive() == asks("first")
            strangers = []
            for _ in range(2 * most):
                strangers.append(await asyncio.open_connection("127.0.0.1", port))
            for reader, _ in strangers[:most]:
                with suppress(ConnectionError):  # greeted, and hung up on
                    while await reader.read(4096):
                        pass
            assert await greet(port) == asks("how")
            late, _ = strangers[-1]
            assert (await late.read(len(MAGIC))) == MAGIC
            for _, writer in strangers:
                writer.close()
            known.send(asks("still here"))
            assert await known.receive() == asks("still here")
            known.close()

    run(work())


def test_a_crowd_at_the_door_delays_nobody_who_is_in() -> None:
    """However many connect at once: who is here already is heard again after a few of them."""
    came = 0
    heard_after: list[int] = [0]

    async def serve(come: Connection) -> None:
        nonlocal came
        came += 1
        if came == 1:
            known = await channel.accept(come, SECRET, read_said)
            await known.listen(lambda message: heard_after.append(came))

    async def work() -> None:
        async with served(serve) as port:
            known = await channel.connect("127.0.0.1", port, SECRET, read_said)
            crowd = []
            for _ in range(CROWD):  # while the loop stands still
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
                crowd.append(stranger)
            while came <= CROWD:
                said = len(heard_after)
                known.send(asks("still here"))
                while len(heard_after) == said:
                    await asyncio.sleep(0)
            between = [after - before for before, after in pairwise(heard_after)]
            assert max(between) <= 8 * ACCEPTED_AT_ONCE, between
            known.close()
            for stranger in crowd:
                stranger.close()

    run(work())


def test_who_is_refused_leaves_nothing_for_the_garbage_collector() -> None:
    """To look for what thousands have left would stop the loop for as long as a heartbeat takes."""
    entrance, came, tasks = Acceptor(SECRET, NODES), 0, set[asyncio.Task[Any]]()
    known = weakref.WeakSet[Connection]()

    def take(come: Connection) -> None:
        nonlocal came
        came += 1
        known.add(come)
        task = asyncio.ensure_future(entrance.enter(come))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def work() -> None:
        door = Listener(take, socket.create_server(("127.0.0.1", 0)))
        crowd = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(CROWD)]
        for stranger in crowd[::3]:
            stranger.send(bytes(2 * NONCE_BYTES))  # no proof
        for stranger in crowd[::2]:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        gc.disable()
        try:
            while came < CROWD:
                await asyncio.sleep(0)
            for stranger in crowd:
                stranger.close()
            while tasks:
                await asyncio.sleep(0)
            assert not list(known)
        finally:
            gc.enable()
            door.close()

    run(work())


def test_a_crowd_from_one_machine_drives_only_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STRANGERS_MAX", 3)
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)
    most = NODES + supervisor.STRANGERS_MAX
    writers: list[asyncio.StreamWriter] = []

    async def connected(port: int, home: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(home, 0))
        writers.append(writer)
        await reader.readexactly(len(MAGIC))
        return reader

    async def work() -> None:
        async with listening() as port:
            slow = await connected(port, "127.0.0.2")
            crowd = [await connected(port, "127.0.0.3") for _ in range(3 * most)]
            await slow.readexactly(NONCE_BYTES)
            more = asyncio.ensure_future(slow.read(1))
            for stranger in crowd[:-most]:  # the oldest were hung up on
                with suppress(ConnectionError):
                    while await stranger.read(4096):
                        pass
            for _ in range(TURNS):  # whoever was hung up on has heard of it
                await asyncio.sleep(0)
            assert not more.done()
            more.cancel()
            for writer in writers:
                writer.close()

    run(work())


def test_refusals_are_told_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def knock(port: int, times: int) -> None:
        for _ in range(times):
            with pytest.raises((AuthenticationError, ConnectionError)):
                await channel.connect("127.0.0.1", port, b"wrong", read_said)

    async def work() -> None:
        async with listening() as port:
            await knock(port, 7)
            (line,) = caplog.messages
            assert line.startswith("refused a connection from 127.0.0.1: AuthenticationError: ")
            monkeypatch.setattr(supervisor, "TOLD_EVERY_S", 0.0)
            await knock(port, 1)
            _, line = caplog.messages
            assert line.endswith("; 6 more since the last message")

    run(work())


@pytest.mark.parametrize(("hard", "nodes", "enough"), [(512, 10, True), (512, 400, False)])
def test_files_for_all_nodes(hard: int, nodes: int, enough: bool) -> None:
    """In a process of its own: a hard limit never goes up again."""
    code = (
        "import json, resource, sys\n"
        "from jurymast.supervisor.supervisor import allow_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
        f"told = allow_files({nodes})\n"
        "print(json.dumps([told, resource.getrlimit(resource.RLIMIT_NOFILE)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, limits = json.loads(done.stdout)
    assert limits == [hard, hard]
    needed = 2 * nodes + supervisor.STRANGERS_MAX + supervisor.OWN_FILES
    assert (
        f"may open {hard} files here, and the supervisor of {nodes} nodes may need {needed}" in told
    ) != enough
    assert (told == "") == enough
