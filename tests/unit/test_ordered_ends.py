"""Ends that Slurm or somebody ordered, told as stories: none is a failure of a node or of the script."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec import structs

from jurymast.cluster.allocation import Allocation
from jurymast.cluster.control import ended_life
from jurymast.cluster.earlier import past_runs
from jurymast.core.judges.explained import NOBODY_LIMIT_S
from jurymast.core.judges.history import judged
from jurymast.core.nodes.watch import ISOLATION_LIMIT_S
from jurymast.core.run.ends import lost_nodes
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Requeue, WhyEnding
from jurymast.core.state.findings import HARDWARE
from jurymast.core.state.run import Phase, Role, expected_mtbf_s, failure_rate
from jurymast.core.state.settings import Budget, Settings
from jurymast.supervisor.real_io import allocation_begun
from support.stories import Story
from support.successor import Successor

DAY_S = 86_400.0


def signalled(story: Story, *signals: str) -> Story:
    for signal in signals:
        story.t += 0.1
        story.feed(ev.Signalled(t=story.t, signal=signal))
    return story


def started_again(story: Story, step: int, *nodes: str, queue_s: float = 600.0, before: str = "") -> Story:
    """Slurm starts the job again, and the run goes on from `step`."""
    story.allocated(*nodes, restarts=story.state.restarts + 1, queue_s=queue_s, before=before)
    return story.ranks_up().restored(step).stepped(step + 1).stepped(step + 100)


def preempted(story: Story, step: int) -> Story:
    story.t += 3600.0
    signalled(story, "SIGTERM", "preempted")
    story.feed(ev.AllocationEnded(t=story.t + 5.0, slurm_job="17", why="requeued"))
    return started_again(story, step)


def failures(story: Story) -> float:
    found = failure_rate(story.state, story.t)
    assert found is not None
    return found.incidents


def charges(story: Story) -> list[tuple[str, str]]:
    return [(incident.cause, incident.charged) for incident in story.state.incidents]


def test_preemptions_spend_no_budget_for_failures_and_raise_no_failure_rate() -> None:
    budget = Budget(count=3, window_s=DAY_S)
    story = Story(active=2, spares=1, settings=Settings(infrastructure=budget, requeues=2)).running(100)
    mtbf_s = expected_mtbf_s(story.state, story.t)
    for life in range(12):
        preempted(story, 100 * (life + 1))
    assert set(charges(story)) == {("preempted", "preemption")}
    assert len(story.state.incidents) == story.state.restarts == 12
    assert failures(story) == 0.0
    assert expected_mtbf_s(story.state, story.t) >= mtbf_s
    story.lost(story.state.placement[1])
    story.stopped()
    assert not story.state.ended, story.state.end_reason
    story.recovered(1300, 1500)
    story.lost(story.state.placement[1])
    story.stopped()
    assert story.state.phase is Phase.REQUEUED, "preemptions spent the policy's requeues"


def test_a_budget_for_preemptions_ends_the_run_while_it_can_still_save() -> None:
    settings = Settings(preemption=Budget(count=2, window_s=DAY_S))
    story = Story(settings=settings).running(100)
    for life in range(2):
        preempted(story, 100 * (life + 1))
    story.t += 3600.0
    signalled(story, "SIGTERM", "preempted")
    assert story.state.phase is Phase.FAILED
    assert "the preemption budget of 2 preemptions per 86400 s is spent" in story.state.end_reason
    assert [incident.cause for incident in story.state.incidents] == ["preempted"] * 3
    assert story.incident.action == "stop"


def test_a_preemption_begins_when_slurm_ends_the_job_and_not_when_it_starts_it_again() -> None:
    story = Story().running(100)
    signalled(story, "SIGTERM", "preempted")
    ended_at = story.t
    started_again(story, 90, queue_s=7200.0)
    seconds = story.incident.seconds()
    assert (seconds["detect"], seconds["diagnose"], seconds["decide"]) == (0.0, 0.0, 0.0)
    assert seconds["replace"] >= 7200.0
    assert story.incident.fault_at <= ended_at
    exposure = failure_rate(story.state, story.t)
    assert exposure is not None
    assert exposure.exposure_node_days < 2 * 600.0 / DAY_S, "nodes cannot fail while the job is queued"


@pytest.mark.parametrize(
    ("words", "cause", "charged"),
    [
        (("SIGTERM", "requeued"), "job_ended", "nobody"),
        (("SIGTERM", "deadline"), "job_ended", "nobody"),
        (("SIGTERM", "suspended"), "job_ended", "nobody"),
        (("SIGTERM", "unknown"), "job_ended", "nobody"),
        (("SIGTERM",), "job_ended", "nobody"),
        (("SIGTERM", "unknown", "preempted"), "preempted", "preemption"),
        (("SIGTERM", "node_fail"), "allocation_lost", "infrastructure"),
        (("SIGTERM", "out_of_memory"), "out_of_memory", "application"),
        (("SIGUSR2",), "allocation_lost", "infrastructure"),
        ((), "allocation_lost", "infrastructure"),
    ],
)
def test_slurms_reason_for_the_end_of_an_allocation(words: tuple[str, ...], cause: str, charged: str) -> None:
    story = started_again(signalled(Story().running(100), *words), 90)
    assert charges(story) == [(cause, charged)]
    assert failures(story) == pytest.approx(float(charged == "infrastructure"), abs=0.01)
    assert not story.incident.open


@pytest.mark.parametrize(
    ("words", "before", "cause", "charged"),
    [
        ((), "preempted", "preempted", "preemption"),
        ((), "requeued", "job_ended", "nobody"),
        ((), "node_fail", "allocation_lost", "infrastructure"),
        (("SIGTERM",), "preempted", "preempted", "preemption"),
        (("SIGTERM", "unknown"), "node_fail", "allocation_lost", "infrastructure"),
        (("SIGTERM", "preempted"), "node_fail", "preempted", "preemption"),
    ],
)
def test_what_slurms_accounts_say_afterwards_counts_if_nobody_knew_better(
    words: tuple[str, ...], before: str, cause: str, charged: str
) -> None:
    """All processes died without a signal, or the supervisor did while slurmctld was silent."""
    story = started_again(signalled(Story().running(100), *words), 90, before=before)
    assert charges(story) == [(cause, charged)]
    assert failures(story) == pytest.approx(float(charged == "infrastructure"), abs=0.01)
    assert not story.incident.open


@pytest.mark.parametrize("swapped", [False, True])
def test_agents_that_a_preemption_without_a_signal_killed_first_are_no_failures(
    swapped: bool, tmp_path: Path
) -> None:
    """The supervisor, on the last node, still sees that others are gone, and may even have replaced one."""
    story = Story(active=2, spares=1).running(100)
    gone = [story.state.placement[1]]
    if not swapped:
        gone += [name for name in story.state.nodes if name not in story.state.placement]
    for name in gone:
        story.feed(ev.NodeLost(t=story.t, node=name, how="closed", silent_s=0.0))
    if swapped:
        story.stopped()
        assert story.state.phase is Phase.LAUNCHING
    started_again(story, 90, before="preempted")
    assert charges(story)[-1] == ("preempted", "preemption")
    assert "infrastructure" not in dict(charges(story)).values()
    assert failures(story) == 0.0
    assert not story.state.excluded
    story.finished()
    story.write(tmp_path / "runs" / story.plan.run)
    (past,) = past_runs(tmp_path / "runs")
    assert {left.node for left in past.departures} == set(gone)
    assert not any(left.failed for left in past.departures)
    assert past.failures == ()


def test_a_supervisor_asks_the_accounts_what_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story().running(100)
    sacct, asked = tmp_path / "bin/sacct", tmp_path / "asked"
    sacct.parent.mkdir()
    begun = int(story.state.allocated_at)
    sacct.write_text(f"#!/bin/sh\necho $* >> {asked}; echo 'PREEMPTED|{begun}|{begun + 500}'\n")
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", str(sacct.parent), prepend=os.pathsep)
    again = Allocation("17", 1, tuple(story.state.nodes), next(iter(story.state.nodes)), 0.0)
    told = allocation_begun(story.plan, story.state, again, story.t)
    assert (told.slurm_job, told.restarts, told.before) == ("17", 1, "preempted")
    assert f"--jobs={story.state.allocation.rpartition('.')[0]}" in asked.read_text()
    signalled(story, "SIGTERM", "requeued")
    asked.unlink()
    assert allocation_begun(story.plan, story.state, again, story.t).before == ""
    assert not asked.exists(), "Slurm had said it"


def test_how_an_earlier_life_of_a_job_ended_is_found_among_the_others() -> None:
    """The id was another job's months ago, and the next life runs."""
    began = 1_795_000_000
    lives = [
        f"NODE_FAIL|{began - 9_000_000}|{began - 8_000_000}",
        f"REQUEUED|{began - 2000}|{began - 1000}",
        f"PREEMPTED|{began}|{began + 500}",
        f"RUNNING|{began + 700}|Unknown",
    ]
    text = "\n".join(lives)
    assert ended_life(text, began + 30.0) == "preempted"
    assert ended_life(text, began - 1970.0) == "requeued"
    assert ended_life(lives[0], began + 30.0) == ""
    assert ended_life(lives[3], began + 730.0) == ""
    assert ended_life(f"CANCELLED by 1001|{began}|{began + 5}", began + 1.0) == "cancelled"
    assert ended_life("", began) == ended_life("what?", began) == ""


def left(story: Story, cause: str) -> Story:
    """The run has decided to have its job requeued, as it has no spare, and is not gone yet."""
    if cause == "node_lost":
        story.lost(story.state.placement[1])
    else:
        story.feed(ev.NodeLost(t=story.t, node=story.state.placement[1], how="closed", silent_s=0.3))
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    story.t += 60.0
    return story


@pytest.mark.parametrize(
    ("words", "before"), [(("SIGTERM", "preempted"), ""), (("SIGTERM", "unknown"), "preempted")]
)
@pytest.mark.parametrize("first", ["node_lost", "node_crash"])
def test_a_preemption_while_the_run_leaves_for_another_cause_is_a_cause_of_its_own(
    words: tuple[str, ...], before: str, first: str
) -> None:
    """All that follows, Slurm's queue above all, is the preemption's; the first cause is charged once."""
    budget = Budget(count=1, window_s=DAY_S)
    story = Story(active=2, spares=0, settings=Settings(infrastructure=budget, requeues=1)).running(100)
    signalled(left(story, first), *words)
    ended_at = story.t
    started_again(story, 90, queue_s=7200.0, before=before)
    assert charges(story) == [(first, "infrastructure"), ("preempted", "preemption")]
    assert ended_at - 1.0 < story.incident.fault_at <= ended_at
    assert story.state.incidents[0].seconds()["replace"] == 0.0
    assert story.incident.seconds()["replace"] >= 7200.0
    assert failures(story) == pytest.approx(1.0, abs=0.01)
    assert story.state.excluded.keys() == {"n2"}
    assert story.state.may_requeue, "the preemption spent the policy's requeues"


@pytest.mark.parametrize(
    ("first", "charged"),
    [
        ("node_lost", [("node_lost", "infrastructure"), ("preempted", "preemption")]),
        ("node_crash", [("preempted", "preemption")]),
    ],
)
def test_a_preemption_that_nobody_saw_may_have_been_why_a_node_was_gone(
    first: str, charged: list[tuple[str, str]]
) -> None:
    """All processes were killed, those on one node first, and only Slurm's accounts tell of it."""
    story = Story(active=2, spares=0, settings=Settings(requeues=1)).running(100)
    started_again(left(story, first), 90, queue_s=7200.0, before="preempted")
    assert charges(story) == charged
    assert story.incident.seconds()["replace"] >= 7200.0
    assert not story.state.excluded
    assert story.state.may_requeue


@pytest.mark.parametrize(
    ("words", "before"),
    [((), ""), ((), "requeued"), ((), "node_fail"), (("SIGTERM", "requeued"), ""), (("SIGTERM",), "")],
)
def test_any_other_end_of_a_job_that_the_run_leaves_is_what_it_wanted(
    words: tuple[str, ...], before: str
) -> None:
    story = Story(active=2, spares=0, settings=Settings(requeues=1)).running(100)
    started_again(signalled(left(story, "node_lost"), *words), 90, before=before)
    assert charges(story) == [("node_lost", "infrastructure")]
    assert not story.state.may_requeue
    assert not story.incident.open


@pytest.mark.parametrize(
    ("event", "how"),
    [
        (ev.Signalled(t=0.0, signal="timeout"), "failed"),
        (ev.Asked(t=0.0, what="cancel", by="scancel"), "cancelled"),
    ],
)
def test_a_run_that_leaves_is_over_where_its_job_is(event: ev.Event, how: str) -> None:
    story = left(Story(active=2, spares=0).running(100), "node_lost")
    story.feed(structs.replace(event, t=story.t))
    assert story.state.public_state == how
    assert charges(story) == [("node_lost", "infrastructure")]
    assert not story.incident.open


def test_preemptions_while_the_run_leaves_spend_their_own_budget() -> None:
    settings = Settings(preemption=Budget(count=1, window_s=DAY_S))
    story = Story(active=2, spares=0, settings=settings).running(100)
    started_again(left(story, "node_lost"), 90, before="preempted")
    assert not story.state.ended
    left(story, "node_lost")
    story.allocated(restarts=2, before="preempted")
    assert story.state.phase is Phase.FAILED
    assert "the preemption budget of 1 preemptions per 86400 s is spent" in story.state.end_reason


def test_a_node_with_a_fault_stays_excluded_when_slurm_preempts_the_job_at_once() -> None:
    story = Story(active=2, spares=0).running(100)
    node = story.state.placement[0]
    story.feed(
        ev.HealthFound(
            t=story.t, node=node, probe="nvml", code="xid-79", verdict="bad", kind=HARDWARE,
            message="the GPU fell off the bus",
        )
    )  # fmt: skip
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    signalled(story, "SIGTERM", "preempted")
    started_again(story, 90, "n8", "n9")
    assert charges(story)[-1] == ("preempted", "preemption")
    assert node in story.state.excluded


def test_each_preemption_is_one_though_no_step_is_done_between_them() -> None:
    story = Story(settings=Settings(preemption=Budget(count=4, window_s=DAY_S))).running(100)
    for _ in range(4):
        story.t += 60.0
        signalled(story, "SIGTERM", "preempted")
        story.allocated(restarts=story.state.restarts + 1)
        story.ranks_up()
    assert [incident.cause for incident in story.state.incidents] == ["preempted"] * 4
    assert not story.state.ended
    signalled(story, "SIGTERM", "preempted")
    assert story.state.phase is Phase.FAILED


@pytest.mark.parametrize("told", ["before", "meanwhile", "after"])
def test_ranks_that_slurm_signals_too_end_for_the_same_reason(told: str) -> None:
    """Slurm signals every process: ranks may end before anybody has asked why, and be restarted."""
    story = Story().running(100)
    signalled(story, "SIGTERM")
    if told == "before":
        signalled(story, "preempted")
    story.failed(0, exit_code=-15)
    if told == "meanwhile":
        signalled(story, "preempted")
    story.stopped()
    if told == "after":
        assert story.state.phase is Phase.LAUNCHING
        signalled(story, "preempted")
    else:
        assert story.state.public_state == "recovering"
        assert len(story.state.incidents) == story.state.attempt == 1, "ranks are started in a job that ends"
    started_again(story, 90)
    assert charges(story) == [("preempted", "preemption")]
    assert failures(story) == 0.0


def test_a_job_that_does_not_end_after_all_goes_on_at_once_and_its_failures_are_failures() -> None:
    story = Story().running(100)
    signalled(story, "SIGTERM", "preempted")
    story.failed(0, exit_code=-15)
    story.stopped()
    signalled(story, "running")
    story.wait(0.1)
    story.recovered(90, 200)
    story.lost(story.state.placement[0])
    story.stopped()
    assert charges(story)[1:] == [("node_lost", "infrastructure")]
    assert failures(story) == pytest.approx(1.0, abs=0.01)


def test_a_node_that_is_lost_while_slurm_ends_the_job_has_not_failed(tmp_path: Path) -> None:
    """Slurm kills the processes of one node before those of another."""
    story = Story(active=2, spares=0).running(100)
    signalled(story, "SIGTERM", "preempted")
    story.feed(ev.NodeLost(t=story.t, node="n1", how="closed", silent_s=0.3))
    story.stopped()
    assert story.state.phase is Phase.WAITING
    started_again(story, 90)
    assert charges(story) == [("preempted", "preemption")]
    assert not story.state.excluded
    assert not story.state.frail
    story.write(tmp_path / "run")
    (past,) = past_runs(tmp_path)
    assert past.failures == ()
    assert not any(struck for _, struck, _ in judged(past.departures))


def test_a_node_whose_agent_is_told_to_end_is_replaced_and_has_not_failed(tmp_path: Path) -> None:
    story = Story(active=2, spares=1).running(100)
    for life in range(2):  # the second time without a spare
        story.t += 100.0
        story.feed(ev.NodeLost(t=story.t, node=story.state.placement[0], how="taken", silent_s=0.0))
        story.stopped()
        assert (story.incident.cause, story.incident.charged) == ("node_taken", "nobody")
        if not life:
            story.recovered(100, 300)
    assert story.last(Requeue).exclude == ()
    assert failures(story) == 0.0
    started_again(story, 200, "n1", "n2", "n3")
    story.write(tmp_path / "run")
    (past,) = past_runs(tmp_path)
    assert past.failures == ()
    assert not any(struck for _, struck, _ in judged(past.departures))


def test_a_node_that_fails_after_it_was_taken_and_came_back_has_failed() -> None:
    story = Story(active=2, spares=1).running(100)
    taken = story.state.placement[0]
    story.feed(ev.NodeLost(t=story.t, node=taken, how="taken", silent_s=0.0))
    story.stopped()
    story.recovered(100, 300)
    story.join(taken)
    assert story.state.nodes[taken].role is Role.SUSPECT
    for name in (taken, *story.state.placement):
        story.lost(name)
    story.stopped()
    assert taken in story.last(Requeue).exclude


def test_ranks_that_the_time_limit_ended_first_are_no_failure() -> None:
    story = Story().running(100)
    signalled(story, "SIGTERM")
    story.failed(0, exit_code=-15)
    story.stopped()
    assert story.state.phase is Phase.LAUNCHING
    signalled(story, "timeout")
    assert (story.state.phase, failures(story)) == (Phase.FAILED, 0.0)
    assert [incident.charged for incident in story.state.incidents] == ["nobody"]


def ranks_leave(story: Story) -> Story:
    """All ranks catch a signal, save, and leave with exit code 0."""
    signalled(story, ev.CAUGHT)
    for node in story.state.placement:
        story.feed(ev.NodeFinished(t=story.t, node=node, attempt=story.state.attempt))
    return story


@pytest.mark.parametrize("words", [("SIGTERM",), ("SIGTERM", "preempted"), ("SIGTERM", "requeued")])
def test_ranks_that_leave_as_slurm_ends_the_job_have_not_reached_the_end(words: tuple[str, ...]) -> None:
    """Agents keep this to themselves, but not those of an attempt that was started since the order."""
    story = ranks_leave(signalled(Story().running(100), *words))
    assert story.state.phase is Phase.RUNNING
    started_again(story, 90, before="preempted")
    assert charges(story)[0][1] in ("preemption", "nobody")
    assert story.state.phase is Phase.RUNNING


def test_ranks_that_leave_have_reached_the_end_if_slurm_does_not_end_the_job() -> None:
    assert ranks_leave(Story().running(100)).state.phase is Phase.SUCCEEDED, "of their own"
    assert ranks_leave(signalled(Story().running(100), "SIGTERM", "running")).state.phase is Phase.SUCCEEDED
    story = ranks_leave(signalled(Story().running(100), "SIGTERM"))
    assert story.state.phase is Phase.RUNNING, "Slurm has not answered"
    assert signalled(story, "running").state.phase is Phase.SUCCEEDED
    late = signalled(Story().running(100), ev.CAUGHT)
    signalled(late, "SIGTERM", "preempted")
    for node in late.state.placement:
        late.feed(ev.NodeFinished(t=late.t, node=node, attempt=1))
    assert late.state.phase is Phase.SUCCEEDED, "what they caught was no order of Slurm's"


@pytest.mark.parametrize("first", [0, 1, 3], ids=["all at once", "one before", "all were given up before"])
def test_the_end_of_the_agents_step_in_slurm_is_the_run_s_and_blames_no_node(first: int) -> None:
    """`scancel JOB.STEP`, or the time limit of srun: the job goes on, and its nodes are well."""
    story = Story(active=2, spares=1).running(100)
    supervisor = Successor(story)
    nodes = [*story.state.nodes]
    for node in nodes:
        supervisor.joins(node, ranks="running", attempt=1)
    ended = msg.Ask(what=ev.STEP_ENDED, by="whoever did so")
    assert isinstance(supervisor.machine.on_request(ended, story.t)[0], msg.Declined), "agents are connected"
    for number, node in enumerate(nodes, 1):
        supervisor.machine.on_connection_closed(node, number, story.t, reset=True)
        if number == first:
            supervisor.waits(2.0, beating=nodes[number:])
    if first == len(nodes):
        supervisor.waits(ISOLATION_LIMIT_S, beating=())
    answer, _ = supervisor.machine.on_request(ended, story.t)
    assert isinstance(answer, msg.Accepted)
    supervisor.machine.check()
    assert story.state.public_state == "cancelled"
    assert story.state.end_reason == "cancel requested by whoever did so"
    assert story.state.step_alone, "the job of a batch script goes on"
    assert story.state.excluded == {}
    assert failures(story) == 0.0
    supervisor.waits(2.0, beating=())
    assert lost_nodes(story.state) == [], "later steps have them all"
    again = supervisor.machine.on_request(ended, story.t)[0]
    assert isinstance(again, msg.Declined), "it has ended already"


@pytest.mark.parametrize("signalled_first", [False, True])
def test_the_word_of_the_batch_process_is_waited_for_if_no_agent_is_left(signalled_first: bool) -> None:
    """A requeue would exclude all nodes. At a time limit of its own Slurm signals the step first."""
    story = Story(active=2, spares=0).running(100)
    supervisor = Successor(story)
    nodes = [*story.state.nodes]
    for number, node in enumerate(nodes, 1):
        supervisor.joins(node, ranks="running", attempt=1)
        if signalled_first:
            supervisor.hears(node, msg.Terminated())
            supervisor.machine.on_end_explained(WhyEnding(node, number), "running", "", story.t)
    for number, node in enumerate(nodes, 1):
        supervisor.machine.on_connection_closed(node, number, story.t, reset=True)
    supervisor.waits(NOBODY_LIMIT_S - 2.0, beating=())
    assert story.state.incident is not None
    assert story.state.phase is Phase.STOPPING
    supervisor.waits(4.0, beating=())
    assert story.state.public_state == "requeued", "nobody says anything"


@pytest.mark.parametrize("told", [True, False])
def test_a_step_that_ends_before_the_first_attempt_ends_the_run(told: bool) -> None:
    """Agents end one after the other: the first one alone would be a reason to try other nodes."""
    story = Story(active=2, spares=0)
    story.feed(ev.SupervisorStarted(t=story.t, epoch=1, node="n1"))
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="17", restarts=0, nodes=("n1", "n2"), host="n1", eligible_at=0.0
        )
    )
    for name in ("n1", "n2"):
        story.feed(ev.NodeJoined(t=story.t, node=name, address="10.0.0.1", incarnation=name, gpus=0))
    for name, how in (("n1", "closed"), ("n2", "taken")):
        story.t += 0.3
        story.feed(ev.NodeLost(t=story.t, node=name, how=how, silent_s=0.3))
    story.wait(NOBODY_LIMIT_S - 2.0)
    assert story.state.phase is Phase.STARTING
    if told:
        story.feed(ev.Asked(t=story.t, what=ev.STEP_ENDED, by="whoever did so"))
    story.wait(4.0)
    assert story.state.public_state == ("cancelled" if told else "requeued")
    assert set(story.state.excluded) == (set() if told else {"n1"})


def test_a_step_that_ends_while_a_place_is_open_ends_the_run() -> None:
    story = Story(active=2, spares=1).running(100)
    story.lost(story.state.placement[0])
    spare = next(name for name in story.state.nodes if name not in story.state.placement)
    story.state.nodes[spare].ready = False
    story.stopped()
    assert story.state.phase is Phase.WAITING
    for name in story.state.nodes:
        story.feed(ev.NodeLost(t=story.t, node=name, how="closed", silent_s=0.3))
    story.wait(NOBODY_LIMIT_S - 2.0)
    assert story.state.phase is Phase.WAITING
    story.feed(ev.Asked(t=story.t, what=ev.STEP_ENDED, by="whoever did so"))
    assert story.state.public_state == "cancelled"


def test_the_end_of_the_step_of_a_run_that_is_to_be_requeued_is_its_own() -> None:
    story = Story(active=2, spares=0).running(100)
    story.lost(story.state.placement[1])
    story.stopped()
    assert story.state.phase is Phase.REQUEUED
    supervisor = Successor(story)
    ended = msg.Ask(what=ev.STEP_ENDED, by="whoever did so")
    assert isinstance(supervisor.machine.on_request(ended, story.t)[0], msg.Declined)
    assert story.state.phase is Phase.REQUEUED
