"""Writes images to shared storage as a stock DCP directory, by all nodes together.

The nodes exchange files in the directory that they write, `.writing-STEP.aATTEMPT.NONCE`, at the times that
`core.checkpoints.meeting` decides.

    layout-r00008.json   the manifests of all images of a node; 8 is the first one's rank
    writes.json          from the lead (rank 0's node) once all manifests are there: who writes which items
    __8_0.distcp         what rank 8 writes, byte ranges of its image, each block checked against its hash
    done-r00008.json     all of the node's files are on disk: names, sizes, hashes
    failed-r00008.txt    why they are not; and an empty file `failed`, which is found without listing all

Then the lead has torch write `.metadata`, removes the messages, writes our manifest and renames the
directory. A lead that dies leaves a name that nobody reads, and the next lead removes it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from jurymast import foreign
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    remove_trees,
)
from jurymast.checkpoint.owner import Owner, claim
from jurymast.core.checkpoints import meeting
from jurymast.core.checkpoints.meeting import Do, Next
from jurymast.errors import CheckpointError
from jurymast.keeper import manifest as keeper
from jurymast.rundir import write_atomically, write_json
from jurymast.storage.layout import Layout, decide, file_name, ranges, write_metadata
from jurymast.storage.orders import Done, Job, StorageFailure, WriteShared, explain
from jurymast.storage.source import ImageSource

WRITES, FAILED = "writes.json", "failed"


def write(order: WriteShared, job: Job) -> Done:
    """Take part in writing one step. A step that exists already is not changed. Raises StorageFailure."""
    with ExitStack() as stack:
        return _Part(order, job, stack).take()


class _Part:
    """One node's part in writing a step. `stack` closes its images."""

    def __init__(self, order: WriteShared, job: Job, stack: ExitStack) -> None:
        self._order, self._job, self._stack = order, job, stack
        self._directory = CheckpointDirectory(order.root)
        self._step, self._attempt, self._world = order.step, order.attempt, order.world
        self._machine = meeting.Meeting((order.step, order.attempt), order.world, leads=order.lead)
        self._place = self._directory.writing(self._step, self._attempt, order.nonce)
        self._sources: list[ImageSource] = []
        self._manifests: dict[int, keeper.Manifest] = {}  # by rank, as they come
        self._heard: set[str] = set()  # names of the files that had them
        self._shares: dict[int, list[int]] = {}  # by rank, the items to be written
        self._layout: Layout | None = None

    def take(self) -> Done:
        try:
            following = self._begin()
            while not isinstance(following, meeting.Complete | meeting.Fail):
                following = self._one(following)
                self._machine.check()
            if isinstance(following, meeting.Fail):
                raise StorageFailure(following.why)
            if self._order.lead and not following.existing:
                self._directory.check_sizes(self._step, self._directory.manifest(self._step))
                if self._order.keep:
                    self._directory.retire_behind(self._order.keep, lambda why: sys.stderr.write(f"{why}\n"))
        except (BadCheckpoint, CheckpointError, OSError) as error:
            raise StorageFailure(_why(error, self._directory.root)) from error
        bytes = 0 if following.existing else self._job.bytes
        return Done(bytes=bytes, existing=following.existing, published=following.published)

    def _begin(self) -> Next:
        order = self._order
        following = self._machine.begin(
            unseen="" if Path(order.run_directory).is_dir() else order.run_directory,
            rolled_back=self._directory.void(self._step, self._attempt),
            existing=self._exists(),
        )
        if isinstance(following, Do):
            for image in order.images:
                source = ImageSource.of_order(image, self._step, self._attempt)
                self._sources.append(self._stack.enter_context(closing(source)))
        return following

    def _exists(self) -> bool:
        return self._directory.whole(self._step) is not None

    def _one(self, what: Next) -> Next:
        try:
            return self._carry_out(what)
        except _OthersFailure as failure:
            return self._machine.others_failed(failure.rank, failure.why)
        except (BadCheckpoint, CheckpointError, OSError, StorageFailure) as error:
            gone = isinstance(error, FileNotFoundError) and not self._place.exists()
            existing = self._order.lead and isinstance(error, OSError) and self._exists()
            return self._machine.failed(_why(error, self._place), gone=gone, existing=existing)
        except BaseException:
            if self._order.lead:
                remove_trees([self._place])
            raise

    def _carry_out(self, what: Next) -> Next:
        machine = self._machine
        match what:
            case Do.FIND_PLACE:
                return self._wait("the lead's directory", self._find_place, self._directory.root)
            case Do.READ_LAYOUTS:
                return self._wait("the image of some rank", self._read_layouts, self._place)
            case Do.FIND_SHARES:
                return self._wait("the lead's plan", self._find_shares, self._place)
            case Do.READ_PARTS:
                return self._wait("the part of some rank", self._read_parts, self._place)
            case Do.SEAL:
                self._seal()
                return machine.sealed(rolled_back=self._directory.void(self._step, self._attempt))
            case meeting.ReadWhy(rank):
                return machine.others_failed(rank, self._why_failed(f"failed-r{rank:05d}.txt"))
            case Do.OPEN:
                self._open()
            case Do.ANNOUNCE:
                self._announce()
            case Do.SHARE_OUT:
                self._share_out()
            case Do.WRITE:
                self._write(self._shares)
            case Do.PUBLISH:
                self._directory.publish(self._place, self._step)
            case Do.CLEAN_UP:
                remove_trees([self._place])
            case meeting.TellOthers(why):
                self._tell(why)
            case meeting.Pause(seconds):
                self._job.cancelled.wait(seconds)
            case _:
                raise AssertionError(f"{what} cannot be carried out")
        return machine.done()

    def _wait(self, what: str, look: Callable[[], Next], place: Path) -> Next:
        def found() -> tuple[Next] | None:
            following = look()
            return None if isinstance(following, meeting.Wait) else (following,)

        return self._job.wait(what, found, place, ranks=self._world)[0]

    # ---- steps

    def _open(self) -> None:
        self._directory.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        order = self._order
        claim(self._directory.root, Owner(order.run, order.run_directory) if order.run else None)
        self._directory.sweep_unfinished()
        if os.path.lexists(self._directory.path(self._step)):
            # Not complete, or the write would have ended; but it may be the last copy of something.
            self._directory.set_aside(self._step)
        self._place.mkdir(mode=0o700)

    def _find_place(self) -> Next:
        there = self._place.is_dir()
        return self._machine.saw_place(there=there, existing=not there and self._exists())

    def _announce(self) -> None:
        if not self._sources:
            return
        texts = [source.manifest.to_bytes().decode() for source in self._sources]
        write_json(self._message("layout"), texts, durable=False)

    def _read_layouts(self) -> Next:
        found = {}
        for name in self._listed().difference(self._heard):
            if name.startswith("layout-r") and name.endswith(".json"):
                manifests = self._read_layout(self._place / name)
                self._heard.add(name)
                self._manifests.update((one.rank, one) for one in manifests)
                found[name] = [
                    meeting.Announced(one.rank, (one.step, one.attempt), one.world) for one in manifests
                ]
        return self._machine.saw_layouts(found)

    def _read_layout(self, path: Path) -> list[keeper.Manifest]:
        try:
            return [keeper.Manifest.from_bytes(text.encode()) for text in foreign.load(path)]
        except (keeper.BadImage, ValueError) as error:
            raise StorageFailure(f"{path.name} was damaged in transit: {error}") from error

    def _share_out(self) -> None:
        self._layout = decide({rank: self._manifests[rank] for rank in range(self._world)})
        self._shares = self._layout.writes
        write_json(self._place / WRITES, self._shares, durable=False)

    def _find_shares(self) -> Next:
        """Look for the lead's file by name, because thousands of nodes may look among hundreds of thousands
        of files. Raises FileNotFoundError if the lead gave up."""
        if (self._place / FAILED).exists():
            self._listed()
        try:
            shares = foreign.load(self._place / WRITES)
        except FileNotFoundError:
            self._place.stat()
            return self._machine.saw_shares(there=False)
        self._shares = {int(rank): numbers for rank, numbers in shares.items()}
        return self._machine.saw_shares(there=True)

    def _write(self, writes: dict[int, list[int]]) -> None:
        written = self._job.each(lambda one: self._write_rank(one, writes[one.manifest.rank]), self._sources)
        records = [asdict(record) for record in written if record]
        if self._sources:
            write_json(self._message("done"), records, durable=False)

    def _write_rank(self, source: ImageSource, numbers: list[int]) -> FileRecord | None:
        if not numbers:
            return None
        name = file_name(source.manifest.rank)
        with NewFile(self._place / name) as file:
            for piece in source.read(ranges(source.manifest, numbers)):
                file.write(piece)
                self._job.wrote(len(piece))
        return FileRecord(name, file.size, file.hexdigest, source.manifest.rank)

    def _read_parts(self) -> Next:
        names = self._listed()
        return self._machine.saw_parts({one for one in self._heard if _done(one) in names})

    def _seal(self) -> None:
        layout = self._layout
        assert layout is not None, "it was shared out"
        texts = (foreign.read(self._place / _done(name)) for name in self._heard)
        records = [FileRecord(**record) for text in texts for record in json.loads(text)]
        records.append(write_metadata(self._place, layout.stored()))
        self._job.check()
        kept = {record.name for record in records}
        for name in self._listed():
            if name not in kept:
                (self._place / name).unlink()
        manifest = CheckpointManifest(
            step=self._step,
            attempt=self._attempt,
            world_size=self._world,
            torch=layout.manifests[0].torch,
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=layout.entries,
        )
        self._directory.seal(self._place, manifest)
        self._job.check()

    # ---- messages

    def _message(self, kind: str, ending: str = "json") -> Path:
        rank = self._sources[0].manifest.rank if self._sources else 0
        return self._place / f"{kind}-r{rank:05d}.{ending}"

    def _listed(self) -> set[str]:
        """List the names in the directory. Raises _OthersFailure if a node reports that it failed."""
        names = set(os.listdir(self._place))
        for name in sorted(names):
            if name.startswith("failed-r"):
                raise _OthersFailure(int(name[len("failed-r") :].partition(".")[0]), self._why_failed(name))
        return names

    def _why_failed(self, name: str) -> str:
        return foreign.read(self._place / name).decode()

    def _tell(self, why: str) -> None:
        path = self._message("failed", "txt")
        for source in self._sources:  # makes room for the message on a full disk
            (self._place / file_name(source.manifest.rank)).unlink(missing_ok=True)
        path.touch(mode=0o600)  # without room for more, others see an empty message or run into their limit
        (self._place / FAILED).touch(mode=0o600)
        write_atomically(path, why.encode(), durable=False)


class _OthersFailure(Exception):
    """The node of this rank has reported that it failed, and why; "" if that is not written yet, or there was
    no room for it."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


def _done(layout: str) -> str:
    """Return the name of the message that follows this layout."""
    return layout.replace("layout", "done", 1)


def _why(error: Exception, place: Path) -> str:
    if isinstance(error, CheckpointError):
        return f"shared storage: {error}; {error.hint}"
    if isinstance(error, OSError):
        return f"shared storage: {explain(error, place)}"
    return f"shared storage: {error}" if isinstance(error, BadCheckpoint) else str(error)
