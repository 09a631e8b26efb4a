"""The shared directory of checkpoints: names, manifests, completeness, retention. No torch here.

    checkpoints/owner.json                the run that writes here, see below
    checkpoints/step-00000100/            complete: a stock torch.distributed.checkpoint directory ...
    checkpoints/step-00000100/jurymast.json   ... with our manifest, written last
    checkpoints/.saving-00000200.a0003.<nonce>/   being written by attempt 3
    checkpoints/.writing-00000200.a0003.<nonce>/ being written by the nodes' storage processes
    checkpoints/.deleting-00000050.<nonce>/       being deleted
    checkpoints/pinned/00000100                   this step is never removed
    checkpoints/verified/00000100                 hash of the manifest whose files were all checked, and the
                                                  damage found
    checkpoints/rollback.json                     all rollbacks: what they covered is never restored again
    checkpoints/step-00000150.rolled-back-<nonce>/   kept until somebody deletes it

A checkpoint is complete or absent: it is written under a name that nobody reads, and renamed once all of it
is on disk. Nothing is ever written into a directory that has its final name.

A directory of checkpoints has an owner, `owner.json`: {"run": its id, "directory": its run directory}. Only
one run writes there, because a run's sweeps would remove another run's files. The first run that writes there
owns the directory, in all its attempts and allocations, until it has ended; then the next run that writes
does. Everybody may read. A training that is no run of jurymast owns nothing, and does not write to a
directory that a run owns.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from jurymast import foreign
from jurymast.core.checkpoints.commit import Rollback, superfluous
from jurymast.core.checkpoints.copies import StateId
from jurymast.errors import CheckpointError
from jurymast.rundir import RunDirectory, sync_directory, write_atomically

MANIFEST = "jurymast.json"
FORMAT = 1
READ_BYTES = 4 << 20
Natural = Annotated[int, msgspec.Meta(ge=0)]

_FINAL = re.compile(r"step-(\d{8,})")
_SAVING = re.compile(r"\.saving-(\d+)\.a(\d+)\.[0-9a-f]+")
_WRITING = re.compile(r"\.(?:writing|draining)-(\d+)\.a(\d+)\.[0-9a-f]+")  # draining: up to version 0.1
_DELETING = re.compile(r"\.deleting-\d+\.[0-9a-f]+")
_ROLLED_BACK = re.compile(r"step-(\d{8,})\.rolled-back-[0-9a-f]+")
PINNED = "pinned"
VERIFIED = "verified"
ROLLBACK = "rollback.json"


class BadCheckpoint(Exception):
    """A directory is not a checkpoint to trust. The message says why, on one line."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its `name` relative to the checkpoint, and size and hash as `rank` wrote
    it."""

    name: str
    size_bytes: Natural
    xxh3_64: str
    rank: Natural = 0


@dataclass(frozen=True)
class CheckpointManifest:
    """The contents of a complete checkpoint. `entries` says how each entry was saved."""

    step: Natural
    attempt: Natural
    world_size: Natural
    torch: str
    files: tuple[FileRecord, ...]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Return JSON with a hash of itself, so that a damaged manifest is not taken for damaged files."""
        values = asdict(self)
        values["manifest_xxh3_64"] = _hash_of_values(values)
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointManifest:
        """Parse a manifest. Raises BadCheckpoint."""
        try:
            values: dict[str, Any] = foreign.parse(data)
            expected = values.pop("manifest_xxh3_64")
            if values["format"] != FORMAT:
                raise BadCheckpoint(f"its format is {values['format']}, but this version reads only {FORMAT}")
            if _hash_of_values(values) != expected:
                raise BadCheckpoint(f"{MANIFEST} is damaged: its hash does not match")
            manifest = msgspec.convert(values, cls)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
        for file in manifest.files:
            _check_name(file.name)
        return manifest


def _check_name(name: str) -> None:
    """Raise BadCheckpoint for a name that leads out of the checkpoint: others may write to the bucket that
    the manifest came from."""
    if name in ("", ".", "..", MANIFEST) or "/" in name or not name.isprintable():
        raise BadCheckpoint(f"{MANIFEST} names a file that does not belong to a checkpoint: {name!r}")


def _hash_of_values(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def final_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    match = _FINAL.fullmatch(name)
    return int(match[1]) if match else None


def names_in(directory: Path) -> list[str]:
    """List the names in a directory; [] if it is missing. Raises OSError."""
    try:
        return foreign.names(directory)
    except FileNotFoundError:
        return []


def hash_file(path: Path, advance: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Return a file's size in bytes and its xxh3_64. `advance` gets the number of bytes after each read.
    Raises OSError."""
    digest = xxhash.xxh3_64()
    size = 0
    buffer = memoryview(bytearray(READ_BYTES))
    with foreign.reading(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            if advance is not None:
                advance(count)
    return size, digest.hexdigest()


# A file is brought to the disk in portions of this size. In one go, all of it might wait in the page cache
# for the sync at the end, for minutes in which nobody could tell slow storage from storage that hangs.
SYNC_BYTES = 256 << 20


class NewFile(io.BufferedWriter):
    """A file of mode 0600 that must not exist yet. With `hashing` its bytes are hashed before they are
    written, so that later damage shows. It is on disk once its block ends without an error, and all but its
    last bytes earlier."""

    def __init__(self, path: Path, *, hashing: bool = True) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        super().__init__(os.fdopen(descriptor, "wb", buffering=0), 1 << 20)
        self._digest = xxhash.xxh3_64() if hashing else None
        self.size = self._synced = 0

    def write(self, data: Any) -> int:
        count = super().write(data)
        if self._digest is not None:
            self._digest.update(data)
        self.size += count
        if self.size >= self._synced + SYNC_BYTES:
            os.fdatasync(self.fileno())
            self._synced = self.size
        return count

    def fileno(self) -> int:
        self.flush()  # whoever asks syncs the file, and that must include our buffer
        return super().fileno()

    @property
    def hexdigest(self) -> str:
        return self._digest.hexdigest() if self._digest else ""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.closed:  # torch syncs and closes it itself
                os.fsync(self.fileno())
        finally:
            self.close()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class CheckpointDirectory:
    """One directory of checkpoints. Only one process, rank 0, calls the methods that write."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, step: int) -> Path:
        return self.root / final_name(step)

    def steps(self) -> list[int]:
        """List the steps that have a directory, complete or not, newest first. Raises OSError."""
        found = (step_of(name) for name in names_in(self.root))
        return sorted((step for step in found if step is not None), reverse=True)

    def manifest(self, step: int) -> CheckpointManifest:
        """Read a step's manifest. Raises BadCheckpoint if it is missing, damaged or of another step."""
        try:
            data = foreign.read(self.path(step) / MANIFEST)
        except FileNotFoundError as error:
            raise BadCheckpoint(f"it has no {MANIFEST}: it is incomplete, or not of jurymast") from error
        except OSError as error:
            raise BadCheckpoint(f"{MANIFEST} cannot be read: {error.strerror}") from error
        manifest = CheckpointManifest.from_bytes(data)
        if manifest.step != step:
            raise BadCheckpoint(f"{MANIFEST} is of step {manifest.step}")
        if self.void(step, manifest.attempt):
            raise BadCheckpoint("it was rolled back")
        return manifest

    def check_sizes(self, step: int, manifest: CheckpointManifest) -> None:
        """Check quickly that every file exists in full length. Raises BadCheckpoint."""
        for record in manifest.files:
            try:
                size = foreign.status(self.path(step) / record.name).st_size
            except OSError as error:
                raise BadCheckpoint(f"{record.name}: {error.strerror}") from error
            if size != record.size_bytes:
                raise BadCheckpoint(f"{record.name} has {size} bytes, expected {record.size_bytes}")

    def check_files(
        self, step: int, files: Iterable[FileRecord], advance: Callable[[int], None] | None = None
    ) -> list[str]:
        """Check `files` fully, by reading and hashing them. Return what is wrong, one line for each file."""
        problems = []
        for record in files:
            try:
                size, digest = hash_file(self.path(step) / record.name, advance)
            except OSError as error:
                problems.append(f"{record.name}: {error.strerror or error}")
                continue
            if size != record.size_bytes:
                problems.append(f"{record.name} has {size} bytes, expected {record.size_bytes}")
            elif digest != record.xxh3_64:
                problems.append(f"{record.name} is corrupt: its hash does not match")
        return problems

    def complete(self) -> list[int]:
        """List the steps whose checkpoint is whole, newest first. Raises OSError."""
        return [step for step in self.steps() if self.whole(step) is not None]

    def whole(self, step: int) -> CheckpointManifest | None:
        """Return the manifest of a step that has all files in full length, and in which the last full check
        found no damage; None for any other step."""
        # Looked up first: a checkpoint set aside between the two looks is missing at the second.
        if self.marked(step)[1]:
            return None
        try:
            manifest = self.manifest(step)
            self.check_sizes(step, manifest)
        except BadCheckpoint:
            return None
        return manifest

    def sizes(self) -> dict[StateId, int]:
        """Return the bytes of each complete checkpoint, by (step, attempt). Raises OSError or
        BadCheckpoint."""
        found = (self.whole(step) for step in self.steps())
        return {StateId(one.step, one.attempt): one.size_bytes for one in found if one is not None}

    def mark(self, step: int, damage: str = "") -> None:
        """Record that all files of the step were just found good, or the `damage` found, on one line; best
        effort."""
        place = self.root / VERIFIED
        try:
            with foreign.asking(place):
                place.mkdir(mode=0o700, exist_ok=True)
            _, digest = hash_file(self.path(step) / MANIFEST)
            found = f"{digest}\n{damage}" if damage else digest
            write_atomically(place / f"{step:08d}", found.encode(), durable=False)
        except OSError:
            return

    def marked(self, step: int) -> tuple[float | None, str]:
        """Return when the last full check found the present checkpoint good (Unix time), or the damage that
        it found; (None, "") if there was no check."""
        mark = self.root / VERIFIED / f"{step:08d}"
        try:
            digest, _, damage = foreign.read(mark).decode().partition("\n")
            if digest == hash_file(self.path(step) / MANIFEST)[1]:
                return None if damage else foreign.status(mark).st_mtime, damage
        except (OSError, ValueError):
            pass
        return None, ""

    # ---- writing (rank 0)

    def begin(self, step: int, attempt: int) -> Path:
        """Create the directory in which `step` is written. Raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.root / f".saving-{step:08d}.a{attempt:04d}.{secrets.token_hex(4)}"
        temporary.mkdir(mode=0o700)
        return temporary

    def seal(self, temporary: Path, manifest: CheckpointManifest) -> None:
        """Write the manifest as the last file, and wait until names and contents are on disk. Raises
        OSError."""
        for record in manifest.files:
            size = foreign.status(temporary / record.name).st_size
            if size != record.size_bytes:
                raise OSError(errno.EIO, f"{record.name} has {size} bytes, expected {record.size_bytes}")
        write_atomically(temporary / MANIFEST, manifest.to_bytes())

    def publish(self, temporary: Path, step: int) -> None:
        """Give a sealed directory its final name. Raises OSError, also if that name is taken."""
        # rename(2) replaces an empty directory only, so a complete checkpoint can never be overwritten.
        os.rename(temporary, self.path(step))
        sync_directory(self.root)

    def set_aside(self, step: int) -> str:
        """Rename a damaged checkpoint to make way for a new one; return its new name. Nothing is deleted."""
        name = f"{final_name(step)}.damaged-{secrets.token_hex(4)}"
        os.rename(self.path(step), self.root / name)
        sync_directory(self.root)
        return name

    def sweep(self, attempt: int) -> list[str]:
        """Rename what attempts up to `attempt` left half-written or half-deleted, and delete it in a thread.
        Return the names.

        Directories of newer attempts stay: if there are any, this attempt is the stale one.
        """
        try:
            names = foreign.names(self.root)
        except OSError:
            return []
        old = [name for name in names if _DELETING.fullmatch(name)]  # another process may be deleting these
        for name in names:
            saving = _SAVING.fullmatch(name)
            if saving and int(saving[2]) <= attempt:
                old.append(name)
        found = {name: gone for name in old if (gone := taken_away(self.root / name)) is not None}
        delete_behind(list(found.values()))
        return list(found)

    def writing(self, step: int, attempt: int, nonce: str) -> Path:
        """Return the path under which the nodes' storage processes write a step. `nonce` is hexadecimal and
        differs with each try."""
        return self.root / f".writing-{step:08d}.a{attempt:04d}.{nonce}"

    def sweep_unfinished(self) -> list[str]:
        """Remove what storage processes left half-written; return the names. Raises OSError.

        Called while nobody writes, or by the one write that the supervisor allows at a time. Another write
        that still goes on then fails, and publishes no part of what is removed here.
        """
        swept = [name for name in names_in(self.root) if _WRITING.fullmatch(name)]
        remove_trees([self.root / name for name in swept])
        return swept

    def retire(self, keep: int, known_bad: frozenset[int] = frozenset()) -> list[Path]:
        """Rename all but the newest `keep` complete checkpoints; return the paths that are left to delete.

        A rename takes effect at once, so that no reader ever sees half a checkpoint. Raises OSError.
        """
        doomed: list[Path] = []
        for step in superfluous(self.complete(), keep, self.pinned(), known_bad):
            gone = self.root / f".deleting-{step:08d}.{secrets.token_hex(4)}"
            os.rename(self.path(step), gone)
            doomed.append(gone)
        return doomed

    def retire_behind(
        self, keep: int, complain: Callable[[str], object], known_bad: frozenset[int] = frozenset()
    ) -> None:
        """`retire`, and delete in a thread; `complain` gets why that failed, on one line."""
        try:
            delete_behind(self.retire(keep, known_bad))
        except OSError as error:
            complain(f"cannot remove old checkpoints: {one_line(error)}")

    # ---- pins

    def pinned(self) -> set[int]:
        """Return the steps that are never removed. Raises OSError."""
        return {int(name) for name in names_in(self.root / PINNED) if name.isdecimal()}

    def pin(self, step: int) -> None:
        """Pin a step, so that it is never removed. Raises OSError, and BadCheckpoint if the step has no
        complete checkpoint."""
        place = self.root / PINNED
        self.check_sizes(step, self.manifest(step))
        place.mkdir(mode=0o700, exist_ok=True)
        write_atomically(place / f"{step:08d}", b"")
        try:
            self.manifest(step)
        except BadCheckpoint:  # retired meanwhile
            self.unpin(step)
            raise

    def unpin(self, step: int) -> bool:
        """Unpin a step; return False if it was not pinned. Raises OSError."""
        try:
            (self.root / PINNED / f"{step:08d}").unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- going back

    def rollbacks(self) -> list[Rollback]:
        """List all rollbacks, oldest first. Raises BadCheckpoint if the record cannot be read: then nobody
        knows what may be restored."""
        path = self.root / ROLLBACK
        try:
            values: dict[str, Any] = foreign.load(path)
            return [Rollback(**one) for one in values["rollbacks"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {one_line(error)}") from error

    def void(self, step: int, attempt: int) -> bool:
        """Return whether a state was rolled back; this holds in every tier. Raises BadCheckpoint."""
        return any(one.voids(step, attempt) for one in self.rollbacks())

    def rollback(self, step: int, attempt: int) -> list[str]:
        """Make `step` the newest: rename all newer steps, which are never restored again; return their new
        names. `attempt` is the newest attempt so far; later ones may save newer steps again. The record is
        written first: after an interruption the newer checkpoints are void already. Raises OSError, and
        BadCheckpoint if `step` does not exist."""
        self.check_sizes(step, self.manifest(step))
        record = [*self.rollbacks(), Rollback(step, attempt, time.time())]
        data = json.dumps({"rollbacks": [asdict(one) for one in record]}, indent=1).encode()
        write_atomically(self.root / ROLLBACK, data)
        renamed = []
        for newer in self.steps():
            if newer > step:
                name = f"{final_name(newer)}.rolled-back-{secrets.token_hex(4)}"
                os.rename(self.path(newer), self.root / name)
                self.unpin(newer)
                renamed.append(name)
        sync_directory(self.root)
        return renamed

    def rolled_back(self) -> list[Path]:
        """List the directories that rollbacks set aside. Raises OSError."""
        return [self.root / name for name in sorted(names_in(self.root)) if _ROLLED_BACK.fullmatch(name)]


def remove_trees(directories: Iterable[Path]) -> None:
    """Remove directories of checkpoints, best effort: `sweep` removes what is left."""
    for directory in directories:
        if (gone := taken_away(directory)) is not None:
            shutil.rmtree(gone, ignore_errors=True)


def delete_behind(directories: list[Path]) -> None:
    """Delete renamed directories in a thread: freeing their space may take long, or hang, and no reader sees
    them any more."""
    if directories:
        threading.Thread(target=remove_trees, args=(directories,), name="jurymast-delete").start()


def taken_away(directory: Path) -> Path | None:
    """Rename a directory, so that nobody writes to it or publishes it while it is emptied. Return its new
    path, or None if it cannot be renamed."""
    if _DELETING.fullmatch(directory.name):
        return directory
    gone = directory.with_name(f".deleting-{0:08d}.{secrets.token_hex(4)}")
    try:
        with foreign.asking(directory):
            os.rename(directory, gone)
    except OSError:
        return None
    return gone


# ---- the owner

OWNER = "owner.json"
ENDED = frozenset({"succeeded", "failed", "cancelled"})
# Another run may claim the directory between our look and our claim.
TRIES = 10
GIVEN_UP_S = 60.0
_NO_NAME = re.compile(r"[^\w.-]")


@dataclass(frozen=True)
class Owner:
    """A run and its run directory."""

    run: str
    directory: str

    @classmethod
    def of_environment(cls) -> Owner | None:
        """Return the run that this process belongs to, or None."""
        run, directory = os.environ.get("JURYMAST_RUN"), os.environ.get("JURYMAST_RUN_DIR")
        return cls(run, directory) if run and directory else None

    def over(self) -> bool:
        """Return whether the run has ended or was removed; False also if that is unknown."""
        run = RunDirectory(self.directory)
        try:
            outcome = foreign.load(run.outcome_file)
            return bool(outcome["state"] in ENDED)
        except FileNotFoundError:
            return foreign.is_directory(run.root.parent) and not foreign.exists(run.root)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def owner(root: Path) -> Owner | None:
    """Return the owner of `root`, or None. Raises OSError, and CheckpointError if the file is damaged."""
    return _read(root / OWNER)


def _read(path: Path) -> Owner | None:
    try:
        values = foreign.load(path)
        return Owner(run=str(values["run"]), directory=str(values["directory"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged, so nothing is saved: another run may be saving there",
            hint=f"make sure that no other run saves there, then run: rm {path}",
        ) from error


def _half_made(path: Path) -> Owner | None:
    """Return who made this claim, or None if it is gone. A claim that is not fully written after GIVEN_UP_S
    is removed: its process was killed. Raises the errors of `_read`."""
    try:
        return _read(path)
    except CheckpointError:
        with suppress(FileNotFoundError):
            if time.time() - foreign.status(path).st_mtime < GIVEN_UP_S:
                raise
            path.unlink()
        return None


def is_foreign(root: Path, us: Owner | None) -> bool:
    """Return whether `root` belongs, or may belong, to another run, whose files must not be removed."""
    try:
        found = owner(root)
    except (OSError, CheckpointError):
        return True
    return found is not None and (us is None or found.run != us.run)


def claim(root: Path, us: Owner | None) -> None:
    """Claim `root` before the first write to it. Raises OSError, and CheckpointError if another run that has
    not ended owns it."""
    for _ in range(TRIES):
        found = owner(root)
        if found is not None and us is not None and found.run == us.run:
            return
        if found is not None and not found.over():
            ours = f"run {us.run}" if us is not None else "this training"
            raise CheckpointError(
                f"run {found.run} ({found.directory}), which has not ended, saves to {root}: "
                f"{ours} cannot save there as well",
                hint=f"choose another directory=, or, if that run has ended, run: rm {root / OWNER}",
            )
        if us is None:
            return
        _take(root, found, us)
    raise CheckpointError(
        f"another run is claiming {root}, or was killed while it did",
        hint=f"choose another directory=, or, if no run is claiming it, run: rm {root}/.{OWNER}.after-*",
    )


def _take(root: Path, found: Owner | None, us: Owner) -> None:
    """Become the owner after `found`, unless another run is first: only the run that made the file of this
    name may put it into that owner's place."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine = root / f".{OWNER}.after-{_NO_NAME.sub('_', found.run) if found is not None else ''}"
    try:
        file = NewFile(mine, hashing=False)
    except FileExistsError:
        other = _half_made(mine)
        if other is None or other.run != us.run:
            return
    else:
        try:
            with file:
                file.write(json.dumps(asdict(us)).encode())
        except OSError:  # a full disk
            mine.unlink(missing_ok=True)
            raise
    if owner(root) != found:
        mine.unlink(missing_ok=True)
        return
    try:
        os.rename(mine, root / OWNER)
    except FileNotFoundError:  # another process of this run was first
        return
    sync_directory(root)
