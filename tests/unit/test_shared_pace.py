"""Thousands of nodes and one shared file system: who looks there how often, and by name, not in a list."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.core.agent.effects import ReadPulse
from jurymast.core.agent.supervision import Hearing, Succession
from jurymast.health.probe import Context
from jurymast.storage.orders import Done, Job, StorageFailure, WriteShared
from jurymast.storage.shared import write
from jurymast_storage import WRITE_EVERY, StorageProbe

NAMES = tuple(f"n{number}" for number in range(200))
LIMIT_S = 90.0


def looks_of(node: str, until_s: float) -> int:
    """How often it reads the pulse of a supervisor that answers it no more, but lives, in so many seconds."""
    succession = Succession(node, NAMES, Hearing(0.5), enabled=True)
    succession.answered(0.0)
    effects, now = succession.unanswered(0.0), 0.0
    for count in itertools.count():
        assert effects == [ReadPulse()], "nobody takes over"
        succession.check()
        succession.pulse(f"1:{count}", now)
        now = succession.wake_at
        if now >= until_s:
            return count + 1
        effects = succession.tick(now)
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


class WaitingJob(Job):
    """Tells when it has looked for the plan and not found it."""

    looked: threading.Event

    def wait(self, what: str, look: Callable[[], Any], place: Path | None = None, *, ranks: int = 1) -> Any:
        def told() -> Any:
            found = look()
            if what == "the lead's plan":
                self.looked.set()
            return found

        return super().wait(what, told, place, ranks=ranks)


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
    """What the others leave in the directory of a write; the answer that this is to lead to."""
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
    place = CheckpointDirectory(tmp_path).writing(10, 1, "abc")
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
