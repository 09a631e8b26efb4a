"""Is the run hung: judged by what every rank last said, with limits from the run's own steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jurymast.core.hang import BUSY_FLOOR_S, IDLE_FLOOR_S, HangLimits, RankView, judge

AUTO = HangLimits(fixed_s=None, start_s=1800.0)
VIEW = RankView(
    rank=0, node="n0", phase="stepping", beats=100, quiet_s=0.1, longest_s=1.0, idle_s=0.0, stopped_s=0.0
)


def ranks(count: int = 4, **changes: Any) -> list[RankView]:
    """All ranks alike."""
    return [replace(VIEW, rank=n, node=f"n{n // 2}", **changes) for n in range(count)]


def test_a_stepping_run_does_not_hang() -> None:
    assert judge(ranks(), AUTO) is None
    assert judge([], AUTO) is None


@pytest.mark.parametrize(
    ("idle_s", "limit_s"), [(10.0, IDLE_FLOOR_S + 2 * 1.0), (0.0, BUSY_FLOOR_S + 3 * 1.0)]
)
def test_the_limit_follows_the_longest_step_and_whether_anybody_works(idle_s: float, limit_s: float) -> None:
    assert judge(ranks(quiet_s=limit_s - 0.1, idle_s=idle_s), AUTO) is None
    verdict = judge(ranks(quiet_s=limit_s + 0.1, idle_s=idle_s), AUTO)
    assert verdict is not None
    assert verdict.limit_s == pytest.approx(limit_s)
    assert verdict.silent_s == pytest.approx(limit_s + 0.1)
    assert (verdict.ranks, verdict.node) == ((), "")


def test_one_rank_that_steps_proves_the_run_alive() -> None:
    assert judge([*ranks(3, quiet_s=500.0, idle_s=500.0), replace(VIEW, rank=3)], AUTO) is None


def test_one_busy_rank_makes_it_the_longer_limit() -> None:
    views = [*ranks(3, quiet_s=20.0, idle_s=20.0), replace(VIEW, rank=3, quiet_s=20.0)]
    assert judge(views, AUTO) is None


def test_steps_of_earlier_attempts_count() -> None:
    views = ranks(quiet_s=15.0, idle_s=15.0, longest_s=0.1)
    assert judge(views, AUTO) is not None
    assert judge(views, AUTO, longest_before_s=10.0) is None


@pytest.mark.parametrize("changes", [{"phase": "starting"}, {"phase": "restoring"}, {"beats": 0}])
def test_before_the_first_step_it_may_take_long(changes: dict[str, Any]) -> None:
    assert judge(ranks(quiet_s=1700.0, idle_s=1700.0, **changes), AUTO) is None
    verdict = judge(ranks(quiet_s=1900.0, idle_s=1900.0, **changes), AUTO)
    assert verdict is not None
    assert "until the first step" in verdict.evidence


def test_a_save_may_take_ten_minutes() -> None:
    assert judge(ranks(quiet_s=500.0, idle_s=500.0, phase="saving"), AUTO) is None
    assert judge(ranks(quiet_s=700.0, idle_s=700.0, phase="saving"), AUTO) is not None


def test_a_policys_limit_and_switching_it_off() -> None:
    quiet = ranks(quiet_s=61.0)
    assert judge(quiet, HangLimits(fixed_s=60.0, start_s=1800.0)) is not None
    assert judge(quiet, HangLimits(fixed_s=62.0, start_s=1800.0)) is None
    assert judge(ranks(quiet_s=1e6, stopped_s=1e6), HangLimits(fixed_s=0, start_s=1800.0)) is None


def test_a_stopped_process_needs_no_calibration() -> None:
    views = [*ranks(3), replace(VIEW, rank=3, node="n1", stopped_s=1.2, quiet_s=0.9)]
    verdict = judge(views, AUTO)
    assert verdict is not None
    assert (verdict.ranks, verdict.node) == ((3,), "n1")
    assert "process state T" in verdict.evidence
    both = judge([replace(v, stopped_s=2.0) for v in ranks(4)], AUTO)
    assert both is not None
    assert both.node == "", "ranks on several nodes blame no node"


def test_patience_grows_after_a_false_alarm() -> None:
    views = ranks(quiet_s=10.0, idle_s=10.0)
    assert judge(views, AUTO) is not None
    assert judge(views, replace(AUTO, patience=2.0)) is None
    assert judge([replace(v, stopped_s=1.5) for v in views], replace(AUTO, patience=2.0)) is None
