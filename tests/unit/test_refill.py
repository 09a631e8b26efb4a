"""Nodes in place of lost ones: when they are asked for, how long a run holds the others for them, the small
jobs that bring them, and what they cost."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.cluster import control
from jurymast.cluster import refill as small_jobs
from jurymast.cluster.allocation import Allocation
from jurymast.core.goodput import Ledger
from jurymast.core.run import refill
from jurymast.core.state import events as ev
from jurymast.core.state.effects import (
    AskForNode,
    Effect,
    EndSmallJob,
    Launch,
    LookAtSmallJobs,
    Record,
    Requeue,
)
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.core.supervision.refilling import Refilling, SmallJob
from jurymast.errors import SubmissionError
from jurymast.journal import initial_state
from jurymast.rundir import RunDirectory, write_json
from support.commands import RUN, Place
from support.stories import START, Story

ON = Settings(refill=True, hold_s=100.0)


def holding(*, settings: Settings = ON, began_at: float = START) -> tuple[Story, str]:
    """A run that has lost a node, whose ranks are stopped."""
    story = Story(active=2, spares=0, settings=settings, began_at=began_at).running()
    victim = story.state.placement[1]
    story.lost(victim)
    story.stopped()
    return story, victim


def taken(story: Story, number: int = 1, *, starts_at: float | None = None) -> None:
    story.feed(ev.RefillAsked(t=story.t, number=number))
    story.feed(ev.RefillExpected(t=story.t, number=number, job=f"{number}0", starts_at=starts_at))


def requeues(story: Story) -> bool:
    return any(isinstance(one, Requeue) for _, one in story.decisions)


# ---- how long a run holds


def test_a_run_without_a_spare_holds_its_nodes_and_goes_on_with_the_one_that_comes() -> None:
    story, victim = holding()
    kept = next(name for name in story.state.placement if name != victim)
    assert (story.state.phase, story.incident.action) == (Phase.WAITING, "swap")
    taken(story)
    story.wait(90.0)
    story.feed(ev.RefillStarted(t=story.t, number=1, node="n9"))
    story.join("n9")
    assert not requeues(story)
    assert {*story.last(Launch).placement} == {kept, "n9"}
    assert story.state.nodes["n9"].role is Role.ACTIVE


def test_a_lost_node_that_is_back_in_its_own_place_is_told_as_a_restart() -> None:
    story, victim = holding()
    story.join(victim)
    assert {*story.last(Launch).placement} == {"n1", "n2"}
    assert story.last(Launch).reason == "restart after incident 1, same nodes"
    assert story.incident.action == "restart"


def test_a_run_is_requeued_without_refill() -> None:
    assert requeues(holding(settings=Settings())[0])


def test_the_hold_ends() -> None:
    story, _ = holding()
    taken(story)
    story.wait(99.0)
    assert not requeues(story)
    story.wait(2.0)
    assert requeues(story)
    assert "no node came in 100 s" in story.incident.why


def test_the_hold_does_not_end_while_the_node_that_came_gets_ready() -> None:
    story, _ = holding()
    taken(story)
    story.wait(99.0)
    story.feed(ev.RefillStarted(t=story.t, number=1, node="n9"))
    story.wait(ON.join_limit_s - 1.0)
    assert not requeues(story)
    story.wait(2.0)
    assert requeues(story)


def test_a_run_is_requeued_at_once_if_slurm_expects_a_node_too_late() -> None:
    story, _ = holding()
    taken(story, starts_at=story.t + 50.0)
    assert not requeues(story)
    story.feed(ev.RefillExpected(t=story.t, number=1, job="10", starts_at=story.t + 1000.0))
    assert requeues(story)
    assert "1000 s, later than the policy's hold" in story.incident.why


def test_a_run_is_requeued_if_slurm_refuses_again_and_again() -> None:
    story, _ = holding()
    for number in range(1, refill.FAILURES_MAX + 1):
        assert not requeues(story)
        story.feed(ev.RefillAsked(t=story.t, number=number))
        story.feed(ev.RefillRefused(t=story.t, number=number, why="too many jobs"))
    assert requeues(story)
    assert "Slurm gives no other node: too many jobs" in story.incident.why


def test_small_jobs_that_end_too_early_are_counted_but_not_those_that_nobody_needs() -> None:
    story, _ = holding()
    for number in range(1, refill.FAILURES_MAX + 1):
        taken(story, number)
        story.feed(ev.RefillEnded(t=story.t, number=number, why="", unneeded=True))
    assert not requeues(story)
    for number in range(11, 11 + refill.FAILURES_MAX):
        taken(story, number)
        story.feed(ev.RefillStarted(t=story.t, number=number, node=f"n{number}"))
        story.feed(ev.RefillEnded(t=story.t, number=number, why="its prolog failed"))
    assert requeues(story)


def test_nodes_that_join_and_are_never_ready_are_counted() -> None:
    """Where the partition lacks something that ranks need, the run would go through all of its nodes."""
    story, _ = holding()
    for number in range(1, refill.FAILURES_MAX + 1):
        assert not requeues(story)
        taken(story, number)
        name = f"n{10 + number}"
        story.feed(ev.RefillStarted(t=story.t, number=number, node=name))
        story.feed(ev.NodeJoined(t=story.t, node=name, address="10.0.0.1", incarnation=name, gpus=0))
        story.lost(name)
        story.feed(ev.RefillEnded(t=story.t, number=number, why=f"{name}: torch cannot be loaded"))
    assert requeues(story)
    assert "Slurm gives no other node: n13: torch" in story.incident.why


def test_a_job_that_slurm_ends_holds_nothing() -> None:
    story = Story(active=2, spares=0, settings=ON).running()
    story.feed(ev.Signalled(t=story.t, signal="preempted"))
    assert not refill.may_ask(story.state)
    assert refill.why_not_held(story.state) == "Slurm ends the job"


def test_a_node_that_is_drained_without_a_spare_is_replaced_as_well() -> None:
    story = Story(active=2, spares=0, settings=ON).running()
    story.asked("drain", story.state.placement[1])
    story.stopped()
    assert (story.state.phase, requeues(story)) == (Phase.WAITING, False)
    assert refill.lacking(story.state) == 1


def test_another_allocation_knows_nothing_of_the_small_jobs_before() -> None:
    story, _ = holding()
    taken(story)
    story.wait(200.0)
    story.allocated("n5", "n6", restarts=1)
    assert story.state.refills == {}
    assert story.state.refills_asked == 1, "no number comes twice"


# ---- what is asked of Slurm


class Asking:
    """A run, and what refills it."""

    def __init__(self, *, active: int = 2, spares: int = 1) -> None:
        self.story = Story(active=active, spares=spares, settings=ON).running()
        self.machine = Refilling(self.story.state)
        self.effects: list[Effect] = []

    def took(self, effects: list[Effect]) -> list[Effect]:
        for one in effects:
            if isinstance(one, Record):
                self.story.feed(one.event)
        self.machine.check()
        self.effects = [one for one in effects if not isinstance(one, Record)]
        return self.effects

    def tick(self, seconds: float = 0.1) -> list[Effect]:
        self.story.wait(seconds)
        return self.took(self.machine.on_time(self.story.t))

    def looked(self, *jobs: SmallJob) -> list[Effect]:
        return self.took(self.machine.on_small_jobs(jobs, self.story.t))

    def lose(self, *names: str) -> None:
        for name in names:
            self.story.lost(name)

    def asks(self) -> list[AskForNode]:
        return [one for one in self.effects if isinstance(one, AskForNode)]


@pytest.fixture
def asking() -> Asking:
    """No earlier supervisor has asked for anything."""
    made = Asking()
    assert made.tick() == [LookAtSmallJobs()]
    made.looked()
    return made


def test_a_run_asks_for_each_node_that_it_lost_and_for_one_after_the_other(asking: Asking) -> None:
    assert asking.tick() == []
    asking.lose("n2", "n3")
    asking.tick()
    assert [(one.number, one.exclude) for one in asking.asks()] == [(1, ("n1", "n2", "n3"))]
    assert asking.tick(5.0) == [LookAtSmallJobs()], "the first is not answered yet"
    asking.looked()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    asking.tick(10.0)
    assert asking.asks() == [], "the first has no node yet"
    asking.looked(SmallJob(1, "10", "n9"))
    asking.tick()
    assert [(one.number, one.exclude) for one in asking.asks()] == [(2, ("n1", "n2", "n3", "n9"))]
    assert refill.lacking(asking.story.state) == 0


def test_the_small_job_of_a_node_that_is_lost_is_ended(asking: Asking) -> None:
    asking.lose("n1")
    asking.tick()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    asking.took(asking.machine.on_agent_joins(1, "n9", asking.story.t))
    asking.story.join("n9")
    assert asking.tick(60.0) == []
    asking.lose("n9")
    assert EndSmallJob("10") in asking.tick()
    assert asking.asks(), "another comes in its place"
    assert 1 not in asking.story.state.refills


def test_a_small_job_is_ended_again_if_slurm_did_not_hear_of_it(asking: Asking) -> None:
    """It would keep its node to its time limit."""
    asking.lose("n1")
    for number, node in ((1, "n9"), (2, "n8")):
        asking.tick()
        asking.took(asking.machine.on_node_asked(number, SmallJob(number, f"{number}0"), "", asking.story.t))
        asking.took(asking.machine.on_agent_joins(number, node, asking.story.t))
        asking.story.join(node)
        if number == 1:
            asking.lose(node)
    there = SmallJob(2, "20", "n8")
    assert asking.looked(SmallJob(1, "10", "n9"), there) == [EndSmallJob("10")]
    assert asking.tick(60.0) == [LookAtSmallJobs()]
    assert asking.looked(SmallJob(1, "10", "n9"), there) == [EndSmallJob("10")]
    assert asking.tick(60.0) == [LookAtSmallJobs()]
    assert asking.looked(there) == []
    assert asking.tick(60.0) == []


def test_a_node_is_not_needed_any_more_if_the_lost_one_returns(asking: Asking) -> None:
    asking.lose("n1")
    asking.tick()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    asking.story.join("n1")
    assert EndSmallJob("10") in asking.tick()
    assert (asking.story.state.refills, asking.story.state.refill_failures) == ({}, 0)


def test_a_refusal_is_followed_by_another_try_after_a_while(asking: Asking) -> None:
    asking.lose("n1")
    for number in range(1, refill.FAILURES_MAX + 1):
        asking.tick(refill.RETRY_S)
        assert [one.number for one in asking.asks()] == [number]
        asking.took(asking.machine.on_node_asked(number, None, "too many jobs", asking.story.t))
    asking.tick(refill.RETRY_S)
    assert asking.asks() == []
    asking.tick(refill.ASK_AGAIN_S)
    assert asking.asks() != []


def test_a_supervisor_that_takes_over_finds_what_the_one_before_asked_for() -> None:
    """Also if that could write nothing of it, because storage hung. What is of earlier allocations ends."""
    asking = Asking()
    state = asking.story.state
    asking.lose("n3")
    asking.story.feed(ev.RefillAsked(t=asking.story.t, number=4))
    asking.tick()
    ended = asking.looked(SmallJob(3, "30", "n7"), SmallJob(4, "40"), SmallJob(5, "50", "n8"))
    assert ended == [EndSmallJob("30")]
    assert {number: (one.job, one.node) for number, one in state.refills.items()} == {
        4: ("40", ""),
        5: ("50", "n8"),
    }


def test_a_small_job_that_slurm_never_took_is_not_waited_for() -> None:
    asking = Asking()
    asking.lose("n3")
    asking.story.feed(ev.RefillAsked(t=asking.story.t, number=1))
    asking.tick()
    asking.looked()
    assert asking.story.state.refills == {}
    asking.tick(refill.RETRY_S)
    assert [one.number for one in asking.asks()] == [2]


def test_a_small_job_that_ends_before_its_node_joins_is_noticed(asking: Asking) -> None:
    asking.lose("n3")
    asking.tick()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    asking.tick(10.0)
    asking.looked(SmallJob(1, "10", "n9"))
    node = asking.story.state.nodes["n9"]
    roles = [node.role]
    asking.tick(10.0)
    asking.looked()
    assert [*roles, node.role] == [Role.JOINING, Role.FAILED]
    assert asking.story.state.refill_failures == 1


def test_an_agent_may_join_before_slurm_was_asked_where_it_is(asking: Asking) -> None:
    asking.lose("n3")
    asking.tick()
    asking.took(asking.machine.on_agent_joins(1, "n9", asking.story.t))
    asking.story.join("n9")
    assert refill.lacking(asking.story.state) == 0
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    assert asking.story.state.refills[1].job == "10"


def test_a_node_that_joins_as_its_small_job_is_ended_is_not_blamed_for_leaving(asking: Asking) -> None:
    story = asking.story
    asking.lose("n3")
    asking.tick()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", story.t))
    story.feed(ev.RefillEnded(t=story.t, number=1, why="no node is lacking any more", unneeded=True))
    asking.took(asking.machine.on_agent_joins(1, "n9", story.t))
    story.join("n9")
    asking.lose("n9")
    node = story.state.nodes["n9"]
    assert (node.role, node.faultless) == (Role.FAILED, True)
    assert asking.machine.on_agent_joins(1, "n9", story.t) == [], "it is known"


def test_slurm_s_silence_changes_nothing(asking: Asking) -> None:
    asking.lose("n3")
    asking.tick()
    asking.took(asking.machine.on_node_asked(1, SmallJob(1, "10"), "", asking.story.t))
    assert asking.tick(10.0) == [LookAtSmallJobs()]
    asking.took(asking.machine.on_small_jobs(None, asking.story.t))
    assert [*asking.story.state.refills] == [1]


def test_local_runs_and_tasks_have_no_small_jobs() -> None:
    plan = Story(settings=ON).plan
    assert initial_state(plan).may_refill
    for other in ({"cluster": "local"}, {"tasks": True}, {"observed": True}):
        assert not initial_state(RunPlan.from_json({**plan.to_json(), **other})).may_refill


# ---- small jobs

ALLOCATION = Allocation("17", 2, ("n1", "n2", "n3"), "n1", 0.0, partition="gpu")


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that Slurm says of its configuration."""
    lines = ["SLURM_VERSION = 24.11.3"]
    monkeypatch.setattr(control, "_config", lambda: "\n".join(lines))
    return lines


def made(*options: str, left_s: float | None = 3590.0, exclude: tuple[str, ...] = ("n1",)) -> list[str]:
    plan = RunPlan(
        run="r", name="r", directory="/runs/r", cluster="slurm", active=2, spares=1, ranks_per_node=1,
        script="t.py", sbatch_options=options, exclude=("n8",),
    )  # fmt: skip
    return small_jobs.command(plan, ALLOCATION, 4, exclude, left_s)


def test_a_small_job_has_the_run_s_options_for_one_node() -> None:
    words = made(
        "-p", "gpu,long", "--account=a", "--gres=gpu:8", "--gpus=24", "--mem=0", "-t", "10:00:00",
        "--array=1-3", "--dependency=afterok:3", "-J", "name", "--nodelist=n1", "--constraint=h100", "--wait",
        "--export=NONE",
    )  # fmt: skip
    assert words[:2] == ["sbatch", "--parsable"]
    assert {"--account=a", "--gres=gpu:8", "--mem=0", "--constraint=h100"} <= {*words}
    assert {"--gpus=8", "--partition=gpu", "--time=60", "--exclude=n[8,1]", "--nodes=1", "--export=ALL"} <= {
        *words
    }
    assert "--job-name=jurymast-refill-r-4" in words
    told = " ".join(words[:-1])
    for other in ("array", "dependency", "nodelist", "wait", "10:00:00", "long", "NONE", " -J", " -t"):
        assert other not in told
    assert "jurymast.agent /runs/r --refill 4 --allocation 17.2 --end-as refill" in words[-1]


def test_an_agent_of_a_small_job_outlives_a_rank_that_takes_all_memory(config: list[str]) -> None:
    assert not [word for word in made() if "oom" in word]
    config.append("TaskPluginParam = OOMKillStep")
    assert "--oom-kill-step=0" in made()


@pytest.mark.parametrize(
    ("left_s", "told"), [(math.inf, ["--time=UNLIMITED"]), (None, []), (61.0, ["--time=2"])]
)
def test_a_small_job_lasts_as_long_as_the_run_s(left_s: float | None, told: list[str]) -> None:
    assert [word for word in made(left_s=left_s) if word.startswith("--time")] == told


def test_none_is_asked_for_shortly_before_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_jobs, "ends_in_s", lambda allocation: 30.0)
    plan = Story(settings=ON).plan
    with pytest.raises(SubmissionError, match="time limit in 30 s"):
        small_jobs.ask(plan, ALLOCATION, 1, ())


def test_slurm_s_list_of_jobs_names_those_of_this_run_that_wait_or_run() -> None:
    told = "\n".join([
        "41|PENDING||2026-11-01T10:00:00|jurymast-refill-r-1",
        "42|RUNNING|n7|2026-11-01T09:00:00|jurymast-refill-r-2",
        "43|COMPLETING|n8|2026-11-01T09:00:00|jurymast-refill-r-3",
        "44|CONFIGURING|n9|N/A|jurymast-refill-r-4",
        "45|RUNNING|n5|N/A|jurymast-refill-r-2-5",
        "46|RUNNING|n6|N/A|jurymast-refill-r2-6",
        "47|RUNNING|n4|N/A|a|job with jurymast-refill-r-7",
        "48|SIGNALING|n8|N/A|jurymast-refill-r-8",
        "49|SUSPENDED|n9|N/A|jurymast-refill-r-9",
        "",
    ])  # fmt: skip
    assert small_jobs.found_in(told, "jurymast-refill-r-") == [
        SmallJob(1, "41", "", 1793527200.0),
        SmallJob(2, "42", "n7", None),
        SmallJob(4, "44", "", None),
        SmallJob(8, "48", "n8", None),
        SmallJob(9, "49", "n9", None),
    ]


def test_an_sbatch_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor would ask for no other node, and its end would wait for it."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexec sleep 1000\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(small_jobs, "ends_in_s", lambda allocation: math.inf)
    monkeypatch.setattr(small_jobs, "ASK_LIMIT_S", 0.1)
    with pytest.raises(SubmissionError, match="did not answer within"):
        small_jobs.ask(Story(settings=ON).plan, ALLOCATION, 1, ())


def test_a_small_job_that_starts_after_the_run_s_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Slurm did not answer at the end: its agent would wait half an hour for a supervisor. One that
    starts before has the variables of the run's job."""
    story = Story(settings=ON)
    directory = story.write(tmp_path / "run")
    ALLOCATION.save(directory)
    small_jobs.keep_variables(directory, story.plan, {"SLURM_JOB_ID": "17"})
    monkeypatch.setattr("os.environ", {"SLURM_JOB_ID": "41", "SLURM_CONF": "/etc/s"})
    assert small_jobs.become(directory, 1, ALLOCATION.key) is None
    assert (os.environ["SLURM_JOB_ID"], os.environ["SLURM_CONF"]) == ("17", "/etc/s")
    write_json(directory.outcome_file, {"state": "succeeded", "exit_code": 0})
    assert small_jobs.become(directory, 1, ALLOCATION.key) == 0


def test_ranks_of_a_small_job_see_the_run_s_job_and_their_own_devices() -> None:
    own = {
        "PATH": "/bin", "SLURM_JOB_ID": "41", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_CPUS_ON_NODE": "64", "SLURMD_NODENAME": "n7", "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_GPUS": "0,1", "SLURM_CONF": "/etc/s", "SLURM_SCRIPT_CONTEXT": "prolog_task",
        "TMPDIR": "/tmp/41",
    }  # fmt: skip
    told = {
        "SLURM_JOB_ID": "17", "SLURM_NNODES": "3", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
        "SLURM_STEP_ID": "0", "SLURM_CPUS_ON_NODE": "32", "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "4,5", "TMPDIR": "/tmp/17", "PATH": "/venv/bin:/bin",
    }  # fmt: skip
    assert small_jobs.variables_in(own, told, 2, 3) == {
        "PATH": "/venv/bin:/bin", "TMPDIR": "/tmp/41", "SLURM_JOB_ID": "17", "SLURM_NNODES": "3",
        "SLURM_STEP_ID": "0", "SLURM_CONF": "/etc/s", "SLURM_NODEID": "4", "SLURM_PROCID": "4",
        "SLURM_GTIDS": "4", "SLURM_LOCALID": "0",
        "SLURM_CPUS_ON_NODE": "64", "SLURMD_NODENAME": "n7", "CUDA_VISIBLE_DEVICES": "0,1",
        "SLURM_JOB_GPUS": "0,1",
    }  # fmt: skip


# ---- what they cost


def test_a_node_costs_from_its_small_job_s_start_to_its_end() -> None:
    story = Story(active=2, spares=0, settings=ON)
    ledger = Ledger(initial_state(story.plan))
    story.listeners.append(lambda event: None if ledger.feed(event) else None)
    story.running()
    story.lost("n2")
    story.stopped()
    taken(story)
    story.feed(ev.RefillStarted(t=story.t, number=1, node="n9"))
    began = story.t
    story.join("n9")
    story.recovered(at_step=0, done=20)
    story.lost("n9")
    story.feed(ev.RefillEnded(t=story.t, number=1, why="lost"))
    ended = story.t
    story.wait(50.0)
    stays = ledger.account().stays["n9"]
    assert stays[0].start == pytest.approx(began * 1e6)
    assert stays[-1].end == pytest.approx(ended * 1e6)


# ---- what people see


def test_status_says_what_a_run_holds_its_nodes_for(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.program("squeue", "echo RUNNING")
    story, _ = holding(began_at=time.time() - 60.0)
    taken(story)
    place.story(story)
    shown = place.good("status", RUN)
    assert "holds its nodes for another (small job 10 is to bring it), for up to" in shown, shown
    assert "then is requeued" in " ".join(shown.split())


def test_status_says_that_a_run_goes_on_with_fewer_nodes_if_none_comes(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.program("squeue", "echo RUNNING")
    story, _ = holding(began_at=time.time() - 60.0, settings=replace(ON, nodes_min=1))
    taken(story)
    place.story(story)
    shown = " ".join(place.good("status", RUN).split())
    assert "then goes on with 1 of 2 nodes" in shown
    story.wait(101.0)
    assert story.incident.action == "shrink", "what was said is what is decided"


def test_what_small_jobs_were_told_goes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All variables of a batch script's step, which may be secrets."""
    plan = replace(Story(settings=ON).plan, directory=str(tmp_path), batch=True)
    run = RunDirectory(tmp_path)
    run.submission.mkdir()
    small_jobs.keep_variables(run, plan, {"TOKEN": "secret"})
    assert "secret" in small_jobs.variables_file(run).read_text()
    monkeypatch.setattr(small_jobs, "look", lambda plan: [])
    small_jobs.end_all(plan)
    assert not small_jobs.variables_file(run).exists()
