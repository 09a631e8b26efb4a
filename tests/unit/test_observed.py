"""Jobs that are only observed: what reaches sbatch, what commands show of them, and what is foretold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.core.estimate import AccountedAttempt, Estimate, estimate
from jurymast.core.judges.step_lines import StepLine, StepLog
from jurymast.core.state.settings import RunPlan
from jurymast.report.instead import instead_sentences, instead_view
from jurymast.sim.checkpoints import NODE_CRASH, read_measured
from jurymast.sim.instead import SILENCE_S, instead
from jurymast.sim.replay import NotReplayed
from support.commands import Place
from support.outputs import checked

START = 1_790_000_000.0
NODES = ("n1", "n2", "n3", "n4")
STEP_S, START_S, DETECT_S, QUEUE_S, KEPT = 2.0, 90.0, 60.0, 180.0, 300
LINE_S = 20.0  # between two lines
PLAN = RunPlan(
    run="r", name="r", directory="", cluster="slurm", active=4, spares=2, ranks_per_node=1, script="job",
    observed=True,
)  # fmt: skip


def job(
    *ends: tuple[str, int],
    last: int = 3000,
    silent_s: float = DETECT_S,
    every: int = 10,
    cut_s: Sequence[float] = (),
) -> Estimate:
    """A job whose attempts end in a Slurm state, at a step, and go on from every 300th; a line each tenth.
    Slurm has cut so much off the time at which each began."""
    at, base, attempts, lines = START, 0, list[AccountedAttempt](), list[StepLine]()
    for number, (state, step) in enumerate((*ends, ("COMPLETED", last))):
        began = at
        trains = at + 10.0
        at = trains + START_S + dict(enumerate(cut_s)).get(number, 0.0)
        for done in range(base + 1, step + 1):
            at += STEP_S
            if done % every == 0:
                lines.append(StepLine(done, at))
        base = step // KEPT * KEPT
        at += 0.0 if state == "COMPLETED" else silent_s
        attempts.append(AccountedAttempt(state, NODES, began, began, at, ((trains, at),)))
        at += QUEUE_S
    return estimate(attempts, StepLog(tuple(lines)), None, at)


def wall_s(found: Estimate) -> float:
    return found.account.wall_us / 1e6


def test_lost_nodes_are_swapped_and_the_script_goes_back_as_far_as_it_did() -> None:
    found = job(("NODE_FAIL", 900), ("NODE_FAIL", 2100))
    as_it_is, _ = instead(found, PLAN, read_measured())
    assert [(one.cause, one.action) for one in as_it_is.incidents] == [("node_lost", "swap")] * 2
    # Both strike where a checkpoint is. Noticing a silent node takes 1.5 s, all else a tenth; before that the
    # script may have gone on for the time between two lines.
    expected_s = 3000 * STEP_S + 10.0 + 3 * START_S + 2 * (1.6 + LINE_S)
    assert 3000 * STEP_S / as_it_is.goodput == pytest.approx(expected_s, abs=5.0)
    assert as_it_is.node_s == pytest.approx(6 * expected_s, abs=30.0)
    back = job(("NODE_FAIL", 1000), ("NODE_FAIL", 2100))
    further, _ = instead(back, PLAN, read_measured())
    assert 3000 * STEP_S / further.goodput == pytest.approx(expected_s + 100 * STEP_S, abs=5.0)


def test_what_was_done_after_the_last_line_is_lost_though_whole_seconds_hide_it() -> None:
    """As of ranks that were killed: the attempt ends with its last line."""
    found = job(*(("FAILED", step) for step in (600, 900, 1200)), silent_s=0.0)
    for one in found.incidents:
        one.cause = "worker_killed"
    for answer in instead(found, PLAN, read_measured()):
        assert answer.seconds["unknown"] == pytest.approx(3 * LINE_S / 2.0, abs=1.0)


def test_where_the_time_would_have_gone_adds_up() -> None:
    """The script starts anew after each failure, and that is told as part of what a failure costs."""
    found = job(("NODE_FAIL", 900), ("NODE_FAIL", 2100), ("REQUEUED", 2400))
    for spares in (0, 2):
        for answer in instead(found, replace(PLAN, spares=spares), read_measured()):
            assert sum(answer.seconds.values()) * answer.goodput == pytest.approx(3000 * STEP_S)
            assert answer.seconds["warm_up"] == pytest.approx(4 * START_S, rel=0.1)
            waited = answer.seconds.get("requeue_wait", 0.0)
            assert waited == pytest.approx((3 if spares == 0 else 1) * QUEUE_S, abs=2 * (10.0 + 1.0))
    view = instead_view(found, PLAN)
    assert all(one["seconds"] >= START_S - 1.0 for one in view["incidents"])
    assert sum(view["as_it_is"]["seconds"].values()) == pytest.approx(
        3000 * STEP_S / view["as_it_is"]["runtime_goodput"]
    )


def test_ranks_that_are_killed_on_nobody_knows_which_nodes_are_started_again_in_place() -> None:
    found = job(*(("FAILED", step) for step in (600, 900, 1200, 1500, 1800)))
    for one in found.incidents:
        one.cause = "worker_killed"
    for answer in instead(found, PLAN, read_measured()):
        assert [(one.cause, one.action) for one in answer.incidents] == [("worker_killed", "restart")] * 5


def test_whether_lost_nodes_crashed_or_fell_silent_is_not_known_and_so_is_what_that_costs() -> None:
    found = job(("NODE_FAIL", 900), ("NODE_FAIL", 2100))
    silent, _ = instead(found, PLAN, read_measured())
    crashed, _ = instead(found, PLAN, read_measured(), lost=NODE_CRASH)
    assert [(one.cause, one.action) for one in crashed.incidents] == [("node_crash", "swap")] * 2
    assert 3000 * STEP_S * (1 / silent.goodput - 1 / crashed.goodput) == pytest.approx(2.0, abs=0.6)
    view = instead_view(found, PLAN)
    assert view["as_it_is"]["runtime_goodput"] == silent.goodput
    assert view["ratios_at_most"]["runtime_goodput"] >= crashed.goodput


def test_a_start_is_told_up_to_a_second_too_long() -> None:
    cut_s = (0.9, 0.0, 0.9, 0.8, 0.1, 0.9, 0.2, 0.7, 0.0)
    ends = [("NODE_FAIL", 300 * number + 10) for number in range(1, 9)]
    as_it_is, _ = instead(job(*ends, cut_s=cut_s), PLAN, read_measured())
    assert as_it_is.start_s == pytest.approx(START_S, abs=0.05)
    slow, _ = instead(job(*ends, cut_s=(300.0, *cut_s[1:])), PLAN, read_measured())
    assert slow.start_s == pytest.approx(START_S, abs=0.1), "once it took much longer"
    cold, _ = instead(job(("NODE_FAIL", 910), cut_s=(30.0, 0.0)), PLAN, read_measured())
    assert START_S - 1.0 <= cold.start_s <= START_S + 30.0, "of two that differ much"


def test_without_spares_a_lost_node_costs_the_requeue_that_it_did() -> None:
    found = job(("NODE_FAIL", 900), ("NODE_FAIL", 2100))
    none, _ = instead(found, replace(PLAN, spares=0), read_measured())
    assert [one.action for one in none.incidents] == ["requeue"] * 2
    saved_s = wall_s(found) - 3000 * STEP_S / none.goodput
    assert saved_s == pytest.approx(2 * (DETECT_S - 1.6 - LINE_S), abs=5.0), "that of noticing it"


def test_what_was_ordered_costs_what_it_did() -> None:
    found = job(("REQUEUED", 900), ("PREEMPTED", 2100))
    for answer in instead(found, replace(PLAN, spares=0), read_measured()):
        assert answer.incidents == ()
    as_it_is, _ = instead(found, replace(PLAN, spares=0), read_measured())
    assert 3000 * STEP_S / as_it_is.goodput == pytest.approx(wall_s(found), rel=0.01)


def test_an_attempt_that_was_ended_after_a_long_silence_hung_if_jurymast_had_watched_it() -> None:
    found = job(("REQUEUED", 900), silent_s=2 * SILENCE_S)
    as_it_is, ours = instead(found, PLAN, read_measured())
    assert as_it_is.incidents == ()
    assert [one.cause for one in ours.incidents] == ["hang"]
    assert ours.goodput > as_it_is.goodput


def test_a_script_that_fails_again_and_again_would_have_been_stopped() -> None:
    found = job(*(("FAILED", step) for step in (310, 320, 330, 340, 350)), last=400)
    view = instead_view(found, PLAN)
    assert view["stopped"]
    (told,) = instead_sentences({"instead": view})
    assert told.startswith("with 2 spares, it would have ended the job after ")


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (job(last=0), "no steps whose time is known"),
        (job(("NODE_FAIL", 900), every=1100), "too much of its time is unknown"),
    ],
)
def test_why_nothing_is_foretold(found: Estimate, why: str) -> None:
    with pytest.raises(NotReplayed, match=why):
        instead(found, PLAN, read_measured())
    assert why in instead_view(found, PLAN)["why_none"]


def test_the_saving_is_a_range_and_may_be_a_loss() -> None:
    def told(spares: int) -> str:
        found = job(("NODE_FAIL", 900))
        report = {
            "instead": instead_view(found, replace(PLAN, spares=spares)),
            "ratios": found.account.ratios(), "ratios_at_most": found.account.ratios(at_most=True),
        }  # fmt: skip
        return instead_sentences(report)[-1]

    assert " saved, of " in told(0)
    assert told(8).startswith("nothing saved: ")


# ---- commands


SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2 --time=10\n#JURYMAST --spares 1\nsrun python train.py\n"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """sbatch notes its words, its variables and its standard input."""
    found = Place(tmp_path)
    found.program(
        "sbatch", f'printf "%s\\n" "$@" > {tmp_path}/words; /usr/bin/env -0 > {tmp_path}/variables; '
        f"/bin/cat > {tmp_path}/read; echo 17",
    )  # fmt: skip
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    return found


def seen(place: Place, name: str) -> str:
    return (place.root / name).read_text()


def test_sbatch_gets_the_script_and_the_options_as_they_were_typed(place: Place) -> None:
    words = ("-N", "2", "--mem=4G", "-J", "mine")
    done = place.run("submit", "--observe", "--json", *words, "job.sbatch", "--lr", "1", SLURM_JOB_ID="3")
    assert done.returncode == 0, done.stderr
    assert checked(json.loads(done.stdout), "submit")
    assert seen(place, "words").split() == ["--parsable", *words, "job.sbatch", "--lr", "1"]
    variables = dict(each.split("=", 1) for each in seen(place, "variables").split("\0") if each)
    own = {name: variables.pop(name, None) for name in ("PWD", "_", "SHLVL", "OLDPWD")}  # the shell's
    assert variables == place.environment() | {"SLURM_JOB_ID": "3"}, own
    run = Path(json.loads(done.stdout)["directory"])
    plan = json.loads((run / "plan.json").read_text())
    assert (plan["observed"], plan["active"], plan["spares"], plan["name"]) == (True, 2, 1, "mine")
    assert (run / "slurm" / "jobs" / "17").exists()
    assert (run / "slurm" / "slurm_script").read_text() == SCRIPT


def test_a_script_on_standard_input_and_a_command_line_reach_sbatch_as_they_are(place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jurymast", "submit", "--observe", "--parsable", "-N2"], input=SCRIPT,
        cwd=place.root, env=place.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "17\n"), done.stderr
    assert (seen(place, "words").split(), seen(place, "read")) == (["--parsable", "-N2"], SCRIPT)
    place.good("submit", "--observe", "--wrap", "srun python train.py", "-N2")
    assert seen(place, "words").splitlines() == ["--parsable", "--wrap", "srun python train.py", "-N2"]


def test_a_dry_run_submits_nothing_and_shows_the_same_command(place: Place) -> None:
    values = json.loads(place.good("submit", "--observe", "--dry-run", "--json", "job.sbatch"))
    assert (values["argv"], values["script"]) == (["sbatch", "--parsable", "job.sbatch"], "")
    assert "\nsbatch --parsable job.sbatch\n" in place.good("submit", "--observe", "--dry-run", "job.sbatch")
    assert not (place.root / "words").exists()
    assert list(place.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "script", "told"),
    [
        ("-- train.py", SCRIPT, "--observe takes a batch script"),
        ("--cluster local job.sbatch", SCRIPT, "--observe takes a batch script"),
        ("--test-only job.sbatch", SCRIPT, "run sbatch --test-only"),
        ("job.sbatch", SCRIPT.replace("--time=10", "--wait"), "line 2: --wait keeps the job's id"),
        ("-N 2-4 job.sbatch", SCRIPT, "give one number"),
    ],
)
def test_what_cannot_be_observed_is_refused(place: Place, words: str, script: str, told: str) -> None:
    (place.root / "job.sbatch").write_text(script)
    (place.root / "train.py").touch()
    done = place.run("submit", "--observe", *words.split())
    assert done.returncode == 64
    assert told in done.stderr
    assert not (place.root / "words").exists()


def test_commands_tell_what_slurm_says_of_it(place: Place) -> None:
    place.good("submit", "--observe", "job.sbatch")
    place.program(
        "squeue", 'case "$*" in *--me*) echo "17|gpu|ada|R|1:02|2|RUNNING|None|n[1-2]|job";; '
        '*) echo "RUNNING|None";; esac',
    )  # fmt: skip
    view = place.json("status", "last")
    assert (view["observed"], view["state"], view["slurm_jobs"], view["exit_code"]) == (
        True, "running", ["17"], None,
    )  # fmt: skip
    assert "nothing of jurymast runs in it" in place.good("status", "17")
    assert [(row["job"], row["state"], row["st"]) for row in place.json("ps")] == [("17", "running", "R")]
    assert "only observed" in place.run("save", "last").stderr
    assert "was only observed" in place.run("resubmit", "last").stderr
    place.program("scancel", f'echo "$@" > {place.root}/cancelled')
    assert place.good("cancel", "last").endswith("is cancelled (scancel 17)\n")
    assert seen(place, "cancelled") == "17\n"
    assert place.json("fleet")["total"]["runs"] == 0


@pytest.mark.parametrize(
    ("state", "word", "code"), [("COMPLETED", "succeeded", 0), ("TIMEOUT", "failed", 79)]
)
def test_how_it_ended_is_known_from_the_accounts_when_the_controller_has_forgotten(
    place: Place, state: str, word: str, code: int
) -> None:
    place.good("submit", "--observe", "job.sbatch")
    row = "\x1f".join(
        ["17", "job", "ada", "", "gpu", state, *["1790000000"] * 3, "1790000060", "2", "n[1-2]",
         str(place.root), "sbatch job.sbatch", "0:0", "17", "1"]
    )  # fmt: skip
    (place.root / "told").write_text(f"{row}\n")
    place.program("squeue", "exit 0")
    place.program("sacct", f'[ "$1" = --helpformat ] || /bin/cat {place.root}/told')
    place.program("scontrol", "exit 1")
    assert (view := place.json("status", "last"))["state"] == word
    assert view["exit_code"] == code
    assert [row["state"] for row in place.json("ps")] == [word]
    (place.root / "log").write_text("2026-09-21 14:13:25Z step 1\n")
    report = place.json("report", "last", "--log", "log")
    assert report["instead"]["why_none"]
    assert "what jurymast would have done\n  not known: " in place.good("report", "last")
    page = place.root / "page.html"
    place.good("report", "last", "--html", str(page))
    assert "<h2>What jurymast would have done</h2>" in page.read_text()
    (place.root / "slurm-17.out").write_text("the last words\n")
    assert place.good("logs", "last") == "the last words\n"


def test_its_log_is_where_slurm_prints(place: Place) -> None:
    place.good("submit", "--observe", "job.sbatch")
    (first, second), known = [place.root / f"out-17_{task}" for task in (1, 2)], place.root / "known"
    place.program("scontrol", f"/bin/cat {known}")
    known.write_text(f"JobId=17 JobName=job\n   StdErr={place.root}/err\n   StdOut={first}\n   Power=\n")
    done = place.run("logs", "last")
    assert (done.returncode, str(first) in done.stderr) == (67, True), done.stderr
    first.write_text("step 1\nstep 2\n")
    assert place.good("logs", "17", "--tail", "1") == place.good("logs", "17", "--job", "-n1") == "step 2\n"
    assert place.run("logs", "17", "--rank", "0").returncode == 64
    known.write_text(f"{known.read_text()}\nJobId=18 ArrayJobId=17\n   StdOut={second}\n")
    second.write_text("step 3\n")
    lines = place.good("logs", "17").splitlines()
    assert lines == ["[out-17_1] step 1", "[out-17_1] step 2", "[out-17_2] step 3"]
