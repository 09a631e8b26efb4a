"""Batch scripts as people have them, submitted unchanged to a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurymast.cli.find import find_run
from support.runs import SCRIPTS
from support.slurm_runs import SlurmRun, power_loss
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

SCRIPT = """#!/bin/bash
#SBATCH --job-name=plain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output={work}/%x-%j.out
#JURYMAST --spares 1
set -e
echo "before: $SLURM_NNODES $SLURM_JOB_NODELIST $(scontrol show hostnames | wc -l) args $*"
export OMP_NUM_THREADS=1
srun --label hostname
export PATH={python_bin}:$PATH
srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):0 \\
  {train} --steps 120 --step-time 0.04 --save-every "10 steps" --out {work}/out.json "$@"
echo after $?
"""


def test_a_script_survives_a_power_loss(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(work)])
    script = work / "job.sbatch"
    script.write_text(
        SCRIPT.format(work=work, python_bin=cluster.python.parent, train=SCRIPTS / "train_tiny.py")
    )
    runs = work / "runs"
    done = cluster.login(
        [str(cluster.python.parent / "jurymast"), "submit", "--runs", str(runs), "--parsable", str(script)],
        cwd=work,
        timeout_s=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    run = SlurmRun(cluster, find_run(job, runs).root, int(job))
    victim = run.wait_safe(30).placement[1]
    power_loss(run, victim)
    state = run.wait_end()
    assert (state.exit_code, [i.action for i in state.incidents]) == (0, ["swap"])
    cluster.wait_job(run.job, "COMPLETED")
    printed = (work / f"plain-{job}.out").read_text().splitlines()
    assert printed[0] == "before: 2 n[1-2] 2 args"
    assert printed[-1] == "after 0"
