"""Storage that fails: system calls of this process about some files end with an error, as a file server, a
disk or the kernel would have them end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

ALWAYS = 10**9


@contextmanager
def failing(part: str, number: int, times: int = ALWAYS) -> Iterator[list[str]]:
    """Opening, listing and looking up paths that contain `part` fails with this errno, `times` times. Yields
    the paths for which it did."""
    hit: list[str] = []

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and part in os.fspath(path) and len(hit) < times:
                hit.append(os.fspath(path))
                raise OSError(number, os.strerror(number), os.fspath(path))
            return call(path, *arguments, **options)

        return refused

    calls: dict[str, Any] = {name: refusing(getattr(os, name)) for name in ("open", "stat", "listdir")}
    with mock.patch.multiple(os, **calls):
        yield hit
