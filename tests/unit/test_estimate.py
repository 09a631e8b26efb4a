"""The goodput of jobs that jurymast did not launch: sums are exact, and the truth lies within the range."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jurymast.cli.main import main
from jurymast.cli.report import command
from jurymast.cluster.accounts import _FIELDS, jobs_in
from jurymast.core.estimate import AccountedAttempt, Estimate, estimate, without_overlap
from jurymast.core.goodput import CATEGORIES
from jurymast.core.judges.step_lines import StepLine, StepLog, read_steps, step_line, time_in, times_of
from jurymast.core.state.texts import compressed, expanded
from support.outputs import checked
from support.stories import Story

START = 1_790_000_000.0
NODES = ("n1", "n2")


# ---- lines of logs


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 12 loss 0.3", 12),
        ("2026-11-28 03:00:00,123 INFO Step: 12 | loss", 12),
        ("iter 100: loss 3.2, time 120.2ms", 100),
        ("[default0]: [2026-11-28 03:00:00] iteration      20/     100 | elapsed time per iteration", 20),
        ('{"global_step": 7, "loss": 1.0}', 7),
        ("\x1b[31mstep:  4  loss: 12.2\x1b[0m", 4),
        ("Epoch 3:  12%|█▏        | 12/100 [00:05<00:40,  2.20it/s, loss=1.2]", 12),
        ("0:   5%|▌         | 50/1000 [00:10<03:10,  5.0it/s]", 50),
        ("Epoch 0/9 ━━━━━ 12/100 0:00:05 • 0:00:40 2.20it/s", 12),
        ("{'loss': 1.3, 'grad_norm': 2.0, 'epoch': 0.51}", 510),
        ("saved checkpoint at step 100", None),
        ("resuming from step 100", None),
        ("max_steps: 1000", None),
        ("Total steps: 1000", None),
        ("eval step 3", None),
        ("Map: 100%|██████████| 1000/1000 [00:02<00:00, 400 examples/s]", None),
        ("Validation DataLoader 0: 100%|███| 10/10 [00:01<00:00,  9.9it/s]", None),
        ("slurmstepd: error: *** STEP 105.0 ON n1 CANCELLED AT 2026-11-28T03:56:25 ***", None),
        ("srun: error: step 105 something", None),
        ("step by step", None),
    ],
)
def test_which_lines_tell_of_a_step(line: str, step: int | None) -> None:
    found = step_line(line)
    assert (found.step if found else None) == step


@pytest.mark.parametrize(
    ("text", "iso"),
    [
        ("2026-11-28T03:00:00Z step", "2026-11-28T03:00:00+00:00"),
        ("[2026/11/28 03:00:00.25 +0100]", "2026-11-28T02:00:00.250000+00:00"),
        ("2026-11-28 03:00:00-05:30", "2026-11-28T08:30:00+00:00"),
        ("2026-99-28 03:00:00Z", None),
        ("03:00:00", None),
    ],
)
def test_times_of_lines(text: str, iso: str | None) -> None:
    found = time_in(text)
    assert (None if found is None else datetime.fromtimestamp(found, timezone.utc).isoformat()) == iso


def test_a_bar_for_each_pass_goes_on_counting_and_other_bars_are_left_out() -> None:
    bars = [f"{n * 25}%|█| {n}/4 [00:0{n}<00:09, 1it/s]" for n in (1, 2, 3, 4)]
    other = "50%|█| 1/2 [00:01<00:01, 1it/s]"
    log = read_steps([*bars, other, *bars])
    assert [line.step for line in log.lines] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not log.numbered
    named = read_steps([f"Epoch {epoch}: 50%|█| 2/4 [00:02<00:02, 1it/s]" for epoch in (0, 1, 2)])
    assert [line.step for line in named.lines] == [2, 6, 10]
    assert named.numbered


def test_a_bar_without_times_of_day_ends_when_the_log_was_last_written() -> None:
    bars = [StepLine(step, since_s=float(s)) for step, s in ((5, 50), (6, 60), (1, 10), (2, 20), (3, 35))]
    assert list(times_of(StepLog(tuple(bars)), 1000.0)) == [(975.0, 1), (985.0, 2), (1000.0, 3)]
    assert list(times_of(StepLog(tuple(bars)), None)) == []


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,4}", fullmatch=True)))
def test_lists_of_hosts_are_read_as_they_are_written(hosts: list[str]) -> None:
    assert expanded(compressed(hosts)) == hosts


def test_lists_of_hosts_of_several_dimensions() -> None:
    assert expanded("r[1-2]n[08-10],m") == [f"r{r}n{n}" for r in "12" for n in ("08", "09", "10")] + ["m"]


# ---- accounts


def attempt(
    start: float, end: float | None, state: str = "COMPLETED", *, eligible: float | None = None,
    steps: tuple[tuple[float, float | None], ...] = (),
) -> AccountedAttempt:  # fmt: skip
    at = START + start
    return AccountedAttempt(
        state, NODES, START + (start if eligible is None else eligible), at,
        None if end is None else START + end,
        tuple((START + a, None if b is None else START + b) for a, b in steps),
    )  # fmt: skip


def logged(*lines: tuple[float, int], numbered: bool = True) -> StepLog:
    return StepLog(tuple(StepLine(step, START + at) for at, step in lines), numbered)


def check(found: Estimate) -> None:
    """Exact sums, no gap, no overlap."""
    account = found.account
    assert sum(account.totals.values()) == account.allocated_us + account.queue_us
    assert set(account.totals) <= {category.name for category in CATEGORIES}
    both = sorted([*account.timeline, *account.waits], key=lambda one: one.start)
    assert all(one.us > 0 for one in both)
    assert all(before.end == after.start for before, after in zip(both, both[1:], strict=False))
    low, high = account.ratios(), account.ratios(at_most=True)
    for name, ratio in low.items():
        most = high[name]
        assert (ratio is None) == (most is None)
        assert ratio is None or most is None or 0 <= ratio <= most <= 1
    known = {0, *(one.id for one in found.incidents)}
    assert {one.incident for one in both} <= known


def seconds(found: Estimate) -> dict[str, float]:
    return {name: us / 2e6 for name, us in found.account.totals.items()}


def made(*attempts: AccountedAttempt, log: StepLog | None = None, now: float = 10_000.0) -> Estimate:
    found = estimate(attempts, log or StepLog(), None, START + now)
    check(found)
    return found


def test_without_step_lines_only_the_time_of_the_steps_bounds_the_goodput() -> None:
    found = made(attempt(10, 110, eligible=0, steps=((20, 60), (70, 100))))
    assert seconds(found) == {"queue_wait": 10.0, "launch": 20.0, "unknown": 70.0, "shutdown": 10.0}
    assert found.account.ratios()["allocation_goodput"] == 0.0
    assert found.account.ratios(at_most=True)["allocation_goodput"] == 0.7


def test_a_requeued_job() -> None:
    """Ten steps a line, a second each: the first attempt fails after step 60, the second goes on at 40."""
    first = [(20.0 + step, step) for step in range(10, 61, 10)]
    second = [(210.0 + step - 40, step) for step in range(50, 101, 10)]
    found = made(
        attempt(0, 120, "NODE_FAIL", steps=((5, 120),)), attempt(180, 275, steps=((190, 275),)),
        log=logged(*first, *second),
    )  # fmt: skip
    assert seconds(found) == {
        "launch": 5.0,
        "warm_up": 15.0 + 20.0,  # until ten seconds before line 10, and before line 50
        "unknown": 10.0 + 10.0 + 5.0,  # before the first line, and after the last ones
        "step": 50.0 + 40.0,
        "detection": 30.0,
        "requeue_wait": 60.0,
        "relaunch": 10.0,
        "rework": 20.0,
    }
    assert (found.steps.again, found.origin, found.step_s) == (20, 0, 1.0)
    (incident,) = found.incidents
    assert (incident.cause, incident.action, incident.step_lost_from) == ("node_lost", "requeue", 60)
    assert incident.step_restored == 40
    parts = incident.seconds()
    assert (parts["detect"], parts["replace"], parts["launch"], parts["rework"]) == (30.0, 60.0, 30.0, 20.0)
    assert found.account.incident_us(1) == 140_000_000


@pytest.mark.parametrize("lines", [((20, 10), (30, 20), (40.5, 30)), ((9.5, 10), (20, 20), (30, 30))])
def test_a_line_half_a_second_outside_of_its_attempt_belongs_to_it(
    lines: tuple[tuple[float, int], ...],
) -> None:
    """Slurm tells whole seconds."""
    assert made(attempt(10, 40), log=logged(*lines)).steps.done == 30


def test_a_long_silence_between_two_lines_is_not_taken_for_steps() -> None:
    lines = [(10.0 + step, step) for step in range(1, 21)] + [(500.0 + step, step) for step in range(21, 31)]
    found = made(attempt(0, 540), log=logged(*lines))
    assert seconds(found)["step"] == pytest.approx(29.0)


@pytest.mark.parametrize(("state", "category"), [("CANCELLED", "hang"), ("FAILED", "detection")])
def test_nothing_after_the_last_line_was_detection_or_a_hang(state: str, category: str) -> None:
    found = made(attempt(0, 100, state), log=logged(*((10.0 + step, step) for step in range(1, 21))))
    assert seconds(found)[category] == pytest.approx(69.0)
    assert [one.cause for one in found.incidents] == (["worker_exit"] if state == "FAILED" else [])


@pytest.mark.parametrize(
    ("state", "code", "step", "cause"),
    [
        ("REQUEUED", "0:0", "", "job_ended"),
        ("REQUEUED", "0:0", "1:0", "worker_exit"),
        ("REQUEUED", "0:15", "0:9", "worker_killed"),
        ("FAILED", "137:0", "", "worker_killed"),
        ("FAILED", "1:0", "0:9", "worker_killed"),
        ("FAILED", "1:0", "", "worker_exit"),
        ("NODE_FAIL", "0:0", "1:0", "node_lost"),
    ],
)
def test_a_job_that_requeues_itself_after_a_failure_was_not_requeued_by_order(
    state: str, code: str, step: str, cause: str
) -> None:
    failed = AccountedAttempt(state, NODES, START, START, START + 30, exit_code=code, failed_step=step)
    found = made(failed, attempt(60, 90))
    assert [one.cause for one in found.incidents] == [cause]


def test_a_line_belongs_to_the_attempt_in_which_it_lies() -> None:
    """The next one may begin within a second."""
    lines = [(float(step), step) for step in range(1, 31)] + [(31.5 + 0.9 * n, 20 + n) for n in range(1, 21)]
    found = made(attempt(0, 30, "REQUEUED"), attempt(31, 52), log=logged(*lines))
    assert found.steps.again == 10
    assert found.went_back == 0


def test_a_job_that_runs_is_provisional_and_its_newest_time_unknown() -> None:
    found = made(attempt(0, None, "RUNNING"), log=logged((11, 1), (12, 2), (13, 3)), now=50.0)
    assert not found.account.final
    assert seconds(found)["unknown"] == 38.0
    waiting = AccountedAttempt("PENDING", NODES, START, None, None)
    assert seconds(made(waiting, now=50.0)) == {"queue_wait": 50.0}


def test_a_script_that_begins_again_by_itself() -> None:
    lines = [(float(step), step) for step in range(1, 41)] + [(60.0 + step, step) for step in range(20, 61)]
    found = made(attempt(0, 121), log=logged(*lines))
    assert found.went_back == 1
    assert found.steps.again == 21
    assert seconds(found)["rework"] == pytest.approx(21.0)


def test_ranks_that_print_in_any_order_do_not_begin_again() -> None:
    lines = [(10.0 + step + 0.1 * rank, step - rank % 2) for step in range(1, 21) for rank in range(4)]
    found = made(attempt(0, 32), log=logged(*lines))
    assert (found.went_back, found.steps.again) == (0, 0)


def test_steps_of_each_pass_may_be_rework_after_a_requeue() -> None:
    lines = [(begun + step, step) for begun in (10.0, 110.0) for step in range(1, 11)]
    found = made(attempt(0, 20, "PREEMPTED"), attempt(100, 121), log=logged(*lines, numbered=False))
    assert seconds(found)["maybe_rework"] == 9.0
    assert "rework" not in seconds(found)


@given(
    st.lists(
        st.tuples(*[st.floats(0, 1e4)] * 4, st.sampled_from(["COMPLETED", "FAILED", "REQUEUED"])),
        min_size=1, max_size=5,
    ),
    st.lists(st.tuples(st.floats(-10, 2e4), st.integers(0, 50)), max_size=60),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_sums_are_exact_whatever_is_told(
    rows: list[tuple[float, float, float, float, str]], lines: list[tuple[float, int]], numbered: bool,
    runs: bool,
) -> None:  # fmt: skip
    attempts = [
        attempt(start, start + lasts, state, eligible=start - waits, steps=((start + step, start + lasts),))
        for start, lasts, waits, step, state in rows
    ]
    attempts = without_overlap(attempts)
    if runs:
        *attempts, last = attempts
        attempts.append(AccountedAttempt("RUNNING", NODES, last.eligible, last.start, None))
    made(*attempts, log=logged(*lines, numbered=numbered), now=3e4)


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 200), st.integers(0, 300), st.integers(0, 300)),
        min_size=1, max_size=4,
    ),
    st.floats(0.2, 5.0), st.integers(1, 10), st.integers(1, 40),
)  # fmt: skip
def test_the_truth_lies_within_the_range(
    rows: list[tuple[int, int, int, int]], step_s: float, every: int, saved_every: int
) -> None:
    """Steps of one pace, a line and a checkpoint after some of them; each attempt but the last fails."""
    at, best, counted, base = 0.0, 0, 0.0, 0
    attempts, lines = list[AccountedAttempt](), list[tuple[float, int]]()
    for number, (launch_s, steps, tail_s, wait_s) in enumerate(rows):
        began, at = at, at + launch_s
        for step in range(base + 1, base + steps + 1):
            at += step_s
            counted += step_s if step > best else 0.0
            best = max(best, step)
            if step % every == 0:
                lines.append((at, step))
        base = (base + steps) // saved_every * saved_every
        at += tail_s
        state = "COMPLETED" if number == len(rows) - 1 else "NODE_FAIL"
        attempts.append(attempt(began, at + 0.001, state, eligible=began))
        at += 10.0 + wait_s
    assume(any(one.end != one.start for one in attempts))
    found = made(*attempts, log=logged(*lines), now=at)
    booked = found.account.placed_us("step") / 1e6
    unknown = found.account.placed_us("unknown") / 1e6
    assert booked <= counted + 0.01
    assert counted <= booked + unknown + 0.01


# ---- Slurm's answers


def row(number: str, state: str, start: float, end: float | None, **more: str) -> str:
    values = {
        "JobID": number, "JobName": "train", "User": "ann", "State": state, "Submit": f"{START:.0f}",
        "Eligible": f"{START:.0f}", "Start": f"{START + start:.0f}", "NNodes": "2", "NodeList": "n[1-2]",
        "End": "Unknown" if end is None else f"{START + end:.0f}", "ExitCode": "0:0", "WorkDir": "/work",
        "SubmitLine": "sbatch job.sbatch", "JobIDRaw": number, "DBIndex": "7", **more,
    }  # fmt: skip
    return "\x1f".join(values.get(name, "") for name in _FIELDS)


def test_attempts_of_one_job_and_their_steps() -> None:
    told = [
        row("5", "COMPLETED", 0, 9, JobName="long ago", DBIndex="1"),
        row("9", "NODE_FAIL", 10, 40, DBIndex="2"), row("9.batch", "CANCELLED", 10, 40, DBIndex="2"),
        row("9.0", "CANCELLED", 15, 40, DBIndex="2"),
        row("9", "CANCELLED by 1000", 70, 90, Submit=f"{START + 40:.0f}", DBIndex="3"),
        row("9.0", "CANCELLED", 71, None, DBIndex="3"),
        row("5", "PENDING", 50, None, SubmitLine="sbatch --wrap 'a|b\nc'", DBIndex="4", Start="Unknown",
            Submit=f"{START + 40:.0f}", NodeList="None assigned", NNodes="3"),
    ]  # fmt: skip
    old, both = sorted(jobs_in("\n".join(told) + "\n"), key=lambda job: job.number)
    assert [(one.start, one.end, one.nodes) for one in old.attempts] == [
        (None, None, ("node 1", "node 2", "node 3"))
    ]
    assert "\nc" in old.submit_line
    first, second = both.attempts
    assert (first.state, first.steps, first.nodes) == ("NODE_FAIL", ((START + 15, START + 40),), NODES)
    assert (second.state, second.steps) == ("CANCELLED", ((START + 71, None),))
    assert both.state == "CANCELLED"


@pytest.mark.parametrize(
    ("script", "step", "failed"),
    [
        ("COMPLETED", "CANCELLED", "0:15"),  # as srun cancels a step of which a task failed
        ("FAILED", "FAILED", "0:15"),
        ("CANCELLED", "FAILED", "0:15"),
        ("CANCELLED", "CANCELLED by 1000", ""),
        ("COMPLETED", "COMPLETED", ""),
    ],
)
def test_who_requeued_a_job(script: str, step: str, failed: str) -> None:
    told = [
        row("9", "REQUEUED", 0, 40), row("9.batch", script, 0, 40),
        row("9.0", step, 1, 39, ExitCode="0:15"),
    ]  # fmt: skip
    (job,) = jobs_in("\n".join(told))
    assert job.attempts[0].failed_step == failed


def test_that_a_rank_was_killed_is_known_from_what_srun_says() -> None:
    log = read_steps(
        ["2026-11-28 03:00:00 step 4", "srun: error: n2: task 1: Killed", "srun: error: n2: task"]
    )
    assert log.killed == {4}
    failed = AccountedAttempt("REQUEUED", NODES, START, START, START + 30, failed_step="0:15")
    steps = logged((10, 2), (20, 4), (21, 6))  # other ranks go on for a moment
    found = made(failed, attempt(60, 90), log=replace(steps, killed=log.killed))
    assert [one.cause for one in found.incidents] == ["worker_killed"]


Sacct = Callable[[str], None]


@pytest.fixture
def sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sacct:
    """Slurm's commands: sacct prints a text, or fails with it."""
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")

    def program(name: str, text: str) -> None:
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)

    def told(text: str) -> None:
        (tmp_path / "told").write_text(text)
        fails = "exit 1" if text.startswith("Slurm accounting") else "exit 0"
        stream = 2 if fails == "exit 1" else 1
        program("sacct", f'[ "$1" = --helpformat ] && exit 0\ncat {tmp_path}/told >&{stream}; {fails}')
        program("scontrol", "echo slurm_load_jobs error: Invalid job id specified >&2; exit 1")

    return told


def local(at: float) -> str:
    return datetime.fromtimestamp(START + at).strftime("%Y-%m-%d %H:%M:%S")


def test_a_report_says_everywhere_that_it_is_an_estimate(sacct: Sacct, tmp_path: Path) -> None:
    (tmp_path / "slurm-9.out").write_text(
        "".join(f"{local(10 + step)} step {step} loss 1\n" for step in range(1, 31))
    )
    sacct(row("9", "COMPLETED", 0, 41, WorkDir=str(tmp_path)))
    run = CliRunner()
    done = run.invoke(command, ["--slurm", "9"], catch_exceptions=False)
    assert done.stdout.startswith("ESTIMATE of Slurm job 9: completed (final")
    assert "warning    this is an estimate" in done.stdout
    assert "slurm-9.out (30 step lines)" in done.stdout
    words = ["--slurm", "9", "--json"]
    report = json.loads(run.invoke(command, words, catch_exceptions=False).stdout)
    assert checked(report, "report")
    assert report["estimate"]["step_lines"] == 30
    assert report["categories"]["step"] == 58.0
    assert sum(report["categories"].values()) == report["total_node_seconds"]
    page = tmp_path / "page.html"
    assert run.invoke(command, ["--slurm", "9", "--html", str(page)], catch_exceptions=False).exit_code == 0
    assert "ESTIMATE of Slurm job 9" in page.read_text()
    assert "an estimate from Slurm&#39;s accounting" in page.read_text()
    assert "computed from the run's journal" not in page.read_text()


def test_all_jobs_of_a_user(sacct: Sacct, tmp_path: Path) -> None:
    sacct("\n".join(row(str(n), "COMPLETED", 0, 40, WorkDir=str(tmp_path)) for n in (8, 9)))
    words = ["--slurm", "--user", "ann", "--since", "3d"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.stdout.startswith("ESTIMATE of 2 Slurm jobs of ann in the last 3 d 00 h")
    assert "all jobs: goodput 0.0 % to 100.0 % of 2.7 node-min allocated" in done.stdout
    view = json.loads(CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False).stdout)
    assert checked(view, "report", *words)
    assert (view["allocation_goodput"], view["allocation_goodput_at_most"]) == (0.0, 1.0)
    assert [job["run"] for job in view["jobs"]] == ["8", "9"]


def test_an_estimate_is_compared_with_a_run(sacct: Sacct, tmp_path: Path) -> None:
    sacct(row("9", "COMPLETED", 0, 40, WorkDir=str(tmp_path)))
    words = ["--slurm", "9", "--compare", "run", "--runs", str(tmp_path / "runs")]
    (tmp_path / "runs").mkdir()
    Story().running(60).finished().write(tmp_path / "runs" / "run")
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.stdout.split("\n")[0].split() == ["9", "(estimate)", Story().plan.run, "CHANGE"]
    (goodput,) = (line for line in done.stdout.splitlines() if line.startswith("allocation_goodput"))
    assert "0.0 % to 100.0 %" in goodput
    assert goodput.endswith(" -"), "no single number"


@pytest.mark.parametrize("known", [1, 2])
def test_an_array_has_no_page_and_is_not_compared(
    sacct: Sacct, capsys: pytest.CaptureFixture[str], known: int
) -> None:
    """It is one, too, while Slurm's accounts have only one of its tasks."""
    sacct("\n".join(row(str(n), "COMPLETED", 0, 40, JobID=f"8_{n}") for n in (8, 9)[:known]))
    assert main(["report", "--slurm", "8", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["jobs"]) == known
    assert main(["report", "--slurm", "8", "--html", "x"]) == 64
    assert "8 is an array" in (error := capsys.readouterr().err)
    assert "name a task, like 8_8" in error


def test_a_log_that_cannot_be_read_is_told(sacct: Sacct, tmp_path: Path) -> None:
    sacct(row("9", "COMPLETED", 0, 40, WorkDir=str(tmp_path / "gone")))
    done = CliRunner().invoke(command, ["--slurm", "9"], catch_exceptions=False)
    assert "cannot be read (No such file or directory)" in done.stdout
    assert "name it by --log" in done.stdout


@pytest.mark.parametrize(
    ("told", "words", "code", "message"),
    [
        ("Slurm accounting storage is disabled\n", "--slurm 9", 69, "accounting is disabled on this cluster"),
        ("", "--slurm 9", 67, "Slurm's accounting has no job 9"),
        ("", "--slurm", 64, "--slurm needs a Slurm job id"),
        ("", "--slurm last", 64, "last is not a Slurm job id"),
        ("", "9 --user ann", 64, "--user works only with --slurm"),
        ("", "--slurm 9 --since 3d", 64, "--since works only with --user"),
        ("", "--slurm 9 --user ann", 64, "give only --since and --json"),
        ("", "--slurm --user ann --since x", 64, "x is not a duration"),
        ("", "", 64, "missing argument 'RUN'"),
    ],
)
def test_what_is_wrong_and_what_to_do(
    sacct: Sacct, capsys: pytest.CaptureFixture[str], told: str, words: str, code: int, message: str
) -> None:
    sacct(told)
    assert main(["report", *words.split()]) == code
    error = capsys.readouterr().err
    assert message in error
    assert code == 64 or "hint:" in error


@pytest.mark.parametrize(
    "line",
    [
        f"epoch {'1' * 5000} | 5/10 [00:01<00:02]",
        f"train: 5/10 [{'1' * 5000}:01:02<00:02]",
        f"{{'loss': 1.0, 'epoch': {'9' * 400}}}",
    ],
    ids=["epoch", "time", "share of an epoch"],
)
def test_a_number_without_end_is_no_step_s(line: str) -> None:
    """The log may be another user's."""
    found = step_line(line)
    assert found is None or found.epoch is None


def test_no_line_takes_longer_than_its_length() -> None:
    began_at = time.process_time()
    assert step_line("{'loss': " * 70_000) is None
    assert time.process_time() - began_at < 5.0
