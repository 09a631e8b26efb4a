"""Jobs that are only observed (`submit --observe`): they run as under sbatch, and what the report foretells
of them is what jurymast gives where it acts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.observed_jobs import EACH, LIMIT_S, Job
from support.slurm_runs import ACCOUNTS, jurymast, running_cluster
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.alone]


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One with accounting."""
    with running_cluster(place, "observed", nodes=6, **ACCOUNTS) as running:
        yield running


SEES = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=seen-%j --time=10 --mem=100M
env; ulimit -a; umask; pwd; echo "$0 $@"; srun --label env | sort
"""
# Variables that differ from job to job, besides its number.
OF_A_JOB = re.compile(r"(\d: )?SLURM_(JOB_(START|END)_TIME|TASK_PID|SRUN_COMM_PORT|STEP_LAUNCHER_PORT)=")


def test_a_job_sees_what_it_sees_under_sbatch(cluster: Cluster, tmp_path: Path) -> None:
    work = cluster.shared / tmp_path.name
    told = []
    for words in (("sbatch", "--parsable"), ("jurymast", "submit", "--observe", "--parsable")):
        job = Job(cluster, work, *words, "-J", "mine", "job.sbatch", "a b", "c", script=SEES)
        cluster.wait_job(job.number, "COMPLETED", deadline_s=LIMIT_S)
        printed = (work / f"seen-{job.number}").read_text()
        if words[0] == "jurymast":
            assert jurymast(cluster, "logs", str(job.directory)) == (0, printed, "")
        lines = printed.splitlines()
        own = (line.replace(str(job.number), "N") for line in lines if not OF_A_JOB.match(line))
        told.append(sorted(own))
        cluster.wait_idle()
    assert told[0] == told[1]
    assert len(told[0]) > 100


FAULTS = (
    ("kill", 1), ("crash", 2), ("kill", 0), ("kill", 2), ("crash", 1), ("kill", 1), ("kill", 0),
)  # fmt: skip
# Of a job of a minute: neither Slurm nor the log tell whether a lost node fell silent, which is noticed a
# second later than a crash, and how long the script's imports took, which forked ranks do without.
NEAR = 0.06


@pytest.mark.long
def test_what_is_foretold_is_what_jurymast_gives(cluster: Cluster, tmp_path: Path) -> None:
    """The same faults at the same steps, of a job that requeues itself and of one that jurymast launches."""
    work, steps = cluster.shared / tmp_path.name, str(EACH * (len(FAULTS) + 1))
    ours = ("jurymast", "submit", "--parsable", "--spares", "2")
    observed = Job(cluster, work / "observed", *ours, "--observe", "job.sbatch", steps)
    observed.play(FAULTS)
    foretold, plain = observed.report(), observed.report("--slurm")
    cluster.repair_all()
    acting = Job(cluster, work / "acting", *ours, "job.sbatch", steps)
    acting.play(FAULTS)
    gave = acting.report()
    print(json.dumps({name: foretold[name] for name in ("ratios", "ratios_at_most", "instead")}))
    print(json.dumps({name: gave[name] for name in ("ratios", "categories", "steps")}))
    assert foretold["ratios"] == plain["ratios"]
    kinds = {"kill": "worker_killed", "crash": "node_lost"}
    assert [one["cause"] for one in foretold["incidents"]] == [kinds[kind] for kind, _ in FAULTS]
    told = [(one["cause"], one["action"]) for one in foretold["instead"]["incidents"]]
    became = [(one["cause"].replace("node_crash", "node_lost"), one["action"]) for one in gave["incidents"]]
    assert told == became
    goodput = foretold["instead"]["as_it_is"]["runtime_goodput"]
    assert goodput == pytest.approx(gave["ratios"]["runtime_goodput"], abs=NEAR)
    assert goodput > foretold["ratios_at_most"]["runtime_goodput"]
    both = jurymast(cluster, "report", "--compare", str(observed.directory), str(acting.directory))
    assert (both[0], "runtime_goodput with jurymast" in both[1]) == (0, True), both[2]
