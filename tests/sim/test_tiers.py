"""Two tiers of saves, and failures of other kinds, in simulated runs."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.core.judges.cadence import Cadence
from jurymast.core.state.effects import Launch
from jurymast.core.state.images import MEMORY, SHARED, StateId
from jurymast.core.state.run import RunState
from jurymast.core.state.settings import Settings
from jurymast.errors import UsageError
from jurymast.sim.checkpoints import (
    HANG,
    NODE_CRASH,
    SCRIPT,
    TRAINING_START_S,
    WORKER_KILL,
    Durations,
    Parts,
    SimTiers,
    read_measured,
)
from jurymast.sim.faults import FaultModel, TraceFault
from jurymast.sim.simulation import Setup, SimOutcome, Simulation

# Step 1 is done at 36 s, and 101, 201, ... are saved 101 s apart, the first at 137 s.
TIMES = Durations(
    detection_s=2, stop_s=1, launch_s=5, restore_s=30, step_s=1, stall_s=1, copy_s=10, write_s=50,
    read_s=200, repair_s=10_000,
)  # fmt: skip


# Node 3's replica is on this spare, and this one steps in for it.
HOLDER, STEPS_IN = 23, 20


def ran(
    faults: list[TraceFault], *, spares: int = 4, durations: Durations = TIMES, **settings: object
) -> SimOutcome:
    setup = Setup(
        nodes=20, spares=spares, seconds=3000, durations=durations,
        settings=Settings(shared_every_s=500.0, **settings),  # type: ignore[arg-type]
    )  # fmt: skip
    return Simulation(setup, faults, Cadence(seconds=100.0)).run()


def restored(outcome: SimOutcome) -> list[int | None]:
    return [incident.step_restored for incident in outcome.incidents]


def test_one_lost_node_costs_the_steps_since_the_last_save_in_memory() -> None:
    outcome = ran([TraceFault(1000.0, (3,))])
    assert (restored(outcome), outcome.restores) == ([901], {MEMORY: 1})


def test_a_save_on_its_way_to_other_nodes_outlives_dead_ranks_but_no_lost_node() -> None:
    """Step 901 is in each node's own memory at 945 s, and on other nodes at 955 s."""
    saved_at = 36.0 + 9 * 101
    lost, raised = (
        ran([TraceFault(saved_at + 5, nodes, kind=kind)])
        for nodes, kind in (((3,), NODE_CRASH), ((), SCRIPT))
    )
    assert (restored(lost), restored(raised)) == ([801], [901])


@pytest.mark.parametrize(
    ("settings", "nodes", "tier"),
    [
        ({}, (3, 4), MEMORY),  # neighbours do not hold each other's
        ({}, (3, HOLDER), SHARED),
        ({"replicas": 2}, (3, HOLDER), MEMORY),
        ({"replicas": 2}, (3, HOLDER, HOLDER - 1), SHARED),
        ({"replicas": 0}, (3,), SHARED),
        ({"prefer_spares": False}, (3, HOLDER), MEMORY),
        ({"prefer_spares": False}, (3, 13), SHARED),
    ],
)
def test_what_the_lost_nodes_held_decides(
    settings: dict[str, object], nodes: tuple[int, ...], tier: str
) -> None:
    """Step 101 goes to storage when its stall is over, and 500 s later, at 637 s, the newest: step 501."""
    outcome = ran([TraceFault(1000.0, nodes)], **settings)  # type: ignore[arg-type]
    assert restored(outcome) == [901 if tier == MEMORY else 501]
    assert outcome.restores == {tier: 1}
    assert outcome.incidents[0].seconds()["restore"] == (30 if tier == MEMORY else 200)


def test_the_newest_save_is_restored_however_long_that_takes() -> None:
    outcome = ran([TraceFault(1200.0, (3,))], durations=replace(TIMES, restore_s=400.0))
    assert outcome.restores == {MEMORY: 1}


def test_a_second_loss_during_the_recovery_counts_with_the_first() -> None:
    """Without spares for it, place 3's replica is at place 13."""
    again = ran([TraceFault(1000.0, (3,)), TraceFault(1020.0, (13,))], prefer_spares=False)
    other = ran([TraceFault(1000.0, (3,)), TraceFault(1020.0, (5,))], prefer_spares=False)
    assert (restored(again), restored(other)) == ([None, 501], [None, 901])


def test_a_second_loss_once_copies_are_made_again_does_not() -> None:
    outcome = ran([TraceFault(1000.0, (3,)), TraceFault(1070.0, (13,))], prefer_spares=False)
    assert restored(outcome) == [901, 901]


def test_who_steps_in_holds_what_the_lost_one_held() -> None:
    """The spare that stepped in for node 3 is lost together with the one that holds place 3's replica."""
    outcome = ran([TraceFault(1000.0, (3,)), TraceFault(2000.0, (STEPS_IN, HOLDER))])
    assert outcome.restores == {MEMORY: 1, SHARED: 1}


def test_before_a_requeue_the_newest_save_gets_to_storage() -> None:
    outcome = ran([TraceFault(1000.0, (3,))], spares=0)
    assert (restored(outcome), outcome.restores, outcome.requeues) == ([901], {SHARED: 1}, 1)
    # 600 s in the queue, after 50 s of writing.
    assert outcome.categories["requeue_wait"] == 20 * 650 * 1_000_000


def test_a_hang_is_found_by_the_hang_detector() -> None:
    """All ranks idle: after 5 s and twice the longest gap between steps, a step and a stall, and a look."""
    outcome = ran([TraceFault(1000.0, kind=HANG)])
    (incident,) = outcome.incidents
    assert (incident.cause, incident.action, incident.step_restored) == ("hang", "restart", 901)
    assert incident.seconds()["detect"] == pytest.approx(5 + 2 * (1 + 1) + 1)
    assert outcome.categories["hang"] == 20 * 10 * 1_000_000
    (later,) = ran([TraceFault(1000.0, kind=HANG)], hang_s=60.0).incidents
    assert later.seconds()["detect"] == pytest.approx(60.0)


def test_a_hang_that_a_lost_node_ends_is_one_incident() -> None:
    outcome = ran([TraceFault(1000.0, kind=HANG), TraceFault(1003.0, (2,))])
    assert [incident.cause for incident in outcome.incidents] == ["node_lost"]


def test_each_kind_of_failure_takes_its_own_time() -> None:
    times = Durations(
        detection_s=2, stop_s=1, launch_s=5, step_s=1,
        kinds={WORKER_KILL: Parts(stop_s=0.5, launch_s=0.25), NODE_CRASH: Parts(detect_s=0.125, stop_s=2)},
    )  # fmt: skip
    found = {}
    for kind in (WORKER_KILL, NODE_CRASH):
        (incident,) = ran([TraceFault(1000.0, (1,), kind=kind)], durations=times).incidents
        parts = incident.seconds()
        found[kind] = (incident.action, parts["detect"], parts["diagnose"], parts["launch"])
    assert found == {WORKER_KILL: ("restart", 0, 0.5, 0.25), NODE_CRASH: ("swap", 0.125, 2, 0)}


def test_a_fault_can_wait_for_a_step() -> None:
    """At step 950, the first time: after the restart at step 901 it comes again, and nothing happens. Then
    saves are 99 steps apart, as a step took 1.01 s with its share of a save."""
    outcome = ran([TraceFault(0.0, (1,), kind=WORKER_KILL, step=950), TraceFault(0.0, (2,), step=1500)])
    assert [(i.cause, i.step_lost_from, i.step_restored) for i in outcome.incidents] == [
        ("worker_killed", 950, 901),
        ("node_lost", 1500, 1397),
    ]


def test_writes_never_overlap() -> None:
    """Where they take longer than saves are apart the next begins when one is over, with the newest save."""
    state = RunState(Settings(prefer_spares=False, cadence_s=100.0), attempt=1)
    tiers = SimTiers(state, Durations(copy_s=0, write_s=240), 4, 0)
    for i in range(1, 11):
        tiers.saved(StateId(i, 1), 100.0 * i, 100.0 * (i + 1) if i < 10 else math.inf)
    # Steps 1, 3, 5 and 8 from 100, 340, 580 and 820 s on; the last one is cut short.
    tiers.lost(0, 1010.0)
    tiers.lost(2, 1010.0)
    tiers.halted(1010.0)
    launch = Launch(attempt=2, placement=(), master_address="", master_port=0, reason="")
    chosen = tiers.choose(launch, 1020.0)
    assert (chosen.key, chosen.tier) == ((5, 0), SHARED)


def test_neighbours_that_fail_together_cost_no_more_where_others_hold_their_copies() -> None:
    durations = Durations(copy_s=2, write_s=100, read_s=100, stall_s=0.5, repair_s=3600)
    model = FaultModel(rate=10.0 * (1 + 1.5 * 0.5), multi=0.5)
    seconds = 10 * 86_400.0
    faults = model.draw(1060, seconds, random.Random(5))
    lost = []
    for replicas, shared in ((1, 0.0), (0, 1.0)):
        setup = Setup(
            nodes=1000, spares=60, seconds=seconds, durations=durations,
            settings=Settings(replicas=replicas, shared_every_s=1800.0),
        )  # fmt: skip
        outcome = Simulation(setup, faults, Cadence(seconds=120.0)).run()
        lost.append(1.0 - (outcome.ratios["runtime_goodput"] or 0.0))
        assert outcome.restores.get(SHARED, 0) == pytest.approx(shared * len(outcome.incidents), abs=5)
    # A hundred incidents, with 900 s instead of 60 s to do again.
    assert lost[1] - lost[0] == pytest.approx(100 * 900 / seconds, rel=0.4)


# Figures that were measured.


def test_measured_durations_of_a_run() -> None:
    measured = read_measured()
    durations = measured.durations(2048, 5.29e12, 1e12)
    assert durations.parts(WORKER_KILL).detect_s == 0.0 < durations.parts("power_loss").detect_s < 2.0
    assert durations.write_s == pytest.approx(5.29)
    assert durations.stall_s == pytest.approx(5.29e12 / 2048 / measured.copy)
    own_s = durations.restart_s - durations.restore_s
    assert TRAINING_START_S + 1.5 < own_s < TRAINING_START_S + 2.0


def test_figures_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("source: our cluster\nkinds: {power_loss: {detect: 4}}\ncopy: 100e9\n")
    measured = read_measured(file)
    assert (measured.source, measured.copy, measured.replicate) == (
        "our cluster",
        100e9,
        read_measured().replicate,
    )
    assert measured.kinds["power_loss"] == Parts(detect_s=4.0, stop_s=0.034, launch_s=0.058)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("copi: 3", "unknown key copi (did you mean copy?)"),
        (
            "kinds: {power_los: {detect: 1}}",
            "kinds: unknown key power_los (did you mean power_loss?)",
        ),
        (
            "kinds: {power_loss: {detects: 1}}",
            "kinds.power_loss: unknown key detects (did you mean detect?)",
        ),
        ("kinds: {power_loss: 3}", "kinds.power_loss: needs keys below it: detect, stop, launch"),
        (
            "kinds: {power_loss: {detect: soon}}",
            "kinds.power_loss.detect: 'soon' is not a number of at least 0",
        ),
        ("restore: 0", "restore: 0 is not a number of at least 1"),
        ("- 3", "not a mapping of keys to values"),
        ("a: [", "cannot read"),
        ("[" * 1000, "cannot read"),
        ("1: 2", "unknown key 1"),
        ("copy: [1]", "copy: a list or mapping is not a number of at least 1"),
    ],
)
def test_a_bad_file_of_figures_is_told(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as told:
        read_measured(file)
    assert complaint in str(told.value)
    assert str(file) in str(told.value)
