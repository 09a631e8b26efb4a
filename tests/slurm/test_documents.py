"""Each `jurymast` command of the documents works as printed, for an unprivileged user with a clean home."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.report.which_run import find_run
from support.documents import commands
from support.runs import SCRIPTS
from support.slurm_runs import running_cluster
from testcluster import Cluster
from testcluster.settings import PARTITION

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.long]

LIMIT_S = 240.0
# Nodes that Slurm knows of and that are not there: a job for them is taken, and waits.
BIG = ("NodeName=big[1-40] NodeAddr=10.77.0.210 CPUs=8 RealMemory=1000 Gres=gpu:8 State=DOWN",
       "PartitionName=train Nodes=big[1-40] MaxTime=INFINITE State=UP")  # fmt: skip
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
srun torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=$(hostname):29500 train.py "$@"
"""


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    with running_cluster(
        place.with_name(f"{place.name}-documents"), nodes=4, conf=BIG, purge=True
    ) as running:
        yield running


@pytest.mark.timeout(600)
def test_every_command(cluster: Cluster, tmp_path: Path) -> None:
    home = cluster.shared / tmp_path.name
    cluster.login(["mkdir", str(home)])
    (home / "job.sbatch").write_text(JOB)
    (home / "train.py").write_bytes((SCRIPTS / "sum_ranks.py").read_bytes())
    for name in ("7b.yaml", "acme_notify.py"):  # what the documents have people write
        (home / name).touch()
    environment = {
        "HOME": str(home), "PATH": f"{cluster.python.parent}:/usr/bin:/bin", "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    documented = sorted({command for _, command in commands() if command.startswith("jurymast ")})
    run = ""
    # What shows a run needs one.
    for command in sorted(documented, key=lambda command: " RUN" in command):
        big = {"SBATCH_PARTITION": "train"} if " -- " in command else {}
        done = cluster.login(
            ["bash", "-c", re.sub(r"\bRUN\b", run, command)], cwd=home, env={**environment, **big},
            timeout_s=LIMIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        for page in re.findall(r"--html (\S+)", command):
            assert "</html>" in (home / page).read_text()
        if command.startswith("jurymast submit"):
            job = re.search(r"job\s+(\d+)", done.stdout + done.stderr)
            assert job is not None, done.stdout
            if " -- " not in command:
                cluster.wait_job(int(job[1]), "COMPLETED", deadline_s=LIMIT_S)
                run = find_run(job[1], home / "runs").root.name
    summed_up = ["bash", "-c", "jurymast fleet --by partition --json"]
    told = json.loads(cluster.login(summed_up, cwd=home, env=environment, timeout_s=LIMIT_S).stdout)
    assert PARTITION in [group["partition"] for group in told["groups"]], "as Slurm chose it"
