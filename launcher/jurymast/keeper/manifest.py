"""How a rank hands its state to its agent: an image with its manifest, in a slot; and a page of words about
the slots.

An image has the bytes of this rank's torch.distributed.checkpoint file: one item after another, each as
`torch.save` writes it. So every tier keeps the same bytes, a block's hash is valid everywhere, and storage
gets a stock checkpoint by copying byte ranges, without torch. The last bytes of an image are its contents,
which say where each item is (`checkpoint.contents`). Agents only pass them on.

    [ common part: what is equal on data-parallel ranks ][ own part: everything else, and the contents ]

The two parts are hashed and copied separately: a common part that other nodes have as well needs no replica.

The page has one record per local rank, in shared memory. Every word has one writer. A slot is a buffer of the
agent (a memfd, opened through /proc/<agent>/fd/N) that holds one image with its manifest right after it. The
rank may write into a slot only while `freed == seq`; it makes `seq` odd when it begins and even when image
and manifest are whole. From then on the slot is the agent's, until the agent sets `freed = seq` again. If a
rank dies in between, `seq` stays odd and nobody reads what it wrote.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import xxhash

from jurymast import foreign
from jurymast.core.state.images import ALL, COMMON, OWN, ImageId, parts_of
from jurymast.processes import shared_memory
from jurymast.worker.link import fence

# ---- images

FORMAT = 2
BLOCK_BYTES = 16 << 20
BLOCK_ENTRY_BYTES = 19  # of the manifest, for each block: its hash in quotes, and a comma
PARTS = (COMMON, OWN)


class BadImage(Exception):
    """These bytes are not an image to trust. The message says why, on one line."""


class HasBytes(Protocol):
    """Bytes from which parts are taken without copying them."""

    def __getitem__(self, span: slice, /) -> memoryview: ...


@dataclass(frozen=True)
class Manifest:
    """Describes an image, but names none of its items: its size depends only on the image's.

    The rank writes it without `blocks`; the image counts once the agent adds them. `blocks` has for each part
    the xxh3_64 of every `BLOCK_BYTES` and of the rest. The contents begin at `contents_at`. What lies behind
    `fixed_bytes` may have another size in the next save.
    """

    step: int
    attempt: int
    rank: int
    world: int
    torch: str
    size_bytes: int
    common_bytes: int
    contents_at: int = -1
    fixed_bytes: int = -1
    blocks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("contents_at", "fixed_bytes"):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, self.size_bytes)

    @property
    def image(self) -> ImageId:
        return ImageId(self.step, self.attempt, self.rank)

    @property
    def hashed(self) -> bool:
        return set(self.blocks) == set(PARTS)

    @property
    def common_id(self) -> str:
        """An id that is equal for images whose common parts have equal bytes; "" without a common part."""
        if not self.common_bytes:
            return ""
        return xxhash.xxh3_128_hexdigest(f"{self.common_bytes} {' '.join(self.blocks[COMMON])}".encode())

    def extent(self, part: str) -> tuple[int, int]:
        """Return (start, end) of a part in the image."""
        return (0, self.common_bytes) if part == COMMON else (self.common_bytes, self.size_bytes)

    def with_blocks(self, image: HasBytes) -> Manifest:
        """Return the manifest with hashes of `image`; releases the GIL for each block."""
        hashes = {part: tuple(hash_block(image[a:b]) for a, b in self.spans(part)) for part in PARTS}
        return replace(self, blocks=hashes)

    def count(self, part: str) -> int:
        """Return the number of a part's blocks, which need not exist: a manifest may claim any size."""
        start, end = self.extent(part)
        return -(-(end - start) // BLOCK_BYTES)

    def spans(self, part: str) -> list[tuple[int, int]]:
        """Return (start, end) in the image for each block of a part."""
        start, end = self.extent(part)
        return [(at, min(at + BLOCK_BYTES, end)) for at in range(start, end, BLOCK_BYTES)]

    def to_bytes(self) -> bytes:
        """Return JSON with a hash of itself, so that a damaged manifest is not taken for a damaged image."""
        text = json.dumps(vars(self), separators=(",", ":")).encode()
        return json.dumps({"xxh3_64": xxhash.xxh3_64_hexdigest(text)}).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a manifest. Raises BadImage."""
        try:
            head, _, text = data.partition(b"\n")
            if foreign.parse(head)["xxh3_64"] != xxhash.xxh3_64_hexdigest(text):
                raise BadImage("its manifest is damaged: the hash does not match")
            values: dict[str, Any] = foreign.parse(text)
            if values["format"] != FORMAT:
                raise BadImage(f"its format is {values['format']}, this version reads {FORMAT}")
            manifest = msgspec.convert(values, cls)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadImage(f"its manifest is damaged: {type(error).__name__}: {error}") from error
        sizes = (manifest.common_bytes, manifest.contents_at, manifest.fixed_bytes)
        if not all(0 <= size <= manifest.size_bytes for size in sizes):
            raise BadImage("its manifest is damaged: a part is larger than the whole")
        return manifest


# Room besides tensors: values grow from save to save, and the agent adds hashes to the manifest.
HEADROOM_BYTES = 1 << 20


def room_of(manifest: Manifest) -> int:
    """Return the bytes of a slot for this image and its manifest, in which it has room to grow."""
    growing = manifest.size_bytes - manifest.fixed_bytes
    blocks = sum(map(manifest.count, PARTS))
    return manifest.size_bytes + growing + 2 * BLOCK_ENTRY_BYTES * blocks + HEADROOM_BYTES


def hash_block(data: memoryview | bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


@dataclass(frozen=True)
class Block:
    """The unit in which images are verified and sent: block `number` of a part, at the bytes
    [at, at + length) of the image."""

    part: str
    number: int
    at: int
    length: int
    hash: str


def blocks_of(manifest: Manifest, part: str = ALL) -> list[Block]:
    """List the blocks of a part. Raises BadImage if the manifest's hashes do not fit its sizes."""
    blocks = []
    for one in parts_of(part):
        hashes = manifest.blocks.get(one, ())
        if len(hashes) != manifest.count(one):
            start, end = manifest.extent(one)
            raise BadImage(f"its manifest has {len(hashes)} hashes for {end - start} bytes of the {one} part")
        for number, ((start, end), value) in enumerate(zip(manifest.spans(one), hashes, strict=True)):
            blocks.append(Block(one, number, start, end - start, value))
    return blocks


def is_intact(image: HasBytes, block: Block) -> bool:
    """Return whether this block of the image has its hash; releases the GIL."""
    return hash_block(image[block.at : block.at + block.length]) == block.hash


# ---- the page of words

PAGE_VARIABLE = "JURYMAST_KEEPER"


class Word(IntEnum):
    """The words of a rank's record. Sizes are in bytes."""

    # the agent's
    REFUSED = 0  # 1: this node cannot give the memory that the rank asked for
    RESTORE = 1  # a value of `RestoreStatus`
    RESTORE_SLOT = 2
    RESTORE_STEP = 3
    RESTORE_ATTEMPT = 4  # the attempt that saved it
    RESTORE_IMAGE = 5  # size of the image in that slot
    RESTORE_MANIFEST = 6  # size of the manifest after it
    # the rank's
    WANT = 8  # largest expected size of image and manifest; asks the agent for slots of that size


class SlotWord(IntEnum):
    """The words of one slot; a record has `SLOTS` of them."""

    # the agent's
    FD = 0  # the agent's descriptor; 0: there is no buffer yet
    GENERATION = 1  # changes whenever the buffer does
    CAPACITY = 2
    FREED = 3
    # the rank's
    SEQ = 4
    STEP = 5
    IMAGE = 6  # size of the image
    MANIFEST = 7  # size of the manifest after it


class RestoreStatus(IntEnum):
    PENDING = 0  # the agent is still fetching
    READY = 1  # the image is in the slot, verified
    ELSEWHERE = 2  # nothing in memory: the ranks restore from the shared tier
    FAILED = 3  # it cannot be brought: the rank waits while the supervisor decides about the attempt
    # Another number of ranks saved it: a buffer of its own has `ShownImages`. In place of the slot, image and
    # manifest are then the agent's descriptor of that, the size of all images, and that of the buffer's text.
    COLLECTED = 4


class ShownImage(msgspec.Struct, frozen=True, array_like=True):
    """An image that a rank of another number may read: its `manifest`, and the agent's descriptor of a buffer
    with it. If that has only the own part, the one at `common` (otherwise 0) has the common part."""

    manifest: bytes
    descriptor: int
    common: int


class ShownImages(msgspec.Struct, frozen=True):
    """What all ranks of another number saved, by rank."""

    images: tuple[ShownImage, ...]

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ShownImages:
        """Raises BadImage."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadImage(f"what the agent shows cannot be read: {error}") from error


_SLOT_WORDS = len(SlotWord)
_FIRST_SLOT = 16
RANK_WORDS = 64
RANK_BYTES = 8 * RANK_WORDS


class _Words:
    """Single aligned 8-byte words that another process reads or writes. Whoever reads a word also sees what
    its writer wrote before it, above all the image that the word refers to."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, word: int) -> int:
        value = int(self._words[word])
        fence()
        return value

    def __setitem__(self, word: int, value: int) -> None:
        fence()
        self._words[word] = value


class RankRecord(_Words):
    """One rank's words."""

    def __init__(self, page: mmap.mmap | memoryview[int], local_rank: int) -> None:
        start = local_rank * RANK_BYTES
        super().__init__(memoryview(page)[start : start + RANK_BYTES].cast("q"))

    def slot(self, number: int) -> SlotRecord:
        start = _FIRST_SLOT + number * _SLOT_WORDS
        return SlotRecord(self._words[start : start + _SLOT_WORDS])


class SlotRecord(_Words):
    """One slot's words."""

    @property
    def writable(self) -> bool:
        """Whether the rank may write into the slot."""
        return self[SlotWord.FD] != 0 and self[SlotWord.FREED] == self[SlotWord.SEQ]


def create_page(ranks: int) -> tuple[int, mmap.mmap]:
    """Create the agent's page, with a record for each local rank. Return (memfd's descriptor, mapping)."""
    return shared_memory("jurymast-keeper", max(1, ranks) * RANK_BYTES)
