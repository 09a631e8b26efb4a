"""One of an array's tasks has the array's own number: what is done to its job is done to it alone. And what
people have set for their own use of Slurm's commands changes no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.waiting import ASK_POLL_S, wait_until
from testcluster import Cluster

pytestmark = pytest.mark.slurm

LIMIT_S = 120.0
ASK = """
import json, sys, time
from jurymast.cluster.control import limit_in_s
from jurymast.jobs import alone, job_fields, job_state
for job in sys.argv[1:]:
    fields = job_fields(job, utc=True)
    print(json.dumps([alone(job), job_state(job)[0], fields["Restarts"], limit_in_s(fields, time.time())]))
"""
PEOPLES = {"SLURM_TIME_FORMAT": "relative", "SQUEUE_STATES": "PENDING", "SQUEUE_PARTITION": "debug"}


def numbers(cluster: Cluster, array: str) -> dict[str, str]:
    """The place in the array of each task that runs, by its number."""
    told = cluster.slurm(["squeue", "--noheader", f"--jobs={array}", "--states=RUNNING", "--format=%A %K"])
    return dict(line.split() for line in told.splitlines())


def asked(cluster: Cluster, *jobs: str) -> dict[str, list[Any]]:
    """What jurymast learns of these jobs: name, state, restarts, seconds until the time limit."""
    done = cluster.login([str(cluster.python), "-c", ASK, *jobs], env=PEOPLES, timeout_s=LIMIT_S)
    return dict(zip(jobs, map(json.loads, done.stdout.splitlines()), strict=True))


def test_a_task_is_told_from_its_array_and_requeued_alone(cluster: Cluster) -> None:
    script = "#!/bin/sh\nexec sleep 600\n"
    options = ("--array=0-1", "--nodes=1", "--exclusive", "--time=20", "--output=/dev/null")
    array = str(cluster.sbatch(script, *options))
    wait_until("both tasks", lambda: len(numbers(cluster, array)) == 2, LIMIT_S, ASK_POLL_S)
    places = numbers(cluster, array)
    (other,) = places.keys() - {array}  # which is among them, or there was nothing to tell
    told = asked(cluster, array, other)
    for number, (name, state, restarts, left_s) in told.items():
        assert (name, state, restarts) == (f"{array}_{places[number]}", "RUNNING", "0")
        assert 1000.0 < left_s <= 1200.0
    cluster.login(["scontrol", "requeue", told[array][0]])
    wait_until("its requeue", lambda: asked(cluster, array)[array][2] == "1", LIMIT_S, ASK_POLL_S)
    assert asked(cluster, other)[other][1:3] == ["RUNNING", "0"]
    cluster.login(["scancel", told[other][0]])
    wait_until("its end", lambda: other not in numbers(cluster, array), LIMIT_S, ASK_POLL_S)
    assert asked(cluster, array)[array][1] in ("PENDING", "RUNNING", "CONFIGURING")
