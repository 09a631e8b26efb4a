"""The memory of a node runs out: its processes are in a cgroup with a limit, in which the kernel kills."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from support.cgroups import kills, leave_bytes, moved_to, new_cgroup
from support.runs import result
from support.slurm_runs import TRAIN, SlurmRun, submit
from testcluster import Cluster
from testcluster.settings import SLURM_SYSTEM, SLURM_VARIABLE

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# What processes load when they are first needed fits into it as well.
SPARE_BYTES = 700 << 20


@pytest.fixture
def small(cluster: Cluster) -> Iterator[Path]:
    """The memory cgroup of each process on the second node, without a limit yet."""
    with new_cgroup() as place, moved_to(place, cluster.machine("n2").pids()):
        yield place


def train(cluster: Cluster, folder: Path) -> tuple[SlurmRun, Path]:
    """A run on n1 and n2 that goes on until it is let end, and the file whose existence makes its second rank
    leak."""
    now, enough = cluster.shared / f"{folder.name}.1", enough_of(cluster, folder)
    for file in (now, enough):
        file.unlink(missing_ok=True)  # an earlier session's
    options = ("--steps", "100000", "--until", str(enough), "--buffer-mib", "64")
    run = submit(cluster, folder, "--nodes", "2", "--spares", "0", "--nodelist", "n1,n2",
                 arguments=(*TRAIN, *options, "--leak-once", f"{now.with_suffix('')}:1:rank"))  # fmt: skip
    assert run.wait_safe(20).placement == ("n1", "n2")
    return run, now


def enough_of(cluster: Cluster, folder: Path) -> Path:
    return cluster.shared / f"{folder.name}.end"


def recovered(state: RunState) -> bool:
    return state.attempt == 2 and state.incident is None and state.step > 0


def ended_as_undisturbed(run: SlurmRun, folder: Path, plain: Callable[..., str]) -> None:
    enough_of(run.cluster, folder).touch()
    assert run.wait_end().exit_code == 0, run.story()
    assert run.state().excluded == {}
    found = result(run.cluster.shared / f"{folder.name}.json")
    assert found["sha256"] == plain("--steps", str(found["steps"]), "--buffer-mib", "64"), run.story()


def test_a_rank_that_takes_all_memory_dies_and_its_node_stays(
    cluster: Cluster, small: Path, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    run, now = train(cluster, tmp_path)
    leave_bytes(small, SPARE_BYTES)
    now.touch()
    state = run.wait("the recovery", recovered)
    incident = state.incidents[0]
    told = incident.cause, incident.charged, incident.action
    assert told == ("out_of_memory", "application", "restart"), run.story()
    assert kills(small) == 1, "whoever else was killed was killed for nothing"
    assert not [event for event in run.events() if isinstance(event, ev.NodeLost)]
    assert state.placement == ("n1", "n2")
    ended_as_undisturbed(run, tmp_path, trained_plainly)


def test_a_node_whose_agent_the_kernel_kills_is_neither_lost_nor_blamed(
    cluster: Cluster, small: Path, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    run, now = train(cluster, tmp_path)
    agent = run.agent_pid("n2")
    for process in cluster.processes("n2"):  # as if the ranks had undone it
        score = 1000 if process.node_pid == agent else 0
        with suppress(OSError):  # it has ended by now
            Path(f"/proc/{process.pid}/oom_score_adj").write_text(str(score))
    leave_bytes(small, 2 * SPARE_BYTES)
    now.touch()
    state = run.wait("the recovery", recovered)
    incident = state.incidents[0]
    told = incident.cause, incident.charged, incident.node
    assert told == ("out_of_memory", "application", "n2"), run.story()
    assert run.agent_pid("n2") != agent
    assert state.placement == ("n1", "n2"), run.story()
    ended_as_undisturbed(run, tmp_path, trained_plainly)


@pytest.mark.skipif(
    os.environ.get(SLURM_VARIABLE, SLURM_SYSTEM) == SLURM_SYSTEM, reason="the system's Slurm may be too old"
)
def test_slurm_kills_no_agent_for_what_the_ranks_of_another_node_do(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's part is left out: without its cgroups it kills nobody here."""
    options = ("--nodes", "2", "--spares", "0", "--oom-kill-step=1")
    run = submit(cluster, tmp_path, *options, arguments=TRAIN)
    host = run.wait_safe(20).placement[0]
    assert [one for one in cluster.processes(host) if " --oom-kill-step=0 " in one.command], run.story()
    assert run.wait_end().exit_code == 0, run.story()
