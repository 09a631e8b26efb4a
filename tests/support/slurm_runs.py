"""Runs on the test cluster, submitted by its unprivileged user, and the faults that they meet."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from jurymast.report.which_run import find_run
from support.runs import SCRIPTS, RunUnderTest, result
from testcluster import Cluster

# Steps are long, so that a training that waits for its fault leaves the processors to other tests.
STEPS = 130
TRAIN = ("--steps", str(STEPS), "--step-time", "0.04", "--save-every", "10 steps")


# Of a cluster with slurmdbd, which the system's Slurm brings along.
ACCOUNTS: dict[str, Any] = {"accounting": True, "slurm": "system"}

# For batch scripts: their trainings name the smallest one so.
SCRIPT_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "SUM": str(SCRIPTS / "sum_ranks.py"),
}  # fmt: skip


class SlurmRun(RunUnderTest):
    """A run on the test cluster, submitted by the unprivileged user."""

    def __init__(self, cluster: Cluster, directory: Path, job: int) -> None:
        super().__init__(directory)
        self.cluster = cluster
        self.job = job

    def job_state(self) -> str:
        return self.cluster.job(self.job).get("JobState", "")


def jurymast(cluster: Cluster, *arguments: str) -> tuple[int, str, str]:
    command = [str(cluster.python.parent / "jurymast"), *arguments]
    done = cluster.login(command, env={"OMP_NUM_THREADS": "1"}, timeout_s=240, check=False)
    return done.returncode, done.stdout, done.stderr


@contextmanager
def running_cluster(place: Path, name: str = "", *, purge: bool = False, **options: Any) -> Iterator[Cluster]:
    """A cluster in this directory, or in one of this name beside it, made with these options of `Cluster.up`;
    the test is skipped where there can be none."""
    for possible, what in (
        (sys.platform == "linux", "Linux"),
        (os.geteuid() == 0, "root"),
        (Path("/etc/debian_version").exists(), "Debian or Ubuntu"),
    ):
        if not possible:
            pytest.skip(f"a Slurm cluster on one machine needs {what}")
    running = Cluster.up(directory=place.with_name(f"{place.name}-{name}") if name else place, **options)
    # Of tests that were killed: what those tell of nodes is not true of this cluster's.
    for left in running.shared.glob("test_*"):
        shutil.rmtree(left, ignore_errors=True)
    try:
        yield running
    finally:
        running.down(purge=purge)


SOON_S = 4


def hurried(cluster: Cluster, job: int) -> dict[str, str]:
    """The job's record. If it was requeued, Slurm is told to start it soon: by itself it waits for two
    minutes, and within the second of the requeue slurmd refuses the job's credential, which ends it."""
    record = cluster.job(job)
    assert record["JobState"] not in ("FAILED", "CANCELLED"), record
    waits = record["JobState"] == "PENDING" and record["EligibleTime"] != "Unknown"
    if waits and datetime.fromisoformat(record["EligibleTime"]).timestamp() > time.time() + 2 * SOON_S:
        command = ["scontrol", "update", f"JobId={job}", f"StartTime=now+{SOON_S}"]
        cluster.login(command, root=True, check=False)
    return record


def submit(
    cluster: Cluster,
    folder: Path,
    *options: str,
    arguments: tuple[str, ...] = TRAIN,
    script: Path = SCRIPTS / "train_tiny.py",
) -> SlurmRun:
    runs = cluster.shared / folder.name
    out = ("--out", str(cluster.shared / f"{folder.name}.json"))
    code, told, error = jurymast(
        cluster, "submit", "--runs", str(runs), "--parsable", *options, "--",
        str(script), *arguments, *out,
    )  # fmt: skip
    assert code == 0, error
    job = told.strip()
    return SlurmRun(cluster, find_run(job, runs).root, int(job))


def submit_script(cluster: Cluster, work: Path, script: str, *options: str) -> SlurmRun:
    """A batch script, from a new directory `work`."""
    cluster.login(["mkdir", "-p", str(work)])
    (work / "job.sbatch").write_text(script)
    job = submit_again(cluster, work, *options)
    return SlurmRun(cluster, find_run(str(job), work / "runs").root, job)


def submit_again(cluster: Cluster, work: Path, *options: str) -> int:
    """The batch script that is there: another job of it."""
    done = cluster.login(
        [str(cluster.python.parent / "jurymast"), "submit", "--parsable", *options, "job.sbatch"],
        cwd=work, timeout_s=240, check=False,
        env={**SCRIPT_ENVIRONMENT, "PATH": f"{cluster.python.parent}:/usr/bin:/bin",
             "JURYMAST_RUNS": str(work / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def policy_file(cluster: Cluster, folder: Path, text: str) -> str:
    """A policy that the cluster's user can read."""
    path = cluster.shared / f"{folder.name}.yaml"
    path.write_text(f"{text}\n")
    path.chmod(0o644)
    return str(path)


def weights(cluster: Cluster, folder: Path) -> str:
    return str(result(cluster.shared / f"{folder.name}.json")["sha256"])


def power_loss(run: SlurmRun, node: str) -> None:
    run.cluster.fault("power-loss", node)


def crash(run: SlurmRun, node: str) -> None:
    run.cluster.fault("crash", node)


def freeze(run: SlurmRun, node: str) -> None:
    run.cluster.fault("freeze", node)


def kill_rank(run: SlurmRun, node: str) -> None:
    run.cluster.fault("kill", node, pid=run.pids(node)[0], signal="KILL")


def stop_rank(run: SlurmRun, node: str) -> None:
    run.cluster.fault("kill", node, pid=run.pids(node)[0], signal="STOP")
