"""How the processes of a batch script communicate: with each other by JSON files, each whole or absent; with
people by messages in the job's own output, next to the script's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.core.state.texts import clean
from jurymast.rundir import write_json


def say(text: str) -> None:
    print(f"jurymast: {clean(text)}", file=sys.stderr, flush=True)


def note(path: Path, values: Any) -> None:
    write_json(path, values, durable=False)


def note_first(path: Path, values: Any) -> bool:
    """Write the file unless it exists; returns whether this call wrote it."""
    own = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    note(own, values)
    try:
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink()
    return True


def noted(path: Path) -> Any:
    """The content of the file; None if it is missing."""
    try:
        return foreign.load_own(path, foreign.SCRIPT_BYTES_MAX)
    except FileNotFoundError:
        return None
