"""Batch scripts whose trainings lose nodes, on a real cluster: what becomes of the rest of the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import SCRIPTS, result
from support.slurm_runs import SlurmRun, jurymast, power_loss, submit_again, submit_script
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 240.0

LOSES_A_NODE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out --partition=main
#JURYMAST --spares 1
srun python -u $SUM --slurm --until
srun --ntasks-per-node=1 -n2 echo said: alive
srun --ntasks-per-node=1 -n2 torchrun --nproc-per-node=1 $SUM second
echo said: $?
"""


def test_later_steps_do_without_a_node_that_was_lost(cluster: Cluster, tmp_path: Path) -> None:
    """Also of a training whose ranks find each other by Slurm's variables."""
    work = cluster.shared / tmp_path.name
    run = submit_script(cluster, work, LOSES_A_NODE)
    state = run.wait("the ranks", lambda s: bool(s.placement), LIMIT_S)
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    (work / "started").unlink()
    victim = next(node for node in state.placement if node != state.host)  # of rank 0, if all came in time
    power_loss(run, victim)
    run.wait("the swap", lambda s: bool(s.incidents) and victim not in s.placement, LIMIT_S)
    wait_until("a step after it", (work / "started").exists, limit_s=LIMIT_S)
    (work / "stop").touch()
    assert run.wait_end().exit_code == 0
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    kept = [line for line in printed.splitlines() if line.startswith(("rank", "said"))]
    first = [f"rank {n} of 4, local {n % 2}, sum 10, word -, --slurm, --until" for n in range(4)]
    second = [f"rank {n} of 2, local 0, sum 3, word -, second" for n in range(2)]
    assert sorted(kept[:4]) == first, printed
    assert kept[4:6] == ["said: alive"] * 2, printed
    assert [*sorted(kept[6:8]), *kept[8:]] == [*second, "said: 0"], printed


SRUN_A_NODE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --partition=main
nodes=($(scontrol show hostnames))
train() {
  for i in 0 1; do
    srun -N1 -n1 -w ${nodes[$i]} --output=$1-$i torchrun --nnodes=2 --nproc-per-node=1 --node_rank=$i \\
      --master_addr=${nodes[0]} --master_port=29541 $SUM $1 $2 &
  done
  wait
}
train first --until
train second
echo said: $?
"""


@pytest.mark.long
def test_one_srun_for_each_node_goes_on_with_another_one(cluster: Cluster, tmp_path: Path) -> None:
    """The next training does so at once, though its srun names the node that was lost."""
    work = cluster.shared / tmp_path.name
    run = submit_script(cluster, work, SRUN_A_NODE, "--spares=1")
    run.wait("the ranks", lambda s: bool(s.placement), LIMIT_S)
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    (work / "started").unlink()
    victim = next(node for node in run.state().placement if node != run.state().host)
    power_loss(run, victim)
    run.wait("the swap", lambda s: bool(s.incidents) and victim not in s.placement, LIMIT_S)
    wait_until("a step after it", (work / "started").exists, limit_s=LIMIT_S)
    (work / "stop").touch()
    assert run.wait_end().exit_code == 0
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    assert "said: 0" in (work / "out").read_text()
    for training, more in (("first", ", --until"), ("second", "")):
        for rank in (0, 1):
            printed = (work / f"{training}-{rank}").read_text()
            assert f"rank {rank} of 2, local 0, sum 3, word -, {training}{more}\n" in printed
            assert f"rank {1 - rank} of 2" not in printed


TRAINS = """#!/bin/bash
#SBATCH --job-name=trains
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x.out --open-mode=append
#JURYMAST --spares 2
set -e
echo "said: begin"
srun bash -c 'exec torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 --max-restarts=3 \\
  {train} --steps {steps} --step-time 0.04 --save-every "10 steps" --out out.json'
echo "said: after $?"
"""


def test_power_losses_of_a_node_and_of_the_batch_host(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """The training goes on. What stands behind it in the script runs in the job's next life, which is told
    how the training ended and does not run it again."""
    work, steps = cluster.shared / tmp_path.name, "150"
    run = submit_script(cluster, work, TRAINS.format(train=SCRIPTS / "train_tiny.py", steps=steps))
    state = run.wait_safe(20, LIMIT_S)
    victim = next(node for node in state.placement if node != state.host)
    power_loss(run, victim)
    run.wait("the swap", lambda s: len(s.incidents) == 1 and s.incident is None)
    power_loss(run, run.wait_safe((run.state().incidents[0].step_restored or 0) + 20).host)
    state = run.wait_end(LIMIT_S)
    assert (state.exit_code, state.phase.value) == (0, "succeeded"), run.story()
    ended = cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    assert ended["Restarts"] == "1"
    printed = (work / "trains.out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: begin", "said: begin", "said: after 0"], printed
    assert "--max-restarts" in printed
    assert result(work / "out.json")["sha256"] == trained_plainly("--steps", steps, nodes=4)


REQUEUED = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out --open-mode=append
echo "said: begin $SLURM_RESTART_COUNT $SLURM_NTASKS"
export MASTER_ADDR=$(hostname) MASTER_PORT=29531
srun python {train} --slurm --steps {steps} --step-time 0.04 --save-every "10 steps" --out out.json
echo "said: after $?"
"""


def test_without_a_spare_the_script_begins_again_and_its_training_goes_on(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    work, steps = cluster.shared / tmp_path.name, "80"
    script = REQUEUED.format(train=SCRIPTS / "train_tiny.py", steps=steps)
    run = submit_script(cluster, work, script, "--spares=0")
    state = run.wait_safe(20, LIMIT_S)
    power_loss(run, next(node for node in state.placement if node != state.host))
    state = run.wait_end(LIMIT_S)
    assert [i.action for i in state.incidents] == ["requeue"], run.story()
    assert (state.incidents[0].step_restored or 0) >= 10
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: begin  4", "said: begin 1 4", "said: after 0"], printed
    assert result(work / "out.json")["sha256"] == trained_plainly("--steps", steps, nodes=4)


SINGLETON = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out-%j --open-mode=append
#SBATCH --job-name="only one" --dependency=singleton
echo $SLURM_JOB_ID begins ${SLURM_RESTART_COUNT:-0} >> order
[[ -e stop ]] || srun torchrun --nnodes=2 --nproc-per-node=1 $SUM --until  # only the first one trains
echo $SLURM_JOB_ID ends $? >> order
"""


@pytest.mark.long
def test_jobs_wait_for_the_end_of_one_that_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    run = submit_script(cluster, work, SINGLETON, "--spares=0")
    others = [
        submit_again(cluster, work, "--spares=0", *words)
        for words in ((), (f"--dependency=afterok:{run.job}",))
    ]
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    (work / "started").unlink()
    power_loss(run, next(node for node in run.state().placement if node != run.state().host))
    run.wait("the requeue", lambda s: s.restarts == 1, LIMIT_S)
    wait_until("a step after it", (work / "started").exists, limit_s=LIMIT_S)
    (work / "stop").touch()
    for job in others:
        cluster.wait_job(job, "COMPLETED", deadline_s=LIMIT_S)
    order = (work / "order").read_text().splitlines()
    assert order[:3] == [f"{run.job} begins 0", f"{run.job} begins 1", f"{run.job} ends 0"], order
    assert set(order[3:]) == {f"{job} {what} 0" for job in others for what in ("begins", "ends")}, order


def test_cancel_ends_the_script_too(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    script = "#!/bin/bash\n#SBATCH --output=out\ntorchrun $SUM --until\necho said: after\n"
    run = submit_script(cluster, work, script, "--spares=0")
    run.wait("the ranks", lambda s: bool(s.placement), LIMIT_S)
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    code, _, error = jurymast(cluster, "cancel", str(run.directory.root))
    assert code == 0, error
    cluster.wait_job(run.job, "CANCELLED", deadline_s=LIMIT_S)
    assert run.state().phase.value == "cancelled", run.story()
    assert "said" not in (work / "out").read_text()


ASKS_FOR_SIGTERM = """#!/bin/bash
#SBATCH --output=out --signal=B:TERM@60
trap 'echo said: trapped; touch stop' TERM
torchrun $SUM --until &
wait $!
wait $!
echo said: after $?
"""


def test_a_script_gets_the_sigterm_that_slurm_sends_to_it_alone(cluster: Cluster, tmp_path: Path) -> None:
    """As it asked for; Slurm sends it here in the same way, but sooner."""
    work = cluster.shared / tmp_path.name
    run = submit_script(cluster, work, ASKS_FOR_SIGTERM, "--spares=0")
    wait_until("the first step", (work / "started").exists, limit_s=LIMIT_S)
    cluster.login(["scancel", "--batch", "--signal=TERM", str(run.job)])
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: trapped", "said: after 0"], printed
    assert run.state().phase.value == "succeeded", run.story()


@pytest.mark.parametrize(
    ("line", "where"),
    [("srun python -I -m torch.distributed.run --help", "step"),
     ("unset PYTHONPATH; python -m torch.distributed.run --help", "script")],
)  # fmt: skip
def test_a_launcher_that_does_not_find_jurymast_is_said(
    cluster: Cluster, tmp_path: Path, line: str, where: str
) -> None:
    work = cluster.shared / tmp_path.name
    run = submit_script(cluster, work, f"#!/bin/bash\n#SBATCH --output=out\n{line}\n", "--spares=0")
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    assert "usage: run.py" in printed
    assert printed.count(f"jurymast: no launcher in this {where} found jurymast") == 1
    assert printed.count("no launcher in this") == 1


SHARD = """import os, sys, time
if os.environ["SLURM_PROCID"] == "0":
    sys.exit(3)
while not os.path.exists("go"):
    time.sleep(0.05)
print("said: finished", flush=True)
"""
TRAINING_A_NODE = """import os, sys, time, torch, torch.distributed as dist
node, local = os.environ["SLURM_NODEID"], os.environ["SLURM_LOCALID"]
place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29541", "RANK": local, "WORLD_SIZE": "2"}
os.environ.update(place)
dist.init_process_group("gloo")
dist.barrier()
if node == "0":
    sys.exit(4)
open(f"began-{local}", "x").close()
on = torch.tensor([0])
while not int(on):
    on = torch.tensor([int(os.path.exists("on"))])
    dist.all_reduce(on)
    time.sleep(0.05)
print("said: trained", node, flush=True)
dist.destroy_process_group()
"""
OF_AN_MPI = """import importlib, os
print("said: number", os.environ["PMI_RANK"], "of", os.environ["PMI_SIZE"], flush=True)
"""
SHARDS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=out --partition=main
srun -n2 --ntasks-per-node=1 python guessed.py
echo "said: guessed $?"
srun -n2 --ntasks-per-node=1 python shard.py
echo "said: shard $?"
srun python training_a_node.py
echo "said: trainings $?"
srun --mpi=pmi2 python of_an_mpi.py | sort
srun -K python opaque.py
echo "said: killed $?"
"""


def test_independent_tasks_finish_although_one_fails(cluster: Cluster, tmp_path: Path) -> None:
    """Also those whose text looks like a training, and nodes that have a training of their own each; they are
    not run again. Those of an MPI are srun's. If srun is told to end the others, they end."""
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(work)])
    (work / "shard.py").write_text(SHARD)
    (work / "guessed.py").write_text("import torch.distributed\n" + SHARD)
    (work / "training_a_node.py").write_text(TRAINING_A_NODE)
    (work / "opaque.py").write_text("import importlib\n" + SHARD.replace("go", "never"))
    (work / "of_an_mpi.py").write_text(OF_AN_MPI)
    run = submit_script(cluster, work, SHARDS, "--spares=0")
    run.wait("the failure", lambda s: bool(s.findings.failures), LIMIT_S)
    (work / "go").touch()
    state = run.wait_end(LIMIT_S)
    assert (state.attempt, state.exit_code, state.incidents[0].rank) == (1, 3, 0), run.story()
    root = run.directory.root.with_name(f"{run.directory.root.name}-2")
    wait_until("the next run", (root / "plan.json").exists, limit_s=LIMIT_S)
    second = SlurmRun(cluster, root, run.job)
    second.wait("its failures", lambda s: len(s.findings.failures) == 2 or bool(s.incidents), LIMIT_S)
    (work / "on").touch()
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    ends = ["said: finished", "said: guessed 3", "said: finished", "said: shard 3"]
    ends += ["said: trained 1", "said: trained 1", "said: trainings 4"]
    numbers = [f"said: number {number} of 4" for number in range(4)]
    assert said == [*ends, *numbers, "said: killed 143"], printed
    assert "python shard.py: taken for 2 independent tasks" in printed


LEAVES = """import os, signal, subprocess, sys
from multiprocessing.shared_memory import SharedMemory
import torch.distributed as dist
SERVES = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 29888)); print('up', flush=True)"
dist.init_process_group("gloo")
rank = dist.get_rank()
memory = SharedMemory(name="of-the-rank", create=True, size=1 << 20)
command = [sys.executable, "-c", SERVES + "; time.sleep(3600)"]
child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "up\\n", "the port is in use"
dist.barrier()
if os.environ["JURYMAST_ATTEMPT"] == "1":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
memory.close()
memory.unlink()
print("said: trained", flush=True)
dist.destroy_process_group()
"""
AFTER_IT = """import os, socket
with socket.socket() as found:
    found.bind(("127.0.0.1", 29888))
print("said: free", "of-the-rank" in os.listdir("/dev/shm"), flush=True)
"""
LEFT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=out --partition=main
srun torchrun --nnodes=2 --nproc-per-node=1 leaves.py
srun python after_it.py
"""


def test_what_a_killed_rank_leaves_is_gone_before_the_next_attempt(cluster: Cluster, tmp_path: Path) -> None:
    """Named shared memory, and a child in a session of its own; after the training as well."""
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(work)])
    (work / "leaves.py").write_text(LEAVES)
    (work / "after_it.py").write_text(AFTER_IT)
    run = submit_script(cluster, work, LEFT, "--spares=0")
    state = run.wait_end(LIMIT_S)
    assert (state.attempt, state.exit_code) == (2, 0), run.story()
    cluster.wait_job(run.job, "COMPLETED", deadline_s=LIMIT_S)
    printed = (work / "out").read_text()
    said = [line for line in printed.splitlines() if line.startswith("said")]
    assert said == ["said: trained"] * 2 + ["said: free False"] * 2, printed
