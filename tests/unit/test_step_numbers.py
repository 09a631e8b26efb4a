"""What is known of steps whose number the script does not say: rework, incidents, and when a run does nothing
new. Nothing that is not known is counted in the run's favour."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jurymast
from jurymast.core import events as ev
from jurymast.core.goodput import Ledger
from jurymast.core.run.loops import fruitless
from jurymast.journal import initial_state
from jurymast.worker import link
from jurymast.worker.beginning import FilesRead, steps_by
from jurymast.worker.link import Link, read_slot
from support.stories import Story

TO_KNOW = [("fresh", True), ("unknown", False), ("lost", False)]


def ledger_of(story: Story) -> Ledger:
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    return ledger


def began(story: Story, step: int | None = None, reads: str = "", *, given: bool = False) -> Story:
    story.feed(ev.BeganAt(t=story.t, attempt=story.state.attempt, step=step, reads=reads, given=given))
    return story


def attempt(story: Story, steps: int, kind: str = "fresh", base: int = 0) -> Story:
    """An attempt that does `steps` steps as the supervisor hears of them, and then fails."""
    story.backed_off().ranks_up()
    absolute = kind != "lost" and (kind != "unknown" or story.state.attempt == 1)
    match kind:
        case "fresh":
            began(story)
        case "unknown":
            began(story, reads="/data/last.pt")
        case "counted":
            began(story, base)
    first = base if absolute else 0
    story.stepped(first + 1, absolute=absolute).stepped(first + steps, absolute=absolute)
    return story


def failed(story: Story) -> Story:
    story.failed(0, exit_code=-9)
    return story.stopped()


@pytest.mark.parametrize(("kind", "known"), TO_KNOW)
def test_a_script_without_checkpoints_does_its_steps_again(kind: str, known: bool) -> None:
    """60 steps, for which 162 were done: a third of the time counted, not 95 %."""
    story = attempt(Story(spares=0).allocated(), 51, kind)
    attempt(failed(story), 51, kind)
    attempt(failed(story), 60, kind).finished()
    ledger = ledger_of(story)
    account = ledger.account()
    low, high = (account.ratios(at_most=most)["runtime_goodput"] or 0.0 for most in (False, True))
    assert ledger.steps.done == 162
    assert low < 0.4
    if known:
        assert low == high
        assert (ledger.steps.again, ledger.steps.maybe_again) == (102, 0)
        assert "maybe_rework" not in account.totals
    else:
        assert high > 0.8
        assert (ledger.steps.again, ledger.steps.maybe_again) == (0, 102)


def test_what_the_optimizer_counts_is_where_the_script_resumed() -> None:
    story = attempt(Story(spares=0).allocated(), 51)
    attempt(failed(story), 20, "counted", base=40).finished()
    ledger = ledger_of(story)
    assert (ledger.steps.done, ledger.steps.again, ledger.steps.maybe_again) == (71, 11, 0)
    assert story.state.best_step == 60


def test_a_number_that_the_script_gives_later_settles_what_was_unknown() -> None:
    story = attempt(Story(spares=0).allocated(), 51)
    attempt(failed(story), 10, "unknown")
    unknown = ledger_of(story).steps
    assert (unknown.again, unknown.maybe_again) == (0, 10)
    began(story, 30, given=True)
    story.stepped(41).finished()
    ledger = ledger_of(story)
    assert (ledger.steps.done, ledger.steps.again, ledger.steps.maybe_again) == (62, 11, 0)
    assert "maybe_rework" not in ledger.account().totals


ATTEMPTS = st.lists(st.tuples(st.integers(2, 60), st.integers(0, 100)), min_size=1, max_size=6)


@given(ATTEMPTS, st.sampled_from(["unknown", "lost", "counted"]))
def test_the_truth_lies_between_the_bounds(attempts: list[tuple[int, int]], kind: str) -> None:
    """Each attempt does some steps from a place that only the script knows, not beyond what is done."""
    story, best, seen = Story(spares=0, checked=False).allocated(), 0, set[int]()
    story.state.settings = type(story.state.settings)(attempts_without_step=None)
    for number, (steps, where) in enumerate(attempts):
        if number:
            failed(story)
            if story.state.ended:
                break
        base = best * where // 100 if number else 0
        attempt(story, steps, kind, base)
        seen |= set(range(base + 1, base + steps + 1))
        best = max(best, base + steps)
        done = ledger_of(story).steps
        again = done.done - len(seen)
        assert done.again <= again <= done.again + done.maybe_again
        assert kind != "counted" or again == done.again


def test_an_incident_ends_when_its_step_is_done_again_whatever_runs_in_between() -> None:
    """The optimizer's steps are heard before the script says which step it is."""
    story = Story(spares=0).allocated().ranks_up()
    began(story)
    story.stepped(1)
    later = story.t + 20.0
    story.feed(
        ev.Progress(t=later, attempt=1, step=41, stepped_at=later, absolute=True, given=True, step_s=0.5)
    )
    story.t += 20.0
    failed(story)
    story.backed_off().ranks_up().stepped(1, absolute=False)
    assert story.incident.open, "the script is about to say which step this is"
    assert story.state.without_progress == 1, "it may be a step that was done before"
    story.stepped(31)
    assert story.incident.open
    story.stepped(42)
    assert not story.incident.open
    assert story.incident.rework_known
    assert story.incident.seconds()["rework"] > 10.0


def test_a_crash_loop_is_one_although_its_first_steps_have_no_number() -> None:
    story = Story(spares=0).allocated().ranks_up()
    story.feed(ev.Progress(t=story.t, attempt=1, step=9, stepped_at=story.t, absolute=True, given=True))
    failed(story)
    for number in (1, 2, 3):
        assert len(fruitless(story.state)) == number
        story.backed_off().ranks_up().stepped(1, absolute=False)
        failed(story)


def test_unknown_rework_is_said_to_be_a_bound() -> None:
    story = attempt(Story(spares=0).allocated(), 51)
    attempt(failed(story), 20, "unknown")
    assert not story.incident.open
    told = story.incident.to_json()
    assert (told["numbered"], told["rework_known"]) == (True, False)
    failed(story)
    assert not story.incident.numbered


# ---- what a rank sees of its script


@dataclass
class Kept:
    """An optimizer as far as its count is concerned."""

    state: dict[int, dict[str, Any]] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        (Kept(), None),
        (Kept(state={1: {"momentum_buffer": 0.5}}), None),
        (Kept(state={1: {"exp_avg": 0.1, "step": 40}}), 40),
        (Kept(state={1: {"step": 0}}), None),
        (Kept(state={1: {"step": 0}, 2: {"step": 7.0}}), 7),
        (Kept(param_groups=[{"lr": 0.1, "step": 12}]), 12),
        (Kept(state={1: {"step": "many"}}), None),
        (object(), None),
    ],
)
def test_the_count_of_an_optimizer(optimizer: object, steps: int | None) -> None:
    assert steps_by(optimizer) == steps


def test_files_that_an_earlier_attempt_wrote_are_seen_and_no_others(tmp_path: Path) -> None:
    def written(name: str, at: float) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("state")
        os.utime(path, (at, at))
        return path

    read = FilesRead(since=1000.0, until=2000.0, own=str(tmp_path / "logs" / ""))
    read.watch()
    for path in (
        written("data.bin", 900.0), written("made-now", 2500.0), written("module.py", 1500.0),
        written("logs/rank-00000.log", 1500.0),
    ):  # fmt: skip
        path.read_text()
    state = written("last.pt", 1500.0)
    state.open("a").close()
    (tmp_path / "missing").exists()
    assert read.found == ""
    os.close(os.open(state, os.O_RDONLY))
    assert read.found == str(state)
    read.over()


def test_steps_are_numbered_by_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    page = memoryview(bytearray(4096)).cast("B")
    this = Link(page, "", 0)
    said: list[Any] = []
    monkeypatch.setattr(link, "_current", this)
    monkeypatch.setattr(this, "emit", said.append)
    monkeypatch.setenv("RANK", "0")
    this.optimizer_stepped()
    this.optimizer_stepped()
    jurymast.step(42)
    this.optimizer_stepped()
    jurymast.step(43)
    beat = read_slot(page, 0)
    assert (beat.step, beat.explicit) == (43, True)
    assert [(one.step, one.given) for one in said] == [(40, True)]
    with pytest.raises(TypeError):
        jurymast.step(1.5)  # type: ignore[arg-type]
