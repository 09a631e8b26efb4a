"""jurymast's checkpoints for custom loops with Fabric."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from lightning.fabric.wrappers import _unwrap_objects

import jurymast


def checkpointer(state: MutableMapping[str, Any], **options: Any) -> jurymast.Checkpointer:
    """Return a Checkpointer for the `state` that `fabric.save` takes; `options` are the Checkpointer's. Plain
    values in it, such as the number of the iteration, are restored in the same mapping."""
    return jurymast.Checkpointer(_Unwrapped(state), **options)


class _Unwrapped(MutableMapping[str, Any]):
    """The mapping, with the objects that Fabric has wrapped in their original form."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        return _unwrap_objects(self._state[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self._state[name] = value

    def __delitem__(self, name: str) -> None:
        del self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)
