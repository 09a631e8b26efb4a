"""The benchmarks' own arithmetic, and the shape of what they print."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common, start
from benchmarks.checkpoint import Bench, Entrant
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import StepFiles, done_by_all, measure
from benchmarks.tiers.child import Child, ChildError
from benchmarks.tiers.trial import Case, Trial

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "agent_cost",
        "recovery",
        "takeover",
        "overhead",
        "checkpoint",
        "published",
        "attribution",
        "start",
        "commands",
        "fleet",
        "observed",
        "chaos",
        "moves",
    ],
)
def test_help(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert "--quick" in done.stdout


def test_what_drives_the_supervisor_by_its_parts_keeps_up_with_them() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "telling.py"), "--nodes", "16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(row["median"] > 0.0 for row in json.loads(done.stdout)["rows"])


def test_report_has_the_agreed_keys() -> None:
    rows = [
        Row("kill", "jurymast", "recovery", "s", 0.5, 0.4, 0.6, 3, samples=[{"seconds": 0.5}]),
        Row("kill", "peer 1.0", "recovery", "s", None, None, None, 2, note="did not recover"),
    ]
    targets = [Target("kill", 0.5, 1.0, "lower"), Target("kill_vs_best_peer", None, 5.0, "higher", "none")]
    printed = json.loads(json.dumps(common.report("recovery", rows, targets, common.machine())))
    assert list(printed) == ["benchmark", "rows", "targets", "machine"]
    keys = {"case", "system", "metric", "unit", "median", "low", "high", "n"}
    assert set(printed["rows"][0]) == keys | {"samples"}
    assert set(printed["rows"][1]) == keys | {"note"}
    assert printed["rows"][1]["median"] is None
    assert set(printed["targets"][0]) == {"name", "value", "target", "better"}
    assert printed["machine"]["cores"] >= 1


def test_text_shows_rows_targets_and_notes() -> None:
    rows = [Row("kill", "peer 1.0", "recovery", "s", None, None, None, 2, note="did not recover")]
    shown = common.text(rows, [Target("kill", 0.51234, 1.0, "lower")], {"cores": 2})
    assert "peer 1.0" in shown
    assert "[1] did not recover" in shown
    assert "0.5123" in shown
    assert "yes" in shown


@pytest.mark.parametrize(
    ("value", "better", "met"),
    [(1.0, "lower", True), (1.1, "lower", False), (1.1, "higher", True), (None, "higher", None)],
)
def test_target_is_met(value: float | None, better: str, met: bool | None) -> None:
    assert Target("x", value, 1.0, better).met is met


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([], (None, None, None, 0)),
        ([3.0, 1.0, 2.0], (2.0, 1.0, 3.0, 3)),
        ([3.0, None, 2.0], (3.0, 2.0, None, 3)),
        ([3.0, None], (None, 3.0, None, 2)),
        ([None, None, 2.0], (None, 2.0, None, 3)),
        ([None], (None, None, None, 1)),
    ],
)
def test_spread_counts_what_never_happened_as_endless(
    samples: list[float | None], expected: tuple[float | None, float | None, float | None, int]
) -> None:
    found = common.spread(samples)
    assert (found.median, found.low, found.high, found.n) == expected


def test_bootstrap_surrounds_the_median_and_narrows_with_more_samples() -> None:
    few = [1.0, 1.1, 0.9, 1.2, 0.8]
    low, high = common.bootstrap(few)
    assert 0.8 <= low <= statistics.median(few) <= high <= 1.2
    low_of_many, high_of_many = common.bootstrap(few * 40)
    assert high_of_many - low_of_many < high - low
    assert common.bootstrap([2.0, 2.0]) == (2.0, 2.0)


def write(directory: Path, rank: int, *lines: str) -> None:
    with (directory / f"rank-{rank}.txt").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def line(time: float, step: int, host: str, pid: int) -> str:
    return f"{time:.6f} {step} 0.0 {host} {pid} 0.5"


def test_recovery_is_measured_from_the_last_common_step_to_the_first_new_one(tmp_path: Path) -> None:
    write(tmp_path, 0, *(line(10 + step, step, "n1", 7) for step in range(1, 6)))
    write(tmp_path, 1, *(line(10.1 + step, step, "n2", 7) for step in range(1, 5)))
    files = StepFiles(tmp_path, 2)
    # Both have done step 4, rank 0 also step 5 just after the fault.
    assert done_by_all(files.poll(), 2, until=14.5) == (4, 14.1)
    lost = measure(files.poll(), 2, fault_at=14.5)
    assert lost is not None
    assert (lost.last_step, lost.last_at, lost.reached, lost.seconds) == (4, 14.1, 5, None)
    # A spare and a restarted rank 0 resume at step 3; the same pid on another node is another process.
    write(tmp_path, 0, *(line(20 + step, step, "n1", 9) for step in range(4, 8)))
    write(tmp_path, 1, *(line(20.2 + step, step, "n3", 7) for step in range(4, 7)))
    found = measure(files.poll(), 2, fault_at=14.5)
    assert found is not None
    assert (found.resumed_at_step, found.new_step, found.new_at) == (4, 6, 26.2)
    assert found.seconds == pytest.approx(26.2 - 14.1)


def test_half_written_lines_wait_for_their_end(tmp_path: Path) -> None:
    files = StepFiles(tmp_path, 1)
    assert files.poll() == []
    (tmp_path / "rank-0.txt").write_text(line(1.0, 1, "n1", 7) + "\n2.0 2 0")
    assert [stamp.step for stamp in files.poll()] == [1]
    with (tmp_path / "rank-0.txt").open("a") as file:
        file.write(".0 n1 7 0.6\n")
    assert [stamp.step for stamp in files.poll()] == [1, 2]


def test_nothing_was_done_before_the_fault(tmp_path: Path) -> None:
    write(tmp_path, 0, line(20.0, 1, "n1", 7))
    assert measure(StepFiles(tmp_path, 1).poll(), 1, fault_at=10.0) is None


# ---- checkpoint.py


def checkpoint_bench(cases: list[Case], tmp_path: Path) -> Bench:
    systems = [Entrant("jurymast", "jurymast"), Entrant("peer", "peer 1.0")]
    return Bench(cases, systems, 1, 3, tmp_path, tmp_path)


def test_what_a_system_could_not_do_is_a_row_without_a_value(tmp_path: Path) -> None:
    case = Case(2.0, 1)
    bench = checkpoint_bench([case], tmp_path)
    bench.figures[case, "jurymast"] = {"stall over a copy": [1.0, 1.3, 1.1]}
    bench.notes[case, "jurymast"] = {"write over a plain one": "the disk is full"}
    bench.missing["peer"] = "could not be installed"
    rows = {(row.system, row.metric): row for row in bench.rows()}
    assert rows["jurymast", "stall over a copy"].median == 1.1
    assert rows["jurymast", "stall over a copy"].samples == [1.0, 1.3, 1.1]
    assert rows["jurymast", "write over a plain one"].median is None
    assert rows["jurymast", "write over a plain one"].note == "the disk is full"
    assert rows["peer 1.0", "stall over a copy"].median is None
    assert rows["peer 1.0", "stall over a copy"].note == "could not be installed"


def test_targets_are_those_of_one_rank_and_the_smallest_state(tmp_path: Path) -> None:
    cases = [Case(6.0, 1), Case(2.0, 2), Case(2.0, 1)]
    bench = checkpoint_bench(cases, tmp_path)
    for number, case in enumerate(cases):
        bench.figures[case, "jurymast"] = {"stall over a copy": [1.0 + number]}
    bench.notes[cases[2], "jurymast"] = {"peer transfer over TCP": "no memory for a replica"}
    targets = {target.name: target for target in bench.targets()}
    assert (targets["stall_over_copy"].value, targets["stall_over_copy"].note) == (3.0, "2 GiB, 1 rank")
    assert targets["peer_over_tcp"].value is None
    assert targets["peer_over_tcp"].note == "no memory for a replica"


def test_a_state_is_split_among_ranks_and_a_large_one_has_a_small_window() -> None:
    assert (Case(2.0, 2).state_bytes, Case(2.0, 2).window_bytes) == (1 << 30, 1 << 30)
    assert (Case(6.0, 2).state_bytes, Case(6.0, 2).window_bytes) == (3 << 30, 1 << 29)
    assert (Case(0.25, 1).name, Case(6.0, 2).name) == ("0.25 GiB, 1 rank", "6 GiB, 2 ranks")


def test_what_fails_costs_its_own_metrics_only(tmp_path: Path) -> None:
    trial = Trial(Case(1.0, 1), 3, tmp_path)

    def fail() -> None:
        trial.add("write", 1.0)
        raise ChildError("the disk is full")

    trial.try_to(("write over a plain one",), fail)
    trial.try_to(("peer",), lambda: trial.add("peer", 2.0))
    assert trial.notes == {"write over a plain one": "the disk is full"}
    assert trial.figures == {"write": [1.0], "peer": [2.0]}


def test_a_process_of_a_trial_answers_or_says_why_it_ended() -> None:
    with Child("benchmarks.tiers.node", {"name": "a", "ranks": 1, "secret": "00", "local": ""}) as child:
        assert child.answer()["port"] > 0
        assert child.ask({"do": "launch", "attempt": 1, "ranks": [0]})["said"] == "done"
        with pytest.raises(ChildError, match="a: dance: .*no such order"):
            child.ask({"do": "dance"})
        with pytest.raises(ChildError, match=r"no word of a wonder"):
            child.wait(lambda message: False, "a wonder", limit_s=0.01)
    with (
        Child("benchmarks.tiers.node", {"name": "b"}) as child,
        pytest.raises(ChildError, match="b: ended with 1: KeyError"),
    ):
        child.answer()


@pytest.mark.torch
def test_every_byte_of_a_training_is_compared() -> None:
    from benchmarks.tiers.training import Training, Window

    training, again = Training(1 << 20, 3), Training(1 << 20, 3)
    assert training.digests() == again.digests()
    assert len(set(training.digests())) > 0.9 * len(training.tensors)
    assert {str(tensor.dtype) for tensor in training.tensors.values()} == {"torch.bfloat16", "torch.float32"}
    window = Window(training, 1 << 20)
    window.copy()
    training.wreck()
    assert not set(training.digests()) & set(again.digests())
    window.copy_back()
    assert training.digests() == again.digests()
    parameters = list(training.as_module().parameters())
    assert sum(parameter.nbytes for parameter in parameters) == training.size_bytes


# ---- start.py


def test_a_script_tells_of_its_start_behind_what_python_wants_in_front() -> None:
    front = '"""What it does,\n\nin full."""\n\nfrom __future__ import annotations\n'
    assert start.with_stamps(f"{front}\nimport os\n") == f"{front}{start.FIRST_LINE}\nimport os\n"
    assert start.with_stamps("import os\n") == f"{start.FIRST_LINE}import os\n"


def test_the_slowest_rank_and_the_first_attempt_that_comes_to_a_step_count(tmp_path: Path) -> None:
    # Rank 0 began anew before its first step; attempt 1 did not get to one in all ranks.
    (tmp_path / "rank-0.txt").write_text("3.0 0 line\n4.0 0 line\n7.5 0 step\n9.0 1 step\n12.0 2 step\n")
    (tmp_path / "rank-1.txt").write_text("3.5 0 line\n7.0 0 step\n")
    assert start.starts(tmp_path, 1.0) == {start.LINE: 3.0, start.STEP: 6.5}
    with (tmp_path / "rank-1.txt").open("a") as file:
        file.write("8.0 0 killed\n13.0 2 step\n")
    assert start.starts(tmp_path, 1.0)[start.AGAIN] == 5.0


def test_a_round_without_torchrun_gives_no_ratio_and_one_without_jurymast_an_endless_one() -> None:
    values = [(2.0, 4.0), (None, 4.0), (2.0, None)]
    rounds = [dict(zip((common.JURYMAST, start.TORCHRUN), pair, strict=True)) for pair in values]
    assert start.ratios(rounds) == [0.5, None]
