"""Images between nodes, over real sockets: what dies, lies or does not know the secret costs no bit of it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from jurymast.core.state import messages as msg
from jurymast.core.state.images import ImageId
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper import transfer
from jurymast.keeper.copies import CopyTable
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.manifest import RestoreStatus, Word
from jurymast.keeper.transfer import (
    GetBytes,
    GetManifest,
    ImageFetch,
    ImageName,
    NotServed,
    Served,
    read_served,
)
from jurymast.wire import handshakes, protocol, stream
from jurymast.wire.protocol import GMAC, Shield, keeper_of
from support.keepers import (
    ACCESS,
    BLOCK,
    COMMON_BYTES,
    SECRET,
    SIZE,
    FakeRank,
    flip,
    holding,
    image_bytes,
    keeper,
    plan,
    ready_rank,
    run,
    saved,
    settled,
    source,
    until,
    use_small_blocks,
)
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
KEY = ImageId(10, 1, 0)
PIECE = 1 << 16
LIMIT_S = 90.0


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


async def restored(one: Keeper, sources: list[msg.Source], rank: int = 0, world: int = 1) -> FakeRank:
    """Launch attempt 2 from step 10, and wait for the answer."""
    one.launch(2, [rank], world, plan(10, 1, {rank: sources}))
    local = FakeRank(one)
    await until("answer", lambda: local.answer is not RestoreStatus.PENDING)
    return local


async def test_a_new_node_restores_from_a_peer() -> None:
    async with holding("a") as (old, _), keeper("b") as (new, told):
        rank = await restored(new, [source(old, 0)])
        data, manifest = rank.restored()
        assert data == image_bytes(10, 0)
        assert manifest.with_blocks(memoryview(data)) == manifest
        assert told.held() == [(10, 1, 0, "memory", "all")]
        (word,) = told.of(msg.Prefetched)
        assert word.tiers == {"peer": SIZE}
        assert word.passed_over == ()
        capacity = old.copies.find(KEY)[0].capacity
        assert new.copies.find(KEY)[0].capacity == capacity  # so it need not be replaced for a save


async def test_the_common_part_may_come_from_another_rank() -> None:
    async with holding("a", 0, 2) as (a, _), holding("b", 1, 2) as (b, _), keeper("c") as (c, told):
        sources = [source(b, 1, "common"), source(a, 0, "own"), source(a, 0)]
        rank = await restored(c, sources, world=2)
        assert rank.restored()[0] == image_bytes(10, 0)
        assert told.of(msg.Prefetched)[0].passed_over == ()


async def test_another_common_part_is_not_taken_for_ours() -> None:
    async with holding("a", 0, 2) as (a, _), keeper("b") as (b, _), keeper("c") as (c, told):
        b.launch(1, [1], 2, None)
        await saved(b, await ready_rank(b), 10, 1, world=2, data=b"x" * SIZE)
        sources = [source(b, 1, "common"), source(a, 0)]
        rank = await restored(c, sources, world=2)
        assert rank.restored()[0] == image_bytes(10, 0)
        assert "corrupt" in told.of(msg.Prefetched)[0].passed_over[0]


@contextmanager
def serving_process(stop_after: int, block: int = BLOCK) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process that serves the image of step 10, rank 0; with its port."""
    command = [sys.executable, str(ROOT / "tests/scripts/keeper_serving.py"), "10", "0", "1"]
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "launcher")])
    process = subprocess.Popen(
        [*command, str(block), str(stop_after)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_between_two_processes() -> None:
    async def work(port: int) -> None:
        async with keeper("b") as (new, _):
            rank = await restored(new, [source(new, 0, node="served", port=port)])
            assert rank.restored()[0] == image_bytes(10, 0)

    with serving_process(0) as (_, port):
        run(work(port))


@pytest.mark.parametrize("other", [True, False])
def test_a_source_that_is_killed_half_way(other: bool) -> None:
    """What it has sent whole counts, the rest comes from the next; without a next there is nothing."""

    async def work(process: subprocess.Popen[bytes], port: int) -> None:
        async with holding("a") as (a, _), keeper("b") as (new, told):
            sources = [source(new, 0, node="served", port=port)]
            if other:
                sources.append(source(a, 0))
            new.launch(2, [0], 1, plan(10, 1, {0: sources}))
            rank = FakeRank(new)
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == b"stopped\n"
            assert rank.record[Word.RESTORE] == RestoreStatus.PENDING
            process.send_signal(signal.SIGKILL)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING, 9.0)
            if other:
                assert rank.restored()[0] == image_bytes(10, 0)
                (word,) = told.of(msg.Prefetched)
                assert word.tiers == {"peer": SIZE}
                assert word.passed_over[0].startswith("served: ")
            else:
                assert rank.answer is RestoreStatus.FAILED
                assert rank.writable() == []
                assert new.inventory() == ()
                assert told.of(msg.Unrestorable)[0].why.startswith("served: ")

    with serving_process(3) as (process, port):
        run(work(process, port))


def test_a_source_that_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power loss: no reset comes."""
    monkeypatch.setattr(stream, "SILENT_LIMIT_S", 0.3)

    async def work(port: int) -> None:
        async with holding("a") as (a, _), keeper("b") as (new, told):
            rank = await restored(new, [source(new, 0, node="served", port=port), source(a, 0)])
            assert rank.restored()[0] == image_bytes(10, 0)
            assert "no byte for" in told.of(msg.Prefetched)[0].passed_over[0]

    with serving_process(3) as (_, port):
        run(work(port))


async def test_a_bit_that_flips_in_a_peer_is_found_there_as_well() -> None:
    async with holding("a") as (a, told_a), holding("c") as (c, _), keeper("b") as (new, told):
        flip(a, KEY, SIZE - 5)
        rank = await restored(new, [source(a, 0), source(c, 0)])
        assert rank.restored()[0] == image_bytes(10, 0)
        assert "own part is corrupt" in told.of(msg.Prefetched)[0].passed_over[0]
        (word,) = await until("word of the bad copy", lambda: told_a.of(msg.Dropped))
        assert "corrupt in memory" in word.why
        assert a.inventory() == ()


async def test_own_memory_with_a_flipped_bit_is_made_whole_by_a_peer() -> None:
    async with holding("a") as (a, told), holding("c") as (c, _):
        flip(a, KEY, 2 * BLOCK)
        rank = await restored(a, [source(a, 0, tier="memory"), source(c, 0)])
        assert rank.restored()[0] == image_bytes(10, 0)
        (word,) = told.of(msg.Prefetched)
        assert word.tiers == {"memory": SIZE - BLOCK, "peer": BLOCK}
        assert word.passed_over[0] == "a, memory: blocks are corrupt"
        assert len(told.of(msg.Dropped)) == 1
        assert told.held()[-1] == (10, 1, 0, "memory", "all")
        assert len(a.inventory()) == 1


async def test_who_does_not_know_the_secret_gets_nothing() -> None:
    async with holding("a") as (a, _), keeper("b", secret=b"x" * 32) as (stranger, told):
        rank = await restored(stranger, [source(a, 0)])
        assert rank.answer is RestoreStatus.FAILED
        assert len(told.of(msg.Unrestorable)) == 1


def test_strangers_who_say_nothing_hold_no_threads_and_keep_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshakes, "STRANGERS_MAX", 4)
    monkeypatch.setattr(protocol, "HANDSHAKE_LIMIT_S", 10 * LIMIT_S)
    with serving() as server, ExitStack() as closed:
        threads = threading.active_count()

        def strangers() -> list[socket.socket]:
            where = ("127.0.0.1", server.port)
            return [closed.enter_context(socket.create_connection(where, LIMIT_S)) for _ in range(10)]

        for stranger in strangers()[:6]:
            _until_the_server_hangs_up(stranger)
        assert threading.active_count() == threads
        peer = stream.connect("127.0.0.1", server.port, SECRET, keeper_of("a"), read_served, LIMIT_S)
        closed.callback(peer.close)
        for _ in range(2):
            peer.send(GetManifest(image=ImageName(step=1, attempt=1, rank=0)))
            assert isinstance(peer.receive(), NotServed)
            for stranger in strangers()[:6]:
                _until_the_server_hangs_up(stranger)
        peer.send(GetManifest(image=ImageName(step=1, attempt=1, rank=0)))
        assert isinstance(peer.receive(), NotServed)


@contextmanager
def serving() -> Iterator[transfer.ImageServer]:
    server = transfer.ImageServer(CopyTable(), ACCESS, "a", lambda copy: None)
    server.listen_at("127.0.0.1")
    try:
        yield server
    finally:
        server.close()


def _until_the_server_hangs_up(stranger: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass


def test_a_keeper_that_may_start_no_thread_for_a_while_is_heard_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start
    refused: list[str] = []

    def start_if_allowed(self: threading.Thread) -> None:
        if self.name == "keeper-serve" and len(refused) < 3:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_if_allowed)
    with serving() as server:
        for _ in range(3):
            turned_away = stream.connect("127.0.0.1", server.port, SECRET, keeper_of("a"), read_served)
            with pytest.raises(ConnectionError):
                turned_away.receive()
            turned_away.close()
        peer = stream.connect("127.0.0.1", server.port, SECRET, keeper_of("a"), read_served, LIMIT_S)
        peer.send(GetManifest(image=ImageName(step=1, attempt=1, rank=0)))
        assert isinstance(peer.receive(), NotServed)
        peer.close()


async def test_what_is_no_request_is_answered_so_and_ends_nothing() -> None:
    async with holding("a") as (a, _):
        await asyncio.to_thread(ask_nonsense, a.port)


def ask_nonsense(port: int) -> None:
    connection = stream.connect("127.0.0.1", port, SECRET, keeper_of("a"), read_served)
    connection.send(msg.Dismiss())
    assert refusal(connection).startswith("not a request: dismiss: ")
    for at, length in ((0, SIZE + 1), (SIZE, 1), (-1, 5), (3, -1)):
        connection.send(
            GetBytes(image=ImageName(step=10, attempt=1, rank=0), at=at, length=length, ways=(GMAC,))
        )
        assert refusal(connection) == "not held"
    connection.send(GetManifest(image=ImageName(step=10, attempt=2, rank=0), ways=(GMAC,)))
    assert refusal(connection) == "not held"
    connection.close()


def refusal(connection: stream.Stream[Served]) -> str:
    answer = connection.receive()
    assert isinstance(answer, NotServed)
    return answer.why


def key(way: bytes) -> bytes:
    """Of bytes that are protected in this way."""
    return way.ljust(32, b"k")


def test_a_frame_that_was_touched_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = stream.Stream(ours, b"a", b"b", key, read_served)
        sender.send(NotServed(why="not here"))
        data = bytearray(theirs.recv(1000))
        data[-3] ^= 1
        ours.sendall(data)
        with pytest.raises(AuthenticationError):
            stream.Stream(theirs, b"b", b"a", key, read_served).receive()
        ours.sendall(b"\xff" * 20)
        with pytest.raises(ProtocolError):
            stream.Stream(theirs, b"b", b"a", key, read_served).receive()


@pytest.mark.parametrize("size", [1, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 3 * PIECE + 7])
@pytest.mark.parametrize("first", [0, PIECE - 5])
def test_the_last_bytes_do_not_wait_for_more_to_come(
    size: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", PIECE)
    data, first = os.urandom(size), min(first, size - 1)
    covering = Shield(GMAC, key(GMAC.encode()))
    covered = [covering.cover(memoryview(data)[at : at + PIECE]) for at in range(0, size, PIECE)]
    sent = b"".join(bytes(part) for pair in covered for part in pair)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    got = bytearray(size)
    pieces: list[int] = []

    def receive() -> None:
        receiver = stream.Stream(theirs, b"", b"", key, read_served)
        pieces.extend(map(len, receiver.receive_pieces(memoryview(got), GMAC)))

    with ours, theirs:
        ours.sendall(sent[:first])
        wait_until("first bytes", lambda: waiting_bytes(theirs) == first)
        receiving = threading.Thread(target=receive, daemon=True)
        receiving.start()
        wait_until("first bytes taken", lambda: not waiting_bytes(theirs))
        ours.sendall(sent[first:])
        receiving.join(stream.SILENT_LIMIT_S / 2)
        assert not receiving.is_alive()
    assert bytes(got) == data
    assert pieces == [min(PIECE, size - at) for at in range(0, size, PIECE)]


def waiting_bytes(connection: socket.socket) -> int:
    """How much has arrived and was not read."""
    return int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)


def order(part: str, *sources: msg.Source, step: int = 10, rank: int = 0) -> msg.Replicate:
    return msg.Replicate(step=step, attempt=1, rank=rank, part=part, sources=sources)


async def test_replicas_of_parts_and_a_spare_that_becomes_the_node() -> None:
    """The spare holds the own part only, in place: to restore, just the common part travels."""

    async with holding("a", 0, 2) as (a, _), holding("b", 1, 2) as (b, _), keeper("s") as (spare, told):
        spare.obey(order("own", source(a, 0)))
        spare.obey(order("own", source(a, 0)))  # said twice
        await until("replica", lambda: told.held() == [(10, 1, 0, "peer", "own")])
        (copy,) = spare.inventory()
        assert copy.on("s").part_bytes == SIZE - COMMON_BYTES
        assert copy.common_id == a.inventory()[0].common_id == b.inventory()[0].common_id
        buffer = spare.copies.find(KEY)[0].place
        await a.close()  # the node is lost
        rank = await restored(spare, [source(spare, 0, "own"), source(b, 1, "common")], world=2)
        assert rank.restored()[0] == image_bytes(10, 0)
        assert told.of(msg.Prefetched)[0].tiers == {"memory": SIZE - COMMON_BYTES, "peer": COMMON_BYTES}
        (copy,) = spare.inventory()
        assert (copy.tier, copy.part) == ("memory", "all")
        assert spare.copies.find(KEY)[0].place is buffer
        assert told.of(msg.Dropped)[0].why == ""


async def test_a_whole_replica_becomes_a_slot_without_a_copy() -> None:
    async with holding("a") as (a, _), keeper("s") as (spare, told):
        spare.obey(order("all", source(a, 0)))
        await until("replica", lambda: told.held() == [(10, 1, 0, "peer", "all")])
        buffer = spare.copies.find(KEY)[0].place
        await a.close()
        rank = await restored(spare, [source(spare, 0)])
        assert rank.restored()[0] == image_bytes(10, 0)
        assert spare.copies.find(KEY)[0].place is buffer
        assert told.of(msg.Prefetched)[0].tiers == {"memory": SIZE}
        again = await ready_rank_again(spare)
        await saved(spare, again, 20, attempt=2)


async def ready_rank_again(one: Keeper) -> FakeRank:
    rank = FakeRank(one)
    rank.want(SIZE + 4096)
    one.look()
    await until("a slot", rank.writable)
    return rank


async def test_an_older_replica_stays_until_the_newer_is_whole_and_safe() -> None:
    async with holding("a") as (a, _), keeper("s") as (spare, told):
        spare.obey(order("all", source(a, 0)))
        await until("replica", told.held)
        first = spare.copies.find(KEY)[0].place
        bad = order("all", source(a, 0, port=1), step=20)
        spare.obey(bad)
        await until("word", lambda: told.of(msg.Unreplicated))
        assert "a: " in told.of(msg.Unreplicated)[0].why
        assert [copy.step for copy in spare.inventory()] == [10]
        rank = await ready_rank_again(a)
        await saved(a, rank, 20)
        spare.obey(order("all", source(a, 0), step=20))
        await until("two", lambda: len(spare.inventory()) == 2)
        spare.obey(msg.Committed(step=20, attempt=1))
        assert [copy.step for copy in spare.inventory()] == [20]
        await saved(a, await freed(a, rank), 30)
        spare.obey(order("all", source(a, 0), step=30))
        await until("third", lambda: spare.copies.find(ImageId(30, 1, 0)))
        assert spare.copies.find(ImageId(30, 1, 0))[0].place is first  # its memory is used again
        spare.obey(msg.Void(step=30, attempt=1))
        assert [copy.step for copy in spare.inventory()] == [20]


async def freed(one: Keeper, rank: FakeRank) -> FakeRank:
    one.obey(msg.Committed(step=20, attempt=1))
    await until("a slot", rank.writable)
    return rank


def test_a_replica_that_nobody_wants_any_more_is_given_up() -> None:
    async def work(process: subprocess.Popen[bytes], port: int) -> None:
        async with keeper("s") as (spare, told):
            spare.obey(order("all", source(spare, 0, node="served", port=port)))
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            spare.obey(msg.Void(step=10, attempt=1))
            process.kill()
            await settled(spare)
            assert told == []
            assert spare.inventory() == ()

    with serving_process(3) as (process, port):
        run(work(process, port))


def test_a_newer_attempt_takes_over_from_a_restore_under_way() -> None:
    async def work(process: subprocess.Popen[bytes], port: int) -> None:
        async with holding("a") as (a, _), keeper("b") as (new, told):
            new.launch(2, [0], 1, plan(10, 1, {0: [source(new, 0, node="served", port=port)]}))
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
            new.launch(3, [0], 1, plan(10, 1, {0: [source(a, 0)]}))
            rank = FakeRank(new)
            await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
            assert rank.restored()[0] == image_bytes(10, 0)
            process.kill()
            await settled(new)
            assert rank.restored()[0] == image_bytes(10, 0)
            assert len(told.of(msg.Prefetched)) == 1
            assert told.of(msg.Unrestorable) == []

    with serving_process(3) as (process, port):
        run(work(process, port))


async def test_an_image_stays_for_the_node_that_has_its_rank_now() -> None:
    """Two nodes have changed ranks; the one that is done first still has what the other fetches."""

    async with keeper("a") as (a, told), keeper("b") as (b, _):
        for one, number in ((a, 0), (b, 1)):
            one.launch(1, [number], 2, None)
            await saved(one, await ready_rank(one), 10, number, world=2)
        a.launch(2, [1], 2, plan(10, 1, {1: [source(b, 1)]}))
        first = FakeRank(a)
        await until("the first", lambda: first.answer is not RestoreStatus.PENDING)
        assert first.restored()[0] == image_bytes(10, 1)
        await settled(a)
        assert told.of(msg.Dropped) == []
        b.launch(2, [0], 2, plan(10, 1, {0: [source(a, 0)]}))
        second = FakeRank(b)
        await until("the second", lambda: second.answer is not RestoreStatus.PENDING)
        assert second.restored()[0] == image_bytes(10, 0)


async def test_an_image_that_is_sent_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is given up while somebody reads it: the rank gets it back only afterwards."""
    gate, begun = threading.Event(), threading.Event()
    send_from = transfer._send_from

    def wait_and_send(*what: Any) -> None:
        begun.set()
        assert gate.wait(120.0)
        send_from(*what)

    monkeypatch.setattr(transfer, "_send_from", wait_and_send)

    async with keeper("a") as (a, _), keeper("s") as (spare, told):
        a.launch(1, [0], 1, None)
        rank = await ready_rank(a)
        first = await saved(a, rank, 10)
        spare.obey(order("all", source(a, 0)))
        await asyncio.to_thread(begun.wait, 20.0)
        await saved(a, rank, 20)
        a.obey(msg.Committed(step=20, attempt=1))
        assert rank.writable() == []
        gate.set()
        await until("slot", lambda: rank.writable() == [first])
        # Only what was being sent was sent: the rest is not held any more.
        await until("word", lambda: told.of(msg.Unreplicated))
        assert "not held" in told.of(msg.Unreplicated)[0].why
        assert spare.inventory() == ()


async def test_a_block_counts_only_when_it_is_whole() -> None:
    """Whoever sends it."""

    async with holding("a") as (a, _):
        manifest = a.copies.find(KEY)[0].manifest
        buffer = await a.borrow(SIZE, "a test")
        assert buffer is not None
        filling = ImageFetch(manifest, buffer)
        there = source(a, 1)
        await a.gathering.from_keeper(filling, there, ImageId(10, 1, 1))
        assert not filling.complete
        assert filling.got == {}
        assert "not held" in filling.passed_over[0]
        hosts = ("127.0.0.2:0", "127.0.0.1")  # the first is no address
        there = source(a, 1, hosts=hosts)
        await a.gathering.from_keeper(filling, there, KEY)
        assert filling.complete
        a.give_back(buffer)
