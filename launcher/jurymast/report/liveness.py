"""Whether a run's job is alive, and what its supervisor answers: the journal does not show that its writer
died or cannot write. Reads a journal while it is being written, and closes the journal of a run that no
supervisor serves any more, after a cancel by hand."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jurymast
from jurymast import foreign
from jurymast.core.goodput import Ledger
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.events import Event
from jurymast.core.state.run import RunState
from jurymast.errors import ClusterUnavailableError, OtherProtocolError, RunDirectoryError
from jurymast.jobs import ENDED_STATES, job_state
from jurymast.journal import (
    Entry,
    EpochBegin,
    FileTail,
    JournalWriter,
    begin_of,
    entry_of,
    first_events,
    initial_state,
    read_file,
    replay,
    take,
)
from jurymast.report.text import some
from jurymast.rundir import RunDirectory, write_json
from jurymast.wire.endpoint import PULSE, claim_epoch, find

if TYPE_CHECKING:
    from jurymast.core.state.messages import Condition


class _EpochTail:
    """Reads one epoch's file. Entries are numbered from 1, so missing ones are noticed."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)
        self.line = 0  # number of the newest entry's line, from 1
        self._number = 0
        self._bad: list[int] = []
        self._missing = 0

    def entries(self, *, over: bool) -> Iterator[Entry]:
        """The new entries. `over`: a later epoch has begun, so an unfinished line will not be completed."""
        more = True
        while more:
            lines = self._tail.lines(partial=over)
            more = self._tail.more
            for line in lines:
                self.line += 1
                entry = entry_of(line, self._tail.path)
                if entry is None:
                    self._bad.append(self.line)
                    continue
                self._missing += max(0, entry.get("n", 0) - self._number - 1)
                self._number = entry.get("n", 0)
                yield entry

    def unread(self) -> Iterator[str]:
        name = self._tail.path.name
        if self._bad:
            lines = some([str(number) for number in self._bad])
            yield f"{name}: {'line' if len(self._bad) == 1 else 'lines'} {lines} could not be read"
        if self._missing > len(self._bad):
            entries = "1 entry" if self._missing == 1 else f"{self._missing} entries"
            yield f"{name}: {entries} missing"


class JournalTail:
    """New entries of a run's journal, and the state and account to which they lead.

    Epochs are read in order. As in `journal.read`, entries that a supervisor wrote after the next epoch had
    begun do not count.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.plan = directory.plan()
        self.ledger = Ledger(initial_state(self.plan))
        self.last_t: float | None = None
        self._epochs: dict[str, _EpochTail] = {}
        self._begins: dict[str, EpochBegin] = {}

    @property
    def state(self) -> RunState:
        return self.ledger.state

    @property
    def unread(self) -> list[str]:
        """What is missing from the journal or could not be read, in words."""
        found = [text for epoch in self._epochs.values() for text in epoch.unread()]
        if self._epochs and not any(name.endswith("-000001.jsonl") for name in self._epochs):
            found.insert(0, f"the journal begins with {min(self._epochs)}: what came before is not shown")
        elif not self._epochs and foreign.found(self.directory.epochs, "*.claim"):
            found.append(f"there is no journal in {self.directory.journal}: what the run did is not known")
        return found

    def poll(self) -> list[Entry]:
        """The entries since the last call, oldest first. Entries that report the same of several nodes stay
        together (see `journal.single`). `state` includes them."""
        return list(self.new())

    def new(self) -> Iterator[Entry]:
        """Like `poll`, but yields one entry at a time; `state` includes the yielded ones. Raises
        RunDirectoryError, which names the line, for an entry that contradicts earlier lines."""
        files = list(self.directory.journal_files())
        for number, path in enumerate(files, 1):
            epoch = self._epochs.setdefault(path.name, _EpochTail(path))
            later = [self._begin(other) for other in files[number:]]
            for entry in epoch.entries(over=path != files[-1]):
                if all(begin.counts(entry) for begin in later):
                    self._take(entry, f"{path}, line {epoch.line}")
                    yield entry

    def _take(self, entry: Entry, where: str) -> None:
        """Accept any content: a colleague's journal may not have been written by jurymast."""
        try:
            take(self.state, entry, self._feed)
        except Exception as error:
            what = entry.get("event", "this")
            raise RunDirectoryError(
                f"{where}: {what} contradicts the lines before it ({type(error).__name__}: {error})"
            ) from error

    def _begin(self, path: Path) -> EpochBegin:
        """The beginning of that epoch, kept as soon as it is known."""
        if path.name not in self._begins:
            begin = begin_of(read_file(path))
            if begin == EpochBegin():
                return begin
            self._begins[path.name] = begin
        return self._begins[path.name]

    def _feed(self, event: Event) -> None:
        self.last_t = max(event.t, self.last_t or 0.0)
        self.ledger.feed(event)


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
        record = foreign.load(directory.submission / "local.json", foreign.NOTE_BYTES_MAX)
        pid, host = int(record["pid"]), record.get("host")
    except (OSError, ValueError, KeyError, TypeError):
        return Liveness("unknown", "slurm/local.json cannot be read")
    if host != socket.gethostname():
        return Liveness("unknown", f"it runs on {host}", pid=pid)
    from jurymast.cluster.allocation import local_process

    if local_process(directory) is None:
        return Liveness("gone", "its process has ended", pid=pid)
    return Liveness("alive", "RUNNING", pid=pid)


def slurm_state(job: str, cluster: str = "") -> Liveness:
    """What squeue says of a job. A job that Slurm has forgotten (MinJobAge) is gone."""
    try:
        found = job_state(job, cluster)
    except ClusterUnavailableError as error:
        return Liveness("unknown", str(error), job)
    return judge(job, *found) if found is not None else Liveness("gone", "Slurm no longer knows it", job)


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
    from jurymast.core.state.messages import Condition
    from jurymast.wire.channel import ask  # imports asyncio, which is seldom needed

    try:
        answer = ask(directory, "how", by="")
    except (RunDirectoryError, OtherProtocolError):
        return None
    return answer if isinstance(answer, Condition) else None


def keeps_nodes_for(directory: RunDirectory, state: RunState) -> str:
    """For what a run that has ended keeps its nodes: its last checkpoint; "" if it does not, as far as its
    supervisor says."""
    told = hear(directory, state, 0.0) if state.ended else None
    return told.waits if told is not None else ""


def record_cancel(directory: RunDirectory, *, by: str) -> RunState:
    """Record in the journal, as a new epoch, that `by` cancelled the run; then write the outcome, for which
    other runs may wait that want to use the checkpoint directory. The run's job must have ended. Claiming the
    epoch fences a supervisor that could not be reached. Raises RunDirectoryError, OSError."""
    epoch = claim_epoch(directory.epochs)
    state = replay(directory)
    if state.ended:
        return state
    journal = JournalWriter(directory.journal, epoch)
    t = max(time.time(), state.now)
    events = first_events(directory, t, jurymast.__version__) if state.epoch == 0 else []
    events += [
        ev.SupervisorStarted(t=t, epoch=epoch, node=socket.gethostname(), read=dict(state.lines_read)),
        ev.Asked(t=t, what="cancel", by=by),
    ]
    for event in events:
        instructions = step(state, event)
        journal.event(event)
        for instruction in instructions:
            journal.decision(state.now, instruction)
    journal.close()
    outcome = {"state": state.public_state, "exit_code": state.exit_code, "exclude": [], "lost": []}
    write_json(directory.outcome_file, outcome)
    return state
