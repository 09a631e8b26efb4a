"""Published results, by their number in `benchmarks/published.py`, within the tolerance stated there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.published import PREDICTIONS, Case, cases, micron

from jurymast.core.judges.forecast import forecast
from jurymast.sim.checkpoints import TRAINING_START_S

ROOT = Path(__file__).resolve().parents[2]
CASES = cases()


def agree(row: int, tolerance: float) -> list[Case]:
    """The row's cases, each within its own tolerance, none of which is wider than `tolerance`."""
    found = [case for case in CASES if case.row == row]
    assert found
    assert all(case.tolerance <= tolerance for case in found)
    off = [
        f"{c.name}: {c.metric} {c.ours:.6g}, published {c.published}"
        for c in found
        if c.deviation > c.tolerance
    ]
    assert not off, "\n".join(off)
    return found


def test_1_mttf_of_rsc_1() -> None:
    agree(1, 0.01)


def test_2_exact_goodput_at_rsc_rates() -> None:
    agree(2, 0.001)


def test_3_llama_3() -> None:
    """ETTR in the linear form, as published; the exact form gives 0.2 to 0.3 points more, or 0.2 less."""
    agree(3, 0.003)


def test_4_ft_hsdp() -> None:
    """44 % and 83 % are 1 - R/M: a failure during a recovery costs nothing there. Exact: 57 % and 85 %."""
    agree(4, 0.025)


def test_5_micron() -> None:
    """87 % is 0.95 - R/M; exactly, 87.6 %. The 95 % need a write of 5 TB in 9.6 s while training waits."""
    agree(5, 0.01)
    assert micron()["burst_write_gb_per_s"] == pytest.approx(520, abs=1)


def test_6_checkpoint_sizes() -> None:
    agree(6, 0.01)


def test_the_benchmark_prints_both_side_by_side() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "published.py"), "--json", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    printed = json.loads(done.stdout)
    assert list(printed) == ["benchmark", "rows", "targets", "machine"]
    pairs = printed["rows"][: 2 * len(CASES)]
    assert [row["system"] for row in pairs[1::2]] == ["jurymast"] * len(CASES)
    assert all(target["value"] <= target["target"] for target in printed["targets"][: len(CASES)])
    # Predictions: better than the records beside them, and what they assume is told.
    best = {row["case"]: row["median"] for row in printed["rows"] if row["metric"] == "goodput, simulated"}
    assert len(best) == len(PREDICTIONS)
    for prediction in PREDICTIONS:
        assert all(best[prediction.name] > value for _, value in prediction.records)
    assert len(printed["machine"]["assumed"]) >= 5


def test_planned_and_simulated_goodput_agree() -> None:
    """Two ways to the same figure: formulas, and the state machine through drawn failures."""
    prediction = PREDICTIONS[0]
    planned = forecast(prediction.question(TRAINING_START_S)).way.goodput
    assert prediction.simulated(1)[0] == pytest.approx(planned, abs=0.003)
