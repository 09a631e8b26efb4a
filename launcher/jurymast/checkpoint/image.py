"""Converts a rank's state to an image and back; `keeper.manifest` defines the format.

An image holds the common tensors, then this rank's other tensors, then everything without a payload of known
size, and then its contents (`checkpoint.contents`).
Names, paths and chunks are those of torch.distributed.checkpoint's planner. Items begin at multiples of
`ALIGNMENT`, with zeros in between, so that every payload is aligned as well.

What does not change from one save to the next (names, shapes, the bytes that torch.save writes around a
payload, the contents' lines on tensors) is made once and kept, so that a save does little more than copy:
some microseconds for each tensor.
Tensors and their values are never kept: a later save must not contain the state of an earlier one.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from jurymast.checkpoint.contents import Contents, Item, line, sealed
from jurymast.checkpoint.state import ScriptState
from jurymast.checkpoint.tree import KeyPath, TreeShape, add_metadata, leaf_kind
from jurymast.errors import CheckpointError
from jurymast.keeper.manifest import BadImage, Manifest, room_of

ALIGNMENT = 64  # torch.save aligns payloads to this many bytes from the item's beginning

_Copy = tuple[torch.Tensor, torch.Tensor]  # target, source


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- what torch.save writes


class _Sink:
    """A file that torch.save writes to under `skip_data`, which seeks past the payload."""

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
def shell(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what torch.save writes before and after the payload of tensors of this type and shape, without
    touching memory for the payload. The zip format's checksum of the payload stays empty; torch does not read
    it."""
    strides = torch.empty(sizes, dtype=dtype, device="meta").stride()
    storage = torch.UntypedStorage(math.prod(sizes) * dtype.itemsize, device="cpu")
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, sizes, strides)
    sink = _Sink()
    with torch.serialization.skip_data():
        torch.save(tensor, sink)
    before, after = sink.parts
    return bytes(before), bytes(after)


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _constant(value: Any) -> Any:
    """Return a key that is equal only for values that torch.save writes alike, or None if there is none."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return (type(value), repr(value))  # by repr, 0.0 differs from -0.0 and nan equals nan
    if type(value) in (tuple, list):
        keys = tuple(map(_constant, value))
        return None if None in keys else (type(value), keys)
    return None


# ---- what a state consists of


class _Piece(NamedTuple):
    """A future item: `item` without its extent, and the number of the leaf with its tensor or value; `index`
    finds a ShardedTensor's shard."""

    item: Item
    leaf: int
    index: MetadataIndex
    dtype: torch.dtype | None = None


def _pieces(names: Sequence[str], paths: Mapping[str, KeyPath], leaves: Sequence[Any]) -> list[_Piece]:
    """List what DCP would write for this rank. Raises whatever its planner raises.

    Leaves of the same kind differ only in their names, so the planner, which takes long, plans one of each.
    """
    pieces, planned = [], dict[Any, list[Any]]()
    for number, (name, value) in enumerate(zip(names, leaves, strict=True)):
        path = tuple(paths[name])
        if not isinstance(value, torch.Tensor | ShardedTensor):
            pieces.append(_Piece(Item(name, path, 0, 0), number, MetadataIndex(name)))
            continue
        kind = name if isinstance(value, ShardedTensor) else leaf_kind(value)
        if kind not in planned:
            planned[kind] = create_default_local_save_plan({name: value}, True).items
        for write in planned[kind]:
            data = write.tensor_data
            item = Item(
                name, path, 0, 0,
                dtype=str(data.properties.dtype).removeprefix("torch."),
                shape=tuple(data.size),
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
            )  # fmt: skip
            index = replace(write.index, fqn=name)
            pieces.append(_Piece(item, number, index, data.properties.dtype))
    return pieces


def _local(value: Any, index: MetadataIndex) -> Any:
    """Return this rank's tensor or value; for a DTensor, its whole local part."""
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, ShardedTensor):
        return find_state_dict_object({index.fqn: value}, index)
    return value


def _has_payload(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has bytes, and they, in row-major order, are all of its data."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"
    return plain and tensor.numel() > 0 and not is_traceable_wrapper_subclass(tensor)


@dataclass(frozen=True, eq=False)
class ImageLayout:
    """The place of every item in an image of states of this `shape`. `tensors` have a payload, and their
    extents are known; `rest` follows at the offset `fixed_bytes`."""

    shape: TreeShape
    tensors: tuple[_Piece, ...]
    rest: tuple[_Piece, ...]
    common_bytes: int
    fixed_bytes: int
    # The items as the contents have them, in DCP's order, that of the keys in the user's dicts; b"" for items
    # of `rest`.
    lines: tuple[bytes, ...]

    def items(self, lengths: list[int]) -> bytes:
        """Return the lines of all items for the contents; `lengths` in bytes are those of `rest`."""
        position, rest = self.fixed_bytes, []
        for piece, length in zip(self.rest, lengths, strict=True):
            rest.append(line(msgspec.structs.replace(piece.item, at=position, length=length)))
            position += aligned(length)
        following = iter(rest)
        return b",".join([line or next(following) for line in self.lines])


def _layout(trees: Mapping[str, Any], common: set[str]) -> tuple[ImageLayout, list[Any]]:
    """Return the layout of `trees` and their leaves."""
    flat, paths = flatten_state_dict(dict(trees))
    names, leaves = list(flat), list(flat.values())
    pieces = _pieces(names, paths, leaves)
    lines = [b""] * len(pieces)
    with_payload, rest = [], []
    for number, piece in enumerate(pieces):
        if piece.dtype is not None and _has_payload(_local(leaves[piece.leaf], piece.index)):
            with_payload.append((piece.item.name not in common, number))
        else:
            rest.append(piece)
    position, common_bytes, placed = 0, 0, []
    for is_own, number in sorted(with_payload):
        piece = pieces[number]
        assert piece.dtype is not None
        before, after = shell(piece.dtype, piece.item.sizes)
        raw = position + len(before)
        end = raw + math.prod(piece.item.sizes) * piece.dtype.itemsize + len(after)
        item = msgspec.structs.replace(piece.item, at=position, length=end - position, raw=raw)
        placed.append(piece._replace(item=item))
        lines[number] = line(item)
        position = aligned(end)
        if not is_own:
            common_bytes = position
    shape = TreeShape(paths, leaves)
    return ImageLayout(shape, tuple(placed), tuple(rest), common_bytes, position, tuple(lines)), leaves


# ---- saving


@dataclass(frozen=True, eq=False)
class ImagePlan:
    """A state to be copied: the live `tensors` in the layout's order, and all else as bytes: `values`, and
    the image's `contents` after them."""

    layout: ImageLayout
    tensors: list[torch.Tensor]
    values: list[bytes]
    contents: bytes
    size_bytes: int

    def manifest(self, step: int, attempt: int, rank: int, world: int) -> bytes:
        """Return the image's manifest, still without hashes."""
        layout, contents_at = self.layout, self.size_bytes - len(self.contents)
        return Manifest(
            step, attempt, rank, world, torch.__version__, self.size_bytes, layout.common_bytes, contents_at,
            layout.fixed_bytes,
        ).to_bytes()  # fmt: skip

    def room(self) -> int:
        """Return the bytes of a slot that this image fits into, also after its values have grown."""
        return room_of(Manifest.from_bytes(self.manifest(0, 0, 0, 1)))


class ImagePlanner:
    """Plans images of one state and keeps what the next plan can use again."""

    def __init__(self, state: ScriptState) -> None:
        self._state = state
        self._layout: ImageLayout | None = None
        self._constants: dict[Any, bytes] = {}
        self._lengths: list[int] | None = None
        self._items = b""

    @torch.no_grad()
    def plan_image(self, trees: dict[str, Any]) -> ImagePlan:
        """Plan the image of `trees`. Raises whatever DCP's planner, or pickling a value, raises."""
        layout = self._layout
        leaves = layout.shape.leaves(trees) if layout is not None else None
        if layout is None or leaves is None:
            layout, leaves = self._layout, _ = _layout(trees, self._state.common(trees))
            self._lengths = None
        leaves = [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in leaves]
        values = self._values([_local(leaves[piece.leaf], piece.index) for piece in layout.rest])
        lengths = list(map(len, values))
        if lengths != self._lengths:
            self._lengths, self._items = lengths, layout.items(lengths)
        contents = sealed(self._state.entries(trees), self._items)
        size = layout.fixed_bytes + sum(map(aligned, lengths)) + len(contents)
        tensors = [leaves[piece.leaf] for piece in layout.tensors]
        for number, piece in enumerate(layout.tensors):
            if isinstance(tensors[number], ShardedTensor):
                tensors[number] = _local(tensors[number], piece.index)
        return ImagePlan(layout, tensors, values, contents, size)

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
    """A buffer that images are copied into. Nothing else may write to it while it is in use."""

    def __init__(self, buffer: Any) -> None:
        self.data = memoryview(buffer)
        self.bytes = torch.frombuffer(buffer, dtype=torch.uint8)
        self._layout: ImageLayout | None = None
        self._views: list[torch.Tensor] = []

    def frame(self, image_plan: ImagePlan) -> list[torch.Tensor]:
        """Write everything except payloads; return a view for each payload, in the order of
        `image_plan.tensors`."""
        layout = image_plan.layout
        if self._layout is not layout:
            self._layout, self._views = None, []  # in case this is interrupted
            self._views = self._prepare(layout)
            self._layout = layout
        position = layout.fixed_bytes
        for value in image_plan.values:
            self._fill(position, value)
            position += aligned(len(value))
        self.data[position : image_plan.size_bytes] = image_plan.contents
        return self._views

    def stage(self, image_plan: ImagePlan) -> None:
        """Write the image of `image_plan`. Later changes of its tensors do not change the image."""
        with torch.no_grad():
            copy_all(self.frame(image_plan), image_plan.tensors)

    def _prepare(self, layout: ImageLayout) -> list[torch.Tensor]:
        views = []
        for piece in layout.tensors:
            item = piece.item
            assert piece.dtype is not None
            before, after = shell(piece.dtype, item.sizes)
            self.data[item.at : item.raw] = before
            end = item.at + item.length - len(after)
            self._fill(end, after)
            views.append(self.bytes[item.raw : end].view(piece.dtype).view(item.sizes))
        return views

    def _fill(self, position: int, data: bytes) -> None:
        """Write `data` and the zeros after it, so that equal states give equal bytes in any buffer."""
        end = position + len(data)
        self.data[position:end] = data
        self.data[end : aligned(end)] = bytes(aligned(end) - end)


def copy_all(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor to its place. In one call, because most of the time that the copy of a small tensor
    takes is Python's. Other threads run meanwhile, as they would not with UntypedStorage.copy_."""
    if not all(tensor.is_cpu for tensor in tensors):
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
    elif places:
        torch._foreach_copy_(list(places), list(tensors))


# ---- loading


def load(image: memoryview, manifest: Manifest, state: ScriptState, *, foreign: bool = False) -> None:
    """Load `image`, saved by the same rank of a world of the same size, into `state`. `foreign`: it came over
    a connection that is not authenticated, so only plain values are accepted.

    Everything is copied: `state` does not refer to `image` afterwards. Raises CheckpointError naming what
    does not fit, and whatever the user's own `load_state_dict` raises.
    """
    contents = _contents(image, manifest)
    template = state.template(_metadata(contents), contents.entries, manifest.rank, manifest.world)
    flat, paths = flatten_state_dict(template)
    by_name = {item.name: item for item in contents.items}
    by_chunk = {(item.name, item.offsets): item for item in contents.items}
    tensors = {}
    for name, wanted in flat.items():
        if name not in by_name:
            raise CheckpointError(f"it has no {name!r}")
        if isinstance(wanted, torch.Tensor):
            tensors[name] = wanted
        elif by_name[name].is_tensor:
            raise CheckpointError(f"{name!r} was a tensor when it was saved")
        else:
            set_element(template, paths[name], _loaded(image, by_name[name], foreign=foreign))
    source = torch.frombuffer(image, dtype=torch.uint8) if len(image) else torch.empty(0, dtype=torch.uint8)
    copies: deque[_Copy] = deque()
    leaves = list(tensors.values())
    for piece in _pieces(list(tensors), paths, leaves):
        saved = _fitting(piece.item, by_chunk.get((piece.item.name, piece.item.offsets)))
        copies.append((_local(leaves[piece.leaf], piece.index), _payload(image, source, saved, foreign)))
    _copy_all(copies)
    state.apply(template, contents.entries)


def _contents(image: memoryview, manifest: Manifest) -> Contents:
    """Return the contents of the image. Raises CheckpointError."""
    try:
        return Contents.from_bytes(image[manifest.contents_at :])
    except BadImage as error:
        raise CheckpointError(f"the image in memory cannot be restored: {error}") from error


def _copy_all(copies: deque[_Copy]) -> None:
    """Copy in two threads, because mapping the pages of a new buffer takes half as long as copying them.
    Copies to a GPU use this thread alone, whose stream gives their order."""
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
            return  # the other thread took the last copy
        target.copy_(source)


def _fitting(wanted: Item, saved: Item | None) -> Item:
    """Return `saved`. Raises CheckpointError if it does not match `wanted`."""
    if saved is None or not saved.is_tensor:
        raise CheckpointError(f"it does not have {wanted.name!r} sharded as it is now")
    for what, now, then in (
        ("shape", wanted.shape, saved.shape),
        ("this rank's chunk", wanted.sizes, saved.sizes),
    ):
        if now != then:
            raise CheckpointError(f"{wanted.name!r}: {what} is {list(now)}, the checkpoint has {list(then)}")
    return saved


def _payload(image: memoryview, source: torch.Tensor, item: Item, foreign: bool) -> torch.Tensor:
    if item.raw < 0:
        tensor: torch.Tensor = _loaded(image, item, foreign=foreign)
        return tensor
    dtype = getattr(torch, item.dtype)
    size = math.prod(item.sizes) * dtype.itemsize
    return source[item.raw : item.raw + size].view(dtype).view(item.sizes)


def _loaded(image: memoryview, item: Item, *, foreign: bool) -> Any:
    # otherwise unpickling is safe here: only the user's own processes can write this memory
    return torch.load(io.BytesIO(image[item.at : item.at + item.length]), weights_only=foreign)


def _metadata(contents: Contents) -> Metadata:
    metadata = Metadata({}, planner_data={})
    for item in contents.items:
        add_metadata(metadata, item)
    return metadata


# Optimizers that keep two or three tensors of the same size and type for each parameter.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def foreseen_bytes(objects: Mapping[str, Any]) -> tuple[int, int]:
    """Estimate the bytes of this rank's image and of the part of it that no other rank has."""
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
    """Yield the tensors that give an entry's size, each with how many tensors of that size will be saved."""
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
