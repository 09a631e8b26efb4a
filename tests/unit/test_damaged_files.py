"""Small files of a run directory after a power loss: what is written durably, and what a file that is torn,
empty, full of garbage or not readable means to those that read it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jurymast.agent.real_io import read_run_directory
from jurymast.cluster.allocation import Allocation
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.run import Phase
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory, write_json
from jurymast.supervisor.epoch import known_allocation
from jurymast.wire import endpoint
from jurymast_site.system import load_state, save_state
from support.stories import Story
from support.successor import Successor

DAMAGE = {
    "empty": b"", "torn": b'{"epoch": 3, "hos', "zeros": bytes(4096),
    "garbage": b"\xff\xfe12", "long": b"9" * 70,
    "a negative number": b"-3", "another number": b"1_0",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return Story().running().write(tmp_path / "run")


def damaged(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    path.mkdir() if how == "unreadable" else path.write_bytes(DAMAGE[how])


every_damage = pytest.mark.parametrize("how", [*DAMAGE, "unreadable"])


# What is written durably.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that make files durable, in their order: what is synced, and what is renamed."""
    seen: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        seen.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def renamed(*paths: Any) -> None:
        seen.append("name")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    return seen


WRITES: dict[str, Callable[[RunDirectory], object]] = {
    "attempt": lambda run: run.save_attempt(4),
    "allocation": lambda run: Allocation("7", 0, ("n1",), "n1", 0.0).save(run),
    "outcome": lambda run: write_json(run.outcome_file, {"state": "failed"}),
    "plan": lambda run: run.save_plan(run.plan()),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_file_that_the_next_process_reads_outlives_a_power_loss(
    directory: RunDirectory, calls: list[str], name: str
) -> None:
    WRITES[name](directory)
    assert calls == ["file", "name", "directory"]


def test_what_the_sites_health_check_knows_outlives_a_power_loss(tmp_path: Path, calls: list[str]) -> None:
    """Otherwise a report could be used a second time, and a drained node would be forgotten."""
    save_state(tmp_path / "nonces.json", {"n": 1.0})
    assert calls == ["file", "name", "directory"]
    assert load_state(tmp_path / "nonces.json") == {"n": 1.0}


def test_an_epoch_is_claimed_for_good(directory: RunDirectory, calls: list[str]) -> None:
    assert endpoint.claim(directory.epochs, 9)
    assert calls == ["directory"]


# The number of the newest attempt.


@every_damage
def test_a_damaged_number_of_the_newest_attempt_is_not_known(directory: RunDirectory, how: str) -> None:
    """So no rank takes its own attempt for the newest."""
    damaged(directory.attempt_file, how)
    with pytest.raises(RunDirectoryError):
        directory.newest_attempt()


@every_damage
def test_an_agent_that_cannot_read_the_newest_attempt_finds_its_supervisor_and_knows_of_none(
    directory: RunDirectory, how: str
) -> None:
    place = endpoint.Endpoint(1, ("127.0.0.1",), 7, "n1", "7.0", 1)
    endpoint.announce(directory.epochs, place)
    directory.save_attempt(4)
    assert read_run_directory(directory) == (place, 4)
    damaged(directory.attempt_file, how)
    assert read_run_directory(directory) == (place, None)


def test_a_supervisor_that_cannot_read_the_newest_attempt_counts_one_more_and_goes_on() -> None:
    story = Story(active=2, spares=1).running()
    after = Successor(story)
    placed = story.state.placement
    effects = after.machine.on_attempt_read(None, "attempt is damaged: no number", story.t)
    notes = [
        one.event.message
        for one in effects
        if isinstance(one, do.Journal) and isinstance(one.event, ev.Noted)
    ]
    assert notes == ["attempt is damaged: no number; attempt 2 counts as started, and is not used"]
    assert do.Fence(2) in effects, "the file is whole again at once"
    for node in placed:
        assert do.Send(node, msg.Stop(attempt=2)) in [
            *effects,
            *after.joins(node, attempt=1, ranks="running"),
        ]
    stopped = [one for node in placed for one in after.hears(node, msg.Stopped(attempt=2, store_port=7))]
    assert do.Fence(3) in [*stopped, *after.waits(1.0)]
    assert story.state.attempt == 3


def test_a_number_older_than_the_journals_is_written_anew() -> None:
    """It may have been lost with the power; ranks that are cut off would take themselves for the newest."""
    story = Story().running()
    after = Successor(story)
    assert after.machine.on_attempt_read(0, "", story.t) == [do.Fence(1)]
    assert after.machine.on_attempt_read(1, "", story.t) == []
    assert story.state.phase is Phase.RUNNING


# Other files.


@every_damage
def test_a_damaged_allocation_is_taken_from_the_journal(directory: RunDirectory, how: str) -> None:
    damaged(directory.allocation_file, how)
    found = known_allocation(directory)
    begun = next(e for e in Story().running().events if isinstance(e, ev.AllocationStarted))
    assert (found.job, found.nodes, found.host) == (begun.slurm_job, begun.nodes, begun.host)
    if how != "unreadable":
        assert Allocation.load(directory) == found, "it is whole again"


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_pulse_or_place_hides_no_epoch(directory: RunDirectory, how: str) -> None:
    place = endpoint.Endpoint(2, ("n1",), 4001, "n1", "7.0", 1)
    endpoint.announce(directory.epochs, place)
    endpoint.claim(directory.epochs, 2)
    endpoint.pulse(directory.epochs, 2, 7)
    damaged(directory.epochs / endpoint.NEWEST, how)
    damaged(directory.epochs / endpoint.PULSE, how)
    assert endpoint.newest_epoch(directory.epochs) == 2
    assert endpoint.find(directory.epochs) == place
    before = endpoint.read_pulse(directory.epochs)
    endpoint.pulse(directory.epochs, 2, 8)
    assert endpoint.read_pulse(directory.epochs) != before, "it is whole again"


@every_damage
def test_a_damaged_place_of_an_epoch_leaves_that_of_the_one_before(directory: RunDirectory, how: str) -> None:
    for epoch in (1, 2):
        endpoint.announce(directory.epochs, endpoint.Endpoint(epoch, ("n1",), 4000, "n1", "7.0", 1))
    for name in ("000002.json", endpoint.NEWEST):
        damaged(directory.epochs / name, how)
    found = endpoint.find(directory.epochs)
    assert found is not None
    assert found.epoch == 1
