"""Images on their way between nodes: nobody on that way changes them, or reads them if they are hidden."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing

import pytest

from jurymast.core.state import messages as msg
from jurymast.core.state.images import ImageId
from jurymast.errors import AuthenticationError, ProtocolError
from jurymast.keeper.manifest import RestoreStatus
from jurymast.keeper.transfer import ManifestFollows, connect, manifest_of, read_request, read_served
from jurymast.wire import channel, stream
from jurymast.wire.handshakes import Handshakes
from jurymast.wire.protocol import GCM, GMAC, NONCE_BYTES, TAG_BYTES, Access, Handshake, keeper_of
from jurymast.wire.stream import Stream
from support.keepers import SECRET, FakeRank, holding, image_bytes, keeper, plan, source, until
from support.wire import first_proven

PIECE = 1000
DATA = os.urandom(3 * PIECE + 7)
WAYS = (GMAC, GCM)


def key(way: bytes) -> bytes:
    return way.ljust(32, b"k")


def on_the_wire(way: str, make_key: Callable[[bytes], bytes] = key) -> bytes:
    """What a node sends for `DATA`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Stream(ours, b"a", b"b", make_key, read_served).send_bytes(DATA, way)
        ours.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: theirs.recv(1 << 20), b""))


def received(sent: bytes, way: str) -> bytes:
    """What another node makes of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(sent,))
        sender.start()
        got = bytearray(len(DATA))
        for _ in Stream(ours, b"b", b"a", key, read_served).receive_pieces(memoryview(got), way):
            pass
        sender.join()
        return bytes(got)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PIECE_BYTES", PIECE)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_arrives_and_is_hidden_if_it_is_to_be(way: str) -> None:
    sent = on_the_wire(way)
    assert received(sent, way) == DATA
    assert len(sent) == len(DATA) + 4 * TAG_BYTES
    assert (DATA[:64] in sent) == (way != GCM)


def flipped(sent: bytes) -> bytes:
    return sent[:5] + bytes([sent[5] ^ 1]) + sent[6:]


def flipped_tag(sent: bytes) -> bytes:
    return sent[:PIECE] + bytes([sent[PIECE] ^ 1]) + sent[PIECE + 1 :]


def swapped(sent: bytes) -> bytes:
    """Two pieces, each with its tag."""
    one = PIECE + TAG_BYTES
    return sent[one : 2 * one] + sent[:one] + sent[2 * one :]


def played_again(sent: bytes) -> bytes:
    one = PIECE + TAG_BYTES
    return sent[:one] + sent[:one] + sent[2 * one :]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [flipped, flipped_tag, swapped, played_again])
def test_nothing_can_be_changed_on_the_way(way: str, change: Callable[[bytes], bytes]) -> None:
    """Whatever hash the bytes have that somebody made up."""
    with pytest.raises(AuthenticationError, match="changed in transit"):
        received(change(on_the_wire(way)), way)


@pytest.mark.parametrize("way", WAYS)
def test_what_another_connection_carried_is_refused(way: str) -> None:
    one, other = (Handshake(SECRET, keeper_of("a"), os.urandom(NONCE_BYTES), b"c" * 32) for _ in range(2))
    assert one.made(b"bulk") != other.made(b"bulk")
    with pytest.raises(AuthenticationError):
        received(on_the_wire(way, one.made), way)


@pytest.mark.parametrize("encrypt", [False, True])
async def test_keepers_restore_from_each_other(encrypt: bool) -> None:
    async with holding("a", encrypt=encrypt) as (a, _), keeper("b", encrypt=encrypt) as (new, _):
        new.launch(2, [0], 1, plan(10, 1, {0: [source(a, 0)]}))
        rank = FakeRank(new)
        await until("answer", lambda: rank.answer is not RestoreStatus.PENDING)
        assert rank.restored()[0] == image_bytes(10, 0)


async def test_a_node_that_is_to_hide_images_neither_gives_nor_takes_them_in_the_clear() -> None:
    async with holding("a", encrypt=True) as (a, _), keeper("b") as (new, told):
        new.launch(2, [0], 1, plan(10, 1, {0: [source(a, 0)]}))
        await until("word", lambda: told.of(msg.Unrestorable))
        assert "no common way to protect bytes" in told.of(msg.Unrestorable)[0].why


def test_bytes_that_come_in_another_way_than_was_offered_are_not_taken() -> None:
    """Of a keeper that was started with another policy, say."""

    def serve(listener: socket.socket) -> None:
        handshakes = Handshakes(SECRET, keeper_of("a"))
        handshakes.listen(listener)
        peer = stream.accepted(first_proven(handshakes), read_request)
        peer.receive()
        peer.send(ManifestFollows(length=2, way=GMAC, capacity=0))
        peer.close()
        handshakes.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(listener,), daemon=True)
        serving.start()
        port = listener.getsockname()[1]
        there = msg.Source(tier="peer", node="a", hosts=("127.0.0.1",), port=port, part="all", rank=0)
        access = Access(SECRET, encrypt=True)
        with (
            closing(connect(there, access)) as peer,
            pytest.raises(ProtocolError, match=f"protected by {GMAC}, which was not offered"),
        ):
            manifest_of(peer, access.ways, ImageId(10, 1, 0))
        serving.join(60)


async def test_a_connection_leads_to_whom_it_was_meant_for() -> None:
    """All ends know the secret: who is on the way could lead one to another of them."""

    def elsewhere(port: int) -> None:
        with pytest.raises((AuthenticationError, ConnectionError)):
            stream.connect("127.0.0.1", port, SECRET, keeper_of("b"), read_served)

    async with keeper("a") as (a, _):
        await asyncio.to_thread(elsewhere, a.port)
        with pytest.raises((AuthenticationError, ConnectionError)):
            await channel.connect("127.0.0.1", a.port, SECRET, msg.read_order)
