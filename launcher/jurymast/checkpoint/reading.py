"""Reads files of torch.distributed.checkpoint; only this user's, because they are unpickled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem

from jurymast import foreign


class _OwnFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "rb", mode
        with foreign.reading_own(path) as file:
            yield file


def reader(place: Path) -> FileSystemReader:
    """Return a reader of the directory `place`. It raises `foreign.NotOurs` for files that another user owns
    or can write to."""
    made = FileSystemReader(place)
    made.fs = _OwnFiles()
    return made
