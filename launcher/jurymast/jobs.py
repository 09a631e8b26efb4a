"""Whether a job is alive, on Slurm or on this machine; and how all of Slurm's commands are run."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from jurymast import foreign, programs
from jurymast.errors import ClusterUnavailableError, ControllerAwayError

COMMAND_LIMIT_S = 30.0
# For times as Slurm's commands print them by default, and as sacct prints them in seconds since the epoch.
USUAL_TIMES = {"SLURM_TIME_FORMAT": "standard"}
UNIX_TIMES = {"SLURM_TIME_FORMAT": "%s"}
# By these, people choose what Slurm's commands show them: the jobs of one partition, nodes in other states.
_PEOPLES = re.compile(r"(SQUEUE|SINFO|SACCT|SCONTROL)_")
STATE_LIMIT_S = 10.0
END_POLL_S = 0.02
# What Slurm's commands print if slurmctld did not answer. Any other error means that it refused.
_AWAY = re.compile(r"Unable to contact|timed out|Connection refused|Zero Bytes|standby mode", re.IGNORECASE)


def run_command(
    arguments: list[str],
    limit_s: float = COMMAND_LIMIT_S,
    *,
    given: str = "",
    utc: bool = False,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return the standard output of a command of Slurm or munge, which reads `given`, and has `variables`
    besides this process's own, but for those that would change what it prints. It prints local time without
    its zone, which is ambiguous in the hour that comes twice a year; or `utc`. Raises ClusterUnavailableError
    with its own words, or ControllerAwayError if slurmctld does not answer."""
    own = {name: value for name, value in os.environ.items() if not _PEOPLES.match(name)}
    try:
        done = programs.run(
            arguments, input=given, capture_output=True, timeout=limit_s,
            env={**own, **USUAL_TIMES, **({"TZ": "UTC0"} if utc else {}), **(variables or {})},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ClusterUnavailableError(f"{arguments[0]} is not installed on this machine") from error
    except OSError as error:
        raise ClusterUnavailableError(f"{arguments[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ControllerAwayError(f"{arguments[0]} did not answer within {limit_s:.0f} s") from error
    if done.returncode != 0:
        words = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        away = ControllerAwayError if _AWAY.search(words) else ClusterUnavailableError
        what = " ".join(word for word in arguments[:3] if not word.startswith("-"))
        raise away(f"{what}: {words}")
    return done.stdout


# Slurm's states of a job that will not run again (squeue(1), JOB STATE CODES).
ENDED_STATES = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
})  # fmt: skip


def utc_time(text: str) -> float:
    """A time that a command of Slurm printed in UTC, in seconds since the epoch. Raises ValueError for any
    other text (Unknown)."""
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


def job_fields(job: str, limit_s: float = COMMAND_LIMIT_S, *, utc: bool = False) -> dict[str, str]:
    """Return the fields of `scontrol show job`, with times in local time or in `utc`. Raises
    ClusterUnavailableError."""
    return jobs_in(run_command(["scontrol", "show", "job", job, "--oneliner"], limit_s, utc=utc))[0]


# Between these two stand the fields whose values are Slurm's own. Before them is the job's name, and after
# them what else its owner wrote (directories, a comment), with whatever spaces, line breaks or `JobState=` it
# contains.
_NAMED = re.compile(
    r"^JobId=\d+ (?:.*? )?UserId=[^=\n]*\(\d+\) GroupId=[^=\n]*\(\d+\) ", re.MULTILINE | re.DOTALL
)
_WRITTEN = re.compile(r" (?:Features|Command|SubmitLine|WorkDir|\w*Comment|StdErr|StdIn|StdOut)=")


def jobs_in(told: str) -> list[dict[str, str]]:
    """Return Slurm's own fields of each job in the text of `scontrol show job --oneliner`."""
    begin = [found.end() for found in _NAMED.finditer(told)] or [0]
    parts = [told[start:end] for start, end in zip(begin, [*begin[1:], len(told)], strict=True)]
    own = [_WRITTEN.split(part, maxsplit=1)[0].split() for part in parts]
    return [dict(word.split("=", 1) for word in words if "=" in word) for words in own]


def job_state(job: str, cluster: str = "") -> tuple[str, str] | None:
    """Return what Slurm says of a job: its state and the reason for it; None if Slurm no longer knows it, as
    some minutes after its end (MinJobAge). Raises ClusterUnavailableError."""
    lines = _squeue(["--states=all", f"--jobs={job}", "--format=%T|%r|%A"], cluster)
    if not lines:
        return None
    own = [line for line in lines if line.endswith(f"|{job}")]  # of an array, squeue names all tasks
    state, reason, *_ = (*(own or lines)[-1].split("|"), "")
    return state, reason


def alone(job: str, cluster: str = "") -> str:
    """Return the name by which Slurm's commands change this job and no other: the number of an array's last
    task is also that of the whole array. Raises ControllerAwayError."""
    if os.environ.get("SLURM_JOB_ID") == job:
        array, task = (os.environ.get(f"SLURM_ARRAY_{name}", "") for name in ("JOB_ID", "TASK_ID"))
        return f"{array}_{task}" if array and task else job
    try:
        lines = _squeue(["--states=all", f"--jobs={job}", "--format=%A|%F|%K"], cluster)
    except ControllerAwayError:
        raise
    except ClusterUnavailableError:  # who cannot ask is told why by the command itself
        return job
    for line in lines:
        number, array, task = (*line.split("|"), "", "")[:3]
        if number == job and task.isdecimal():
            return f"{array}_{task}"
    return job


def has_step(job: str, step: str, cluster: str = "") -> bool:
    """Whether this step of the job runs. Raises ClusterUnavailableError."""
    return bool(_squeue([f"--steps={job}.{step}", "--format=%i|"], cluster))


def _squeue(which: list[str], cluster: str) -> list[str]:
    where = [f"--clusters={cluster}"] if cluster else []
    try:
        told = run_command(["squeue", "--noheader", *which, *where], STATE_LIMIT_S)
    except ClusterUnavailableError as error:
        if "Invalid job id" not in str(error):
            raise
        return []
    return [line.strip() for line in told.splitlines() if "|" in line]


def process_record(pid: int) -> dict[str, Any]:
    """Return what tells this process from any other of this machine, whenever its clock is set: the time at
    which a process, or the machine, seems to have begun changes then."""
    return {"pid": pid, "began": began_at(pid), "boot": _boot()}


def is_running(record: Mapping[str, Any]) -> bool:
    """Whether the process of which `process_record` was made on this machine still runs. Raises KeyError,
    TypeError or ValueError for anything else."""
    began = began_at(int(record["pid"]))
    return began is not None and (began, _boot()) == (int(record["began"]), record["boot"])


def _boot() -> str:
    """This machine's start, by its kernel's name for it; "" if it has none."""
    with suppress(OSError):
        return foreign.read("/proc/sys/kernel/random/boot_id", foreign.NOTE_BYTES_MAX).decode().strip()
    return ""


def began_at(pid: int) -> int | None:
    """Return when this process began, in ticks of the kernel's clock after the machine's start; None if there
    is none. Unlike the time of day it does not change when a clock is set. Raises OSError if that cannot be
    found out, as without a free descriptor."""
    try:
        state, *fields = foreign.read(f"/proc/{pid}/stat", foreign.NOTE_BYTES_MAX).rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in (b"Z", b"X") else int(fields[18])


def has_ended(pid: int, since: int | None = None) -> bool:
    """Whether there is no such process, or with `since` none that `began_at` that. What cannot be found out
    is no end."""
    try:
        found = began_at(pid)
    except OSError:
        return False
    return found is None or since not in (None, found)


def await_ended(pids: Iterable[int], limit_s: float) -> bool:
    """Wait until these processes have ended; False if one still runs after `limit_s` seconds. An ended one
    whose parent does not ask for its exit code, as the first process of many containers, still has an entry
    in /proc, and psutil would wait for it in vain."""
    began = {pid: began_at(pid) for pid in pids}
    end = time.monotonic() + limit_s
    while any(then is not None and not has_ended(pid, then) for pid, then in began.items()):
        if time.monotonic() > end:
            return False
        time.sleep(END_POLL_S)
    return True


def processes_of(run_directory: str) -> list[int]:
    """Return this user's processes on this machine that belong to the run, by their environment or their
    command line. Raises OSError if that cannot be found out."""
    named = os.fsencode(run_directory)
    numbers = [int(name) for name in foreign.names("/proc") if name.isdecimal()]
    return [pid for pid in numbers if _belongs(pid, named) and not has_ended(pid)]


def _belongs(pid: int, named: bytes) -> bool:
    try:
        if foreign.status(f"/proc/{pid}").st_uid != os.geteuid():  # anybody can call a process anything
            return False
        words = foreign.read(f"/proc/{pid}/cmdline", foreign.SCRIPT_BYTES_MAX).split(b"\0")
        return named in words or b"JURYMAST_RUN_DIR=" + named in foreign.read(
            f"/proc/{pid}/environ", foreign.SCRIPT_BYTES_MAX
        ).split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
        return False
