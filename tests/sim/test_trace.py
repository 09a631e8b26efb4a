"""Replayed faults: the trace of a production cluster, and the published results on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from jurymast.errors import UsageError
from jurymast.sim.cadences import cadence_factory
from jurymast.sim.durations import Durations
from jurymast.sim.faults import BUNDLED_TRACE, read_trace
from jurymast.sim.results import GOODPUT
from jurymast.sim.simulation import Setup, Simulation

TRACE = read_trace(BUNDLED_TRACE)


def replayed(nodes: int, cadence: str, stall_s: float) -> float:
    """Goodput of the whole trace, with time running so quickly that the rate per node stays.

    A restart takes 10 minutes with its first step; nodes come back soon enough that there is always a spare.
    """
    durations = Durations(step_s=5, stall_s=stall_s, restore_s=587, repair_s=600)
    seconds = TRACE.days * 86_400.0 * TRACE.nodes / nodes
    setup = Setup(nodes=nodes, spares=max(10, nodes // 50), seconds=seconds, durations=durations)
    factory = cadence_factory(cadence, nodes, TRACE.rate, durations)
    plan = TRACE.draw(nodes, seconds, random.Random(0), shift=False)
    return Simulation(setup, plan, factory()).run().ratios[GOODPUT] or 0.0


def test_the_bundled_trace_is_what_was_published() -> None:
    assert len(TRACE.faults) == 584
    assert pytest.approx(4.18, abs=0.01) == TRACE.rate
    per_node_days = 1000.0 / (TRACE.nodes * TRACE.days)
    assert TRACE.incidents(300.0) * per_node_days == pytest.approx(3.55, abs=0.1)
    assert TRACE.incidents(3600.0) * per_node_days == pytest.approx(3.04, abs=0.1)


@pytest.mark.parametrize(
    ("nodes", "cadence", "stall_s", "published"),
    [
        (400, "young", 30, 0.963),
        (4000, "young", 30, 0.834),
        (12_000, "young", 30, 0.661),
        (12_000, "young", 120, 0.560),
        (400, "fixed:60m", 30, 0.956),
        (4000, "fixed:60m", 30, 0.700),
        (12_000, "fixed:60m", 30, 0.379),
    ],
)
def test_published_replay(nodes: int, cadence: str, stall_s: float, published: float) -> None:
    """Row 10 of the published results. Ours is up to 1.6 points higher, most where failures come during
    recoveries: a node that is lost before the ranks are stopped joins the incident there is."""
    assert replayed(nodes, cadence, stall_s) == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize("nodes", [4000, 12_000])
def test_an_adaptive_cadence_is_as_good_as_the_best_fixed_one(nodes: int) -> None:
    adaptive = replayed(nodes, "adaptive", 30)
    middle_s = 800 if nodes == 4000 else 460
    fixed = [replayed(nodes, f"fixed:{round(middle_s * f)}s", 30) for f in (0.7, 1.0, 1.3)]
    assert adaptive > max(fixed) - 0.003


def test_a_trace_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("node,start_day,end_day,class\nrack7,1.0,2.0,GPU\nrack9,3.0,3.5,NIC\n")
    trace = read_trace(file, nodes=10)
    assert (trace.nodes, trace.days) == (10, 4.5)
    plan = trace.draw(10, 3 * 86_400.0, random.Random(0), repair=True, shift=False)
    assert [(fault.t, fault.nodes, fault.down_s) for fault in plan] == [(86_400.0, (0,), 86_400.0)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("node,start_day\n1,2\n", "no column end_day"),
        ("node,start_day,end_day\n1,x,2\n", ":2: start_day and end_day are numbers"),
        ("node,start_day,end_day\n1,3,2\n", ":2: a fault ends after it starts"),
        ("node,start_day,end_day\n", "no faults"),
    ],
)
def test_a_bad_trace_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_trace(file)
