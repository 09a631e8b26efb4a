"""The last checkpoint before the job's time limit is begun as long before as its write takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec import structs

from jurymast.cluster.control import limit_in_s
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskTimeLimit, Effect, Journal
from jurymast.core.state.settings import Settings
from jurymast.core.supervision.limit import ASK_EVERY_S, LEAST_S, MOVED_S
from jurymast.jobs import utc_time
from support.stories import Story
from support.successor import Successor, image, written

# Longer than Slurm's own warning comes before the limit.
WRITE_S = 300.0


class Run:
    """Two nodes, whose step 16 is in memory, and due on shared storage in hours: step 8 was written there, in
    `write_s`."""

    def __init__(self, write_s: float = WRITE_S, signal_s: float = 0.0) -> None:
        self.story = Story(active=2, spares=0, settings=Settings(shared_every_s=36_000.0)).running()
        self.story.state.signal_s = signal_s
        self.after = Successor(self.story)
        self.nodes = self.story.state.placement
        self.asked = self.warned = 0
        self.steps: list[int] = []
        self.orders: dict[str, msg.Write] = {}
        for rank, node in enumerate(self.nodes):
            self.takes(self.after.joins(node, ranks="running", attempt=1, copies=(image(rank),)))
        self.waits(write_s)
        self.all_written()
        for rank, node in enumerate(self.nodes):
            newer = structs.replace(image(rank), step=16)
            self.takes(self.after.hears(node, msg.Held(copies=(newer,))))
        self.waits(1.0)
        assert self.steps == [8]

    def takes(self, effects: Sequence[Effect]) -> None:
        self.asked += effects.count(AskTimeLimit())
        told = [note.message for one in effects if isinstance(one, Journal) for note in notes(one.event)]
        self.warned += sum("reaches its time limit" in text for text in told)
        if orders := written(list(effects)):
            self.orders = orders
            self.steps.append(next(iter(orders.values())).step)

    def waits(self, seconds: float) -> None:
        self.takes(self.after.waits(seconds))

    def all_written(self) -> None:
        lead = next(node for node, order in self.orders.items() if order.lead)
        id = self.orders[lead].id
        for phase in list(msg.WritePhase)[:-1]:
            for node in [lead, *(node for node in self.orders if node != lead)]:
                self.takes(self.after.hears(node, msg.WriteReached(id=id, phase=phase)))
        for node in sorted(self.orders, key=lambda one: one == lead):
            done = msg.Written(id=id, tier="shared", ok=True, size_bytes=9, why="")
            self.takes(self.after.hears(node, done))

    def limit(self, ends_in_s: float | None) -> None:
        self.takes(self.after.machine.on_time_limit(ends_in_s, self.story.t))


def notes(event: ev.Event) -> list[ev.Noted]:
    return [event] if isinstance(event, ev.Noted) else []


def test_the_last_checkpoint_is_begun_two_writes_before_the_limit_wherever_it_is_by_then() -> None:
    """One that is under way ends, and then the newest is written. The limit is moved, both ways."""
    run = Run()
    run.limit(86_400.0)
    run.waits(10.0)
    run.limit(2 * WRITE_S + 400.0)
    run.waits(200.0)
    assert (run.warned, run.steps) == (0, [8])
    run.limit(86_400.0)
    run.waits(300.0)
    assert (run.warned, run.steps) == (0, [8])
    run.limit(2 * WRITE_S)
    run.waits(1.0)
    assert (run.warned, run.steps) == (1, [8, 16])


def test_until_the_limit_each_newest_step_is_written_and_nobody_warns_twice() -> None:
    run = Run()
    run.limit(2 * WRITE_S)
    run.waits(WRITE_S + 10.0)  # longer than Slurm's warning hurries
    run.all_written()
    for rank, node in enumerate(run.nodes):
        newer = structs.replace(image(rank), step=24)
        run.takes(run.after.hears(node, msg.Held(copies=(newer,))))
    run.limit(WRITE_S - 10.0)
    run.waits(1.0)
    assert (run.warned, run.steps) == (1, [8, 16, 24])


def test_a_limit_that_is_moved_away_is_warned_of_again() -> None:
    run = Run()
    run.limit(2 * WRITE_S)
    run.waits(1.0)
    run.limit(86_400.0)
    run.waits(2 * MOVED_S)
    run.limit(2 * WRITE_S)
    run.waits(1.0)
    assert run.warned == 2


def test_a_write_that_takes_longer_than_the_last_one_did_counts() -> None:
    """Storage has become slow: the write that is under way tells so."""
    run = Run(write_s=2.0)
    run.takes(run.after.machine.on_warning(run.story.t))
    run.limit(900.0)
    run.waits(1.0)
    assert run.steps == [8, 16]
    run.waits(300.0)
    assert run.warned == 1


def test_a_signal_that_ends_something_before_the_limit_comes_after_the_last_checkpoint() -> None:
    """Slurm may send it a minute earlier than asked for."""
    run = Run(write_s=2.0, signal_s=600.0)
    run.limit(600.0 + MOVED_S + LEAST_S + 20.0)
    run.waits(10.0)
    assert (run.warned, run.steps) == (0, [8])
    run.waits(20.0)
    assert (run.warned, run.steps) == (1, [8, 16])


def test_slurms_own_warning_is_enough_where_writes_are_fast() -> None:
    run = Run(write_s=2.0)
    run.limit(LEAST_S + MOVED_S)
    run.takes(run.after.machine.on_warning(run.story.t))
    run.waits(LEAST_S)
    assert run.warned == 0


def test_slurm_is_asked_now_and_then_and_a_limit_that_it_does_not_tell_stays() -> None:
    run = Run(write_s=1.0)
    asked = run.asked
    assert asked > 0
    run.limit(800.0)
    run.waits(3 * ASK_EVERY_S)
    assert run.asked - asked == 3
    run.limit(None)
    assert run.after.machine.foreseen.limit.ends_at == pytest.approx(
        run.story.t + 800.0 - 3 * ASK_EVERY_S, abs=1.0
    )
    run.limit(math.inf)
    run.waits(900.0)
    assert run.warned == 0


@pytest.mark.parametrize(
    ("job", "seconds"),
    [
        ({"JobState": "RUNNING", "EndTime": "2026-11-26T13:32:35", "TimeLimit": "01:00:00"}, 60.0),
        ({"JobState": "SIGNALING", "EndTime": "2026-11-26T13:32:35"}, 60.0),
        ({"JobState": "RUNNING", "EndTime": "2026-11-26T13:30:00"}, 0.0),
        ({"JobState": "RUNNING", "EndTime": "Unknown", "TimeLimit": "UNLIMITED"}, math.inf),
        ({"JobState": "PENDING", "EndTime": "2026-11-26T13:32:35", "TimeLimit": "01:00:00"}, None),
        ({}, None),
    ],
)
def test_what_slurm_says_of_the_limit(job: dict[str, str], seconds: float | None) -> None:
    assert limit_in_s(job, utc_time("2026-11-26T13:31:35")) == seconds
