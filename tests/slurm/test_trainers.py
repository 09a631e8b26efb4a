"""Trainings of other people's libraries lose a node, and go on from what our adapters for them save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.harness import ENVIRONMENT, LIMIT_S, SCRIPTS, torchruns_weights
from support.runs import ROOT
from support.slurm_runs import SlurmRun, power_loss, submit, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.mark.parametrize(
    ("script", "needs", "saved"),
    [
        ("trainer_hf.py", "transformers", 4),
        pytest.param("trainer_lightning.py", "lightning", 3, marks=pytest.mark.long),
    ],
)
def test_a_trainer_goes_on_after_a_power_loss(
    cluster: Cluster, tmp_path: Path, session_folder: Path, script: str, needs: str, saved: int
) -> None:
    pytest.importorskip(needs)
    work = cluster.shared / f"{tmp_path.name}-work"
    shutil.rmtree(work, ignore_errors=True)  # an earlier session's
    cluster.login(["mkdir", str(work)])
    shutil.copy(SCRIPTS / script, work)
    done = cluster.login(
        [str(cluster.python.parent / "jurymast"), "submit", "--runs", str(cluster.shared / tmp_path.name),
         "--json", "--nodes", "2", "--spares", "1", "--", script, "--stop-at", "5", "--jurymast"],
        cwd=work, env=ENVIRONMENT, timeout_s=240,
    )  # fmt: skip
    told = json.loads(done.stdout)
    run = SlurmRun(cluster, Path(told["directory"]), told["slurm_job"])
    stopped = run.wait("a rank", lambda s: bool(s.started), limit_s=LIMIT_S)
    wait_until("step 5", (work / "stopped").exists, limit_s=LIMIT_S)
    run.wait_safe(saved, limit_s=LIMIT_S)
    victim = stopped.placement[1]
    power_loss(run, victim)
    state = run.wait_end(LIMIT_S)
    assert state.exit_code == 0, run.story()
    assert [(i.cause, i.action) for i in state.incidents] == [("node_lost", "swap")], run.story()
    assert state.incidents[0].step_restored == saved, run.story()
    assert victim not in state.placement
    assert (work / "weights.txt").read_text() == torchruns_weights(script, session_folder)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("accelerate_loop.py", "accelerate"),
        ("fabric_loop.py", "lightning"),
        ("torchtitan_style.py", "torchdata"),
    ],
)
def test_a_loop_goes_on_after_a_power_loss(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str], name: str, needs: str
) -> None:
    """Those of docs/examples."""
    pytest.importorskip(needs)
    script, steps = ROOT / "docs" / "examples" / name, ("--steps", "60")
    policy = cluster.shared / f"{tmp_path.name}.yaml"
    policy.write_text("checkpoint: {cadence: 10 steps}\n")
    run = submit(
        cluster, tmp_path, "--nodes", "2", "--spares", "1", "--policy", str(policy),
        arguments=(*steps, "--step-time", "0.05"), script=script,
    )  # fmt: skip
    state = run.wait_safe(20, LIMIT_S)
    victim = next(node for node in state.placement if node != state.host)
    power_loss(run, victim)
    state = run.wait_end(LIMIT_S)
    assert state.exit_code == 0, run.story()
    assert [(i.cause, i.action) for i in state.incidents] == [("node_lost", "swap")], run.story()
    assert (state.incidents[0].step_restored or 0) >= 20, run.story()
    assert victim not in state.placement
    assert weights(cluster, tmp_path) == trained_plainly(*steps, each=2, script=str(script))
