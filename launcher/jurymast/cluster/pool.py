"""A pool: nodes that wait, each in a small Slurm job of its own, for any of the runs whose policy names the
same directory. A node there is a *member*. It tells that it waits by a sign, `JOB.waiting`. A run takes it by
giving that file another name, `JOB.taken`, which one run alone can, and tells it what it is for by
`JOB.claim`. The member names its job like the run's other small jobs, removes the claim as its answer, and is
one of these then.

The directory, and all that is in it, is of one user; contents are checked like those of other files."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec

from jurymast import foreign
from jurymast.cluster import refill
from jurymast.cluster.allocation import Allocation
from jurymast.cluster.control import ends_in_s
from jurymast.cluster.sbatch_command import accepted, sbatch
from jurymast.core.judges import pool
from jurymast.core.judges.pool import PoolMember, PoolNeed
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import expanded
from jurymast.errors import ClusterUnavailableError, JurymastError, RunDirectoryError, SubmissionError
from jurymast.interpreter import run_code, run_module
from jurymast.jobs import run_command
from jurymast.processes import log_as
from jurymast.reading import to_begin
from jurymast.rundir import RunDirectory, renew, write_json

log = logging.getLogger("jurymast.pool")

WAITING, TAKEN, CLAIM = "waiting", "taken", "claim"
_FILE = re.compile(r"(\d{1,18})\.(waiting|taken|claim|log)")
# How often a member looks whether a run has taken it, and whether any may (seconds).
LOOK_S, LOOK_AT_USE_S = 0.2, 5.0
# So long it may be unable to read its directory, and to get an answer of Slurm.
STORAGE_LIMIT_S, SLURM_LIMIT_S = 60.0, 3.0
# Who submits members holds the lease; one that is older was left by a process that is gone.
LEASE_S = 300.0
# What a member that could not begin has written is kept for a day.
LOG_KEPT_S = 86400.0
# Jobs that bring a node to a run at once go ahead of those that wait for one.
NICE = 100
# Of the run's options the account is known from Slurm.
_ACCOUNT = "--account="


class PoolClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a member is to be: small job `number` of the run in `directory`, for the allocation `key`."""

    run: str
    directory: str
    number: int
    key: str


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the pool's own journal: a run took the member `job`, which had waited since then."""

    t: float
    job: str
    node: str
    since: float
    run: str


def job_name(directory: str) -> str:
    """The name of jobs that wait: as one pool's they are counted in Slurm's queue."""
    return f"jurymast-pool-{hashlib.sha256(os.path.realpath(directory).encode()).hexdigest()[:8]}"


# ---- the files


class PoolDirectory:
    """Every call may wait for storage, and raises OSError, NotOurs above all."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.used, self.lease, self.claims = (self.root / n for n in ("used", "lease", "claims.jsonl"))

    def make(self) -> None:
        foreign.make_private(self.root)

    def file(self, job: str, kind: str) -> Path:
        return self.root / f"{job}.{kind}"

    def files(self) -> dict[str, set[str]]:
        """The kinds of files that there are of each job."""
        foreign.check_private(self.root)
        renew(self.root)
        found: dict[str, set[str]] = {}
        for name in foreign.names(self.root):
            if of_a_job := _FILE.fullmatch(name):
                found.setdefault(of_a_job[1], set()).add(of_a_job[2])
        return found

    def members(self, kind: str = WAITING) -> list[PoolMember]:
        """Those that wait. What is no sign is passed over."""
        found = []
        for job, kinds in self.files().items():
            if kind in kinds and (member := self._sign(job, kind)) is not None:
                found.append(member)
        return found

    def _sign(self, job: str, kind: str) -> PoolMember | None:
        path = self.file(job, kind)
        try:
            member = msgspec.convert(foreign.load_own(path, foreign.NOTE_BYTES_MAX), PoolMember)
        except FileNotFoundError:  # taken just now
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is passed over: %s", path, error)
            return None
        return member if member.job == job else None

    def take(self, job: str) -> bool:
        """Take its sign, which one process alone can."""
        try:
            os.rename(self.file(job, WAITING), self.file(job, TAKEN))
        except FileNotFoundError:
            return False
        return True

    def tell(self, member: PoolMember, claim: PoolClaim) -> None:
        write_json(self.file(member.job, CLAIM), msgspec.to_builtins(claim))
        told = Claimed(t=time.time(), job=member.job, node=member.node, since=member.since, run=claim.run)
        with suppress(OSError):  # it is for people
            self._note(told)

    def answered(self, job: str) -> bool:
        renew(self.root)
        return not foreign.exists(self.file(job, CLAIM))

    def withdraw(self, job: str) -> bool:
        """Take the claim back; False if the member has answered in the meantime."""
        try:
            self.file(job, CLAIM).unlink()
        except FileNotFoundError:
            return False
        return True

    def _note(self, claimed: Claimed) -> None:
        descriptor = foreign.writing(self.claims)
        try:
            os.write(descriptor, msgspec.json.encode(claimed) + b"\n")
        finally:
            os.close(descriptor)

    def remove(self, job: str, kinds: Collection[str] = (WAITING, TAKEN, CLAIM)) -> None:
        for kind in kinds:
            self.file(job, kind).unlink(missing_ok=True)

    def use(self) -> None:
        """Show members that a run may need them."""
        os.close(foreign.writing(self.used))
        os.utime(self.used)

    def used_at(self) -> float:
        """0.0: never."""
        try:
            return foreign.link_status(self.used).st_mtime
        except FileNotFoundError:
            return 0.0

    @contextmanager
    def leased(self) -> Iterator[bool]:
        """Whether this process alone may submit members, inside this context."""
        if not (held := self._lease()):
            self._break_lease()
        try:
            yield held
        finally:
            if held:
                self.lease.unlink(missing_ok=True)

    def _lease(self) -> bool:
        try:
            os.close(os.open(self.lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True

    def _break_lease(self) -> None:
        """Remove a lease that is too old, for the next one who asks. A new one that has come to its place
        meanwhile goes back there."""
        aside = self.lease.with_name(f"lease.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            if not self._is_old(self.lease):
                return
            os.rename(self.lease, aside)
            if not self._is_old(aside):
                with suppress(FileExistsError):
                    os.link(aside, self.lease)
            aside.unlink()

    def _is_old(self, lease: Path) -> bool:
        return time.time() - foreign.link_status(lease).st_mtime > LEASE_S


# ---- what a run does


def need_of(plan: RunPlan, allocation: Allocation, exclude: Sequence[str]) -> PoolNeed:
    """What the run asks of a node; none of `exclude`. Asks Slurm how long the run may last."""
    left_s = ends_in_s(allocation)
    out = {name for word in (*plan.excluded_at(time.time()), *exclude) for name in expanded(word)}
    return PoolNeed(
        partition=refill.partition_of(plan, allocation), account=allocation.account,
        root=refill.root_file_system(), options=_asked(plan),
        left_s=math.inf if left_s is None else left_s, exclude=frozenset(out),
    )  # fmt: skip


def _asked(plan: RunPlan) -> tuple[str, ...]:
    return tuple(word for word in refill.own_options(plan) if not word.startswith(_ACCOUNT))


def command(plan: RunPlan, allocation: Allocation, exclude: Sequence[str]) -> list[str]:
    """sbatch's command line for a member: the run's own options for one node, and the time that it asked
    for."""
    root = plan.settings.pool_directory
    given = refill.given(plan)
    limit = given.last("time")
    nice = [] if given.has("nice") else [f"--nice={NICE}"]
    arguments = (root, str(plan.settings.pool_idle_s), *_asked(plan))
    return [
        *refill.for_one_node(plan, allocation, exclude), *nice, *([f"--time={limit}"] if limit else []),
        f"--chdir={root}", f"--output={root}/%j.log", f"--job-name={job_name(root)}",
        refill.wrapping("jurymast.cluster.pool", *arguments, python=plan.python),
    ]  # fmt: skip


def top_up(plan: RunPlan, allocation: Allocation, exclude: Sequence[str]) -> tuple[list[str], str]:
    """Submit what the pool lacks, on none of these nodes, unless another run is at it; returns the jobs, and
    what went wrong. Raises RunDirectoryError, ClusterUnavailableError."""
    place = PoolDirectory(plan.settings.pool_directory)
    jobs = list[str]()
    try:
        place.make()
        place.use()
        with place.leased() as held:
            if not held:
                return jobs, ""
            there = sweep(place)
            for _ in range(pool.lacking(plan.settings.pool_nodes, len(there))):
                asked = sbatch(command(plan, allocation, exclude), limit_s=refill.ASK_LIMIT_S)
                jobs.append(accepted(asked.stdout)[0])
    except OSError as error:
        raise RunDirectoryError(f"pool.directory {place.root}: {error}") from error
    except SubmissionError as error:
        return jobs, str(error)
    return jobs, ""


def sweep(place: PoolDirectory) -> list[str]:
    """Remove the files of members that are gone; returns the jobs that wait, for a node or for a run. Raises
    OSError, ClusterUnavailableError."""
    files = place.files()  # before Slurm is asked: it knows the job of each
    queue = queued()
    for job in files.keys() - queue.keys():
        place.remove(job)
        log_file = place.file(job, "log")
        with suppress(FileNotFoundError):
            if time.time() - foreign.link_status(log_file).st_mtime > LOG_KEPT_S:
                log_file.unlink()
    name = job_name(str(place.root))
    return [job for job, (state, named) in queue.items() if named == name and state in refill.ALIVE]


def end_all(place: PoolDirectory) -> list[str]:
    """End the jobs that wait, and return them. Raises OSError, ClusterUnavailableError."""
    if jobs := sweep(place):
        run_command(["scancel", *jobs])
        for job in jobs:
            place.remove(job)
    return jobs


def queued() -> dict[str, tuple[str, str]]:
    """The state and the name of each of the user's jobs. Raises ClusterUnavailableError."""
    told = run_command(["squeue", "--noheader", "--me", "--format=%i|%T|%j"])
    parts = (line.strip().split("|", 2) for line in told.splitlines())
    return {part[0]: (part[1], part[2]) for part in parts if len(part) == 3}


# ---- what runs in a member


class Waiting:
    """A member of the pool, until a run takes it."""

    def __init__(self, root: str, idle_s: float, options: Sequence[str]) -> None:
        self.place, self.idle_s = PoolDirectory(root), idle_s
        self.job = os.environ["SLURM_JOB_ID"]
        self._options = tuple(options)
        self._reader: subprocess.Popen[bytes] | None = None
        self._began_at = time.time()
        self._taken_at: float | None = None
        self._look_at = 0.0
        self._used_at = 0.0

    def show(self) -> None:
        """Write the sign. Raises OSError, ClusterUnavailableError."""
        own = os.environ.get
        allocation = Allocation(self.job, 0, (), "", 0.0)
        if (left_s := ends_in_s(allocation)) is None:
            raise ClusterUnavailableError("Slurm does not say when this job ends")
        sign = PoolMember(
            job=self.job, node=own("SLURMD_NODENAME") or socket.gethostname(),
            partition=own("SLURM_JOB_PARTITION", ""), account=own("SLURM_JOB_ACCOUNT", ""),
            root=refill.root_file_system(), options=self._options, since=self._began_at,
            ends_at=None if left_s == math.inf else time.time() + left_s,
        )  # fmt: skip
        foreign.check_private(self.place.root)
        write_json(self.place.file(self.job, WAITING), msgspec.to_builtins(sign))

    def warm(self) -> None:
        """Have torch read once, so that its files are in the node's memory when ranks load it."""
        nothing = subprocess.DEVNULL
        with suppress(OSError):
            self._reader = subprocess.Popen(
                run_code("import torch"), stdin=nothing, stdout=nothing, stderr=nothing
            )

    def wait(self) -> PoolClaim | None:
        """Wait until a run takes this member; None if that does not happen. Raises OSError."""
        failing_since: float | None = None
        while True:
            try:
                if foreign.exists(self.place.file(self.job, CLAIM)):
                    return self._claim()
                if why := self._why_end():
                    log.info("%s", why)
                    return None
                failing_since = None
            except OSError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > STORAGE_LIMIT_S:
                    raise
                log.warning("%s", error)
            time.sleep(LOOK_S)
            renew(self.place.root)

    def _why_end(self) -> str:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at, self._used_at = now + LOOK_AT_USE_S, self.place.used_at()
        if foreign.exists(self.place.file(self.job, WAITING)):
            self._taken_at = None
        elif self._taken_at is None:
            self._taken_at = now
        taken_s = None if self._taken_at is None else now - self._taken_at
        return pool.why_end(time.time(), self._used_at, self.idle_s, taken_s=taken_s)

    def _claim(self) -> PoolClaim:
        """Raises OSError."""
        path = self.place.file(self.job, CLAIM)
        try:
            return msgspec.convert(foreign.load_own(path, foreign.NOTE_BYTES_MAX), PoolClaim)
        except ValueError as error:
            raise OSError(f"{path} cannot be read: {error}") from error

    def answer(self, claim: PoolClaim, plan: RunPlan) -> bool:
        """Become a small job of the run; False if that has given up waiting. Raises OSError,
        ClusterUnavailableError."""
        name = refill.job_name(plan, claim.number)
        run_command(["scontrol", "update", f"JobId={self.job}", f"JobName={name}"], SLURM_LIMIT_S)
        return self.place.withdraw(self.job)

    def leave(self) -> None:
        if self._reader is not None:
            self._reader.kill()
            self._reader.wait()
        with suppress(OSError):
            self.place.remove(self.job, (WAITING, TAKEN))


def main(root: str, idle_s: str, *options: str) -> int:
    waiting = Waiting(root, float(idle_s), options)
    signal.signal(signal.SIGTERM, _ends)
    try:
        waiting.show()
        waiting.warm()
        claim = waiting.wait()
        if claim is None:
            waiting.place.remove(waiting.job, ["log"])
            return 0
        directory = RunDirectory(Path(claim.directory))
        plan = to_begin(directory.own_plan)
        if not waiting.answer(claim, plan):
            log.info("run %s has given up waiting for the answer", plan.run)
            return 0
    finally:
        waiting.leave()
    with suppress(OSError):
        waiting.place.remove(waiting.job, ["log"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _write_to(directory.submission / f"refill-{waiting.job}.log")
    os.chdir(directory.submission)
    inside = run_module(*refill.agent_of(str(directory.root), claim.number, claim.key), python=plan.python)
    os.execve(inside[0], inside, os.environ)
    raise AssertionError("execve returns only if it fails")


def _ends(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _write_to(path: Path) -> None:
    """From now on, what this job prints stands beside that of the run's other small jobs."""
    with suppress(OSError):
        descriptor = foreign.writing(path)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)


if __name__ == "__main__":
    log_as("pool")
    try:
        sys.exit(main(*sys.argv[1:]))
    except (JurymastError, OSError) as failure:
        log.error("%s", failure)
        sys.exit(failure.exit_code if isinstance(failure, JurymastError) else 1)
