"""What all messages have in common: they never change, have only named fields, and their kind is the class
name.

A message is a JSON object with its kind under "say" (to the supervisor), "do" (to an agent), "answer" (to a
client) and similar keys. Its reader checks the types of all fields and ignores unknown fields.

Messages that are not understood are counted, and the first is reported; nothing ends because of them. Both
sides of a connection have the same version (see `wire.protocol.MAGIC`). So such a message comes from a bug in
jurymast, or from somebody who knows the run's secret: people should learn of it, and the training should go
on.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

KIND_CHARACTERS, WHY_CHARACTERS = 40, 200


def kind_of(name: str) -> str:
    """Return the kind of a class: CancelWrite -> "cancel write"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


class ToSupervisor(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="say", tag=kind_of, omit_defaults=True
):
    """A message from an agent or a command to the supervisor."""


class ToAgent(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag=kind_of, omit_defaults=True):
    """An order of the supervisor."""


class ToAsker(msgspec.Struct, frozen=True, kw_only=True, tag_field="answer", tag=kind_of, omit_defaults=True):
    """The supervisor's answer to a command."""


@dataclass(frozen=True)
class Unreadable:
    """Something received that is not a message here. `kind`: its kind according to the sender, "" if
    unreadable."""

    kind: str
    why: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.kind else self.why


def out_of_place(message: msgspec.Struct) -> Unreadable:
    """Return an Unreadable for a message of a kind that is not allowed here and now."""
    return Unreadable(kind_of(type(message).__name__), "it is not allowed here")


_KIND_FIELDS = ("say", "do", "answer", "event", "host", "get")
# RecursionError: endless brackets; ValueError: invalid UTF-8.
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_ENCODER = msgspec.json.Encoder()
_newest: tuple[msgspec.Struct | None, bytes] = (None, b"")


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message. The bytes of the newest one are kept, because many agents are sent the same
    message."""
    global _newest
    known, payload = _newest
    if message is not known:
        try:
            payload = _ENCODER.encode(message)
        except UnicodeEncodeError:  # a rank's report on a file with a strange name
            plain = msgspec.to_builtins(message)
            text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
            payload = text.encode(errors="replace")
        _newest = message, payload
    return payload


def reader(kinds: Any) -> Callable[[bytes], Any]:
    """Return a function that reads one of these classes, or Unreadable, from a message's bytes. It raises
    nothing."""
    decode = msgspec.json.Decoder(kinds).decode

    def read(payload: bytes) -> Any:
        try:
            return decode(payload)
        except _UNREADABLE as error:
            return Unreadable(_kind(payload), str(error)[:WHY_CHARACTERS])

    return read


def _kind(payload: bytes) -> str:
    try:
        fields = msgspec.json.decode(payload, type=dict[str, Any])
    except _UNREADABLE:
        return ""
    kinds = (fields.get(name) for name in _KIND_FIELDS)
    return next((kind for kind in kinds if isinstance(kind, str)), "")[:KIND_CHARACTERS]


# Kinds that are counted for each sender, who may make up any number of them; the rest is counted together.
KINDS_COUNTED, OTHERS = 50, "others"
KINDS_TOLD = 5


class Strangers:
    """The unknown messages of each sender; `note` reports them to people."""

    def __init__(self, note: Callable[[str, str], object]) -> None:
        self._note = note
        self._said: dict[str, Counter[str]] = {}
        self._told: dict[str, int] = {}

    def heard(self, sender: str, what: Unreadable) -> None:
        """Count a message; the sender's first one is reported at once."""
        kinds = self._said.setdefault(sender, Counter())
        kinds[what.kind if what.kind in kinds or len(kinds) < KINDS_COUNTED else OTHERS] += 1
        if sender not in self._told:
            self._told[sender] = 1
            self._note(sender, f"an unknown message was ignored: {what}")

    def left(self, sender: str) -> None:
        """Report, once the connection has ended, how many messages there were, unless that was reported."""
        kinds = self._said.get(sender, Counter())
        if kinds.total() > self._told.get(sender, 0):
            self._told[sender] = kinds.total()
            told = ", ".join(f"{kind or 'without a kind'} {n}" for kind, n in kinds.most_common(KINDS_TOLD))
            self._note(sender, f"{kinds.total()} unknown messages were ignored: {told}")
