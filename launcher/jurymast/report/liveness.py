"""Whether a run's job is alive, and what its supervisor answers. The journal does not show that its writer
died or cannot write."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jurymast import foreign
from jurymast.cluster.allocation import ENDED_STATES, run_command
from jurymast.core.run.state import RunState
from jurymast.errors import ClusterUnavailableError, RunDirectoryError
from jurymast.rundir import RunDirectory
from jurymast.wire.endpoint import PULSE, find

if TYPE_CHECKING:
    from jurymast.core.messages import Condition

ANSWER_LIMIT_S = 10.0
# A supervisor that wrote this recently is alive; Slurm need not be asked.
FRESH_S = 5.0
CLUSTER_BYTES_MAX = 1000
_CLUSTER = re.compile(r"[\w.-]+")
# While steps are done, a supervisor writes every two seconds, later in a run less often. On a full disk it
# cannot write, so it is asked directly.
SILENT_S = 10.0
WAITING_STATES = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)


@dataclass(frozen=True)
class Liveness:
    """The result of a look. `kind`: ended (by the journal), alive, pending, gone or unknown. `detail`:
    Slurm's state, for PENDING with the reason. `job`: the Slurm job; `pid`: the local process."""

    kind: str
    detail: str = ""
    job: str = ""
    pid: int = 0

    @property
    def id(self) -> str:
        return f"pid {self.pid}" if self.pid else self.job


def slurm_jobs(directory: RunDirectory, state: RunState) -> list[tuple[str, str]]:
    """(job id, Slurm cluster or "") of every Slurm job of the run, oldest first, including queued ones."""
    folder = directory.submission / "jobs"
    try:
        jobs = foreign.found(folder, "*")
        files = sorted(jobs, key=lambda path: foreign.status(path).st_mtime)
    except OSError:
        files = []
    clusters = {path.name: _cluster(path) for path in files if path.name.isdecimal()}
    known = [job for job in state.slurm_jobs if job.isdigit()]
    order = dict.fromkeys([*known, *(job for job in clusters if job not in known)])
    return [(job, clusters.get(job, "")) for job in order]


def _cluster(path: Path) -> str:
    """The Slurm cluster that the file names; "" if that is not a name: the file may be another user's."""
    try:
        text = foreign.read(path, CLUSTER_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return ""
    return text if _CLUSTER.fullmatch(text) else ""


def look(directory: RunDirectory, state: RunState) -> Liveness:
    """Whether the run's newest job is alive. Asks Slurm unless the supervisor wrote within the last `FRESH_S`
    seconds."""
    if state.ended:
        return Liveness("ended", state.phase.value)
    if _silence_s(directory) < FRESH_S:
        return Liveness("alive", "RUNNING")
    if foreign.exists(directory.submission / "local.json"):
        return _local(directory)
    jobs = slurm_jobs(directory, state)
    if not jobs:
        return Liveness("unknown", "no job is recorded")
    return slurm_state(*jobs[-1])


def _silence_s(directory: RunDirectory) -> float:
    """Seconds since the supervisor last wrote its journal, or its pulse, which also beats during long
    steps."""
    found = (list(directory.journal_files()), [directory.epochs / PULSE])
    return time.time() - max((_written_at(max(paths)) for paths in found if paths), default=0.0)


def _written_at(path: Path) -> float:
    """When the file was written, in seconds since the epoch. The file is opened first: only then does NFS ask
    the server instead of its cache."""
    try:
        with foreign.reading(path) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _local(directory: RunDirectory) -> Liveness:
    try:
        record = foreign.load(directory.submission / "local.json")
        pid, host = int(record["pid"]), record.get("host")
    except (OSError, ValueError, KeyError, TypeError):
        return Liveness("unknown", "slurm/local.json cannot be read")
    if host != socket.gethostname():
        return Liveness("unknown", f"it runs on {host}", pid=pid)
    from jurymast.cluster.local import local_process

    if local_process(directory) is None:
        return Liveness("gone", "its process has ended", pid=pid)
    return Liveness("alive", "RUNNING", pid=pid)


def slurm_state(job: str, cluster: str = "") -> Liveness:
    """What squeue says of a job. A job that Slurm has forgotten (MinJobAge) is gone."""
    where = [f"--clusters={cluster}"] if cluster else []
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", *where, "--format=%T|%r"]
    try:
        told = run_command(command, ANSWER_LIMIT_S)
    except ClusterUnavailableError as error:
        if "Invalid job id" not in str(error):
            return Liveness("unknown", str(error), job)
        told = ""
    lines = [line for line in told.splitlines() if "|" in line]
    if not lines:
        return Liveness("gone", "Slurm no longer knows it", job)
    return judge(job, *lines[-1].strip().split("|", 1))


def judge(job: str, word: str, reason: str) -> Liveness:
    """The liveness of a job by squeue's %T and %r."""
    if word in ENDED_STATES:
        return Liveness("gone", word, job)
    if word in WAITING_STATES:
        return Liveness("pending", f"{word} ({reason})" if reason not in ("", "None") else word, job)
    return Liveness("alive", word, job)


def hear(directory: RunDirectory, state: RunState, silent_s: float) -> Condition | None:
    """The supervisor's own answer, if the run's journal has been silent for `silent_s` seconds; None if there
    is no need to ask, or no answer. A run that has ended may still wait for its last checkpoint."""
    if foreign.exists(directory.outcome_file) or (silent_s < SILENT_S and not state.ended):
        return None
    if find(directory.epochs) is None:
        return None
    from jurymast.core.messages import Condition
    from jurymast.wire.ask import ask  # imports asyncio, which is seldom needed

    try:
        answer = ask(directory, "how", by="")
    except RunDirectoryError:
        return None
    return answer if isinstance(answer, Condition) else None
