"""What agents and the supervisor say to each other, as JSON.

Heartbeats are most of it, and typed: `["beat", attempt, ranks, ...]`, each rank an array as well. All other
messages are objects still, {"say": kind, ...} to the supervisor and {"do": order, ...} to an agent.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from jurymast.errors import ProtocolError

Message = dict[str, Any]


class RankReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank as its agent sees it. Ages (`_s`) are seconds at the time of the look; `quiet_s` since it last
    said anything and `beat_s` since its newest step ended, None before the first; `longest_s` of its steps;
    `idle_s` without work for the processor, `stopped_s` in state T, 0.0 when it is not. `settled`: number of
    the schedule of saves that it has settled last."""

    step: int
    beats: int
    explicit: bool
    phase: str
    quiet_s: float | None
    beat_s: float | None
    longest_s: float
    settled: int
    idle_s: float
    stopped_s: float


class CadenceReport(msgspec.Struct, frozen=True, gc=False):
    """The schedule of saves on an agent's page, and what the script asks for: `steps` or `seconds` between
    two, or neither."""

    number: int
    decided: int
    steps: int | None = None
    seconds: float | None = None


Times = tuple[int, float, float, float]


class Beat(msgspec.Struct, array_like=True, tag="beat", frozen=True):
    """An agent's heartbeat. `ranks` by local rank, [] while none runs; `cadence` None: no Checkpointer. Now
    and then it has all ranks' `times`: steps, and the seconds in all of their forward, backward and update
    parts. What a supervisor of thousands would else work out of each: `quiet_s`, the shortest of the ranks
    that have not ended, whether one is `stopped`, and the longest step, `longest_s`."""

    attempt: int
    ranks: list[RankReport]
    cadence: CadenceReport | None = None
    times: list[Times] | None = None
    quiet_s: float | None = None
    stopped: bool = False
    longest_s: float = 0.0


def beat_of(
    attempt: int,
    ranks: list[RankReport],
    cadence: CadenceReport | None = None,
    times: list[Times] | None = None,
) -> Beat:
    quiet_s = [one.quiet_s for one in ranks if one.phase != "done" and one.quiet_s is not None]
    stopped = any(one.stopped_s for one in ranks)
    longest_s = max((one.longest_s for one in ranks), default=0.0)
    return Beat(attempt, ranks, cadence, times, min(quiet_s, default=None), stopped, longest_s)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Beat | Message)


def encode(message: Message | Beat) -> bytes:
    try:
        return _ENCODER.encode(message)
    except UnicodeEncodeError:  # what a rank says of a file with a strange name
        return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def decode(payload: bytes, sender: str) -> Message | Beat:
    """Raises ProtocolError, which names the sender."""
    try:
        message: Message | Beat = _DECODER.decode(payload)
    except ValueError as error:  # msgspec's own, and for what is no UTF-8
        raise ProtocolError(f"a message from {sender} is none: {error}") from error
    return message


def decode_object(payload: bytes, sender: str) -> Message:
    """Where no heartbeat is expected. Raises ProtocolError."""
    message = decode(payload, sender)
    if isinstance(message, Beat):
        raise ProtocolError(f"a heartbeat from {sender}, which is not expected here")
    return message
