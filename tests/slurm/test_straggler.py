"""A slow node on a real cluster: its ranks' own step times give it away, and a spare takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.runs import result
from support.slurm_runs import jurymast, submit
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

STEPS = 400
# Its data takes a quarter of a second from step 40 on, as long as that node does it.
SLOW_FROM, SLOW_S = 40, 0.25
TRAIN = ("--steps", str(STEPS), "--save-every", "50 steps")


def test_a_slow_node_is_swapped_and_the_run_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    names = sorted(cluster.nodes)[:4]
    victim = names[2]
    slow = ("--slow", f"{SLOW_FROM}:{victim}:{SLOW_S}")
    run = submit(
        cluster, tmp_path, "--nodes", "3", "--spares", "1", f"--nodelist={','.join(names)}",
        arguments=(*TRAIN, *slow),
    )  # fmt: skip
    placed = run.wait("the run on its nodes", lambda s: s.attempt == 1 and s.step > 0).placement
    assert victim in placed, run.story()
    state = run.wait_end(200)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.action, incident.node) == ("straggler", "swap", victim), run.story()
    assert incident.rank == placed.index(victim)
    assert "swap costs about" in incident.reason
    assert victim not in state.placement
    told = [event for event in run.events() if isinstance(event, ev.Straggling)]
    assert {event.node for event in told} == {victim}
    # Any part of its first window may have passed before it was slow.
    assert told[0].own_s > max(0.2 * SLOW_S, 2 * told[0].typical_s)
    assert told[0].lost_s > 0.2 * SLOW_S
    assert incident.step_restored is not None
    assert incident.step_restored >= incident.step_lost_from - 20, "it was saved first"
    assert result(cluster.shared / f"{tmp_path.name}.json")["sha256"] == trained_plainly(*TRAIN, nodes=3)
    code, page, _ = jurymast(cluster, "report", str(run.directory.root))
    assert code == 0
    assert "straggler" in page
    code, page, _ = jurymast(cluster, "events", str(run.directory.root))
    assert code == 0
    assert f"node {victim} is" in page
    assert "times as slow as the others" in page
