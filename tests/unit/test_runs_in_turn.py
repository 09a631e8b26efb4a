"""Runs that save to one directory one after another: what one leaves is not taken for the next one's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    hash_file,
)
from jurymast.core.checkpoints.commit import superfluous
from jurymast.core.run.machine import step as advance
from jurymast.core.state import events as ev
from jurymast.core.state.images import StateId
from support.stories import Story


def save(directory: CheckpointDirectory, step: int, attempt: int) -> None:
    place = directory.begin(step, attempt)
    (place / "file").write_bytes(b"content")
    records = (FileRecord("file", *hash_file(place / "file")),)
    directory.seal(place, CheckpointManifest(step, attempt, 1, "2.13.0", records, run=directory.run))
    directory.publish(place, step)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[CheckpointDirectory, CheckpointDirectory]:
    return CheckpointDirectory(tmp_path, "first"), CheckpointDirectory(tmp_path, "second")


def test_a_rollback_voids_nothing_of_a_later_run(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    first, second = runs
    save(first, 50, 3)
    save(first, 60, 7)
    first.rollback(50, 7)
    save(second, 70, 1)
    assert second.complete() == [70, 50]
    assert second.manifest(70).run == "second"
    assert second.own_rollbacks() == []
    save(first, 80, 7)  # of the attempt that was rolled back, while it ended
    with pytest.raises(BadCheckpoint, match="rolled back"):
        second.manifest(80)


def test_a_rollback_covers_what_earlier_runs_had_saved(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    """Even if it is interrupted before these have another name."""
    first, second = runs
    save(first, 50, 3)
    save(first, 60, 7)
    (name,) = second.rollback(50, 2)
    os.rename(second.root / name, second.path(60))
    assert second.complete() == [50]
    second.path(60).rename(second.root / name)
    save(second, 60, 3)
    assert second.complete() == [60, 50]


def test_attempts_of_an_earlier_run_are_no_newer_than_ours(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    """Else nothing that this run holds in memory would count as unsaved before its nodes go."""
    first, second = runs
    save(first, 50, 7)
    save(second, 60, 1)
    assert second.sizes() == {StateId(60, 1): 7, StateId(50, 0): 7}
    assert first.sizes() == {StateId(60, 0): 7, StateId(50, 7): 7}


def test_a_pin_protects_the_checkpoint_that_was_pinned_and_no_other_of_that_step(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    first, second = runs
    save(first, 10, 1)
    first.pin(10)
    assert second.pinned() == {10}
    second.set_aside(10)
    save(second, 10, 1)
    assert second.pinned() == set()
    (second.root / "pinned" / "00000010").write_bytes(b"")  # as up to version 0.1
    assert second.pinned() == {10}


def test_the_next_owner_removes_what_the_last_one_left_half_written_and_nothing_of_its_own_nodes(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    first, second = runs
    left = [first.begin(20, 9), first.writing(30, 9, "0a")]
    left[1].mkdir()
    kept = [second.writing(40, 1, "0b"), second.begin(50, 2)]
    kept[0].mkdir()
    temporary = second.root / ".owner.json.17.0123abcd"
    temporary.touch()
    os.utime(temporary, (0, 0))
    assert sorted(second.sweep(attempt=1)) == sorted(path.name for path in left)
    assert all(path.is_dir() for path in kept)
    assert not temporary.exists()


def test_a_run_that_had_to_go_on_from_an_older_step_keeps_what_it_saves_from_then_on(
    runs: tuple[CheckpointDirectory, CheckpointDirectory],
) -> None:
    first, second = runs
    for step in (100, 1900, 2000):
        save(first, step, 1)
    save(second, 110, 1)
    second.retire(2)
    assert second.steps() == [2000, 1900, 110]
    assert superfluous([2000, 1900, 110, 100], 1, set(), set(), [110]) == [1900, 100]


@pytest.mark.parametrize(
    ("restored", "skipped", "alerts"),
    [(100, (), 1), (2000, ("step 2100: it has no manifest",), 1), (2000, (), 0), (2100, (), 0)],
)
def test_a_restore_older_than_planned_is_an_alert(
    restored: int, skipped: tuple[str, ...], alerts: int
) -> None:
    state = Story().running().state
    planned = ev.RestorePlanned(
        t=state.now, attempt=state.attempt, step=2000, tier="shared", expected_s=1.0, tiers={}, reason=""
    )
    advance(state, planned)
    before = len(state.alerts)
    told = ev.Restored(
        t=state.now, attempt=state.attempt, step=restored, tier="shared", seconds=1.0, skipped=skipped
    )
    advance(state, told)
    new = state.alerts[before:]
    assert len(new) == alerts
    assert all(f"goes on from step {restored} instead of" in alert.message for alert in new)
