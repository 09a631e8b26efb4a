"""A run that loses more nodes than it has spares, on a real cluster with others free: small jobs bring nodes,
nothing is requeued, and not a bit is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from support.runs import SCRIPTS, result
from support.saves import check_restores
from support.slurm_runs import TRAIN, SlurmRun, policy_file, power_loss, submit, submit_script, weights
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# On a busy machine some rank may be slow for long.
REFILL = "nodes_policy: {refill: on, hold: 5m}\nhealth: {straggler: off}"


@pytest.fixture
def policy(cluster: Cluster, tmp_path: Path) -> str:
    return policy_file(cluster, tmp_path, REFILL)


def never_requeued(run: SlurmRun) -> None:
    assert [i.action for i in run.state().incidents].count("requeue") == 0, run.story()
    assert run.cluster.job(run.job)["Restarts"] == "0"


def lose(run: SlurmRun, node: str) -> RunState:
    """The node loses power; the run goes on with steps that it had not done, and has a spare again."""
    before = run.state()
    power_loss(run, node)

    def again(state: RunState) -> bool:
        here = {name for name, one in state.nodes.items() if one.ready or name in state.places} - {node}
        whole = len(here) >= len(before.placement) + before.spares
        return whole and node not in state.placement and state.incident is None

    return run.wait(f"the recovery from the loss of {node}", again, limit_s=240.0)


@pytest.mark.long
def test_three_spares_are_used_one_after_the_other_with_one_in_the_allocation(
    cluster: Cluster, tmp_path: Path, policy: str, trained_plainly: Callable[..., str]
) -> None:
    train = (*TRAIN[:1], "1500", *TRAIN[2:])
    options = ("--nodes", "2", "--spares", "1", "--policy", policy)
    run = submit(cluster, tmp_path, *options, arguments=train)
    for saved in (20, 40):
        lose(run, run.wait_safe(saved).placement[1])
    power_loss(run, run.wait_safe(60).placement[1])
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    assert [i.action for i in state.incidents] == ["swap"] * 3, run.story()
    never_requeued(run)
    check_restores(run, least=20)
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=2)
    wait_until("the end of the small jobs", lambda: ours_in_queue(cluster) == [], limit_s=120.0)


def test_the_batch_host_and_another_node_are_lost_at_once_without_a_spare(
    cluster: Cluster, tmp_path: Path, policy: str, trained_plainly: Callable[..., str]
) -> None:
    """The node that is left takes over, and holds what is in its memory."""
    train = (*TRAIN[:1], "900", *TRAIN[2:])
    options = ("--nodes", "3", "--spares", "0", "--policy", policy)
    run = submit(cluster, tmp_path, *options, arguments=train)
    safe = run.wait_safe(30)
    other = next(node for node in safe.placement if node != safe.host)
    # So that no replica is lost with both, each is on storage as well.
    run.wait("a checkpoint on storage", lambda s: s.saved_on("shared") >= 10)
    for node in (safe.host, other):
        power_loss(run, node)
    state = run.wait_end(300.0)
    assert (state.exit_code, state.epoch >= 2) == (0, True), run.story()
    never_requeued(run)
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=3)
    cluster.wait_job(run.job, "COMPLETED", "CANCELLED", "NODE_FAIL", "FAILED")
    wait_until("the end of the small jobs", lambda: ours_in_queue(cluster) == [], limit_s=120.0)


@pytest.mark.long
def test_a_run_holds_its_nodes_while_no_other_is_free(
    cluster: Cluster, tmp_path: Path, policy: str, trained_plainly: Callable[..., str]
) -> None:
    """Its ranks see the run's own job wherever they are."""
    train = (*TRAIN[:1], "900", *TRAIN[2:])
    options = ("--nodes", "3", "--spares", "0", "--policy", policy)
    run = submit(cluster, tmp_path, *options, arguments=train)
    run.wait_safe(20)
    # All nodes that are left.
    told = cluster.login(["sbatch", "--parsable", "--nodes=3", "--wrap", "sleep 1000"]).stdout
    blocker = int(told.strip())
    cluster.wait_job(blocker, "RUNNING")
    victim = run.wait_safe(30).placement[1]
    power_loss(run, victim)
    held = run.wait("a node that is expected", lambda s: any(one.job for one in s.refills.values()))
    run.wait("the hold", lambda s: s.phase.value == "waiting")
    assert held.restarts == 0
    cluster.login(["scancel", str(blocker)])
    again = run.wait("the recovery", lambda s: s.attempt == 2 and s.incident is None, limit_s=240.0)
    taken = next(one.node for one in run.events() if isinstance(one, ev.RefillStarted))
    assert taken in again.placement
    same_job(run, next(node for node in again.placement if node != taken), taken)
    state = run.wait_end(300.0)
    assert state.exit_code == 0, run.story()
    never_requeued(run)
    check_restores(run, least=20)
    assert weights(cluster, tmp_path) == trained_plainly(*train, nodes=3)
    wait_until("the end of the small jobs", lambda: ours_in_queue(cluster) == [], limit_s=120.0)


def same_job(run: SlurmRun, own: str, later: str) -> None:
    """The variables of the rank whose node came later are those of another, but for what is the node's."""
    both = (variables(run, node) for node in (own, later))
    here, there = ({name: one[name] for name in one if name.startswith("SLURM")} for one in both)
    assert there["SLURM_JOB_ID"] == str(run.job)
    assert here.keys() ^ there.keys() == set()
    differ = {name for name in here if here[name] != there[name]}
    of_a_node = {
        "SLURM_NODEID", "SLURM_PROCID", "SLURM_GTIDS", "SLURM_TASK_PID", "SLURM_TOPOLOGY_ADDR",
        "SLURMD_NODENAME", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_CPUS_ON_NODE",
    }  # fmt: skip
    assert differ <= of_a_node, {name: (here[name], there[name]) for name in differ - of_a_node}


def variables(run: SlurmRun, node: str) -> dict[str, str]:
    entries = run.cluster.exec(node, ["cat", f"/proc/{run.pids(node)[0]}/environ"]).stdout.split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def ours_in_queue(cluster: Cluster) -> list[str]:
    """Small jobs that are left."""
    told = cluster.login(["squeue", "--noheader", "--format=%j|%T"]).stdout
    left = [line for line in told.splitlines() if "jurymast-refill" in line]
    return [line for line in left if "COMPLETING" not in line]


TRAINS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --gres=gpu:1
#JURYMAST --spares 0 --policy refill.yaml
export OF_THE_SCRIPT=yes
srun bash -c 'OF_THE_STEP=yes exec torchrun --nnodes=$SLURM_NNODES --nproc-per-node=1 \\
  {train} --steps {steps} --step-time 0.04 --save-every "10 steps" --out out.json'
echo "said: $?"
"""


def test_a_batch_scripts_training_gets_another_node_and_the_script_goes_on(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    work, steps = cluster.shared / tmp_path.name, "400"
    cluster.login(["mkdir", "-p", str(work)])
    (work / "refill.yaml").write_text(f"{REFILL}\n")
    run = submit_script(cluster, work, TRAINS.format(train=SCRIPTS / "train_tiny.py", steps=steps))
    safe = run.wait_safe(20, 240.0)
    victim = next(node for node in safe.placement if node != safe.host)
    power_loss(run, victim)
    again = run.wait("the recovery", lambda s: s.attempt == 2 and s.incident is None, limit_s=240.0)
    taken = next(one.node for one in run.events() if isinstance(one, ev.RefillStarted))
    assert taken in again.placement
    there = variables(run, taken)
    assert (there["OF_THE_SCRIPT"], there["OF_THE_STEP"]) == ("yes", "yes")
    assert there["SLURM_JOB_ID"] == str(run.job)
    assert run.wait_end(300.0).exit_code == 0, run.story()
    never_requeued(run)
    check_restores(run, least=20)
    cluster.wait_job(run.job, "COMPLETED", deadline_s=240.0)
    assert "said: 0" in (work / "out").read_text()
    assert result(work / "out.json")["sha256"] == trained_plainly(
        "--steps", steps, "--step-time", "0.04", "--save-every", "10 steps", nodes=2
    )
    wait_until("the end of the small jobs", lambda: ours_in_queue(cluster) == [], limit_s=120.0)
