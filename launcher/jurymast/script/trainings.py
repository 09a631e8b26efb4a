"""Which run belongs to which training of a batch script, over all lives of its job.

The first training is the run that was submitted; each further training is a run of its own beside it. After a
requeue the script starts again: a training of the same command continues where it was, unless the script
already received its exit code. If a training ended while nobody could tell the script, the script receives
the exit code now, and the training is not run again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.cluster.allocation import beside
from jurymast.core.state.settings import RunPlan, TaskShares
from jurymast.errors import RunDirectoryError
from jurymast.journal import replay
from jurymast.rundir import RunDirectory, make_folder, write_json
from jurymast.script import shims
from jurymast.script.notes import noted, say


class _Entry(msgspec.Struct):
    """What is noted of a training: its `run`, the `life` of the job that ran it last, whether the script was
    `told` its exit code, and which nodes were `lost` meanwhile."""

    run: str
    life: str
    told: bool
    lost: list[str] = []


@dataclass(frozen=True)
class Training:
    """What a launcher starts, and where; see `RunPlan`. `ignored` options have no effect."""

    script: str
    arguments: tuple[str, ...]
    module: bool
    ranks: int
    directory: str
    python: str
    ignored: tuple[str, ...] = ()
    tasks: bool = False
    guessed: bool = False
    shares: TaskShares = TaskShares()
    program: bool = False

    @property
    def key(self) -> str:
        """Equal for trainings that share their checkpoints: the same command in the same directory."""
        same = (self.script, self.arguments, self.module, self.ranks, self.directory)
        return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:16]

    def plan(self, job: RunPlan, run: RunDirectory) -> RunPlan:
        """The plan of `run`, one training of the batch script whose plan is `job`."""
        return replace(
            job, run=run.root.name, directory=str(run.root), script=self.script, arguments=self.arguments,
            module=self.module, program=self.program, tasks=self.tasks, guessed=self.guessed,
            shares=self.shares, ranks_per_node=self.ranks,
            working_directory=self.directory, python=self.python,
        )  # fmt: skip


class Trainings:
    """The trainings of a batch script. `job`: its run directory; `life`: names the job's present life."""

    def __init__(self, job: RunDirectory, life: str) -> None:
        self._job, self._life = job, life
        self._folder = shims.trainings(job)
        make_folder(self._folder)

    def claim(self, training: Training) -> tuple[RunDirectory, int | None]:
        """Return the run of this training, and its exit code if it ended before the script received it."""
        number = 1
        while True:
            file = self._folder / f"{training.key}-{number}.json"
            entry = _entry(file)
            if entry is None:
                run = self._run_of(training) if file.exists() else self._new_run()
            elif entry["told"] or entry["life"] == self._life:  # finished, or running at the same time
                number += 1
                continue
            else:
                run = RunDirectory(entry["run"])
            is_new = entry is None and not file.exists()
            self._write(file, run, {"told": False})
            state = None if is_new else replay(run)
            return run, state.exit_code if state is not None and state.ended else None

    def _run_of(self, training: Training) -> RunDirectory:
        """The run of a training whose entry is damaged: the first with its plan that no entry names, or else
        a new one."""
        taken = {entry["run"] for _, entry in self._entries()}
        root = self._job.root
        for run in map(RunDirectory, [root, *sorted(foreign.found(root.parent, f"{root.name}-*"))]):
            if not foreign.owns(run.root):  # others may have taken a name like ours there
                continue
            with suppress(RunDirectoryError):
                if str(run.root) not in taken and training.plan(plan := run.plan(), run) == plan:
                    say(
                        f"which run a training belongs to was not readable; it is {run.root.name} by its plan"
                    )
                    return run
        return self._new_run()

    def told(self, run: RunDirectory, lost: Sequence[str] = ()) -> None:
        """Note that the script has received this run's exit code, and which nodes were `lost` meanwhile."""
        for file, entry in self._entries():
            if entry["run"] == str(run.root):
                self._write(file, run, {"told": True, "lost": list(lost)})

    def lost(self) -> set[str]:
        """Nodes that earlier trainings lost in this life of the job."""
        here = [entry for _, entry in self._entries() if entry["life"] == self._life]
        return {node for entry in here for node in entry.get("lost", ())}

    def _entries(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for file in sorted(self._folder.glob("*.json")):
            if (entry := _entry(file)) is not None:
                yield file, entry

    def _write(self, file: Path, run: RunDirectory, what: Mapping[str, Any]) -> None:
        entry = {"run": str(run.root), "life": self._life, **what}
        write_json(file, entry)

    def _new_run(self) -> RunDirectory:
        number = 1 + sum(1 for _ in self._folder.glob("*.json"))
        if number == 1:
            return self._job
        while foreign.is_taken(place := self._job.root.with_name(f"{self._job.root.name}-{number}")):
            number += 1
        run = RunDirectory(place)
        beside(self._job, run, self._life.rpartition(".")[0])
        return run


def _entry(file: Path) -> dict[str, Any] | None:
    """The entry in this file; None if there is none, or a damaged one. Raises OSError."""
    try:
        found = msgspec.convert(noted(file), _Entry | None)
        return None if found is None else msgspec.structs.asdict(found)
    except ValueError:
        return None
