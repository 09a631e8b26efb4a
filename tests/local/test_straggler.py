"""A node whose ranks are slow, on the local cluster: found in their own step times, and swapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core import events as ev
from support.runs import local_run, result, wait_gone

pytestmark = pytest.mark.torch

STEPS = 800
# Its data takes a quarter of a second from step 40 on, as long as that node does it.
SLOW_FROM, SLOW_S = 40, 0.25
TRAIN = ("--steps", str(STEPS), "--save-every", "50 steps")


def test_a_slow_node_is_swapped_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    out = tmp_path / "out.json"
    slow = ("--slow", f"{SLOW_FROM}:local-2:{SLOW_S}")
    with local_run(tmp_path / "runs", "--nodes", "3", "--spares", "1", script="train_tiny.py",
                   arguments=(*TRAIN, *slow, "--out", str(out))) as run:  # fmt: skip
        placed = run.wait_step(1).placement
        assert "local-2" in placed
        state = run.wait_end(240)
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.action, incident.node) == ("straggler", "swap", "local-2"), run.story()
    assert incident.rank == placed.index("local-2")
    assert "a swap costs about" in incident.reason
    assert "local-2" not in state.placement
    told = [event for event in run.events() if isinstance(event, ev.Straggling)]
    assert {event.node for event in told} == {"local-2"}
    # Its first window may have begun before it was slow.
    assert told[0].own_s > 0.5 * SLOW_S > told[0].typical_s
    assert told[0].lost_s > 0.5 * SLOW_S
    assert incident.step_restored is not None
    assert incident.step_restored >= incident.step_lost_from - 20, "it was saved first"
    assert result(out)["sha256"] == trained_plainly(*TRAIN, nodes=3)
