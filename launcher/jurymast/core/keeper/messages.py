"""Messages between the keepers of agents: see `wire.stream`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from jurymast.core.message import Strange, kind_of, reader


class ImageName(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's image of a state; with a `group` the XOR of these ranks' images, of which `rank` is the
    lowest."""

    step: int
    attempt: int
    rank: int
    group: tuple[int, ...] = ()


class ToKeeper(msgspec.Struct, frozen=True, kw_only=True, tag_field="get", tag=kind_of):
    """A keeper's request for an image; `ways`: how the bytes may be protected, see `wire.shield`."""

    image: ImageName
    ways: tuple[str, ...] = ()


class GetManifest(ToKeeper, frozen=True, kw_only=True):
    """Request the image's manifest; answered by ManifestFollows and the manifest."""


class GetBytes(ToKeeper, frozen=True, kw_only=True):
    """Request `length` bytes of the image from `at` on; answered by BytesFollow and these bytes."""

    at: int
    length: int


class Check(ToKeeper, frozen=True, kw_only=True):
    """Wrong bytes of the image arrived: verify it there. Answered by Doubted."""


class FromKeeper(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer", tag=kind_of):
    """A keeper's answer."""


class ManifestFollows(FromKeeper, frozen=True, kw_only=True):
    """This many bytes follow, protected in this way. `capacity`: bytes of the buffer that contains the image,
    or 0."""

    length: int
    way: str
    capacity: int


class BytesFollow(FromKeeper, frozen=True, kw_only=True):
    """This many bytes follow, protected in this way."""

    length: int
    way: str


class Doubted(FromKeeper, frozen=True, kw_only=True):
    """The image will be verified again."""


class NotServed(FromKeeper, frozen=True, kw_only=True):
    """Nothing follows."""

    why: str


Request = GetManifest | GetBytes | Check | Strange
Served = ManifestFollows | BytesFollow | Doubted | NotServed | Strange

read_request: Callable[[bytes], Request] = reader(GetManifest | GetBytes | Check)
read_served: Callable[[bytes], Served] = reader(ManifestFollows | BytesFollow | Doubted | NotServed)
