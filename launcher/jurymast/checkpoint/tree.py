"""Converts nested dicts, lists and tensors to DCP's form and back, and reads how DCP stored them.

DCP flattens nested dicts to dotted names, turns every key into a string, and drops empty dicts. This module
wraps what DCP would not restore unchanged. Only this user's files are read, because they are unpickled.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeGuard

import torch
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from jurymast import foreign
from jurymast.checkpoint.contents import Item


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


@contextmanager
def alone_is_fine() -> Iterator[None]:
    """Silence DCP's warning about a missing process group, which a single-process training does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


# What DCP would not restore unchanged, such as a dict that is empty or has keys that are no strings, is
# stored as a tuple of this and itself.
OPAQUE = "__object__"
# For larger tensors, a sample of this many bytes decides whether ranks differ.
DIGEST_BYTES = 1 << 20

_SHARDED = (DTensor, ShardedTensor)

KeyPath = tuple[str | int, ...]


class StoredTree:
    """The names and shapes of (a part of) a checkpoint, from DCP's metadata."""

    def __init__(self, metadata: Metadata, prefix: KeyPath = ()) -> None:
        self._metadata = metadata
        self._prefix = prefix

    def under(self, prefix: KeyPath) -> StoredTree:
        return StoredTree(self._metadata, self._prefix + prefix)

    def leaves(self) -> Iterator[tuple[KeyPath, Any]]:
        """Yield (path below the prefix, DCP's storage metadata) for every value."""
        paths: Mapping[str, KeyPath] = self._metadata.planner_data
        depth = len(self._prefix)
        for name, stored in self._metadata.state_dict_metadata.items():
            path = paths[name]
            if path[:depth] == self._prefix:
                yield path[depth:], stored

    def has_tensors(self) -> bool:
        return any(isinstance(stored, TensorStorageMetadata) for _, stored in self.leaves())

    def tree(
        self, place: Callable[[KeyPath, TensorStorageMetadata], torch.Tensor | None] | None = None
    ) -> Any:
        """Return a new tree with a tensor for every tensor and None for every other value.

        `place` gets the path below the prefix and DCP's metadata, and may return the tensor to load into.
        Without it, or where it returns None, that is a new tensor in CPU memory.
        """
        root: dict[str, Any] = {}
        for path, stored in self.leaves():
            value: Any = None
            if isinstance(stored, TensorStorageMetadata):
                value = place(path, stored) if place else None
                if value is None:
                    value = torch.empty(stored.size, dtype=stored.properties.dtype)
            set_element(root, ("root", *path), value)
        return root.get("root")


class TreeShape:
    """The structure of a state as DCP flattens it, and the kind of each of its leaves, which keeps no tensor.
    With it, the leaves of a state of the same shape are found without flattening it anew."""

    def __init__(self, paths: Mapping[str, KeyPath], leaves: list[Any]) -> None:
        """`paths` and `leaves` are those of `flatten_state_dict`, in its order."""
        self._root: dict[str | int, Any] = {}
        for path in paths.values():
            place = self._root
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = None
        self._kinds = list(map(leaf_kind, leaves))

    def leaves(self, trees: Mapping[str, Any]) -> list[Any] | None:
        """Return the leaves of `trees` in DCP's order; None if they are of another shape."""
        found: list[Any] = []
        if not _collect(trees, self._root, found) or list(map(leaf_kind, found)) != self._kinds:
            return None
        return found


def _collect(tree: Any, shape: dict[str | int, Any], found: list[Any]) -> bool:
    """Append the leaves of `tree`, as `encode` returns it, to `found`; False if it has other keys than
    `shape`."""
    if not isinstance(tree, dict | list) or len(tree) != len(shape):
        return False
    pairs = enumerate(tree) if isinstance(tree, list) else tree.items()
    for (key, value), (known, below) in zip(pairs, shape.items(), strict=True):
        if key != known:
            return False
        if below is None:
            if isinstance(value, dict):
                return False
            found.append(value)
        elif not _collect(value, below, found):
            return False
    return True


def leaf_kind(value: Any) -> Any:
    """Return what decides how DCP and an image lay a leaf out; equal for leaves that differ only in their
    names and contents."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return torch.Tensor, value.dtype, value.shape, value.layout, value.is_meta
    if isinstance(value, DTensor):
        # Not the mesh itself, which would keep its process groups.
        return kind, value.dtype, value.shape, weakref.ref(value.device_mesh), value.placements
    if isinstance(value, ShardedTensor):
        return kind, value.dtype, tuple(value.metadata().shards_metadata)
    if isinstance(value, torch.Tensor):
        return kind, value.dtype, value.shape, value.layout, value.is_meta, value.device
    return kind, kind is list and not _is_flat(value)


def _is_flat(values: list[Any]) -> bool:
    """Return whether DCP takes this list as one value."""
    return not any(
        isinstance(value, Mapping | torch.Tensor | ShardedTensor)
        or (isinstance(value, list) and not _is_flat(value))
        for value in values
    )


def add_metadata(metadata: Metadata, item: Item) -> MetadataIndex:
    """Add an item to DCP's metadata of a checkpoint; return its index there."""
    metadata.planner_data[item.name] = item.path
    if not item.is_tensor:
        metadata.state_dict_metadata[item.name] = BytesStorageMetadata()
        return MetadataIndex(item.name)
    properties = TensorProperties(dtype=getattr(torch, item.dtype))
    tensor = TensorStorageMetadata(properties, torch.Size(item.shape), [])
    chunks = metadata.state_dict_metadata.setdefault(item.name, tensor).chunks
    chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
    return MetadataIndex(item.name, torch.Size(item.offsets), len(chunks) - 1)


def at(tree: Any, path: KeyPath) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def opaque(value: Any) -> tuple[str, Any]:
    return (OPAQUE, value)


def is_opaque(value: Any) -> TypeGuard[tuple[str, Any]]:
    return isinstance(value, tuple) and len(value) == 2 and value[0] == OPAQUE and type(value[0]) is str


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether type, shape and the bytes in row-major order describe the tensor completely."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_nested or tensor.is_quantized:
        return False
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def encode(value: Any) -> Any:
    """Return `value` with everything wrapped that DCP would not restore unchanged; new containers, the same
    tensors.

    This includes tensors that are neither plain nor sharded (sparse, quantized, tensor subclasses): DCP saves
    some of them and cannot load them.
    """
    if isinstance(value, torch.Tensor):
        return value if is_plain(value) or isinstance(value, _SHARDED) else opaque(value)
    if type(value) is dict or isinstance(value, Mapping):
        plain = type(value) in (dict, OrderedDict) and value and all(type(key) is str for key in value)
        return {key: encode(item) for key, item in value.items()} if plain else opaque(value)
    if type(value) is list:
        return [encode(item) for item in value]
    return opaque(value) if is_opaque(value) else value


def decode(tree: Any) -> Any:
    """Undo `encode`, except that an OrderedDict becomes a dict."""
    if is_opaque(tree):
        return tree[1]
    if isinstance(tree, dict):
        return {key: decode(item) for key, item in tree.items()}
    if type(tree) is list:
        return [decode(item) for item in tree]
    return tree


def has_sharded(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        return any(map(has_sharded, tree.values()))
    if isinstance(tree, list | tuple):
        return any(map(has_sharded, tree))
    return isinstance(tree, DTensor)


def digest(tree: Any) -> str:
    """Hash plain values and tensors; the hash is equal on ranks that hold the same."""
    state = xxhash.xxh3_64()
    for part in _parts(tree):
        state.update(part)
    return state.hexdigest()


def _parts(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, DTensor):
        yield b"sharded"
    elif isinstance(tree, torch.Tensor) and is_plain(tree):
        yield f"{tree.dtype} {tuple(tree.shape)}".encode()
        sample = tree
        if tree.nbytes > DIGEST_BYTES or not tree.is_contiguous() or not tree.is_cpu:
            flat = tree.detach().reshape(-1)
            every = max(1, -(-flat.numel() * flat.element_size() // DIGEST_BYTES))
            sample = flat[::every].cpu().contiguous()
        yield ctypes.string_at(sample.data_ptr(), sample.numel() * sample.element_size())
    elif isinstance(tree, Mapping):
        yield b"{"
        for key, value in tree.items():
            yield repr(key).encode()
            yield from _parts(value)
    elif isinstance(tree, list | tuple):
        yield b"["
        for value in tree:
            yield from _parts(value)
        yield b"]"
    elif tree is None or type(tree) in (bool, int, float, complex, str, bytes):
        yield repr(tree).encode()
    else:
        yield pickle.dumps(tree)  # only for the hash; DCP pickles it as well
