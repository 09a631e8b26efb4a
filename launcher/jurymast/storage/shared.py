"""Images to shared storage, as a stock DCP directory, by all nodes together.

The nodes do not talk: they meet in the directory that they write, `.draining-STEP.aATTEMPT.NONCE`.

    layout-r00008.json   the manifests of all images that a node has; 8 is the first one's rank
    writes.json          from the lead (rank 0's node) once all ranks' are there: who writes which items
    __8_0.distcp         what rank 8 writes, byte ranges of its image, each block checked against its hash
    done-r00008.json     ... and that all of the node's are on disk: name, size, hash
    failed-r00008.txt    why they are not; and an empty file `failed`, to be found without a list of all

Then the lead has torch write `.metadata`, removes the messages, writes our manifest and renames all of it. A
lead that dies leaves a name that nobody reads, and the next lead sweeps it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from jurymast import foreign
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    FileRecord,
    Manifest,
    one_line,
    remove_trees,
)
from jurymast.checkpoint.owner import Owner, claim
from jurymast.errors import CheckpointError
from jurymast.keeper import manifest as keeper
from jurymast.rundir import write_atomically
from jurymast.storage import seal
from jurymast.storage.job import Job, Result, StorageFailure, explain
from jurymast.storage.layout import Layout, decide, file_name, ranges
from jurymast.storage.orders import Done, WriteShared
from jurymast.storage.source import NewFile, Source

STREAMS = 4
WRITES, FAILED = "writes.json", "failed"
# Who fails first says why to the supervisor, which then cancels the others: they leave it so long for that.
CAUSE_FIRST_S = 3.0


def write(order: WriteShared, job: Job) -> Done:
    """Take part in writing one step. Raises StorageFailure. A step that is there already is left as it is."""
    directory = CheckpointDirectory(order.root)
    step, attempt = order.step, order.attempt
    try:
        if directory.void(step, attempt):
            raise StorageFailure(
                f"step {step} of attempt {attempt} was rolled back: it is not stored any more"
            )
        if existing := _existing(directory, step):
            return existing
        with ExitStack() as stack:
            sources = [stack.enter_context(Source.of_order(image, step, attempt)) for image in order.images]
            meeting = _Meeting(directory, order, job, sources)
            return meeting.lead() if order.lead else meeting.follow()
    except BadCheckpoint as error:
        raise StorageFailure(f"shared storage: {error}") from error
    except CheckpointError as error:
        raise StorageFailure(f"shared storage: {error}; {error.hint}") from error
    except OSError as error:
        raise StorageFailure(f"shared storage: {explain(error, directory.root)}") from error


def _existing(directory: CheckpointDirectory, step: int) -> Done | None:
    """The answer when a complete checkpoint of the step is there already."""
    return Done(existing=True, published=True) if directory.whole(step) is not None else None


class _Meeting:
    """One node's part in a drain. `sources`: the images it has."""

    def __init__(
        self, directory: CheckpointDirectory, order: WriteShared, job: Job, sources: list[Source]
    ) -> None:
        self._directory = directory
        self._order = order
        self._job = job
        self._sources = sources
        self._step, self._attempt, self._world = order.step, order.attempt, order.world
        self._place = directory.draining(self._step, self._attempt, order.nonce)
        self._manifests: dict[int, keeper.Manifest] = {}  # by rank, as they come
        self._heard: set[str] = set()  # files that they came in

    # ---- the two roles

    def follow(self) -> Done:
        """Write this node's part, as the lead decides."""
        arrived = self._wait("the lead's directory", self._arrived, self._directory.root)
        if isinstance(arrived, Done):
            return arrived
        try:
            self._announce()
            text = self._wait("the lead's plan", self._plan, self._place)
            self._write({int(rank): numbers for rank, numbers in json.loads(text).items()})
        except (OSError, StorageFailure) as error:
            raise self._told(error) from error
        return Done(bytes=self._job.bytes)

    def lead(self) -> Done:
        """Bring all nodes' parts together, and publish."""
        self._directory.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        order = self._order
        claim(self._directory.root, Owner(order.run, order.run_directory) if order.run else None)
        self._directory.sweep_drains()
        if os.path.lexists(self._directory.path(self._step)):
            # No complete checkpoint, or `drain` would not be here; but maybe all that is left of something.
            self._directory.set_aside(self._step)
        self._place.mkdir(mode=0o700)
        try:
            self._announce()
            layout = self._decide()
            self._write(layout.writes)
            records = self._wait("the part of some rank", self._gathered, self._place)
            self._seal(layout, records)
            self._directory.publish(self._place, self._step)
        except BaseException as error:
            if isinstance(error, OSError) and (existing := _existing(self._directory, self._step)):
                remove_trees([self._place])
                return existing  # the ranks have saved this step themselves meanwhile
            told = self._told(error) if isinstance(error, OSError | StorageFailure) else error
            remove_trees([self._place])
            raise told from error
        manifest = self._directory.manifest(self._step)
        self._directory.check_sizes(self._step, manifest)
        self._retire()
        return Done(bytes=self._job.bytes, published=True)

    def _told(self, error: BaseException) -> BaseException:
        """`error` as a StorageFailure, and the others told of it unless one of them had told us."""
        if isinstance(error, _OthersFailure):
            return error
        if isinstance(error, FileNotFoundError) and not self._place.exists():
            self._job.cancelled.wait(CAUSE_FIRST_S)
            return StorageFailure("rank 0's node gave up: its directory is gone")
        if isinstance(error, OSError):
            error = StorageFailure(f"shared storage: {explain(error, self._place)}")
        path = self._message("failed", "txt")
        try:
            for source in self._sources:  # a full disk needs room for the message
                (self._place / file_name(source.manifest.rank)).unlink(missing_ok=True)
            path.touch(mode=0o600)
            (self._place / FAILED).touch(mode=0o600)
            write_atomically(path, str(error).encode(), durable=False)
        except OSError:
            return error  # they see an empty message, or run into their limit
        return error

    # ---- steps

    def _arrived(self) -> bool | Done | None:
        """True once the lead's directory is there, or the answer when it is not needed any more."""
        return True if self._place.is_dir() else _existing(self._directory, self._step)

    def _announce(self) -> None:
        if not self._sources:
            return
        texts = [source.manifest.to_bytes().decode() for source in self._sources]
        write_atomically(self._message("layout"), json.dumps(texts).encode(), durable=False)

    def _decide(self) -> Layout:
        self._wait("the image of some rank", self._hear_layouts, self._place)
        layout = decide({rank: self._manifests[rank] for rank in range(self._world)})
        write_atomically(self._place / WRITES, json.dumps(layout.writes).encode(), durable=False)
        return layout

    def _hear_layouts(self) -> bool | None:
        """True once all ranks' manifests are here."""
        for name in self._listed().difference(self._heard):
            if name.startswith("layout-r") and name.endswith(".json"):
                self._heard.add(name)
                for manifest in self._read_layout(self._place / name):
                    self._manifests[manifest.rank] = manifest
        return True if len(self._manifests) >= self._world else None

    def _read_layout(self, path: Path) -> list[keeper.Manifest]:
        try:
            found = [keeper.Manifest.from_bytes(text.encode()) for text in foreign.load(path)]
        except (keeper.BadImage, ValueError) as error:
            raise StorageFailure(f"{path.name} is damaged on the way: {error}") from error
        for one in found:
            if (one.step, one.attempt, one.world) != (self._step, self._attempt, self._world):
                raise StorageFailure(f"rank {one.rank} has an image of another state, step {one.step}")
            if not 0 <= one.rank < self._world:
                raise StorageFailure(f"{path.name} is of rank {one.rank}, and there are {self._world}")
        return found

    def _plan(self) -> str | None:
        """The lead's plan, once it is there. Raises FileNotFoundError when the lead gave up. By name: there
        may be hundreds of thousands of files, and thousands of nodes that look."""
        if (self._place / FAILED).exists():
            self._listed()
        try:
            return foreign.read(self._place / WRITES).decode()
        except FileNotFoundError:
            self._place.stat()
            return None

    def _write(self, writes: dict[int, list[int]]) -> None:
        """Write this node's files, a few at a time. The first failure ends the others."""
        with ThreadPoolExecutor(max(1, min(STREAMS, len(self._sources)))) as pool:
            tasks = [pool.submit(self._write_rank, one, writes[one.manifest.rank]) for one in self._sources]
            done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
            if failures := [error for task in done if (error := task.exception())]:
                self._job.stop()
                raise failures[0]
        records = [asdict(record) for task in tasks if (record := task.result())]
        if self._sources:
            write_atomically(self._message("done"), json.dumps(records).encode(), durable=False)

    def _write_rank(self, source: Source, numbers: list[int]) -> FileRecord | None:
        if not numbers:
            return None
        name = file_name(source.manifest.rank)
        with NewFile(self._place / name, hashing=True) as file:
            for piece in source.read(ranges(source.manifest, numbers)):
                file.write(piece)
                self._job.wrote(len(piece))
        return FileRecord(name, file.size, file.hexdigest, source.manifest.rank)

    def _gathered(self) -> list[FileRecord] | None:
        names = [name.replace("layout", "done", 1) for name in self._heard]
        if not self._listed().issuperset(names):
            return None
        texts = (foreign.read(self._place / name) for name in names)
        return [FileRecord(**record) for text in texts for record in json.loads(text)]

    def _seal(self, layout: Layout, records: list[FileRecord]) -> None:
        records = [*records, seal.write_metadata(self._place, layout.stored())]
        self._job.check()
        kept = {record.name for record in records}
        for name in self._listed():
            if name not in kept:
                (self._place / name).unlink()
        manifest = Manifest(
            step=self._step,
            attempt=self._attempt,
            world_size=self._world,
            torch=layout.manifests[0].torch,
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=layout.entries,
        )
        self._directory.seal(self._place, manifest)
        self._job.check()
        if self._directory.void(self._step, self._attempt):
            raise StorageFailure(f"step {self._step} was rolled back meanwhile")

    def _retire(self) -> None:
        if not self._order.keep:
            return
        try:
            doomed = self._directory.retire(self._order.keep)
        except OSError as error:
            sys.stderr.write(f"old checkpoints cannot be removed: {one_line(error)}\n")
            return
        # Gone for every reader; giving their space back may take long, and nobody waits for it.
        threading.Thread(target=remove_trees, args=(doomed,), name="retire").start()

    # ---- messages

    def _wait(self, what: str, look: Callable[[], Result | None], place: Path) -> Result:
        return self._job.wait(what, look, place, ranks=self._world)

    def _message(self, kind: str, ending: str = "json") -> Path:
        """This node's."""
        rank = self._sources[0].manifest.rank if self._sources else 0
        return self._place / f"{kind}-r{rank:05d}.{ending}"

    def _listed(self) -> set[str]:
        """What is in the directory. Raises StorageFailure when a node says that it failed."""
        names = set(os.listdir(self._place))
        for name in sorted(names):
            if name.startswith("failed-r"):
                rank = name[len("failed-r") :].partition(".")[0]
                if not (why := foreign.read(self._place / name).decode()):  # not yet, or no room
                    self._job.cancelled.wait(CAUSE_FIRST_S)
                    why = foreign.read(self._place / name).decode() or "its node has failed"
                raise _OthersFailure(f"rank {int(rank)}: {why}")
        return names


class _OthersFailure(StorageFailure):
    """Another node's failure, which it has told to all."""
