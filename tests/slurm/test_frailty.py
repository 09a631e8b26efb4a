"""A node that failed one run is a spare of the next, on a real cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.slurm_runs import jurymast, power_loss, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# Else a node that failed a run is kept out of others for a day.
POLICY = {"nodes_policy": {"expire": "1s"}, "health": {"preflight": "off"}}


@pytest.mark.long
def test_a_node_that_failed_a_run_is_a_spare_in_the_next(cluster: Cluster, tmp_path: Path) -> None:
    policy = cluster.shared / f"{tmp_path.name}.yaml"
    policy.write_text(json.dumps(POLICY))
    policy.chmod(0o644)
    names = sorted(cluster.nodes)[:4]
    options = ("--nodes", "3", "--spares", "1", "--policy", str(policy), f"--nodelist={','.join(names)}")
    first = submit(cluster, tmp_path, *options)
    victim = first.wait_step(30).placement[1]
    power_loss(first, victim)
    state = first.wait_end()
    assert (state.exit_code, len(state.incidents)) == (0, 1), first.story()
    cluster.repair(victim)
    cluster.wait_idle(names)

    second = submit(cluster, tmp_path, *options, arguments=("--steps", "60"))
    state = second.wait_end()
    assert (state.exit_code, state.attempt, state.incidents) == (0, 1, []), second.story()
    assert set(state.placement) == set(names) - {victim}, second.story()
    code, told, error = jurymast(cluster, "events", str(second.directory.root))
    assert code == 0, error
    assert f"spares: {victim} fails " in told, told
    assert "times as often as others: failed once in " in told, told
    code, told, error = jurymast(cluster, "nodes", "--json", "--runs", str(second.directory.root.parent))
    assert code == 0, error
    (row,) = [row for row in json.loads(told) if row["node"] == victim]
    assert row["after_repair"]
    assert ", used again since 20" in row["why_rate"]
    assert row["rate_times"] > 25.0
