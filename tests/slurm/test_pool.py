"""Runs that share a pool of waiting nodes, on a real cluster: one that loses a node takes one that waits
there; of two that want the same one, one gets it; and one that does not answer holds nobody up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from support.saves import check_restores
from support.slurm_runs import SlurmRun, policy_file, power_loss, submit, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

TRAIN = ("--steps", "700", "--step-time", "0.04", "--save-every", "10 steps")


class Pool:
    """A pool of one node, and runs that share it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.root = cluster.shared / f"{folder.name}-pool"

    def place(self, name: str) -> Path:
        """Of this test alone: what other runs tell of nodes is not true of them any more."""
        return self.folder.with_name(f"{self.folder.name}-{name}")

    def submit(self, name: str = "a", nodes: int = 2) -> SlurmRun:
        folder = self.place(name)
        text = (
            "nodes_policy: {refill: on, hold: 5m}\nhealth: {straggler: off}\n"
            f"pool: {{directory: {self.root}, nodes: 1, idle: 30s}}"
        )
        policy = policy_file(self.cluster, folder, text)
        options = ("--nodes", str(nodes), "--spares", "0", "--policy", policy)
        return submit(self.cluster, folder, *options, arguments=TRAIN)

    def signs(self) -> list[str]:
        told = self.cluster.login(["ls", str(self.root)], check=False).stdout.split()
        return [name for name in told if name.endswith(".waiting")]

    def wait_member(self) -> str:
        """The job of a member that waits."""
        wait_until("a member that waits", lambda: len(self.signs()) == 1, limit_s=120.0)
        return self.signs()[0].partition(".")[0]

    def node_of(self, job: str) -> str:
        return self.cluster.job(int(job))["NodeList"]

    def queue(self) -> list[str]:
        told = self.cluster.login(["squeue", "--noheader", "--format=%j|%T"]).stdout.splitlines()
        return [line for line in told if "jurymast-" in line and "COMPLETING" not in line]


@pytest.fixture
def pool(cluster: Cluster, tmp_path: Path) -> Pool:
    return Pool(cluster, tmp_path)


def lose_one(run: SlurmRun) -> str:
    victim = next(node for node in run.wait_safe(30).placement if node != run.state().host)
    power_loss(run, victim)
    return victim


def recovered(run: SlurmRun) -> RunState:
    return run.wait("the recovery", lambda s: s.attempt >= 2 and s.incident is None, limit_s=240.0)


def brought(run: SlurmRun) -> list[str]:
    """The nodes that small jobs brought to the run."""
    return [one.node for one in run.events() if isinstance(one, ev.RefillStarted)]


def from_pool(run: SlurmRun) -> list[str]:
    """Of these, those that had waited in the pool."""
    return [one.node for one in run.events() if isinstance(one, ev.Noted) and "in a pool" in one.message]


def ends_well(run: SlurmRun, folder: Path, plainly: str) -> None:
    state = run.wait_end(300.0)
    assert state.exit_code == 0, run.story()
    assert "requeue" not in [one.action for one in state.incidents], run.story()
    assert run.cluster.job(run.job)["Restarts"] == "0"
    check_restores(run, least=20)
    assert weights(run.cluster, folder) == plainly


def test_a_run_takes_the_node_that_waits_and_the_pool_is_filled_again(
    pool: Pool, trained_plainly: Callable[..., str]
) -> None:
    run = pool.submit()
    member = pool.wait_member()
    node = pool.node_of(member)
    lose_one(run)
    state = recovered(run)
    assert node in state.placement, run.story()
    assert (brought(run), from_pool(run)) == ([node], [node])
    assert [job for job in state.refills.values() if job.job == member], run.story()
    assert f"jurymast-refill-{state.run}-1|RUNNING" in pool.queue()
    assert pool.wait_member() != member
    ends_well(run, pool.place("a"), trained_plainly(*TRAIN, nodes=2))
    wait_until("the end of all small jobs", lambda: pool.queue() == [], limit_s=180.0)
    assert pool.signs() == []


@pytest.mark.long
def test_of_two_runs_that_lose_a_node_at_once_one_gets_the_node_that_waits(
    pool: Pool, trained_plainly: Callable[..., str]
) -> None:
    """The other gets one by a small job of its own."""
    runs = {name: pool.submit(name) for name in ("a", "b")}
    node = pool.node_of(pool.wait_member())
    victims = {name: run.wait_safe(30).placement[1] for name, run in runs.items()}
    for name, run in runs.items():
        power_loss(run, victims[name])
    for run in runs.values():
        recovered(run)
    taken = {name: from_pool(run) for name, run in runs.items()}
    assert sorted(taken.values()) == [[], [node]], [run.story() for run in runs.values()]
    assert [len(brought(run)) for run in runs.values()] == [1, 1]
    plainly = trained_plainly(*TRAIN, nodes=2)
    for name, run in runs.items():
        ends_well(run, pool.place(name), plainly)
    wait_until("the end of all small jobs", lambda: pool.queue() == [], limit_s=180.0)


def test_a_run_asks_slurm_for_a_node_if_the_one_that_waits_does_not_answer(
    pool: Pool, trained_plainly: Callable[..., str]
) -> None:
    run = pool.submit()
    node = pool.node_of(pool.wait_member())
    pool.cluster.fault("freeze", node)
    lose_one(run)
    state = recovered(run)
    assert (node in state.placement, from_pool(run)) == (False, []), run.story()
    refused = [one.why for one in run.events() if isinstance(one, ev.RefillRefused)]
    assert len(refused) == 1, run.story()
    assert node in refused[0]
    pool.cluster.fault("thaw", node)
    ends_well(run, pool.place("a"), trained_plainly(*TRAIN, nodes=2))
