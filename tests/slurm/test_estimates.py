"""Estimates of jobs that jurymast did not launch, from a real slurmdbd: what
the jobs' own records say lies within them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.outputs import checked
from support.slurm_runs import ACCOUNTS, hurried, jurymast, running_cluster
from testcluster import Cluster
from testcluster.processes import wait_until

pytestmark = pytest.mark.slurm

# Steps of a quarter of a second, a line after each second one, a checkpoint after each tenth. A record of
# each step is in `steps.JOB`. A job of two nodes has a task on each.
TRAIN = """
[[ $SLURM_PROCID == 0 ]] || { until [[ -e ended.$SLURM_JOB_ID ]]; do sleep 0.2; done; exit 0; }
step=$(cat kept.$SLURM_JOB_ID 2>/dev/null || echo 0)
while ((step < $1)); do
  begun=$(date +%s.%N); sleep 0.25; step=$((step + 1))
  echo $step $begun $(date +%s.%N) >> steps.$SLURM_JOB_ID
  ((step % 2)) || echo "$(date '+%F %T,%3N') INFO step $step loss 0.1"
  ((step % 10)) || echo $step > kept.$SLURM_JOB_ID
  [[ $step != "$2" ]] || exit 3
done
touch ended.$SLURM_JOB_ID
"""
# It stays after its step, so that Slurm has to end it if the job is requeued, which its accounts show. By a
# script that ends by itself, a requeue by hand cannot be told from one of the script's own.
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=log-%j.out --open-mode=append --requeue
srun --kill-on-bad-exit bash train.sh "$@" || { code=$?; sleep 3; exit $code; }
"""
LONG = "4000"
SECOND_S = 1.0  # Slurm's accounting tells whole ones


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One with accounting."""
    with running_cluster(place, "accounts", nodes=4, **ACCOUNTS) as running:
        yield running


class Jobs:
    """Jobs that sbatch submits from one directory."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        self.cluster, self.work = cluster, work
        cluster.login(["mkdir", "-p", str(work)])
        (work / "train.sh").write_text(TRAIN)
        (work / "job.sbatch").write_text(JOB)

    def submit(self, *words: str) -> int:
        done = self.cluster.login(["sbatch", "--parsable", *words], cwd=self.work)
        return int(done.stdout)

    def steps(self, job: int) -> list[tuple[int, float]]:
        """(step, seconds) of each step that was done."""
        file = self.work / f"steps.{job}"
        lines = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
        return [(int(step), float(end) - float(begun)) for step, begun, end in lines]

    def wait_step(self, job: int, step: int) -> None:
        wait_until(
            lambda: any(done >= step for done, _ in self.steps(job)), 200.0, f"step {step} of {job}", 0.1
        )

    def run_again(self, job: int) -> None:
        """Wait until a job is requeued, and have it start without Slurm's delay."""
        self.cluster.wait_job(job, "PENDING")
        wait_until(
            lambda: hurried(self.cluster, job)["JobState"] == "RUNNING", 200.0, f"job {job} to run again", 1.0
        )

    def report(self, *words: str) -> dict[str, Any]:
        code, told, error = jurymast(self.cluster, "report", "--slurm", *words, "--json")
        assert code == 0, error
        report: dict[str, Any] = json.loads(told)
        of_several = ("--user",) if "jobs" in report else ()  # an array's have the same fields
        checked(report, "report", *words, *of_several)
        return report

    def checked(self, job: int, nodes: int = 2) -> dict[str, Any]:
        """The job's report, of which the sums are exact and the steps are those that it did."""
        report = self.report(str(job))
        assert report["estimate"]
        assert sum(report["categories"].values()) == pytest.approx(report["total_node_seconds"], abs=1e-5)
        first = dict(reversed(self.steps(job)))
        counted = nodes * sum(first.values())
        low = report["categories"].get("step", 0.0)
        assert low <= counted + nodes * SECOND_S, report["categories"]
        most = low + report["categories"].get("unknown", 0.0)
        assert counted <= most + nodes * SECOND_S, report["categories"]
        assert low > 0.5 * counted, "of most steps is known that they were done"
        return report


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> Jobs:
    return Jobs(cluster, cluster.shared / tmp_path.name)


def test_jobs_that_end_in_each_way(cluster: Cluster, jobs: Jobs) -> None:
    done = jobs.submit("job.sbatch", "30")
    failed = jobs.submit("job.sbatch", "40", "25")
    cluster.wait_job(done, "COMPLETED")
    cluster.wait_job(failed, "FAILED")
    cancelled = jobs.submit("job.sbatch", LONG)
    late = jobs.submit("job.sbatch", LONG)
    for job in (cancelled, late):
        jobs.wait_step(job, 20)
    cluster.login(["scancel", str(cancelled)])
    cluster.slurm(["scontrol", "update", f"JobId={late}", "EndTime=now+2"])
    cluster.wait_job(cancelled, "CANCELLED")
    cluster.wait_job(late, "TIMEOUT")
    found = {job: jobs.checked(job) for job in (done, failed, cancelled, late)}
    assert [(each["state"], each["provisional"]) for each in found.values()] == [
        ("completed", False), ("failed", False), ("cancelled", False), ("timeout", False),
    ]  # fmt: skip
    assert [one["cause"] for one in found[failed]["incidents"]] == ["worker_exit"]
    assert not any(found[job]["incidents"] for job in (done, cancelled, late))
    code, told, _ = jurymast(cluster, "report", "--slurm", str(done))
    assert (code, told.startswith(f"ESTIMATE of Slurm job {done}: completed (final")) == (0, True)


def test_a_job_that_is_requeued_by_hand_and_for_a_lost_node(cluster: Cluster, jobs: Jobs) -> None:
    job = jobs.submit("job.sbatch", "80")
    jobs.wait_step(job, 15)
    cluster.login(["scontrol", "requeue", str(job)])
    jobs.run_again(job)
    jobs.wait_step(job, 35)
    cluster.fault("crash", cluster.job(job)["BatchHost"])
    jobs.run_again(job)
    cluster.wait_job(job, "COMPLETED")
    report = jobs.checked(job)
    assert report["estimate"]["attempts"] == 3
    assert [one["cause"] for one in report["incidents"]] == ["job_ended", "node_lost"]
    assert report["categories"]["rework"] > 2.0, "steps 11 to 15, and 31 to 35, on two nodes"
    assert report["categories"]["requeue_wait"] > 0.0
    assert report["categories"]["detection"] > 10.0, "until Slurm gave the node up"
    assert report["mtbf"]["failures"] == 1


def test_an_array_and_all_jobs_of_a_user(cluster: Cluster, jobs: Jobs) -> None:
    array = jobs.submit("--nodes=1", "--array=1-2", "--output=log-%A-%a.out", "job.sbatch", "12")
    cluster.wait_job(array, "COMPLETED")

    def known() -> bool:
        """Slurm's accounts learn a little later that these jobs are tasks of an array."""
        tasks = jobs.report(str(array)).get("jobs", [])
        return [one["state"] for one in tasks] == ["completed"] * 2

    wait_until(known, 200.0, "its tasks", 1.0)
    tasks = jobs.report(str(array))
    assert [one["run"] for one in tasks["jobs"]] == [f"{array}_1", f"{array}_2"]
    assert all(one["estimate"]["step_lines"] > 4 for one in tasks["jobs"])
    user = cluster.login(["id", "-un"]).stdout.strip()
    view = jobs.report("--user", user, "--since", "1h")
    assert {f"{array}_1", f"{array}_2"} <= {one["run"] for one in view["jobs"]}
    assert 0.0 < view["allocation_goodput"] < view["allocation_goodput_at_most"] <= 1.0


def test_what_is_wrong(cluster: Cluster, jobs: Jobs) -> None:
    code, _, error = jurymast(cluster, "report", "--slurm", "99999")
    assert (code, "Slurm's accounting has no job 99999" in error) == (67, True)
    job = jobs.submit("job.sbatch", LONG)
    jobs.wait_step(job, 6)
    wait_until(lambda: jobs.report(str(job))["state"] == "running", 200.0, "the accounting to follow", 1.0)
    assert jobs.report(str(job))["provisional"]
