"""Complete checkpoints in an object store, through fsspec: S3 and compatible stores, or any that fsspec has.

URL/RUN/step-00000100/...             the files of the shared directory
URL/RUN/step-00000100/jurymast.seal   their hashes with the run's key: see `BucketKey`
URL/RUN/step-00000100/jurymast.json   uploaded last, removed first: without it a checkpoint does not count
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from jurymast import foreign
from jurymast.checkpoint.directory import (
    MANIFEST,
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    final_name,
    one_line,
    remove_trees,
    step_of,
)
from jurymast.core.checkpoints.commit import superfluous
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory, make_durable_folder
from jurymast.storage.orders import Done, Job, StorageFailure, Upload, explain

# ---- the seal


class NotUploaded(StorageFailure):
    """What the store has under this name is not what this run uploaded, or nothing."""


SEAL = "jurymast.seal"
HASH_BYTES = 32


class BucketKey:
    """Proves by keyed hashes that one run wrote the files in a bucket to which others may write."""

    def __init__(self, secret: bytes, run: str) -> None:
        self._key = hmac.digest(secret, f"bucket|{run}".encode(), "sha256")

    def hasher(self, name: str) -> Any:
        """Return the keyed hash object for the file of this name; the caller feeds it the contents."""
        return hashlib.blake2b(f"{name}\0".encode(), key=self._key, digest_size=HASH_BYTES)

    def seal(self, step: int, manifest: bytes, files: dict[str, str]) -> bytes:
        values = {"step": step, "manifest": self._hash(MANIFEST, manifest), "files": files}
        return json.dumps({**values, "seal": self._of(values)}).encode()

    def vouched(self, step: int, manifest: bytes, sealed: bytes) -> dict[str, str]:
        """Return the keyed hashes of the step's files, by name. Raises NotUploaded if this run did not make
        the seal for this step and manifest."""
        try:
            values = foreign.parse(sealed)
            seal = values.pop("seal")
            right = hmac.compare_digest(seal, self._of(values)) and values["step"] == step
            if right and hmac.compare_digest(values["manifest"], self._hash(MANIFEST, manifest)):
                return dict(values["files"])
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        raise NotUploaded(f"its {SEAL} is not of this run")

    def _of(self, values: dict[str, Any]) -> str:
        return self._hash(SEAL, json.dumps(values, sort_keys=True).encode())

    def _hash(self, name: str, data: bytes) -> str:
        state = self.hasher(name)
        state.update(data)
        return str(state.hexdigest())


# ---- the store

log = logging.getLogger("jurymast.storage")

PART_BYTES = 32 << 20
SMALL_BYTES_MAX = foreign.MANIFEST_BYTES_MAX
PARTS_MAX = 9000  # S3 allows 10,000 parts a file
# Pauses in seconds before further tries, for a store that fails for a moment.
PAUSES_S = (0.5, 2.0, 8.0)
# Old checkpoints are looked at and removed for so long after an upload: later its process would seem to hang.
PRUNE_LIMIT_S = 60.0
TIMEOUTS_S = {"connect_timeout": 10, "read_timeout": 60}
INSTALL = "pip install 'jurymast[object]'"


class NoSuchObject(NotUploaded):
    """The store answered that there is no such object."""


class ObjectStore:
    """The checkpoints of the run that has this `secret`. `options` go to fsspec. Methods raise StorageFailure
    with the url."""

    def __init__(self, url: str, run: str, secret: bytes, options: dict[str, Any] | None = None) -> None:
        self._key = BucketKey(secret, run)
        self.url = f"{url.rstrip('/')}/{run}"
        try:
            core = importlib.import_module("fsspec.core")
            known: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
            if url.startswith("file:"):
                known["auto_mkdir"] = True
            if url.startswith(("s3:", "s3a:")):
                known["config_kwargs"] = TIMEOUTS_S
            self._files, self._base = core.url_to_fs(self.url, **{**known, **(options or {})})
        except ImportError as error:
            raise StorageFailure(f"{url} needs a package that is not installed: {INSTALL}") from error
        except Exception as error:  # fsspec and its file systems each raise what they like
            raise StorageFailure(f"{url} cannot be used: {one_line(error)}") from error

    # ---- what is there

    def steps(self) -> list[int]:
        """List the steps with a complete checkpoint, newest first."""
        names = self._tried("", lambda: self._listed(self._base))
        found = [step for name in names if (step := step_of(name)) is not None]
        return [step for step in sorted(found, reverse=True) if self._is_complete(step)]

    def manifest(self, step: int) -> CheckpointManifest:
        return self._manifest(step)[0]

    def _manifest(self, step: int) -> tuple[CheckpointManifest, bytes]:
        data = self._read(step, MANIFEST)
        try:
            return CheckpointManifest.from_bytes(data), data
        except BadCheckpoint as error:
            raise NotUploaded(f"step {step} in {self.url}: {error}") from error

    def _read(self, step: int, name: str) -> bytes:
        path = self._path(step, name)
        if (size := self._size(path)) > SMALL_BYTES_MAX:
            raise NotUploaded(f"{path} has {size} bytes, at most {SMALL_BYTES_MAX} are allowed")
        data: bytes = self._tried(path, lambda: self._files.cat_file(path, end=SMALL_BYTES_MAX))
        return data

    def _vouched(self, step: int, manifest: bytes) -> dict[str, str]:
        """Return the keyed hashes of the step's files, by name."""
        try:
            return self._key.vouched(step, manifest, self._read(step, SEAL))
        except NotUploaded as error:
            raise NotUploaded(
                f"this run's key does not vouch for step {step} in {self.url} ({error}): whoever can write "
                "there may have made it, and its code would run as you; --unsealed accepts it anyway"
            ) from error

    def _is_complete(self, step: int) -> bool:
        # fsspec's own `exists` says no to every error.
        path = self._path(step, MANIFEST)
        try:
            self._tried(path, lambda: self._files.info(path))
        except NoSuchObject:
            return False
        return True

    def _own(self, step: int) -> CheckpointManifest | None:
        """The manifest of a checkpoint that this run has put there; None if others may have."""
        try:
            manifest, data = self._manifest(step)
            self._vouched(step, data)
        except NotUploaded as error:
            log.warning("it does not count: %s", error)
            return None
        return manifest

    def _is_whole(self, step: int, manifest: CheckpointManifest) -> bool:
        place = self._path(step, "").rstrip("/")
        found = self._tried(place, lambda: self._files.ls(place, detail=True))
        sizes = {one["name"].rpartition("/")[2]: one["size"] for one in found}
        return all(sizes.get(record.name) == record.size_bytes for record in manifest.files)

    # ---- to the store

    def upload(self, directory: CheckpointDirectory, step: int, job: Job) -> Done:
        """Upload a complete checkpoint, checking each file against its hash."""
        try:
            manifest = directory.manifest(step)
            directory.check_sizes(step, manifest)
        except (BadCheckpoint, OSError) as error:
            raise StorageFailure(f"step {step} in {directory.root} cannot be uploaded: {error}") from error
        if self._is_complete(step):
            if self._own(step) == manifest and self._is_whole(step, manifest):
                return Done(existing=True, published=True)
            self.remove(step)  # damaged, of another attempt, or another's: the two must not mix
        place = directory.path(step)
        keyed: dict[str, str] = {}
        # `.metadata` last except for the manifest: stock readers ignore a directory without it
        for last in (False, True):
            records = [record for record in manifest.files if (record.name == ".metadata") == last]
            found = job.each(lambda one: self._upload(place / one.name, step, one, job), records)
            keyed |= {record.name: one for record, one in zip(records, found, strict=True)}
        data = manifest.to_bytes()
        self._put(step, SEAL, self._key.seal(step, data, keyed), job)
        self._put(step, MANIFEST, data, job)
        return Done(bytes=job.bytes, published=True)

    def prune(self, keep: int, directory: CheckpointDirectory, newest: int) -> list[int]:
        """Remove all but the newest `keep` checkpoints of the run, and what was left of others; return their
        steps. What is pinned in `directory` stays, and `newest`, which was uploaded last. What was rolled
        back, or is not this run's, neither counts nor is removed.

        Others may have put any number of steps there. So this takes a limited time; the rest is for the next
        upload, which looks at them in another order."""
        end_s = time.monotonic() + PRUNE_LIMIT_S
        names = self._tried("", lambda: self._listed(self._base))
        found = [step for name in names if (step := step_of(name)) is not None]
        random.shuffle(found)
        found.sort(key=lambda step: step != newest)
        own: dict[int, CheckpointManifest | None] = {}  # the complete ones
        unfinished = []
        for step in found:
            if time.monotonic() > end_s:
                log.warning("of %d steps in %s, only %d were looked at", len(found), self.url, len(own))
                break
            if self._is_complete(step):
                own[step] = self._own(step)
            elif step < newest:
                unfinished.append(step)
        aside = {step for step, one in own.items() if one is None or directory.void(step, one.attempt)}
        gone = superfluous(sorted(own, reverse=True), keep, directory.pinned(), aside, [newest])
        removed = []
        for step in gone + unfinished:
            if time.monotonic() > end_s + PRUNE_LIMIT_S:
                break
            self.remove(step)
            removed.append(step)
        return removed

    def _put(self, step: int, name: str, data: bytes, job: Job) -> None:
        path = self._path(step, name)
        self._tried(path, lambda: self._files.pipe_file(path, data), job)
        if self._size(path) != len(data):
            raise StorageFailure(f"{path} differs from what was uploaded: upload the step again")

    def _upload(self, source: Path, step: int, record: FileRecord, job: Job) -> str:
        path = self._path(step, record.name)
        keyed: str = self._tried(path, lambda: self._send(source, path, record, job), job)
        size = self._size(path)
        if size != record.size_bytes:
            raise StorageFailure(f"{path} has {size} bytes, but {record.size_bytes} were uploaded")
        return keyed

    def _send(self, source: Path, path: str, record: FileRecord, job: Job) -> str:
        digest, keyed = xxhash.xxh3_64(), self._key.hasher(record.name)
        part_bytes = max(PART_BYTES, record.size_bytes // PARTS_MAX)
        buffer = memoryview(bytearray(min(4 << 20, max(1, record.size_bytes))))
        # without autocommit an unfinished upload never becomes an object
        target = self._files.open(path, "wb", block_size=part_bytes, autocommit=False)
        try:
            with foreign.reading(source) as file:
                while count := file.readinto(buffer):
                    digest.update(buffer[:count])
                    keyed.update(buffer[:count])
                    target.write(buffer[:count])
                    job.wrote(count)
            if digest.hexdigest() != record.xxh3_64:
                raise StorageFailure(f"{source} is corrupt: its hash does not match, so it is not uploaded")
            target.close()
            target.commit()
            return str(keyed.hexdigest())
        except BaseException:
            _discard(target)
            raise

    def remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that it no longer counts."""
        place = self._path(step, "").rstrip("/")
        if self._is_complete(step):
            manifest = self._path(step, MANIFEST)
            self._tried(manifest, lambda: self._files.rm_file(manifest))
        self._tried(place, lambda: self._files.rm(place, recursive=True))

    # ---- from the store

    def fetch(self, step: int, directory: CheckpointDirectory, job: Job, *, unsealed: bool = False) -> None:
        """Download a checkpoint, verify it, and publish it in `directory`. With `unsealed`, accept one that
        is not sealed with the run's key."""
        manifest, data = self._manifest(step)
        keyed = None if unsealed else self._vouched(step, data)
        if manifest.step != step:
            raise StorageFailure(f"step {step} in {self.url} is of step {manifest.step}")
        place = directory.writing(step, manifest.attempt, secrets.token_hex(4))
        try:
            make_durable_folder(directory.root)
            place.mkdir(mode=0o700)
            try:
                job.each(lambda one: self._download(place / one.name, step, one, keyed, job), manifest.files)
                directory.seal(place, manifest)
                directory.publish(place, step)
            except BaseException:
                remove_trees([place])
                raise
        except OSError as error:
            raise StorageFailure(explain(error, place)) from error

    def _download(
        self, target: Path, step: int, record: FileRecord, keyed: dict[str, str] | None, job: Job
    ) -> None:
        path = self._path(step, record.name)

        def receive() -> tuple[str, str]:
            found = self._key.hasher(record.name)
            target.unlink(missing_ok=True)
            with self._files.open(path, "rb", block_size=PART_BYTES, cache_type="readahead") as source:
                with NewFile(target) as file:
                    left = record.size_bytes
                    while data := source.read(min(PART_BYTES, left + 1)):
                        left -= len(data)
                        if left < 0:  # somebody changed it: nothing more of it is fetched
                            raise StorageFailure(f"{path} is longer than what was uploaded")
                        found.update(data)
                        file.write(memoryview(data))
                        job.wrote(len(data))
                if file.size < record.size_bytes == self._size(path):
                    raise ConnectionError(f"only {file.size} of {record.size_bytes} bytes came")
                return file.hexdigest, str(found.hexdigest())

        digest, found = self._tried(path, receive, job)
        if digest != record.xxh3_64:
            raise StorageFailure(f"{path} is corrupt: its hash does not match; restore another step")
        if keyed is not None and not hmac.compare_digest(found, keyed.get(record.name, "")):
            raise StorageFailure(f"{path} is not what this run uploaded: somebody changed it")

    # ---- helpers

    def _path(self, step: int, name: str) -> str:
        return f"{self._base.rstrip('/')}/{final_name(step)}/{name}"

    def _listed(self, path: str) -> list[str]:
        try:
            return [name.rstrip("/").rpartition("/")[2] for name in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _size(self, path: str) -> int:
        return int(self._tried(path, lambda: self._files.info(path))["size"])

    def _tried(self, path: str, work: Callable[[], Any], job: Job | None = None) -> Any:
        """Return the result of `work`, trying again if the store fails, but not if a local disk does."""
        for pause in (*PAUSES_S, None):
            if job is not None:
                job.check()
            try:
                self._files.invalidate_cache()
                return work()
            except StorageFailure:
                raise
            except FileNotFoundError as error:
                raise NoSuchObject(f"{path or self.url}: there is no such object or bucket") from error
            except Exception as error:  # fsspec and its file systems each raise what they like
                if isinstance(error, PermissionError) or "Credential" in type(error).__name__:
                    raise StorageFailure(
                        f"{path or self.url}: the object store refused: {one_line(error)}; "
                        "check the credentials"
                    ) from error
                if isinstance(error, OSError) and error.filename:
                    raise StorageFailure(explain(error, str(error.filename))) from error
                if pause is None:
                    raise StorageFailure(
                        f"the object store failed: {path or self.url}: {one_line(error)}; check that it is up"
                    ) from error
                (job.cancelled if job is not None else threading.Event()).wait(pause)
        raise AssertionError("unreachable")


def _discard(target: Any) -> None:
    """Have the store discard an unfinished upload; if that fails, the store's own rules must do it."""
    try:
        target.discard()
    except Exception as error:
        log.warning("an unfinished upload was left behind: %s", one_line(error))
    try:
        target.closed = True  # or its finalizer would try to finish it
    except AttributeError:
        target.close()


def upload(order: Upload, job: Job) -> Done:
    """Upload a checkpoint as ordered. Raises StorageFailure."""
    try:
        secret = RunDirectory(order.run_directory).secret()
    except RunDirectoryError as error:
        raise StorageFailure(str(error)) from error
    store = ObjectStore(order.url, order.run, secret)
    directory = CheckpointDirectory(order.root, order.run)
    done = store.upload(directory, order.step, job)
    if order.keep:
        try:
            store.prune(order.keep, directory, order.step)
        except (StorageFailure, BadCheckpoint, OSError) as error:  # the next upload tries again
            log.warning("cannot remove old checkpoints from %s: %s", store.url, one_line(error))
    return done
