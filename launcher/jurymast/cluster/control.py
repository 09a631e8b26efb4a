"""Changes that a run makes to its own Slurm job, with its owner's rights: requeue it without the bad nodes,
or end it."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

from jurymast.cluster import exclusion
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.lift import size_changes
from jurymast.cluster.sbatch import seconds_of, split_command_line, where_options
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import compressed
from jurymast.errors import ClusterUnavailableError, ControllerAwayError, UsageError
from jurymast.interpreter import run_module
from jurymast.jobs import UNIX_TIMES, alone, job_fields, run_command, utc_time
from jurymast.rundir import RunDirectory

Answer = TypeVar("Answer")

STILL_RUNNING, UNKNOWN = "running", "unknown"
_GOES_ON = frozenset({"RUNNING", "SIGNALING", "RESIZING", "CONFIGURING", "SUSPENDED", "STOPPED"})
# What Slurm shows as Reason of a job that it has ended itself, in lower case, and the words for that.
_ENDED_FOR = {
    "timelimit": "timeout", "deadline": "deadline", "nodedown": "node_fail", "outofmemory": "out_of_memory",
    "joblaunchfailure": "launch_failed",
}  # fmt: skip
# How long a command waits for slurmctld after a SIGTERM, in seconds; and what slurmd waits at least between
# its SIGTERM and its SIGKILL.
ANSWER_LIMIT_S = 5.0
LEAST_KILL_WAIT_S = 5.0
# A restart or fail-over of slurmctld must not end the run. Limit and interval of further tries, in seconds.
CONTROLLER_LIMIT_S = 600.0
CONTROLLER_RETRY_S = 5.0


def requeue(
    plan: RunPlan,
    allocation: Allocation,
    lost: Sequence[str],
    exclude: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Requeue this job without the nodes in `exclude`, so that it starts again within seconds. `say` reports
    what goes wrong.

    The batch process must call this after its srun has ended: an srun that is still alive cancels the step of
    the same number after the requeue. The `lost` nodes are given back first, because Slurm would wait for
    their answer before it lets the job be pending (SlurmdTimeout, 300 s by default). Slurm then delays the
    job; a small job outside of this one lifts the delay, because no process inside lives until the job is
    pending. Does nothing if the job was already requeued or has ended; waits while slurmctld does not answer.
    Raises ClusterUnavailableError if the job cannot be requeued at all.
    """
    if _patiently(lambda: _is_over(allocation), say):
        return
    name = _patiently(lambda: alone(allocation.job), say)
    job = f"JobId={name}"
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    nodes, told = exclusion.banned(plan, exclude, partition, time.time())
    banned = ",".join(nodes)
    sizes = f"{plan.active}-{exclusion.most_nodes(plan, nodes, partition)}"
    if told:
        say(told)

    def attempt(command: Callable[[], list[str]]) -> bool:
        try:
            run_command(command())
        except (ClusterUnavailableError, UsageError) as error:
            say(str(error))
            return False
        return True

    # If there is no helper job, that costs Slurm's two minutes of delay, not the run.
    helped = attempt(lambda: _lift_command(plan, name, sizes, banned))
    kept = [node for node in allocation.nodes if node not in lost]
    if lost and kept and allocation.host in kept:
        attempt(lambda: ["scontrol", "update", job, f"NodeList={','.join(kept)}"])
    _patiently(lambda: _requeue_once(allocation, name), say)
    if helped:
        # The helper job does the rest. An update now would block (5 s each) until the job and this process
        # have ended, and Slurm would have to kill what could have ended by itself.
        return
    fields: dict[str, str] = {}
    with suppress(ClusterUnavailableError):
        fields = job_fields(name)
    for change in size_changes(fields, sizes, banned):
        attempt(partial(list, ["scontrol", "update", job, change]))


def _is_over(allocation: Allocation) -> bool:
    """Whether the job has ended or was requeued: then this process must not requeue it."""
    fields, restarts = job_fields(allocation.job), allocation.restarts
    over = ("cancelled", "timeout", "deadline")
    return was_requeued(fields, restarts) or reason_of(fields, restarts) in over


def _requeue_once(allocation: Allocation, name: str) -> None:
    # Slurm may have carried out an earlier request whose answer was lost.
    if not _is_over(allocation):
        run_command(["scontrol", "requeue", name])


def _patiently(ask: Callable[[], Answer], say: Callable[[str], None]) -> Answer:
    """Return what `ask` returns once slurmctld answers. Raises ClusterUnavailableError if it refuses, or does
    not answer for `CONTROLLER_LIMIT_S`."""
    end = time.monotonic() + CONTROLLER_LIMIT_S
    while True:
        try:
            return ask()
        except ControllerAwayError as error:
            if time.monotonic() > end:
                raise
            say(f"{error}; trying again in {CONTROLLER_RETRY_S:g} s")
        time.sleep(CONTROLLER_RETRY_S)


def give_back(job: str, node: str) -> bool:
    """Remove the live node `node` from this running job; False if the job no longer has it. Raises
    ClusterUnavailableError if the node is the batch host, or the site forbids it (disable_job_shrink).

    Measured on Slurm 22.05: the agents' step continues, everything that still runs on the node is killed, and
    a later requeue may get any nodes again.
    """
    nodes = run_command(["scontrol", "show", "hostnames", job_fields(job).get("NodeList", "")]).split()
    if node not in nodes:
        return False
    kept = ",".join(name for name in nodes if name != node)
    run_command(["scontrol", "update", f"JobId={alone(job)}", f"NodeList={kept}"])
    return True


def draining(nodes: Sequence[str]) -> dict[str, str]:
    """Which of these nodes somebody drains, and why. Raises ClusterUnavailableError."""
    command = ["sinfo", "--noheader", "--Node", f"--nodes={compressed(nodes)}", "--states=draining,drained"]
    return draining_in(run_command([*command, "--format=%N|%E"]))


def draining_in(told: str) -> dict[str, str]:
    """The same from sinfo's lines, of which a node has one for each of its partitions."""
    lines = (line.strip().partition("|") for line in told.splitlines())
    return {node: why.strip() or "no reason given" for node, _, why in lines if node and why}


def _lift_command(plan: RunPlan, job: str, sizes: str, banned: str) -> list[str]:
    """The sbatch command line of the helper job."""
    folder = RunDirectory(plan.directory).submission
    lift = run_module("jurymast.cluster.lift", job, sizes, *filter(None, [banned]))
    command = ["sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--time=5", "--job-name=jurymast-lift"]
    command += [f"--output={folder}/lift.log", "--open-mode=append", "--no-requeue", f"--chdir={folder}"]
    command += where_options(split_command_line(plan.sbatch_options, {}).options)
    if banned:
        command.append(f"--exclude={banned}")
    return [*command, f"--wrap=exec {shlex.join(lift)}"]


@dataclass(frozen=True)
class Ending:
    """Why the job is ending: cancelled, timeout, preempted, requeued, running (it is not), or Slurm's own
    word for another state; unknown without an answer. `kill_in_s`: the seconds until Slurm kills its
    processes; None if that is unknown, infinity if nobody does."""

    why: str
    kill_in_s: float | None = None


@cache
def _config() -> str:
    """The text of `scontrol show config`; "" if Slurm does not say. Asked once, and best before it is needed:
    slurmctld may be silent then."""
    try:
        return run_command(["scontrol", "show", "config"], ANSWER_LIMIT_S)
    except ClusterUnavailableError:
        _config.cache_clear()
        return ""


def kill_wait_s() -> float | None:
    """Slurm's KillWait, the seconds from its SIGTERM to its SIGKILL; None if Slurm does not say."""
    return kill_wait_of(_config())


def kill_wait_of(config: str) -> float | None:
    """The same from Slurm's configuration."""
    found = re.search(r"^KillWait\s*=\s*(\d+) sec", config, re.MULTILINE)
    return max(float(found[1]), LEAST_KILL_WAIT_S) if found else None


@dataclass(frozen=True)
class Binding:
    """Whether Slurm binds `tasks` to processors here, to what `otherwise` if neither options nor numbers say
    it ("": to nothing), and how it distributes them over sockets."""

    tasks: bool = False
    otherwise: str = ""
    distribution: str = "cyclic"


def binding() -> Binding:
    """What Slurm's configuration says of binding; it binds none if it does not say."""
    return binding_of(_config())


# One node's end must not end the others' tasks.
SURVIVE = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
# Slurm may kill a step on all nodes when memory runs out on one: by the site's choice, or by the job's, which
# srun reads from this variable. Releases from this one on can.
KILLS_STEP, KILLS_STEP_SINCE = "SLURM_OOM_KILL_STEP", (24, 5)


def outlive_memory() -> list[str]:
    """The option of srun and sbatch by which a rank that is killed for want of memory does not take its agent
    with it; none where Slurm would not do that."""
    by_site = re.search(r"^TaskPluginParam\s*=.*OOMKillStep", _config(), re.MULTILINE | re.IGNORECASE)
    by_job = os.environ.get(KILLS_STEP, "0") != "0"
    return ["--oom-kill-step=0"] if (by_site or by_job) and release() >= KILLS_STEP_SINCE else []


def survive() -> list[str]:
    """srun's options by which what ends on one node does not end the agents of others."""
    return [*SURVIVE, *outlive_memory()]


def unbound() -> list[str]:
    """srun's option for tasks that have all processors of their node; none where Slurm binds no task, and
    srun would say that it cannot."""
    return ["--cpu-bind=none"] if binding().tasks or not _config() else []


def around_tasks() -> list[str]:
    """The names of those of Slurm's settings by which it runs a program before or after each task."""
    return re.findall(r"^(Task(?:Prolog|Epilog))\s*= (?!\(null\))\S", _config(), re.MULTILINE)


def release() -> tuple[int, ...]:
    """Slurm's, as (22, 5, 8); () if it does not say."""
    found = re.search(r"^SLURM_VERSION\s*= (\d+)\.(\d+)\.(\d+)", _config(), re.MULTILINE)
    return tuple(map(int, found.groups())) if found else ()


def site_program(setting: str) -> str:
    """The program that Slurm runs before each task (TaskProlog of slurm.conf) or after it (TaskEpilog); ""
    if there is none."""
    found = re.search(rf"^{setting}\s*= (?!\(null\))(\S.*)$", _config(), re.MULTILINE)
    return found[1].strip() if found else ""


def binding_of(config: str) -> Binding:
    """The same from Slurm's configuration."""
    lines = dict(re.findall(r"^(\w+)\s*= (.*)$", config, re.MULTILINE))
    otherwise = re.search(r"autobind=(threads|cores|sockets)", lines.get("TaskPluginParam", "").lower())
    block = "CR_CORE_DEFAULT_DIST_BLOCK" in lines.get("SelectTypeParameters", "").upper()
    return Binding(
        "affinity" in lines.get("TaskPlugin", ""),
        otherwise[1] if otherwise else "",
        "block" if block else "cyclic",
    )


def mpi_default() -> str:
    """For which MPI srun starts tasks if nobody says it (MpiDefault); "" if Slurm does not say."""
    found = re.search(r"^MpiDefault\s*= (\S+)$", _config(), re.MULTILINE)
    return found[1] if found else ""


def kill_on_bad_exit() -> str:
    """Whether srun ends all tasks once one of them fails if nobody says it (KillOnBadExit): "1", else "0"."""
    found = re.search(r"^KillOnBadExit\s*= (\d+)$", _config(), re.MULTILINE)
    return found[1] if found else "0"


def signals_tasks_alone() -> bool:
    """Whether a signal for a step reaches only its tasks, and not what these have started, as with most
    ProctrackTypes; True if Slurm does not say."""
    return re.search(r"^ProctrackType\s*=.*linuxproc", _config(), re.MULTILINE) is None


def why_ending(allocation: Allocation) -> Ending:
    """Why the job is ending, and when, asked after a SIGTERM.

    Slurm signals every process of the job, so the first scontrol may be killed as well. An answer that comes
    after Slurm's SIGKILL is of no use to anybody.
    """
    for pause_s in (0.2, 0.5, 0.0):
        try:
            fields = job_fields(allocation.job, ANSWER_LIMIT_S, utc=True)
        except ControllerAwayError:
            break
        except ClusterUnavailableError:
            time.sleep(pause_s)
        else:
            why = reason_of(fields, allocation.restarts)
            return Ending(why, kill_in_s(fields, kill_wait_s(), time.time()))
    return Ending(UNKNOWN)


def kill_in_s(job: dict[str, str], kill_wait_s: float | None, now: float) -> float | None:
    """The seconds from `now` (Unix time) until Slurm kills a job that ends, from the fields of `scontrol show
    job` in UTC; None if they do not tell. A preempted job that is still running has the rest of its grace
    time first."""
    if kill_wait_s is None:
        return None
    ends_at, preempted_at = time_of(job.get("EndTime", "")), time_of(job.get("PreemptTime", ""))
    if ends_at is None:
        return None
    if not goes_on(job):  # it has ended, and its processes get a SIGTERM
        return kill_wait_s - min(kill_wait_s, max(0.0, now - ends_at))
    if preempted_at is None:
        return None
    # Slurm's clock may differ from ours.
    return kill_wait_s + min(max(0.0, ends_at - preempted_at), max(0.0, ends_at - now))


# A life of a job has begun at most so long before its first supervisor noted that, and, as clocks differ, so
# long after it, in seconds.
NOTED_S, CLOCKS_DIFFER_S = 3600.0, 60.0


def ended_as(job: str, begun_at: float) -> str:
    """How a life of the job ended that had begun by `begun_at` (Unix time), in the words of `reason_of`; ""
    if Slurm keeps no accounts, or they do not say. slurmctld itself keeps nothing of an earlier life."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations"]
    command += ["--duplicates", f"--jobs={job}", "--format=State,Start,End"]
    try:
        return ended_life(run_command(command, ANSWER_LIMIT_S, variables=UNIX_TIMES), begun_at)
    except ClusterUnavailableError:
        return ""


def ended_life(text: str, begun_at: float) -> str:
    """The same from sacct's lines. An id may have been another job's before."""
    lives = [line.split("|") for line in text.splitlines() if line.count("|") == 2]
    known = [(float(begun), state) for state, begun, end in lives if begun.isdigit() and end.isdigit()]
    fitting = [life for life in known if -NOTED_S <= life[0] - begun_at <= CLOCKS_DIFFER_S]
    return max(fitting)[1].split()[0].lower() if fitting else ""


def ends_in_s(allocation: Allocation) -> float | None:
    """The seconds until Slurm ends the job for its time limit; infinity: never; None if Slurm does not
    say."""
    try:
        return limit_in_s(job_fields(allocation.job, ANSWER_LIMIT_S, utc=True), time.time())
    except ClusterUnavailableError:
        return None


def limit_in_s(job: dict[str, str], now: float) -> float | None:
    """The same from the fields of `scontrol show job` in UTC, at `now` (Unix time)."""
    ends_at = time_of(job.get("EndTime", ""))
    if not goes_on(job) or ends_at is None:
        return math.inf if job.get("TimeLimit") == "UNLIMITED" else None
    return max(0.0, ends_at - now)


def time_of(text: str) -> float | None:
    """Slurm's `2026-01-02T03:04:05`, in UTC, as Unix time; None if it is no time (Unknown, None)."""
    try:
        return utc_time(text)
    except ValueError:
        return None


def goes_on(job: dict[str, str]) -> bool:
    """Whether the job has its nodes and is not being ended, as far as its state says. While Slurm sends a
    signal to a job, or while the job waits or changes, it shows that in place of RUNNING."""
    return _states(job) <= _GOES_ON


def _states(job: dict[str, str]) -> set[str]:
    return set(job.get("JobState", "").split(","))


def was_requeued(job: dict[str, str], restarts: int) -> bool:
    """Whether Slurm has requeued the job, whatever for, since it was restarted this often."""
    told = job.get("Restarts", "")
    return (told.isdecimal() and int(told) > restarts) or "PENDING" in _states(job)


def reason_of(job: dict[str, str], restarts: int) -> str:
    """The same from the fields of `scontrol show job`. While a job is completing, Slurm 22.05 shows
    COMPLETING in place of the reason, which then follows from the other fields: TimeLimit, in whole minutes,
    may be longer than the job ran, if somebody has moved EndTime."""
    states = _states(job)
    preempted = job.get("PreemptTime", "None")
    if preempted not in ("None", "") and preempted >= job.get("StartTime", ""):
        return "preempted"  # the job goes on during the grace time
    if goes_on(job):
        return STILL_RUNNING
    for word in ("CANCELLED", "TIMEOUT", "PREEMPTED"):
        if word in states:
            return word.lower()
    if was_requeued(job, restarts):
        return "requeued"
    if told := _ENDED_FOR.get(job.get("Reason", "").lower()):
        return told
    limit_s, ran_s = seconds_of(job.get("TimeLimit", "")), seconds_of(job.get("RunTime", ""))
    if limit_s is not None and ran_s is not None and ran_s >= limit_s:
        return "timeout"
    return "cancelled" if "COMPLETING" in states else job.get("JobState", "").lower() or UNKNOWN
