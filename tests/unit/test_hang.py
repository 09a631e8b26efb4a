"""Is the run hung: judged by what every rank last said, with limits from the run's own steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jurymast.core.judges.silence import (
    AFTER_TORCH_S,
    BLOCKED_S,
    BUSY_BYTES,
    BUSY_FLOOR_S,
    IDLE_FLOOR_S,
    IDLE_SHARE,
    LOOK_SELDOM_S,
    START_BUSY_S,
    START_IDLE_S,
    START_UNMOVED_S,
    START_WAITING_S,
    UNMOVED_S,
    WAITING_S,
    HangLimits,
    RankView,
    SilentRanks,
    judge,
    works,
)
from jurymast.core.judges.stacks import BACKWARD, BLOCKED, CODE, COLLECTIVE, LOADER, UNKNOWN
from jurymast.core.state.evidence import RankPlace
from jurymast.core.state.within import TORCH_LIMIT_S

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


@pytest.mark.parametrize(
    ("changes", "limit_s"),
    [
        ({"phase": "starting", "idle_s": 100.0}, START_IDLE_S),
        ({"beats": 0, "idle_s": 100.0}, START_IDLE_S),
        ({"beats": 0, "idle_s": 0.0}, START_BUSY_S),
        ({"phase": "restoring", "idle_s": 100.0}, AUTO.start_s),  # storage may be slow
        ({"phase": "saving", "beats": 0, "idle_s": 100.0}, AUTO.start_s),
    ],
)
def test_before_the_first_step_looks_begin_later(changes: dict[str, Any], limit_s: float) -> None:
    assert judge(ranks(quiet_s=limit_s - 1, **changes), AUTO) is None
    verdict = judge(ranks(quiet_s=limit_s + 1, **changes), AUTO)
    assert verdict is not None
    assert "until the first step" in verdict.evidence
    assert (verdict.certain, verdict.starting) == (False, True)


def test_a_start_that_the_policy_wants_sooner_is_looked_at_sooner() -> None:
    limits = replace(AUTO, start_s=5.0)
    assert judge(ranks(quiet_s=6.0, beats=0), limits) is not None


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


def test_only_a_stopped_process_and_the_policys_own_limit_need_no_look() -> None:
    learned = judge(ranks(quiet_s=100.0, idle_s=100.0), AUTO)
    given = judge(ranks(quiet_s=100.0, idle_s=100.0), replace(AUTO, fixed_s=60.0))
    stopped = judge(ranks(stopped_s=2.0), AUTO)
    assert [None if one is None else one.certain for one in (learned, given, stopped)] == [False, True, True]


@pytest.mark.parametrize(
    ("cpu_s", "size", "does"),
    [(0.0, 0, False), (5 * IDLE_SHARE, BUSY_BYTES, False), (0.3, 0, True), (0.0, BUSY_BYTES + 1, True)],
)
def test_what_a_rank_has_started_works_by_processor_or_by_bytes(cpu_s: float, size: int, does: bool) -> None:
    assert works(5.0, cpu_s, size) == does


WAIT = {0: RankPlace(BACKWARD, "in backward at x.py:5"), 1: RankPlace(COLLECTIVE, "in recv at x.py:9")}


@pytest.mark.parametrize(
    ("kinds", "limit_s", "started_limit_s"),
    [
        ((COLLECTIVE, BACKWARD), START_WAITING_S, WAITING_S),
        ((CODE, CODE), START_UNMOVED_S, UNMOVED_S),
        ((COLLECTIVE, UNKNOWN), UNMOVED_S, UNMOVED_S),
        # What the others wait for may be right: torch ends it.
        ((COLLECTIVE, CODE), TORCH_LIMIT_S + AFTER_TORCH_S, TORCH_LIMIT_S + AFTER_TORCH_S),
        ((COLLECTIVE, LOADER), TORCH_LIMIT_S + AFTER_TORCH_S, TORCH_LIMIT_S + AFTER_TORCH_S),
        ((COLLECTIVE, BLOCKED), BLOCKED_S, BLOCKED_S),
    ],
)
def test_how_long_nobody_may_move(kinds: tuple[str, ...], limit_s: float, started_limit_s: float) -> None:
    """Before the first step, and after it."""
    for starting, expected_s in ((True, limit_s), (False, started_limit_s)):
        looks = SilentRanks()
        stands = {rank: RankPlace(kind, "the same") for rank, kind in enumerate(kinds)}
        looks.add(100.0, stands)
        looks.add(100.0 + expected_s - 0.1, stands)
        assert not looks.stuck(1.0, idle=True, starting=starting)
        looks.add(100.0 + expected_s, stands)
        assert looks.stuck(1.0, idle=True, starting=starting)


def test_ranks_that_all_wait_for_each_other_hang_at_the_second_look() -> None:
    looks = SilentRanks()
    assert not looks.stuck(1.0, idle=True)
    looks.add(100.0, WAIT)
    assert not looks.stuck(1.0, idle=True)
    assert looks.interval_s() == WAITING_S
    looks.add(100.0 + WAITING_S, WAIT)
    assert looks.stuck(1.0, idle=True)
    assert looks.stuck(64.0, idle=True), "nobody is left to wake them, however often that was seen"
    assert not looks.stuck(1.0, idle=False), "that may be a large transfer"
    assert looks.evidence() == "all ranks waited for each other for 1.0 s"


def test_a_rank_in_its_own_code_may_stand_still_for_longer() -> None:
    looks = SilentRanks()
    stands = {0: RankPlace(CODE, "4d2c1b90"), 1: RankPlace(CODE, "5f1e2a30")}
    for second in range(0, int(UNMOVED_S), int(LOOK_SELDOM_S)):
        looks.add(float(second), stands)
        assert not looks.stuck(1.0, idle=True)
    looks.add(UNMOVED_S, stands)
    assert looks.stuck(1.0, idle=True)
    assert not looks.stuck(8.0, idle=True)
    assert looks.interval_s() == LOOK_SELDOM_S
    assert looks.evidence() == f"no rank moved for {UNMOVED_S:.1f} s"


def test_one_rank_that_moves_is_no_hang_however_long_it_takes() -> None:
    looks = SilentRanks()
    for number in range(2000):
        looks.add(number * LOOK_SELDOM_S, {**WAIT, 1: RankPlace(CODE, f"{number % 20}")})
        assert not looks.stuck(1.0, idle=True)
