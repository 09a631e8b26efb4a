"""The shared tier: stock torch.distributed.checkpoint directories on storage that all nodes see."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from jurymast import foreign
from jurymast.checkpoint import stock
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    one_line,
    remove_trees,
)
from jurymast.checkpoint.group import Candidate, Group, RankUnable, SaveResult, is_hidden
from jurymast.checkpoint.owner import WAIT_S, Owner, claim, is_foreign, owner
from jurymast.checkpoint.state import Captured, ScriptState
from jurymast.checkpoint.tree import alone_is_fine, reader
from jurymast.errors import CheckpointError
from jurymast.reading import patiently

log = logging.getLogger("jurymast.checkpoint")

LOOK_EVERY_S = 0.1
# A claim goes on in the background once its storage has not answered for this long.
ANSWER_LIMIT_S = 10.0
# Whoever did not answer a claim is asked again after this long, in seconds: the training waits for each try.
ASK_AGAIN_S = 120.0


class _HashingFiles(FileSystem):
    """DCP's file system, which also keeps the size and hash of each file that this rank wrote."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", mode
        with NewFile(Path(path)) as stream:
            yield stream
        self.written[Path(path).name] = (stream.size, stream.hexdigest)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def records(self, rank: int) -> list[FileRecord]:
        return [FileRecord(name, size, digest, rank) for name, (size, digest) in self.written.items()]


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner, except that the lowest rank's value is written where ranks may differ.

    Plans are not cached: torch has one cache per process and planner class, and takes plans for equal if only
    the types of tensors changed, so that old metadata would describe a changed state.
    """

    def __init__(self, balanced: frozenset[str]) -> None:
        super().__init__()
        self._balanced = balanced

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: set[Any] = set()
        plans = []
        for plan in all_plans:
            items = [
                item
                for item in plan.items
                if item.type == WriteItemType.SHARD
                or item.index.fqn in self._balanced
                or item.index not in seen
            ]
            seen.update(item.index for item in items)
            plans.append(dataclasses.replace(plan, items=items))
        return super().create_global_plan(plans)


class SharedTier:
    """Checkpoints in one shared directory. `stale` tells rank 0 whether a newer attempt has started. Methods
    are collective: all ranks call them, with the same arguments, and get the same result."""

    name = "shared"

    def __init__(
        self, root: Path, group: Group, *, keep: int, attempt: int, stale: Callable[[], str]
    ) -> None:
        self._us = Owner.of_environment()
        self._directory = CheckpointDirectory(root, self._us.run)
        # A training does not stand still for storage that fails: its next save tries again.
        self._written = CheckpointDirectory(root, self._us.run, patience_s=0.0)
        self._group = group
        self._keep = keep
        self._attempt = attempt
        self._stale = stale
        self.claimed = False
        self._unanswered: TimeoutError | None = None  # the last try to claim, by whomever; only rank 0's
        self._ask_again_at = 0.0
        # Steps that this process found damaged; only rank 0's matter.
        self._damaged: set[int] = set()
        self._cleared = False

    def claim(self) -> str:
        """Claim the directory, once: before the first step, and else before what is saved next. Return why
        storage did not let us, or "". Raises CheckpointError on all ranks if the directory is another's."""
        if self.claimed:
            return ""
        try:
            self._group.on_first(self._claim)
        except OSError as error:
            return one_line(error)
        self.claimed = True
        self._group.on_first(self._clear_away)
        return ""

    def _claim(self) -> None:
        """Claim the directory, but do not let storage that hangs, or Slurm, hold up the training: what did
        not answer in time is not asked again at once."""
        if self._unanswered is not None and time.monotonic() < self._ask_again_at:
            raise self._unanswered
        first, self._unanswered = self._unanswered is None, None
        try:
            self._claim_in_time(WAIT_S if first else 0.0)
        except TimeoutError as error:
            self._unanswered, self._ask_again_at = error, time.monotonic() + ASK_AGAIN_S
            raise

    def _claim_in_time(self, wait_s: float) -> None:
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                claim(self._directory.root, self._us, wait_s, say=log.warning)
                ended.put(None)
            except Exception as error:
                ended.put(error)

        threading.Thread(target=work, name="jurymast-claim", daemon=True).start()
        while True:
            try:
                error = ended.get(timeout=LOOK_EVERY_S)
                break
            except queue.Empty:
                path, waited_s = foreign.unanswered()
                if waited_s > ANSWER_LIMIT_S:
                    text = f"its storage has not answered for {waited_s:.0f} s"
                    raise OSError(errno.ETIMEDOUT, text, path) from None
        if error is not None:
            raise error

    def _clear_away(self) -> None:
        """Remove what earlier attempts and owners left half-done; for the owner, on rank 0."""
        if not self._cleared:
            self._cleared = True
            if swept := self._directory.sweep(self._attempt):
                log.info("removing unfinished checkpoints of earlier attempts: %s", ", ".join(swept))

    def _clear_ours(self) -> None:
        with suppress(OSError, CheckpointError):
            found = owner(self._directory.root)
            if found is not None and found.run == self._us.run:
                self._clear_away()

    def save(self, step: int, captured: Captured) -> SaveResult:
        """Make `step` durable. The result says if storage failed. Raises CheckpointError if the state can
        never be saved."""
        group = self._group
        if why := self.claim():
            return SaveResult(ok=False, error=why)
        try:
            present = group.on_first(lambda: self._present(self._written, step))
            if isinstance(present, CheckpointManifest):
                problems = self._verify(self._written, present)
                if not problems:
                    return SaveResult(ok=True, size_bytes=present.size_bytes, existing=True)
                log.warning("step %d exists already but is damaged (%s)", step, problems[0])
            temporary = Path(group.on_first(lambda: str(self._begin(step))))
        except OSError as error:
            return SaveResult(ok=False, error=one_line(error))
        files = _HashingFiles()
        if error_text := self._write(temporary, captured, files):
            group.on_first(lambda: remove_trees([temporary]))
            return SaveResult(ok=False, error=error_text)
        gathered = group.gather((files.records(group.rank), captured.entries))
        records = [record for theirs, _ in gathered for record in theirs]
        # pipeline stages may have entries that other ranks do not have
        entries = {key: entry for _, theirs in gathered for key, entry in theirs.items()}
        manifest = CheckpointManifest(
            step=step,
            attempt=self._attempt,
            world_size=group.size,
            torch=torch.__version__,
            run=self._us.run,
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=entries,
        )
        return group.on_first(lambda: self._finish(temporary, manifest))

    @staticmethod
    def _present(directory: CheckpointDirectory, step: int) -> CheckpointManifest | None:
        """Return the manifest of the checkpoint that has this step's final name already, or None. Its files
        are not read."""
        try:
            return directory.manifest(step)
        except BadCheckpoint:
            return None

    def _begin(self, step: int) -> Path:
        if os.path.lexists(self._written.path(step)):
            # Damaged, or `save` would have returned. It is kept: it may be the last copy of something.
            name = self._written.set_aside(step)
            log.warning("moved a damaged checkpoint of step %d to %s", step, name)
        return self._written.begin(step, self._attempt)

    def _write(self, temporary: Path, captured: Captured, files: _HashingFiles) -> str:
        """Have DCP write everything; return what was wrong with the storage, on one line, or "".

        Raises CheckpointError for any other failure, because then no later save can succeed either.
        """
        # One thread: DCP loses errors of its other threads, and with them the data that they were to write.
        writer = FileSystemWriter(temporary, sync_files=True, thread_count=1, overwrite=False)
        writer.fs = files
        try:
            with alone_is_fine():
                dcp.save(
                    captured.tree,
                    storage_writer=writer,
                    planner=_SavePlanner(captured.balanced),
                    process_group=self._group.process_group,
                )
        except CheckpointException as error:
            failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
            text = "; ".join(f"rank {rank}: {one_line(failure)}" for rank, failure in failures.items())
            if any(_is_storage_failure(failure) for failure in failures.values()):
                return text
            self._group.on_first(lambda: remove_trees([temporary]))
            raise CheckpointError(f"the state cannot be saved: {text}") from error
        return ""

    def _finish(self, temporary: Path, manifest: CheckpointManifest) -> SaveResult:
        """Publish what all ranks have written; on rank 0 only."""
        step = manifest.step
        try:
            self._written.seal(temporary, manifest)
            if why := self._stale() or self._not_ours():
                remove_trees([temporary])
                return SaveResult(ok=False, error=why)
            self._written.publish(temporary, step)
            self._written.check_sizes(step, self._written.manifest(step))
        except (OSError, BadCheckpoint) as error:
            remove_trees([temporary])
            return SaveResult(ok=False, error=one_line(error))
        self._damaged.discard(step)
        self._written.retire_behind(self._keep, log.warning, frozenset(self._damaged))
        return SaveResult(ok=True, size_bytes=manifest.size_bytes)

    def _not_ours(self) -> str:
        """Return why the directory may not be written to any more, or "": whoever takes us for dead claims
        it."""
        return "another training owns the directory now" if is_foreign(self._written.root, self._us) else ""

    # ---- restoring

    def candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        """List the checkpoints that may be restored, newest first, and why other steps here cannot be. Raises
        OSError if that cannot be known now."""
        self._group.on_first(self._clear_ours)
        return self._group.on_first(self._candidates)

    def _candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        found: list[Candidate] = []
        skipped: dict[int, str] = {}
        for step in patiently(self._directory.steps, self._directory.root.parent):
            try:
                manifest = self._directory.manifest(step)
                self._directory.check_sizes(step, manifest)
            except BadCheckpoint as why:
                skipped[step] = str(why)
                self._damaged.add(step)
                continue
            except OSError as error:
                found.append(Candidate(step, 0, 0, unable=one_line(error)))
                continue
            found.append(Candidate(step, manifest.size_bytes, manifest.world_size, manifest.entries))
        return found, skipped

    def load(self, candidate: Candidate, state: ScriptState) -> str:
        """Verify the candidate and load it into `state`. Return why it cannot be used, on one line, or "".
        Raises OSError on all ranks if it cannot be read now."""
        group = self._group
        step = candidate.step
        if candidate.unable:
            raise RankUnable(0, candidate.unable)
        manifest = group.on_first(lambda: self._present(self._directory, step))
        if manifest is None:
            return "it disappeared"
        problems = self._verify(self._directory, manifest)
        group.on_first(lambda: self._mark(step, problems))
        if problems:
            return "; ".join(problems[:3])

        def opened(held: ExitStack) -> stock.Opened:
            # DCP unpickles these files, which runs code as this user.
            place = held.enter_context(foreign.own_directory(self._directory.path(step)))
            return stock.Opened(reader(place), candidate.entries, candidate.world_size)

        return stock.load(group, state, opened)

    def _verify(self, directory: CheckpointDirectory, manifest: CheckpointManifest) -> list[str]:
        """Read and hash all files, and return what is damaged. Each rank checks those that the rank of the
        same number wrote. Raises RankUnable."""
        group = self._group
        mine = [record for record in manifest.files if record.rank % group.size == group.rank]
        found = group.on_all(lambda: directory.check_files(manifest.step, mine))
        return [problem for problems in found for problem in problems]

    def _mark(self, step: int, problems: list[str]) -> None:
        """Record the result of a full check, so that readers that look at names and sizes only skip a damaged
        checkpoint."""
        if problems:
            self._damaged.add(step)
        if not is_foreign(self._directory.root, self._us):
            self._directory.mark(step, *problems[:1])


def _is_storage_failure(error: BaseException) -> bool:
    """Return whether another try to write may succeed."""
    return is_hidden(error) or isinstance(error, OSError)
