"""All nodes of a job lose power in the middle of a shared write; then the training is submitted again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.checkpoint.owner import owner
from jurymast.core.state import events as ev
from support.runs import result
from support.slurm_runs import TRAIN, submit
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def test_the_next_run_goes_on_from_the_newest_whole_step_and_saves(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    checkpoints = cluster.shared / f"{tmp_path.name}.checkpoints"
    # A large state, so that a write takes a while.
    train = (*TRAIN, "--buffer-mib", "32", "--checkpoints", str(checkpoints))
    options = ("--nodes", "2", "--spares", "0")
    first = submit(cluster, tmp_path, *options, arguments=(*train, "--steps", "100000"))
    seen = CheckpointDirectory(checkpoints)
    first.wait("a whole step", lambda s: bool(s.saved) and bool(seen.steps()))
    wait_until("a write under way", lambda: _written(checkpoints), limit_s=120.0)
    nodes = first.state().placement
    for node in nodes:
        cluster.fault("power-loss", node)
    whole = seen.complete()
    half = _written(checkpoints)
    assert not first.directory.outcome_file.exists()
    for node in nodes:
        cluster.repair(node)
    cluster.login(["scancel", str(first.job)], check=False)

    folder = tmp_path / "again"
    second = submit(cluster, folder, *options, arguments=(*train, "--steps", str(whole[0] + 60)))
    assert second.wait_end().exit_code == 0, second.story()
    restored = [e for e in second.events() if isinstance(e, ev.Restored)]
    assert restored[0].step == whole[0], second.story()
    wait_until("its last checkpoint", second.directory.outcome_file.exists, limit_s=120.0)
    assert seen.complete()[0] > whole[0], second.story()
    assert not [path for path in half if path.exists()]
    found = owner(checkpoints)
    assert found is not None
    assert found.run == second.directory.root.name
    told = result(cluster.shared / f"{folder.name}.json")
    assert told["sha256"] == trained_plainly(*train[:-2], "--steps", str(whole[0] + 60), nodes=2)
    print(json.dumps({"whole": whole, "half": [path.name for path in half]}))


def _written(checkpoints: Path) -> list[Path]:
    return list(checkpoints.glob(".writing-*")) if checkpoints.is_dir() else []
