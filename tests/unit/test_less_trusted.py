"""What a rank says to its agent, and one node to another, may be anything: a rank's memory is the user's, and
may be broken. None of it ends, fills or misleads who hears it. `docs/security.md` lists the attacks."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pytest

from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.core.nodes.health import FINDINGS_OF_NODE, NEWS_AT_ONCE, NodeHealth
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Record
from jurymast.core.state.findings import MESSAGE_MAX, Finding, Verdict
from jurymast.core.state.images import ImageId
from jurymast.core.state.message import KINDS_COUNTED, Strangers, Unreadable
from jurymast.health.child import ProbeChild
from jurymast.health.probe import Context
from jurymast.health.watcher import UNREADABLE, ProbeWatcher
from jurymast.keeper.copies import trusted
from jurymast.keeper.manifest import BadImage, Manifest, create_page, room_of
from jurymast.keeper.memory import MappedBuffer
from jurymast.keeper.real_io import RealKeeperIo
from jurymast.wire.channel import Channel, connect
from jurymast.wire.handshakes import Proven
from jurymast.wire.protocol import FRAME_BYTES_MAX
from jurymast.worker.link import (
    EVENT_BYTES_MAX,
    SLOT,
    SLOT_BYTES,
    TIMED,
    TIMED_OFFSET,
)
from support.wire import served

NAN, INF = math.nan, math.inf


# ---- the page of heartbeats

PAGE: dict[str, dict[str, Any]] = {
    "the newest step ended at no time": {"beat_at": NAN},
    "the newest step ends long after now": {"beat_at": INF},
    "the longest step has no end": {"longest_s": INF},
    "the longest step takes no number of seconds": {"longest_s": NAN},
    "the phase began before all time": {"phase_at": -INF},
    "negative durations": {"longest_s": -5.0, "beat_at": -1e300, "phase_at": -1.0},
    "parts of steps that are no numbers": {"timed": (-1, NAN, INF, -INF)},
    "all processes of the user in place of one": {"pid": -1},
    "a process that no kernel has": {"pid": 2**62},
    "a phase that there is not": {"phase": 15},
    "a negative phase": {"phase": -(2**63)},
    "the smallest step": {"step": -(2**63), "beats": -(2**63)},
    "the largest step": {"step": 2**63 - 1, "beats": 2**63 - 1},
    "ones alone": {"raw": b"\xff" * SLOT_BYTES},
    "noise": {"raw": random.Random(7).randbytes(SLOT_BYTES)},
}


@pytest.mark.parametrize("attack", PAGE)
def test_whatever_a_rank_writes_into_the_page_its_node_is_heard(attack: str) -> None:
    values = {
        "step": 1, "beats": 1, "pid": os.getpid(), "phase": 1, "beat_at": 1.0, "longest_s": 1.0,
        "phase_at": 1.0, "timed": (1, 0.0, 0.0, 0.0), **PAGE[attack],
    }  # fmt: skip
    memory = RankMemory(2)
    watch = RankWatch(memory)
    for offset in (0, SLOT_BYTES):
        words = [
            values[name] for name in ("step", "beats", "pid", "phase", "beat_at", "longest_s", "phase_at")
        ]
        SLOT.pack_into(memory.page, offset, *words)
        TIMED.pack_into(memory.page, offset + TIMED_OFFSET, *values["timed"])
    if raw := values.get("raw"):
        memory.page[:SLOT_BYTES] = raw
    started = [os.getpid(), os.getpid()]
    heard = msg.read_said(msg.encode(msg.beat_of(1, watch.look(started), None, watch.times())))
    assert isinstance(heard, msg.Beat), heard
    assert all(report.longest_s >= 0 for report in heard.ranks)
    assert all(pid > 0 for pid in memory.trains(started))


# ---- memory that ranks map

SHARED: dict[str, Callable[[], str]] = {
    "the page of heartbeats": lambda: _kept(RankMemory(2)).page_path,
    "the page of slots": lambda: f"/proc/self/fd/{create_page(2)[0]}",
    "an image": lambda: _kept(MappedBuffer(1 << 20)).path,
}
_alive: list[Any] = []


def _kept(one: Any) -> Any:
    _alive.append(one)
    return one


@pytest.mark.parametrize("size", [0, 1, 1 << 30], ids=["emptied", "cut", "extended"])
@pytest.mark.parametrize("what", SHARED)
def test_no_rank_takes_pages_away_under_its_agent(what: str, size: int) -> None:
    """Who touches a page that is gone is ended by SIGBUS: the agent, and with it its node."""
    descriptor = os.open(SHARED[what](), os.O_RDWR)
    try:
        with pytest.raises(OSError) as refused:
            os.ftruncate(descriptor, size)
        assert refused.value.errno == errno.EPERM
    finally:
        os.close(descriptor)


# ---- the pipe of events

HONEST = within.ColdStart(why="x", seconds=1.0)
PIPE: dict[str, bytes] = {
    "a line without an end": b"x" * 50_000,
    "a message too long for the supervisor": b'{"event": "ColdStart", "seconds": 1, "why": "%s"}\n'
    % (b"x" * 5000),
    "brackets without an end": b"[" * 4000 + b"\n",
    "bytes that are no text": b"\xff\xfe\x00\x80\n" * 50,
    "zeros": b"\0" * 4000 + b"\n",
    "empty lines": b"\n" * 4000,
    "a number that no machine has": b'{"event": "Saved", "step": %s}\n' % (b"9" * 3000),
    "no number where one must be": b'{"event": "ColdStart", "seconds": NaN, "why": ""}\n',
    "a message that only agents send": b'{"say": "leaving", "why": "x"}\n',
    "an order": b'{"do": "leave", "over": true}\n',
    "a text in place of a number": b'{"event": "Image", "slot": "0", "step": 1}\n',
}


@pytest.mark.parametrize("attack", PIPE)
def test_whatever_a_rank_writes_into_the_pipe_the_next_is_heard(attack: str) -> None:
    memory, heard = RankMemory(1), list[within.FromRanks]()
    pipe = os.open(memory.events_path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        for _ in range(20):
            os.write(pipe, PIPE[attack])
            heard += memory.read_events()
            assert len(memory._rest) <= EVENT_BYTES_MAX + 1
        os.write(pipe, b"\n" + msg.encode(HONEST) + b"\n")
        while new := memory.read_events():
            heard += new
    finally:
        os.close(pipe)
    assert heard[-1] == HONEST
    assert all(isinstance(one, Unreadable) for one in heard[:-1])


@pytest.mark.parametrize("numbers", [(-1, 0), (99, 0), (0, 99), (0, -1), (2**62, 2**62)])
def test_an_image_in_a_slot_that_there_is_not_is_nobody_s(numbers: tuple[int, int]) -> None:
    from jurymast.keeper.keeper import Keeper
    from jurymast.wire.protocol import Access

    io = RealKeeperIo(Access(b"k" * 32), "n1", 1)
    keeper = Keeper(io, lambda message: pytest.fail(f"{message} is told"))
    local_rank, slot = numbers
    keeper.image_published(local_rank, slot, 0.1)


# ---- kinds that there are not


def test_kinds_of_messages_that_a_sender_makes_up_are_counted_together() -> None:
    notes: list[str] = []
    strangers = Strangers(lambda sender, text: notes.append(text))
    for number in range(10_000):
        strangers.heard("n1", Unreadable(f"kind {number}", "unknown"))
    assert len(strangers._said["n1"]) == KINDS_COUNTED + 1
    strangers.left("n1")
    assert notes[-1].startswith(f"10000 unknown messages were ignored: others {10_000 - KINDS_COUNTED}")


async def test_a_message_that_is_too_long_is_not_sent_and_the_connection_lasts() -> None:
    """The other side would close the connection for it, and each new one, over which it is sent again."""
    secret = b"s" * 32

    heard: list[Any] = []

    async def hear(proven: Proven) -> None:
        channel = Channel.of(proven, msg.read_said)
        heard.append(await channel.receive())
        channel.close()

    async with served(hear, secret) as port:
        channel = await connect("127.0.0.1", port, secret, msg.read_order)
        long = msg.Leaving(why="x" * FRAME_BYTES_MAX)
        channel.send(long, msg.Leaving(why="second"))
        channel.send(long)
        await channel.drain()
        while not heard:
            await asyncio.sleep(0)
        channel.close()
    assert heard == [msg.Leaving(why="second")]


# ---- manifests of images, from other nodes, a local disk, or a rank


def manifest(**changes: Any) -> bytes:
    import xxhash

    text = json.dumps({**vars(Manifest(10, 1, 0, 1, "2.13.0", 128, 100, 120, 110)), **changes}).encode()
    return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(text)}).encode() + b"\n" + text


CLAIMS: dict[str, dict[str, Any]] = {
    "more bytes than any memory": {"size_bytes": 2**62, "contents_at": 2**62, "fixed_bytes": 2**62},
    "a common part larger than any memory": {"size_bytes": 2**60, "common_bytes": 2**59},
    "a negative size": {"size_bytes": -1},
    "a part before the beginning": {"common_bytes": -(2**40)},
    "a part larger than the whole": {"common_bytes": 129},
    "contents beyond the end": {"contents_at": 2**62},
    "no hashes": {"blocks": {}},
    "too many hashes": {"blocks": {"common": ["0"] * 9, "own": ["0"] * 9}},
    "hashes of parts that there are not": {"blocks": {"other": ["0"]}},
    "another image": {"step": 11},
    "another format": {"format": 99},
    "a size that is a text": {"size_bytes": "128"},
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_manifest_that_claims_what_is_not_costs_nothing(claim: str) -> None:
    data = manifest(**CLAIMS[claim])
    with pytest.raises(BadImage):
        trusted(data, ImageId(10, 1, 0))
    try:
        room_of(Manifest.from_bytes(data))
    except BadImage:
        pass


# ---- findings, from an agent or a probe

SEEN = Finding(probe="p", code="c", verdict=Verdict.SUSPECT, kind="hardware", message="m", device="d")


def found(findings: Iterable[Finding], every_s: float = 0.0) -> list[Any]:
    health = NodeHealth()
    times = (number * every_s for number in itertools.count())
    records = [health.on_finding("n1", one, now, now) for one, now in zip(findings, times, strict=False)]
    return [effect.event for effects in records for effect in effects if isinstance(effect, Record)]


FINDINGS: dict[str, Callable[[int], Finding]] = {
    "a million devices": lambda n: replace(SEEN, device=f"d{n}"),
    "a million codes": lambda n: replace(SEEN, code=f"c{n}"),
    "a million probes": lambda n: replace(SEEN, probe=f"p{n}"),
    "bad and well in turn": lambda n: replace(SEEN, verdict=(Verdict.BAD, Verdict.OK)[n % 2]),
    "one kind after another": lambda n: replace(SEEN, kind=("hardware", "host")[n % 2]),
    "the same event, later each time": lambda n: replace(SEEN, once=True, at=float(n + 1)),
}


@pytest.mark.parametrize("attack", FINDINGS)
def test_however_many_findings_a_node_reports_they_have_an_end(attack: str) -> None:
    told = found(map(FINDINGS[attack], range(5000)))
    assert len(told) == NEWS_AT_ONCE + 1
    assert isinstance(told[-1], ev.Noted)


def test_different_findings_have_an_end_however_slowly_they_come() -> None:
    told = found((replace(SEEN, device=f"d{n}") for n in range(5000)), every_s=10.0)
    assert len(told) == FINDINGS_OF_NODE + 1
    again = found(
        (replace(SEEN, verdict=(Verdict.BAD, Verdict.OK)[n % 2]) for n in range(5000)), every_s=10.0
    )
    assert len(again) == 5000, "what comes as often as news does is told"


def changed(**wrong: Any) -> Finding:
    return replace(SEEN, **wrong)


@pytest.mark.parametrize("field", ["message", "probe", "code", "device", "unit"])
def test_a_text_of_a_finding_has_an_end(field: str) -> None:
    (event,) = found([changed(**{field: "x" * 1_000_000})])
    assert len(getattr(event, field)) <= MESSAGE_MAX


class Wrong:
    name, interval_s = "p", 1.0

    def __init__(self, wrong: Any) -> None:
        self._wrong = wrong

    def look(self, now: float) -> list[Any]:
        return [SEEN, self._wrong, replace(SEEN, device="e")]


WRONG: dict[str, Any] = {
    "no number for a time": changed(at=NAN), "an endless time": changed(at=INF),
    "a time before all": changed(at=-1.0), "a number for a text": changed(message=5),
    "nothing for a text": changed(device=None), "a text for a flag": changed(once="yes"),
    "no finding": 7, "none": None, "a verdict that there is not": changed(verdict="fine"),
    "bytes": changed(code=b"c"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_finding_that_is_wrong_takes_no_others_with_it(wrong: str) -> None:
    read, write = os.pipe()
    order = {
        "context": asdict(Context()), "name": "p", "point": "x:y", "memory": None, "epoch": 0.0, "once": True,
    }  # fmt: skip
    try:
        ProbeChild(order, write)._look(Wrong(WRONG[wrong]))  # type: ignore[arg-type]
        _, line = os.read(read, 1 << 16).splitlines()
    finally:
        os.close(read)
        os.close(write)
    said = json.loads(line)["findings"]
    assert [one["code"] for one in said] == ["c", "probe-failed", "c"]


@pytest.mark.parametrize("state", [[1], {}, None, 5, "left out", ""])
def test_a_probe_says_no_state_that_is_not_its_to_say(state: Any) -> None:
    watcher = ProbeWatcher(Context(), ["p"], lambda finding: None)
    said = {"findings": [], "state": state, "memory": None, "remembers": False, "next_s": 1.0}
    with pytest.raises(UNREADABLE):
        watcher._looked("p", said)
    assert watcher.probes == {}
