"""The shared tier: stock torch.distributed.checkpoint directories on storage that all nodes see."""

from __future__ import annotations

import dataclasses
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from jurymast import foreign
from jurymast.checkpoint.directory import (
    BadCheckpoint,
    CheckpointDirectory,
    CheckpointManifest,
    FileRecord,
    NewFile,
    Owner,
    claim,
    is_foreign,
    one_line,
    remove_trees,
)
from jurymast.checkpoint.group import Candidate, Group, SaveResult
from jurymast.checkpoint.state import Captured, ScriptState
from jurymast.checkpoint.tree import reader
from jurymast.errors import CheckpointError

log = logging.getLogger("jurymast.checkpoint")


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


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Silence DCP's warning about a missing process group, which a single-process training does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


class SharedTier:
    """Checkpoints in one shared directory. `stale` tells rank 0 whether a newer attempt has started. Methods
    are collective: all ranks call them, with the same arguments, and get the same result."""

    name = "shared"

    def __init__(
        self, root: Path, group: Group, *, keep: int, attempt: int, stale: Callable[[], str]
    ) -> None:
        self._directory = CheckpointDirectory(root)
        self._group = group
        self._keep = keep
        self._attempt = attempt
        self._stale = stale
        self._us = Owner.of_environment()
        self._claimed = False
        # Steps that this process found damaged; only rank 0's matter.
        self._damaged: set[int] = set()
        self._cleared = False

    def _claim(self) -> None:
        """Claim the directory, once. Raises OSError, and CheckpointError on all ranks if the directory is
        another run's."""
        if not self._claimed:
            self._group.on_first(lambda: claim(self._directory.root, self._us))
            self._claimed = True

    def _clear_away(self) -> None:
        """Remove what earlier attempts left half-done, once."""
        if self._cleared:
            return
        self._cleared = True
        swept = self._group.on_first(self._sweep)
        if swept and self._group.rank == 0:
            log.info("removing unfinished checkpoints of earlier attempts: %s", ", ".join(swept))

    def _sweep(self) -> list[str]:
        if is_foreign(self._directory.root, self._us):
            return []
        return self._directory.sweep(self._attempt)

    # ---- saving

    def save(self, step: int, captured: Captured) -> SaveResult:
        """Make `step` durable. The result says if storage failed. Raises CheckpointError if the state can
        never be saved."""
        group = self._group
        try:
            self._claim()
            self._clear_away()
            present = group.on_first(lambda: self._present(step))
            if isinstance(present, CheckpointManifest):
                problems = self._verify(present)
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
            files=tuple(sorted(records, key=lambda record: record.name)),
            entries=entries,
        )
        return group.on_first(lambda: self._finish(temporary, manifest))

    def _present(self, step: int) -> CheckpointManifest | None:
        """Return the manifest of the checkpoint that has this step's final name already, or None. Its files
        are not read."""
        try:
            return self._directory.manifest(step)
        except BadCheckpoint:
            return None

    def _begin(self, step: int) -> Path:
        if os.path.lexists(self._directory.path(step)):
            # Damaged, or `save` would have returned. It is kept: it may be the last copy of something.
            name = self._directory.set_aside(step)
            log.warning("moved a damaged checkpoint of step %d to %s", step, name)
        return self._directory.begin(step, self._attempt)

    def _write(self, temporary: Path, captured: Captured, files: _HashingFiles) -> str:
        """Have DCP write everything; return what was wrong with the storage, on one line, or "".

        Raises CheckpointError for any other failure, because then no later save can succeed either.
        """
        # One thread: DCP loses errors of its other threads, and with them the data that they were to write.
        writer = FileSystemWriter(temporary, sync_files=True, thread_count=1, overwrite=False)
        writer.fs = files
        try:
            with _alone_is_fine():
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
            self._directory.seal(temporary, manifest)
            if why := self._stale():
                remove_trees([temporary])
                return SaveResult(ok=False, error=why)
            self._directory.publish(temporary, step)
            self._directory.check_sizes(step, self._directory.manifest(step))
        except (OSError, BadCheckpoint) as error:
            remove_trees([temporary])
            return SaveResult(ok=False, error=one_line(error))
        self._damaged.discard(step)
        self._directory.retire_behind(self._keep, log.warning, frozenset(self._damaged))
        return SaveResult(ok=True, size_bytes=manifest.size_bytes)

    # ---- restoring

    def candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        """List the checkpoints that may be restored, newest first, and why other steps here cannot be."""
        self._clear_away()
        return self._group.on_first(self._candidates)

    def _candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        found: list[Candidate] = []
        skipped: dict[int, str] = {}
        try:
            steps = self._directory.steps()
        except OSError as error:
            raise CheckpointError(f"cannot list {self._directory.root}: {error.strerror}") from error
        for step in steps:
            try:
                manifest = self._directory.manifest(step)
                self._directory.check_sizes(step, manifest)
            except BadCheckpoint as why:
                skipped[step] = str(why)
                self._damaged.add(step)
                continue
            found.append(Candidate(step, manifest.size_bytes, manifest.world_size, manifest.entries))
        return found, skipped

    def load(self, candidate: Candidate, state: ScriptState) -> str:
        """Verify the candidate and load it into `state`. Return why that failed, on one line, or ""."""
        group = self._group
        step = candidate.step
        manifest = group.on_first(lambda: self._present(step))
        if manifest is None:
            return "it disappeared"
        problems = self._verify(manifest)
        group.on_first(lambda: self._mark(step, problems))
        if problems:
            return "; ".join(problems[:3])
        if candidate.world_size != group.size and group.rank == 0:
            for key in (key for key, entry in candidate.entries.items() if entry.get("per_rank")):
                log.warning(
                    "%r was saved by each of %d ranks; the present %d ranks take these states in turn",
                    key,
                    candidate.world_size,
                    group.size,
                )
        return self._read(step, candidate, state)

    def _read(self, step: int, candidate: Candidate, state: ScriptState) -> str:
        group = self._group
        template: dict[str, Any] = {}
        with ExitStack() as held:
            place = self._directory.path(step)

            def prepare() -> None:
                nonlocal place
                # DCP unpickles these files, which runs code as this user.
                place = held.enter_context(foreign.own_directory(place))
                metadata = reader(place).read_metadata()
                template.update(state.template(metadata, candidate.entries, group.rank, candidate.world_size))

            if why := self._on_all(prepare):
                return why
            try:
                with _alone_is_fine():
                    dcp.load(
                        template, storage_reader=reader(place), planner=DefaultLoadPlanner(),
                        process_group=group.process_group,
                    )  # fmt: skip
            except CheckpointException as error:
                rank, failure = min(error.failures.items())
                return f"rank {rank}: {one_line(failure[0])}"
        return self._on_all(lambda: state.apply(template, candidate.entries))

    def _verify(self, manifest: CheckpointManifest) -> list[str]:
        """Read and hash all files. Each rank checks those that the rank of the same number wrote."""
        group = self._group
        mine = [record for record in manifest.files if record.rank % group.size == group.rank]
        found = group.gather(self._directory.check_files(manifest.step, mine))
        return [problem for problems in found for problem in problems]

    def _mark(self, step: int, problems: list[str]) -> None:
        """Record the result of a full check, so that readers that look at names and sizes only skip a damaged
        checkpoint."""
        if problems:
            self._damaged.add(step)
        self._directory.mark(step, *problems[:1])

    def _on_all(self, work: Callable[[], None]) -> str:
        """Do `work` on every rank. Return on all ranks why the first rank that failed did so, or ""."""
        caught: Exception | None = None
        try:
            work()
        except Exception as error:
            caught = error
        whys = self._group.gather(one_line(caught) if caught else "")
        failed = [rank for rank, why in enumerate(whys) if why]
        if caught and failed[0] == self._group.rank:
            log.warning("cannot load a checkpoint", exc_info=caught)
        return f"rank {failed[0]}: {whys[failed[0]]}" if failed else ""


def _is_storage_failure(error: BaseException) -> bool:
    """Return whether another try may succeed: an OSError, or the RuntimeError in which torch's zip writer
    hides one."""
    hidden = isinstance(error, RuntimeError) and ".cc:" in str(error)
    return hidden or isinstance(error, OSError)
