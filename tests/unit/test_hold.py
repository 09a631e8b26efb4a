"""An epoch of the supervisor: who holds it shows that from the claim on, and ends nothing once it cannot tell
whether it is still the newest."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jurymast.cluster.allocation import Allocation
from jurymast.core.state import effects as do
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.journal import events, read
from jurymast.rundir import RunDirectory
from jurymast.supervisor import supervisor
from jurymast.supervisor.real_io import RealIo
from jurymast.supervisor.supervisor import Hold, Supervisor, supervise
from jurymast.wire import endpoint
from support.stories import Story
from support.waiting import wait_until

LIMIT_S = 90.0


@contextmanager
def reading_for_ever(directory: RunDirectory) -> Iterator[None]:
    """A supervisor that does not get to the end of the journal: the last file has a terabyte of nothing."""
    (directory.journal / "epoch-000099.jsonl").touch()
    os.truncate(directory.journal / "epoch-000099.jsonl", 1 << 40)
    Allocation("local-1", 0, ("n1", "n2", "n3"), "n1", 0.0).save(directory)
    command = [sys.executable, "-m", "jurymast.supervisor", str(directory.root)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as supervisor:
        try:
            yield
        finally:
            supervisor.kill()


def test_a_supervisor_that_still_reads_the_journal_shows_that_it_lives(tmp_path: Path) -> None:
    directory = Story().running().write(tmp_path / "run")
    before = endpoint.newest_epoch(directory.epochs)
    with reading_for_ever(directory):
        wait_until("the claim", lambda: endpoint.newest_epoch(directory.epochs) > before, LIMIT_S)
        first = endpoint.read_pulse(directory.epochs)
        second = wait_until("a pulse", lambda: _changed(directory, first), LIMIT_S)
        wait_until("another", lambda: _changed(directory, second), LIMIT_S)


def _changed(directory: RunDirectory, before: str) -> str:
    pulse = endpoint.read_pulse(directory.epochs)
    return pulse if pulse != before else ""


@pytest.fixture
def epochs(tmp_path: Path) -> Path:
    place = tmp_path / "epochs"
    place.mkdir()
    assert endpoint.claim_epoch(place) == 1
    return place


def held(epochs: Path) -> Hold:
    return Hold(
        RealIo(RunDirectory(epochs.parent), Allocation("17", 0, (), "n1", 0.0), lambda: Story().state), 1
    )


def away(epochs: Path) -> Path:
    return epochs.rename(epochs.with_name("elsewhere"))


async def test_who_cannot_see_the_epochs_does_not_take_itself_for_the_newest(
    epochs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "RETRY_S", 0.01)

    mine = held(epochs)
    assert not await mine.is_superseded()
    there = away(epochs)
    asking = asyncio.ensure_future(mine.is_superseded())
    await _until_said(caplog, "No such file or directory")
    epochs.mkdir()  # mounted over, say: nothing is to be seen, not even the own epoch
    await _until_said(caplog, "does not show epoch 1")
    assert not asking.done()
    epochs.rmdir()
    endpoint.claim_epoch(there)
    there.rename(epochs)
    assert await asyncio.wait_for(asking, LIMIT_S)


def test_storage_that_does_not_come_back_ends_the_supervisor_and_nothing_else(
    epochs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ANSWER_LIMIT_S", 0.0)
    away(epochs)
    with pytest.raises(FileNotFoundError):
        asyncio.run(held(epochs).is_superseded())


async def _until_said(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async def heard() -> None:
        while text not in caplog.text:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(heard(), LIMIT_S)


async def test_a_supervisor_goes_on_while_the_epochs_cannot_be_seen(epochs: Path) -> None:
    """It stops when it sees another; that it sees nothing is no reason."""

    mine = held(epochs)
    there = away(epochs)
    mine.begin()
    taken_over = asyncio.ensure_future(mine.taken_over())
    done, _ = await asyncio.wait([taken_over], timeout=2 * endpoint.PULSE_INTERVAL_S)
    assert not done
    there.rename(epochs)
    endpoint.claim_epoch(epochs)
    await asyncio.wait_for(taken_over, LIMIT_S)


@contextmanager
def old_list(place: Path) -> Iterator[None]:
    """As network file systems serve the names in a directory from a cache; what is opened is new."""
    names, look = os.listdir(place), os.listdir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: list(names) if Path(path) == place else look(path))
        yield


def test_who_sees_an_old_list_of_epochs_finds_the_newest_supervisor_all_the_same(epochs: Path) -> None:
    first = endpoint.Endpoint(1, ("n1",), 4001, "n1", "17.0", 1)
    endpoint.pulse(epochs, 1, 5)
    endpoint.announce(epochs, first)
    with old_list(epochs):
        assert endpoint.claim_epoch(epochs) == 2
        endpoint.pulse(epochs, 2, 0)
        quiet = endpoint.read_pulse(epochs)
        assert endpoint.newest_epoch(epochs) == 2
        assert asyncio.run(held(epochs).is_superseded()), "it must not end the job of its successor"
        assert endpoint.find(epochs) == first, "its successor still reads the journal"
        endpoint.pulse(epochs, 2, 1)
        assert endpoint.read_pulse(epochs) != quiet, "nobody need take over from it"
        second = replace(first, epoch=2, port=4002)
        endpoint.announce(epochs, second)
        assert endpoint.find(epochs) == second


def test_a_supervisor_that_was_taken_over_does_not_beat_for_its_successor(epochs: Path) -> None:
    endpoint.pulse(epochs, endpoint.claim_epoch(epochs), 7)

    async def work() -> None:
        mine = held(epochs)
        mine.begin()
        await asyncio.wait_for(mine.taken_over(), LIMIT_S)

    with old_list(epochs):
        asyncio.run(work())
    assert endpoint.read_pulse(epochs) == "2:2:7"


def test_a_place_that_came_late_does_not_hide_a_newer_one(epochs: Path) -> None:
    second = endpoint.Endpoint(2, ("n1",), 4001, "n1", "17.0", 1)
    for place in (second, replace(second, epoch=1)):
        endpoint.announce(epochs, place)
    assert endpoint.find(epochs) == second


def test_there_is_no_pulse_in_a_directory_that_does_not_show_the_claim(epochs: Path) -> None:
    away(epochs)
    epochs.mkdir()
    with pytest.raises(FileNotFoundError):
        endpoint.pulse(epochs, 1, 0)
    assert os.listdir(epochs) == []


def test_strange_names_among_the_epochs_are_passed_over(epochs: Path) -> None:
    (epochs / "copy of 000007.claim").touch()
    assert endpoint.newest_epoch(epochs) == 1
    assert endpoint.claim_epoch(epochs) == 2


class OverAtOnce(Supervisor):
    async def run(self) -> None:
        pass


@pytest.mark.parametrize("told", ["", "too few files"])
async def test_people_are_told_of_the_limits_of_a_supervisor_if_there_is_something_to_tell(
    told: str, tmp_path: Path
) -> None:
    story = Story().running()
    directory = story.write(tmp_path / "run")

    class Limited(RealIo):
        def trouble(self) -> str:
            return told

    allocation = Allocation("17", 0, ("n1", "n2", "n3"), "n1", 0.0)
    made = await supervise(Limited(directory, allocation, lambda: story.state), OverAtOnce)
    assert made is not None
    made._journal.close()
    noted = [event.message for event in events(read(directory)) if isinstance(event, ev.Noted)]
    assert noted == ([told] if told else [])


async def test_what_a_node_is_told_at_once_is_sent_together(epochs: Path) -> None:
    sent: list[tuple[str, tuple[int, ...]]] = []

    class Heard:
        def __init__(self, node: str) -> None:
            self.node = node

        def send(self, *messages: Any) -> None:
            sent.append((self.node, tuple(one.attempt for one in messages)))

    hold = held(epochs)
    nothing: Any = None
    made = Supervisor(hold._io, Story().running().state, nothing, hold)
    channels: dict[str, Any] = {name: Heard(name) for name in ("n1", "n2")}
    made._channels.update(channels)
    orders = (("n1", 1), ("n1", 2), ("n2", 3), ("n1", 4))
    made._do([do.Send(name, msg.Stop(attempt=attempt, grace_s=0.0)) for name, attempt in orders])
    assert sent == [("n1", (1, 2)), ("n2", (3,)), ("n1", (4,))]
