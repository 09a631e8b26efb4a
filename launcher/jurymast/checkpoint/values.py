"""What ranks tell each other about checkpoints, as JSON. torch's own way for objects unpickles what comes,
and connections between ranks know no authentication."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.checkpoint.directory import BadCheckpoint, FileRecord, Manifest, one_line
from jurymast.checkpoint.tier import Candidate, Saved
from jurymast.errors import CheckpointError

KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Candidate, FileRecord, Manifest, Saved)}


def to_bytes(value: Any) -> bytes:
    """Raises TypeError for a kind of value that ranks do not tell each other."""
    return json.dumps(_packed(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """The value; of an exception one of the same kind, as far as it is known here. Raises CheckpointError."""
    try:
        return _unpacked(foreign.parse(data))
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"a rank has said what is none of a rank's words: {one_line(error)}") from error


def _packed(value: Any) -> Any:
    """Whatever JSON has no word of its own for, is a list that begins with one."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *map(_packed, value)]
    if type(value) is dict:
        return ["dict", *([_packed(key), _packed(one)] for key, one in value.items())]
    if isinstance(value, Path):
        return ["path", str(value)]
    if KINDS.get(type(value).__name__) is type(value):
        return [type(value).__name__, *(_packed(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, OSError):
        name = str(value.filename) if value.filename is not None else None
        return ["OSError", value.errno, value.strerror or str(value), name]
    if isinstance(value, BadCheckpoint):
        return ["BadCheckpoint", str(value)]
    if isinstance(value, CheckpointError):
        return ["CheckpointError", str(value), value.hint]
    if isinstance(value, Exception):
        return ["CheckpointError", one_line(value), ""]
    raise TypeError(f"ranks do not tell each other a {type(value).__name__}")


def _unpacked(packed: Any) -> Any:
    if not isinstance(packed, list):
        return packed
    kind, *rest = packed
    if kind == "OSError":
        errno, text, name = rest
        return OSError(errno, text, name) if errno is not None else OSError(text)
    values = [_unpacked(one) for one in rest] if kind != "dict" else rest
    match kind:
        case "list":
            return values
        case "tuple":
            return tuple(values)
        case "dict":
            return {_unpacked(key): _unpacked(one) for key, one in values}
        case "path":
            return Path(*values)
        case "BadCheckpoint":
            return BadCheckpoint(*values)
        case "CheckpointError":
            text, hint = values
            return CheckpointError(text, hint=hint)
    return KINDS[kind](*values)
