"""How often a run saves, in memory and durably, and what it takes to change that."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.checkpoints.writes import durable_every_s
from jurymast.core.judges.cadence import (
    DURABLE_SHARE_ALONE,
    HYSTERESIS,
    best_interval_s,
    cost_if,
    durable_interval_s,
    durable_share,
    moved,
    why_interval,
)
from jurymast.core.judges.forecast import DURABLE_SHARE, IDLE_SHARE, Saving, async_goodput
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Send
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Node, Phase, RunState
from jurymast.core.state.settings import Settings
from support.reports import hello

HOUR_S = 3600.0
CHEAP = Saving(1.0, copy_s=5.0, slowdown=0.01, restart_s=60.0)


def test_what_loses_least_within_bounds() -> None:
    # 2 s of stall, an hour between failures: sqrt(2 * 2 * 3600) = 120 s, and a bit as saves take time too
    assert best_interval_s(Saving(2.0), HOUR_S, 900.0) == pytest.approx(120.0, rel=0.02)
    assert why_interval(Saving(2.0), HOUR_S, 900.0) == "what loses least at this failure rate"
    assert best_interval_s(Saving(2.0), 1000 * HOUR_S, 900.0) == 900.0
    assert best_interval_s(Saving(2.0, copy_s=100.0), 1000 * HOUR_S, 900.0) == 800.0
    assert why_interval(Saving(2.0), 1000 * HOUR_S, 900.0) == "so that no failure costs more than max_loss"
    # a stall of minutes: a tenth of the time at most, whatever may be lost
    assert best_interval_s(Saving(120.0), HOUR_S, 900.0) == 1200.0
    assert best_interval_s(Saving(1.0, copy_s=1500.0), HOUR_S, 900.0) == 1500.0
    assert why_interval(Saving(120.0), HOUR_S, 900.0) == "as often as the cost of a save allows"


@given(st.floats(0.001, 10.0), st.floats(1000.0, 1e7))
def test_within_the_hysteresis_hardly_anything_is_lost(stall_s: float, mtbf_s: float) -> None:
    """A cadence is left alone while it is at most so far from the best one."""
    saving = Saving(stall_s)
    best_s = best_interval_s(saving, mtbf_s, math.inf)
    best = async_goodput(best_s, saving, mtbf_s)
    for other_s in (best_s * HYSTERESIS * 0.999, best_s / HYSTERESIS * 1.001):
        assert not moved(best_s, other_s)
        assert best - async_goodput(other_s, saving, mtbf_s) <= 0.035 * (1.0 - best) + 1e-12


def test_moved() -> None:
    assert moved(0, 10)
    assert moved(100, 126)
    assert moved(100, 79)
    assert not moved(100, 124)
    assert not moved(100, 81)


@given(st.floats(0.01, 30.0), st.floats(3000.0, 1e7))
def test_a_rate_twice_as_high_costs_little(stall_s: float, mtbf_s: float) -> None:
    saving = Saving(stall_s)
    cost = cost_if(best_interval_s(saving, mtbf_s, math.inf), saving, mtbf_s)
    assert 0.0 <= cost < 0.03
    # to first order: (sqrt(2) + 1/sqrt(2))/2 - 1 = 6 % of the waste of saves and rework, sqrt(2 C / M)
    if stall_s / mtbf_s < 1e-4:
        assert cost == pytest.approx(0.0607 * math.sqrt(4.0 * stall_s / mtbf_s), rel=0.1)


def test_the_share_of_failures_that_take_both_copies() -> None:
    assert durable_share(0, 0, copies_elsewhere=True) == DURABLE_SHARE
    assert durable_share(0, 0, copies_elsewhere=False) == DURABLE_SHARE_ALONE
    assert durable_share(20, 20, copies_elsewhere=True) == pytest.approx((20 * 0.05 + 20) / 40)
    assert durable_share(20, 0, copies_elsewhere=True) < DURABLE_SHARE


def test_durable_saves_follow_from_what_only_they_survive() -> None:
    durable = Saving(0.0, copy_s=300.0, slowdown=0.05)
    mtbf_s = 3 * HOUR_S
    found_s = durable_interval_s(CHEAP, durable, mtbf_s, 0.05, math.inf, math.inf)
    # sqrt(2 * 0.05 * 300 s * 60 h): twenty times fewer failures, each of which costs half the interval
    assert found_s == pytest.approx(math.sqrt(2 * 15.0 * mtbf_s / 0.05), rel=0.15)
    more_s = durable_interval_s(CHEAP, durable, mtbf_s, 0.5, math.inf, math.inf)
    assert more_s == pytest.approx(found_s / math.sqrt(10.0), rel=0.2)
    bounded_s = durable_interval_s(CHEAP, durable, mtbf_s, 0.05, 900.0, math.inf)
    assert 600.0 < bounded_s <= 900.0, "a whole number of saves in memory"
    # A young run has not shown yet what its storage and its nodes are like; but without copies on other nodes
    # it would not write more often either.
    quick = replace(durable, copy_s=30.0)
    assert durable_interval_s(CHEAP, quick, mtbf_s, 0.05, 900.0, 3000.0) == pytest.approx(300.0)
    young_s = durable_interval_s(CHEAP, durable, mtbf_s, 0.05, math.inf, 600.0)
    assert young_s == pytest.approx(math.sqrt(2 * 15.0 * mtbf_s / DURABLE_SHARE_ALONE), rel=0.05)


def run_state(**settings: object) -> RunState:
    state = RunState(Settings(**settings), active=3, began_at=0.0)  # type: ignore[arg-type]
    state.nodes = {name: Node(name, i) for i, name in enumerate("abc")}
    state.cadence = ev.CadenceSet(
        t=0.0, attempt=1, number=1, from_step=1, first_step=1, every_steps=10, reason="", stall_s=1.0,
        copy_s=5.0, slowdown=0.02, mtbf_s=10 * HOUR_S,
    )  # fmt: skip
    return state


def failed(tier: str) -> Incident:
    return Incident(1, 0.0, 0.0, 1, 0, charged="infrastructure", tiers={tier: 1}, ended_at=1.0)


def test_where_a_run_was_restored_from_says_what_the_memory_tiers_survive() -> None:
    state, later = run_state(max_loss_s=1e9), 1e9
    before = durable_every_s(state, 10.0, later)
    assert before is not None
    state.incidents = [failed("memory")] * 20
    survived = durable_every_s(state, 10.0, later)
    state.incidents = [failed("shared")] * 20
    lost = durable_every_s(state, 10.0, later)
    assert survived is not None
    assert lost is not None
    assert lost < before < survived
    alone = durable_every_s(run_state(max_loss_s=1e9, replicas=0), 10.0, later)
    assert alone is not None
    assert alone < before
    state.cadence = None
    assert durable_every_s(state, 10.0, later) is None
    assert IDLE_SHARE == 9.0


# Saves that the node's memory has room for while the oldest of them is being written.
KEPT = 20


def image(step: int) -> msg.CopyReport:
    return msg.CopyReport(tier="memory", step=step, attempt=1, rank=0, world=1, part="all", size_bytes=1)


class Storage:
    """Decisions about checkpoints over one node of one rank, whose writes take as long as is said."""

    def __init__(self, state: RunState) -> None:
        self.state, self.time = state, 0.0
        self.writes: list[tuple[float, msg.Write]] = []
        self.checkpoints = Checkpoints(state)
        state.placement, state.phase, state.attempt = ("a",), Phase.RUNNING, 1
        self.do(self.checkpoints.on_agent_joined("a", hello("a"), 0.0))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, msg.Write):
                self.writes.append((self.time, effect.message))

    def go_on(self, until_s: float, copy_s: float) -> list[float]:
        """Save every second; when writes to the shared tier began."""
        while self.time < until_s:
            self.time += 1.0
            self.do(self.checkpoints.on_message("a", msg.Held(copies=(image(int(self.time)),)), self.time))
            overwritten = msg.Dropped(copy=image(int(self.time) - KEPT))
            self.do(self.checkpoints.on_message("a", overwritten, self.time))
            for began, order in self.writes[-1:]:
                if self.time >= began + copy_s:
                    done = msg.Written(id=order.id, tier="shared", ok=True)
                    self.do(self.checkpoints.on_message("a", done, self.time))
            self.do(self.checkpoints.on_time(self.time))
        return [began for began, _ in self.writes]


def test_durable_copies_are_made_as_often_as_loses_least_and_leaves_the_storage_time() -> None:
    # One write takes 4 s: until it is known what a failure costs, nine times as long is left free after each.
    unknown = Storage(run_state())
    unknown.state.cadence = None
    gaps = [b - a for a, b in pairwise(unknown.go_on(400.0, 4.0)[1:])]
    assert set(gaps) == {40.0}
    # With a failure every ten hours: what loses least, within max_loss, and more often while it is young.
    known = Storage(run_state(max_loss_s=300.0))
    gaps = [b - a for a, b in pairwise(known.go_on(8000.0, 4.0)[1:])]
    assert gaps[0] == pytest.approx(math.sqrt(4 * 0.02 * 4.0 * 10 * HOUR_S), abs=2.0)
    assert gaps == sorted(gaps)
    best_s = durable_every_s(known.state, 4.0, known.time)
    assert best_s is not None
    assert 200.0 < best_s <= 300.0
    assert gaps[-1] == pytest.approx(best_s, abs=2.0)
    assert known.state.cadence is not None
    known.state.cadence = structs.replace(known.state.cadence, mtbf_s=0.0)  # not known yet
    assert durable_every_s(known.state, 4.0, known.time) is None
