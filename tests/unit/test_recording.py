"""What the journal is told of a run that goes on for months as usual, and what at once."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs

from jurymast.core.goodput import Ledger
from jurymast.core.judges.silence import WatcherClock
from jurymast.core.nodes.hangs import Reports
from jurymast.core.run.recording import PAUSE_MAX_S, YOUNG_S, Teller
from jurymast.core.state import events as ev
from jurymast.core.state.messages import Trained, beat_of
from jurymast.core.supervision.machine import Supervision
from jurymast.journal import initial_state, replay
from jurymast.report.curves import curves
from jurymast.report.goodput import report_blocks, report_view
from jurymast.report.runs import ps_blocks, run_row
from jurymast.report.status import _training, read_status
from jurymast.report.text import Line, Table
from support.reports import reported
from support.stories import Story

DAY_S = 86_400.0
STALL_S = 0.2


class Training:
    """Two nodes with a rank each that do a step a second. Every minute they save to memory, replicas are made
    and a copy is written to shared storage."""

    def __init__(self) -> None:
        self.story = Story(active=2).running(10)
        self.state = self.story.state
        self.reports = Reports(self.state, WatcherClock(0.1, self.story.t))
        for node in self.state.placement:
            self.reports.expect(node)
        self.teller = Teller(self.state, self.reports)
        self.done, self.saved = self.state.step, 0
        self.at_first = len(self.story.events)
        self.samples = 0  # a step, of 1000 tokens each

    def feed(self, event: ev.Event) -> None:
        self.story.feed(event)

    def save(self, tier: str = "memory", ok: bool = True, stall_s: float = STALL_S) -> None:
        copied = tier != "memory"
        save = ev.Saved(
            t=self.story.t, attempt=self.state.attempt, step=self.done, tier=tier, ok=ok,
            stall_s=0.0 if copied else stall_s, size_bytes=1000, copied=copied,
        )  # fmt: skip
        if self.teller.on_saved(save, self.story.t):
            self.feed(save)

    def look(self, *, forced: bool = False) -> None:
        for node in self.state.placement:
            samples = self.samples * self.done
            rank = reported(step=self.done, beats=self.done, beat_s=0.0)
            trained = [Trained(samples=samples, tokens=1000 * samples)]
            self.reports.on_heartbeat(node, beat_of(self.state.attempt, [rank], trained=trained))
        for told in self.teller.on_time(self.story.t, forced=forced):
            self.feed(told)

    def goes_on(self, seconds: float) -> Training:
        for _ in range(round(seconds / 60.0)):
            self.story.t += 60.0 - STALL_S
            self.done += 60
            self.look()
            self.story.t += STALL_S
            self.saved += 1
            for tier in ("memory", "peer", "shared"):
                self.save(tier)
        return self

    def told(self) -> list[ev.Event]:
        return self.story.events[self.at_first :]


def test_the_journal_grows_with_what_happens_and_hardly_with_time() -> None:
    training = Training().goes_on(10 * DAY_S)
    lines = Counter(type(event).__name__ for event in training.told())
    before = sum(lines.values())
    training.goes_on(10 * DAY_S)
    more = len(training.told()) - before
    # A line of progress and one of each copy, every ten minutes.
    assert more <= 1.1 * 3 * 10 * DAY_S / PAUSE_MAX_S
    assert before < 3 * more


def test_samples_and_tokens_a_second_are_told_however_rarely(tmp_path: Path) -> None:
    """64 samples of 1000 tokens a step, and a step a second; of the next attempt nothing is said."""
    training = Training()
    training.samples = 64
    training.goes_on(DAY_S)
    state = training.state
    assert state.samples_s == pytest.approx(64.0, rel=0.01)
    assert state.tokens_s == pytest.approx(64_000.0, rel=0.01)
    watcher = read_status(training.story.write(tmp_path / "run"))
    view, row = watcher.view(), run_row(watcher, {})
    assert view["a_second"]["samples"] == row["a_second"]["samples"] == pytest.approx(64.0, rel=0.01)
    assert "64.2 samples/s, 64,200 tokens/s" in _training(view, training.story.t)
    table = ps_blocks([row])[0]
    assert isinstance(table, Table)
    assert dict(zip(table.headers, table.rows[0], strict=True))["THROUGHPUT"] == "64,200 tokens/s"
    report = report_view(watcher)
    assert report["a_second"] == pytest.approx({"samples": 64.0, "tokens": 64_000.0}, rel=0.01)
    assert any(
        "64,000 tokens/s while steps were done" in b.text
        for b in report_blocks(report)
        if isinstance(b, Line)
    )
    labels = [plot.label for plot in curves(watcher.ledger.account())]
    assert labels[1:] == [
        "time of a step", "samples a second", "tokens a second", "time that training stood still for a save",
    ]  # fmt: skip
    training.samples = 0
    training.goes_on(3600.0)
    assert (state.samples_s, state.tokens_s) == (0.0, 0.0)


def test_every_save_of_a_young_run_is_told() -> None:
    training = Training().goes_on(YOUNG_S)
    told = [e for e in training.told() if isinstance(e, ev.Saved)]
    assert len(told) == 3 * training.saved == 30


def test_what_was_not_told_singly_is_in_the_state_and_in_the_books(tmp_path: Path) -> None:
    training = Training().goes_on(5 * DAY_S)
    training.look(forced=True)
    state, told = training.state, [e for e in training.told() if isinstance(e, ev.Saved)]
    assert len(told) < training.saved
    assert state.saved_step == training.done
    assert {name: tier.step for name, tier in state.saved.items()} == {
        "memory": training.done, "peer": training.done, "shared": training.done,
    }  # fmt: skip
    assert list(state.stalls) == pytest.approx([STALL_S] * len(state.stalls))
    assert replay(training.story.write(tmp_path / "run")) == state

    ledger = Ledger(initial_state(training.story.plan))
    for event in training.story.events:
        ledger.feed(event)
    assert ledger.saves.done == training.saved
    assert ledger.saves.stall_s == pytest.approx(training.saved * STALL_S)
    assert ledger.saves.interval_s / ledger.saves.intervals == pytest.approx(60.0, rel=0.01)
    account = ledger.account()
    assert account.placed_us("checkpoint_stall") / 1e6 == pytest.approx(training.saved * STALL_S, rel=0.01)
    assert account.placed_us("unknown") == 0


def test_the_agreement_on_saves_hears_of_every_one() -> None:
    state, t = old().state, time.time()
    state.submitted_at = t - 5 * DAY_S
    supervision = Supervision(state, "/runs/a", t)
    supervision.agreement._begin()
    first = ev.Saved(t=t, attempt=1, step=state.step, tier="memory", ok=True, stall_s=STALL_S)
    told = [
        one
        for step in (0, 1)
        for one in supervision._saved(structs.replace(first, step=first.step + step), t)
    ]
    assert len(told) == 1
    assert state.saved_on("memory") == first.step
    assert supervision.agreement._saved_step == first.step + 1


def test_of_a_run_that_goes_on_the_books_wait_as_long_as_the_journal_is_silent() -> None:
    training = Training().goes_on(10 * DAY_S)
    ledger = Ledger(initial_state(training.story.plan))
    for event in training.story.events:
        ledger.feed(event)
    account = ledger.account(training.story.t + 500.0)
    assert account.placed_us("unknown") == 0


def old() -> Training:
    """A run of some days that has just told what there was to tell."""
    training = Training().goes_on(3 * DAY_S)
    training.look(forced=True)
    training.save()
    training.story.t += 1.0
    return training


def told_next(training: Training, **changes: object) -> bool:
    before = len(training.story.events)
    training.done += 1
    training.save(**changes)  # type: ignore[arg-type]
    return len(training.story.events) > before


def test_a_save_that_differs_is_told_at_once() -> None:
    assert not told_next(old())
    assert told_next(old(), ok=False)
    assert told_next(old(), stall_s=4 * STALL_S)
    failed = old()
    told_next(failed, ok=False)
    assert told_next(failed)  # the first after a failure
    asked = old()
    asked.feed(
        ev.CadenceSet(
            t=asked.story.t, attempt=1, number=1, from_step=asked.done, first_step=asked.done + 1,
            every_steps=60, reason="requested by ada", by="ada",
        )
    )  # fmt: skip
    assert told_next(asked)  # who asked waits for it
    successor = old()
    successor.teller = Teller(successor.state, successor.reports)
    assert told_next(successor)


def test_the_first_save_after_a_restore_is_told_at_once() -> None:
    training = old()
    story = training.story
    training.look(forced=True)
    story.lost("n2")
    story.stopped().recovered(training.done, training.done + 2)
    assert story.state.attempt == 2
    training.done += 2
    assert told_next(training)
    assert not told_next(training)


def test_a_save_just_before_the_end_of_an_attempt_is_not_forgotten() -> None:
    training = old()
    training.look(forced=True)
    assert not told_next(training, stall_s=0.3)
    training.look(forced=True)  # no further step was done
    assert training.state.saved_step == training.done
    last = training.story.events[-1]
    assert isinstance(last, ev.Progress)
    assert (last.saves, last.saved_step, last.saved_in, last.stall_s) == (1, training.done, "memory", 0.3)


def test_older_saves_told_late_do_not_turn_the_state_back() -> None:
    training = old()
    training.save()
    training.done += 1
    assert told_next(training, stall_s=10.0)
    newest = training.done
    training.look(forced=True)
    assert training.state.saved["memory"].step == newest
    events = [structs.replace(e) for e in training.story.events if isinstance(e, ev.Progress)]
    assert events[-1].saved_step < newest
