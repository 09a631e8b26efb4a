"""Thousands of nodes and one shared file system: who looks there how often, and who does not."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest

from jurymast.agent.io import Phases
from jurymast.agent.keeping import Keeping
from jurymast.agent.storage_processes import StorageProcesses
from jurymast.checkpoint.contents import Contents, Item
from jurymast.checkpoint.directory import CheckpointDirectory, FileRecord
from jurymast.checkpoint.layout import Stored
from jurymast.child import Child
from jurymast.core.agent.effects import ReadPulse
from jurymast.core.agent.link import SupervisorSilence
from jurymast.core.agent.succession import Succession
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import WritePhase
from jurymast.health.probe import Context
from jurymast.keeper.manifest import Manifest
from jurymast.storage import __main__ as process
from jurymast.storage import orders, shared
from jurymast.storage.orders import (
    Answer,
    Continue,
    Done,
    ImageAt,
    Job,
    Progress,
    StorageFailed,
    StorageFailure,
    Warm,
    WriteShared,
)
from jurymast.storage.shared import METADATA, write
from jurymast_storage import WRITE_EVERY, StorageProbe

NAMES = tuple(f"n{number}" for number in range(200))
LIMIT_S = 90.0


def looks_of(node: str, until_s: float) -> int:
    """How often it reads the pulse of a supervisor that answers it no more, but lives, in so many seconds."""
    succession = Succession(node, NAMES, SupervisorSilence(0.5), enabled=True)
    succession.on_supervisor_answered(0.0)
    effects, now = succession.on_no_answer(0.0), 0.0
    for count in itertools.count():
        assert effects == [ReadPulse()], "nobody takes over"
        succession.check()
        succession.on_pulse(f"1:{count}", now)
        now = succession.wake_at
        if now >= until_s:
            return count + 1
        effects = succession.on_time(now)
    raise AssertionError("it looks no more")


def test_who_would_take_over_late_looks_seldom() -> None:
    assert looks_of(NAMES[0], 3.0) == 5
    assert looks_of(NAMES[150], 3.0) == 1


def test_the_storage_probe_writes_at_first_and_then_in_turn_with_other_nodes(tmp_path: Path) -> None:
    written: dict[str, list[int]] = {}
    for node in NAMES[:8]:
        place = tmp_path / node
        place.mkdir()
        looks = StorageProbe(Context(node=node, paths=(str(place),)))
        written[node] = []
        for number in range(1 + 2 * WRITE_EVERY):
            os.utime(place, ns=(0, 0))
            assert looks.look(0.0) == []
            if place.stat().st_mtime_ns:
                written[node].append(number)
    assert all(numbers[0] == 0 for numbers in written.values())
    turns = {number % WRITE_EVERY for numbers in written.values() for number in numbers[1:]}
    assert len(turns) >= 3, "not all at the same time"
    later = [[number for number in numbers if number > WRITE_EVERY] for numbers in written.values()]
    assert [len(numbers) for numbers in later] == [1] * 8, "one in each ten minutes"


def image(folder: Path, rank: int) -> ImageAt:
    """An image of one entry, which no other rank has."""
    name = f"of-{rank}"
    contents = Contents({name: {"kind": "value", "digest": "1"}}, (Item(name, (name,), 0, 128),))
    data = bytes([rank]) * 128 + contents.to_bytes()
    made = Manifest(10, 1, rank, 2, "2.13.0", len(data), 0, 128)
    path = folder / name
    path.write_bytes(data)
    manifest = made.with_blocks(memoryview(data)).to_bytes().decode()
    return ImageAt(rank=rank, path=str(path), manifest=manifest)


class Writing:
    """Two nodes that write a checkpoint, the first as the lead; each in a thread."""

    def __init__(self, folder: Path, pool: Executor) -> None:
        self.said: queue.SimpleQueue[tuple[int, WritePhase]] = queue.SimpleQueue()
        self.jobs = [Job(LIMIT_S, reached=partial(self._reached, rank)) for rank in range(2)]
        orders = [
            WriteShared(
                root=str(folder / "checkpoints"), step=10, attempt=1, world=2, nonce="abc",
                images=(image(folder, rank),), lead=rank == 0,
            )
            for rank in range(2)
        ]  # fmt: skip
        pairs = zip(orders, self.jobs, strict=True)
        self.results = [pool.submit(write, order, job) for order, job in pairs]

    def _reached(self, rank: int, phase: WritePhase) -> None:
        if phase > WritePhase.HOLD:
            self.said.put((rank, phase))

    def end(self, phase: WritePhase, ranks: Sequence[int]) -> None:
        reached = sorted(self.said.get(timeout=LIMIT_S) for _ in ranks)
        assert reached == [(rank, phase) for rank in ranks]

    def begin(self, phase: WritePhase, ranks: Sequence[int]) -> None:
        parts = (0, 1) if phase is WritePhase.SHARE_OUT else ()
        for rank in ranks:
            self.jobs[rank].go_on(Continue(id=0, phase=phase, parts=parts))


def test_nodes_that_write_together_look_for_nothing_and_list_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def recorded(original: Callable[[Any], Any]) -> Callable[..., Any]:
        def listing(path: Any = ".") -> Any:
            listed.append(str(path))
            return original(path)

        return listing

    def metadata(directory: Path, stored: Iterable[Stored]) -> FileRecord:
        """As torch would write it."""
        text = "".join(sorted(one.item.name for one in stored)).encode()
        (directory / METADATA).write_bytes(text)
        return FileRecord(METADATA, len(text), hashlib.sha256(text).hexdigest())

    monkeypatch.setattr(os, "listdir", recorded(os.listdir))
    monkeypatch.setattr(os, "scandir", recorded(os.scandir))
    monkeypatch.setattr(shared, "write_metadata", metadata)
    with ThreadPoolExecutor(2) as pool:
        made = Writing(tmp_path, pool)
        made.end(WritePhase.OPEN, [0])
        made.begin(WritePhase.ANNOUNCE, [0, 1])
        made.end(WritePhase.ANNOUNCE, [0, 1])
        made.begin(WritePhase.SHARE_OUT, [0])
        made.end(WritePhase.SHARE_OUT, [0])
        made.begin(WritePhase.WRITE, [0, 1])
        made.end(WritePhase.WRITE, [0])
        assert made.results[1].result(LIMIT_S) == Done(bytes=128)
        made.begin(WritePhase.SEAL, [0])
        assert made.results[0].result(LIMIT_S) == Done(bytes=128, published=True)
    assert [path for path in listed if ".writing-" in path] == []
    assert CheckpointDirectory(tmp_path / "checkpoints").complete() == [10]
    (files,) = (tmp_path / "checkpoints").glob("step-*")
    assert {path.name for path in files.iterdir()} == {
        "__0_0.distcp",
        "__1_0.distcp",
        METADATA,
        "jurymast.json",
    }


def mock_time(now: list[float]) -> Any:
    """Have orders read this time, in seconds."""
    return mock.patch.object(orders, "time", SimpleNamespace(monotonic=lambda: now[0]))


def turned(job: Job, after: WritePhase = WritePhase.ANNOUNCE) -> Continue:
    return job.turn(after, WritePhase(after + 1))


def test_who_waits_for_others_waits_as_long_as_their_storage_takes() -> None:
    now, reached = [0.0], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        job = Job(1.0, reached=lambda phase: reached.set())
        with mock_time(now):
            turn = pool.submit(turned, job)
            assert reached.wait(LIMIT_S)
            now[0] += 1e6
            job.go_on(Continue(id=1, phase=WritePhase.SHARE_OUT))
            assert turn.result(LIMIT_S).phase is WritePhase.SHARE_OUT


@pytest.mark.parametrize("what", ["bytes", "files"])
def test_an_order_that_makes_progress_takes_as_long_as_its_size_needs(what: str) -> None:
    """70 B parameters with Adam on 8 GPUs are 1.1 TB: at 0.5 GB/s they take 2,240 s."""
    now, told = [0.0], list[int]()
    with mock_time(now):
        job = Job(10.0, advance=told.append)
        for _ in range(400):
            now[0] += 9.0
            job.wrote(1 << 20) if what == "bytes" else job.moved()
        assert job.bytes == sum(told) == (400 << 20 if what == "bytes" else 0)
        now[0] += 11.0
        job.wrote(1)  # late, but it came back
        now[0] += 11.0
        with pytest.raises(StorageFailure, match="it made no progress for 10 s"):
            job.check()


def test_the_process_of_an_order_tells_its_agent_of_progress_well_within_the_limit() -> None:
    now, said = [0.0], list[float]()

    def say(output: int, answer: object) -> None:
        said.append(now[0])

    clock = SimpleNamespace(monotonic=lambda: now[0])
    with mock_time(now), mock.patch.multiple(process, time=clock, _say=say):
        job = process._job(Warm(id=1, limit_s=8.0), -1)
        for _ in range(40):
            now[0] += 1.0
            job.wrote(1 << 20)
    assert all(later - earlier <= 5.0 for earlier, later in pairwise([0.0, *said, 40.0]))


class Process:
    """A storage process, which says that it goes on `times` times, after so much of the loop's time each,
    and then that it is done."""

    code: int | None = None
    killed = False

    def __init__(self, now: list[float], times: int, each_s: float) -> None:
        self._now, self._left, self._each_s = now, times, each_s

    def tell(self, line: bytes) -> None:
        pass

    async def told(self) -> None:
        pass

    async def hear(self) -> bytes:
        self._now[0] += self._each_s
        for _ in range(5):  # whoever waits until then has its turn
            await asyncio.sleep(0)
        self._left -= 1
        return msgspec.json.encode(Done(id=1) if self._left < 0 else Progress(id=1, bytes=1))

    async def kill(self, limit_s: float) -> bool:
        self.killed = True
        return True


@pytest.mark.parametrize(("each_s", "in_time"), [(18.0, True), (25.0, False)])
def test_its_agent_waits_as_long_as_it_tells_of_progress(each_s: float, in_time: bool) -> None:
    now, heard = [0.0], list[int]()

    async def carry_out() -> Answer:
        asyncio.get_running_loop().time = lambda: now[0]  # type: ignore[method-assign]
        storage = StorageProcesses(grace_s=10.0)
        return await storage.carry_out(Warm(limit_s=10.0), Phases(lambda phase: None, heard.append))

    made = Process(now, 50, each_s)
    with mock.patch.object(Child, "start", mock.AsyncMock(return_value=made)):
        answer = asyncio.run(carry_out())
    assert made.killed is not in_time
    if in_time:
        assert (answer, len(heard)) == (Done(id=1), 50)
    else:
        assert isinstance(answer, StorageFailed)
        assert "no progress for 10 s" in answer.why


def test_its_supervisor_hears_of_progress() -> None:
    told = list[Any]()

    class Storage:
        async def write(self, order: msg.Write, loans: list[Any], phases: Phases) -> Answer:
            phases.advanced(9)
            return Done(bytes=10)

    async def work() -> None:
        ended = asyncio.Event()
        storage, keeper = Storage(), mock.Mock()  # no image is lent
        keeping = Keeping(keeper, storage, told.append, lambda id, phase: None, lambda id: ended.set())  # type: ignore[arg-type]
        keeping.write(msg.Write(id="7", tier="shared", step=1, attempt=1, ranks=(), world=1))
        await asyncio.wait_for(ended.wait(), LIMIT_S)

    asyncio.run(work())
    assert told[0] == msg.WriteProgress(id="7", size_bytes=9)


def test_an_order_that_makes_progress_can_be_cancelled() -> None:
    job = Job(LIMIT_S)
    job.wrote(1)
    job.cancel()
    with pytest.raises(StorageFailure, match="it was cancelled"):
        job.wrote(1)


def test_who_waits_is_cancelled_at_once() -> None:
    job = Job(LIMIT_S)
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(turned, job)
        job.cancel()
        with pytest.raises(StorageFailure, match="it was cancelled"):
            turn.result(LIMIT_S)
    with pytest.raises(StorageFailure, match="it was cancelled"):
        turned(job)


def test_an_order_to_go_on_that_is_not_the_next_is_passed_over() -> None:
    job = Job(LIMIT_S)
    for phase in WritePhase:
        job.go_on(Continue(id=1, phase=phase, parts=(phase,)))
    assert turned(job) == Continue(id=1, phase=WritePhase.SHARE_OUT, parts=(WritePhase.SHARE_OUT,))


def test_the_wait_for_others_counts_for_no_phase() -> None:
    now = [0.0]
    with mock_time(now):
        job = Job(10.0, reached=lambda phase: now.__setitem__(0, now[0] + 15.0))
        for phase in (WritePhase.OPEN, WritePhase.ANNOUNCE, WritePhase.SHARE_OUT):
            now[0] += 9.0
            job.check()
            job.go_on(Continue(id=1, phase=WritePhase(phase + 1)))
            turned(job, phase)
        now[0] += 11.0
        with pytest.raises(StorageFailure, match="it made no progress for 10 s"):
            job.check()
