"""The wire over real sockets: who does not know the secret, or touches a frame on its way, gets nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jurymast.core.state import messages as msg
from jurymast.core.state.messages import Ask, beat_of, read_said
from jurymast.core.state.settings import RunPlan
from jurymast.errors import AuthenticationError, OtherProtocolError, ProtocolError, RunCancelledError
from jurymast.rundir import RunDirectory
from jurymast.wire import channel
from jurymast.wire.channel import Channel, Connection, ConnectionClosed, ask
from jurymast.wire.endpoint import (
    NEWEST,
    PULSE,
    Endpoint,
    announce,
    claim,
    claim_epoch,
    find,
    newest_epoch,
    pulse,
)
from jurymast.wire.handshakes import Handshakes, Proven
from jurymast.wire.protocol import FRAME_BYTES_MAX, MAGIC, NONCE_BYTES, SUPERVISOR, TAG_BYTES
from support.reports import STEPPING
from support.wire import served

SECRET = secrets.token_bytes(32)
LIMIT_S = 90.0
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
PROOF_BYTES = 2 * NONCE_BYTES
HEAD_BYTES = 4 + TAG_BYTES

Result = TypeVar("Result")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def ready(number: int) -> msg.Ready:
    return msg.Ready(store_port=number)


def failed(traceback: str) -> msg.Failed:
    return msg.Failed(attempt=1, rank=0, exit_code=1, traceback=traceback)


def run(work: Awaitable[Result]) -> Result:
    async def limited() -> Result:
        return await asyncio.wait_for(work, LIMIT_S)

    return asyncio.run(limited())


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """Port of a server on the loopback interface; its connections are closed at the end."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.add(asyncio.ensure_future(handler(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def accepting() -> AsyncIterator[tuple[int, asyncio.Future[Channel[msg.Said]]]]:
    """Port of a server that takes one connection, and what accepting it comes to."""
    outcome: asyncio.Future[Channel[msg.Said]] = asyncio.get_running_loop().create_future()

    class Recording(Handshakes):
        def log_refusal(self, address: str, error: Exception) -> None:
            outcome.set_exception(error)

    async def enter(proven: Proven) -> None:
        outcome.set_result(Channel.of(proven, read_said))

    async with served(enter, Recording(SECRET, SUPERVISOR)) as port:
        yield port, outcome


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Channel[msg.Said], Channel[msg.Said]]]:
    """(client, server) over a real connection."""
    async with accepting() as (port, outcome):
        client = await channel.connect("127.0.0.1", port, SECRET, read_said)
        try:
            yield client, await outcome
        finally:
            client.close()


def test_who_takes_nothing_is_given_up_before_memory_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "UNSENT_BYTES_MAX", 1 << 20)

    async def work() -> None:
        async with connected() as (client, server):
            ended = asyncio.ensure_future(client.receive())
            for number in range(1000):
                client.send(Ask(what="x" * 100_000, by="ada", step=number))
                assert len(client._connection._unsent) <= (1 << 20) + 101_000
            with pytest.raises(ConnectionError, match="has not taken 1 MiB"):
                await ended
            await client.drain()  # waits for nobody any more
            assert isinstance(await server.receive(), Ask), "what was on its way arrives"

    with caplog.at_level("WARNING"):
        run(work())
    assert "has not taken 1 MiB" in caplog.text


async def test_messages_come_in_order_and_whole_both_ways() -> None:
    async with connected() as (client, server):
        sent = [Ask(what="é" * n, by="ada", step=n) for n in (0, 1, 70_000)]
        for message in sent:
            client.send(message)
            server.send(ready(message.step or 0))
        assert [await server.receive() for _ in sent] == sent
        assert [await client.receive() for _ in sent] == [ready(n) for n in (0, 1, 70_000)]
        client.close()
        with pytest.raises(ConnectionError):
            await server.receive()


async def test_a_listener_hears_what_was_there_before_it_and_all_that_comes_until_the_end() -> None:
    async with connected() as (client, server):
        heard: list[Any] = []
        client.send(ready(0))
        client.send(ready(1))
        assert await server.receive() == ready(0)
        listening = asyncio.ensure_future(server.listen(heard.append))
        beat = beat_of(3, [STEPPING])
        for message in (ready(2), beat, ready(3)):
            client.send(message)
        client.close()
        assert isinstance(await listening, ConnectionError)
        assert heard == [ready(1), ready(2), beat, ready(3)]


async def test_what_came_before_the_end_is_heard_after_it() -> None:
    async with connected() as (client, server):
        client.send(ready(1))
        client.send(msg.HangsUp())
        client.close()
        await server._connection.end()
        heard: list[Any] = []
        await server.listen(heard.append)
        assert heard == [ready(1), msg.HangsUp()]


KILLED = "os.kill(os.getpid(), 9)"
RESET = "s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close()"


@pytest.mark.parametrize(("end", "closed"), [(KILLED, True), (RESET, False)])
async def test_a_reset_is_told_from_the_end_of_a_process(end: str, closed: bool) -> None:
    code = f"import os, socket, struct, sys; s = socket.create_connection(('127.0.0.1', {{}})); {end}"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        client = await asyncio.create_subprocess_exec(sys.executable, "-c", code.format(port))
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        assert isinstance(await Connection(sock).end(), ConnectionClosed) is closed
        await client.wait()


async def test_text_that_is_no_unicode_arrives_all_the_same() -> None:
    async with connected() as (client, server):
        client.send(failed("no file 'a\udc80b'"))
        assert await server.receive() == failed("no file 'a?b'")


def _sealed(sender: Channel[Any], payload: bytes) -> bytes:
    return sender._frames.seal(payload)


async def test_what_a_listener_raises_ends_the_connection_and_is_not_lost() -> None:
    async with connected() as (client, server):
        no_kinds: dict[msg.Said, None] = {}
        client.send(ready(1))
        with pytest.raises(KeyError):
            await server.listen(lambda message: no_kinds[message])
        with pytest.raises(ConnectionError):
            await client.receive()


async def test_an_answer_to_somebody_who_is_gone_breaks_nothing() -> None:
    async with connected() as (client, server):
        resets = struct.pack("ii", 1, 0)
        client._connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, resets)
        client._connection.abort()
        with pytest.raises(ConnectionResetError):
            await server.receive()
        server.send(msg.Accepted())
        await server.drain()


async def test_a_client_with_another_secret_is_refused() -> None:
    async with accepting() as (port, outcome):
        with pytest.raises(ConnectionError):
            await channel.connect("127.0.0.1", port, secrets.token_bytes(32), read_said)
        with pytest.raises(AuthenticationError):
            await outcome


async def test_a_search_that_is_given_up_leaves_no_connection_open() -> None:
    """At whatever moment: the other side would wait for a greeting."""

    there: set[Proven] = set()

    async def serve(proven: Proven) -> None:
        there.add(proven)
        entered = Channel.of(proven, read_said)
        with contextlib.suppress(OSError, AuthenticationError):
            await entered.receive()
        there.discard(proven)
        entered.close()

    handshakes = Handshakes(SECRET, SUPERVISOR)
    async with served(serve, handshakes) as port:
        for turns in range(200):
            ways = [("127.0.0.1", port), ("127.0.0.1", port)]
            search = asyncio.ensure_future(channel.connect_any(ways, SECRET, read_said, LIMIT_S))
            for _ in range(turns % 40):
                await asyncio.sleep(0)
            search.cancel()
            (found,) = await asyncio.gather(search, return_exceptions=True)
            if isinstance(found, Channel):
                found.close()
            while there or handshakes._unproven:
                await asyncio.sleep(0.001)


async def _answer_with_noise(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(MAGIC + secrets.token_bytes(NONCE_BYTES))
    await reader.readexactly(PROOF_BYTES)
    writer.write(secrets.token_bytes(NONCE_BYTES))


async def _reflect_the_proof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Gives the client its own proof back, as if it were the server's."""
    writer.write(MAGIC + secrets.token_bytes(NONCE_BYTES))
    writer.write((await reader.readexactly(PROOF_BYTES))[NONCE_BYTES:])


@pytest.mark.parametrize("imposter", [_answer_with_noise, _reflect_the_proof])
async def test_a_server_without_the_secret_is_refused(imposter: Handler) -> None:
    async with listening(imposter) as port:
        with pytest.raises(AuthenticationError):
            await channel.connect("127.0.0.1", port, SECRET, read_said)


async def test_a_server_of_another_kind_is_refused() -> None:
    async def web_server(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    async with listening(web_server) as port:
        with pytest.raises(ProtocolError):
            await channel.connect("127.0.0.1", port, SECRET, read_said)


@pytest.mark.parametrize("number", [b"1", b"6", b"99", b"123456"])
async def test_a_server_of_another_version_is_named(number: bytes) -> None:
    async def other(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"jurymast/" + number + b"\n" + secrets.token_bytes(NONCE_BYTES))

    spoken = MAGIC.decode().strip()
    told = f"speaks jurymast/{number.decode()}, and this jurymast {spoken}"
    async with listening(other) as port:
        with pytest.raises(OtherProtocolError, match=told):
            await channel.connect("127.0.0.1", port, SECRET, read_said)


async def _say_nothing(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    pass


async def _say_hello_only(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(MAGIC + secrets.token_bytes(NONCE_BYTES))


@pytest.mark.parametrize("silent", [_say_nothing, _say_hello_only])
async def test_connecting_to_a_server_that_falls_silent_ends_in_time(silent: Handler) -> None:
    async with listening(silent) as port:
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await channel.connect("127.0.0.1", port, SECRET, read_said, limit_s=0.2)
        assert time.monotonic() - began > 0.19


# A man in the middle, who sees and may change everything that goes to the server.

Frames = list[bytes]


def flip_payload(frames: Frames) -> Frames:
    return [frames[0][:-2] + bytes([frames[0][-2] ^ 1]) + frames[0][-1:], *frames[1:]]


def flip_tag(frames: Frames) -> Frames:
    return [frames[0][:4] + bytes([frames[0][4] ^ 128]) + frames[0][5:], *frames[1:]]


def shorten(frames: Frames) -> Frames:
    length = len(frames[0]) - HEAD_BYTES - 1
    return [struct.pack(">I", length) + frames[0][4:-1], *frames[1:]]


def forge(frames: Frames) -> Frames:
    payload = b'{"do":"leave"}'
    return [struct.pack(">I", len(payload)) + secrets.token_bytes(TAG_BYTES) + payload, *frames]


def leave_out(frames: Frames) -> Frames:
    return frames[1:]


def swap(frames: Frames) -> Frames:
    return [frames[1], frames[0], *frames[2:]]


@asynccontextmanager
async def man_in_the_middle(port: int, change: Callable[[Frames], Frames], count: int) -> AsyncIterator[int]:
    """Port that leads to `port`: the handshake passes untouched, then `count` frames are held and changed."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(await server_reader.readexactly(HELLO_BYTES))
            server_writer.write(await reader.readexactly(PROOF_BYTES))
            writer.write(await server_reader.readexactly(NONCE_BYTES))
            frames = []
            for _ in range(count):
                head = await reader.readexactly(HEAD_BYTES)
                frames.append(head + await reader.readexactly(struct.unpack(">I", head[:4])[0]))
            server_writer.write(b"".join(change(frames)))
            await asyncio.Event().wait()
        finally:
            server_writer.close()

    async with listening(relay) as own_port:
        yield own_port


@pytest.mark.parametrize("change", [flip_payload, flip_tag, shorten, forge, leave_out, swap])
async def test_a_changed_frame_ends_the_connection(change: Callable[[Frames], Frames]) -> None:
    async with accepting() as (port, outcome), man_in_the_middle(port, change, 3) as relayed:
        client = await channel.connect("127.0.0.1", relayed, SECRET, read_said)
        for n in range(3):
            client.send(ready(n))
        accepted = await outcome
        with pytest.raises(AuthenticationError):
            await accepted.receive()
        client.close()


async def test_a_repeated_frame_ends_the_connection() -> None:
    async with accepting() as (port, outcome), man_in_the_middle(port, lambda f: f * 2, 1) as relayed:
        client = await channel.connect("127.0.0.1", relayed, SECRET, read_said)
        client.send(ready(1))
        accepted = await outcome
        assert await accepted.receive() == ready(1)
        with pytest.raises(AuthenticationError):
            await accepted.receive()
        client.close()


async def test_a_frame_sent_back_to_its_sender_is_refused() -> None:
    async with accepting() as (port, outcome):
        client = await channel.connect("127.0.0.1", port, SECRET, read_said)
        client.send(ready(1))
        mirror = (await outcome)._connection
        mirror.write(await mirror.exactly(HEAD_BYTES + len(msg.encode(ready(1)))))
        with pytest.raises(AuthenticationError):
            await client.receive()
        client.close()


async def test_a_recorded_connection_cannot_be_played_again() -> None:
    recorded: list[bytes] = []

    async with accepting() as (port, _):

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(await server_reader.readexactly(HELLO_BYTES))
            recorded.append(await reader.readexactly(PROOF_BYTES))
            server_writer.write(recorded[0])
            writer.write(await server_reader.readexactly(NONCE_BYTES))
            recorded.append(await reader.readexactly(HEAD_BYTES + len(msg.encode(ready(1)))))
            server_writer.close()

        async with listening(record) as recording:
            client = await channel.connect("127.0.0.1", recording, SECRET, read_said)
            client.send(ready(1))
            while len(recorded) < 2:
                await asyncio.sleep(0.01)
            client.close()
    async with accepting() as (port, second):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"".join(recorded))
        with pytest.raises(AuthenticationError):
            await second
        writer.close()


async def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    async with accepting() as (port, outcome):
        client = await channel.connect("127.0.0.1", port, SECRET, read_said)
        client._connection.write(struct.pack(">I", FRAME_BYTES_MAX + 1) + bytes(TAG_BYTES))
        accepted = await outcome
        with pytest.raises(ProtocolError):
            await accepted.receive()
        client.close()


# A supervisor's port, as anybody on the network finds it.


@contextmanager
def supervised(folder: Path) -> Iterator[tuple[RunDirectory, Endpoint]]:
    """A run on the local cluster, as soon as its supervisor listens; cancelled at the end."""
    directory = RunDirectory(folder / "run")
    directory.create()
    script = folder / "wait.py"
    script.write_text("import threading; threading.Event().wait()")
    directory.save_plan(
        RunPlan(
            run="wire", name="wire", directory=str(directory.root), cluster="local", active=1, spares=0,
            ranks_per_node=1, script=str(script), working_directory=str(folder),
            python=sys.executable, submitted_at=time.time(),
        )
    )  # fmt: skip
    command = [sys.executable, "-m", "jurymast.cluster.batch", str(directory.root)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as batch:
        try:
            yield directory, _announced(directory)
            assert ask(directory, "cancel", by="the test") == msg.Accepted()
            assert batch.wait(LIMIT_S) == RunCancelledError.exit_code
        finally:
            if batch.poll() is None:
                batch.terminate()


def _announced(directory: RunDirectory) -> Endpoint:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found = find(directory.epochs)
        if found is not None:
            return found
    raise AssertionError("the supervisor did not announce itself")


def _garbage() -> Iterator[bytes]:
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield bytes(PROOF_BYTES)
    yield b"\xff" * 1_000_000
    yield secrets.token_bytes(PROOF_BYTES - 1)
    yield json.dumps({"say": "ask", "what": "cancel"}).encode() * 10


def test_a_supervisor_survives_garbage_and_hangs_up_on_silence(tmp_path: Path) -> None:
    with supervised(tmp_path) as (_, place):
        where = (place.hosts[0], place.port)
        silent = [socket.create_connection(where, timeout=LIMIT_S) for _ in range(50)]
        for noise in _garbage():
            with socket.create_connection(where, timeout=LIMIT_S) as connection:
                try:
                    connection.sendall(noise)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                except TimeoutError:
                    raise
                except OSError:  # it hung up before all was said
                    pass
        for connection in silent:
            with connection:
                assert connection.recv(HELLO_BYTES).startswith(MAGIC)
                assert connection.recv(1) == b""


def test_a_supervisor_survives_an_agent_that_talks_nonsense(tmp_path: Path) -> None:
    nonsense = [
        b"", b"{}", b'{"say": ["ask"]}', b'{"say": "ask", "what": 7}', b'{"say": "hello"}',
        b'{"do": "leave"}', b'{"say": "hello", "node": 1}', b"[1]", b"\xff", b'["beat", 1, []]',
        b'{"say": "ready", "store_port": 1}',
    ]  # fmt: skip

    async def talk(place: Endpoint, secret: bytes) -> None:
        for payload in nonsense:
            connection = await channel.connect(place.hosts[0], place.port, secret, msg.read_order)
            connection._connection.write(_sealed(connection, payload))
            with pytest.raises(ConnectionError):  # hung up on: what follows is asked of one that lives
                await connection.receive()
            connection.close()

    with supervised(tmp_path) as (directory, place):
        run(talk(place, directory.secret()))


# Epochs: the fence between two supervisors.


def test_two_claimants_never_get_the_same_epoch(tmp_path: Path) -> None:
    code = "from jurymast.wire.endpoint import claim_epoch as c, Path; import sys\n"
    code += "for _ in range(50): print(c(Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    claimants = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    epochs = [int(word) for claimant in claimants for word in claimant.communicate(timeout=120)[0].split()]
    assert sorted(epochs) == list(range(1, 201))
    assert newest_epoch(tmp_path) == 200
    assert claim_epoch(tmp_path) == 201


def test_one_successor_alone_gets_the_epoch_after_the_last(tmp_path: Path) -> None:
    assert claim_epoch(tmp_path) == 1
    assert claim(tmp_path, 2)
    assert not claim(tmp_path, 2)
    assert newest_epoch(tmp_path) == 2


def test_a_pulse_is_never_read_in_the_midst_of_being_written(tmp_path: Path) -> None:
    assert claim_epoch(tmp_path) == 1
    pulse(tmp_path, 1, 0)

    def beat() -> None:
        for count in range(1, 20_000):
            pulse(tmp_path, 1, count)

    beats = threading.Thread(target=beat)
    beats.start()
    read = set()
    while beats.is_alive():
        read.add((tmp_path / PULSE).read_text())
    beats.join()
    assert all(text.startswith("1:") for text in read)


def test_the_newest_endpoint_that_can_be_read_is_found(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    places = [Endpoint(epoch, ("10.0.0.1", "n1"), 4000 + epoch, "n1", "7.0", 99) for epoch in (1, 2, 3)]
    for place in places:
        announce(tmp_path, place)
    assert find(tmp_path) == places[2]
    for name in ("000003.json", NEWEST):
        (tmp_path / name).write_bytes(b'{"epoch": 3, "hos')
    assert find(tmp_path) == places[1]
    assert (tmp_path / "000001.json").stat().st_mode & 0o777 == 0o600
