"""Tasks that srun would start: what their text shows, and srun's rules until they are a training."""

from __future__ import annotations

import os
import subprocess
import sys
from random import Random

import pytest
from msgspec import structs

from jurymast.cluster import control
from jurymast.cluster.sbatch import parse
from jurymast.core.judges.attribution import NEAR_S
from jurymast.core.run import tasks as task_ends
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Finish, Instruction, Launch, StopWorkers
from jurymast.core.state.run import Phase, Role
from jurymast.script import evidence, recognise, srun
from jurymast.script.evidence import shows
from support.stories import Story
from support.successor import Successor

SHARD = (
    "import os, sys\nimport numpy as np\nfrom lib.part import work\nwork(int(os.environ['SLURM_PROCID']))\n"
)
PARTS = {"lib/__init__.py": " ", "lib/part.py": "from . import more\n", "lib/more.py": "import json\n"}


@pytest.mark.parametrize(
    ("files", "training", "whole"),
    [
        (PARTS, "", True),
        ({**PARTS, "lib/more.py": "import torch.distributed as dist\n"}, "torch.distributed", True),
        ({**PARTS, "lib/more.py": "from lightning import Trainer\n"}, "lightning", True),
        ({**PARTS, "lib/more.py": "from torch import distributed\n"}, "from torch import distributed", True),
        ({**PARTS, "lib/more.py": "import jax\njax.distributed.initialize()\n"}, "jax.distributed", True),
        ({**PARTS, "lib/more.py": "import torch\nimport transformers\n"}, "", True),
        ({**PARTS, "lib/more.py": "from transformers import Seq2SeqTrainer\n"}, "Seq2SeqTrainer", True),
        ({**PARTS, "lib/more.py": "from transformers import TrainingArguments\n"}, "TrainingArguments", True),
        ({**PARTS, "lib/more.py": "import mylab_trainer\n"}, "", False),
        ({**PARTS, "lib/more.py": "import importlib\n"}, "", False),
        ({**PARTS, "lib/more.py": "this is no Python"}, "", False),
        ({"lib/__init__.py": " "}, "", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("words", [["python", "-u", "shard.py"], ["bash", "-c", "python -m shard --all"]])
def test_what_the_text_of_tasks_shows(
    words: list[str], files: dict[str, str], training: str, whole: bool
) -> None:
    texts = {**files, "shard.py": SHARD}
    found = shows(words, lambda name: texts.get(name.removeprefix("./"), ""), {})
    assert (found.training, found.whole) == (training, whole)
    assert found.independent is (whole and not training)
    assert found.foreign is training.startswith("jax")


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        ("--mpi=pmix", "import solver\n", "`--mpi=pmix` asks for an MPI, and nothing in it shows a training"),
        ("--mpi=none", "import solver\n", ""),
        ("", "import solver\n", ""),
        ("--mpi=pmix", "import solver\nimport torch.distributed\n", ""),
        ("--mpi=pmix", "import json\n", ""),  # nothing hides anything: independent
        ("--mpi=pmi2", "import torch.distributed\nfrom lib.part import work\n", "mpi4py in it shows"),
        ("", "from lib.part import work\n", ""),  # each is alone under srun, too
    ],
)
def test_tasks_of_an_mpi_are_srun_s(
    options: str, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only srun can tell them of each other. Ours starts one task a node, and one on each spare one."""
    monkeypatch.setattr(evidence, "mpi_default", lambda: "none")
    texts = {**PARTS, "lib/more.py": "from mpi4py import MPI\n", "job.py": text}
    step = srun.parse([*options.split(), "python", "job.py"])
    assert step is not None
    _, why = evidence.of_step(step, lambda name: texts.get(name.removeprefix("./"), ""), {})
    assert why.startswith(told)
    assert bool(why) is bool(told)


def test_the_site_may_have_srun_start_all_tasks_for_an_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "mpi_default", lambda: "pmix")
    step = srun.parse(["python", "job.py"])
    assert step is not None
    texts = {"job.py": "import petsc4py\nimport solver\n"}
    _, why = evidence.of_step(step, lambda name: texts.get(name, ""), {})
    assert why == "petsc4py in it shows processes of an MPI (`--mpi=pmix`)"
    assert evidence.of_step(step, lambda name: "import solver\n", {})[1] == "", "most trainings have none"
    assert evidence.of_step(step, lambda name: texts.get(name, ""), {"SLURM_MPI_TYPE": "none"})[1] == ""


def test_a_script_that_is_not_found_shows_nothing() -> None:
    assert not shows(["python", "shard.py"], lambda name: "", {}).independent


@pytest.mark.parametrize("line", ["--train=no", " --train no", " train: no"])
def test_how_a_script_says_whether_its_tasks_train(line: str) -> None:
    script = parse(f"#!/bin/bash\n#JURYMAST {line.strip()}\n", "job", {"--train": True})
    assert script.own in (("--train=no",), ("--train", "no"))


GROUP = """
import datetime, os, sys
import torch.distributed as dist
from jurymast.worker import hooks
class Link:
    def emit(self, message): print(type(message).__name__)
hooks.watch_groups(Link())
how = {"store": dist.HashStore(), "rank": 0, "world_size": int(sys.argv[1])}
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=0.2), **how)
except Exception:
    print("nobody came")
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("size", "tasks", "told"),
    [
        ("1", "", ""),
        ("2", "", "GroupMade\nnobody came\n"),
        ("2", "4", "nobody came\n"),
        ("4", "4", "GroupMade\nnobody came\n"),
        ("16", "4", "GroupMade\nnobody came\n"),  # each task starts several ranks
    ],
)
def test_a_group_of_several_is_told_before_it_waits(size: str, tasks: str, told: str) -> None:
    """A group of one is no sign of a training: each task for itself may make one. Neither is one of fewer
    than all tasks: each node may have a training of its own."""
    command = [sys.executable, "-c", GROUP, size]
    variables = {**os.environ, "JURYMAST_WORLD_SIZE": tasks}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=variables)
    assert done.stdout == told


TIME_OUTS = """
import datetime
import torch.distributed as dist
from torch.distributed import device_mesh
from jurymast.worker import hooks
class Link:
    def emit(self, message): print(message.seconds)
hooks.watch_groups(Link())
hours, alone = lambda n: datetime.timedelta(hours=n), {"rank": 0, "world_size": 1}
dist.init_process_group("gloo", None, hours(2), store=dist.HashStore(), **alone)
dist.new_group([0], timeout=hours(3))
dist.new_group([0], hours(4))
device_mesh.new_group([0], timeout=hours(5))
dist.new_group([0], timeout=datetime.timedelta(minutes=30))
assert dist.new_group([0]) is not None
dist.distributed_c10d._set_pg_timeout(hours(6), dist.group.WORLD)
"""


@pytest.mark.torch
def test_longer_time_outs_than_torchs_own_are_told_however_they_are_given() -> None:
    command = [sys.executable, "-c", TIME_OUTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [f"{3600.0 * hours}" for hours in (2, 3, 4, 5, 6)]


def tasks(active: int = 2, spares: int = 1, ranks_per_node: int = 1, *, kill: bool = False) -> Story:
    """Nodes with tasks, of which nobody knows whether they are one training. `kill`: one that fails ends the
    others."""
    story = Story(active=active, spares=spares, ranks_per_node=ranks_per_node).submitted()
    story.feed(structs.replace(story.events[0], guessed=True, kill_on_bad_exit=kill))
    return story.allocated().told().ranks_up()


def test_one_fails_and_the_others_finish() -> None:
    story = tasks()
    failed, other = story.state.placement
    assert story.failed(0, exit_code=3) == []
    story.t += 3600.0
    stopped = ev.WorkersStopped(t=story.t, node=failed, attempt=1, store_port=29000)
    assert story.feed(stopped) == [], "its tasks have ended, the others run on"
    assert story.state.phase is Phase.RUNNING
    story.feed(ev.NodeFinished(t=story.t, node=other, attempt=1))
    end = story.last(Finish)
    assert (end.state, end.exit_code, story.state.attempt) == ("failed", 3, 1)
    assert "rank 0" in end.reason
    assert "`#JURYMAST train: yes`" in end.reason
    assert story.incident.action == "stop"


def test_one_fails_and_srun_is_told_to_end_the_others() -> None:
    story = tasks(ranks_per_node=2, kill=True)
    told_done(story, 0)
    story.failed(1, exit_code=3)
    end = story.last(Finish)
    assert (end.state, end.exit_code, story.state.attempt) == ("failed", 143, 1)
    assert "rank 1" in end.reason
    assert "the others ended as srun is told (--kill-on-bad-exit)" in story.incident.why


def test_the_last_one_fails_and_there_is_nobody_to_end() -> None:
    story = tasks(kill=True)
    told_done(story, 0)
    story.failed(1, exit_code=3)
    assert story.last(Finish).exit_code == 3
    assert "the others finished" in story.incident.why


def test_a_training_begins_anew_although_srun_is_told_to_end_it() -> None:
    story = tasks(kill=True)
    story.feed(ev.GroupMade(t=story.t, attempt=1, node=story.state.placement[0], rank=0))
    story.failed(1, exit_code=3)
    story.stopped()
    assert (story.state.attempt, story.incident.action) == (2, "restart")


@pytest.mark.parametrize(
    ("options", "variables", "site", "kills"),
    [
        ("", {}, "0", False),
        ("-K", {}, "0", True),
        ("--kill-on-bad-exit", {}, "0", True),
        ("--kill-on-bad-exit=1", {"SLURM_KILL_BAD_EXIT": "0"}, "0", True),
        ("-K0", {"SLURM_KILL_BAD_EXIT": "1"}, "1", False),
        ("", {"SLURM_KILL_BAD_EXIT": "1"}, "0", True),
        ("", {"SLURM_KILL_BAD_EXIT": "0"}, "1", False),
        ("", {}, "1", True),
    ],
)
@pytest.mark.parametrize(("text", "opaque"), [("import solver", True), ("import torch.distributed", False)])
def test_who_tells_srun_to_end_the_others(
    options: str, variables: dict[str, str], site: str, kills: bool, text: str, opaque: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of tasks whose text shows a training, one that fails early is better begun anew with all others."""
    monkeypatch.setattr(control, "kill_on_bad_exit", lambda: site)
    monkeypatch.setattr(evidence, "mpi_default", lambda: "none")
    monkeypatch.setattr(recognise, "read_shell_script", lambda name: text if name == "./job.py" else "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    step = srun.parse([*options.split(), "./python", "./job.py"])
    assert step is not None
    found: list[bool] = []

    class Steps:
        train, active = "", 2

        def run_tasks(self, *_: object, guessed: bool, kill_on_bad_exit: bool) -> int:
            found.append(kill_on_bad_exit)
            return int(guessed)

    assert srun.as_ranks(Steps(), step, 1) == 1  # type: ignore[arg-type]
    assert found == [kills and opaque]


def test_tasks_that_make_a_process_group_are_a_training() -> None:
    """Also one that failed before the others began to wait for it."""
    story = tasks()
    failed, other = story.state.placement
    story.failed(0, exit_code=3)
    story.feed(ev.WorkersStopped(t=story.t, node=failed, attempt=1, store_port=29000))
    story.feed(ev.GroupMade(t=story.t, attempt=1, node=other, rank=1))
    assert set(story.last(StopWorkers).nodes) == {failed, other}
    story.stopped()
    assert (story.state.attempt, story.incident.action, story.incident.rank) == (2, "restart", 0)
    assert story.feed(ev.NodeFinished(t=story.t, node=other, attempt=1)) == []


def test_a_lost_node_takes_its_tasks_along() -> None:
    """Where srun would leave it at that, which is said."""
    story = tasks()
    assert "--no-kill" not in story.last(Launch).reason
    story.lost(story.state.placement[1])
    story.stopped()
    assert story.state.attempt == 2
    told = "; all others begin anew (with srun --no-kill, those of other nodes go on)"
    assert story.last(Launch).reason.endswith(told)


def told_done(story: Story, *ranks: int) -> None:
    story.feed(ev.RanksEnded(t=story.t, attempt=story.state.attempt, ranks=ranks))


def test_tasks_that_have_ended_are_not_started_again_when_a_node_is_lost() -> None:
    """Neither one that is done, nor one that failed, also long ago on the node that is lost."""
    story = tasks(active=3, ranks_per_node=2)
    other, lost, _ = story.state.placement
    told_done(story, 0)
    story.failed(1, exit_code=3)
    story.failed(2, exit_code=4)
    story.t += 3600.0
    story.failed(3, exit_code=5)
    story.lost(lost)
    story.stopped()
    assert story.last(Launch).ended == (0, 1, 2), "what failed just before the loss may have failed for that"
    assert story.incident.action == "swap"
    story.told().ranks_up()
    story.finished()
    end = story.last(Finish)
    assert (end.state, end.exit_code) == ("failed", 4)
    assert "rank 1" in end.reason


def test_a_node_whose_tasks_have_all_ended_is_not_missed() -> None:
    story = tasks(active=2, ranks_per_node=2)
    first, second = story.state.placement
    told_done(story, 0, 1)
    assert story.lost(first) == []
    assert story.state.phase is Phase.RUNNING
    story.feed(ev.NodeFinished(t=story.t, node=second, attempt=1))
    assert story.last(Finish).state == "succeeded"


def broken(story: Story, node: str, ahead_s: float = 0.0) -> list[Instruction]:
    """By its node's clock, which may be ahead."""
    told = ev.HealthFound(
        t=story.t, node=node, probe="nvidia", code="xid-79", verdict="bad", kind="hardware", message="gone",
        device="gpu0", at=story.t + ahead_s,
    )  # fmt: skip
    return story.feed(told)


def test_a_broken_node_whose_tasks_have_all_ended_stops_nobody() -> None:
    story = tasks(active=2, ranks_per_node=2)
    first, second = story.state.placement
    told_done(story, 0, 1)
    assert not any(isinstance(one, StopWorkers) for one in broken(story, first))
    assert (story.state.phase, story.state.nodes[first].role) == (Phase.RUNNING, Role.FAILED)
    story.feed(ev.NodeFinished(t=story.t, node=second, attempt=1))
    assert story.last(Finish).state == "succeeded"


def test_a_broken_spare_stops_no_task() -> None:
    story = tasks()
    (spare,) = story.state.spare_nodes()
    assert not any(isinstance(one, StopWorkers) for one in broken(story, spare.name))
    assert (story.state.phase, story.state.nodes[spare.name].role) == (Phase.RUNNING, Role.FAILED)


@pytest.mark.parametrize(("spares", "left"), [(1, True), (0, False)])
def test_a_broken_node_leaves_as_the_tasks_stop_although_its_own_task_failed_first(
    spares: int, left: bool
) -> None:
    """And another one as they stop, so that the tasks explain the incident."""
    story = tasks(active=3, spares=spares)
    node = story.state.placement[1]
    story.failed(1, exit_code=3)
    story.t += 8.0
    broken(story, node, ahead_s=2.0)
    story.failed(2, exit_code=4)
    story.stopped()
    assert (story.incident.cause, story.incident.node) == ("worker_exception", node)
    assert (node not in story.state.placement) is left
    assert 1 not in story.last(Launch).ended or not left, "it may have failed for that"


def test_a_node_whose_tasks_have_ended_is_not_awaited_again_once_it_is_dismissed() -> None:
    """It was away for a moment, and counts as lost."""
    story = tasks(ranks_per_node=2)
    first, second = story.state.placement
    told_done(story, 0, 1)
    story.feed(ev.NodeFinished(t=story.t, node=first, attempt=1))
    story.lost(first)
    known = story.state.nodes[first]
    story.feed(
        ev.NodeJoined(
            t=story.t, node=first, address=known.address, incarnation=known.incarnation, pid=1, boot_id="b",
            gpus=0,
        )
    )  # fmt: skip
    story.feed(ev.WorkersStopped(t=story.t, node=first, attempt=1, store_port=29000))
    story.feed(ev.NodeFinished(t=story.t, node=second, attempt=1))
    assert story.last(Finish).state == "succeeded"


def test_ranks_of_a_training_all_start_again() -> None:
    story = tasks()
    told_done(story, 0)
    story.feed(ev.GroupMade(t=story.t, attempt=1, node=story.state.placement[1], rank=1))
    story.lost(story.state.placement[1])
    story.stopped()
    assert story.last(Launch).ended == ()


def ended_so(attempt: int, codes: dict[int, int]) -> tuple[msg.Finished | msg.Failed, ...]:
    """What an agent says of tasks that have ended with these exit codes, by rank."""
    return tuple(
        msg.Failed(attempt=attempt, rank=rank, exit_code=code, error="ValueError", message="bad")
        if code
        else msg.Finished(attempt=attempt, ranks=(rank,))
        for rank, code in codes.items()
    )


def test_a_successor_hears_from_agents_how_tasks_ended_that_the_journal_lacks() -> None:
    story = tasks(spares=0, ranks_per_node=2)
    one, other = story.state.placement
    story.failed(2, exit_code=3)
    after = Successor(story)
    after.joins(one, ranks="finished", attempt=1, ended=ended_so(1, {0: 0, 1: 0}))
    after.joins(other, ranks="waiting", attempt=1, ended=ended_so(1, {2: 3, 3: 7}))
    assert (story.state.phase, story.state.exit_code) == (Phase.FAILED, 7)
    assert "rank 2" in story.state.end_reason
    assert len(story.state.findings.failures) == 2, "one was known"


def test_tasks_that_the_last_supervisor_stopped_have_not_ended_with_those_that_failed_beside_them() -> None:
    """It died before its journal had the restart, and not all agents had been told to stop."""
    story = tasks(spares=0, ranks_per_node=2)
    one, other = story.state.placement
    story.failed(2, exit_code=3)
    after = Successor(story)
    after.joins(one, ranks="finished", attempt=1, ended=ended_so(1, {0: 0, 1: 0}))
    after.joins(other, ranks="waiting", attempt=1, ended=ended_so(1, {2: 3}))
    assert story.state.phase is Phase.STOPPING
    after.hears(one, msg.Stopped(attempt=1, store_port=29000))
    assert (story.state.attempt, story.state.phase) == (2, Phase.LAUNCHING)
    assert task_ends.ended(story.state) == (0, 1, 2)


def test_a_successor_hears_from_agents_that_tasks_have_made_a_group() -> None:
    """Its journal lacks that. One that had failed before counts now."""
    story = tasks(spares=0)
    one, other = story.state.placement
    after = Successor(story)
    after.joins(one, ranks="running", attempt=1, pids=(1,), group_made=True)
    assert (story.state.alone, story.state.phase) == (False, Phase.RUNNING)
    story = tasks(spares=0)
    after = Successor(story)
    after.joins(other, ranks="running", attempt=1, pids=(1,), group_made=True, ended=ended_so(1, {1: 3}))
    assert story.state.phase is Phase.STOPPING


def test_how_tasks_ended_before_a_launch_that_is_recorded_is_known_from_that() -> None:
    """Some of that may have begun anew, as what failed on a node that was bad."""
    story = tasks(ranks_per_node=2)
    story.lost(story.state.placement[1])
    story.stopped()
    story.told().ranks_up()
    one, other = story.state.placement
    after = Successor(story)
    after.joins(one, ranks="running", attempt=2, pids=(1, 2), ended=ended_so(1, {0: 3}) + ended_so(2, {1: 0}))
    assert task_ends.ended(story.state) == (1,)
    after.joins(
        other, ranks="running", attempt=3, pids=(1, 2), ended=ended_so(2, {2: 0}) + ended_so(3, {3: 4})
    )
    assert task_ends.ended(story.state) == (1, 2, 3), "the journal lacks the newest attempt"


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_no_task_is_done_twice_and_none_is_left_out(seed: int) -> None:
    """Nodes are lost and tasks end, in any order. A task runs until it has ended in one attempt."""
    chance = Random(seed)
    each = chance.randint(1, 3)
    story = tasks(active=3, spares=4, ranks_per_node=each)
    codes: dict[int, int] = {}  # of the tasks that have ended, as told
    reported: set[str] = set()
    losses = 0
    while not story.state.ended:
        state = story.state
        placed = [name for name in state.placement if state.nodes[name].role is Role.ACTIVE]
        live = [rank for rank in range(3 * each) if rank not in codes and state.node_of(rank) in placed]
        story.t += chance.uniform(0.1, 400.0)
        if chance.random() < 0.2 and losses < 4:
            losses += 1
            name = chance.choice(placed)
            recent = {
                f.rank
                for f in state.findings.failures.values()
                if f.node == name and f.t >= story.t + 1.6 - NEAR_S
            }
            story.lost(name)
            if story.state.phase is Phase.STOPPING:
                codes = {rank: code for rank, code in codes.items() if rank not in recent}
                story.stopped()
                story.backed_off()
                assert set(story.last(Launch).ended) == set(codes), "others run again, or never"
                story.told().ranks_up()
                reported.clear()
        elif live:
            rank = chance.choice(live)
            codes[rank] = chance.choice((0, 0, 3))
            if codes[rank]:
                story.failed(rank, exit_code=3)
            else:
                told_done(story, rank)
        for place, name in enumerate(story.state.placement):
            over = {*range(place * each, (place + 1) * each)} <= {*codes}
            if over and name not in reported and story.state.nodes[name].role is Role.ACTIVE:
                reported.add(name)
                story.feed(ev.NodeFinished(t=story.t, node=name, attempt=story.state.attempt))
    assert set(codes) == {*range(3 * each)}
    assert story.last(Finish).exit_code == (3 if any(codes.values()) else 0)
