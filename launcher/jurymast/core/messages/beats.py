"""Heartbeats. They are most of what agents say, and so are arrays: `["beat", attempt, ranks, ...]`, each rank
one as well."""

from __future__ import annotations

import msgspec


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
    that have not ended, whether one is `stopped`, the longest step, `longest_s`, and the local rank that is
    least far, `slowest`."""

    attempt: int
    ranks: list[RankReport]
    cadence: CadenceReport | None = None
    times: list[Times] | None = None
    quiet_s: float | None = None
    stopped: bool = False
    longest_s: float = 0.0
    slowest: int = 0


def how_far(report: RankReport) -> tuple[bool, int, float]:
    """Less for a rank that is less far: without a step, with fewer steps, longer ago."""
    return report.beats > 0, report.step, -(report.beat_s or 0.0)


def beat_of(
    attempt: int,
    ranks: list[RankReport],
    cadence: CadenceReport | None = None,
    times: list[Times] | None = None,
) -> Beat:
    quiet_s = [one.quiet_s for one in ranks if one.phase != "done" and one.quiet_s is not None]
    stopped = any(one.stopped_s for one in ranks)
    longest_s = max((one.longest_s for one in ranks), default=0.0)
    slowest = min(range(len(ranks)), key=lambda local: how_far(ranks[local]), default=0)
    return Beat(attempt, ranks, cadence, times, min(quiet_s, default=None), stopped, longest_s, slowest)
