"""A run that loses a node, and has no other, goes on with fewer and takes in another one later, on a real
cluster: each step's loss is that of an undisturbed training, and growing goes on from the newest save."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from support import constant_batch
from support.runs import SCRIPTS
from support.saves import check_restores
from support.slurm_runs import SlurmRun, jurymast, policy_file, power_loss, submit
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

SCRIPT = SCRIPTS / "train_batch.py"
# Long enough that the run has all its nodes again well before its end, also on a busy machine.
STEPS = 1200
POLICY = """nodes: {min: 3}
nodes_policy: {refill: on, hold: 1s}
health: {straggler: off}
"""
# The order in which floats are added is all that differs: a few of float32's last bits, after many steps.
ORDER = 1e-5


def losses(out: Path) -> dict[int, tuple[float, int]]:
    """By step, what it was when it was done last, and on how many ranks that was."""
    lines = (line.split() for line in out.with_suffix(".losses").read_text().splitlines())
    return {int(step): (float(loss), int(ranks)) for step, loss, ranks in lines}


def undisturbed(folder: Path) -> dict[int, tuple[float, int]]:
    """One process that trains on the whole batch of each step."""
    out = folder / "undisturbed.json"
    variables = {name: text for name, text in os.environ.items() if not name.startswith("JURYMAST")}
    subprocess.run(
        [
            sys.executable, str(SCRIPT), "--steps", str(STEPS), "--save-every", f"{STEPS} steps",
            "--out", str(out),
        ],
        env={**variables, "JURYMAST_CHECKPOINTS": str(folder / "checkpoints"), "OMP_NUM_THREADS": "1"},
        check=True, timeout=240, cwd=folder,
    )  # fmt: skip
    return losses(out)


@contextmanager
def no_other_nodes(cluster: Cluster, run: SlurmRun) -> Iterator[None]:
    """In this context, Slurm gives no job a node besides the run's. A job on them would not do: Slurm ends it
    where a node has just come back from an earlier test."""
    others = f"NodeName={','.join(sorted(set(cluster.nodes) - set(run.state().nodes)))}"
    cluster.slurm(["scontrol", "update", others, "State=DRAIN", "Reason=not for this test"])
    try:
        yield
    finally:
        cluster.slurm(["scontrol", "update", others, "State=RESUME"])


def to_three_nodes_and_back(
    cluster: Cluster, folder: Path, policy: str, how: tuple[str, ...]
) -> tuple[SlurmRun, RunState]:
    """Return the run, and how it has ended."""
    train = ("--steps", str(STEPS), "--step-time", "0.04", *how)
    options = ("--nodes", "4", "--spares", "0", "--policy", policy_file(cluster, folder, policy))
    run = submit(cluster, folder, *options, arguments=train, script=SCRIPT)
    run.wait_safe(20)
    run.wait("the first save on storage", lambda s: s.saved_on("shared") > 0, limit_s=240.0)
    with no_other_nodes(cluster, run):
        safe = run.wait_safe(40)
        victim = next(node for node in safe.placement if node != safe.host)
        power_loss(run, victim)
        fewer = run.wait("three nodes", lambda s: len(s.placement) == 3 and s.incident is None, limit_s=240.0)
        assert fewer.placement == tuple(node for node in safe.placement if node != victim)
        run.wait_step(fewer.step + 50)
        code, told, error = jurymast(
            cluster, "status", str(run.job), "--runs", str(run.directory.root.parent)
        )
        assert code == 0, error
        assert "goes on with 3 of 4 nodes" in told
    run.wait("four nodes", lambda s: len(s.placement) == 4 and s.incident is None, limit_s=240.0)
    state = run.wait_end(400.0)
    assert state.exit_code == 0, run.story()
    assert [one.action for one in state.incidents] == ["shrink", "grow"], run.story()
    assert run.cluster.job(run.job)["Restarts"] == "0"
    check_restores(run, least=40)
    grown = state.incidents[1]
    assert grown.step_restored == grown.step_lost_from, f"no step is done again: {run.story()}"
    compare(losses(cluster.shared / f"{folder.name}.json"), undisturbed(folder))
    return run, state


def of_kinds(long: str) -> pytest.MarkDecorator:
    """Both kinds of models; the tests of this file show nearly the same of each."""
    kinds = {"DDP": (), "FSDP2": ("--sharded",)}
    marks = {long: [pytest.mark.long]}
    cases = [pytest.param(how, id=name, marks=marks.get(name, ())) for name, how in kinds.items()]
    return pytest.mark.parametrize("how", cases)


@of_kinds(long="FSDP2")
def test_from_four_nodes_to_three_and_back(cluster: Cluster, tmp_path: Path, how: tuple[str, ...]) -> None:
    run, _ = to_three_nodes_and_back(cluster, tmp_path, POLICY, how)
    code, told, error = jurymast(cluster, "report", str(run.job), "--runs", str(run.directory.root.parent))
    assert code == 0, error
    assert "ran on 3 of 4 nodes for" in told
    wait_until("the end of the small jobs", lambda: "refill" not in queue(cluster), limit_s=120.0)


# Storage gets the first save, and then nothing until the end.
SELDOM = "checkpoint: {tiers: {shared: {every: 1h}}}\n"


@of_kinds(long="DDP")
@pytest.mark.long
def test_without_storage_the_state_comes_out_of_memory(
    cluster: Cluster, tmp_path: Path, how: tuple[str, ...]
) -> None:
    run, state = to_three_nodes_and_back(cluster, tmp_path, POLICY + SELDOM, how)
    fewer, all_again = state.incidents
    planned = [event for event in run.events() if isinstance(event, ev.RestorePlanned)][1:]
    assert [event.tier for event in planned] == ["memory", "memory"], run.story()
    assert "4 ranks saved it" in planned[0].reason
    assert "3 ranks saved it" in planned[1].reason
    written = [e for e in run.events() if isinstance(e, ev.Saved) and e.tier == "shared" and e.ok]
    assert all_again.recovered_at is not None
    between = [e.step for e in written if fewer.detected_at <= e.t <= all_again.recovered_at]
    assert between == [], f"shared storage got steps {between}: {run.story()}"
    kept = [e.step for e in run.events() if isinstance(e, ev.Saved) and e.ok and e.attempt == 3]
    assert kept, f"all ranks together save nothing any more: {run.story()}"


FEWER = """nodes: {min: 2}
nodes_policy: {refill: on, hold: 1s}
health: {straggler: off}
"""


def test_a_framework_keeps_the_batch(cluster: Cluster, tmp_path: Path) -> None:
    """Accelerate, from three nodes to two and back."""
    pytest.importorskip("accelerate")
    length = ("--samples", "300", "--epochs", "30")  # of 34 steps each
    train = ("accelerate", *length, "--step-time", "0.05", "--save-every", "10 steps")
    options = ("--nodes", "3", "--spares", "0", "--policy", policy_file(cluster, tmp_path, FEWER))
    run = submit(cluster, tmp_path, *options, arguments=train, script=constant_batch.SCRIPT)
    run.wait_safe(20)
    with no_other_nodes(cluster, run):
        safe = run.wait_safe(40)
        power_loss(run, next(node for node in safe.placement if node != safe.host))
        fewer = run.wait("two nodes", lambda s: len(s.placement) == 2 and s.incident is None, limit_s=400.0)
        run.wait_step(fewer.step + 50)
    run.wait("three nodes", lambda s: len(s.placement) == 3 and s.incident is None, limit_s=400.0)
    state = run.wait_end(600.0)
    assert state.exit_code == 0, run.story()
    assert [one.action for one in state.incidents] == ["shrink", "grow"], run.story()
    assert state.batch_differs is None
    constant_batch.train(tmp_path / "whole", "accelerate", 3, *length, "--save-every", "2000 steps")
    constant_batch.compare(cluster.shared / f"{tmp_path.name}.json", tmp_path / "whole")


def compare(found: dict[int, tuple[float, int]], expected: dict[int, tuple[float, int]]) -> None:
    assert found.keys() == expected.keys()
    assert {ranks for _, ranks in found.values()} == {3, 4}
    for step, (loss, _) in found.items():
        assert loss == pytest.approx(expected[step][0], rel=ORDER), step


def queue(cluster: Cluster) -> str:
    told = cluster.login(["squeue", "--noheader", "--format=%j|%T"]).stdout
    return "\n".join(line for line in told.splitlines() if "COMPLETING" not in line)
