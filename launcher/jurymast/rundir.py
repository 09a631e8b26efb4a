"""The run directory: every path in it, and the rules for making it (0700, files 0600, each whole or
absent)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jurymast import foreign
from jurymast.core.state.settings import RunPlan
from jurymast.errors import RunDirectoryError


def write_atomically(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o600) -> None:
    """Write `data` so that `path` has the old content or the new, never a part.

    `durable`, which every file needs that is read after its writer's node has lost power, also waits until
    the content and the name are on disk: without that the file may be there and empty. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with foreign.asking(path):
            _write_as(temporary, path, data, durable=durable, mode=mode)
    except OSError as error:  # by a name that is not another one each time: who tries again tells it once
        raise OSError(error.errno, error.strerror, str(path)) from error
    if durable:
        sync_directory(path.parent)


def _write_as(temporary: Path, path: Path, data: bytes, *, durable: bool, mode: int) -> None:
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def default_runs() -> Path:
    """The directory of runs: $JURYMAST_RUNS, or `runs` in the working directory."""
    return Path(os.environ.get("JURYMAST_RUNS") or "runs").absolute()


def write_json(path: Path, values: Any, *, durable: bool = True) -> None:
    """Write JSON in the same way."""
    write_atomically(path, json.dumps(values).encode(), durable=durable)


# A directory of a hundred thousand files is slow on shared storage; one folder per node would not let a file
# be found from its rank's number.
RANKS_A_FOLDER = 1000

# This much room is kept free for the run's last entries, which a full disk must not lose.
RESERVE_BYTES = 1 << 20
SECRET_BYTES = 32
SECRET_FILE_BYTES_MAX = 1024


# Longer than any attempt's number; what is longer is damage.
ATTEMPT_BYTES_MAX = 64
ATTEMPT_DIGITS_MAX = 9


# States of outcomes after which a run is in no queue any more.
_ENDED = frozenset({"succeeded", "failed", "cancelled"})


def attempt_in(data: bytes) -> int:
    """The number in an attempt file's content. Raises ValueError for anything but plain digits."""
    digits = data.strip()
    if not digits.isdigit() or len(digits) > ATTEMPT_DIGITS_MAX:
        raise ValueError("no number of an attempt")
    return int(digits)


# The letters of which `submit` makes names, which no shell reads in another way; but no job's id.
_RUN_NAME = re.compile(r"(?!\d+$|local-\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")


def run_names(runs: Path) -> list[str]:
    """The names in a runs directory that may be runs, oldest first. Others may write there, too: only names
    like those that `submit` makes count, and no links, which would be the same run again, or another one.
    Raises OSError."""
    return sorted(
        name for name in foreign.names(runs)
        if _RUN_NAME.fullmatch(name) and stat.S_ISDIR(_mode(runs / name))
    )  # fmt: skip


def _mode(path: Path) -> int:
    try:
        return foreign.link_status(path).st_mode
    except OSError:  # removed in the meantime
        return 0


def sync_directory(path: Path) -> None:
    """Make renames in `path` durable."""
    with foreign.asking(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # some file systems do this for no directory
                raise
        finally:
            os.close(descriptor)


def make_durable_folder(path: Path) -> None:
    """Make a directory and those above it with mode 0700, so that a power cut does not take them back.
    Existing ones are not changed. Raises OSError."""
    missing = [one for one in (path, *path.parents) if not foreign.exists(one)]
    with foreign.asking(path):
        make_folder(path)
    for one in missing:
        sync_directory(one.parent)


def renew(path: Path) -> None:
    """Renew a network file system's view of a directory, which may be cached for up to a minute, by a
    change in it. If the directory is not ours to change, the view stays old, and later reads find what has
    changed."""
    with contextlib.suppress(OSError):
        os.utime(path)


def make_folder(path: Path) -> None:
    """Make a directory and those above it with mode 0700; existing ones are not changed. Raises OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        make_folder(path.parent)
        make_folder(path)


_RANK_LOG = re.compile(r"rank-[0-9]{5,9}\.log")


def rank_of(log: Path) -> int:
    """The rank of which this is the log."""
    return int(log.stem.removeprefix("rank-"))


def ranks_folder(parent: Path, rank: int) -> Path:
    """The folder of the files of this rank and its neighbours: `parent` for the first ranks, a folder in it
    for others."""
    first = rank - rank % RANKS_A_FOLDER
    return parent / f"ranks-{first:05d}" if first else parent


def check_readable(run: Path) -> None:
    """Raise RunDirectoryError if the run directory exists but this user may not read it."""
    if not foreign.is_directory(run) or os.access(run, os.R_OK | os.X_OK, effective_ids=True):
        return
    uid = foreign.status(run).st_uid
    if uid == os.geteuid():
        raise RunDirectoryError(f"{run} cannot be read: permission denied", hint=f"chmod u+rwx {run}")
    raise RunDirectoryError(
        f"{run} belongs to {foreign.user_name(uid)}", hint="only its owner can look into it"
    )


class Made(NamedTuple):
    """Which directory it is, whatever its name."""

    device: int
    number: int

    @classmethod
    def of(cls, place: Path) -> Made:
        found = foreign.status(place)
        return cls(found.st_dev, found.st_ino)


class _Place:
    """A path below the run directory. Thousands of directories are looked into for a few of them, so each is
    made when it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, kind: type[RunDirectory]) -> Path:
        return directory.root / self._name


class RunDirectory:
    """Paths of one run; nothing is created until `create`."""

    plan_file = _Place("plan.json")
    policy_file = _Place("policy.yaml")
    secret_file = _Place("secret")
    epochs = _Place("epochs")
    journal = _Place("journal")
    logs = _Place("logs")
    checkpoints = _Place("checkpoints")
    # What the submission and Slurm write: the batch script, the jobs' ids, and Slurm's own output.
    submission = _Place("slurm")
    # Number of the newest attempt: keeps ranks of older attempts away from the checkpoints.
    attempt_file = _Place("attempt")
    # The nodes that the run has now; see `cluster.allocation`.
    allocation_file = _Place("allocation.json")
    # How the newest allocation ended: written by the supervisor for the batch process.
    outcome_file = _Place("outcome.json")
    # What a fleet counts of a run that has ended; see `report.fleet`.
    summary_file = _Place("summary.json")
    # What people were told of the run, by the policy's `notify`.
    notices_file = _Place("notices.json")
    # Where the metrics are scraped: a socket; a port, as Prometheus reads it (file_sd_configs), with a token.
    metrics_socket = _Place("metrics.sock")
    metrics_file = _Place("metrics.json")
    metrics_token_file = _Place("metrics.token")
    # Occupies the room that the journal's end and the outcome need on a full disk.
    reserve_file = _Place("reserve")

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def hold_reserve(self) -> None:
        try:
            with open(self.reserve_file, "xb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
        except FileExistsError:
            return
        except OSError:  # the disk is full already: the next supervisor tries again
            self.give_reserve_up()

    def give_reserve_up(self) -> None:
        with contextlib.suppress(OSError):
            self.reserve_file.unlink()

    def evidence(self, attempt: int) -> Path:
        """The folder for evidence about an attempt's hung ranks, taken before they were stopped; see
        `ranks_folder`."""
        return self.root / "evidence" / f"attempt-{attempt:04d}"

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt:04d}"

    def rank_log(self, attempt: int, rank: int) -> Path:
        return ranks_folder(self.attempt_logs(attempt), rank) / f"rank-{rank:05d}.log"

    def rank_errors(self, attempt: int, rank: int) -> Path:
        """The log of a rank's stderr if that is apart from its stdout."""
        return self.rank_log(attempt, rank).with_suffix(".err")

    def last_words(self, attempt: int, rank: int) -> Path:
        """The log that shows best why a rank ended: of its stderr, if that has something of its own."""
        errors = self.rank_errors(attempt, rank)
        with contextlib.suppress(OSError):
            if foreign.status(errors).st_size:
                return errors
        return self.rank_log(attempt, rank)

    def rank_logs(self, attempt: int) -> list[Path]:
        """The existing logs of an attempt's ranks, in the order of ranks."""
        folder = self.attempt_logs(attempt)
        folders = (folder, *foreign.found(folder, "ranks-*"))
        found = (log for one in folders for log in foreign.found(one, "rank-*.log"))
        return sorted((log for log in found if _RANK_LOG.fullmatch(log.name)), key=rank_of)

    def create(self) -> Made:
        """Make the directory with its subdirectories and the run's secret. Raises RunDirectoryError."""
        made, begun = None, False
        try:
            with foreign.asking(self.root):
                if self.root.parent != self.root:
                    make_durable_folder(self.root.parent)  # not by the umask: writers there can swap runs
                self.root.mkdir(mode=0o700)
                begun = True
                made = self._just_made()
                with contextlib.suppress(PermissionError):  # who may make runs there need not see others'
                    sync_directory(self.root.parent)
                for part in (self.epochs, self.journal, self.logs, self.checkpoints, self.submission):
                    part.mkdir(mode=0o700)
                write_atomically(self.secret_file, secrets.token_hex(SECRET_BYTES).encode())
        except OSError as error:
            if made is not None:  # after a full disk, for example: nothing stays that looks like a run
                self.unmake(made)
            elif begun:
                with contextlib.suppress(OSError):
                    self.root.rmdir()
            raise RunDirectoryError(
                f"cannot create the run directory {self.root}: {error.strerror or error}",
                hint="choose another directory with --runs DIR, on storage that all nodes share",
            ) from error
        return made

    def _just_made(self) -> Made:
        """Which directory it is. Raises OSError if somebody has put another one in its place already."""
        with foreign.own_directory(self.root) as held:
            if names := foreign.names(held):
                raise FileExistsError(errno.EEXIST, f"somebody else's {names[0]} is in it", str(self.root))
            return Made.of(held)

    def unmake(self, made: Made) -> None:
        """Remove the directory that `create` has `made`, best effort; and no other one of this user's, which
        somebody who can rename it may have put in its place."""
        with contextlib.suppress(OSError), foreign.own_directory(self.root) as held:
            if Made.of(held) == made:
                shutil.rmtree(f"{held}/.", ignore_errors=True)  # a Path would drop the dot, and be a link
        with contextlib.suppress(OSError):
            self.root.rmdir()

    def secret(self) -> bytes:
        """The run's secret, 32 bytes. Raises RunDirectoryError if others could have read or made it."""
        try:
            data = foreign.read_own(self.secret_file, SECRET_FILE_BYTES_MAX, closed=foreign.OTHERS_ANYTHING)
            secret = bytes.fromhex(data.decode())
            if len(secret) != SECRET_BYTES:  # everybody knows the key of an empty file
                raise ValueError(f"it holds {len(secret)} bytes, not {SECRET_BYTES}")
            return secret
        except foreign.NotOurs as error:
            raise RunDirectoryError(
                f"other users can read {self.secret_file}, or own it",
                hint=f"if it is yours, run: chmod 600 {self.secret_file}",
            ) from error
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"cannot read the run's secret {self.secret_file}: {error}") from error

    def save_plan(self, plan: RunPlan) -> None:
        write_atomically(self.plan_file, json.dumps(plan.to_json(), indent=1).encode())

    def has_ended(self) -> bool:
        """Whether the run's outcome says so; it is not in Slurm's queue again then. Raises OSError,
        ValueError."""
        try:
            outcome = foreign.load(self.outcome_file, foreign.NOTE_BYTES_MAX)
        except FileNotFoundError:
            return False
        return isinstance(outcome, dict) and outcome.get("state") in _ENDED

    def plan(self) -> RunPlan:
        """The run's plan. Raises RunDirectoryError if the file is missing or damaged."""
        try:
            return self._plan_in(foreign.read(self.plan_file, foreign.PLAN_BYTES_MAX))
        except OSError as error:
            check_readable(self.root)
            raise RunDirectoryError(f"cannot read {self.plan_file}: {error.strerror}") from error

    def own_plan(self) -> RunPlan:
        """The plan, for a process that acts on it. The directory is held while it is read, so that nobody who
        can rename it puts another one in its place. Raises RunDirectoryError, also if the directory or the
        plan is not this user's alone."""
        try:
            with foreign.own_directory(self.root) as held:
                return self._plan_in(foreign.read_own(held / self.plan_file.name, foreign.PLAN_BYTES_MAX))
        except foreign.NotOurs as error:
            raise RunDirectoryError(
                f"nothing of this run is started: {error}",
                hint="whoever can write to the directory above may have put it there",
            ) from error
        except OSError as error:
            raise RunDirectoryError(f"cannot read {self.plan_file}: {error.strerror}") from error

    def _plan_in(self, data: bytes) -> RunPlan:
        try:
            return RunPlan.from_json(foreign.parse(data))
        except ValueError as error:
            damage = f"not JSON ({error})"
            if isinstance(error, msgspec.ValidationError):
                damage = f"a value of the plan is missing or wrong: {error}"
            raise RunDirectoryError(f"{self.plan_file} is damaged: {damage}") from error

    def journal_files(self) -> Iterator[Path]:
        """The journal's files, oldest epoch first; none if there is no journal that this user may read."""
        try:
            names = foreign.names(self.journal)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        yield from (self.journal / name for name in sorted(names) if name.endswith(".jsonl"))

    def save_attempt(self, attempt: int) -> None:
        """Write the number of the newest attempt. Raises OSError."""
        write_atomically(self.attempt_file, str(attempt).encode())

    def newest_attempt(self) -> int:
        """The number in the attempt file; 0 if the run directory has none. Raises RunDirectoryError if it
        cannot be known: then no caller may take its own attempt for the newest."""
        try:
            return attempt_in(foreign.read(self.attempt_file, ATTEMPT_BYTES_MAX))
        except FileNotFoundError as error:
            if foreign.exists(self.plan_file):
                return 0
            why = f"{error.strerror}, nor is {self.plan_file.name}"
            raise RunDirectoryError(f"{self.attempt_file} cannot be read: {why}") from error
        except OSError as error:
            raise RunDirectoryError(f"{self.attempt_file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RunDirectoryError(
                f"{self.attempt_file} is damaged: no number",
                hint=f"jurymast restart {self.root} writes it anew",
            ) from error
