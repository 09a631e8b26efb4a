"""The benchmarks' own arithmetic, and the shape of what they print."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.side_by_side.steps import StepFiles, done_by_all, measure

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["recovery", "overhead"])
def test_help(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert "--quick" in done.stdout


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
