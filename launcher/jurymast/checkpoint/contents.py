"""The contents of an image: which tensor or value has which of its bytes. They are the last bytes of the
image itself, so that they are hashed, copied and XORed with it.

Only ranks and the storage process parse them. A state may have a hundred thousand items, and whoever serves
many ranks in one event loop (agents, supervisors) would stand still meanwhile: it gets by with the
`keeper.manifest`, whose size does not depend on the items.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from jurymast.keeper.manifest import BadImage, Manifest


class Item(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor (or this rank's chunk of it) or one value, at the bytes `[at, at + length)` of the image.

    `name` is DCP's flat name, `path` the place in the nested state. For a tensor, `dtype` is torch's name
    without "torch.", `shape` that of the whole tensor, `offsets` and `sizes` are the chunk's, and the
    payload, in row-major order, begins at `raw`. A value has `dtype` "" and torch.save's bytes.
    """

    name: str
    path: tuple[str | int, ...]
    at: int
    length: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    raw: int = -1

    @property
    def is_tensor(self) -> bool:
        return self.dtype != ""


class Contents(msgspec.Struct, frozen=True):
    """The items of an image, in DCP's order. `entries` says how each entry of the user's state was taken (see
    `checkpoint.state`), with a `digest` where ranks may differ."""

    entries: dict[str, dict[str, Any]] = {}
    items: tuple[Item, ...] = ()

    def to_bytes(self) -> bytes:
        return sealed(self.entries, lines(self.items))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Contents:
        """Parse contents. Raises BadImage, also for bytes that were damaged."""
        head, text = data[:HASH_BYTES], data[HASH_BYTES:]
        if bytes(head) != xxhash.xxh3_64_hexdigest(text).encode():
            raise BadImage("its contents are damaged: the hash does not match")
        try:
            return _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise BadImage(f"its contents are damaged: {type(error).__name__}: {error}") from error


_DECODER = msgspec.json.Decoder(Contents)
HASH_BYTES = 16


def line(item: Item) -> bytes:
    return msgspec.json.encode(item)


def lines(items: Iterable[Item]) -> bytes:
    return b",".join(map(line, items))


def sealed(entries: dict[str, dict[str, Any]], items: bytes) -> bytes:
    """Return the bytes of contents with the `lines` of its items, after a hash of them."""
    text = b"".join((b'{"entries":', msgspec.json.encode(entries), b',"items":[', items, b"]}"))
    return xxhash.xxh3_64_hexdigest(text).encode() + text


@dataclass(frozen=True)
class Described:
    """An image's manifest and its contents."""

    manifest: Manifest
    contents: Contents

    @property
    def items(self) -> tuple[Item, ...]:
        return self.contents.items
