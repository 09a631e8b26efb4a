"""What is read off Slurm's answers: why a job ends, when it may start again, where its helper may run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from jurymast.cluster.control import kill_in_s, reason_of
from jurymast.cluster.lift import REVOKED_S, lift, size_changes, start_time
from jurymast.cluster.sbatch import seconds_of, split_command_line, where_options
from jurymast.jobs import utc_time
from jurymast.report.doctor import YES, _clock


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({"JobState": "RUNNING"}, "running"),
        # while Slurm sends the very signal because of which it is asked, and while a node is given back
        ({"JobState": "SIGNALING"}, "running"),
        ({"JobState": "RUNNING,SIGNALING"}, "running"),
        ({"JobState": "RESIZING"}, "running"),
        ({"JobState": "SUSPENDED"}, "running"),
        ({"JobState": "SIGNALING", "PreemptTime": "2026-01-02T03:04:05"}, "preempted"),
        ({"JobState": "SIGNALING,COMPLETING", "Restarts": "2"}, "requeued"),
        ({"JobState": "CANCELLED"}, "cancelled"),
        ({"JobState": "CANCELLED,COMPLETING"}, "cancelled"),
        ({"JobState": "TIMEOUT"}, "timeout"),
        ({"JobState": "PREEMPTED"}, "preempted"),
        # 22.05 says only this while a job is completing
        ({"JobState": "COMPLETING", "RunTime": "00:00:09", "TimeLimit": "365-00:00:00"}, "cancelled"),
        ({"JobState": "COMPLETING", "RunTime": "01:00:02", "TimeLimit": "01:00:00"}, "timeout"),
        (
            {"JobState": "COMPLETING", "Reason": "TimeLimit", "RunTime": "00:00:58", "TimeLimit": "00:02:00"},
            "timeout",
        ),
        ({"JobState": "COMPLETING", "Reason": "NodeDown", "RunTime": "00:00:58"}, "node_fail"),
        ({"JobState": "COMPLETING", "Reason": "DeadLine", "RunTime": "00:00:58"}, "deadline"),
        ({"JobState": "COMPLETING", "Reason": "OutOfMemory", "RunTime": "00:00:58"}, "out_of_memory"),
        ({"JobState": "COMPLETING", "Reason": "NodeDown", "Restarts": "2"}, "requeued"),
        ({"JobState": "COMPLETING", "Reason": "None", "RunTime": "00:00:58"}, "cancelled"),
        ({"JobState": "COMPLETING", "PreemptTime": "2026-01-02T03:04:05"}, "preempted"),
        ({"JobState": "COMPLETING", "Restarts": "2"}, "requeued"),
        ({"JobState": "PENDING"}, "requeued"),
        ({"JobState": "COMPLETING", "TimeLimit": "UNLIMITED", "RunTime": "9-00:00:00"}, "cancelled"),
        ({"JobState": "SPECIAL_EXIT"}, "special_exit"),
        ({}, "unknown"),
    ],
)
def test_why_a_job_ends(job: dict[str, str], reason: str) -> None:
    assert reason_of(job, restarts=1) == reason


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_a_preempted_job_has_its_grace_time_also_while_it_is_being_signalled(state: str) -> None:
    job = {"JobState": state, "EndTime": "2026-11-26T13:32:35", "PreemptTime": "2026-11-26T13:31:35"}
    now = utc_time("2026-11-26T13:31:36")
    assert kill_in_s(job, 5.0, now) == 64.0
    assert kill_in_s({**job, "JobState": "COMPLETING", "EndTime": "2026-11-26T13:31:35"}, 5.0, now) == 4.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:09", 9),
        ("01:02:03", 3723),
        ("2-00:00:01", 172801),
        ("UNLIMITED", None),
        ("", None),
        ("5:0", 300),
    ],
)
def test_slurm_times(text: str, seconds: int | None) -> None:
    assert seconds_of(text) == seconds


def test_a_requeued_job_starts_two_seconds_after_its_requeue_by_slurms_own_clock() -> None:
    assert start_time({"SubmitTime": "2026-11-20T13:59:59"}) == "2026-11-20T14:00:01"
    assert start_time({"SubmitTime": "Unknown"}) == "now+2"
    assert start_time({}) == "now+2"


TOOL = """#!/bin/sh
case "$0 $*" in
*squeue*) echo 'PENDING|BeginTime|7' ;;
*"show config"*) echo "Configuration data as of $(date +%FT%T)" ;;
*"show job"*) echo "JobId=7 UserId=a(0) GroupId=a(0) SubmitTime=$(date -d @$REQUEUED +%FT%T) Command=x" ;;
*StartTime=*) date -d "${3#StartTime=}" +%s >> "$STARTS" ;;
esac
"""


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """squeue and scontrol, which print and read times as Slurm's commands do."""
    for name in ("squeue", "scontrol"):
        (folder / name).write_text(TOOL)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("STARTS", str(folder / "starts"))


@pytest.mark.parametrize("half", [0, 1])
def test_a_job_requeued_in_the_hour_that_comes_twice_starts_in_the_right_one(
    half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would wait for an hour."""
    fake_slurm(tmp_path, monkeypatch)
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")  # as in Berlin
    requeued = 1_792_888_200 + 3600 * half  # 2026-10-25, half past two by the clock
    monkeypatch.setenv("REQUEUED", str(requeued))
    assert lift("7", "1-1", "")
    assert (tmp_path / "starts").read_text() == f"{requeued + REVOKED_S}\n"


@pytest.mark.parametrize("half", [-1, 1])
def test_the_clocks_agree_in_the_hour_that_comes_twice(
    half: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm(tmp_path, monkeypatch)
    # Summer time ends half an hour ago, or in half an hour. As it is written, it ends by its own clock.
    begins, ends = (time.gmtime(time.time() + s) for s in (-60 * 86400, 3600 - 1800 * half))
    rules = [f"{one.tm_yday - 1}/{one.tm_hour}:{one.tm_min:02}:{one.tm_sec:02}" for one in (begins, ends)]
    monkeypatch.setenv("TZ", f"STD0DST-1,{','.join(rules)}")
    time.tzset()
    try:
        assert _clock()[0] == YES
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("each", "tasks", "wanted", "changes"),
    [
        ("1", "4", "2-4", ["NumNodes=2-4"]),
        ("1", "4", "2-3", ["NumNodes=2-3", "NumTasks=3"]),
        ("8", "32", "2-3", ["NumNodes=2-3", "NumTasks=24"]),
        ("2", "4", "2-2", ["NumNodes=2-2"]),
        ("2", "3", "2-2", ["NumNodes=2-2"]),
        ("0", "4", "2-3", ["NumNodes=2-3"]),
        ("", "", "2-3", ["NumNodes=2-3"]),
    ],
)
def test_a_requeued_job_has_tasks_for_as_many_nodes_as_it_can_get(
    each: str, tasks: str, wanted: str, changes: list[str]
) -> None:
    """The node that was lost has been given back, so the job seems to have had fewer."""
    fields = {"NumNodes": "1", "NtasksPerN:B:S:C": f"{each}:0:*:*", "NumTasks": tasks}
    assert size_changes(fields, wanted, "") == changes
    assert size_changes(fields, wanted, "n1,n2") == ["ExcNodeList=n1,n2", *changes]


def test_the_helper_job_runs_where_the_job_may_run() -> None:
    options = [
        "--partition=train",
        "-A",
        "team",
        "--gpus-per-node=8",
        "-qhigh",
        "--reservation",
        "r1",
        "--time=1",
    ]

    def kept(options: list[str]) -> list[str]:
        return where_options(split_command_line(options, {}).options)

    assert kept(options) == ["--partition=train", "--account=team", "--qos=high", "--reservation=r1"]
    assert kept(["--exclusive", "--mem=0"]) == []
