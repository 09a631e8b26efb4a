"""Reads the pickles that torch's flight recorder writes; only plain values are accepted."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from jurymast import foreign
from jurymast.core.nodes.stacks import Entered, entered

RECORD_BYTES_MAX = 64 << 20


class _PlainValues(pickle.Unpickler):
    """Unpickles dictionaries, lists, texts and numbers. A pickle that names anything to import is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("not a plain value")


def read(path: Path, rank: int) -> list[Entered]:
    """Return how far the rank is in each of its groups; [] for a record that is unfinished or has another
    format."""
    try:
        record = _PlainValues(BytesIO(foreign.read(path, RECORD_BYTES_MAX))).load()
        return entered(rank, record) if isinstance(record, Mapping) else []
    except (OSError, pickle.UnpicklingError, EOFError, MemoryError, RecursionError):
        return []
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        return []
