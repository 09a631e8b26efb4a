"""Jobs that are only observed (`submit --observe`): they run as under sbatch, and what the report foretells
of them is what jurymast gives where it acts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jurymast.cli.options import find_run
from support.outputs import checked
from support.runs import SCRIPTS
from support.slurm_runs import ACCOUNTS, hurried, jurymast, running_cluster
from testcluster import Cluster
from testcluster.processes import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.alone]

LIMIT_S = 240.0
JOB = """#!/bin/bash
#SBATCH --nodes=3 --ntasks-per-node=1 --output=log-%j.out --open-mode=append --requeue
#JURYMAST --train yes
srun --kill-on-bad-exit python $TRAIN . $1 || scontrol requeue $SLURM_JOB_ID
"""


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One with accounting."""
    with running_cluster(place, "observed", nodes=6, **ACCOUNTS) as running:
        yield running


class Job:
    """A job whose command line is `words`, submitted from a directory of its own."""

    def __init__(self, cluster: Cluster, work: Path, *words: str, script: str = JOB) -> None:
        self.cluster, self.work = cluster, work
        cluster.login(["mkdir", "-p", str(work)])
        (work / "job.sbatch").write_text(script)
        done = cluster.login(
            list(words), cwd=work, timeout_s=LIMIT_S,
            env={
                "PATH": f"{cluster.python.parent}:/usr/bin:/bin", "JURYMAST_RUNS": str(work / "runs"),
                "TRAIN": str(SCRIPTS / "train_by_itself.py"),
            },
        )  # fmt: skip
        self.number = int(done.stdout.strip())

    def step(self) -> int:
        """The newest step that was ever done."""
        file = self.work / "steps"
        return max(map(int, file.read_text().split()), default=0) if file.exists() else 0

    def wait_step(self, step: int) -> None:
        wait_until(lambda: self._reached(step), LIMIT_S, f"step {step} of {self.number}", 0.5)

    def _reached(self, step: int) -> bool:
        if self.step() >= step:
            return True
        assert hurried(self.cluster, self.number)["JobState"] != "COMPLETED"
        return False

    def strike(self, kind: str, rank: int) -> None:
        node, pid = (self.work / f"rank-{rank}").read_text().split()
        if kind == "kill":
            self.cluster.fault("kill", node, pid=int(pid), signal="KILL")
        else:
            self.cluster.fault(kind, node)

    @property
    def directory(self) -> Path:
        return find_run(str(self.number), self.work / "runs").root

    def report(self, *words: str) -> dict[str, Any]:
        of = str(self.number) if words else str(self.directory)
        code, told, error = jurymast(self.cluster, "report", of, "--json", *words)
        assert code == 0, error
        found: dict[str, Any] = checked(json.loads(told), "report", of, *words)
        return found


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
EACH = 40  # steps
# Of a job of a minute: neither Slurm nor the log tell whether a lost node fell silent, which is noticed a
# second later than a crash, and how long the script's imports took, which forked ranks do without.
NEAR = 0.06


@pytest.mark.long
def test_what_is_foretold_is_what_jurymast_gives(cluster: Cluster, tmp_path: Path) -> None:
    """The same faults at the same steps, of a job that requeues itself and of one that jurymast launches."""
    work, steps = cluster.shared / tmp_path.name, str(EACH * (len(FAULTS) + 1))
    ours = ("jurymast", "submit", "--parsable", "--spares", "2")
    observed = Job(cluster, work / "observed", *ours, "--observe", "job.sbatch", steps)
    play(observed)
    foretold, plain = observed.report(), observed.report("--slurm")
    cluster.repair_all()
    acting = Job(cluster, work / "acting", *ours, "job.sbatch", steps)
    play(acting)
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


def play(job: Job) -> None:
    """Let each fault strike, and the job end."""
    for number, (kind, rank) in enumerate(FAULTS, 1):
        job.wait_step(EACH * number + 5)
        job.strike(kind, rank)
    job.wait_step(EACH * (len(FAULTS) + 1))
    job.cluster.wait_job(job.number, "COMPLETED", deadline_s=LIMIT_S)
    wait_until(lambda: job.report("--slurm")["state"] == "completed", LIMIT_S, "the accounts", 1.0)
