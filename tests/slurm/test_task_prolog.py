"""What runs before each task, of a step's own or of the site's, against real sbatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm_runs import running_cluster
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 240.0
SITE = """#!/bin/sh
echo "export SITE=$SLURM_PROCID/$SLURM_NTASKS-$SLURM_LOCALID"
"""
OWN = """#!/bin/sh
echo "print $0 before $SLURM_PROCID $SLURM_LOCALID"
echo "export PLACE=$SITE+"
echo "export SEEN=$SEEN+"
echo "unset GONE"
[ -z "$FAILS" ] || exit "$FAILS"
"""
TRAIN = """import os, sys
names = ("SLURM_PROCID", "SITE", "PLACE", "SEEN", "GONE", "SLURM_SCRIPT_CONTEXT")
print("said", sys.argv[1], *(os.environ.get(name, "unset") for name in names))
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --job-name=prolog --output=%x.out
#JURYMAST train: yes
export GONE=1
srun --task-prolog=$PWD/own.sh python train.py option
SLURM_TASK_PROLOG=$PWD/own.sh srun bash -c "python train.py variable"
srun python train.py none
"""
FAILS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --job-name=prolog --output=%x.out
#JURYMAST train: no
FAILS=7 srun --task-prolog=$PWD/own.sh python train.py never
echo "said it failed with $?"
"""


@pytest.fixture
def site(place: Path) -> Iterator[Cluster]:
    """A cluster whose site has a prolog for each task."""
    program = place.with_name(f"{place.name}-prolog") / "shared" / "site.sh"
    with running_cluster(place, "prolog", nodes=3, cpus=2, conf=[f"TaskProlog={program}"]) as running:
        assert running.shared == program.parent
        yield running
        assert running.repair_all() == []


def lines(cluster: Cluster, script: str, *submit: str) -> list[str]:
    """What the job prints of its prolog and its tasks."""
    work = cluster.shared / submit[0].rpartition("/")[2]
    cluster.login(["mkdir", "-p", str(work)])
    (work / "job.sbatch").write_text(script)
    (work / "train.py").write_text(TRAIN)
    for program, text in ((work / "own.sh", OWN), (cluster.shared / "site.sh", SITE)):
        program.write_text(text)
        program.chmod(0o755)
    done = cluster.login([*submit, "--parsable", "job.sbatch"], cwd=work, timeout_s=LIMIT_S)
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / "prolog.out").read_text()
    assert ended["ExitCode"] == "0:0", printed
    return sorted(
        line.replace(str(work), "") for line in printed.splitlines() if line.startswith(("said ", str(work)))
    )


@pytest.mark.parametrize("script", [JOB, FAILS], ids=["runs", "fails"])
def test_prologs_run_before_each_rank_as_before_each_task(site: Cluster, script: str) -> None:
    theirs = lines(site, script, "sbatch")
    jurymast = str(site.python.parent / "jurymast")
    ours = lines(site, script, jurymast, "submit", "--spares=1", f"--runs={site.shared}/runs")
    assert ours == theirs
