"""The shared directory of checkpoints: names, manifests, completeness, retention. No torch here.

    checkpoints/owner.json                the run that writes here: see `checkpoint.owner`
    checkpoints/step-00000100/            complete: a stock torch.distributed.checkpoint directory ...
    checkpoints/step-00000100/jurymast.json   ... with our manifest, written last
    checkpoints/.saving-00000200.a0003.<nonce>.<run>/   being written by attempt 3 of that run
    checkpoints/.writing-00000200.a0003.<nonce>.<run>/  being written by the nodes' storage processes
    checkpoints/.deleting-00000050.<nonce>/       being deleted
    checkpoints/pinned/00000100                   hash of the manifest of a checkpoint that is never removed
    checkpoints/verified/00000100                 hash of the manifest whose files were all checked, and the
                                                  damage found
    checkpoints/rollback.json                     all rollbacks: what they covered is never restored again
    checkpoints/step-00000150.rolled-back-<nonce>/   kept until somebody deletes it

A checkpoint is complete or absent: it is written under a name that nobody reads, and renamed once all of it
is on disk. Nothing is ever written into a directory that has its final name. What a run leaves half-written
is removed by the directory's next owner.

Several runs may write here one after another, and each counts its attempts from 1. So manifests, rollbacks
and what is half-written name their run, and pins and marks name the manifest that they are about.
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash

from jurymast import foreign
from jurymast.core.checkpoints.commit import Rollback, superfluous
from jurymast.core.state.images import StateId
from jurymast.reading import PATIENCE_S, Unable, patiently
from jurymast.rundir import make_durable_folder, sync_directory, write_atomically

MANIFEST = "jurymast.json"
FORMAT = 1
READ_BYTES = 4 << 20
Read = TypeVar("Read")
Natural = Annotated[int, msgspec.Meta(ge=0)]

_FINAL = re.compile(r"step-(\d{8,})")
# Up to version 0.1 without the run, and with draining for writing.
_SAVING = re.compile(r"\.saving-(\d+)\.a(\d+)\.[0-9a-f]+(?:\.(.+))?")
_WRITING = re.compile(r"\.(?:writing|draining)-(\d+)\.a(\d+)\.[0-9a-f]+(?:\.(.+))?")
_DELETING = re.compile(r"\.deleting-\d+\.[0-9a-f]+")
_ROLLED_BACK = re.compile(r"step-(\d{8,})\.rolled-back-[0-9a-f]+")
# What `rundir.write_atomically` writes, and nobody does any more after this long.
_HALF_FILE = re.compile(r"\.(?:owner\.json|rollback\.json|\d+)\.\d+\.[0-9a-f]{8}")
OLD_S = 3600.0
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
    run: str = ""  # of which `attempt` is an attempt; "" up to version 0.1

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


def _hash_of(data: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(data).encode()


def _hash_of_values(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def final_name(step: int) -> str:
    return f"step-{step:08d}"


def in_name(run: str) -> str:
    """Return the run's id as part of a file's name. A training that is no run may have any."""
    return re.sub(r"[^\w.-]", "_", run)[:100]


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

    _thread: ThreadPoolExecutor | None = None
    _syncing: Future[None] | None = None

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
            self._sync_behind()
        return count

    def _sync_behind(self) -> None:
        """Bring what is written to the disk while the next portion is written. Raises OSError for the one
        before: the kernel tells of an error only once."""
        descriptor = self.fileno()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._syncing = self._thread.submit(os.fdatasync, descriptor)
        self._synced = self.size

    def fileno(self) -> int:
        # Whoever asks syncs the file: that must include our buffer, and what an earlier sync met.
        self.flush()
        if self._syncing is not None:
            syncing, self._syncing = self._syncing, None
            syncing.result()
        return super().fileno()

    def close(self) -> None:
        if self._thread is not None:  # it uses the descriptor
            self._thread.shutdown()
            self._thread = None
        super().close()

    @property
    def hexdigest(self) -> str:
        return self._digest.hexdigest() if self._digest else ""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.closed:  # torch syncs and closes it itself
                os.fsync(self.fileno())
        finally:
            self.close()


def _is_present(path: Path) -> bool:
    """Whether there is such a file or directory. Raises OSError."""
    try:
        foreign.status(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _if_present(path: Path) -> bytes | None:
    """Return the file's content, or None if there is none. Raises OSError."""
    try:
        return foreign.read(path, foreign.PLAN_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError):
        return None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class CheckpointDirectory:
    """One directory of checkpoints, as the run `run` sees it. What cannot be read is tried for `patience_s`
    seconds. Only one process, rank 0, calls the methods that write."""

    def __init__(self, root: Path | str, run: str = "", patience_s: float = PATIENCE_S) -> None:
        self.root = Path(root)
        self._patience_s = patience_s
        self.run = run
        self._in_name = in_name(run)

    def _patiently(self, read: Callable[[], Read]) -> Read:
        return patiently(read, self.root, self._patience_s)

    def path(self, step: int) -> Path:
        return self.root / final_name(step)

    def steps(self) -> list[int]:
        """List the steps that have a directory, complete or not, newest first. Raises OSError."""
        found = (step_of(name) for name in names_in(self.root))
        return sorted((step for step in found if step is not None), reverse=True)

    def _manifest_bytes(self, step: int) -> bytes:
        return foreign.read(self.path(step) / MANIFEST, foreign.MANIFEST_BYTES_MAX)

    def manifest(self, step: int) -> CheckpointManifest:
        """Read a step's manifest. Raises BadCheckpoint if it is missing, damaged or of another step, and
        Unable."""
        try:
            data = self._patiently(
                lambda: foreign.read(self.path(step) / MANIFEST, foreign.MANIFEST_BYTES_MAX)
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BadCheckpoint(f"it has no {MANIFEST}: it is incomplete, or not of jurymast") from error
        except foreign.NotAFile as error:
            raise BadCheckpoint(f"{MANIFEST} is damaged: {error.strerror}") from error
        manifest = CheckpointManifest.from_bytes(data)
        if manifest.step != step:
            raise BadCheckpoint(f"{MANIFEST} is of step {manifest.step}")
        if self.void(step, manifest.attempt, manifest.run):
            raise BadCheckpoint("it was rolled back")
        return manifest

    def check_sizes(self, step: int, manifest: CheckpointManifest) -> None:
        """Check quickly that every file exists in full length. Raises BadCheckpoint, Unable."""
        for record in manifest.files:
            path = self.path(step) / record.name
            try:
                size = self._patiently(lambda path=path: foreign.status(path)).st_size  # type: ignore[misc]
            except FileNotFoundError as error:
                raise BadCheckpoint(f"{record.name}: {error.strerror}") from error
            if size != record.size_bytes:
                raise BadCheckpoint(f"{record.name} has {size} bytes, expected {record.size_bytes}")

    def check_files(
        self, step: int, files: Iterable[FileRecord], advance: Callable[[int], None] | None = None
    ) -> list[str]:
        """Check `files` fully, by reading and hashing them. Return what is damaged, one line for each file.
        Raises Unable if a file cannot be read now."""
        problems = []
        for record in files:
            path = self.path(step) / record.name
            try:
                size, digest = self._patiently(lambda path=path: hash_file(path, advance))  # type: ignore[misc]
            except OSError as error:
                if isinstance(error, Unable):
                    raise
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
        found no damage; None for any other step. Raises Unable if that cannot be known now."""
        # Looked up first: a checkpoint set aside between the two looks is missing at the second.
        if not self._patiently(lambda: _is_present(self.path(step))) or self.marked(step)[1]:
            return None
        try:
            manifest = self.manifest(step)
            self.check_sizes(step, manifest)
        except BadCheckpoint:
            return None
        return manifest

    def sizes(self) -> dict[StateId, int]:
        """Return the bytes of each complete checkpoint, by (step, attempt); attempt 0 for one of another run,
        because it is older than anything that this run saves. Raises OSError, BadCheckpoint."""
        found = [one for step in self.steps() if (one := self.whole(step)) is not None]
        return {StateId(one.step, self._attempt_of(one)): one.size_bytes for one in found}

    def _attempt_of(self, manifest: CheckpointManifest) -> int:
        return manifest.attempt if manifest.run == self.run else 0

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
        it found; (None, "") if there was no check. Raises Unable."""
        mark = self.root / VERIFIED / f"{step:08d}"

        def read() -> tuple[float | None, str]:
            found, manifest = _if_present(mark), _if_present(self.path(step) / MANIFEST)
            if found is None or manifest is None:
                return None, ""
            digest, _, damage = found.decode().partition("\n")
            if digest.encode() != _hash_of(manifest):
                return None, ""
            return None if damage else foreign.status(mark).st_mtime, damage

        try:
            return self._patiently(read)
        except (foreign.NotAFile, ValueError):
            return None, ""

    def copy_to(
        self, step: int, other: CheckpointDirectory, advance: Callable[[int], None] | None = None
    ) -> None:
        """Copy a checkpoint to another directory, where it appears once all of it is there and whole. Raises
        BadCheckpoint, OSError."""
        manifest = self.manifest(step)
        make_durable_folder(other.root)
        place = other.writing(step, manifest.attempt, secrets.token_hex(4))
        place.mkdir(mode=0o700)
        try:
            for record in manifest.files:
                with (
                    foreign.reading(self.path(step) / record.name) as source,
                    NewFile(place / record.name) as to,
                ):
                    while data := source.read(READ_BYTES):
                        to.write(data)
                        if advance is not None:
                            advance(len(data))
                if to.hexdigest != record.xxh3_64:
                    raise BadCheckpoint(f"{record.name} is corrupt: its hash does not match")
            other.seal(place, manifest)
            other.publish(place, step)
        except BaseException:
            remove_trees([place])
            raise

    # ---- writing (rank 0)

    def begin(self, step: int, attempt: int) -> Path:
        """Create the directory in which `step` is written. Raises OSError."""
        make_durable_folder(self.root)
        temporary = self._unfinished("saving", step, attempt, secrets.token_hex(4))
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

    def _unfinished(self, kind: str, step: int, attempt: int, nonce: str) -> Path:
        return self.root / ".".join(
            filter(None, (f".{kind}-{step:08d}.a{attempt:04d}.{nonce}", self._in_name))
        )

    def sweep(self, attempt: int) -> list[str]:
        """Rename what is half-written or half-deleted, and delete it in a thread: what earlier owners left,
        and what the ranks of this run's attempts up to `attempt` did. Return the names.

        For the owner of the directory only. What ranks of newer attempts write stays: if there are any, this
        attempt is the stale one. What this run's storage processes write is for `sweep_unfinished`.
        """
        try:
            names = foreign.names(self.root)
        except OSError:
            return []
        old = [name for name in names if _DELETING.fullmatch(name)]  # another process may be deleting these
        for name in names:
            if (saving := _SAVING.fullmatch(name)) is not None:
                if self._is_of_earlier(saving[3]) or int(saving[2]) <= attempt:
                    old.append(name)
            elif (writing := _WRITING.fullmatch(name)) is not None and self._is_of_earlier(writing[3]):
                old.append(name)
        self._sweep_files()
        found = {name: gone for name in old if (gone := taken_away(self.root / name)) is not None}
        delete_behind(list(found.values()))
        return list(found)

    def _sweep_files(self) -> None:
        """Remove the files that a power cut left half-written in directories of files."""
        for place in (self.root, self.root / PINNED, self.root / VERIFIED):
            for path in foreign.found(place, ".*"):
                with suppress(OSError):
                    old_since = time.time() - OLD_S
                    if _HALF_FILE.fullmatch(path.name) and foreign.status(path).st_mtime < old_since:
                        path.unlink()

    def _is_of_earlier(self, run: str | None) -> bool:
        """Whether this is another run's, which has ended, or this one would not own the directory."""
        return run is not None and run != self._in_name

    def writing(self, step: int, attempt: int, nonce: str) -> Path:
        """Return the path under which the nodes' storage processes write a step. `nonce` is hexadecimal and
        differs with each try."""
        return self._unfinished("writing", step, attempt, nonce)

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
        whole = {step: one for step in self.steps() if (one := self.whole(step)) is not None}
        ours = [step for step, one in whole.items() if one.run == self.run]
        latest = sorted(ours, key=lambda step: (whole[step].attempt, step), reverse=True)
        doomed: list[Path] = []
        for step in superfluous(list(whole), keep, self.pinned(), known_bad, latest):
            gone = self.root / f".deleting-{step:08d}.{secrets.token_hex(4)}"
            os.rename(self.path(step), gone)
            doomed.append(gone)
        if doomed:
            sync_directory(self.root)  # before anything in them is deleted
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
        steps = {int(name) for name in names_in(self.root / PINNED) if name.isdecimal()}
        return {step for step in steps if self._is_pinned(step)}

    def _is_pinned(self, step: int) -> bool:
        """Whether the pin is of the checkpoint that is there now; unknown is not no."""
        path = self.path(step) / MANIFEST
        wanted = self._patiently(lambda: _if_present(self._pin(step)))
        found = self._patiently(lambda: _if_present(path)) if wanted else None
        return wanted is not None and (found is None or not wanted or wanted == _hash_of(found))

    def _pin(self, step: int) -> Path:
        return self.root / PINNED / f"{step:08d}"

    def pin(self, step: int) -> None:
        """Pin a step, so that it is never removed. Raises OSError, and BadCheckpoint if the step has no
        complete checkpoint."""
        self.check_sizes(step, self.manifest(step))
        make_durable_folder(self._pin(step).parent)
        write_atomically(self._pin(step), _hash_of(self._manifest_bytes(step)))
        try:
            self.manifest(step)
        except BadCheckpoint:  # retired meanwhile
            self.unpin(step)
            raise

    def unpin(self, step: int) -> bool:
        """Unpin a step; return False if it was not pinned. Raises OSError."""
        try:
            self._pin(step).unlink()
        except FileNotFoundError:
            return False
        sync_directory(self._pin(step).parent)
        return True

    # ---- going back

    def rollbacks(self) -> list[Rollback]:
        """List all rollbacks, oldest first. Raises BadCheckpoint if the record is damaged, and Unable: then
        nobody knows what may be restored."""
        path = self.root / ROLLBACK
        try:
            data = self._patiently(lambda: _if_present(path))
            if data is None:
                return []
            return [msgspec.convert(one, Rollback) for one in foreign.parse(data)["rollbacks"]]
        except (foreign.NotAFile, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(f"{path} is damaged: {one_line(error)}") from error

    def own_rollbacks(self) -> list[Rollback]:
        """List those of this run: another's attempts are counted differently. Raises what `rollbacks`
        raises."""
        return [one for one in self.rollbacks() if one.run == self.run]

    def void(self, step: int, attempt: int, run: str | None = None) -> bool:
        """Return whether a state of `run`, by default this one, was rolled back; this holds in every tier.
        Raises what `rollbacks` raises."""
        owner = self.run if run is None else run
        return any(one.voids_of(owner, step, attempt) for one in self.rollbacks())

    def rollback(self, step: int, attempt: int) -> list[str]:
        """Make `step` the newest: rename all newer steps, which are never restored again; return their new
        names. `attempt` is the newest attempt so far; later ones may save newer steps again. The record is
        written first: after an interruption the newer checkpoints are void already. Raises OSError, and
        BadCheckpoint if `step` does not exist."""
        self.check_sizes(step, self.manifest(step))
        others = [one for one in map(self._readable, self.steps()) if one and one.run != self.run]
        newer = tuple((one.step, one.attempt, one.run) for one in others if one.step > step)
        record = [*self.rollbacks(), Rollback(step, attempt, time.time(), self.run, newer)]
        data = json.dumps({"rollbacks": [asdict(one) for one in record]}, indent=1).encode()
        write_atomically(self.root / ROLLBACK, data)
        renamed = []
        for gone in self.steps():
            if gone > step:
                name = f"{final_name(gone)}.rolled-back-{secrets.token_hex(4)}"
                os.rename(self.path(gone), self.root / name)
                self.unpin(gone)
                renamed.append(name)
        sync_directory(self.root)
        return renamed

    def _readable(self, step: int) -> CheckpointManifest | None:
        try:
            return self.manifest(step)
        except BadCheckpoint:
            return None

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
