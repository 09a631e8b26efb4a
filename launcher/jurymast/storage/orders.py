"""What the storage process is told, and what it answers: a JSON object a line."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from jurymast.core.checkpoints.copies import LOCAL, OBJECT, SHARED
from jurymast.core.message import Strange, kind_of, reader

LIMIT_S = 1800.0


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's image, in the agent's memory (`/proc/PID/fd/N`) or in a file; `common_path` begins with its
    common part, unless `path` does. `manifest`: a path, or its content."""

    rank: int
    path: str
    manifest: str
    common_path: str = ""


class _Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of, omit_defaults=True):
    """`id` is its number; it fails when it takes longer than `limit_s`."""

    tier: ClassVar[str]
    id: int = 0
    limit_s: float = LIMIT_S


class WriteLocal(_Order, frozen=True, kw_only=True):
    """These images of a state to the local disk, in `root`."""

    tier: ClassVar[str] = LOCAL
    root: str
    step: int
    attempt: int
    images: tuple[Image, ...]


class WriteShared(_Order, frozen=True, kw_only=True):
    """This node's images of a state, of `world` ranks, to the shared checkpoint in `root`. All nodes are told
    the same `nonce`; the one that leads brings their parts together, for the run `run` in its directory, and
    then leaves the newest `keep` checkpoints, if given."""

    tier: ClassVar[str] = SHARED
    root: str
    step: int
    attempt: int
    world: int
    images: tuple[Image, ...]
    nonce: str
    lead: bool = False
    run: str = ""
    run_directory: str = ""
    keep: int = 0


class Warm(_Order, frozen=True, kw_only=True):
    """Load what a lead needs, before it has to be quick."""

    tier: ClassVar[str] = SHARED


class Upload(_Order, frozen=True, kw_only=True):
    """A complete step of the directory `root` to `url`/`run`, sealed with the key of that run."""

    tier: ClassVar[str] = OBJECT
    root: str
    step: int
    url: str
    run: str
    run_directory: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of):
    """The order with this number."""

    id: int


class Done(msgspec.Struct, frozen=True, kw_only=True, tag_field="said", tag=kind_of, omit_defaults=True):
    """So many bytes were written. `existing`: all of it was there already. `published`: the checkpoint is
    there under its final name; only then its images may go."""

    id: int = 0
    bytes: int = 0
    seconds: float = 0.0
    existing: bool = False
    published: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="said", tag=kind_of, omit_defaults=True):
    """Why, in one line that names the path and what to do."""

    id: int = 0
    why: str


AnyOrder = WriteLocal | WriteShared | Warm | Upload
Told = AnyOrder | Cancel
Answer = Done | Failed

read_told: Callable[[bytes], Told | Strange] = reader(Told)
read_answer: Callable[[bytes], Answer | Strange] = reader(Answer)
