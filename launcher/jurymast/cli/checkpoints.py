"""`jurymast checkpoints`: list, verify, pin, roll back, export or fetch a run's checkpoints."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jurymast import foreign, programs
from jurymast.cli.options import examples, json_option, run_argument, runs_option, show, show_json, the_run
from jurymast.cli.output import echo
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import CheckpointError, OtherProtocolError, UsageError
from jurymast.interpreter import run_module
from jurymast.report.asking import user
from jurymast.rundir import RunDirectory

if TYPE_CHECKING:
    from jurymast.checkpoint.directory import CheckpointDirectory
    from jurymast.storage.object_store import ObjectStore

# action: (least and largest number of further words, their names)
ACTIONS = {
    "ls": (0, 0, ""),
    "verify": (0, 1, "[STEP]"),
    "pin": (1, 1, "STEP"),
    "unpin": (1, 1, "STEP"),
    "rollback": (1, 1, "STEP"),
    "export": (2, 2, "STEP DIR"),
    "fetch": (1, 1, "STEP"),
}
PATIENCE_S = 5.0  # somebody waits at a terminal
LOOKS = ("ls", "verify")
DIRECTORY = "directory"  # from which a run can go on
ENDINGS = {"torch": ".pt", "safetensors": ".safetensors", DIRECTORY: ""}


@click.command(
    epilog=examples(
        "jurymast checkpoints 4711",
        "jurymast checkpoints 4711 rollback 12000",
        "jurymast checkpoints 4711 export 12000 /data/exports",
        "jurymast checkpoints 4711 export 12000 /data/next --format directory",
    )
)
@run_argument
@click.argument("action", default="ls", metavar="[ls|verify|pin|unpin|rollback|export|fetch]")
@click.argument("words", nargs=-1, metavar="[STEP] [DIR]")
@click.option("--format", "form", type=click.Choice(list(ENDINGS)), default="torch",
              show_default=True,
              help="What an export is: one file, or a directory that Checkpointer(directory=DIR) and "
              "torch.distributed.checkpoint restore.")  # fmt: skip
@click.option(
    "--object",
    "url",
    metavar="URL",
    help="Also use this object store, like s3://bucket/prefix.  [the policy's]",
)
@click.option("--delete", is_flag=True, help="With rollback: delete what rollbacks have set aside.")
@click.option(
    "--unsealed", is_flag=True, help="With fetch: accept a checkpoint that is not signed with the run's key."
)
@json_option
@runs_option
def command(
    run: str, action: str, words: tuple[str, ...], form: str, url: str | None, delete: bool,
    unsealed: bool, as_json: bool, runs: Path | None,
) -> int:  # fmt: skip
    """List a run's checkpoints, or verify, pin, roll back, export or fetch them.

    \b
    ls               list the checkpoints, where they are, and whether they can be restored (the default)
    verify [STEP]    read all files and check their hashes; fails if a file is damaged
    pin STEP         never remove this checkpoint; unpin STEP undoes this
    rollback STEP    make it the newest: newer ones are set aside and no longer restored; ranks that
                     run restart from it
    export STEP DIR  write it to DIR, by default as one file
    fetch STEP       copy it from the object store to shared storage
    """
    if action not in ACTIONS:
        raise UsageError(
            f"there is no action {action}{did_you_mean(action, ACTIONS)}", hint="jurymast checkpoints --help"
        )
    least, most, names = ACTIONS[action]
    if not least <= len(words) <= most:
        raise UsageError(
            f"{action} takes {names or 'no arguments'}, but was given {' '.join(words) or 'none'}"
        )
    if delete and action != "rollback":
        raise UsageError(f"--delete goes with rollback, not with {action}")
    if unsealed and action != "fetch":
        raise UsageError(f"--unsealed goes with fetch, not with {action}")
    step = _number(words[0]) if words else None
    asked = _Call(the_run(run, runs, only_look=action in LOOKS), as_json, url)
    with _findings():
        if action == "ls":
            return asked.ls()
        if action == "verify":
            return asked.verify(step)
        assert step is not None
        if action == "rollback":
            return asked.rollback(step, delete)
        if action == "export":
            return asked.export(step, Path(words[1]).expanduser(), form)
        if action == "fetch":
            return asked.fetch(step, unsealed)
        return asked.pin(step) if action == "pin" else asked.unpin(step)


def _number(word: str) -> int:
    if not word.isdecimal():
        raise UsageError(f"STEP must be a number, not {word}")
    return int(word)


@contextmanager
def _findings() -> Iterator[None]:
    """Turn problems of checkpoints and storage into CheckpointError."""
    from jurymast.checkpoint.directory import BadCheckpoint
    from jurymast.storage.orders import StorageFailure

    try:
        yield
    except (BadCheckpoint, StorageFailure) as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{error.filename or 'the storage'}: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Verified:
    """What was found in a step: the `problems` that are damage, and why it could not be read ("": it was)."""

    step: int
    problems: list[str]
    unable: str = ""

    @property
    def shown(self) -> dict[str, Any]:
        unable = {"unable": self.unable} if self.unable else {}
        return {"step": self.step, "problems": self.problems, **unable}

    @property
    def text(self) -> str:
        unable = f"it cannot be read now: {self.unable}" if self.unable else "good"
        return "; ".join(self.problems) or unable


class _Call:
    """One call of the command. The methods return the exit code."""

    def __init__(self, run: RunDirectory, as_json: bool, url: str | None) -> None:
        from jurymast.checkpoint.directory import CheckpointDirectory
        from jurymast.report.status import read_status

        self._run = run
        # A script may save elsewhere than in the run directory.
        self._state = read_status(run).state
        place = self._state.checkpoints or run.checkpoints
        owner = self._state.run or run.root.name
        self._directory: CheckpointDirectory = CheckpointDirectory(place, owner, PATIENCE_S)
        self._as_json = as_json
        if url is not None and "://" not in url:
            raise UsageError(
                f"--object {url}: not the URL of an object store", hint="write it like s3://bucket/prefix"
            )
        self._insists = url is not None
        self._ours = foreign.owns(run.root)
        # This user's credentials are not used for a store that another user's plan names.
        self._url = url or (run.plan().settings.object_url if self._ours else "") or None

    def _say(self, text: str, **values: Any) -> int:
        """Print one line for people, or a JSON object."""
        if self._as_json:
            show_json(values)
        else:
            echo(text)
        return 0

    def _store(self) -> ObjectStore:
        from jurymast.storage.object_store import ObjectStore

        if self._url is None:
            raise UsageError("the policy names no object store", hint="name one with --object URL")
        return ObjectStore(self._url, self._run.root.name, self._run.secret() if self._ours else b"")

    def _present(self, step: int) -> None:
        """Raise CheckpointError, which names the newest steps, if there is no checkpoint of this step."""
        steps = self._directory.steps()
        if step not in steps:
            newest = ", ".join(map(str, steps[:3]))
            hint = (
                f"the newest steps are {newest}" if newest else f"{self._directory.root} has no checkpoints"
            )
            raise CheckpointError(f"there is no checkpoint of step {step}", hint=hint)

    # ---- looking

    def ls(self) -> int:
        stored, unseen = self._stored()
        rows = self._rows(stored)
        aside = [path.name for path in self._directory.rolled_back()]
        nodes = self._on_nodes()
        if self._as_json:
            show_json(
                {
                    "directory": str(self._directory.root), "checkpoints": rows, "set_aside": aside,
                    "on_nodes": nodes, "object_store": unseen or None,
                }
            )  # fmt: skip
            return 0
        from jurymast.report.text import Block, Line, Table, clock, size

        held = [Line(f"the object store cannot be read: {unseen}", "bold yellow")] if unseen else []
        held += [Line(f"on the nodes: step {step} ({', '.join(tiers)})") for step, tiers in nodes.items()]
        if not rows:
            show([*held, Line(f"no checkpoints in {self._directory.root}")])
            return 0
        cells = [
            [
                str(row["step"]), clock(row["saved_at"]) if row["saved_at"] else "-",
                size(row["size_bytes"]) if row["size_bytes"] else "-", str(row["world_size"] or "-"),
                ", ".join(row["where"]), _state_text(row),
            ]
            for row in rows
        ]  # fmt: skip
        headers = ["STEP", "SAVED", "SIZE", "RANKS", "WHERE", "STATE"]
        blocks: list[Block] = [*held, Table(headers, cells, frozenset({0, 2, 3}))]
        blocks += [Line(f"set aside by a rollback: {name}") for name in aside]
        show(blocks)
        return 0

    def _stored(self) -> tuple[list[int], str]:
        """Steps in the object store, and why they are not known. Raises the error if the user named the
        store."""
        from jurymast.storage.orders import StorageFailure

        try:
            return (self._store().steps() if self._url is not None else []), ""
        except (StorageFailure, OSError) as error:
            if self._insists:
                raise
            return [], str(error)

    def _on_nodes(self) -> dict[int, list[str]]:
        """Steps that the run's nodes hold, newest first. They are lost when the run ends."""
        from jurymast.core.state.images import LOCAL, MEMORY, PEER

        state = self._state
        steps: dict[int, list[str]] = {}
        for tier in (MEMORY, PEER, LOCAL):
            known = state.saved.get(tier)
            if known is not None and known.step is not None and not state.ended:
                steps.setdefault(known.step, []).append(tier)
        return dict(sorted(steps.items(), reverse=True))

    def _rows(self, stored: list[int]) -> list[dict[str, Any]]:
        from jurymast.checkpoint.directory import BadCheckpoint

        pinned = self._directory.pinned()
        rows = []
        local = set(self._directory.steps())
        for step in sorted(local | set(stored), reverse=True):
            row: dict[str, Any] = {
                "step": step, "attempt": None, "saved_at": None, "size_bytes": 0, "world_size": 0,
                "where": ["object"] if step in stored else [], "complete": step in stored,
                "problem": "", "verified_at": None, "pinned": step in pinned,
            }  # fmt: skip
            rows.append(row)
            if step not in local:
                continue
            row["where"].insert(0, "shared")
            try:
                row["saved_at"] = foreign.status(self._directory.path(step)).st_mtime
                manifest = self._directory.manifest(step)
                row.update(attempt=manifest.attempt, size_bytes=manifest.size_bytes)
                row["world_size"] = manifest.world_size
                self._directory.check_sizes(step, manifest)
                verified_at, problem = self._directory.marked(step)
                row.update(complete=not problem, problem=problem, verified_at=verified_at)
            except BadCheckpoint as why:
                row.update(problem=str(why), complete=False)
            except OSError as why:
                row.update(problem=f"cannot be read now: {why.strerror or why}", complete=False)
        return rows

    def verify(self, only: int | None) -> int:
        if only is not None:
            self._present(only)
        steps = self._directory.steps() if only is None else [only]
        found = [self._verified(step) for step in steps]
        if self._as_json:
            show_json({"checkpoints": [one.shown for one in found]})
        else:
            for one in found:
                echo(f"step {one.step}: {one.text}")
            if not found:
                echo(f"no checkpoints in {self._directory.root}")
        return CheckpointError.exit_code if any(one.problems or one.unable for one in found) else 0

    def _verified(self, step: int) -> _Verified:
        """Read all of a step and say what was found, and mark it; shows the progress on a terminal."""
        from jurymast.checkpoint.directory import BadCheckpoint

        try:
            manifest = self._directory.manifest(step)
            with _progress(f"step {step}", manifest.size_bytes) as advance:
                problems = []
                for record in manifest.files:
                    problems += self._directory.check_files(step, [record], advance)
        except BadCheckpoint as why:
            return _Verified(step, [str(why)])
        except OSError as why:  # which says nothing about the checkpoint
            return _Verified(step, [], f"{why.strerror or why}: {why.filename or self._directory.root}")
        if self._ours:
            self._directory.mark(step, *problems[:1])
        return _Verified(step, problems)

    def _insist(self, step: int, follows: str = "") -> None:
        """Raise CheckpointError, which says what follows, if the checkpoint is damaged, or cannot be read."""
        found = self._verified(step)
        if found.unable:
            raise CheckpointError(
                f"step {step} cannot be read now{follows}: {found.unable}", hint="try again later"
            )
        if found.problems:
            raise CheckpointError(
                f"step {step} is damaged{follows}: {found.problems[0]}",
                hint=f"to list the others, run: jurymast checkpoints {self._run.root}",
            )

    # ---- doing

    def pin(self, step: int) -> int:
        self._present(step)
        if why := self._directory.marked(step)[1]:
            raise CheckpointError(
                f"step {step} is damaged and was not pinned: {why}",
                hint=f"once it is repaired, run: jurymast checkpoints {self._run.root} verify {step}",
            )
        self._directory.pin(step)
        return self._say(f"step {step} is pinned: it is kept until it is unpinned", step=step, pinned=True)

    def unpin(self, step: int) -> int:
        was = self._directory.unpin(step)
        text = f"step {step} is no longer pinned" if was else f"step {step} was not pinned"
        return self._say(text, step=step, pinned=False)

    def rollback(self, step: int, delete: bool) -> int:
        from jurymast.checkpoint.directory import remove_trees
        from jurymast.core.state.messages import Accepted
        from jurymast.wire.channel import ask

        self._present(step)
        self._insist(step, ", so the run was not rolled back")
        renamed = self._directory.rollback(step, self._run.newest_attempt())
        if delete:
            remove_trees(self._directory.rolled_back())
        text = f"step {step} is now the newest; "
        text += f"set aside: {', '.join(renamed)}" if renamed else "no step was newer"
        text += " (deleted)" if delete and renamed else ""
        # A run that goes on restarts from this step at once, as its nodes hold newer steps in memory.
        restarted = False
        try:
            restarted = isinstance(ask(self._run, "rollback", by=user(), step=step), Accepted)
        except OtherProtocolError as error:
            echo(f"jurymast: note: the ranks were not told of it: {error}; {error.hint}", err=True)
        text += "; the ranks are being restarted from it" if restarted else ""
        return self._say(text, step=step, set_aside=renamed, deleted=delete, restarted=restarted)

    def export(self, step: int, place: Path, form: str) -> int:
        from jurymast.checkpoint.directory import final_name
        from jurymast.cluster.planning import need_torch

        self._present(step)
        target = place / f"{final_name(step)}{ENDINGS[form]}"
        if os.path.lexists(target):
            raise CheckpointError(
                f"{target} already exists", hint="move it away, or choose another directory"
            )
        if form == DIRECTORY:
            return self._copy(step, place, target)
        self._insist(step)
        need_torch("which reads checkpoints", "export")
        place.mkdir(parents=True, exist_ok=True)
        source = str(self._directory.path(step))
        words = run_module("jurymast.storage.export", source, str(target), form)
        done = programs.run(words, capture_output=True, stdin=subprocess.DEVNULL)
        said = done.stderr.strip().splitlines()
        if done.returncode != 0:
            raise CheckpointError(f"step {step} cannot be exported: {said[-1] if said else done.returncode}")
        note = f" ({said[-1]})" if said else ""
        return self._say(f"{target}{note}", step=step, file=str(target), note=said[-1] if said else "")

    def _copy(self, step: int, place: Path, target: Path) -> int:
        from jurymast.checkpoint.directory import BadCheckpoint, CheckpointDirectory

        try:
            with _progress(f"step {step}", self._directory.manifest(step).size_bytes) as advance:
                self._directory.copy_to(step, CheckpointDirectory(place), advance)
        except BadCheckpoint as why:
            raise CheckpointError(f"step {step} is damaged: {why}") from why
        return self._say(str(target), step=step, file=str(target), note="")

    def fetch(self, step: int, unsealed: bool) -> int:
        from jurymast.storage.orders import Job

        store = self._store()
        if step in self._directory.complete():
            raise CheckpointError(f"step {step} already exists: {self._directory.path(step)}")
        if step not in store.steps():
            raise CheckpointError(
                f"there is no complete checkpoint of step {step} in {store.url}",
                hint=f"to list them, run: jurymast checkpoints {self._run.root} --object {store.url}",
            )
        if step in self._directory.steps():
            self._directory.set_aside(step)
        size = store.manifest(step).size_bytes
        with _progress(f"step {step}", size) as advance:
            store.fetch(step, self._directory, Job(math.inf, advance), unsealed=unsealed)
        place = str(self._directory.path(step))
        return self._say(place, step=step, directory=place)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal's stderr, which is called with numbers of bytes; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    with click.progressbar(length=max(1, total), label=label, file=sys.stderr) as bar:
        yield bar.update


def _state_text(row: dict[str, Any]) -> str:
    from jurymast.report.text import duration

    words = [row["problem"] or ("complete" if row["complete"] else "incomplete")]
    if row["verified_at"]:
        words.append(f"verified {duration(max(0.0, time.time() - row['verified_at']))} ago")
    elif row["complete"]:
        words.append("not verified")
    if row["pinned"]:
        words.append("pinned")
    return ", ".join(words)
