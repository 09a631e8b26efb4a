"""A slow node on a real cluster: its ranks' own step times give it away, and a spare takes its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import result
from support.slurm_runs import jurymast, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

SLOW_S = 0.25


def test_a_slow_node_is_swapped_for_a_spare(cluster: Cluster, tmp_path: Path) -> None:
    names = sorted(cluster.nodes)[:4]
    victim = names[2]
    train = ("--steps", "400", "--save-every", "50 steps", "--slow", f"40:{victim}:{SLOW_S}")
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", f"--nodelist={','.join(names)}", arguments=train
    )  # fmt: skip
    state = run.wait("the run on its nodes", lambda s: s.attempt == 1 and s.step > 0)
    assert victim in state.placement, run.story()
    state = run.wait_end(200)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.action, incident.node) == ("straggler", "swap", victim), run.story()
    assert victim not in state.placement
    assert result(cluster.shared / f"{tmp_path.name}.json")["steps"] == 400
    code, told, _ = jurymast(cluster, "report", str(run.directory.root))
    assert code == 0
    assert "straggler" in told
    code, told, _ = jurymast(cluster, "events", str(run.directory.root))
    assert code == 0
    assert f"node {victim} is" in told
    assert "times as slow as the others" in told
