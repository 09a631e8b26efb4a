"""The owner of a directory of checkpoints. Only one run writes there, because a run's sweeps would remove
another run's files.

    checkpoints/owner.json      {"run": its id, "directory": its run directory}

The first run that writes there owns the directory, in all its attempts and allocations, until it has ended;
then the next run that writes does. Everybody may read. A training that is no run of jurymast owns nothing,
and does not write to a directory that a run owns.
"""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from jurymast import foreign
from jurymast.checkpoint.directory import NewFile
from jurymast.errors import CheckpointError
from jurymast.rundir import RunDirectory, sync_directory

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
