"""What a batch script, its steps and its ranks are started with, by variable, against real sbatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.runs import SCRIPTS
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 90.0
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --gpus-per-node=2 --mem=100
#SBATCH --job-name=parity --output=%x-%A-%a.out --comment=none
ulimit -n 777
umask 027
export OWN="a value"
cd sub
python $DUMP batch 0 "$@"
srun -N1 -n1 python $DUMP step SLURM_PROCID
srun --ntasks-per-node=1 --ntasks=2 torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d \\
    --rdzv-endpoint=$(hostname):29517 $DUMP rank RANK
srun python $DUMP task SLURM_PROCID
"""
# Ours beside Slurm's and torchrun's, and what is different for its own reason: jobs, processes and times have
# numbers of their own.
OURS = {
    "batch": {"BASH_FUNC_srun%%", "JURYMAST_SCRIPT_RUN", "PYTHONPATH"},
    "step": {"BASH_FUNC_srun%%", "JURYMAST_SCRIPT_RUN", "PYTHONPATH"},
    "rank": {"GLOO_SOCKET_IFNAME"},
    "task": {"GLOO_SOCKET_IFNAME"},
}


def told(cluster: Cluster, work: Path, *submit: str) -> dict[str, Any]:
    """By the name of each file that the job has written."""
    cluster.login(["mkdir", "-p", str(work / "sub")])
    (work / "job.sbatch").write_text(SCRIPT)
    done = cluster.login(
        [*submit, "--parsable", "job.sbatch", "an argument"], cwd=work, timeout_s=60, check=False,
        env={"DUMP": str(SCRIPTS / "dump_environment.py"), "PATH": f"{cluster.python.parent}:/usr/bin:/bin",
             "JURYMAST_RUNS": str(work / "runs"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / f"parity-{int(done.stdout)}-4294967294.out").read_text()
    assert ended["ExitCode"] == "0:0", printed
    return {path.stem: json.loads(path.read_text()) for path in (work / "sub").glob("*.json")}


def test_every_variable(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    theirs = told(cluster, work.with_name(f"{work.name}-sbatch"), "sbatch")
    ours = told(cluster, work, str(cluster.python.parent / "jurymast"), "submit", "--spares=1")
    names = ["batch-0", "step-0", *(f"rank-{n}" for n in range(4)), *(f"task-{n}" for n in range(4))]
    assert (sorted(theirs), sorted(ours)) == (sorted(names), sorted(names))
    differences = [line for name in names for line in compared(name, theirs[name], ours[name])]
    assert differences == []


def compared(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    lines = []
    for kind in ("limits", "mask", "arguments"):
        if theirs[kind] != ours[kind]:
            lines.append(f"{name}: {kind}: {theirs[kind]} / {ours[kind]}")
    here, there = ours["environment"], theirs["environment"]
    for variable in sorted({*here, *there}):
        if here.get(variable) != there.get(variable):
            lines.append(f"{name}: {variable}: {there.get(variable)} / {here.get(variable)}")
    return lines
