"""Tests of nodes before their first attempt, on a real cluster: a slow link is found, and stays out."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.slurm_runs import jurymast, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

DELAY_S = 0.2


@pytest.mark.long
def test_a_node_with_a_slow_link_becomes_the_spare(cluster: Cluster, tmp_path: Path) -> None:
    policy = cluster.shared / f"{tmp_path.name}.yaml"
    policy.write_text("health:\n  preflight: 60s\n")
    names = sorted(cluster.nodes)[:4]
    victim = names[1]
    cluster.fault("slow", victim, delay_ms=1000 * DELAY_S)
    try:
        run = submit(
            cluster, tmp_path, "--nodes", "3", "--spares", "1", "--policy", str(policy),
            f"--nodelist={','.join(names)}", arguments=("--steps", "60"),
        )  # fmt: skip
        state = run.wait_end(150)
    finally:
        cluster.fault("slow", victim, off=True)
    tested = {event.node: event for event in run.events() if isinstance(event, ev.NodeTested)}
    print(run.story())
    assert (state.exit_code, state.attempt, state.incidents) == (0, 1, []), run.story()
    assert set(state.placement) == set(names) - {victim}, run.story()
    assert set(tested) == set(names)
    assert tested[victim].verdict == "suspect", run.story()
    assert tested[victim].slowness > 10
    assert [node for node, event in tested.items() if event.verdict == "suspect"] == [victim], run.story()
    assert all(event.seconds < 60 for event in tested.values())
    code, told, _ = jurymast(cluster, "status", str(run.directory.root))
    assert code == 0
    assert "the median of 4 nodes is" in told
