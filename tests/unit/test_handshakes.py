"""Handshakes over real sockets: strangers keep nobody out, delay nobody, fill no log, use up no files."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import resource
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jurymast.core.state.messages import Ask, Said, read_said
from jurymast.errors import AuthenticationError
from jurymast.keeper.copies import CopyTable
from jurymast.keeper.transfer import ImageServer, read_served
from jurymast.supervisor import real_io
from jurymast.wire import channel, handshakes, protocol, stream
from jurymast.wire.channel import Channel
from jurymast.wire.handshakes import ACCEPTED_AT_ONCE, Handshakes, Proven
from jurymast.wire.protocol import (
    ANSWER_BYTES,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    SUPERVISOR,
    Access,
    keeper_of,
)
from support.waiting import wait_until
from support.wire import served

SECRET = secrets.token_bytes(32)
LIMIT_S = 90.0
NODES = 2
CROWD = 400
TURNS = 20  # of the event loop
ROOT = Path(__file__).resolve().parents[2]


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(work, LIMIT_S)

    asyncio.run(limited())


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """Port of a server that sends each message back."""

    async def serve(proven: Proven) -> None:
        connection = Channel.of(proven, read_said)
        with suppress(ConnectionError):
            while isinstance(message := await connection.receive(), msgspec.Struct):
                connection.send(message)
        connection.close()

    async with served(serve, Handshakes(SECRET, SUPERVISOR, NODES)) as port:
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


@contextmanager
def few_may_wait(patch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many."""
    patch.setattr(handshakes, "STRANGERS_MAX", 3)
    patch.setattr(protocol, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)
    yield NODES + 3


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):  # greeted, and hung up on
        while await reader.read(4096):
            pass


def test_strangers_who_say_nothing_are_few_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(most: int) -> None:
        async with listening() as port:
            known = await channel.connect("127.0.0.1", port, SECRET, read_said)
            known.send(asks("first"))
            assert await known.receive() == asks("first")
            strangers = []
            for _ in range(2 * most):
                strangers.append(await asyncio.open_connection("127.0.0.1", port))
            for reader, _ in strangers[:most]:
                await until_closed(reader)
            assert await greet(port) == asks("how")
            late, _ = strangers[-1]
            assert (await late.read(len(MAGIC))) == MAGIC
            for _, writer in strangers:
                writer.close()
            known.send(asks("still here"))
            assert await known.receive() == asks("still here")
            known.close()

    with few_may_wait(monkeypatch) as most:
        run(work(most))


def test_a_crowd_at_the_door_delays_nobody_who_is_in() -> None:
    """However many connect at once: who is here already is heard again after a few of them."""
    heard_after: list[int] = [0]

    async def serve(proven: Proven) -> None:
        known = Channel.of(proven, read_said)
        await known.listen(lambda message: heard_after.append(begun()))

    counting = Handshakes(SECRET, SUPERVISOR, CROWD)

    def begun() -> int:
        return len(counting._unproven)

    async def work() -> None:
        async with served(serve, counting) as port:
            known = await channel.connect("127.0.0.1", port, SECRET, read_said)
            crowd = []
            for _ in range(CROWD):  # while the loop stands still
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex(("127.0.0.1", port))
                crowd.append(stranger)
            while begun() < CROWD:
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
    listener = socket.create_server(("127.0.0.1", 0))
    server = Handshakes(SECRET, SUPERVISOR, CROWD)
    server.listen(listener)
    crowd = [socket.create_connection(listener.getsockname()) for _ in range(CROWD)]
    for stranger in crowd[::3]:
        stranger.send(bytes(2 * NONCE_BYTES))  # no proof
    for stranger in crowd[::2]:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    known = weakref.WeakSet[Any]()
    accepted, gone = 0, False
    gc.disable()
    try:
        while accepted < CROWD or server._unproven:
            accepted += sum(1 for one in server._unproven.values() if one not in known)
            known.update(server._unproven.values())
            if accepted == CROWD and not gone:
                gone = True
                for stranger in crowd:
                    stranger.close()
            assert not server.turn()
        assert not list(known)
    finally:
        gc.enable()
        server.close()


def test_a_crowd_from_one_machine_drives_only_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def connected(port: int, home: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(home, 0))
        writers.append(writer)
        await reader.readexactly(len(MAGIC))
        return reader

    async def work(most: int) -> None:
        async with listening() as port:
            slow = await connected(port, "127.0.0.2")
            crowd = [await connected(port, "127.0.0.3") for _ in range(3 * most)]
            await slow.readexactly(NONCE_BYTES)
            more = asyncio.ensure_future(slow.read(1))
            for stranger in crowd[:-most]:  # the oldest were hung up on
                await until_closed(stranger)
            for _ in range(TURNS):  # whoever was hung up on has heard of it
                await asyncio.sleep(0)
            assert not more.done()
            more.cancel()
            for writer in writers:
                writer.close()

    with few_may_wait(monkeypatch) as most:
        run(work(most))


# A flood.

STRANGERS = 600  # connections of the flood at a time: more than may wait
FLOODED = 1000


@contextmanager
def flood(port: int, home: str, says: str) -> Iterator[Callable[[], int]]:
    """A process that connects as fast as it can from this address; yields how often it has done so."""
    command = [sys.executable, "-m", "support.strangers", "127.0.0.1", str(port), str(STRANGERS), home, says]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "launcher")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    ) as process:  # fmt: skip
        assert process.stdout is not None
        counted = [0]

        def count() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                counted[0] = int(line)

        counting = threading.Thread(target=count)
        counting.start()
        try:
            yield lambda: counted[0]
        finally:
            process.kill()
            counting.join()


def supervisors(closed: ExitStack) -> tuple[int, str]:
    """The port of a supervisor's listener that runs in a thread, and whom to ask for there."""
    port: list[int] = []
    ready, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def main() -> None:
        async with listening() as found:
            port.append(found)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    closed.callback(loop.close)
    closed.callback(thread.join)
    closed.callback(lambda: loop.call_soon_threadsafe(over.set))
    assert ready.wait(LIMIT_S)
    return port[0], SUPERVISOR


def keepers(closed: ExitStack) -> tuple[int, str]:
    server = ImageServer(CopyTable(), Access(SECRET), "a", lambda copy: None)
    server.listen_at("127.0.0.1")
    closed.callback(server.close)
    return server.port, keeper_of("a")


@pytest.mark.parametrize("server", [supervisors, keepers])
@pytest.mark.parametrize("home", ["127.0.0.2", "127.0.0.1"], ids=["from elsewhere", "from a node of the run"])
@pytest.mark.parametrize("says", ["nothing", "nonsense"])
def test_a_handshake_completes_while_a_flood_goes_on(
    server: Callable[[ExitStack], tuple[int, str]], home: str, says: str
) -> None:
    with ExitStack() as closed:
        port, who = server(closed)
        count = closed.enter_context(flood(port, home, says))
        for _ in range(3):
            more = count() + FLOODED
            wait_until(f"{more} strangers", lambda more=more: count() >= more)  # type: ignore[misc]
            stream.connect("127.0.0.1", port, SECRET, who, read_served, LIMIT_S).close()


def reset_while_connecting(patch: pytest.MonkeyPatch) -> list[object]:
    """Let the server seem to have reset the first connection before connect(2) returned. Returns where to
    all of them went."""
    places: list[object] = []
    connect = socket.socket.connect

    def reset_first(sock: socket.socket, place: Any) -> None:
        places.append(place)
        if len(places) == 1:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        connect(sock, place)

    patch.setattr(socket.socket, "connect", reset_first)
    return places


def test_a_keeper_that_resets_while_a_node_connects_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as closed:
        port, who = keepers(closed)
        places = reset_while_connecting(monkeypatch)
        stream.connect("127.0.0.1", port, SECRET, who, read_served, LIMIT_S).close()
        assert places == 2 * [("127.0.0.1", port)]


async def test_a_supervisor_that_resets_while_a_node_connects_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening() as port:
        places = reset_while_connecting(monkeypatch)
        (await channel.connect("127.0.0.1", port, SECRET, read_said, LIMIT_S)).close()
        assert places == 2 * [("127.0.0.1", port)]


# What else strangers do.


def dribble(stranger: socket.socket, greeting: bytes) -> None:
    stranger.send(b"x")


def say_nothing(stranger: socket.socket, greeting: bytes) -> None:
    pass


def half_close(stranger: socket.socket, greeting: bytes) -> None:
    stranger.shutdown(socket.SHUT_WR)


def reflect(stranger: socket.socket, greeting: bytes) -> None:
    stranger.send(greeting[len(MAGIC) :] * 2)


def oversize(stranger: socket.socket, greeting: bytes) -> None:
    stranger.setblocking(False)
    with suppress(BlockingIOError, ConnectionError):
        while True:
            stranger.send(bytes(1 << 16))


def prove_for_another_run(stranger: socket.socket, greeting: bytes) -> None:
    stranger.send(protocol.Handshake.with_server(b"o" * 32, SUPERVISOR, greeting, "there")[1])


def prove_for_another_endpoint(stranger: socket.socket, greeting: bytes) -> None:
    stranger.send(protocol.Handshake.with_server(SECRET, keeper_of("a"), greeting, "there")[1])


@pytest.mark.parametrize(
    "act",
    [dribble, say_nothing, half_close, reflect, oversize, prove_for_another_run, prove_for_another_endpoint],
)
def test_whatever_a_stranger_does_it_ends_soon_and_nothing_follows(
    act: Callable[[socket.socket, bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Handshakes(SECRET, SUPERVISOR)
        server.listen(listener)
        with socket.create_connection(listener.getsockname(), LIMIT_S) as stranger:
            end = time.monotonic() + LIMIT_S
            greeting = b""
            while not server._unproven:
                assert not server.turn()
            greeting = stranger.recv(HELLO_BYTES, socket.MSG_WAITALL)
            act(stranger, greeting)
            while server._unproven:
                assert time.monotonic() < end
                with suppress(OSError):
                    if act is dribble:
                        stranger.send(b"x")
                assert not server.turn()
            stranger.setblocking(True)
            with suppress(ConnectionError):
                assert stranger.recv(4096) == b""
        server.close()


def test_a_proof_is_good_for_one_connection_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Handshakes(SECRET, SUPERVISOR)
        server.listen(listener)
        proofs: list[bytes] = []
        for again in (False, True):
            with socket.create_connection(listener.getsockname(), LIMIT_S) as client:
                while not server._unproven:
                    assert not server.turn()
                greeting = client.recv(HELLO_BYTES, socket.MSG_WAITALL)
                proofs.append(protocol.Handshake.with_server(SECRET, SUPERVISOR, greeting, "there")[1])
                assert len(proofs[0]) == ANSWER_BYTES
                client.send(proofs[0])
                entered: list[Proven] = []
                while server._unproven:
                    entered += server.turn()
                assert len(entered) == (not again)
                for proven in entered:
                    proven.close()
        server.close()


def test_when_no_file_is_left_it_accepts_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "ACCEPT_AGAIN_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Handshakes(SECRET, SUPERVISOR)
        full = [True]

        class Listening(socket.socket):
            def accept(self) -> tuple[socket.socket, Any]:
                if full[0]:
                    raise OSError(24, "Too many open files")
                return super().accept()

        server.listen(Listening(fileno=os.dup(listener.fileno())))
        with socket.create_connection(listener.getsockname(), LIMIT_S) as client:
            server.turn()
            assert not server._unproven
            full[0] = False
            while not server._unproven:
                server.turn()
            assert client.recv(len(MAGIC), socket.MSG_WAITALL) == MAGIC
        server.close()


def test_refusals_are_logged_now_and_then(
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
            monkeypatch.setattr(handshakes, "LOGGED_EVERY_S", 0.0)
            await knock(port, 1)
            _, line = caplog.messages
            assert line.endswith("; 6 more since the last message")

    run(work())


@pytest.mark.parametrize(("hard", "nodes", "enough"), [(512, 10, True), (512, 400, False)])
def test_files_for_all_nodes(hard: int, nodes: int, enough: bool) -> None:
    """In a process of its own: a hard limit never goes up again."""
    code = (
        "import json, resource, sys\n"
        "from jurymast.supervisor.real_io import allow_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))\n"
        f"told = allow_files({nodes})\n"
        "print(json.dumps([told, resource.getrlimit(resource.RLIMIT_NOFILE)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, limits = json.loads(done.stdout)
    assert limits == [hard, hard]
    needed = 2 * nodes + handshakes.STRANGERS_MAX + real_io.OWN_FILES
    assert (
        f"may open {hard} files here, and the supervisor of {nodes} nodes may need {needed}" in told
    ) != enough
    assert (told == "") == enough


FEW_FILES = """
import resource, socket, sys
from jurymast.wire.handshakes import Handshakes
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
listener = socket.create_server(("127.0.0.1", 0), backlog=512)
server = Handshakes(bytes(32), "keeper:n1")
server.listen(listener)
print(listener.getsockname()[1], flush=True)
sys.stdin.readline()
for _ in range(20):
    server.turn()
    open("/dev/null").close()
"""


def test_strangers_take_no_file_from_the_process_that_they_beset() -> None:
    """Where a process may open few files. Then it could not even write down what happened."""
    with ExitStack() as stack:
        server = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", FEW_FILES], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        assert server.stdout is not None
        port = int(server.stdout.readline())
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        _, error = server.communicate("\n", timeout=LIMIT_S)
    assert (server.returncode, error) == (0, "")


def test_where_the_number_of_files_has_no_limit_nobody_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert real_io.allow_files(10**6) == ""
