"""The decisions of a run, told as stories: what happens, what is decided, and why."""

from __future__ import annotations

import copy
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from jurymast.core.run.machine import resume, step
from jurymast.core.run.recovery import not_stopped
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.state.failure_rate import prior
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.journal import initial_state
from support.random_events import NODES, Moment, moments, next_event
from support.stories import START, Story


def phase(story: Story) -> Phase:
    return story.state.phase


def kinds(instructions: list[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def test_a_run_starts_on_the_nodes_that_come_first_and_finishes() -> None:
    story = Story().allocated()
    launch = story.last(Launch)
    assert launch.placement == ("n2", "n3"), "the batch host stays a spare"
    assert (launch.attempt, launch.master_address, launch.master_port) == (1, "10.0.0.2", 29000)
    assert story.state.public_state == "starting"
    story.ranks_up().restored(0).stepped(1).stepped(40)
    assert (phase(story), story.state.step, story.state.public_state) == (Phase.RUNNING, 40, "running")
    story.finished()
    assert story.last(Finish) == Finish(
        state="succeeded", exit_code=0, reason="every rank ended with exit code 0"
    )
    assert story.state.ended
    assert story.state.exit_code == 0
    assert story.state.incidents == []


def test_enough_nodes_start_without_the_slowest() -> None:
    story = Story(active=2, spares=2).submitted()
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="1", restarts=0, nodes=("n1", "n2", "n3", "n4"), host="n1", eligible_at=START
        )
    )
    story.join("n2", "n4")
    assert not story.decisions
    story.wait(1.0)
    assert not story.decisions
    story.wait(1.1)
    assert story.last(Launch).placement == ("n2", "n4")
    story.join("n3")
    assert story.state.nodes["n3"].role is Role.SPARE


def test_a_lost_node_is_swapped_for_the_spare() -> None:
    story = Story().running(40)
    assert kinds(story.lost("n3")) == ["StopWorkers"]
    assert story.last(StopWorkers).nodes == ("n2",), "the lost node is not asked"
    assert story.state.public_state == "recovering"
    story.stopped()
    launch = story.last(Launch)
    assert (launch.attempt, launch.placement) == (2, ("n2", "n1"))
    assert "n3 -> n1" in launch.reason
    story.ranks_up().restored(30).stepped(31)
    assert story.state.public_state == "recovering", "the lost steps are not done again yet"
    story.stepped(45)
    incident = story.incident
    assert (incident.cause, incident.node, incident.action) == ("node_lost", "n3", "swap")
    assert (incident.step_lost_from, incident.step_restored) == (40, 30)
    assert not incident.open
    assert incident.recovered_at is not None
    assert sum(incident.seconds().values()) == pytest.approx(incident.recovered_at - incident.fault_at)
    assert incident.seconds()["detect"] == pytest.approx(1.6)
    assert story.state.nodes["n3"].role is Role.FAILED
    assert story.state.public_state == "running"


def test_what_ranks_restored_before_they_failed_is_not_told_of_that_incident() -> None:
    story = Story().allocated().ranks_up()
    story.failed(1, exit_code=-9)
    story.restored(0)  # told late, to a supervisor that has taken over
    assert (story.incident.step_restored, story.incident.restored_at) == (None, None)
    assert story.incident.seconds()["restore"] == 0.0
    story.stopped()
    story.ranks_up().restored(0)
    assert story.incident.step_restored == 0


def test_a_killed_worker_restarts_in_place() -> None:
    story = Story().running()
    assert kinds(story.failed(1, exit_code=-9)) == ["StopWorkers"]
    story.stopped()
    assert story.last(Launch).placement == ("n2", "n3")
    assert (story.incident.cause, story.incident.action) == ("worker_killed", "restart")
    assert "first time on this node" in story.incident.reason
    story.recovered(0, 20)
    assert not story.incident.open


def test_two_nodes_lost_at_once_are_one_incident() -> None:
    story = Story(active=3, spares=2).running()
    assert story.state.placement == ("n2", "n3", "n4")
    story.lost("n3")
    story.feed(ev.NodeLost(t=story.t, node="n4", how="silent", silent_s=1.6, limit_s=1.5))
    story.stopped()
    assert len(story.state.incidents) == 1
    assert story.last(Launch).placement == ("n2", "n5", "n1")
    assert "n3: silent" in story.incident.evidence
    assert "n4: silent" in story.incident.evidence
    assert story.incident.node == ""


def test_a_node_lost_while_the_next_attempt_starts_is_an_incident_of_its_own() -> None:
    story = Story(active=2, spares=2).running()
    story.lost("n3")
    story.stopped()
    assert story.last(Launch).placement == ("n2", "n4")
    story.lost("n2")
    story.stopped()
    assert len(story.state.incidents) == 2
    assert not story.state.incidents[0].open
    assert story.backed_off().last(Launch).placement == ("n1", "n4")
    story.recovered(0, 20)
    assert not story.incident.open


def test_a_lost_spare_stops_nobody() -> None:
    story = Story().running()
    assert story.lost("n1") == []
    assert phase(story) is Phase.RUNNING
    assert story.state.nodes["n1"].role is Role.FAILED
    assert story.state.incidents == []


def test_without_a_spare_the_run_is_requeued_without_the_lost_nodes() -> None:
    story = Story(active=2, spares=1).running(30)
    story.lost("n1")
    story.lost("n3")
    story.stopped()
    assert phase(story) is Phase.REQUEUED
    assert story.last(Requeue).exclude == ("n1", "n3")
    assert story.state.public_state == "requeued"
    story.allocated("n2", "n4", "n5", restarts=1, queue_s=5.0)
    assert story.state.restarts == 1
    assert story.last(Launch).placement == ("n4", "n5")
    story.ranks_up().restored(20).stepped(21).stepped(40)
    incident = story.incident
    assert (incident.action, incident.step_restored, incident.open) == ("requeue", 20, False)
    assert incident.seconds()["replace"] >= 5.0
    assert len(story.state.incidents) == 1


def test_without_a_spare_and_without_requeue_the_run_ends() -> None:
    story = Story(active=2, spares=0, requeue=False).running()
    story.lost("n2")
    story.stopped()
    assert (phase(story), story.state.exit_code) == (Phase.FAILED, 79)
    assert "no spare is left and requeueing is not allowed" in story.state.end_reason


def test_ranks_that_cannot_be_stopped_cost_their_node() -> None:
    story = Story().running()
    story.failed(0, exit_code=-9)
    story.feed(ev.WorkersStopped(t=story.t, node="n2", attempt=1, store_port=29001))
    assert phase(story) is Phase.STOPPING
    story.wait(7.0)
    assert phase(story) is Phase.STOPPING
    story.wait(2.0)
    assert story.state.nodes["n3"].role is Role.FAILED
    assert story.last(Launch).placement == ("n2", "n1")
    assert "could not be stopped" in story.incident.evidence


def test_ranks_that_do_not_start_are_stopped_after_a_minute() -> None:
    story = Story().allocated().told()
    story.feed(ev.WorkersStarted(t=story.t, node="n2", attempt=1, pids=(1,)))
    story.wait(59.0)
    assert phase(story) is Phase.LAUNCHING
    story.wait(2.0)
    assert phase(story) is Phase.STOPPING
    story.stopped()
    assert story.incident.cause == "hang"
    assert story.incident.node == "n3"
    assert "did not start within 60 s on n3" in story.incident.evidence


def test_cancel_at_every_moment() -> None:
    queued = Story().submitted()
    queued.asked("cancel")
    assert (queued.state.phase, queued.state.exit_code) == (Phase.CANCELLED, 80)
    starting = Story().submitted()
    starting.feed(
        ev.AllocationStarted(t=START, slurm_job="1", restarts=0, nodes=("n1",), host="n1", eligible_at=START)
    )
    starting.asked("cancel")
    assert phase(starting) is Phase.CANCELLED
    running = Story().running()
    assert kinds(running.asked("cancel")) == ["Finish"]
    assert (running.state.phase, running.state.exit_code) == (Phase.CANCELLED, 80)
    assert running.state.end_reason == "cancel requested by ada"


def test_cancel_wins_over_a_node_that_is_lost_at_the_same_time() -> None:
    story = Story().running()
    story.lost("n3")
    story.asked("cancel")
    assert phase(story) is Phase.CANCELLED
    assert not story.incident.open
    story.stopped()
    assert phase(story) is Phase.CANCELLED


def test_the_time_limit_ends_the_run() -> None:
    story = Story().running()
    story.feed(ev.Signalled(t=story.t, signal="SIGTERM"))
    assert phase(story) is Phase.RUNNING
    story.feed(ev.Signalled(t=story.t, signal="timeout"))
    assert (story.state.phase, story.state.exit_code) == (Phase.FAILED, 79)


def test_restart_and_drain_by_hand() -> None:
    story = Story().running()
    story.asked("restart")
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("restart_asked", "restart")
    story.recovered(0, 20)
    story.asked("drain", "n2")
    story.stopped()
    assert story.incident.action == "swap"
    assert story.state.nodes["n2"].role is Role.FAILED
    assert story.last(Launch).placement == ("n1", "n3")
    story.recovered(0, 40)
    assert kinds(Story().running().asked("drain", "n1")) == ["Dismiss"], "a spare leaves quietly"


def test_a_returning_node_is_a_suspect_and_comes_last() -> None:
    story = Story(active=2, spares=2).running()
    story.lost("n3")
    story.stopped()
    story.recovered(0, 20)
    assert kinds(story.feed(ev.NodeJoined(t=story.t, node="n3", address="10.0.0.3", incarnation="new"))) == [
        "Dismiss"
    ]
    story.feed(ev.NodeReady(t=story.t, node="n3", store_port=29000))
    assert story.state.nodes["n3"].role is Role.SUSPECT
    assert [node.name for node in story.state.spare_nodes()] == ["n1", "n3"]


def test_an_agent_that_restarts_takes_its_ranks_with_it() -> None:
    story = Story().running()
    story.feed(ev.NodeJoined(t=story.t, node="n3", address="10.0.0.3", incarnation="new"))
    assert phase(story) is Phase.STOPPING
    story.stopped()
    assert (story.incident.cause, story.incident.action) == ("node_crash", "swap")
    assert story.last(Launch).placement == ("n2", "n1")


def test_a_node_found_bad_while_the_ranks_are_stopped_for_a_lost_one_is_excluded_as_well() -> None:
    story = Story(active=2, spares=0).running()
    story.lost("n1")
    story.feed(
        ev.HealthFound(
            t=story.t, node="n2", probe="nvml", code="xid-79", verdict="bad", kind="hardware",
            message="the GPU fell off the bus", at=story.t,
        )
    )  # fmt: skip
    story.stopped()
    assert story.last(Requeue).exclude == ("n1", "n2")
    assert [blame.node for blame in story.state.blames] == ["n2"]


def test_an_agent_that_restarts_gets_its_place_back_when_there_is_no_spare() -> None:
    story = Story(active=2, spares=0).running()
    story.feed(ev.NodeJoined(t=story.t, node="n2", address="10.0.0.2", incarnation="new"))
    story.stopped()
    assert story.incident.action == "restart"
    assert phase(story) is Phase.WAITING, "it is not ready yet"
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29000))
    assert story.last(Launch).placement == ("n1", "n2")
    assert "same nodes" in story.last(Launch).reason
    story.recovered(0, 20)
    assert phase(story) is Phase.RUNNING


def test_a_node_that_never_gets_ready_again_loses_its_place() -> None:
    story = Story().running()
    story.failed(0, exit_code=-9)
    story.feed(ev.WorkersStopped(t=story.t, node="n2", attempt=1, store_port=1))
    story.feed(ev.NodeLost(t=story.t, node="n1", how="silent", silent_s=1.0))
    story.feed(ev.NodeJoined(t=story.t, node="n3", address="10.0.0.3", incarnation="new"))
    assert phase(story) is Phase.WAITING
    story.wait(story.state.settings.join_limit_s - 1.0)
    assert phase(story) is Phase.WAITING
    story.wait(2.0)
    assert phase(story) is Phase.REQUEUED


def test_a_node_lost_while_waiting_is_not_held_against_a_later_incident() -> None:
    story = Story(active=2, spares=2).running()
    story.failed(0, message="one")
    story.stopped()
    story.ranks_up()
    story.failed(0, message="two")
    story.stopped()
    assert phase(story) is Phase.WAITING
    story.lost("n3", silent_s=0.3)
    assert "then n3: silent" in story.incident.evidence
    story.recovered(0, 20)
    assert "n3" not in story.state.placement
    story.failed(0, message="three")
    story.stopped()
    assert story.incident.cause == "worker_exception"


def test_an_allocation_lost_without_a_word_is_an_incident() -> None:
    story = Story().running(30)
    story.allocated("n4", "n5", "n6", restarts=1, queue_s=60.0)
    assert (story.incident.cause, story.incident.action) == ("allocation_lost", "requeue")
    story.ranks_up().restored(20).stepped(40)
    assert not story.incident.open
    assert story.state.restarts == 1


def test_too_few_nodes_come_up() -> None:
    story = Story(active=2, spares=0).submitted()
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="1", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=START
        )
    )
    story.join("n1")
    story.wait(200.0)
    assert phase(story) is Phase.STARTING
    story.wait(150.0)
    assert phase(story) is Phase.REQUEUED
    assert story.last(Requeue).exclude == ("n2",)


def test_a_node_that_is_drained_while_it_starts_is_no_failure() -> None:
    story = Story(spares=0).submitted()
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="1", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=START
        )
    )
    story.join("n1")
    story.asked("drain", "n2")
    incident = story.incident
    assert (incident.cause, incident.charged, incident.action) == ("drain_asked", "nobody", "requeue")
    assert story.last(Requeue).exclude == ("n2",)
    assert not story.state.frail


def test_reports_of_an_earlier_attempt_change_nothing() -> None:
    story = Story().running(30)
    story.failed(1, exit_code=-9)
    story.stopped()
    story.recovered(20, 40)
    before = copy.deepcopy(story.state)
    late: list[ev.Event] = [
        ev.WorkersStarted(t=story.t, node="n2", attempt=1, pids=(1,)),
        ev.WorkerFailed(t=story.t, node="n2", attempt=1, rank=0, exit_code=1),
        ev.RanksHung(t=story.t, attempt=1, ranks=(0,), node="n2", silent_s=1.0, limit_s=1.0, evidence="late"),
        ev.NodeFinished(t=story.t, node="n2", attempt=1),
        ev.Progress(t=story.t, attempt=1, step=99, stepped_at=story.t, absolute=True),
        ev.NodeLost(t=story.t, node="unknown", how="silent", silent_s=1.0),
    ]
    for event in late:
        assert story.feed(event) == []
    assert asdict(story.state) == asdict(before)


def test_a_save_moves_the_step_on() -> None:
    story = Story().running(10).saved(25)
    assert (story.state.step, story.state.saved_step, story.state.stepped_at) == (25, 25, story.t)
    story.saved(30, ok=False, error="disk full")
    assert (story.state.saved_step, story.state.save_failures) == (25, 1)


def test_a_step_that_is_lost_is_not_the_newest_checkpoint() -> None:
    """Step 40 was in the lost node's memory only; the run goes on from 30, and saves less from there on."""
    story = Story(active=2, spares=1).running(40).saved(30, tier="memory").saved(30, tier="peer")
    story.saved(40, tier="memory").lost("n2")
    story.stopped()
    planned = ev.RestorePlanned(
        t=story.t, attempt=2, step=30, tier="memory", expected_s=0.1, tiers={"peer": 9}, reason="newest"
    )
    story.feed(planned)
    steps = {name: tier.step for name, tier in story.state.saved.items()}
    assert (story.state.saved_step, steps) == (30, {"memory": None, "peer": 30})
    story.feed(structs.replace(planned, step=0, tier="", tiers={}))
    assert story.state.saved_step is None


def every_story() -> list[Story]:
    swap = Story(active=2, spares=2).running(40).saved(40)
    swap.lost("n3")
    swap.stopped()
    swap.recovered(40, 60)
    swap.failed(0, exit_code=-9)
    swap.stopped()
    swap.recovered(40, 80).finished()
    requeue = Story(active=2, spares=0).running(30)
    requeue.lost("n2")
    requeue.stopped()
    requeue.allocated("n1", "n3", restarts=1)
    requeue.ranks_up().restored(20).stepped(40)
    cancel = Story().running()
    cancel.hung()
    cancel.asked("cancel")
    cancel.stopped()
    return [swap, requeue, cancel]


@pytest.mark.parametrize("number", range(3))
def test_replay_leads_to_the_same_state_at_every_event(number: int) -> None:
    story = every_story()[number]
    state = initial_state(story.plan)
    decided: list[tuple[float, Instruction]] = []
    for event in story.events:
        decided += [(state.now, i) for i in step(state, ev.from_json(ev.to_json(event)))]
    assert asdict(state) == asdict(story.state)
    assert [i for _, i in decided] == [i for _, i in story.decisions]


def test_a_supervisor_that_takes_over_repeats_what_may_not_have_arrived() -> None:
    story = Story().allocated()
    assert resume(story.state) == [], "a launch is not repeated: see core.supervision"
    story.ranks_up()
    assert resume(story.state) == []
    story.failed(0)
    again = resume(story.state)
    assert isinstance(again[0], StopWorkers)
    assert again[0].nodes == ("n2", "n3")


# Whatever comes, in whatever order: the state stays sound, and one event leads to a handful of decisions.


def random_events(state: RunState, drawn: list[Moment]) -> list[ev.Event]:
    """Applies the drawn events to `state` one by one."""
    t, told = START, []
    for moment in drawn:
        t += moment[1]
        event = next_event(state, t, moment)
        told.append(event)
        instructions = step(state, event)
        state.check()
        assert state.phase is not Phase.STOPPING or not_stopped(state), "all have stopped, and it waits"
        assert len(instructions) <= 2 + len(NODES), instructions
        for instruction in instructions:
            assert instruction.reason
            if isinstance(instruction, Launch):
                assert len(instruction.placement) == state.active
    return told


@settings(max_examples=400)
@given(st.lists(moments, max_size=80), st.booleans(), st.integers(1, 3))
def test_no_order_of_events_breaks_the_state(drawn: list[Moment], requeue: bool, active: int) -> None:
    plan = Story(active=active, spares=1, requeue=requeue).plan
    state = initial_state(plan)
    told = random_events(state, drawn)
    again = initial_state(plan)
    for event in told:
        step(again, event)
    assert asdict(again) == asdict(state)
    for before, after in zip(state.incidents, state.incidents[1:], strict=False):
        assert before.id + 1 == after.id
    for incident in state.incidents:
        assert all(seconds >= 0 for seconds in incident.seconds().values())


@settings(max_examples=150)
@given(st.lists(moments, max_size=60), st.integers(1, 3))
def test_from_anywhere_quiet_agents_lead_to_running_or_to_an_end(drawn: list[Moment], active: int) -> None:
    """After any prefix: nodes that live do as told, new allocations are granted. No state is a trap."""
    story = Story(active=active, spares=1)
    random_events(story.state, drawn)
    story.t = story.state.now
    for _ in range(60):
        if phase(story) is Phase.RUNNING or story.state.ended:
            return
        obey(story)
    raise AssertionError(f"stuck in {story.state.phase}")


def obey(story: Story) -> None:
    """One round of what well-behaved agents and Slurm would do."""
    state = story.state
    if state.phase in (Phase.QUEUED, Phase.REQUEUED):
        names = [f"m{len(story.events)}-{i}" for i in range(state.active + 1)]
        story.feed(
            ev.AllocationStarted(
                t=story.t, slurm_job="9", restarts=len(story.events), nodes=tuple(names), host=names[0],
                eligible_at=story.t,
            )
        )  # fmt: skip
    for node in list(state.nodes.values()):
        if state.phase is Phase.STOPPING and node.name in state.placement and node.role is not Role.FAILED:
            story.feed(ev.WorkersStopped(t=story.t, node=node.name, attempt=state.attempt, store_port=1))
        elif state.phase is Phase.LAUNCHING and node.name in state.placement:
            story.feed(ev.WorkersStarted(t=story.t, node=node.name, attempt=state.attempt, pids=(1,)))
        elif not node.incarnation:
            story.feed(ev.NodeJoined(t=story.t, node=node.name, address="a", incarnation="i"))
        elif not node.ready and node.role is not Role.FAILED and state.phase is not Phase.RUNNING:
            story.feed(ev.NodeReady(t=story.t, node=node.name, store_port=1))
    story.wait(10.0)


def test_a_drain_during_a_back_off_gives_the_place_to_a_spare() -> None:
    story = Story().running()
    story.failed(0)  # after a failure without a step the next attempt waits
    story.stopped()
    story.ranks_up()
    story.failed(1, exit_code=-9)
    story.stopped()
    assert phase(story) is Phase.WAITING
    drained = story.state.placement[1]
    story.asked("drain", drained)
    assert story.state.nodes[drained].drained
    story.backed_off()
    assert drained not in story.state.placement
    assert phase(story) is Phase.LAUNCHING


def test_only_the_node_that_is_drained_by_hand_stays_out() -> None:
    """All ranks ended by themselves at the same moment, and their torchrun hosts with them."""
    story = Story(active=3, spares=2).running()
    drained, *others = story.state.placement
    story.asked("drain", drained)
    for name in story.last(StopWorkers).nodes:
        story.feed(ev.WorkersStopped(t=story.t, node=name, attempt=1, store_port=0))
    assert phase(story) is Phase.WAITING
    for name in others:
        story.feed(ev.NodeReady(t=story.t, node=name, store_port=29001))
    assert phase(story) is Phase.LAUNCHING
    assert set(others) < set(story.state.placement)
    assert drained not in story.state.placement
    assert [node.name for node in story.state.nodes.values() if node.drained] == [drained]


def test_each_attempt_is_told_how_often_failures_are_expected_by_now() -> None:
    story = Story(active=2, spares=2).running()
    first = story.last(Launch).mtbf_s
    assert first == pytest.approx(86_400 * 1000 / (2 * 5.0), rel=1e-3)  # what fleets report
    story.wait(3600.0)
    story.lost("n2")
    story.stopped()
    assert story.last(Launch).attempt == 2
    assert story.last(Launch).mtbf_s == pytest.approx(prior().learned(1.0, 0.0).mtbf_s(2), rel=1e-2)


@pytest.mark.parametrize("requeue", [True, False])
def test_a_torchrun_host_that_takes_long_to_come_back_is_waited_for(requeue: bool) -> None:
    story = Story(active=2, spares=0, requeue=requeue).running()
    victim, other = story.state.placement
    host_died(story, victim, other)
    story.wait(story.state.settings.join_limit_s - 10.0)
    assert phase(story) is Phase.WAITING
    story.feed(ev.NodeReady(t=story.t, node=victim, store_port=29002))
    story.wait(1.0)
    assert phase(story) is Phase.LAUNCHING
    assert set(story.state.placement) == {victim, other}


def test_a_node_whose_host_is_coming_back_needs_no_spare_beside_the_one_for_a_lost_node() -> None:
    story = Story(active=3, spares=1).running()
    victim, lost, other = story.state.placement
    failed = ev.WorkerFailed(
        t=story.t, node=victim, attempt=1, rank=-1, exit_code=-9, error="TorchrunHostDied"
    )
    story.feed(failed)
    story.lost(lost)
    for node, port in ((victim, 0), (other, 29001)):
        story.feed(ev.WorkersStopped(t=story.t, node=node, attempt=1, store_port=port))
    assert phase(story) is Phase.WAITING
    story.feed(ev.NodeReady(t=story.t, node=victim, store_port=29002))
    assert phase(story) is Phase.LAUNCHING
    assert lost not in story.state.placement


def test_a_node_whose_host_is_back_already_keeps_its_place_beside_a_lost_one() -> None:
    story = Story(active=3, spares=1).running()
    victim, lost, other = story.state.placement
    story.feed(
        ev.WorkerFailed(t=story.t, node=victim, attempt=1, rank=-1, exit_code=-9, error="TorchrunHostDied")
    )
    story.feed(ev.WorkersStopped(t=story.t, node=victim, attempt=1, store_port=0))
    story.feed(ev.NodeReady(t=story.t, node=victim, store_port=29002))
    story.feed(ev.WorkersStopped(t=story.t, node=other, attempt=1, store_port=29001))
    story.lost(lost)
    launch = story.last(Launch)
    assert (launch.attempt, launch.placement[0], launch.placement[2]) == (2, victim, other)
    assert story.incident.action == "swap"


def test_a_spare_whose_host_is_coming_back_is_waited_for() -> None:
    story = Story(active=2, spares=1).running()
    spare = next(name for name in story.state.nodes if name not in story.state.placement)
    story.feed(ev.WorkersStopped(t=story.t, node=spare, attempt=0, store_port=0))
    story.lost(story.state.placement[0])
    story.stopped()
    assert phase(story) is Phase.WAITING
    story.feed(ev.NodeReady(t=story.t, node=spare, store_port=29002))
    assert phase(story) is Phase.LAUNCHING
    assert spare in story.state.placement


def test_an_agent_that_dies_with_its_torchrun_host_is_not_waited_for() -> None:
    story = Story(active=2, spares=0).running()
    victim, other = story.state.placement
    host_died(story, victim, other)
    story.lost(victim)
    story.wait(1.0)
    assert phase(story) is Phase.REQUEUED


def host_died(story: Story, victim: str, other: str) -> None:
    """With its ranks; what the agents say then."""
    story.feed(
        ev.WorkerFailed(
            t=story.t,
            node=victim,
            attempt=story.state.attempt,
            rank=-1,
            exit_code=-9,
            error="TorchrunHostDied",
        )
    )
    for node, port in ((victim, 0), (other, 29001)):
        story.feed(ev.WorkersStopped(t=story.t, node=node, attempt=story.state.attempt, store_port=port))
    assert phase(story) is Phase.WAITING
