"""What all messages have in common: they never change, have named fields only, and are called as their class
is.

A message is a JSON object with its kind under "say" (to the supervisor), "do" (to an agent), "answer" (to who
asked) and the like. Its reader checks the types of all fields and ignores fields that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

KIND_CHARACTERS, WHY_CHARACTERS = 40, 200


def kind_of(name: str) -> str:
    """CancelWrite -> "cancel write"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


class ToSupervisor(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag=kind_of, omit_defaults=True
):
    """What agents and commands say."""


class ToAgent(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of, omit_defaults=True):
    """What the supervisor orders."""


class ToAsker(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer", tag=kind_of, omit_defaults=True):
    """What the supervisor answers to a command."""


@dataclass(frozen=True)
class Strange:
    """What came and is no message here. `kind`: what its sender calls it, "" when that cannot be told."""

    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.kind else self.why


def out_of_place(message: msgspec.Struct) -> Strange:
    """A message of a kind that is not to be said here and now."""
    return Strange(kind_of(type(message).__name__), "it is not allowed here")


class _Kind(msgspec.Struct):
    say: str = ""
    do: str = ""
    answer: str = ""
    event: str = ""
    host: str = ""
    get: str = ""


# RecursionError: brackets without end; ValueError: what is no UTF-8.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_ENCODER = msgspec.json.Encoder()
_KIND = msgspec.json.Decoder(_Kind)
_newest: tuple[msgspec.Struct | None, bytes] = (None, b"")


def encode(message: msgspec.Struct) -> bytes:
    """The same bytes again when this very message was the newest: many agents are sent one alike."""
    global _newest
    known, payload = _newest
    if message is not known:
        try:
            payload = _ENCODER.encode(message)
        except UnicodeEncodeError:  # what a rank says of a file with a strange name
            plain = msgspec.to_builtins(message)
            text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
            payload = text.encode(errors="replace")
        _newest = message, payload
    return payload


def reader(kinds: Any) -> Callable[[bytes], Any]:
    """A function that makes one of these classes, or Strange, of a message's bytes. It raises nothing."""
    decode = msgspec.json.Decoder(kinds).decode

    def read(payload: bytes) -> Any:
        try:
            return decode(payload)
        except _UNREADABLE as error:
            return Strange(_kind(payload), str(error)[:WHY_CHARACTERS])

    return read


def _kind(payload: bytes) -> str:
    try:
        named = _KIND.decode(payload)
    except _UNREADABLE:
        return ""
    kind = named.say or named.do or named.answer or named.event or named.host or named.get
    return kind[:KIND_CHARACTERS]
