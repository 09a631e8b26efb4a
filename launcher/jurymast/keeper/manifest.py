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

import xxhash

from jurymast import foreign
from jurymast.core.checkpoints.copies import COMMON, OWN
from jurymast.core.keeper.copies import Image

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
        return replace(self, blocks={part: self.hash_part(image, part) for part in PARTS})

    def hash_part(self, image: memoryview, part: str) -> tuple[str, ...]:
        start, end = self.extent(part)
        return tuple(
            hash_block(image[at : min(at + BLOCK_BYTES, end)]) for at in range(start, end, BLOCK_BYTES)
        )

    def check(self, image: memoryview, part: str | None = None) -> None:
        """Re-hash one part or all. Raises BadImage."""
        for one in PARTS if part is None else (part,):
            found = self.hash_part(image, one)
            bad = [i for i, (a, b) in enumerate(zip(found, self.blocks[one], strict=True)) if a != b]
            if bad:
                raise BadImage(
                    f"step {self.step}, rank {self.rank}: {len(bad)} of {len(found)} blocks of the {one} "
                    f"part are corrupt, the first is block {bad[0]}"
                )

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
            values["items"] = tuple(_item(item) for item in values["items"])
            values["blocks"] = {part: tuple(hashes) for part, hashes in values["blocks"].items()}
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadImage(f"its manifest is damaged: {type(error).__name__}: {error}") from error


def _item(values: dict[str, Any]) -> Item:
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return Item(**fields)


def hash_block(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)
