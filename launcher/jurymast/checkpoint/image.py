"""A rank's state to an image and back, for the tiers that keep images; the form is `keeper.manifest`'s.

Order in an image: the common tensors, this rank's other tensors, then everything without a payload of a known
size. Names, paths and chunks are those that torch.distributed.checkpoint's own planner gives. Items begin at
multiples of `ALIGNMENT`, with zeros in between, so that every payload is aligned as well.

What does not change from one save to the next (names, shapes, what torch.save writes around a payload, the
manifest's lines on tensors) is made once and kept, so that a save is a copy and little else. What is kept
never includes a tensor or its values: later saves must not find the earlier ones' state in it.
"""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import xxhash
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jurymast.checkpoint.state import ScriptState
from jurymast.checkpoint.tree import Path, put
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import Item, Manifest

ALIGNMENT = 64  # torch.save aligns payloads to this, counted from where the item begins

_Copy = tuple[torch.Tensor, torch.Tensor]  # into, from


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- what torch.save writes


@dataclass(frozen=True)
class Shell:
    """What torch.save puts before and after a tensor's payload; the same for all of one type and shape."""

    before: bytes
    after: bytes


class _Sink:
    """A file for torch.save under `skip_data`, which seeks over the payload instead of writing it."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: Any) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, _offset: int, _whence: int) -> None:
        self.parts.append(bytearray())

    def flush(self) -> None:
        pass


@lru_cache(maxsize=4096)
def shell(dtype: torch.dtype, sizes: tuple[int, ...]) -> Shell:
    """No memory is touched for the payload, however large. The checksum of the payload that the zip format
    has a place for stays empty; torch does not look at it."""
    strides = torch.empty(sizes, dtype=dtype, device="meta").stride()
    storage = torch.UntypedStorage(math.prod(sizes) * dtype.itemsize, device="cpu")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, sizes, strides)
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)
    before, after = sink.parts
    return Shell(bytes(before), bytes(after))


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _constant(value: Any) -> Any:
    """A key that is equal only for values that torch.save writes alike; None when there is no such key."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return (type(value), repr(value))  # repr tells 0.0 from -0.0, and nan is itself
    if type(value) in (tuple, list):
        keys = tuple(map(_constant, value))
        return None if None in keys else (type(value), keys)
    return None


# ---- what a state consists of


@dataclass(frozen=True)
class _Piece:
    """One item to be: `item` without its extent, and where DCP finds the tensor or value."""

    item: Item
    index: MetadataIndex
    dtype: torch.dtype | None = None


def _pieces(flat: dict[str, Any], paths: dict[str, Path]) -> list[_Piece]:
    """What DCP would write for this rank. Raises whatever its planner raises."""
    pieces = []
    for write in create_default_local_save_plan(flat, True).items:
        name, data = write.index.fqn, write.tensor_data
        path = tuple(paths[name])
        if data is None:
            pieces.append(_Piece(Item(name, path, 0, 0), write.index))
            continue
        dtype = data.properties.dtype
        item = Item(
            name, path, 0, 0,
            dtype=str(dtype).removeprefix("torch."),
            shape=tuple(data.size),
            offsets=tuple(data.chunk.offsets),
            sizes=tuple(data.chunk.sizes),
        )  # fmt: skip
        pieces.append(_Piece(item, write.index, dtype))
    return pieces


def _local(flat: dict[str, Any], index: MetadataIndex) -> Any:
    """This rank's tensor or value: of a DTensor what is here, all of it."""
    value = flat[index.fqn]
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return find_state_dict_object(flat, index)
    return value


def _has_payload(tensor: torch.Tensor) -> bool:
    """True when its bytes, row-major, are all there is to it."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return plain and tensor.numel() > 0 and not is_traceable_wrapper_subclass(tensor)


def _signature(flat: dict[str, Any], common: set[str]) -> list[Any]:
    """Equal for two states that have the same layout."""
    found: list[Any] = []
    for name, value in flat.items():
        if isinstance(value, DTensor):
            found.append((name, value.dtype, value.shape, value.device_mesh, value.placements))
        elif isinstance(value, ShardedTensor):
            found.append((name, value.dtype, tuple(value.metadata().shards_metadata)))
        elif isinstance(value, torch.Tensor):
            found.append((name, value.dtype, value.shape, name in common, _has_payload(value)))
        else:
            found.append(name)
    return found


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """Where everything goes. Tensors with a payload have their extents; `rest` comes behind `fixed_bytes`."""

    signature: list[Any]
    tensors: tuple[_Piece, ...]
    rest: tuple[_Piece, ...]
    common_bytes: int
    fixed_bytes: int
    # The manifest's lines in DCP's order, which is that of the keys in the user's dicts; "" for `rest`.
    lines: tuple[str, ...]

    def json(self, lengths: list[int]) -> str:
        """The manifest's lines on all items, those of `rest` having these lengths."""
        position, rest = self.fixed_bytes, []
        for piece, length in zip(self.rest, lengths, strict=True):
            rest.append(_line(replace(piece.item, at=position, length=length)))
            position += aligned(length)
        following = iter(rest)
        return ",".join(line or next(following) for line in self.lines)


def _layout(
    flat: dict[str, Any], paths: dict[str, Path], common: set[str], signature: list[Any]
) -> ImageLayout:
    pieces = _pieces(flat, paths)
    lines = [""] * len(pieces)
    with_payload, rest = [], []
    for number, piece in enumerate(pieces):
        if piece.dtype is not None and _has_payload(_local(flat, piece.index)):
            with_payload.append((piece.item.name not in common, number))
        else:
            rest.append(piece)
    position, common_bytes, placed = 0, 0, []
    for is_own, number in sorted(with_payload):
        piece = pieces[number]
        assert piece.dtype is not None
        around = shell(piece.dtype, piece.item.sizes)
        raw = position + len(around.before)
        end = raw + math.prod(piece.item.sizes) * piece.dtype.itemsize + len(around.after)
        item = replace(piece.item, at=position, length=end - position, raw=raw)
        placed.append(replace(piece, item=item))
        lines[number] = _line(item)
        position = aligned(end)
        if not is_own:
            common_bytes = position
    return ImageLayout(signature, tuple(placed), tuple(rest), common_bytes, position, tuple(lines))


def _line(item: Item) -> str:
    return json.dumps(vars(item), separators=(",", ":"))


# ---- saving


@dataclass(frozen=True, eq=False)
class Draft:
    """A state about to be copied: `tensors` are the live ones, in the layout's order; `values` are bytes."""

    layout: ImageLayout
    tensors: list[torch.Tensor]
    values: list[bytes]
    json: str  # the manifest's lines on all items
    size_bytes: int
    entries: dict[str, dict[str, Any]]

    def manifest(self, step: int, attempt: int, rank: int, world: int) -> bytes:
        """As `Manifest.to_bytes`, but with the lines that are there already."""
        common = self.layout.common_bytes
        head = Manifest(
            step, attempt, rank, world, torch.__version__, self.size_bytes, common, entries=self.entries
        )
        values = {key: value for key, value in vars(head).items() if key != "items"}
        text = json.dumps(values, separators=(",", ":"))[:-1] + f',"items":[{self.json}]}}'
        data = text.encode()
        return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(data)}).encode() + b"\n" + data


class Drafter:
    """Makes drafts of one state, and keeps what the next one can use again."""

    def __init__(self, state: ScriptState) -> None:
        self._state = state
        self._layout: ImageLayout | None = None
        self._constants: dict[Any, bytes] = {}
        self._lengths: list[int] | None = None
        self._json = ""

    @torch.no_grad()
    def draft(self, trees: dict[str, Any]) -> Draft:
        """Raises whatever DCP's planner, or pickling a value, raises."""
        flat, paths = flatten_state_dict(trees)
        common = self._state.common(trees)
        signature = _signature(flat, common)
        layout = self._layout
        if layout is None or layout.signature != signature:
            layout = self._layout = _layout(flat, paths, common, signature)
            self._lengths = None
        values = self._values([_local(flat, piece.index) for piece in layout.rest])
        lengths = list(map(len, values))
        if lengths != self._lengths:
            self._lengths, self._json = lengths, layout.json(lengths)
        size = layout.fixed_bytes + sum(map(aligned, lengths))
        tensors = [_local(flat, piece.index) for piece in layout.tensors]
        return Draft(layout, tensors, values, self._json, size, self._state.entries(trees))

    def _values(self, values: list[Any]) -> list[bytes]:
        known, self._constants = self._constants, {}
        result = []
        for value in values:
            key = _constant(value)
            data = known.get(key) or self._constants.get(key) if key is not None else None
            if data is None:
                plain = isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)
                data = _saved(value.detach().cpu() if plain else value)
            if key is not None:
                self._constants[key] = data
            result.append(data)
        return result


class Window:
    """A buffer that images are copied into. Nothing else may write to it while it is used."""

    def __init__(self, buffer: Any) -> None:
        self.data = memoryview(buffer)
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8)
        self._layout: ImageLayout | None = None
        self._views: list[torch.Tensor] = []

    def frame(self, draft: Draft) -> list[torch.Tensor]:
        """Write everything but payloads; returns where those belong, in the order of `draft.tensors`."""
        layout = draft.layout
        if self._layout is not layout:
            self._layout, self._views = None, []  # in case this is interrupted
            self._views = self._prepare(layout)
            self._layout = layout
        position = layout.fixed_bytes
        for value in draft.values:
            self._fill(position, value)
            position += aligned(len(value))
        return self._views

    def stage(self, draft: Draft) -> None:
        """Write the image of `draft`; what happens to its tensors afterwards does not change it."""
        with torch.no_grad():
            for place, tensor in zip(self.frame(draft), draft.tensors, strict=True):
                # Not UntypedStorage.copy_, which would keep all other threads waiting.
                place.copy_(tensor)

    def _prepare(self, layout: ImageLayout) -> list[torch.Tensor]:
        views = []
        for piece in layout.tensors:
            item = piece.item
            assert piece.dtype is not None
            around = shell(piece.dtype, item.sizes)
            self.data[item.at : item.raw] = around.before
            end = item.at + item.length - len(around.after)
            self._fill(end, around.after)
            views.append(self.bytes[item.raw : end].view(piece.dtype).view(item.sizes))
        return views

    def _fill(self, position: int, data: bytes) -> None:
        """Write `data` and the zeros behind it: the same state gives the same bytes, whatever was there."""
        end = position + len(data)
        self.data[position:end] = data
        self.data[end : aligned(end)] = bytes(aligned(end) - end)


# ---- loading


def load(image: memoryview, manifest: Manifest, state: ScriptState) -> None:
    """Fill `state` with what is in `image`, saved by the same rank of a world of the same size.

    Copies: nothing of `state` lies in `image` afterwards. Raises CheckpointError naming what does not fit,
    and whatever the user's own `load_state_dict` raises.
    """
    template = state.template(_metadata(manifest), manifest.entries, manifest.rank, manifest.world)
    flat, paths = flatten_state_dict(template)
    by_name = {item.name: item for item in manifest.items}
    by_chunk = {(item.name, item.offsets): item for item in manifest.items}
    tensors = {}
    for name, wanted in flat.items():
        if name not in by_name:
            raise CheckpointError(f"it has no {name!r}")
        if isinstance(wanted, torch.Tensor):
            tensors[name] = wanted
        elif by_name[name].is_tensor:
            raise CheckpointError(f"{name!r} was a tensor when it was saved")
        else:
            put(template, paths[name], _loaded(image, by_name[name]))
    source = torch.frombuffer(image, dtype=torch.uint8) if len(image) else torch.empty(0, dtype=torch.uint8)
    copies: deque[_Copy] = deque()
    for piece in _pieces(tensors, paths):
        saved = _fitting(piece.item, by_chunk.get((piece.item.name, piece.item.offsets)))
        copies.append((_local(tensors, piece.index), _payload(image, source, saved)))
    _copy_all(copies)
    state.apply(template, manifest.entries)


def _copy_all(copies: deque[_Copy]) -> None:
    """Two threads share the work: entering the pages of a buffer that was just mapped takes half as long as
    copying them. Not to a GPU, where order is that of this thread's stream."""
    helped = all(target.device.type == "cpu" for target, _ in copies)
    with ThreadPoolExecutor(1, "jurymast-load") as pool:
        helper = pool.submit(_copy_next, copies) if helped else None
        _copy_next(copies)
        if helper is not None:
            helper.result()


@torch.no_grad()
def _copy_next(copies: deque[_Copy]) -> None:
    while True:
        try:
            target, source = copies.popleft()
        except IndexError:
            return  # the other thread has the last one
        target.copy_(source)


def _fitting(wanted: Item, saved: Item | None) -> Item:
    """`saved`. Raises CheckpointError when it is not what `wanted` needs."""
    if saved is None or not saved.is_tensor:
        raise CheckpointError(f"it does not have {wanted.name!r} sharded as it is now")
    for what, now, then in (
        ("shape", wanted.shape, saved.shape),
        ("this rank's chunk", wanted.sizes, saved.sizes),
    ):
        if now != then:
            raise CheckpointError(f"{wanted.name!r}: {what} is {list(now)}, the checkpoint has {list(then)}")
    return saved


def _payload(image: memoryview, source: torch.Tensor, item: Item) -> torch.Tensor:
    if item.raw < 0:
        tensor: torch.Tensor = _loaded(image, item)
        return tensor
    dtype = getattr(torch, item.dtype)
    size = math.prod(item.sizes) * dtype.itemsize
    return source[item.raw : item.raw + size].view(dtype).view(item.sizes)


def _loaded(image: memoryview, item: Item) -> Any:
    # the user's own objects, from memory that only the user's own processes can write
    return torch.load(io.BytesIO(image[item.at : item.at + item.length]), weights_only=False)


def _metadata(manifest: Manifest) -> Metadata:
    """As DCP would describe a checkpoint that consists of this image alone."""
    stored: dict[str, Any] = {}
    for item in manifest.items:
        if not item.is_tensor:
            stored[item.name] = BytesStorageMetadata()
            continue
        chunk = ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
        known = stored.get(item.name)
        if known is not None:
            known.chunks.append(chunk)
            continue
        properties = TensorProperties(dtype=getattr(torch, item.dtype))
        stored[item.name] = TensorStorageMetadata(properties, torch.Size(item.shape), [chunk])
    return Metadata(stored, planner_data={item.name: item.path for item in manifest.items})


# Tensors of a parameter's own size and type that these keep for each.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def foreseen_bytes(objects: Mapping[str, Any]) -> tuple[int, int]:
    """(all of the image, the part of it that no other rank has)."""
    total = own = 0
    for value in objects.values():
        for tensor, times in _tensors(value):
            sharded = isinstance(tensor, DTensor)
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            count = times * local.numel() * local.element_size()
            total += count
            own += count if sharded else 0
    return total, own


def _tensors(value: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """What is saved of an entry: tensors, and how many like each there will be."""
    if isinstance(value, torch.nn.Module):
        yield from ((tensor, 1) for tensor in (*value.parameters(), *value.buffers()))
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            for parameter in group["params"]:
                if present := value.state.get(parameter):
                    yield from ((one, 1) for one in present.values() if isinstance(one, torch.Tensor))
                elif parameter.requires_grad:
                    yield parameter, _moments(value, group)
    elif isinstance(value, torch.Tensor):
        yield value, 1


def _moments(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> int:
    if isinstance(optimizer, _ADAMS):
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, torch.optim.SGD):
        return 1 if group.get("momentum") else 0
    return 0
