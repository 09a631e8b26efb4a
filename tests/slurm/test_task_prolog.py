"""What runs before and after each task, of a step's own or of the site's, against real sbatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm_runs import running_cluster
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 800.0
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
# The site's runs after the step's own. It also runs for the batch script, which begins without this number,
# and for jurymast's agents, of which there are as many as nodes.
SITE_AFTER = """#!/bin/sh
[ -n "$NUMBER" ] && [ "$SLURM_NTASKS" = 4 ] || exit 0
echo "site $SLURM_PROCID $SLURM_LOCALID $SLURM_SCRIPT_CONTEXT $GONE" \\
    "$(grep -c "^own $SLURM_PROCID $NUMBER" "$SLURM_SUBMIT_DIR/after")" >> "$SLURM_SUBMIT_DIR/after"
"""
OWN_AFTER = """#!/bin/sh
echo "own $SLURM_PROCID $NUMBER $SLURM_LOCALID $SLURM_SCRIPT_CONTEXT $GONE $PWD" >> "$SLURM_SUBMIT_DIR/after"
echo unseen
echo "said after $SLURM_PROCID" >&2
exit 3
"""
TRAIN = """import os, sys
names = ("SLURM_PROCID", "SITE", "PLACE", "SEEN", "GONE", "SLURM_SCRIPT_CONTEXT")
print("said", sys.argv[1], *(os.environ.get(name, "unset") for name in names))
"""
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --job-name=prolog --output=%x.out
#JURYMAST train: yes
export GONE=1 NUMBER=1
srun --task-prolog=$PWD/own.sh --task-epilog=$PWD/after.sh python train.py option
NUMBER=2 SLURM_TASK_PROLOG=$PWD/own.sh SLURM_TASK_EPILOG=$PWD/after.sh srun bash -c "python train.py variable"
srun python train.py none
"""
FAILS = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --job-name=prolog --output=%x.out
#JURYMAST train: no
NUMBER=1 FAILS=7 srun --task-prolog=$PWD/own.sh --task-epilog=$PWD/after.sh python train.py never
echo "said it failed with $?"
"""


@pytest.fixture
def site(place: Path) -> Iterator[Cluster]:
    """A cluster whose site has a prolog for each task."""
    shared = place.with_name(f"{place.name}-prolog") / "shared"
    conf = [f"TaskProlog={shared}/site.sh", f"TaskEpilog={shared}/site-after.sh"]
    with running_cluster(place, "prolog", nodes=3, cpus=2, conf=conf) as running:
        assert running.shared == shared
        yield running
        assert running.repair_all() == []


def lines(cluster: Cluster, script: str, *submit: str) -> list[str]:
    """What the job prints of its prolog and its tasks, and what was noted after them."""
    work = cluster.shared / submit[0].rpartition("/")[2]
    cluster.login(["mkdir", "-p", str(work)])
    (work / "after").unlink(missing_ok=True)
    (work / "job.sbatch").write_text(script)
    (work / "train.py").write_text(TRAIN)
    programs = {
        work / "own.sh": OWN, work / "after.sh": OWN_AFTER,
        cluster.shared / "site.sh": SITE, cluster.shared / "site-after.sh": SITE_AFTER,
    }  # fmt: skip
    for program, text in programs.items():
        program.write_text(text)
        program.chmod(0o755)
    done = cluster.login([*submit, "--parsable", "job.sbatch"], cwd=work, timeout_s=LIMIT_S)
    ended = cluster.wait_job(int(done.stdout), "COMPLETED", "FAILED", deadline_s=LIMIT_S)
    printed = (work / "prolog.out").read_text()
    assert ended["ExitCode"] == "0:0", printed
    assert "unseen" not in printed
    said = [line for line in printed.splitlines() if line.startswith(("said ", str(work)))]
    after = (work / "after").read_text().splitlines()
    return sorted(line.replace(str(work), "") for line in [*said, *after])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("script", [JOB, FAILS], ids=["runs", "fails"])
def test_programs_run_around_each_rank_as_around_each_task(site: Cluster, script: str) -> None:
    theirs = lines(site, script, "sbatch")
    jurymast = str(site.python.parent / "jurymast")
    ours = lines(site, script, jurymast, "submit", "--spares=1", f"--runs={site.shared}/runs")
    assert ours == theirs
