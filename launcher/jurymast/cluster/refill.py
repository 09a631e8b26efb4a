"""Small jobs, each of which brings one more node to a run while it goes on: how they are submitted, found and
ended, and what runs in one: an agent that joins the run as a spare. Its ranks see the run's own job."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.control import ends_in_s, outlive_memory, time_of
from jurymast.cluster.sbatch import VISIBLE, CommandLine, split_command_line, words_of
from jurymast.cluster.sbatch_command import accepted, sbatch
from jurymast.core.judges import slurm_variables
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import compressed
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import ClusterUnavailableError, SubmissionError
from jurymast.interpreter import run_module
from jurymast.jobs import run_command
from jurymast.reading import to_begin
from jurymast.rundir import RunDirectory, write_json

log = logging.getLogger("jurymast.refill")

# Of the run's own options, those that are about the run's job alone, and those that one node is given anew.
OF_THE_RUN = frozenset({
    "array", "begin", "chdir", "comment", "deadline", "dependency", "error", "exclude", "export",
    "export-file", "get-user-env", "gpus", "hold",
    "input", "job-name", "mail-type", "mail-user", "no-kill", "no-requeue", "nodefile", "nodelist", "nodes",
    "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition", "quiet", "requeue", "signal",
    "spread-job", "switches", "tasks-per-node", "test-only", "time", "time-min", "use-min-nodes", "wait",
    "wait-all-nodes", "wrap",
})  # fmt: skip
# A small job that Slurm would end before its node could be of use is not asked for (seconds).
LEAST_S = 120.0
# How long sbatch may take. One that has submitted the job after all is noticed when Slurm is next asked.
ASK_LIMIT_S = 60.0
# In these states it has, or may get, its node; before the last it has none.
ALIVE = {"PENDING": False, "CONFIGURING": False, "RUNNING": True, "SIGNALING": True, "SUSPENDED": True}
# GPUs, and what a node's prolog, or its system, sets.
DEVICES = frozenset({*VISIBLE, "GPU_DEVICE_ORDINAL"})
OF_A_PLACE = frozenset({"HOSTNAME", "TMPDIR", "XDG_RUNTIME_DIR"})
# How long to wait for what the run's first agents write (seconds).
VARIABLES_LIMIT_S, POLL_S = 20.0, 0.2
# What Slurm says of the node, not of the job: an agent's own stay, or it has none.
OF_A_NODE = re.compile(
    r"SLURMD?_(NODEID|PROCID|LOCALID|GTIDS|TASK_PID|TOPOLOGY_ADDR|TOPOLOGY_ADDR_PATTERN|CPUS_ON_NODE|"
    r"NODENAME|JOB_GPUS|STEP_GPUS|(CPU|MEM|GPU)_BIND\w*)$"
)


def job_name(plan: RunPlan, number: int) -> str:
    return f"jurymast-refill-{plan.run}-{number}"


def variables_file(directory: RunDirectory) -> Path:
    return directory.submission / "refill-variables.json"


# ---- what the supervisor asks of Slurm


def ask(plan: RunPlan, allocation: Allocation, number: int, exclude: Sequence[str]) -> str:
    """Submit small job `number`; returns its id. Raises SubmissionError with Slurm's own words, or
    ClusterUnavailableError."""
    left_s = ends_in_s(allocation)
    if left_s is not None and left_s < LEAST_S:
        raise SubmissionError(f"the job reaches its time limit in {left_s:.0f} s")
    try:
        asked = command(plan, allocation, number, exclude, left_s)
        return accepted(sbatch(asked, limit_s=ASK_LIMIT_S).stdout)[0]
    except OSError as error:
        raise SubmissionError(f"sbatch cannot be started: {error.strerror}") from error


def command(
    plan: RunPlan, allocation: Allocation, number: int, exclude: Sequence[str], left_s: float | None
) -> list[str]:
    """sbatch's command line: the run's own options for one node, so long as the run has left (`left_s`;
    infinity: no limit; None: unknown), and none of the nodes of `exclude`."""
    limit = [] if left_s is None else ["UNLIMITED" if left_s == math.inf else str(math.ceil(left_s / 60.0))]
    folder = RunDirectory(plan.directory).submission
    return [
        *for_one_node(plan, allocation, exclude), *(f"--time={one}" for one in limit),
        f"--chdir={folder}", f"--output={folder}/refill-%j.log", f"--job-name={job_name(plan, number)}",
        wrapping(*agent_of(plan.directory, number, allocation.key), python=plan.python),
    ]  # fmt: skip


def agent_of(directory: str, number: int, key: str) -> list[str]:
    """The module that runs in small job `number` for the allocation `key`, and its arguments."""
    return ["jurymast.agent", directory, "--refill", str(number), "--allocation", key, "--end-as", "refill"]


def for_one_node(plan: RunPlan, allocation: Allocation, exclude: Sequence[str]) -> list[str]:
    """The part of such a command line that says which node is asked for."""
    words = ["sbatch", "--parsable", *own_options(plan)]
    partition = partition_of(plan, allocation)
    words += [f"--partition={partition}"] if partition else []
    out = tuple(dict.fromkeys((*plan.excluded_at(time.time()), *exclude)))
    words += [f"--exclude={compressed(out)}"] if out else []
    words += ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--no-requeue", "--export=ALL"]
    return [*words, *outlive_memory(), "--open-mode=append"]


def given(plan: RunPlan) -> CommandLine:
    """What the run was submitted with."""
    return split_command_line((*plan.head_options, *plan.sbatch_options), {})


def own_options(plan: RunPlan) -> list[str]:
    """Of the run's own options those that each node is asked for with."""
    line = given(plan)
    words = words_of(line.options, OF_THE_RUN)
    if (gpus := line.last("gpus")) is not None:
        words.append(f"--gpus={slurm_variables.scaled(gpus, 1, plan.nodes)}")
    return words


def partition_of(plan: RunPlan, allocation: Allocation) -> str:
    return allocation.partition or given(plan).last("partition") or ""


def wrapping(module: str, *arguments: str, python: str) -> str:
    """sbatch's option by which the job is this module of ours."""
    return f"--wrap=exec {shlex.join(run_module(module, *arguments, python=python))}"


def look(plan: RunPlan) -> list[SmallJob]:
    """Those of the run that wait or run. Raises ClusterUnavailableError."""
    told = run_command(["squeue", "--noheader", "--me", "--format=%i|%T|%N|%S|%j"], utc=True)
    return found_in(told, job_name(plan, 0)[:-1])


def found_in(told: str, prefix: str) -> list[SmallJob]:
    """The same from squeue's lines; their names begin with `prefix`."""
    found = []
    for line in told.splitlines():
        job, state, node, starts, name = (*line.strip().split("|", 4), "", "", "", "", "")[:5]
        number = name.removeprefix(prefix)
        if name == number or not number.isdecimal() or state not in ALIVE:
            continue
        runs = ALIVE[state]
        found.append(SmallJob(int(number), job, node if runs else "", None if runs else time_of(starts)))
    return found


def end(job: str) -> None:
    """Raises ClusterUnavailableError."""
    run_command(["scancel", job])


def end_all(plan: RunPlan) -> None:
    """End all small jobs of a run that ends, or is requeued. Their agents have left, or cannot. What they
    were to know goes as well: a batch script's variables may be secrets."""
    if not plan.may_refill:
        return
    with suppress(OSError):
        variables_file(RunDirectory(plan.directory)).unlink(missing_ok=True)
    try:
        if jobs := [one.job for one in look(plan)]:
            run_command(["scancel", *jobs])
    except ClusterUnavailableError as error:
        log.warning("small jobs of the run may be left: %s", error)


# ---- what runs in a small job


def root_file_system() -> str:
    """The type of the file system at /, which is another one in most containers."""
    mounts = [
        line.split() for line in foreign.read("/proc/self/mounts", foreign.SCRIPT_BYTES_MAX).splitlines()
    ]
    return next((os.fsdecode(one[2]) for one in reversed(mounts) if one[1:2] == [b"/"]), "")


def keep_variables(directory: RunDirectory, plan: RunPlan, variables: Mapping[str, str]) -> None:
    """Keep what Slurm has told an agent of the run's own job, for those that come later; of a batch script's
    agent all that its step has set, and of one whose node may come from a pool all, because what waits there
    has another run's. Best effort."""
    whole = plan.batch or plan.pooled
    told = {n: value for n, value in variables.items() if whole or slurm_variables.OF_A_JOB.match(n)}
    with suppress(OSError):
        write_json(variables_file(directory), {"root": root_file_system(), "variables": told})


def variables_in(
    own: Mapping[str, str], told: Mapping[str, str], number: int, nodes: int, *, pooled: bool = False
) -> dict[str, str]:
    """The environment of the agent of small job `number`, which has the variables `own`: it sees the job of
    the run, which has so many `nodes`, as its agents were `told`, and its number is no other's. `pooled`: of
    its own it keeps only what Slurm and the node have set, because another run may have submitted it."""
    kept = {n: value for n, value in own.items() if not (_of_the_run(n) or (pooled and not _of_the_node(n)))}
    theirs = {name: value for name, value in told.items() if not (OF_A_NODE.match(name) or name in DEVICES)}
    for name in OF_A_PLACE & theirs.keys():
        del theirs[name]
    place = str(nodes - 1 + number)
    numbers = {"SLURM_NODEID": place, "SLURM_PROCID": place, "SLURM_GTIDS": place, "SLURM_LOCALID": "0"}
    return {**kept, **theirs, **numbers}


def _of_the_run(name: str) -> bool:
    ours = OF_A_NODE.match(name) or slurm_variables.OF_THE_USER.match(name)
    return name.startswith("SLURM") and not ours


def _of_the_node(name: str) -> bool:
    return name.startswith("SLURM") or name in DEVICES or name in OF_A_PLACE


def become(directory: RunDirectory, number: int, key: str) -> int | None:
    """Give this process the variables of the agent of small job `number`, which is for the allocation `key`.
    Returns its exit code instead if there is nothing to do, or no way. It waits for what the run's first
    agents write."""
    plan, allocation = to_begin(directory.own_plan), to_begin(partial(Allocation.load, directory))
    if allocation.key != key:
        log.info("the run has given back the allocation %s that this node was for", key)
        return 0
    if foreign.exists(directory.outcome_file):  # Slurm could not be asked to end this job at the run's end
        log.info("the run has ended, or is being requeued")
        return 0
    told = _told(directory)
    if told is None:
        log.error("%s cannot be read: ranks here would not see the run's job", variables_file(directory))
        return 1
    if told["root"] != root_file_system():
        log.error("the run's agents are in a container (%s at /), and this one is not", told["root"])
        return 1
    nodes = len(allocation.nodes)
    variables = variables_in(os.environ, told["variables"], number, nodes, pooled=plan.pooled)
    os.environ.clear()
    os.environ.update(variables)
    return None


def _told(directory: RunDirectory) -> dict[str, Any] | None:
    limit = time.monotonic() + VARIABLES_LIMIT_S
    while True:
        with suppress(OSError, ValueError):
            return dict(foreign.load_own(variables_file(directory), foreign.PLAN_BYTES_MAX))
        if time.monotonic() > limit:
            return None
        time.sleep(POLL_S)
