"""What recovery in process is worth: by the formulas, by simulation, and by a run's journal.
Expectations were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import Question, Recovery, forecast
from jurymast.core.judges.rejoining import GoBack, Rejoiner, newest_whole
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import prior
from jurymast.report.advice import advice_view, sentences
from jurymast.report.in_process import in_process_json, in_process_text
from jurymast.sim.checkpoints import NODE_CRASH, SCRIPT, START, WORKER_KILL, Durations
from jurymast.sim.faults import TraceFault
from jurymast.sim.simulation import Setup, Simulation

# A failure each 10,000 s; always a spare.
THOUSAND = Question(
    nodes=1000, rate=prior(8.64), restart_s=33.0, cadence_s=600.0, spares=1000, checkpoint_bytes=600e9,
    write_bytes_per_s=100e9, replicated=False,
)  # fmt: skip


def recoveries(question: Question) -> tuple[Recovery, Recovery]:
    restart, in_process = forecast(question).recoveries
    assert (restart.name, in_process.name) == ("restart", "in process")
    return restart, in_process


def test_only_failures_that_lose_steps_make_them_be_done_again() -> None:
    # 0.95 (both copies do not go) x 0.95 (nobody dies in its update); one in 102,564 s loses steps.
    only_blocking = forecast(replace(THOUSAND, in_process=True)).ways[-1]
    assert only_blocking.name == "blocking"
    assert forecast(THOUSAND).ways[-1].goodput == pytest.approx(0.957433, abs=2e-6)
    assert only_blocking.goodput == pytest.approx(0.983856, abs=2e-6)
    assert only_blocking.interval_s == 600.0
    assert recoveries(THOUSAND)[1].kept == pytest.approx(0.9025)


def test_from_memory_it_spares_less() -> None:
    often = replace(
        THOUSAND, replicated=True, cadence_s=60.0, stall_s=1.0, slowdown=0.0, checkpoint_bytes=None,
        write_bytes_per_s=None,
    )  # fmt: skip
    restart, in_process = recoveries(often)
    assert restart.goodput == pytest.approx(0.976228, abs=2e-6)
    assert in_process.goodput == pytest.approx(0.979760, abs=2e-6)


def test_without_rework_a_new_rank_is_waited_for_as_long() -> None:
    """Saves that are free and come each second leave nothing to spare but the start, which is not spared."""
    free = replace(THOUSAND, cadence_s=1.0, checkpoint_bytes=0.0, stall_s=0.0, slowdown=0.0)
    restart, in_process = recoveries(free)
    assert restart.goodput == pytest.approx(0.99665, abs=1e-5)
    assert in_process.goodput - restart.goodput < 1e-4


@pytest.mark.parametrize(("nodes", "spares"), [(1, 5), (1000, 0)])
def test_without_a_spare_or_another_node_it_serves_nothing(nodes: int, spares: int) -> None:
    restart, in_process = recoveries(replace(THOUSAND, nodes=nodes, spares=spares))
    assert in_process == replace(restart, name="in process")
    assert in_process.kept == 0.0


def test_a_spare_serves_while_no_node_is_out() -> None:
    """2.16 nodes are out at a time: none with probability (1 + 1.08)^-2."""
    assert recoveries(replace(THOUSAND, spares=1))[1].kept == pytest.approx(0.231139 * 0.9025, rel=1e-5)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        Question,
        nodes=st.integers(1, 5000),
        rate=st.sampled_from([0.1, 5.0, 60.0, 2000.0]).map(prior),
        checkpoint_bytes=st.sampled_from([None, 1e9, 5e12]),
        write_bytes_per_s=st.sampled_from([None, 1e9, 1e12]),
        restart_s=st.sampled_from([0.0, 5.0, 600.0, 1e5]),
        stall_s=st.sampled_from([None, 0.0, 3.0]),
        replicated=st.booleans(),
        cadence_s=st.sampled_from([None, 1.0, 900.0, 1e5]),
        spares=st.sampled_from([None, 0, 3]),
        durable_share=st.sampled_from([0.0, 0.05, 1.0]),
    )
)
def test_it_is_never_worse_than_a_restart(question: Question) -> None:
    for before, with_it in zip(
        forecast(question).ways, forecast(replace(question, in_process=True)).ways, strict=True
    ):
        assert (before.name, before.interval_s) == (with_it.name, with_it.interval_s)
        assert with_it.goodput >= before.goodput - 1e-12
    restart, in_process = recoveries(question)
    assert in_process.goodput >= restart.goodput - 1e-12
    assert 0.0 <= in_process.kept < 1.0


# ---- the simulation

# Ranks start in 2 s, restore in 3 s, and their first step takes 5 s more: steps end at 20, 30, ... s.
TEN_S = Durations(
    detection_s=1.0, stop_s=1.0, launch_s=2.0, restore_s=3.0, warm_up_s=5.0, step_s=10.0, stall_s=0.0
)
AFTER_33 = 340.0  # the time at which step 33 has ended


def simulated(*faults: TraceFault, in_process: bool = True, spares: int = 0, nodes: int = 4) -> Simulation:
    setup = Setup(
        nodes=nodes, spares=spares, seconds=2000.0, durations=TEN_S, named=nodes, in_process=in_process
    )
    ran = Simulation(setup, faults, Cadence(steps=20))
    ran.run()
    return ran


def killed(t: float) -> TraceFault:
    return TraceFault(t, (2,), WORKER_KILL)


@pytest.mark.parametrize("kind", [WORKER_KILL, SCRIPT])
def test_a_rank_that_fails_costs_its_start_and_no_step(kind: str) -> None:
    ran = simulated(TraceFault(AFTER_33 + 5.0, (2,) if kind == WORKER_KILL else (), kind))
    (incident,) = ran.state.incidents
    assert (incident.action, incident.step_lost_from, incident.step_restored) == ("in process", 33, 33)
    assert (incident.in_process, incident.kept_steps, incident.went_back) == (True, 13, "")
    # Stop, launch, restore; half a step had been cut short, and the first step is new.
    assert ran.ledger.steps.again == 0
    assert [incident.seconds()[part] for part in ("diagnose", "launch", "restore")] == [1.0, 2.0, 3.0]
    restarted = simulated(TraceFault(AFTER_33 + 5.0, (2,), WORKER_KILL), in_process=False)
    assert restarted.ledger.steps.again == 13
    assert not restarted.state.incidents[0].in_process
    assert ran.state.best_step - restarted.state.best_step == 13


def test_a_lost_nodes_place_is_taken_beside_ranks_that_go_on() -> None:
    ran = simulated(TraceFault(AFTER_33 + 5.0, (2,), NODE_CRASH), spares=1)
    (incident,) = ran.state.incidents
    assert (incident.action, incident.step_restored, incident.kept_steps) == ("swap", 33, 13)


@pytest.mark.parametrize(
    ("faults", "spares", "nodes"),
    [
        ((killed(AFTER_33 + 9.7),), 0, 4),  # in the last twentieth of a step
        ((TraceFault(AFTER_33 + 5.0, (1, 2), NODE_CRASH),), 2, 4),
        ((killed(AFTER_33 + 5.0),), 0, 1),
    ],
    ids=["in its update", "two nodes at once", "nobody lives"],
)
def test_what_goes_back_to_the_save(faults: tuple[TraceFault, ...], spares: int, nodes: int) -> None:
    if nodes == 1:
        faults = (replace(faults[0], nodes=(0,)),)
    incident = simulated(*faults, spares=spares, nodes=nodes).state.incidents[-1]
    assert (incident.step_lost_from, incident.step_restored, incident.kept_steps) == (33, 20, 0)


def test_a_failure_during_the_recovery_keeps_the_step() -> None:
    ran = simulated(killed(AFTER_33 + 5.0), TraceFault(AFTER_33 + 15.0, (3,), WORKER_KILL))
    assert [one.step_restored for one in ran.state.incidents] == [33, 33]
    found = told(ran)
    assert (found["recoveries"], found["kept_steps"]) == (2, 13), "steps are counted once"


def test_a_failure_before_the_first_step_restarts_all() -> None:
    (incident,) = simulated(killed(8.0)).state.incidents
    assert incident.action == "restart"


# ---- the report


def told(ran: Simulation) -> dict[str, Any]:
    found = in_process_json(ran.ledger.account(ran.now), ran.state.incidents)
    assert found is not None
    return found


def test_the_report_sums_what_was_spared() -> None:
    found = told(simulated(killed(AFTER_33 + 5.0), killed(AFTER_33 + 305.7)))
    assert found == {
        "recoveries": 2, "went_back": 0, "kept_steps": 13, "kept_seconds": 130.0, "start_seconds": 20.0,
        "restart_start_seconds": None,
    }  # fmt: skip
    assert in_process_text(found) == (
        "after 2 failures; 13 steps not done again, about 2 min 10 s at the median step time; from launch to "
        "first step 20.0 s (median; no restart to compare it with)"
    )


def test_the_start_of_a_restart_stands_beside_it_if_the_run_had_one() -> None:
    found = told(simulated(killed(8.0), killed(AFTER_33 + 5.0)))
    assert (found["recoveries"], found["restart_start_seconds"]) == (1, 20.0)
    assert in_process_text(found).endswith("from launch to first step 20.0 s, by restart 20.0 s (medians)")


def test_a_run_whose_ranks_restart_has_none() -> None:
    ran = simulated(killed(AFTER_33 + 5.0), in_process=False)
    assert in_process_json(ran.ledger.account(ran.now), ran.state.incidents) is None


# ---- what to change


def advised(ran: Simulation) -> list[str]:
    return sentences(advice_view(ran.ledger, ran.ledger.account(ran.now), ran.now))


def failing_often(*, in_process: bool = False) -> Simulation:
    return simulated(*(killed(AFTER_33 + 5.0 + 400.0 * n) for n in range(4)), in_process=in_process)


def test_run_is_advised_where_all_ranks_restarted() -> None:
    (advice,) = advised(failing_often())
    assert advice.startswith("Checkpointer.run: in the script. Runtime goodput ")
    assert "of gloo" in advice


def test_run_is_not_advised_to_who_has_it_or_cannot_have_it() -> None:
    nothing = ["nothing: no other setting would have gained more than the forecast may be wrong"]
    assert advised(failing_often(in_process=True)) == nothing
    with_gpus = failing_often()
    with_gpus.ledger.gpus = 8
    assert advised(with_gpus) == nothing
    asked = failing_often()
    asked.state.incidents[0].cause = "restart_asked"
    assert advised(asked) == nothing


OWN_MISSING = (Rejoiner(live=14, own=(14,), needs_own=True), Rejoiner(live=14, needs_own=True))
DIED_IN_UPDATE = (
    Rejoiner(live=14, own=(13, 14), needs_own=True), Rejoiner(live=14, own=(13,), needs_own=True),
)  # fmt: skip
SHARDS_MISSING = (Rejoiner(live=14, part="a"), Rejoiner(part="b"))


@pytest.mark.parametrize(
    ("ranks", "option"),
    [
        (OWN_MISSING, "what is each rank's own"), (DIED_IN_UPDATE, "Checkpointer.step"),
        (SHARDS_MISSING, "shards"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("times", [1, 4])
def test_what_the_script_can_mend_is_advised_if_ranks_went_back_for_it(
    ranks: tuple[Rejoiner, ...], option: str, times: int
) -> None:
    found = newest_whole(ranks, 10)
    assert isinstance(found, GoBack)
    ran = failing_often()
    for number, incident in enumerate(ran.state.incidents):
        incident.in_process, incident.went_back = True, found.why if number < times else "of another reason"
    sentence = advised(ran)[0]
    assert sentence.startswith(f"{option}: ") is (times > 1)
    assert (found.why in sentence) is (times > 1)


def test_an_incident_knows_why_ranks_went_back() -> None:
    ran = simulated(killed(AFTER_33 + 9.7))
    ran.state.incidents[0].ended_at = None  # its recovery goes on
    why = "what is the own of rank 1 after step 33 is not there"
    ran.ledger.feed(ev.Restored(t=START + 2000.0, attempt=2, step=20, tier="memory", seconds=1.0, why=why))
    assert ran.state.incidents[0].went_back == why
    ran.ledger.feed(ev.Restored(t=START + 2001.0, attempt=2, step=20, tier="memory", seconds=1.0, why=why))
    assert ran.state.incidents[0].why.count(why) == 1, "a model that is made anew is restored once more"
    assert told(ran)["went_back"] == 1
    assert in_process_text(told(ran)).startswith(
        "after 1 failure; 0 steps not done again; 1 went back to a save;"
    )
