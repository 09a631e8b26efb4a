"""Simulated runs: deterministic, booked to the last microsecond, and in line with theory."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import goodput
from jurymast.core.state.events import Event
from jurymast.core.state.failure_rate import mtbf_s
from jurymast.core.state.settings import Settings
from jurymast.report.simulation import GOODPUT, simulate, summary
from jurymast.sim.checkpoints import Durations, Parts, asked_cadence
from jurymast.sim.faults import PATTERNS, FaultModel, TraceFault, names_needed
from jurymast.sim.simulation import Setup, SimOutcome, Simulation

DAY_S = 86_400.0


class Checked(Simulation):
    """Looks at the state machine's invariants after every event."""

    def _feed(self, event: Event) -> None:
        super()._feed(event)
        self.state.check()
        assert self.state.phase is self.ledger.state.phase


TEN_MINUTES = Cadence(seconds=600.0)


def ran(setup: Setup, faults: list[TraceFault], cadence: Cadence = TEN_MINUTES) -> SimOutcome:
    return Checked(setup, faults, cadence).run()


def node_seconds(outcome: SimOutcome, category: str) -> float:
    return outcome.categories.get(category, 0) / 1e6


def test_the_same_seed_gives_the_same_result() -> None:
    durations = Durations(copy_s=3.0, write_s=60.0, read_s=60.0)
    setup = Setup(nodes=512, spares=4, seconds=10 * DAY_S, durations=durations, parts=20)
    model = FaultModel(bursts=0.2, multi=0.1, hang_rate=1.0)

    def once() -> list[SimOutcome]:
        return simulate(setup, lambda rng: model.draw(516, setup.seconds, rng), Cadence(), 2)

    first, again = once(), once()
    assert first == again
    assert first[0] != first[1]


@settings(max_examples=40)
@given(
    nodes=st.integers(1, 40),
    spares=st.integers(0, 4),
    pattern=st.sampled_from(sorted(PATTERNS)),
    rate=st.sampled_from([0.0, 20.0, 500.0, 20_000.0]),
    script_rate=st.sampled_from([0.0, 100.0]),
    hang_rate=st.sampled_from([0.0, 100.0]),
    copy_s=st.sampled_from([0.0, 30.0]),
    write_s=st.sampled_from([None, 0.0, 100.0]),
    repair_s=st.sampled_from([60.0, 3600.0]),
    seed=st.integers(0, 1000),
)
def test_categories_sum_to_all_node_time(
    nodes: int, spares: int, pattern: str, rate: float, script_rate: float, hang_rate: float, copy_s: float,
    write_s: float | None, repair_s: float, seed: int,
) -> None:  # fmt: skip
    durations = Durations(
        copy_s=copy_s, slowdown=0.1, repair_s=repair_s, write_s=write_s, read_s=50.0,
        kinds={"hang": Parts(stop_s=2.0, launch_s=1.0)},
    )  # fmt: skip
    setup = Setup(nodes=nodes, spares=spares, seconds=0.5 * DAY_S, durations=durations, parts=7)
    model = FaultModel(rate=rate, application_rate=script_rate, hang_rate=hang_rate, **PATTERNS[pattern])
    outcome = ran(setup, model.draw(nodes + spares, setup.seconds, random.Random(seed)))
    assert sum(outcome.categories.values()) == outcome.total_us
    assert all(us > 0 for us in outcome.categories.values())
    if outcome.state == "running":
        assert sum(sum(part.values()) for part in outcome.history) == setup.seconds * 1e6
        assert outcome.wall_s == pytest.approx(setup.seconds)
    if outcome.state != "failed":  # all nodes that were asked for are paid for all the time
        assert outcome.total_us == pytest.approx((nodes + spares) * outcome.wall_s * 1e6, rel=1e-6)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_few_names_stand_for_all_nodes(pattern: str) -> None:
    """With a name for every node the run goes the same way, to the microsecond.

    Each node fails once: which of several repaired nodes is the next spare depends on names.
    """
    drawn = FaultModel(rate=400.0, **PATTERNS[pattern]).draw(60, 2 * DAY_S, random.Random(3))
    seen: set[int] = set()
    faults = []
    for fault in drawn:
        faults.append(TraceFault(fault.t, tuple(node for node in fault.nodes if node not in seen)))
        seen |= set(fault.nodes)
    faults = [fault for fault in faults if fault.nodes]
    assert len(faults) > 10
    durations = Durations(repair_s=30 * DAY_S)
    few, all_of_them = (
        ran(Setup(nodes=60, spares=60, seconds=2 * DAY_S, durations=durations, named=named), faults)
        for named in (names_needed(faults), 60)
    )
    assert names_needed(faults) <= 40
    assert few.categories == all_of_them.categories
    assert few.ratios == all_of_them.ratios
    assert [i.action for i in few.incidents] == [i.action for i in all_of_them.incidents]


def test_many_saves_told_at_once_cost_the_same() -> None:
    faults = FaultModel(rate=50.0).draw(204, 5 * DAY_S, random.Random(1))
    durations = Durations(copy_s=25, slowdown=0.2)
    single, many = (
        ran(
            Setup(nodes=200, spares=4, seconds=5 * DAY_S, durations=durations, saves_at_once=most),
            faults,
            Cadence(steps=40),
        )
        for most in (1, 32)
    )
    assert len(single.incidents) > 20
    assert single.saves == many.saves > 1000
    assert single.ratios == pytest.approx(many.ratios, abs=1e-9)
    assert single.incidents == many.incidents


def test_one_fault_costs_what_its_parts_take() -> None:
    durations = Durations(
        detection_s=2, stop_s=1, launch_s=5, restore_s=30, step_s=1, stall_s=10, repair_s=1000, warm_up_s=4
    )
    setup = Setup(nodes=20, spares=1, seconds=10_000, durations=durations)
    # Restored at 35 s, step 1 at 40 s, step 601 and a save at 640 s, step 1,201 and a save at 1,250 s.
    outcome = ran(setup, [TraceFault(1350.0, (3,))])
    assert node_seconds(outcome, "detection") == 20 * 2  # the dead node among them: nobody knows it yet
    assert node_seconds(outcome, "diagnosis") == 19 * 1
    assert node_seconds(outcome, "relaunch") == 20 * 5
    assert node_seconds(outcome, "restore") == 2 * 20 * 30
    assert node_seconds(outcome, "warm_up") == 2 * 20 * 5
    assert node_seconds(outcome, "rework") == 20 * 89  # of 90 steps one was the second attempt's warm-up
    assert node_seconds(outcome, "failed_node") == 1000 - 2
    (incident,) = outcome.incidents
    assert (incident.cause, incident.action, incident.step_restored) == ("node_lost", "swap", 1201)
    assert incident.step_lost_from == 1291
    assert incident.seconds() == pytest.approx(
        {"detect": 2, "diagnose": 1, "decide": 0, "replace": 0, "launch": 5, "restore": 30, "rework": 95}
    )


def test_without_a_spare_the_run_goes_back_to_the_queue() -> None:
    setup = Setup(nodes=20, spares=0, seconds=10_000, durations=Durations(requeue_s=600))
    outcome = ran(setup, [TraceFault(2000.0, (3,))])
    assert outcome.requeues == 1
    assert outcome.incidents[0].action == "requeue"
    assert node_seconds(outcome, "requeue_wait") == 20 * 600


def test_a_script_that_fails_again_and_again_ends_the_run() -> None:
    """Each time after new steps: else it would be a crash loop."""
    setup = Setup(nodes=4, spares=0, seconds=10_000, settings=Settings())
    outcome = ran(setup, [TraceFault(1000.0 + 800 * i, kind="script") for i in range(6)])
    assert outcome.state == "failed"
    assert "the application budget of" in outcome.reason
    assert len(outcome.incidents) == 4


def test_a_save_protects_only_when_it_is_complete() -> None:
    """The fault comes while the second save is being copied: back to the first."""
    setup = Setup(nodes=4, spares=1, seconds=5000, durations=Durations(step_s=1, stall_s=1, copy_s=60))
    outcome = ran(setup, [TraceFault(35.0 + 1 + 600 + 1 + 600 + 1 + 30, (0,))])
    assert outcome.incidents[0].step_restored == 601


@pytest.mark.parametrize(("nodes", "interval_s"), [(2048, 300.0), (2048, 1800.0), (12_500, 300.0)])
def test_exponential_failures_end_as_the_exact_formula_says(nodes: int, interval_s: float) -> None:
    """The first step of an attempt counts as warm-up, so it is part of the restart. Simulated failures during
    a recovery's first seconds join that one, which the formula does not know: a little more goodput."""
    durations = Durations(step_s=1, stall_s=10, restore_s=290, repair_s=600)
    setup = Setup(nodes=nodes, spares=60, seconds=400_000_000.0 / nodes, durations=durations)
    draw = FaultModel(rate=6.5).draw
    asked = Cadence(steps=int(interval_s))
    outcomes = simulate(setup, lambda rng: draw(nodes + 60, setup.seconds, rng), asked, 4)
    found = summary(outcomes)
    # Of the failures that were drawn, so that only the moments at which they come are left to chance.
    mean_s = sum(o.wall_s for o in outcomes) / sum(len(o.incidents) for o in outcomes)
    assert mean_s == pytest.approx(mtbf_s(nodes, 6.5), rel=0.1)
    exact = goodput(interval_s, durations.stall_s, mean_s, durations.restart_s + durations.step_s)
    assert found["goodput"]["mean"] == pytest.approx(exact, abs=0.012)


def test_a_prior_four_times_off_costs_little() -> None:
    durations = Durations(stall_s=30, restore_s=60)

    def mean(cadence: str, prior_rate: float | None = None) -> float:
        setup = Setup(
            nodes=1024, spares=12, seconds=14 * DAY_S, durations=durations,
            settings=Settings(rate=prior_rate, max_loss_s=math.inf),
        )  # fmt: skip
        asked = asked_cadence(cadence, 1024, 5.0, durations)
        outcomes = simulate(setup, lambda rng: FaultModel().draw(1036, setup.seconds, rng), asked, 3)
        return sum(outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes) / 3

    best = mean("optimum")
    for prior_rate in (None, 1.25, 20.0):
        assert mean("adaptive", prior_rate) > best - 0.005


def test_the_state_grows_with_incidents_and_nodes_and_not_with_time() -> None:
    def sizes(days: float) -> dict[str, int]:
        durations = Durations(copy_s=3.0, write_s=60.0, read_s=60.0, repair_s=3600.0)
        setup = Setup(nodes=60, spares=2, seconds=days * DAY_S, durations=durations)
        model = FaultModel(rate=20.0, hang_rate=1.0, application_rate=1.0)
        simulation = Simulation(
            setup, model.draw(62, setup.seconds, random.Random(1)), Cadence(seconds=1800.0)
        )
        assert simulation.run().state == "running"
        parts = vars(simulation.state).items()
        return {name: len(part) for name, part in parts if hasattr(part, "__len__")}

    month, year = sizes(30.0), sizes(365.0)
    assert year["incidents"] > 10 * month["incidents"]
    assert {name for name, size in year.items() if size > month[name] + 62} == {"incidents"}
