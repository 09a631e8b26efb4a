"""The `.metadata` file that makes a directory of items a stock checkpoint; torch writes it itself.

Torch is imported here, in the function that needs it: only the process of one node ever calls it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jurymast.checkpoint.directory import FileRecord, hash_file
from jurymast.storage.layout import Stored

METADATA = ".metadata"


def preload() -> None:
    """Import torch; seconds, once in a process, a fifth of them for garbage that is not there."""
    gc.disable()
    import torch.distributed.checkpoint  # noqa: F401

    gc.enable()


def write_metadata(directory: Path, stored: Iterable[Stored]) -> FileRecord:
    """Write DCP's metadata of what `stored` says is in the files of `directory`. Raises OSError.

    It is what DefaultSavePlanner and FileSystemWriter would have made of the same state.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    kinds: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    results: list[Any] = []
    for one in stored:
        item = one.item
        paths[one.name] = one.path
        if item.is_tensor:
            properties = TensorProperties(dtype=getattr(torch, item.dtype))
            tensor = TensorStorageMetadata(properties, torch.Size(item.shape), [])
            chunks = kinds.setdefault(one.name, tensor).chunks
            index = MetadataIndex(one.name, torch.Size(item.offsets), len(chunks))
            chunks.append(ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)))
        else:
            kinds[one.name] = BytesStorageMetadata()
            index = MetadataIndex(one.name)
        place = _StorageInfo(one.file, one.offset, item.length)
        results.append(WriteResult(index=index, size_in_bytes=item.length, storage_data=place))
    writer = FileSystemWriter(directory, sync_files=True)
    writer.finish(Metadata(state_dict_metadata=kinds, planner_data=paths), [results])
    size, digest = hash_file(directory / METADATA)
    return FileRecord(METADATA, size, digest)
