"""What is known of steps whose number the script does not say: rework, incidents, and when a run does nothing
new. Nothing that is not known is counted in the run's favour."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jurymast
from jurymast.cli.resubmit import command as resubmit
from jurymast.cli.submit import command as submit
from jurymast.cluster import slurm
from jurymast.cluster.slurm import Request, Submitted, write_run_directory
from jurymast.core.goodput import Ledger
from jurymast.core.judges.loops import fruitless
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase
from jurymast.errors import PolicyError, RunNotFoundError, UsageError
from jurymast.journal import initial_state
from jurymast.report.follow import end_lines
from jurymast.report.goodput import page, report_blocks, report_view
from jurymast.report.incidents import MORE
from jurymast.report.liveness import Liveness
from jurymast.report.runs import COLUMNS, ps_blocks, run_row
from jurymast.report.status import StatusWatcher, doubts, read_status, status_blocks
from jurymast.report.text import Line, Table, duration, plain_table, render
from jurymast.report.which_run import find_run
from jurymast.worker import link
from jurymast.worker.beginning import FilesRead, _telling, steps_by
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


def test_a_run_that_goes_on_from_another_run_s_checkpoint_begins_there_again() -> None:
    """Submitted again, say: what it read was there before it was submitted."""
    story = attempt(Story(spares=0).allocated(), 11, "counted", base=40)
    attempt(failed(story), 20, base=40).finished()
    assert story.state.base == 40
    ledger = ledger_of(story)
    assert (ledger.steps.done, ledger.steps.again, ledger.steps.maybe_again) == (31, 11, 0)


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


def test_where_a_numbered_attempt_began_is_heard_after_its_first_number_at_times() -> None:
    """They come by two ways. The number counts."""
    story = attempt(Story(spares=0).allocated(), 51)
    failed(story).backed_off().ranks_up()
    story.feed(ev.Progress(t=story.t, attempt=2, step=40, stepped_at=story.t, absolute=True, given=True))
    began(story, 39, given=True)
    assert (story.state.step, story.state.absolute, story.state.best_step) == (40, True, 51)


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


@pytest.mark.parametrize(
    "reads",
    [
        lambda path: subprocess.run(["cp", "-r", path, f"{path}-copied"], check=True),
        lambda path: subprocess.run(["sh", "-c", f"true; cat '{path}'>/dev/null"], check=True),
        lambda path: subprocess.run(["true", f"--from={path}"], check=True),
        lambda path: os.posix_spawn("/bin/true", ["true", path], {}),
        lambda path: sqlite3.connect(path).close(),
        lambda path: _telling(lambda f: f)(f=path),
    ],
)
def test_files_that_others_read_for_the_script_are_seen(
    reads: Callable[[str], object], tmp_path: Path
) -> None:
    state = tmp_path / "last.pt"
    state.write_text("")
    os.utime(state, (1500.0, 1500.0))
    read = FilesRead(since=1000.0, until=2000.0)
    read.watch()
    subprocess.run(["true", ".", "/", "-v", str(tmp_path / "missing")], check=True)
    assert read.told() == ""
    reads(str(state))
    read.over()
    assert read.told() == str(state)


def test_a_library_that_reads_files_by_itself_may_have_read_any(monkeypatch: pytest.MonkeyPatch) -> None:
    read = FilesRead(since=1000.0, until=2000.0)
    assert read.told() == ""
    monkeypatch.setitem(sys.modules, "h5py", ModuleType("h5py"))
    assert read.told() == "files by h5py"


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


@pytest.mark.parametrize("wrong", [-3.0, 1e300, float("nan"), float("inf")])
def test_a_script_says_what_it_trained_on(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    page = memoryview(bytearray(4096)).cast("B")
    monkeypatch.setattr(link, "_current", Link(page, "", 0))
    jurymast.step(1, samples=512)
    jurymast.step(2, samples=512, tokens=1_048_576)
    jurymast.step(3)
    beat = read_slot(page, 0)
    assert (beat.step, beat.samples, beat.tokens) == (3, 1024, 1_048_576)
    jurymast.step(4, samples=1024 * wrong)
    assert (read_slot(page, 0).step, read_slot(page, 0).samples) == (4, 0), "no number that can be told"


def numbers_told(monkeypatch: pytest.MonkeyPatch, given: dict[int, int], steps: int) -> list[int]:
    """The step that a rank tells of after each of its optimizer's `steps`. `given`: what the script says
    after some of them."""
    page = memoryview(bytearray(4096)).cast("B")
    this = Link(page, "", 0)
    monkeypatch.setattr(link, "_current", this)
    told = []
    for done in range(1, steps + 1):
        this.optimizer_stepped()
        if done in given:
            jurymast.step(given[done])
        told.append(read_slot(page, 0).step)
    return told


def test_numbers_that_a_script_gives_seldom_are_completed_by_its_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the steps since the last one would seem not to be done, and cost nothing at a failure."""
    each_fifth = {5: 35, 10: 40, 15: 45}
    assert numbers_told(monkeypatch, each_fifth, 17) == [1, 2, 3, 4, *range(35, 48)]
    two_at_once = {2: 31, 4: 32, 6: 33}  # of a number
    assert numbers_told(monkeypatch, two_at_once, 7) == [1, 31, 31, 32, 32, 33, 33]


def test_the_number_of_an_epoch_is_none_of_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert numbers_told(monkeypatch, {3: 1, 6: 2, 9: 3}, 9) == [*range(1, 10)]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("jurymast.step(1) is not used: the optimizer has done 3 steps by now")


# ---- what commands say of it


def test_every_command_tells_the_same_and_warns(tmp_path: Path) -> None:
    story = attempt(Story(spares=0).allocated(), 51)
    failed(story)
    attempt(story, 51, "unknown").finished()
    watcher = read_status(story.write(tmp_path / story.plan.run))
    view, row, report = watcher.view(), run_row(watcher, {}), report_view(watcher)
    assert view["restarts"] == row["restarts"] == 1
    assert view["requeues"] == 0
    assert row["goodput"] == pytest.approx(report["ratios"]["runtime_goodput"], abs=1e-4)
    assert row["goodput_at_most"] == pytest.approx(report["ratios_at_most"]["runtime_goodput"], abs=1e-4)
    text = "\n".join(line.text for line in ps_blocks([row]) if isinstance(line, Line))
    for warnings in (view["warnings"], report["warnings"], [text], end_lines(story.state, Liveness("ended"))):
        assert any("jurymast.step(n)" in warning for warning in warnings)
        assert any("no checkpoint through jurymast" in warning for warning in warnings)


def told_of(watcher: StatusWatcher, story: Story) -> list[str]:
    """What `status`, `report` and its page say."""
    report = report_view(watcher, Liveness("ended"), story.t)
    blocks = (status_blocks(watcher.view(), now=story.t), report_blocks(report))
    texts = [render(one, terminal=False) for one in blocks]
    return [*texts, page(report, watcher.account(Liveness("ended"), story.t), watcher.state)]


def test_the_time_of_an_incident_is_a_least_one_where_its_rework_is_not_known(tmp_path: Path) -> None:
    """The second one begins at a step of the second attempt, which nobody can number."""
    story = attempt(Story(spares=0).allocated(), 51)
    attempt(failed(story), 20, "unknown")
    attempt(failed(story), 30, "unknown").finished()
    watcher = read_status(story.write(tmp_path / story.plan.run))
    values = report_view(watcher)
    shown, reported, on_page = told_of(watcher, story)
    took = [sum(one["seconds"].values()) for one in values["incidents"]]
    assert [one["rework_known"] for one in values["incidents"]] == [False, False]
    for text in (shown, reported, on_page):
        assert MORE in text
    rows = [line for line in shown.splitlines() if "worker_killed" in line]
    assert ["51" in rows[0], "?+20" in rows[1]] == [True, True]
    assert all(f"{duration(each)}+" in row for each, row in zip(took, rows, strict=True))
    assert all(f"{each:.2f}+" in reported for each in took)
    assert "(step 20 of attempt 2, begun at a step that is not known)" in reported
    assert f"cost at least {duration(sum(took))} of training" in on_page
    assert "?+20" in on_page


def test_the_time_of_an_incident_that_is_known_has_no_sign_of_doubt(tmp_path: Path) -> None:
    story = attempt(failed(attempt(Story(spares=0).allocated(), 51)), 60).finished()
    watcher = read_status(story.write(tmp_path / story.plan.run))
    for text in told_of(watcher, story):
        assert MORE not in text
        assert "cost at least" not in text


def test_a_run_that_never_trained_says_so(tmp_path: Path) -> None:
    story = Story(spares=0).allocated().ranks_up().finished()
    assert story.state.phase is Phase.SUCCEEDED
    watcher = read_status(story.write(tmp_path / story.plan.run))
    assert any("no rank did a training step" in text for text in watcher.view()["warnings"])
    assert any("no rank did a training step" in text for text in end_lines(story.state, Liveness("ended")))


def test_what_ranks_did_without_a_step_that_is_seen_may_have_counted(tmp_path: Path) -> None:
    """A script that updates its weights by hand, without an optimizer of torch, and was killed once."""
    story = Story(spares=0).allocated().ranks_up()
    story.failed(0, exit_code=-9)
    story.stopped().backed_off().ranks_up().wait(60.0)
    story.finished()
    watcher = read_status(story.write(tmp_path / story.plan.run))
    report = report_view(watcher, Liveness("ended"), story.t)
    (incident,) = report["incidents"]
    assert not incident["rework_known"]
    low, high = report["ratios"]["runtime_goodput"], report["ratios_at_most"]["runtime_goodput"]
    assert low == 0.0
    assert high > 0.5
    assert MORE in told_of(watcher, story)[0]


def test_memory_is_gone_with_the_nodes(tmp_path: Path) -> None:
    """It was saved: the script is not told to save it. But nothing that is left has it."""
    story = Story(spares=0).running(200)
    story.feed(ev.Saved(t=story.t, attempt=1, step=200, tier="memory", ok=True, stall_s=0.1, size_bytes=1000))
    running = read_status(story.write(tmp_path / "running")).view(Liveness("alive"))
    assert (running["saved_step"], running["tiers"]["memory"]["step"]) == (200, 200)
    story.finished()
    view = read_status(story.write(tmp_path / "ended")).view()
    assert (view["saved_step"], view["tiers"]["memory"]["step"]) == (None, None)
    told = next(text for text in view["warnings"] if "in no checkpoint" in text)
    assert "was saved in memory, but did not reach storage" in told
    assert "would have kept" not in told


def test_warnings_name_only_what_there_is(tmp_path: Path) -> None:
    story = Story(spares=0).running(3)
    story.feed(ev.LossNotFinite(t=story.t, attempt=1, rank=0, step=3, loss="nan"))
    assert "jurymast checkpoints" not in doubts(story.state)[0], "there are none"
    story.saved(3)
    assert "jurymast checkpoints" in doubts(story.state)[0]
    for loss, told in (("nan", "the gradient was nan at step 3"), ("none", "the optimizer had no gradients")):
        lost = ev.LossNotFinite(t=story.t, attempt=1, rank=0, step=3, loss=loss, of="gradient")
        assert doubts(replace(story.state, loss=lost))[0].startswith(told)
    story.stepped(4).finished()
    told = read_status(story.write(tmp_path / "run")).view()["warnings"]
    assert any(text.startswith("the last step is in no checkpoint (the newest is step 3)") for text in told)


@pytest.mark.parametrize("width", [None, 200, 120, 100])
def test_a_narrow_terminal_shows_rows_whole(tmp_path: Path, width: int | None) -> None:
    story = Story(spares=0).running(200)
    row = run_row(read_status(story.write(tmp_path / story.plan.run)), {})
    row.update(partition="accelerated", user="somebody", nodelist="(Nodes required for job are DOWN)")
    table = ps_blocks([row], width)[0]
    assert isinstance(table, Table)
    assert row["run"] in plain_table(table)[1]
    if width is None:
        assert len(table.headers) == len(COLUMNS) - 1, "no throughput"
    elif width >= 120:
        assert max(map(len, plain_table(table))) <= width


# ---- how a run is named


def test_a_run_is_named_by_its_beginning_by_the_name_in_it_or_as_the_last(tmp_path: Path) -> None:
    names = ["20261117-100000-gpt-abcd", "20261117-110000-gpt-beef", "20261118-090000-vit-cafe"]
    for name in names:
        Story(spares=0).running(1).write(tmp_path / name)
    assert find_run("20261118", tmp_path).root.name == names[2]
    assert find_run("20261117-11", tmp_path).root.name == names[1]
    assert find_run("last", tmp_path).root.name == names[2]
    assert find_run(names[0], tmp_path).root.name == names[0]
    with pytest.raises(RunNotFoundError, match="begins the ids of 2 runs"):
        find_run("20261117", tmp_path)
    assert find_run("vit", tmp_path).root.name == names[2]
    assert find_run("beef", tmp_path).root.name == names[1]
    with pytest.raises(RunNotFoundError, match=f"gpt is in the ids of 2 runs: {names[1]}, {names[0]}"):
        find_run("gpt", tmp_path)
    with pytest.raises(RunNotFoundError, match="there is no run gp"):
        find_run("gp", tmp_path)
    Story(spares=0).running(1).write(tmp_path / "last")
    assert find_run("last", tmp_path).root.name == "last", "a name comes first"


# ---- the way on


@pytest.mark.parametrize("module", [False, True])
def test_a_run_is_submitted_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    story = Story(spares=2)
    story.plan = replace(
        story.plan, cluster="local", working_directory=str(tmp_path), ranks_per_node=3, module=module,
        script="train" if module else "train.py", arguments=("--lr", "1 e", "--"), exclude=("n7", "n[8-9]"),
    )  # fmt: skip
    directory = story.allocated().write(tmp_path / "runs" / story.plan.run)
    directory.policy_file.write_text("failures:\n  restarts:\n    application: 7 per 2h\n")
    asked: list[Request] = []

    def submitted(request: Request) -> Submitted:
        asked.append(request)
        return Submitted(request, pid=1)

    monkeypatch.setattr("jurymast.cluster.slurm.submit", submitted)
    for words in ([], ["--set", "spares=4", "--set", "failures.attempts_without_step=9"]):
        resubmit.main([story.plan.run, "--runs", "runs", *words], standalone_mode=False)
    first, second = (request.plan for request in asked)
    for plan in (first, second):
        for name in (
            "cluster",
            "active",
            "ranks_per_node",
            "script",
            "module",
            "arguments",
            "exclude",
            "working_directory",
            "name",
        ):
            assert getattr(plan, name) == getattr(story.plan, name)
        assert plan.settings.application.count == 7
        assert plan.run != story.plan.run
    assert (first.spares, second.spares) == (2, 4)
    assert second.settings.attempts_without_step == 9
    with pytest.raises(UsageError, match="KEY=VALUE"):
        resubmit.main([story.plan.run, "--runs", "runs", "--set", "spares"], standalone_mode=False)
    for pair, told in (
        ("sparez=1", r"--set: sparez: unknown key \(did you mean spares"),
        ("checkpoint.cadence=fifty", r"--set: checkpoint\.cadence: fifty is not a cadence"),
        ("nodes=3", r"--set: nodes: needs keys below it"),
    ):
        words = [story.plan.run, "--runs", "runs", "--set", pair, "--dry-run"]
        with pytest.raises(PolicyError, match=told):
            resubmit.main(words, standalone_mode=False)


def test_a_batch_script_is_submitted_again_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --nodes=2 --ntasks=4\nsrun torchrun train.py\n")
    asked: list[Request] = []

    def submitted(request: Request) -> Submitted:
        write_run_directory(request)
        asked.append(request)
        return Submitted(request, slurm_job="7")

    monkeypatch.setattr("jurymast.cluster.slurm.submit", submitted)
    parts = slurm.parse_partitions("all*|up|infinite|9|idle")
    monkeypatch.setattr(slurm, "partitions", lambda clusters: parts)
    typed = ["--runs", "runs", "--spares", "1", "--time=10", "--exclude", "n[1-2]", "--train", "no"]
    typed += ["job.sbatch", "a b"]
    submit.main(typed, standalone_mode=False)
    (first,) = asked
    again = [first.plan.run, "--runs", "runs", "--set", "spares=1"]
    resubmit.main(again, standalone_mode=False)
    second = asked[1]
    assert (first.plan.exclude, first.plan.train) == (("n[1-2]",), "no")
    for name in ("active", "spares", "signal_s", "arguments", "name", "exclude", "train"):
        assert getattr(second.plan, name) == getattr(first.plan, name)
    assert [word for word in second.plan.sbatch_options if "--nodes" in word or "--ntasks" in word] == [
        word for word in first.plan.sbatch_options if "--nodes" in word or "--ntasks" in word
    ]
    assert second.plan.typed_options[-1:] == first.plan.typed_options == ("--time=10",)
    assert second.users == first.users
    assert Path(second.plan.script) == script
    capfd.readouterr()
    resubmit.main([*again, "--dry-run", "--shared-runs"], standalone_mode=False)
    assert "--policy POLICY.yaml" in (shown := capfd.readouterr().out)
    assert "jurymast submit --shared-runs " in shown
    assert "spares: 1" in shown
    script.write_text("#!/bin/bash\n")
    resubmit.main(again, standalone_mode=False)
    assert f"{script} has changed since" in capfd.readouterr().err
    assert asked[2].users == first.users


def test_the_next_command_is_on_the_first_screen(tmp_path: Path) -> None:
    story = Story(spares=0, requeue=False).running(20)
    story.lost("n1")
    story.stopped()
    assert story.state.phase is Phase.FAILED
    view = read_status(story.write(tmp_path / story.plan.run)).view()
    first = render(status_blocks(view, now=story.t), terminal=False).splitlines()[:20]
    assert f"next       jurymast resubmit {story.plan.run} --set spares=1" in first
    assert any(f"resubmit {story.plan.run}" in line for line in end_lines(story.state, Liveness("ended")))
