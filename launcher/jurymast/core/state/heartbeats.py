"""An agent's heartbeat, and what it has of each rank: as few bytes as can be, since thousands of nodes send
one twice a second."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from jurymast.core.state import within


class RankReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank as its agent sees it. Ages (`_s`) are seconds at the time of the report: `quiet_s` since the
    rank last reported anything and `beat_s` since its newest step ended, None before the first; `longest_s`
    the longest step; `idle_s`: without work for a processor, `stopped_s`: in state T (or 0.0). `settled`:
    the schedule of saves that it has settled last. `step` is `explicit` if the script says it."""

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


class Trained(NamedTuple):
    """What a rank's script has said of its steps: `numbered` if `step` counts from a number that it gave, not
    from the attempt's start; the `samples` and `tokens` that all ranks have trained on in this attempt, or 0.
    Few scripts say anything, so it is not in each report."""

    numbered: bool = False
    samples: int = 0
    tokens: int = 0


class CadenceReport(msgspec.Struct, frozen=True, gc=False):
    """The schedule of saves on an agent's page, and what the script requests: `steps` or `seconds` between
    two saves, or neither."""

    number: int
    decided: int
    steps: int | None = None
    seconds: float | None = None


class Times(NamedTuple):
    """A rank's steps so far: their number, and the total seconds of their parts."""

    steps: int
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def all_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


class Beat(msgspec.Struct, array_like=True, tag="beat", frozen=True):
    """An agent's heartbeat. `ranks` by local rank, [] while none runs; `cadence` None: no Checkpointer; now
    and then all `times`; `trained` by local rank, None if no script has said anything. The rest spares a
    supervisor of thousands of nodes work: of ranks that have not ended the shortest `quiet_s`; whether one is
    `stopped`, the longest step, who has the least progress. `joules`: what the node's GPUs have used since
    its agent first saw them; None: nobody can say."""

    attempt: int
    ranks: list[RankReport]
    cadence: CadenceReport | None = None
    times: list[Times] | None = None
    quiet_s: float | None = None
    stopped: bool = False
    longest_s: float = 0.0
    slowest: int = 0
    joules: float | None = None
    trained: list[Trained] | None = None


class RanksSeen(NamedTuple):
    """What an agent knows of its ranks for a heartbeat; the fields are those of Beat."""

    ranks: list[RankReport]
    cadence: CadenceReport | None = None
    times: list[Times] | None = None
    trained: list[Trained] | None = None


def how_far(report: RankReport) -> tuple[bool, int, float]:
    """A key that is less for a rank with less progress: no step, fewer steps, or a step longer ago."""
    return report.beats > 0, report.step, -(report.beat_s or 0.0)


def beat_of(
    attempt: int,
    ranks: list[RankReport],
    cadence: CadenceReport | None = None,
    times: list[Times] | None = None,
    trained: list[Trained] | None = None,
    joules: float | None = None,
) -> Beat:
    quiet_s = [one.quiet_s for one in ranks if one.phase not in within.OVER and one.quiet_s is not None]
    stopped = any(one.stopped_s for one in ranks)
    longest_s = max((one.longest_s for one in ranks), default=0.0)
    slowest = min(range(len(ranks)), key=lambda local: how_far(ranks[local]), default=0)
    least_s = min(quiet_s, default=None)
    return Beat(attempt, ranks, cadence, times, least_s, stopped, longest_s, slowest, joules, trained)
