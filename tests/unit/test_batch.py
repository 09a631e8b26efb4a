"""What the batch process decides: when a supervisor is started again, and when the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.cluster import batch
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.batch import Agents, BatchProcess, LocalAgents, SrunAgents
from jurymast.cluster.control import Ending
from jurymast.core.supervision import batch as core
from jurymast.core.supervision.batch import (
    FAILED,
    GONE_S,
    PAUSE_MAX_S,
    RESTARTS_AT_ONCE,
    SHORT_LIFE_S,
    SUCCESSOR_LIMIT_S,
    SUPERSEDED,
    TOLD_FOR_S,
    Batch,
    EndJob,
    Forward,
    Outcome,
    RequeueJob,
    StartAgents,
    StartSupervisor,
)  # fmt: skip
from jurymast.script.step import StepAgents
from support.stories import Story
from support.waiting import wait_until

DONE = Outcome("succeeded", 0)
REQUEUED = Outcome("requeued", 0, exclude=("n2",), lost=("n2",))


def begun() -> Batch:
    made = Batch()
    assert made.begin(0.0) == [StartSupervisor(), StartAgents()]
    assert made.on_supervisor_started(0.0) == []
    return made


def without(effects: list[core.Effect]) -> list[core.Effect]:
    """What is said."""
    return [effect for effect in effects if not isinstance(effect, core.Say)]


def test_the_job_ends_as_the_supervisor_has_written() -> None:
    made = begun()
    assert made.on_supervisor_ended(0, DONE, 9.0) == [EndJob(DONE)]
    assert made.over
    assert begun().on_supervisor_ended(0, REQUEUED, 9.0) == [RequeueJob(REQUEUED), EndJob(REQUEUED)]


def test_a_supervisor_that_crashes_is_started_again_for_ever_but_not_without_a_pause() -> None:
    made, now, pauses = begun(), 0.0, []
    for _ in range(RESTARTS_AT_ONCE + 9):
        now += 1.0
        effects = without(made.on_supervisor_ended(1, None, now))
        died_at = now
        while not made.supervised:
            assert effects == []
            now += 0.25
            effects = made.on_time(None, now, agents=True)
        assert effects == [StartSupervisor()]
        pauses.append(now - died_at)
    assert pauses[:RESTARTS_AT_ONCE] == [0.0] * RESTARTS_AT_ONCE
    assert pauses[RESTARTS_AT_ONCE:] == sorted(pauses[RESTARTS_AT_ONCE:])
    assert (pauses[RESTARTS_AT_ONCE], pauses[-1]) == (0.5, PAUSE_MAX_S)


def test_one_that_has_lived_for_a_while_counts_as_the_first() -> None:
    made = begun()
    for number in range(3 * RESTARTS_AT_ONCE):
        ended = made.on_supervisor_ended(-9, None, (number + 1) * SHORT_LIFE_S)
        assert without(ended) == [StartSupervisor()]


def in_a_pause() -> Batch:
    made = begun()
    for _ in range(RESTARTS_AT_ONCE + 1):
        made.on_supervisor_ended(1, None, 1.0)
    assert not made.supervised
    return made


def test_ranks_without_a_supervisor_come_to_their_end() -> None:
    made = in_a_pause()
    assert made.on_time(None, 1.1, agents=True) == []
    assert made.on_time(None, 1.2, agents=False) == [EndJob(FAILED)]
    assert in_a_pause().on_time(DONE, 1.2, agents=False) == [EndJob(DONE)]


def test_a_signal_is_the_supervisor_s_and_without_one_it_waits_for_the_next() -> None:
    made = begun()
    assert made.on_signal(1.0, warning=True, supervised=True) == [Forward(warning=True)]
    assert made.on_supervisor_started(1.0) == [], "a warning is for nobody else"
    assert made.on_signal(2.0, warning=True, supervised=False) == []
    assert made.on_supervisor_started(2.0) == []
    assert made.on_signal(3.0, warning=False, supervised=False) == []
    assert made.on_supervisor_started(4.0) == [Forward(warning=False)]


def test_a_supervisor_that_died_of_the_end_of_its_job_is_told_of_it_again_but_not_for_ever() -> None:
    made = begun()
    assert made.on_signal(1.0, warning=False, supervised=True) == [Forward(warning=False)]
    assert without(made.on_supervisor_ended(-9, None, 2.0)) == [StartSupervisor()]
    assert made.on_supervisor_started(3.0) == [Forward(warning=False)]
    assert made.on_supervisor_started(1.0 + TOLD_FOR_S) == [], "the job has gone on"


def test_a_sigterm_while_no_supervisor_stays_up_has_one_find_out_whether_the_job_ends() -> None:
    """It may be a stray one: the ranks go on without a supervisor."""
    paused = in_a_pause()
    assert paused.on_time(None, 1.1, agents=True) == []
    assert paused.on_signal(1.1, warning=False, supervised=False) == []
    assert paused.on_time(None, 1.1, agents=True) == [StartSupervisor()]
    assert paused.on_supervisor_started(1.2) == [Forward(warning=False)]
    assert without(paused.on_supervisor_ended(1, None, 1.3)) == []
    assert paused.on_time(None, 1.4, agents=True) == [], "not again and again"


def test_who_is_superseded_keeps_the_job_alive_until_the_other_has_decided() -> None:
    made = begun()
    assert made.on_supervisor_ended(SUPERSEDED, None, 9.0) == []
    assert made.on_time(None, 9000.0, agents=True) == []
    assert made.on_time(DONE, 9001.0, agents=True) == [EndJob(DONE)]


def test_a_successor_that_ended_with_all_agents_is_followed_by_another_supervisor() -> None:
    """As with `scancel JOB.STEP`: the job would live on until its time limit, and nobody decide."""
    made = begun()
    made.on_supervisor_ended(SUPERSEDED, None, 9.0)
    assert made.on_time(None, 20.0, agents=False) == []
    assert made.on_time(None, 19.9 + GONE_S, agents=False) == [], "it may be about to write how the run ended"
    assert without(made.on_time(None, 20.0 + GONE_S, agents=False)) == [StartSupervisor()]
    assert made.supervised
    other = begun()
    other.on_supervisor_ended(SUPERSEDED, None, 9.0)
    other.on_time(None, 20.0, agents=False)
    assert other.on_time(DONE, 20.0 + GONE_S, agents=False) == [EndJob(DONE)]


def test_a_successor_s_requeue_is_waited_for_and_then_done_from_here() -> None:
    made = begun()
    made.on_supervisor_ended(SUPERSEDED, None, 9.0)
    assert made.on_time(REQUEUED, 10.0, agents=True) == []
    assert made.on_time(REQUEUED, 9.9 + SUCCESSOR_LIMIT_S, agents=True) == []
    late = made.on_time(REQUEUED, 10.0 + SUCCESSOR_LIMIT_S, agents=True)
    assert without(late) == [RequeueJob(REQUEUED), EndJob(REQUEUED)]
    ended = begun()
    ended.on_supervisor_ended(SUPERSEDED, None, 9.0)
    ended.on_time(REQUEUED, 10.0, agents=True)
    ended.on_signal(10.5, warning=False, supervised=False)  # Slurm's, or a stray one: requeued it is anyhow
    assert without(ended.on_time(REQUEUED, 11.0, agents=True)) == [RequeueJob(REQUEUED), EndJob(REQUEUED)]


def test_what_a_successor_has_written_before_the_end_of_who_is_superseded_is_left_to_it() -> None:
    made = begun()
    assert made.on_supervisor_ended(SUPERSEDED, REQUEUED, 9.0) == []
    assert made.on_time(REQUEUED, 9.1, agents=True) == []
    other = begun()
    assert other.on_supervisor_ended(SUPERSEDED, DONE, 9.0) == []
    assert other.on_time(DONE, 9.1, agents=True) == [EndJob(DONE)]


def test_what_an_earlier_life_has_written_is_gone_before_this_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the job would end by it; also if nothing else can be written."""
    monkeypatch.setattr(batch, "STORAGE_LIMIT_S", 0.0)
    story = Story()
    directory = story.write(tmp_path / "run")
    directory.outcome_file.write_text('{"state": "requeued", "exit_code": 0}')
    directory.allocation_file.mkdir()
    allocation = Allocation("local-17", 1, ("local-1",), "local-1", 0.0)
    plan = replace(story.plan, cluster="local")
    life = BatchProcess(directory, plan, allocation, LocalAgents(str(directory.root), []))
    with pytest.raises(IsADirectoryError):
        life.run()
    for listener in life._listeners:
        listener.close()
    assert not directory.outcome_file.exists()


TAKES_SIGNALS = """
import pathlib, signal, subprocess, sys
from jurymast.cluster.allocation import Allocation
from jurymast.cluster import batch
from jurymast.cluster.batch import BatchProcess, LocalAgents
from jurymast.cluster.control import Ending
from jurymast.rundir import RunDirectory
directory = RunDirectory(sys.argv[1])
allocation = Allocation("local-17", 1, ("local-1",), "local-1", 0.0)
life = BatchProcess(directory, directory.own_plan(), allocation, LocalAgents(sys.argv[1], []))
life._listen()
life._supervisor = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
sys.exit(life._supervisor.wait())
"""
HEARS = """
import pathlib, signal, sys
def hear(number, _frame):
    pathlib.Path("heard").write_text(signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, hear)
pathlib.Path("ready").touch()
while True: signal.pause()
"""


@pytest.mark.parametrize("name", ["HUP", "QUIT", "ALRM", "USR1", "USR2", "TERM", "INT"])
def test_every_warning_that_a_job_can_ask_for_reaches_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """--signal=B:USR1@300 and the like, which would end the job."""
    directory = Story().write(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", TAKES_SIGNALS, str(directory.root), HEARS]
    with subprocess.Popen(command, start_new_session=True) as batch:
        try:
            wait_until("the supervisor", (tmp_path / "ready").exists)
            batch.send_signal(getattr(signal, f"SIG{name}"))
            assert batch.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(batch.pid, signal.SIGKILL)
    ends = name in ("TERM", "INT")
    assert (tmp_path / "heard").read_text() == ("SIGTERM" if ends else "SIGUSR2")


class KilledAgents(LocalAgents):
    def were_killed(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answers", "alone"),
    [(["running"], True), (["unknown", "unknown", "running"], True), (["unknown", "preempted"], False)],
)
def test_whether_slurm_has_ended_the_step_alone_is_asked_until_slurm_answers(
    answers: list[str], alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(answers)
    monkeypatch.setattr(batch, "LOOK_S", 0.0)
    monkeypatch.setattr(batch, "why_ending", lambda _: Ending(left.pop(0)))
    allocation = Allocation("17", 0, ("n1", "n2"), "n1", 0.0)
    over = threading.Event()
    assert batch.ended_alone(KilledAgents("run", []), allocation, over) is alone
    assert not left
    over.set()
    assert not batch.ended_alone(KilledAgents("run", []), allocation, over), "nobody asks any more"


# ---- srun before a requeue

FOREVER = "exec sleep 1000"


def begun_srun(place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, program: str) -> Agents:
    """Agents of this kind whose srun is a shell that runs `program`, and has begun."""
    srun = place / "srun"
    srun.write_text(f"#!/bin/sh\ntouch {place}/begun\n{program}\n")
    srun.chmod(0o755)
    if kind == "step":
        agents: Agents = StepAgents(place, {}, subprocess.Popen([str(srun)]), 2)
    else:
        monkeypatch.setenv("PATH", str(place), prepend=":")
        for name in ("survive", "unbound", "signals_tasks_alone"):
            monkeypatch.setattr(batch, name, list)
        agents = SrunAgents(str(place), 2)
        agents.start(1)
    wait_until("srun's beginning", (place / "begun").exists)
    return agents


@pytest.mark.parametrize("kind", ["run", "step"])
def test_before_a_requeue_srun_may_hear_that_agents_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Slurm would have to kill them otherwise, and the job would be pending seconds later."""
    monkeypatch.setattr("jurymast.cluster.batch.LEFT_LIMIT_S", 60.0)
    monkeypatch.setattr("jurymast.script.step.LEFT_LIMIT_S", 60.0)
    agents = begun_srun(tmp_path, monkeypatch, kind, f"sleep 0.2; touch {tmp_path}/ended")
    agents.give_up()
    assert (tmp_path / "ended").exists()
    assert not agents.alive()


@pytest.mark.parametrize("kind", ["run", "step"])
def test_a_requeue_does_not_wait_for_an_srun_that_waits_for_a_dead_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    agents = begun_srun(tmp_path, monkeypatch, kind, FOREVER)
    agents.give_up()
    assert not agents.alive()
