"""Who has saved what: the ranks' own word (train_tiny.py --tell-saves) beside the journal's."""

from __future__ import annotations

import re

from jurymast.core.state import events as ev
from jurymast.core.state.schedule import Schedule
from support.runs import RunUnderTest


def saved_by_rank(run: RunUnderTest, attempt: int) -> list[list[int]]:
    """The steps that each rank of an attempt has saved, as the ranks say."""
    logs = run.directory.rank_logs(attempt)
    return [[int(step) for step in re.findall(r"^saved (\d+)$", log.read_text(), re.M)] for log in logs]


def saves(run: RunUnderTest) -> list[ev.Saved]:
    """By ranks, not copies of those."""
    return [e for e in run.events() if isinstance(e, ev.Saved) and e.ok and not e.copied]


def agreed(run: RunUnderTest) -> list[ev.CadenceSet]:
    return [e for e in run.events() if isinstance(e, ev.CadenceSet)]


def named(run: RunUnderTest, attempt: int, done: int) -> list[int]:
    """The steps up to `done` that the schedules in the journal have an attempt's ranks save at."""
    expected = []
    schedules = [e for e in agreed(run) if e.attempt == attempt]
    for number, told in enumerate(schedules):
        until = min([other.from_step for other in schedules[number + 1 :]] + [done + 1])
        schedule = Schedule(told.number, told.from_step, told.first_step, told.every_steps)
        due = schedule.due_after(told.from_step - 1)
        while due < until:
            expected.append(due)
            due = schedule.due_after(due)
    return expected


def all_alike(run: RunUnderTest, attempt: int, tier: str = "memory") -> list[int]:
    """The saves of an attempt that is over: every rank's alike, each complete, and just those that the
    schedules in the journal name, unless there was no room. After the newest that the journal knows to be
    complete the end of the attempt may have cut them, or the word that there was no room for one."""
    told = [e for e in run.events() if isinstance(e, ev.Saved) and (e.attempt, e.tier) == (attempt, tier)]
    skipped, complete = {e.step for e in told if not e.ok}, {e.step for e in told if e.ok}
    by_rank = saved_by_rank(run, attempt)
    done = min(max(complete, default=0), *(max(rank, default=0) for rank in by_rank))
    steps = [[step for step in rank if step <= done and step not in skipped] for rank in by_rank]
    assert all(rank == steps[0] for rank in steps), by_rank
    assert set(steps[0]) <= complete
    expected = [step for step in named(run, attempt, done) if step not in skipped]
    assert steps[0] == expected, f"{steps[0]} are not {expected}; skipped {skipped}\n{run.story()}"
    return steps[0]


def check_restores(run: RunUnderTest, least: int = 0) -> None:
    """Every attempt restored what it was told to, and never less than what was safe on two nodes; the last
    that restored anything had at least the step `least`. Weights alone do not tell: a training that is done
    again from its beginning has the same."""
    safe, restored = 0, dict[int, int]()
    planned: ev.RestorePlanned | None = None
    for event in run.events():
        if isinstance(event, ev.Saved) and event.ok and event.tier in ("peer", "shared"):
            safe = max(safe, event.step)
        elif isinstance(event, ev.RestorePlanned):
            planned = event
            assert event.step >= safe, run.story()
        elif isinstance(event, ev.Restored):
            assert planned is not None
            if event.attempt == planned.attempt:  # else a node that is back says what may be known already
                assert event.step == planned.step, run.story()
                restored[event.attempt] = event.step
        elif isinstance(event, ev.Progress):
            assert event.attempt in restored, f"attempt {event.attempt} restored nothing\n{run.story()}"
    newest = restored[max(restored)]
    assert newest >= least, f"step {newest} was restored, not {least} or later\n{run.story()}"
