"""No machine of a cluster has an IPv4 address: a rank dies, a node loses power, and not a bit is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.saves import check_restores
from support.slurm_runs import TRAIN, kill_rank, power_loss, running_cluster, submit, weights
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One of its own, without IPv4."""
    with running_cluster(place, "ipv6", nodes=4, ipv6=True) as running:
        yield running


def test_a_rank_and_a_node_are_lost_without_ipv4(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    assert "inet " not in cluster.exec("n1", ["ip", "address"]).stdout
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "1", arguments=TRAIN)
    kill_rank(run, run.wait_safe(20).placement[1])
    state = run.wait("the restart", lambda s: len(s.incidents) == 1 and s.incident is None)
    state = run.wait_safe((state.incidents[-1].step_restored or 0) + 20)
    power_loss(run, state.placement[2])
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    assert [(i.cause, i.action) for i in state.incidents] == [
        ("worker_killed", "restart"),
        ("node_lost", "swap"),
    ], run.story()
    check_restores(run, least=40)
    assert weights(cluster, tmp_path) == trained_plainly(*TRAIN, nodes=3)


def test_the_batch_host_dies_without_ipv4(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    run = submit(cluster, tmp_path, "--nodes", "3", "--spares", "1", arguments=TRAIN)
    power_loss(run, run.wait_safe(30).host)
    state = run.wait_end(150)
    assert (state.phase.value, state.epoch >= 2) == ("succeeded", True), run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*TRAIN, nodes=3)
