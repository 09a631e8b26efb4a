"""The shared directory of checkpoints: names, manifests, what is complete, what may go. No torch here.

    checkpoints/owner.json                the run that writes here, see `checkpoint.owner`
    checkpoints/step-00000100/            complete: a stock torch.distributed.checkpoint directory ...
    checkpoints/step-00000100/jurymast.json   ... with our manifest, written last
    checkpoints/.saving-00000200.a0003.<nonce>/   being written by attempt 3
    checkpoints/.writing-00000200.a0003.<nonce>/ being written by the nodes' storage processes
    checkpoints/.deleting-00000050.<nonce>/       on its way out
    checkpoints/pinned/00000100                   this step is never removed
    checkpoints/verified/00000100                 hash of the manifest whose files were all checked, and what
                                                  was wrong with them
    checkpoints/rollback.json                     what was rolled back: none of it is restored any more
    checkpoints/step-00000150.rolled-back-<nonce>/   kept until somebody deletes it

A checkpoint is complete or absent: it is written under a name nobody reads, and renamed once everything in
it is on disk. Nothing is ever written into a directory that has its final name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from jurymast import foreign
from jurymast.core.checkpoints.retention import Rollback, superfluous
from jurymast.rundir import sync_directory, write_atomically

MANIFEST = "jurymast.json"
FORMAT = 1
READ_BYTES = 4 << 20
Natural = Annotated[int, msgspec.Meta(ge=0)]

_FINAL = re.compile(r"step-(\d{8,})")
_SAVING = re.compile(r"\.saving-(\d+)\.a(\d+)\.[0-9a-f]+")
_WRITING = re.compile(r"\.(?:writing|draining)-(\d+)\.a(\d+)\.[0-9a-f]+")  # draining: until version 0.1
_DELETING = re.compile(r"\.deleting-\d+\.[0-9a-f]+")
_ROLLED_BACK = re.compile(r"step-(\d{8,})\.rolled-back-[0-9a-f]+")
PINNED = "pinned"
VERIFIED = "verified"
ROLLBACK = "rollback.json"


class BadCheckpoint(Exception):
    """Found, not failed: this directory is not a checkpoint to trust. Says why, on one line."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: `name` relative to it, its size and hash as they were written by `rank`."""

    name: str
    size_bytes: Natural
    xxh3_64: str
    rank: Natural = 0


@dataclass(frozen=True)
class CheckpointManifest:
    """What a complete checkpoint consists of. `entries` says of each entry how it was saved."""

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
        """JSON with a hash over itself, so that a damaged manifest is told from a damaged file."""
        values = asdict(self)
        values["manifest_xxh3_64"] = _hash_of_values(values)
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointManifest:
        """Raises BadCheckpoint."""
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
    """Raises BadCheckpoint for one that leads out of the checkpoint: it may be read from a bucket that others
    write to."""
    if name in ("", ".", "..", MANIFEST) or "/" in name or not name.isprintable():
        raise BadCheckpoint(f"{MANIFEST} names a file that does not belong to a checkpoint: {name!r}")


def _hash_of_values(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def final_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    match = _FINAL.fullmatch(name)
    return int(match[1]) if match else None


def hash_file(path: Path, advance: Callable[[int], None] | None = None) -> tuple[int, str]:
    """Size and xxh3_64 of a file; `advance` is told of bytes as they are read. Raises OSError."""
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


class NewFile:
    """A file, 0600, that must not exist yet; `hashing` as it is written, so that what later differs from the
    hash was damaged on the way. It is on disk when its block ends without an error."""

    def __init__(self, path: Path, *, hashing: bool = True) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=1 << 20)
        self._digest = xxhash.xxh3_64() if hashing else None
        self.size = 0

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        if self._digest is not None:
            self._digest.update(data)
        self.size += count
        return count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        self._file.flush()  # who asks for it syncs it, and what is in our buffer must be synced too
        return self._file.fileno()

    @property
    def hexdigest(self) -> str:
        return self._digest.hexdigest() if self._digest else ""

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._file.closed:  # torch syncs and closes it itself
                os.fsync(self.fileno())
        finally:
            self._file.close()


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class CheckpointDirectory:
    """One directory of checkpoints. Methods that write are for one process, rank 0."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, step: int) -> Path:
        return self.root / final_name(step)

    def steps(self) -> list[int]:
        """Steps that have a directory, complete or not, newest first. Raises OSError."""
        try:
            names = foreign.names(self.root)
        except FileNotFoundError:
            return []
        return sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)

    def manifest(self, step: int) -> CheckpointManifest:
        """Raises BadCheckpoint when there is none, or it is damaged or of another step."""
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
        """The quick check: every file exists in full length. Raises BadCheckpoint."""
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
        """The full check: read and hash `files`. Returns what is wrong with them, one line each."""
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
        """Steps whose checkpoint is whole, newest first. Raises OSError."""
        return [step for step in self.steps() if self.whole(step) is not None]

    def whole(self, step: int) -> CheckpointManifest | None:
        """The manifest of a step that has all files in full length, and no damage that the last full check
        found; None: it does not count."""
        # Looked up first: what is set aside between the two looks is not there at the second.
        if self.found_damaged(step):
            return None
        try:
            manifest = self.manifest(step)
            self.check_sizes(step, manifest)
        except BadCheckpoint:
            return None
        return manifest

    def sizes(self) -> dict[tuple[int, int], int]:
        """Bytes of each complete checkpoint, by its step and attempt. Raises OSError or BadCheckpoint."""
        found = (self.whole(step) for step in self.steps())
        return {(one.step, one.attempt): one.size_bytes for one in found if one is not None}

    def mark_verified(self, step: int) -> None:
        """Remember that all files of the step were checked just now; best effort, for people to see."""
        self._mark(step)

    def mark_damaged(self, step: int, why: str) -> None:
        """Remember what was found wrong just now, `why` on one line; best effort, as `mark_verified`."""
        self._mark(step, f"\n{why}")

    def found_damaged(self, step: int) -> str:
        """What the last full check found wrong with what is there now; "": nothing, or there was none."""
        digest, _, why = self._marked(step)
        return why if digest else ""

    def verified_at(self, step: int) -> float | None:
        """When the last full check found what is there now good, Unix time; None: never."""
        digest, at, why = self._marked(step)
        return at if digest and not why else None

    def _mark(self, step: int, found: str = "") -> None:
        place = self.root / VERIFIED
        try:
            with foreign.asking(place):
                place.mkdir(mode=0o700, exist_ok=True)
            _, digest = hash_file(self.path(step) / MANIFEST)
            write_atomically(place / f"{step:08d}", f"{digest}{found}".encode(), durable=False)
        except OSError:
            return

    def _marked(self, step: int) -> tuple[str, float, str]:
        """(hash of its manifest, time, what was wrong) of the last full check of what is there now; the hash
        is "" when there was none."""
        mark = self.root / VERIFIED / f"{step:08d}"
        try:
            digest, _, why = foreign.read(mark).decode().partition("\n")
            if digest == hash_file(self.path(step) / MANIFEST)[1]:
                return digest, foreign.status(mark).st_mtime, why
        except (OSError, ValueError):
            pass
        return "", 0.0, ""

    # ---- writing (rank 0)

    def begin(self, step: int, attempt: int) -> Path:
        """Make the directory in which `step` is written. Raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self.root / f".saving-{step:08d}.a{attempt:04d}.{secrets.token_hex(4)}"
        temporary.mkdir(mode=0o700)
        return temporary

    def seal(self, temporary: Path, manifest: CheckpointManifest) -> None:
        """Write the manifest, the last file, and wait until names and content are on disk. Raises OSError."""
        for record in manifest.files:
            size = foreign.status(temporary / record.name).st_size
            if size != record.size_bytes:
                raise OSError(errno.EIO, f"{record.name} has {size} bytes, expected {record.size_bytes}")
        write_atomically(temporary / MANIFEST, manifest.to_bytes())

    def publish(self, temporary: Path, step: int) -> None:
        """Give a sealed directory its final name. Raises OSError, also when that name is taken."""
        # rename(2) replaces an empty directory only, so a complete checkpoint can never be overwritten.
        os.rename(temporary, self.path(step))
        sync_directory(self.root)

    def abandon(self, temporary: Path) -> None:
        """Remove what a failed save left; best effort, `sweep` gets what stays."""
        remove_trees([temporary])

    def set_aside(self, step: int) -> str:
        """Move a damaged checkpoint out of the way of a new one, keeping it; returns its new name."""
        name = f"{final_name(step)}.damaged-{secrets.token_hex(4)}"
        os.rename(self.path(step), self.root / name)
        sync_directory(self.root)
        return name

    def sweep(self, attempt: int) -> dict[str, Path]:
        """Take away what attempts up to `attempt` left half-written or half-deleted: names, each with where
        it is left to delete, which may take long.

        A newer attempt's directories stay: then we are the stale one.
        """
        try:
            names = foreign.names(self.root)
        except OSError:
            return {}
        old = [name for name in names if _DELETING.fullmatch(name)]  # somebody may be at it this moment
        for name in names:
            saving = _SAVING.fullmatch(name)
            if saving and int(saving[2]) <= attempt:
                old.append(name)
        found = ((name, taken_away(self.root / name)) for name in old)
        return {name: gone for name, gone in found if gone is not None}

    def writing(self, step: int, attempt: int, nonce: str) -> Path:
        """Where the nodes' storage processes meet to write a step; `nonce`: hexadecimal, one a try."""
        return self.root / f".writing-{step:08d}.a{attempt:04d}.{nonce}"

    def sweep_unfinished(self) -> list[str]:
        """Remove what storage processes left half-written; returns the names. Raises OSError.

        For when nobody writes, or by the only one who does: the supervisor orders one at a time. A write that
        goes on all the same fails: it can publish no part of what is removed here.
        """
        try:
            swept = [name for name in foreign.names(self.root) if _WRITING.fullmatch(name)]
        except FileNotFoundError:
            return []
        remove_trees([self.root / name for name in swept])
        return swept

    def retire(self, keep: int, known_bad: frozenset[int] = frozenset()) -> list[Path]:
        """Take all but the newest `keep` complete checkpoints away; returns what is left to delete.

        The rename makes each disappear at once, so that no reader ever sees half of one. Raises OSError.
        """
        doomed: list[Path] = []
        for step in superfluous(self.complete(), keep, self.pinned(), known_bad):
            gone = self.root / f".deleting-{step:08d}.{secrets.token_hex(4)}"
            os.rename(self.path(step), gone)
            doomed.append(gone)
        return doomed

    # ---- pins

    def pinned(self) -> set[int]:
        """Steps that are never removed. Raises OSError."""
        try:
            return {int(name) for name in foreign.names(self.root / PINNED) if name.isdecimal()}
        except FileNotFoundError:
            return set()

    def pin(self, step: int) -> None:
        """Raises BadCheckpoint when there is no such complete checkpoint, OSError."""
        place = self.root / PINNED
        self.check_sizes(step, self.manifest(step))
        place.mkdir(mode=0o700, exist_ok=True)
        write_atomically(place / f"{step:08d}", b"")
        try:
            self.manifest(step)
        except BadCheckpoint:  # it was retired while we looked
            self.unpin(step)
            raise

    def unpin(self, step: int) -> bool:
        """False when it was not pinned. Raises OSError."""
        try:
            (self.root / PINNED / f"{step:08d}").unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- going back

    def rollbacks(self) -> list[Rollback]:
        """All that there were, oldest first. Raises BadCheckpoint when the record cannot be read: then
        nobody knows what may be restored."""
        path = self.root / ROLLBACK
        try:
            values: dict[str, Any] = foreign.load(path)
            return [Rollback(**one) for one in values["rollbacks"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadCheckpoint(f"{path} cannot be read: {one_line(error)}") from error

    def void(self, step: int, attempt: int) -> bool:
        """True for a state that was rolled back, in whatever tier it is. Raises BadCheckpoint."""
        return any(one.voids(step, attempt) for one in self.rollbacks())

    def rollback(self, step: int, attempt: int) -> list[str]:
        """Make `step` the newest: rename all newer ones, which are never restored again; returns their new
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
        """Directories that rollbacks set aside. Raises OSError."""
        try:
            names = sorted(foreign.names(self.root))
        except FileNotFoundError:
            return []
        return [self.root / name for name in names if _ROLLED_BACK.fullmatch(name)]


def remove_trees(directories: Iterable[Path]) -> None:
    """Remove directories of checkpoints, best effort: what stays, `sweep` gets."""
    for directory in directories:
        if (gone := taken_away(directory)) is not None:
            shutil.rmtree(gone, ignore_errors=True)


def delete_behind(directories: list[Path]) -> None:
    """They are gone for every reader. Giving their space back may take long, or hang: nobody waits for it."""
    if directories:
        threading.Thread(target=remove_trees, args=(directories,), name="jurymast-delete").start()


def taken_away(directory: Path) -> Path | None:
    """Its new name, so that nobody goes on to write there, or gives it its final name while it is emptied;
    None if it cannot be renamed."""
    if _DELETING.fullmatch(directory.name):
        return directory
    gone = directory.with_name(f".deleting-{0:08d}.{secrets.token_hex(4)}")
    try:
        with foreign.asking(directory):
            os.rename(directory, gone)
    except OSError:
        return None
    return gone
