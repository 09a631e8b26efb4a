"""The nodes that a run has at the moment: a Slurm allocation, or processes on this machine (the local
cluster, which needs no Slurm)."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from jurymast import foreign
from jurymast.core.state.settings import RunPlan
from jurymast.errors import ClusterUnavailableError, RunDirectoryError, SubmissionError
from jurymast.interpreter import run_module
from jurymast.jobs import is_running, job_fields, process_record, run_command, utc_time
from jurymast.rundir import RunDirectory, write_atomically, write_json
from jurymast.wire.addresses import is_up, listen_at_each, listens_at_all, plain


@dataclass(frozen=True)
class Allocation:
    """The nodes of a run. `job`: the Slurm job id, or local-PID. `host`: the node that runs the batch script.
    `eligible_at`: when the job could have started, in seconds since the epoch. `partition` and `account`:
    those that Slurm chose, whatever was asked for; "" without Slurm. `began_at`: since when the job has these
    nodes; 0.0: unknown."""

    job: str
    restarts: int
    nodes: tuple[str, ...]
    host: str
    eligible_at: float
    partition: str = ""
    account: str = ""
    began_at: float = 0.0

    @property
    def key(self) -> str:
        """A name that only this allocation has: a requeued job keeps its id, so its number of restarts is
        part of it."""
        return f"{self.job}.{self.restarts}"

    def save(self, directory: RunDirectory) -> None:
        write_json(directory.allocation_file, asdict(self))

    @classmethod
    def load(cls, directory: RunDirectory) -> Allocation:
        """Return the run's saved allocation. Raises RunDirectoryError if there is none."""
        try:
            return msgspec.convert(foreign.load(directory.allocation_file, foreign.PLAN_BYTES_MAX), cls)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"cannot read {directory.allocation_file}: {error}") from error


def from_slurm_environment() -> Allocation:
    """Return the allocation in which this batch script runs. Raises ClusterUnavailableError outside one."""
    job, node_list = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job or not node_list:
        raise ClusterUnavailableError("not inside a Slurm job: SLURM_JOB_ID or SLURM_JOB_NODELIST is missing")
    nodes = run_command(["scontrol", "show", "hostnames", node_list]).split()
    eligible_at, began_at = _times(job)
    return Allocation(
        job=job,
        restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        nodes=tuple(nodes),
        host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        eligible_at=eligible_at,
        partition=os.environ.get("SLURM_JOB_PARTITION", ""),
        account=os.environ.get("SLURM_JOB_ACCOUNT", ""),
        began_at=began_at,
    )


def _times(job: str) -> tuple[float, float]:
    """When Slurm could have started the job, and when it did, in seconds since the epoch; 0.0 if Slurm does
    not say."""
    try:
        fields = job_fields(job, utc=True)
    except ClusterUnavailableError:
        return 0.0, 0.0
    return _time(fields.get("EligibleTime", "")), _time(fields.get("StartTime", ""))


def _time(told: str) -> float:
    try:
        return utc_time(told)
    except ValueError:
        return 0.0


def own_directory(submitted: RunDirectory, files: Sequence[str] = ()) -> RunDirectory:
    """The run directory of this job. Each task of an array is a run of its own, next to the submitted one,
    with copies of these `files` of the submission."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if task is None:
        return submitted
    own = RunDirectory(task_directory(submitted.root, task))
    if not own.plan_file.exists():  # exists after a requeue
        beside(submitted, own, os.environ["SLURM_JOB_ID"])
        for name in files:
            data = foreign.read_own(submitted.submission / name, foreign.SCRIPT_BYTES_MAX)
            write_atomically(own.submission / name, data)
    return own


def task_directory(submitted: Path, task: int | str) -> Path:
    """The run directory of an array's task, of which `submitted` is the array's."""
    return submitted.with_name(f"{submitted.name}-task-{task}")


def beside(submitted: RunDirectory, run: RunDirectory, job: str) -> None:
    """Make another run of the same submission, for this Slurm job. Raises RunDirectoryError."""
    plan = replace(submitted.own_plan(), run=run.root.name, directory=str(run.root))
    run.create()
    (run.submission / "jobs").mkdir(mode=0o700)
    write_atomically(run.submission / "jobs" / job, b"")
    write_atomically(run.policy_file, foreign.read_own(submitted.policy_file, foreign.NOTE_BYTES_MAX))
    run.save_plan(plan)


# What a submission wants run last, in its directory of the run.
TEARDOWN = "teardown.sh"
LOOPBACK, LOOPBACK_V6 = "127.0.0.1", "::1"


def loopback() -> str:
    """The address at which only this machine reaches itself, also without IPv4."""
    return LOOPBACK if is_up(LOOPBACK) or not is_up(LOOPBACK_V6) else LOOPBACK_V6


def announced_hosts() -> list[str]:
    """The addresses at which other nodes may reach this one, most likely first, followed by its name."""
    return [*own_addresses(), socket.gethostname()]


def own_addresses() -> list[str]:
    """This node's addresses except loopback. Those that other nodes most likely reach come first."""
    found: list[str] = []
    try:
        found += [
            plain(str(info[4][0]))
            for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        ]
    except OSError:
        pass  # a host that cannot resolve its own name still has addresses
    up = {interface for interface, status in psutil.net_if_stats().items() if status.isup}
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in up:
            found += [one.address for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)]
    reachable = [
        one for one in dict.fromkeys(found) if not one.startswith(("127.", "fe80:")) and one != "::1"
    ]
    return sorted(reachable, key=lambda address: ":" in address)  # stable; IPv4 first, where there is any


def announced_by(listeners: Sequence[socket.socket]) -> list[str]:
    """The addresses, with ports, at which others reach the supervisor that listens on these sockets; see
    `listen`."""
    addresses = [str(listener.getsockname()[0]) for listener in listeners]
    if addresses in ([LOOPBACK], [LOOPBACK_V6]):
        return addresses
    return announced_hosts() if any(map(listens_at_all, listeners)) else [*addresses, socket.gethostname()]


def listen(cluster: str) -> list[socket.socket]:
    """Listen for this node's supervisor, on one port. A local run listens for this machine alone, any other
    at each address that other nodes are told. Raises OSError."""
    return listen_at_each([loopback()] if cluster == "local" else own_addresses())


def batch_process(plan: RunPlan) -> tuple[str, ...]:
    """The command line of the process that runs as long as the job, on its first node; the same under
    Slurm."""
    return tuple(run_module("jurymast.cluster.batch", plan.directory, python=plan.python))


def submit_local(run_directory: str, argv: Sequence[str]) -> int:
    """Start the run's batch process by `argv`, detached from this terminal; returns its process id.

    `slurm/local.json` keeps the id together with the process's start time, so that cancel never ends a later
    process with the same id. Raises SubmissionError, RunDirectoryError.
    """
    run = RunDirectory(run_directory)
    log = foreign.writing(run.submission / "job-local.log")
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Not in the user's directory, where files could hide Python's own modules; ranks start in the
            # plan's working directory.
            cwd=run.submission,
            start_new_session=True,
            close_fds=True,
        )
    except OSError as error:
        raise SubmissionError(f"cannot start {argv[0]}: {error.strerror}") from error
    finally:
        os.close(log)
    try:
        record = {**process_record(process.pid), "host": socket.gethostname()}
        write_json(run.submission / "local.json", record)
        write_atomically(run.submission / "jobs" / f"local-{process.pid}", b"")
    except BaseException:
        process.kill()
        process.wait()
        raise
    # The process outlives this command, which does not wait for it. With a return code, Popen does not warn
    # about that.
    process.returncode = 0
    return process.pid


def local_process(run: RunDirectory) -> psutil.Process | None:
    """The run's batch process if it still runs on this machine."""
    try:
        record: dict[str, Any] = foreign.load(run.submission / "local.json", foreign.NOTE_BYTES_MAX)
        here = record.get("host") == socket.gethostname() and is_running(record)
        return psutil.Process(int(record["pid"])) if here else None
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None
