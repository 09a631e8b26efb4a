"""Messages about nodes and their ranks: heartbeats, findings, stacks, tests."""

from __future__ import annotations

import msgspec

from jurymast.core.message import ToAgent, ToSupervisor
from jurymast.core.nodes.findings import Finding
from jurymast.core.nodes.stacks import Entered, Stand
from jurymast.core.nodes.tests import Alone


class RankReport(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank as its agent sees it. Ages (`_s`) are seconds at the time of the report: `quiet_s` since the
    rank last reported anything and `beat_s` since its newest step ended, None before the first; `longest_s`
    is its longest step; `idle_s` is the time without work for the processor, `stopped_s` that in state T, 0.0
    if it is not. `settled` is the number of the schedule of saves that it has settled last."""

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
    """The schedule of saves on an agent's page, and what the script requests: `steps` or `seconds` between
    two saves, or neither."""

    number: int
    decided: int
    steps: int | None = None
    seconds: float | None = None


Times = tuple[int, float, float, float]


class Beat(msgspec.Struct, array_like=True, tag="beat", frozen=True):
    """An agent's heartbeat. `ranks` by local rank, [] while none runs; `cadence` None: no Checkpointer. From
    time to time it has all ranks' `times`: steps, and the total seconds of their forward, backward and update
    parts. The rest saves a supervisor of thousands of nodes from computing it: `quiet_s`, the shortest of the
    ranks that have not ended, whether one is `stopped`, the longest step, `longest_s`, and the local rank
    with the least progress, `slowest`."""

    attempt: int
    ranks: list[RankReport]
    cadence: CadenceReport | None = None
    times: list[Times] | None = None
    quiet_s: float | None = None
    stopped: bool = False
    longest_s: float = 0.0
    slowest: int = 0


def how_far(report: RankReport) -> tuple[bool, int, float]:
    """Return a key that is less for a rank with less progress: without a step, with fewer steps, or longer
    ago."""
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


class Look(ToAgent, frozen=True, kw_only=True):
    """Request the places at which the ranks of `attempt` are. `number` identifies the question."""

    attempt: int
    number: int


class Looked(ToSupervisor, frozen=True, kw_only=True):
    """The answer to Look, by rank."""

    attempt: int
    number: int
    stands: dict[int, Stand]


class Stacks(ToSupervisor, frozen=True, kw_only=True):
    """Where ranks were just before they were stopped; the fields are those of `core.events.StacksTaken`."""

    attempt: int
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    folder: str
    recorded: bool = False
    records: tuple[int, ...] = ()
    flights: tuple[Entered, ...] = ()


class HealthFound(ToSupervisor, frozen=True, kw_only=True):
    """A finding on the reporting node."""

    finding: Finding


class LeaveVerdict(ToAgent, frozen=True, kw_only=True):
    """Report to the site, in the name of this Slurm `job`, that the node is bad."""

    job: str
    finding: Finding


class VerdictLeft(ToSupervisor, frozen=True, kw_only=True):
    """The verdict was left for the site; else `why` it could not be."""

    why: str = ""


class TestAlone(ToAgent, frozen=True, kw_only=True):
    """Test the node by itself, within `limit_s` seconds."""

    limit_s: float


class TestPair(ToAgent, frozen=True, kw_only=True):
    """Test the node with another one. The two nodes have the `rank`s 0 and 1; both meet at the store of the
    first, under the pair's `name`."""

    name: str
    host: str
    port: int
    rank: int
    limit_s: float


class TestOver(ToAgent, frozen=True, kw_only=True):
    """End the test processes."""


class TestedAlone(ToSupervisor, frozen=True, kw_only=True):
    """The node's own tests are done. `port` of the node's store for pairs; 0: none."""

    port: int
    found: Alone


class TestedPair(ToSupervisor, frozen=True, kw_only=True):
    """The pair's test is done: seconds by measure, none if it failed with `error`."""

    name: str
    times: dict[str, float]
    error: str = ""
