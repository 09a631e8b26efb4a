"""What is left of a run where people look first: the end of the job's log, and the job's comment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.cluster.kept import stamp_of
from support.slurm_runs import TRAIN, submit
from support.waiting import ASK_POLL_S, wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


@pytest.mark.parametrize("own", ["", "for the paper"])
def test_a_job_ends_with_the_run_s_summary(cluster: Cluster, tmp_path: Path, own: str) -> None:
    given = (f"--comment={own}",) if own else ()
    steps = (*TRAIN, "--steps", "40")
    run = submit(cluster, tmp_path, "--nodes", "1", "--spares", "0", *given, arguments=steps)
    run.wait_end()
    wait_until("the job's end", lambda: run.job_state() == "COMPLETED", poll_s=ASK_POLL_S)
    log = (run.directory.submission / f"job-{run.job}.log").read_text()
    ended, ratios, more = (line.partition(" jurymast: ")[2] for line in log.splitlines()[-3:])
    assert ended.startswith("the run succeeded: step 40 after ")
    assert ratios.startswith("runtime goodput ")
    assert more == f"jurymast report {run.directory.root.name} shows where the time went"
    left = json.loads(run.directory.summary_file.read_text())
    assert left["stamp"] == stamp_of(run.directory), "a fleet need not read the journal"
    asked = ["squeue", "--noheader", "--states=all", f"--jobs={run.job}", "--format=%k"]
    comment = cluster.login(asked).stdout.strip()
    if own:
        assert comment == own
    else:
        assert comment.startswith("jurymast: succeeded, goodput ")
        assert comment.endswith(f", 0 incidents, run {run.directory.root.name}")
