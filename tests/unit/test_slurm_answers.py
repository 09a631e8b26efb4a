"""Slurm's answers mean what they mean by default, whatever people have set for their own use; and a task of
an array is not taken for the array, though Slurm has one number for both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jurymast.cluster import control
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.exclusion import partition_nodes
from jurymast.cluster.lift import lift
from jurymast.core.state.settings import RunPlan
from jurymast.jobs import alone, job_state, run_command
from jurymast.report.cancelling import cancel
from support.stories import Story

# Tasks 0 to 2 of array 17, of which the last to start has its number; see squeue(1) for the fields.
TASKS = """
case "$*" in
*%F*) printf '18|17|0\\n17|17|2\\n19|17|1\\n' ;;
*) printf 'COMPLETED|None|18\\nRUNNING|None|17\\nFAILED|NonZeroExitCode|19\\n' ;;
esac
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which Slurm's programs write what they are asked; `program` makes them."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    return tmp_path / "asked"


def program(asked: Path, name: str, does: str) -> None:
    path = asked.parent / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> {asked}\n{does}\n')
    path.chmod(0o755)


def lines(asked: Path) -> list[str]:
    return asked.read_text().splitlines() if asked.exists() else []


def test_variables_by_which_people_change_what_slurm_prints_reach_none_of_its_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SQUEUE_PARTITION", "SQUEUE_STATES", "SINFO_PARTITION", "SACCT_FEDERATION", "SCONTROL_ALL"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    told = run_command(["env"]).splitlines()
    assert not [line for line in told if line.startswith(("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_"))]
    assert {"SLURM_TIME_FORMAT=standard", "SLURM_CONF=/etc/slurm.conf"} <= set(told)
    assert "SLURM_TIME_FORMAT=%s" in run_command(["env"], variables={"SLURM_TIME_FORMAT": "%s"})


def test_a_partition_that_somebody_looks_at_is_not_all_there_is(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor would a node be seen that is drained, nor a small job that waits."""
    program(asked, "sinfo", '[ -n "$SINFO_PARTITION" ] || echo "n1|gpu*|idle"')
    monkeypatch.setenv("SINFO_PARTITION", "debug")
    assert partition_nodes("") == ({"n1"}, {"n1"})


def test_of_an_array_the_state_of_the_task_with_that_number_counts(asked: Path) -> None:
    """Another training would else save where this one does, or wait for one that has ended."""
    program(asked, "squeue", TASKS)
    assert job_state("17") == ("RUNNING", "None")
    assert job_state("19") == ("FAILED", "NonZeroExitCode")


def test_the_name_of_a_job_alone(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(asked, "squeue", TASKS)
    assert [alone("17"), alone("18")] == ["17_2", "17_0"]
    program(asked, "squeue", "echo '20|20|N/A'")
    assert alone("20") == "20"
    program(asked, "squeue", "exit 1")  # within the job itself nobody is asked
    for name, value in (("JOB_ID", "17"), ("ARRAY_JOB_ID", "17"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert alone("17") == "17_2"


def test_a_task_with_the_number_of_its_array_is_requeued_alone(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "CONTROLLER_RETRY_S", 0.0)
    program(asked, "squeue", TASKS)
    program(asked, "sbatch", "exit 0")
    program(asked, "sinfo", "exit 0")
    shows = "show*) echo 'JobState=RUNNING NodeList=n[1-2]' ;;"
    program(asked, "scontrol", f'case "$*" in *hostnames*) echo n1; echo n2 ;; {shows} esac')
    plan = RunPlan(
        run="r", name="r", directory=str(asked.parent), cluster="slurm", active=2, spares=0,
        ranks_per_node=1, script="x", python=sys.executable,
    )  # fmt: skip
    control.requeue(plan, Allocation("17", 0, ("n1", "n2"), "n1", 0.0), ["n2"], [], lambda text: None)
    assert control.give_back("17", "n2")
    changing = [line for line in lines(asked) if line.startswith(("scontrol update", "scontrol requeue"))]
    assert changing == [
        "scontrol update JobId=17_2 NodeList=n1",
        "scontrol requeue 17_2",
        "scontrol update JobId=17_2 NodeList=n1",
    ]
    (helper,) = (line for line in lines(asked) if line.startswith("sbatch"))
    assert "jurymast.cluster.lift 17_2 2-2" in helper


def test_an_answer_that_is_cut_short_is_no_more_than_no_answer(asked: Path) -> None:
    """The supervisor would end by it, and the next one as well."""
    shows = "*) echo JobState=COMPLETING Restarts= ;;"
    program(asked, "scontrol", f'case "$*" in *hostnames*) [ -z "$3" ] || echo n1 ;; {shows} esac')
    assert control.why_ending(Allocation("17", 0, ("n1",), "n1", 0.0)).why == "cancelled"
    assert not control.give_back("17", "n1")


def test_a_run_that_is_a_task_is_cancelled_alone(asked: Path, tmp_path: Path) -> None:
    program(asked, "squeue", TASKS)
    program(asked, "scancel", "exit 0")
    story = Story().running(3)
    directory = story.write(tmp_path / "run")
    (directory.submission / "jobs").mkdir(exist_ok=True)
    (directory.submission / "jobs" / "17").touch()
    cancel(directory, "ada")
    assert [line for line in lines(asked) if line.startswith("scancel")] == ["scancel 17_2"]


def test_a_requeued_job_is_let_go_also_if_slurmctld_is_away_at_first(asked: Path) -> None:
    """It would else wait two minutes. And a line about the cluster is no state."""
    away = 'if [ $(grep -c ^{name} {asked}) -le {often} ]; then echo "Unable to contact" >&2; exit 1; fi'
    program(
        asked, "squeue", f"{away.format(name='squeue', asked=asked, often=1)}\n"
        "printf 'CLUSTER: here\\nPENDING|BeginTime|7\\n'",
    )  # fmt: skip
    program(asked, "scontrol", away.format(name="scontrol", asked=asked, often=2))
    assert lift("7", "1-1", "n3")
    assert [line for line in lines(asked) if "update" in line][-3:] == [
        "scontrol update JobId=7 ExcNodeList=n3",
        "scontrol update JobId=7 NumNodes=1-1",
        "scontrol update JobId=7 StartTime=now+2",
    ]


def test_nobody_waits_for_a_requeued_job_that_was_cancelled(asked: Path) -> None:
    """As a job of its own, which would take a node for minutes."""
    once = f"[ $(grep -c ^squeue {asked}) -gt 2 ] && echo 'CANCELLED|None|7' || echo 'COMPLETING|None|7'"
    program(asked, "squeue", once)
    program(asked, "scontrol", "exit 0")
    assert not lift("7", "1-1", "n3")
    assert [line.partition(" ")[0] for line in lines(asked)] == ["squeue"] * 3


ENDS = """
import asyncio, threading
from jurymast.processes import end_at_once
from jurymast.supervisor.epoch import run_alone
async def work():
    asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
    return 7
end_at_once(run_alone(work()))
"""


def test_a_supervisor_s_end_waits_for_no_thread() -> None:
    """One that waits for a Slurm that is silent, or for storage: the batch process would wait for it, and the
    job, before it is requeued."""
    assert subprocess.run([sys.executable, "-c", ENDS], timeout=120.0, check=False).returncode == 7
