"""One rank's state at one step: the image, and the manifest that says what is in it.

An image is the very bytes that a torch.distributed.checkpoint file has for this rank: items one after
another, each what `torch.save` writes. So every tier keeps the same bytes, a block hash made once is valid
everywhere, and storage gets a stock checkpoint by copying byte ranges, without torch.

    [ common part: what data-parallel ranks have alike ][ own part: all else ]

The two parts are hashed and copied apart: a common part that other nodes have too needs no replica.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash

from jurymast import foreign
from jurymast.core.checkpoints.copies import ALL, COMMON, OWN
from jurymast.core.keeper.copies import Image
from jurymast.core.keeper.gathering import parts_of

FORMAT = 1
BLOCK_BYTES = 16 << 20
PARTS = (COMMON, OWN)


class BadImage(Exception):
    """A finding, not a failure: these bytes are no image to trust; says why, on one line."""


@dataclass(frozen=True)
class Item:
    """One tensor (or this rank's chunk of it), or one value: its extent is `[at, at + length)` of the image.

    `name` is the flat name that DCP gives it, `path` its place in the nested state. For tensors `dtype` is
    torch's name without "torch.", `shape` the whole tensor's, `offsets` and `sizes` this chunk's, and its
    plain bytes, row-major, begin at `raw`. A value has `dtype` "" and is what `torch.save` makes of it.
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


@dataclass(frozen=True)
class Manifest:
    """Written by the rank without `blocks`; the agent adds them, and only then the image counts.

    `entries`: how each entry of the user's state was taken (see `checkpoint.state`), with a `digest` where
    ranks may differ. `blocks`: for each part the xxh3_64 of every `BLOCK_BYTES` of it, the last one shorter.
    """

    step: int
    attempt: int
    rank: int
    world: int
    torch: str
    size_bytes: int
    common_bytes: int
    items: tuple[Item, ...] = ()
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def image(self) -> Image:
        return self.step, self.attempt, self.rank

    @property
    def hashed(self) -> bool:
        return set(self.blocks) == set(PARTS)

    @property
    def common_id(self) -> str:
        """Equal for two images with the same common part, byte for byte; "" when there is none."""
        if not self.common_bytes:
            return ""
        return xxhash.xxh3_128_hexdigest(f"{self.common_bytes} {' '.join(self.blocks[COMMON])}".encode())

    def extent(self, part: str) -> tuple[int, int]:
        """(start, end) of a part in the image."""
        return (0, self.common_bytes) if part == COMMON else (self.common_bytes, self.size_bytes)

    def with_blocks(self, image: memoryview) -> Manifest:
        """Hash `image`; releases the GIL meanwhile, block by block."""
        hashes = {part: tuple(hash_block(image[a:b]) for a, b in self.spans(part)) for part in PARTS}
        return replace(self, blocks=hashes)

    def spans(self, part: str) -> list[tuple[int, int]]:
        """(start, end) in the image of each block of a part."""
        start, end = self.extent(part)
        return [(at, min(at + BLOCK_BYTES, end)) for at in range(start, end, BLOCK_BYTES)]

    def to_bytes(self) -> bytes:
        """JSON with a hash over itself, so that a damaged manifest is told from a damaged image."""
        text = json.dumps(vars(self), default=vars, separators=(",", ":")).encode()
        return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(text)}).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises BadImage."""
        try:
            head, _, text = data.partition(b"\n")
            if foreign.parse(head)["xxh3_64"] != xxhash.xxh3_64_hexdigest(text):
                raise BadImage("its manifest is damaged: the hash does not match")
            values: dict[str, Any] = foreign.parse(text)
            if values["format"] != FORMAT:
                raise BadImage(f"its format is {values['format']}, this version reads {FORMAT}")
            return msgspec.convert(values, cls)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadImage(f"its manifest is damaged: {type(error).__name__}: {error}") from error


def hash_block(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Block:
    """The unit in which images are verified and travel: the `number`-th of a part, the bytes
    [at, at + length) of the image."""

    part: str
    number: int
    at: int
    length: int
    hash: str


def blocks_of(manifest: Manifest, part: str = ALL) -> list[Block]:
    """Raises BadImage when the manifest's hashes do not fit its sizes."""
    blocks = []
    for one in parts_of(part):
        spans, hashes = manifest.spans(one), manifest.blocks.get(one, ())
        if len(hashes) != len(spans):
            size = sum(end - start for start, end in spans)
            raise BadImage(f"its manifest has {len(hashes)} hashes for {size} bytes of the {one} part")
        for number, ((start, end), value) in enumerate(zip(spans, hashes, strict=True)):
            blocks.append(Block(one, number, start, end - start, value))
    return blocks


def is_intact(view: memoryview, block: Block) -> bool:
    """Whether the image that `view` begins with has this block whole; releases the GIL meanwhile."""
    return hash_block(view[block.at : block.at + block.length]) == block.hash
