"""Whose a directory of checkpoints is. No torch here.

    checkpoints/owner.json                who writes here
    checkpoints/.owner.json.after-<run>   somebody who is about to become the owner after that run

Only its owner writes into a directory of checkpoints: an owner's sweeps and its retention would remove
another run's files. A run, in all its attempts and jobs, or a training that is no run of jurymast, claims the
directory before its first step, and owns it until it has ended; then the next that claims it does. Everybody
may read.

A run has ended if its outcome says so, or if its jobs are gone: Slurm is asked about them, or this machine
about their processes. What cannot be found out is not taken for an end. Nor is it taken for a living owner
while slurmctld does not answer, as when it is restarted: that is a trouble like storage that fails, and a
training goes on meanwhile without owning the directory.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.checkpoint.directory import NewFile, in_name
from jurymast.core.judges.slurm_variables import step_in
from jurymast.core.state.texts import clean
from jurymast.errors import CheckpointError, ClusterUnavailableError, ControllerAwayError
from jurymast.jobs import ENDED_STATES, began_at, has_step, is_running, job_state, processes_of
from jurymast.reading import is_there, patiently
from jurymast.rundir import RunDirectory, make_durable_folder, sync_directory, write_atomically

OWNER = "owner.json"
# How long a claim waits for an owner that is ending, and for an answer of Slurm.
WAIT_S = 60.0
ASK_EVERY_S = 2.0
# A run that is submitted again several times a day for years has fewer jobs.
JOBS_MAX = 10_000
# Another run may claim the directory between our look and our claim.
TRIES = 10
# A claim that is not fully written after this long will not be: its process was killed.
GIVEN_UP_S = 60.0
NO_ID = ("", "none")  # torchrun's, if it was given none


@dataclass(frozen=True)
class Owner:
    """A run and its run directory; or a training that is no run, whose `directory` is "". The rest is who
    claimed the directory for it: a `step` of a Slurm job, or the process `pid` that began `started` ticks of
    the kernel's clock after the start of its machine. `host` names the machine, this start of it, and the
    processes that are seen there."""

    run: str
    directory: str = ""
    job: str = ""
    step: str = ""
    cluster: str = ""
    host: str = ""
    pid: int = 0
    started: int = 0

    @classmethod
    def of_environment(cls) -> Owner:
        """Return whom this process belongs to."""
        job, cluster = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_CLUSTER_NAME", "")
        run, directory = os.environ.get("JURYMAST_RUN"), os.environ.get("JURYMAST_RUN_DIR")
        if run and directory:
            return cls(run, directory, job=job, cluster=cluster)
        if job:
            step = step_in(os.environ)
            return cls(f"slurm-{job}.{step}", job=job, step=step, cluster=cluster)
        # Ranks are started again by their torchrun, which remains.
        torchrun = os.environ.get("TORCHELASTIC_RUN_ID")
        pid = os.getpid() if torchrun is None else os.getppid()
        started, host = began_at(pid) or 0, this_host()
        name = f"process-{host.split('/')[1][:8]}-{pid}-{started}"
        if torchrun not in (None, *NO_ID):
            name = f"torchrun-{torchrun}"
        return cls(name, host=host, pid=pid, started=started)

    @property
    def described(self) -> str:
        if self.directory:
            return f"run {self.run} ({self.directory})"
        if self.job:
            return f"a training in step {self.step} of job {self.job}"
        return f"a training of process {self.pid} on {self.host.partition('/')[0]}"


NOT_KNOWN = "?"


def this_host() -> str:
    """Return a name for this machine, from its start to its end, and the processes that are seen here."""
    try:
        boot = foreign.read("/proc/sys/kernel/random/boot_id", foreign.NOTE_BYTES_MAX).decode().strip()
        seen = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = seen = NOT_KNOWN
    return f"{socket.gethostname()}/{boot}/{seen}"


# ---- whether an owner has ended


class Life(Enum):
    """In this order, the last of several jobs' counts."""

    ENDED = "ended"
    ENDING = "ending"
    UNANSWERED = "Slurm does not answer"
    UNKNOWN = "unknown"
    ALIVE = "alive"


CHANGING = (Life.ENDING, Life.UNANSWERED)


@dataclass(frozen=True)
class Fate:
    """Whether an owner lives, and why that is so, in words."""

    life: Life
    why: str = ""


def fate(owner: Owner) -> Fate:
    """Return whether the owner has ended. What cannot be found out is `UNKNOWN`. Raises OSError if this
    machine's processes cannot be looked at now."""
    if not owner.directory:
        return _of_training(owner)
    run = RunDirectory(owner.directory)
    try:
        if patiently(run.has_ended, run.root):
            return Fate(Life.ENDED)
        jobs = _jobs(run)
        removed = not jobs and _is_removed(run.root)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        jobs, removed, why = {}, False, f"its run directory cannot be read: {error}"
    else:
        why = "no job of it is recorded"
    if owner.job:
        jobs.setdefault(owner.job, owner.cluster)
    if not jobs:
        return Fate(Life.ENDED) if removed else Fate(Life.UNKNOWN, why)
    return _of_jobs(run, jobs)


def _of_jobs(run: RunDirectory, jobs: dict[str, str]) -> Fate:
    """Return the last fate among those of a run's jobs. The directory may be another user's, and name ever so
    many: a claim waits no longer for them than for anything else."""
    end, last = time.monotonic() + WAIT_S, Fate(Life.ENDED)
    for job, cluster in sorted(jobs.items(), key=lambda item: (len(item[0]), item[0]), reverse=True):
        if time.monotonic() > end:
            return Fate(Life.UNKNOWN, f"it names {len(jobs)} jobs, too many to ask about")
        found = _of_local(run) if job.startswith("local-") else _of_job(job, cluster)
        last = max(last, found, key=lambda one: list(Life).index(one.life))
        if last.life is Life.ALIVE:
            break
    return last


def _loaded(path: Path) -> dict[str, Any] | None:
    try:
        loaded: dict[str, Any] = foreign.load(path, foreign.NOTE_BYTES_MAX)
        return loaded
    except FileNotFoundError:
        return None


def _is_removed(root: Path) -> bool:
    """Whether the run directory is gone, from storage that is there. Raises OSError."""
    try:
        os.stat(root)
    except FileNotFoundError:
        return is_there(root.parent)
    return False


def _jobs(run: RunDirectory) -> dict[str, str]:
    """Return the jobs of a run, each with its Slurm cluster or "". Raises OSError, and ValueError if they are
    more than any run has."""
    folder = run.submission / "jobs"
    try:
        names = foreign.names(folder)
    except FileNotFoundError:
        return {}
    if len(names) > JOBS_MAX:
        raise ValueError(f"it names {len(names)} jobs")
    return {name: foreign.read(folder / name, 1000).decode(errors="replace").strip() for name in names}


def _of_job(job: str, cluster: str) -> Fate:
    try:
        found = job_state(job, cluster)
    except ClusterUnavailableError as error:
        return _unanswered(error)
    if found is None or found[0] in ENDED_STATES:
        return Fate(Life.ENDED)
    return Fate(Life.ENDING if found[0] == "COMPLETING" else Life.ALIVE, f"its job {job} is {found[0]}")


def _unanswered(error: ClusterUnavailableError) -> Fate:
    away = isinstance(error, ControllerAwayError)
    return Fate(Life.UNANSWERED if away else Life.UNKNOWN, f"Slurm cannot be asked about it: {error}")


def _of_local(run: RunDirectory) -> Fate:
    """Whether a run on one machine, without Slurm, has ended there."""
    try:
        record = foreign.load(run.submission / "local.json", foreign.NOTE_BYTES_MAX)
        pid, host, runs = int(record["pid"]), record.get("host"), is_running(record)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Fate(Life.UNKNOWN, f"its process is not known: {error}")
    if host != socket.gethostname():
        return Fate(Life.UNKNOWN, f"it runs, or ran, on {host}")
    if runs:
        return Fate(Life.ALIVE, f"its process {pid} runs")
    if left := processes_of(str(run.root)):
        return Fate(Life.ENDING, f"its process {left[0]} still runs")
    return Fate(Life.ENDED)


def _of_training(owner: Owner) -> Fate:
    if owner.job:
        whole = _of_job(owner.job, owner.cluster)
        if whole.life is not Life.ALIVE or not owner.step.isdigit():
            return whole
        try:
            runs = has_step(owner.job, owner.step, owner.cluster)
        except ClusterUnavailableError as error:
            return _unanswered(error)
        return Fate(Life.ALIVE, "its step runs") if runs else Fate(Life.ENDED)
    name, _, since = owner.host.partition("/")
    if name != socket.gethostname():
        return Fate(Life.UNKNOWN, f"it runs, or ran, on {name}")
    ours, theirs = this_host().split("/")[1], since.partition("/")[0]
    if NOT_KNOWN in (ours, theirs):
        return Fate(Life.UNKNOWN, f"it is not known whether {name} was started anew since")
    if owner.host != this_host():
        return Fate(Life.UNKNOWN, "it is in another container") if theirs == ours else Fate(Life.ENDED)
    runs = began_at(owner.pid) == owner.started
    return Fate(Life.ALIVE, f"its process {owner.pid} runs") if runs else Fate(Life.ENDED)


# ---- claims


def owner(root: Path) -> Owner | None:
    """Return the owner of `root`, or None. Raises OSError, and CheckpointError if the file is damaged."""
    return _read(root / OWNER)


def _read(path: Path) -> Owner | None:
    try:
        values = _loaded(path)
        found = None if values is None else msgspec.convert(values, Owner)
        if found is not None and not (found.directory or found.job or found.host):
            raise ValueError("it does not say where its owner is")
        return found
    except (foreign.NotAFile, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged, so nothing is saved: another run may be saving there",
            hint=f"make sure that no other run saves there, then run: rm {path}",
        ) from error


def is_foreign(root: Path, us: Owner | None) -> bool:
    """Return whether `root` belongs, or may belong, to another run, whose files must not be removed."""
    try:
        found = owner(root)
    except (OSError, CheckpointError):
        return True
    return found is not None and (us is None or found.run != us.run)


def claim(
    root: Path, us: Owner | None, wait_s: float = WAIT_S, say: Callable[[str], object] = lambda text: None
) -> None:
    """Claim `root` before the first write to it. Waits up to `wait_s` for an owner that is ending, and for
    Slurm's answer; `say` is then called once, with why. Without `us`, only see that nobody else owns it.

    Raises OSError, also if Slurm has not answered by then, and CheckpointError if another run owns it that
    has not ended, or of which nothing can be found out."""
    end, said = time.monotonic() + wait_s, False
    tries = 0
    while tries < TRIES:
        found = owner(root)
        if found is not None and us is not None and found.run == us.run:
            return _renew(root, found, us)
        known = fate(found) if found is not None else Fate(Life.ENDED)
        if found is not None and known.life is not Life.ENDED:
            if known.life not in CHANGING or time.monotonic() >= end:
                if known.life is Life.UNANSWERED:
                    raise _unknown(root, found, known)
                raise _refused(root, found, known, us)
            if not said:
                say(_said(f"{found.described} owns {root}: waiting for its end, because {known.why}"))
            said = True
            time.sleep(min(ASK_EVERY_S, wait_s))
            continue
        if us is None:
            return None
        _take(root, found, us)
        tries += 1
    raise CheckpointError(
        f"another run is claiming {root}, or was killed while it did",
        hint=f"choose another directory=, or, if no run is claiming it, run: rm {root}/.{OWNER}.after-*",
    )


def _said(text: str) -> str:
    """On one line, and without what would control a terminal: what names an owner may be another user's, and
    errors are printed by whatever script saves."""
    return " ".join(clean(text).split())


def _unknown(root: Path, found: Owner, known: Fate) -> OSError:
    text = f"{found.described} owns it, and it is not known whether that has ended: {known.why}"
    return OSError(errno.ETIMEDOUT, _said(text), str(root))


def _refused(root: Path, found: Owner, known: Fate, us: Owner | None) -> CheckpointError:
    ours = f"run {us.run}" if us is not None and us.directory else "this training"
    ended = "may not have ended" if known.life is Life.UNKNOWN else "has not ended"
    return CheckpointError(
        _said(
            f"{found.described}, which {ended}, saves to {root}: {ours} cannot save there as well"
            + (f" ({known.why})" if known.why else "")
        ),
        hint=f"end it, choose another directory=, or, if it has ended, run: rm {root / OWNER}",
    )


def _renew(root: Path, found: Owner, us: Owner) -> None:
    """Name the job or process that the owner has now."""
    if found != us and (us.job or us.pid):
        write_atomically(root / OWNER, json.dumps(asdict(us)).encode())


def _half_made(path: Path) -> Owner | None:
    """Return who made this claim, or None if it is gone: it is removed if whoever made it has ended, or was
    killed before it was fully written. Raises the errors of `_read`."""
    try:
        made = _read(path)
    except CheckpointError:
        with suppress(FileNotFoundError):
            if time.time() - foreign.status(path).st_mtime < GIVEN_UP_S:
                raise
            path.unlink()
        return None
    if made is not None and fate(made).life is Life.ENDED:
        path.unlink(missing_ok=True)
        return None
    return made


def _take(root: Path, found: Owner | None, us: Owner) -> None:
    """Become the owner after `found`, unless another run is first: only the run that made the file of this
    name may put it into that owner's place."""
    make_durable_folder(root)
    mine = root / f".{OWNER}.after-{in_name(found.run) if found is not None else ''}"
    try:
        with foreign.asking(mine):
            file = NewFile(mine, hashing=False)
    except FileExistsError:
        other = _half_made(mine)
        if other is None or other.run != us.run:
            return
    else:
        try:
            with foreign.asking(mine), file:
                file.write(json.dumps(asdict(us)).encode())
        except OSError:  # a full disk
            mine.unlink(missing_ok=True)
            raise
    if owner(root) != found:
        mine.unlink(missing_ok=True)
        return
    try:
        with foreign.asking(mine):
            os.rename(mine, root / OWNER)
    except FileNotFoundError:  # another process of this run was first
        return
    sync_directory(root)
