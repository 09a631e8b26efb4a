"""Thousands of nodes and one shared file system: who looks there how often, and by name, not in a list."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jurymast.agent.succession import LOOK_S, Succession
from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.core.settings import RunPlan
from jurymast.health.probe import Context
from jurymast.rundir import RunDirectory
from jurymast.storage.job import Job, StorageFailure
from jurymast.storage.orders import Done, WriteShared
from jurymast.storage.shared import write
from jurymast.wire import endpoint
from jurymast_storage import WRITE_EVERY, StorageProbe

NAMES = tuple(f"n{number}" for number in range(200))
LIMIT_S = 20.0


def plan(directory: RunDirectory) -> RunPlan:
    return RunPlan(
        run="r", name="r", directory=str(directory.root), cluster="slurm", active=199, spares=1,
        ranks_per_node=8, script="x",
    )  # fmt: skip


def test_who_would_take_over_late_looks_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: Counter[Path] = Counter()

    def counted(epochs: Path) -> str:
        looks[epochs] += 1
        return str(looks[epochs])  # it lives: nobody takes over

    async def watched(first: RunDirectory, late: RunDirectory) -> None:
        tasks = []
        for directory, node in ((first, NAMES[0]), (late, NAMES[150])):
            heard = iter([True])  # once, and then no more
            watch = Succession(directory, plan(directory), node, NAMES).watch(partial(next, heard, False))
            tasks.append(asyncio.ensure_future(watch))
        end = time.monotonic() + LIMIT_S
        while looks[first.epochs] < 4 and time.monotonic() < end:
            await asyncio.sleep(LOOK_S / 5)
        for task in tasks:
            task.cancel()

    monkeypatch.setattr(endpoint, "read_pulse", counted)
    first, late = RunDirectory(tmp_path / "first"), RunDirectory(tmp_path / "late")
    asyncio.run(watched(first, late))
    assert looks[first.epochs] >= 4
    assert looks[late.epochs] == 1


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


class WaitingJob(Job):
    """Tells when it has looked for the plan and not found it."""

    looked: threading.Event

    def wait(self, what: str, look: Callable[[], Any], renew: Path | None = None, *, ranks: int = 1) -> Any:
        def told() -> Any:
            found = look()
            if what == "the lead's plan":
                self.looked.set()
            return found

        return super().wait(what, told, renew, ranks=ranks)


def follower(looked: threading.Event) -> Job:
    job = WaitingJob(LIMIT_S)
    job.looked = looked
    return job


def followed(root: Path, job: Job) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    order = WriteShared(root=str(root), step=10, attempt=1, world=2, nonce="abc", images=())

    def work() -> None:
        try:
            results.append(write(order, job))
        except StorageFailure as failure:
            results.append(str(failure))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, results


def left(place: Path, how: str) -> object:
    """What the others leave in the directory of a drain; the answer that this is to lead to."""
    if how == "plan":
        (place / "writes.json").write_text(json.dumps({}))
        return Done()
    if how == "failure":
        (place / "failed-r00001.txt").write_text("no space left")
        (place / "failed").touch()
        return "rank 1: no space left"
    place.rmdir()
    return "rank 0's node gave up: its directory is gone"


@pytest.mark.parametrize("how", ["plan", "failure", "lead gone"])
def test_a_node_that_waits_for_the_plan_finds_by_name_what_came(tmp_path: Path, how: str) -> None:
    place = CheckpointDirectory(tmp_path).draining(10, 1, "abc")
    place.mkdir(mode=0o700)
    looked = threading.Event()
    thread, results = followed(tmp_path, follower(looked))
    assert looked.wait(LIMIT_S), "it waits for the plan"
    expected = left(place, how)
    thread.join(LIMIT_S)
    assert results == [expected]


def test_the_more_ranks_wait_the_less_often_each_node_looks() -> None:
    def looks(ranks: int) -> int:
        count = itertools.count()
        with pytest.raises(StorageFailure, match="did not come within"):
            Job(3.0).wait("it", lambda: (next(count), None)[1], ranks=ranks)
        return next(count)

    assert looks(100_000) < 0.6 * looks(8)
