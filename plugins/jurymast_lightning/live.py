"""The weights and the optimizers' tensors in a checkpoint of Lightning's, by reference.

They are saved and restored apart from that checkpoint. Hooks still find them in it, and may move them or
leave them out; a tensor that a hook adds, such as a running average, is saved with the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

_REFERENCE = "__live__"
_Path = tuple[Any, ...]


def tensors(trainer: Trainer) -> dict[str, Any]:
    """Return the live tensors, as Lightning places them in a checkpoint."""
    return {
        "state_dict": trainer.lightning_module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
    }


class Live:
    """The live tensors now, to be found again after hooks have changed the checkpoint that has them."""

    def __init__(self, trees: Mapping[str, Any]) -> None:
        self._keys = list(trees)
        self._tensors = dict(_leaves(trees))
        self._paths = {id(tensor): path for path, tensor in self._tensors.items()}

    def referring(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with a reference in place of each of these tensors, and without those entries
        that the hooks left as they were."""
        changed = {
            key: tree for key, tree in checkpoint.items() if key not in self._keys or self._moved(key, tree)
        }
        return {key: self._referring(tree) for key, tree in changed.items()}

    def _moved(self, key: str, tree: Any) -> bool:
        found = {path: id(tensor) for path, tensor in _leaves(tree, (key,))}
        return found != {path: id(tensor) for path, tensor in self._tensors.items() if path[0] == key}

    def _referring(self, tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return (_REFERENCE, self._paths[id(tree)]) if id(tree) in self._paths else tree
        if isinstance(tree, Mapping):
            if tree and all(id(value) in self._paths for value in tree.values()):
                return _REFERENCE, {key: self._paths[id(value)] for key, value in tree.items()}
            return {key: self._referring(value) for key, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(map(self._referring, tree))
        return tree


def resolved(checkpoint: Any, trees: Mapping[str, Any]) -> Any:
    """Return the checkpoint with the live tensors `trees` in place of references."""
    if isinstance(checkpoint, tuple) and len(checkpoint) == 2 and checkpoint[0] == _REFERENCE:
        paths = checkpoint[1]
        if isinstance(paths, Mapping):
            return {key: _at(trees, path) for key, path in paths.items()}
        return _at(trees, paths)
    if isinstance(checkpoint, Mapping):
        return {key: resolved(value, trees) for key, value in checkpoint.items()}
    if type(checkpoint) in (list, tuple):
        return type(checkpoint)(resolved(value, trees) for value in checkpoint)
    return checkpoint


def _leaves(tree: Any, path: _Path = ()) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _leaves(value, (*path, number))


def _at(tree: Any, path: _Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree
