"""What goes wrong in a simulated run, and when: drawn at random, or replayed from a trace.

A fault plan is a list of faults in order of time. Nodes are numbers: 0 .. active + spares - 1.

The state machine sees only some of them by name: it treats healthy placed nodes alike, and each of its
decisions walks over all placed nodes. So a few placed nodes have names of their own, and one name stands for
all the others; a node that fails gets a name that has not been needed yet. Decisions are the same as with a
name for every node (a test compares them), and cost the same for 12,500 nodes as for ten.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jurymast import foreign
from jurymast.core.judges.attribution import MANY_LOST, MANY_LOST_FRACTION
from jurymast.core.state.failure_rate import DAY_S, PRIOR_RATE
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import UsageError
from jurymast.sim.checkpoints import HANG, POWER_LOSS, SCRIPT

# Follow-ups of a burst come within this time (the published trace: most of its early failures are bursts).
BURST_S = 300.0
BUNDLED_TRACE = "infinitehbd"
# The bundled trace: servers of the cluster (most never fail), and days of observation.
BUNDLED_NODES, BUNDLED_DAYS = 400, 348.98
# Of the time between two incidents. Below this nearly all of them come at the same moment.
SHAPE_MIN = 0.1
# Of one run. Each takes milliseconds.
FAULTS_MAX = 1_000_000
TRACE_BYTES_MAX = 64 << 20


@dataclass(frozen=True)
class TraceFault:
    """One fault at `t` seconds from the start: `nodes` are lost together (`kind`: power_loss or node_crash),
    a rank on one of them is killed (worker_kill), the script fails, or all ranks hang. `down_s` is the time
    until lost nodes are repaired (None: the usual time of a repair). With a `step`, the fault strikes when
    that step is first done, and `t` is ignored; so the same plan works for a real run."""

    t: float
    nodes: tuple[int, ...] = ()
    kind: str = POWER_LOSS
    down_s: float | None = None
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class FaultModel:
    """A random model of faults. `rate` is in node failures per 1,000 node-days, whatever their pattern.

    `shape` is the Weibull shape of the time between incidents (1: exponential; below 1: clustered). `bursts`
    is the share of incidents that others follow within minutes, two on average. `multi` is the share that
    takes several neighboring nodes at once. `lemons` is the share of nodes that fail `lemon_factor` times as
    often as the others. `application_rate` and `hang_rate` are failures of the script, and hangs, in the same
    unit.
    """

    rate: float = PRIOR_RATE
    shape: float = 1.0
    bursts: float = 0.0
    multi: float = 0.0
    lemons: float = 0.0
    lemon_factor: float = 10.0
    application_rate: float = 0.0
    hang_rate: float = 0.0

    def draw(self, nodes: int, seconds: float, rng: random.Random) -> list[TraceFault]:
        """Draw a plan for `nodes` over `seconds`. Equal generators give equal plans.

        Raises UsageError for too many faults.
        """
        faults: list[TraceFault] = []
        nodes_per_incident = (1.0 + self.bursts * 2.0) * (1.0 + self.multi * 1.5)
        per_second = nodes * self.rate / 1000.0 / DAY_S
        for t in _arrivals(per_second / nodes_per_incident, self.shape, seconds, rng):
            times = [t]
            if rng.random() < self.bursts:
                times += [t + rng.uniform(0.0, BURST_S) for _ in range(rng.choice((1, 2, 3)))]
            for time in times:
                count = 1 if rng.random() >= self.multi else rng.choice((2, 2, 3, 3))  # 2.5: 1.5 more
                first = self._node(nodes, rng)
                faults.append(TraceFault(time, tuple((first + i) % nodes for i in range(min(count, nodes)))))
        for kind, rate in ((SCRIPT, self.application_rate), (HANG, self.hang_rate)):
            per_second = nodes * rate / 1000.0 / DAY_S
            faults += [TraceFault(t, kind=kind) for t in _arrivals(per_second, 1.0, seconds, rng)]
        return sorted((fault for fault in faults if fault.t < seconds), key=lambda fault: fault.t)

    def _node(self, nodes: int, rng: random.Random) -> int:
        """Draw a node. Lemons are spread evenly over the numbers, so some of them are spares."""
        bad = min(nodes, round(self.lemons * nodes))
        weight = bad * self.lemon_factor
        if bad and rng.random() < weight / (weight + nodes - bad):
            return int((rng.randrange(bad) + 0.5) * nodes / bad)
        return rng.randrange(nodes)


# Values of `--faults`: the field that each sets, and its usual value (that of the bundled trace, where it has
# one).
PATTERNS: dict[str, dict[str, float]] = {
    "exponential": {},
    "weibull": {"shape": 0.64},
    "bursts": {"bursts": 0.15},
    "multi": {"multi": 0.093},
    "lemons": {"lemons": 0.05},
}


def parse_patterns(text: str) -> dict[str, float]:
    """Parse "lemons", a pattern with a value ("lemons:0.1"), or several ("lemons,multi").

    Raises UsageError.
    """
    fields: dict[str, float] = {}
    for each in text.split(","):
        name, _, value = each.strip().partition(":")
        if name not in PATTERNS:
            raise UsageError(
                f"there is no pattern of faults {name}{did_you_mean(name, PATTERNS)}",
                hint=f"the patterns are {', '.join(PATTERNS)}",
            )
        if not value:
            fields |= PATTERNS[name]
            continue
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        least, most = (SHAPE_MIN, 10.0) if name == "weibull" else (0.0, 1.0)
        if not max(least, 1e-9) <= number <= most:
            raise UsageError(f"--faults {each}: {value!r} is not a number above {least:g}, to {most:g}")
        fields |= dict.fromkeys(PATTERNS[name], number)
    return fields


def _arrivals(per_second: float, shape: float, until: float, rng: random.Random) -> list[float]:
    """Draw the times of a renewal process with this mean rate. Raises UsageError for too many."""
    if per_second <= 0.0:
        return []
    scale = 1.0 / per_second / math.gamma(1.0 + 1.0 / shape)
    times: list[float] = []
    t = rng.weibullvariate(scale, shape)
    while t < until:
        times.append(t)
        _limit(times)
        t += rng.weibullvariate(scale, shape)
    return times


def _limit(faults: Sequence[object]) -> None:
    if len(faults) > FAULTS_MAX:
        raise UsageError(
            f"more than {FAULTS_MAX:,} faults in one run", hint="a lower rate, fewer days or fewer nodes"
        )


@dataclass(frozen=True)
class Trace:
    """Recorded faults (day, node, days down) of a cluster of `nodes` nodes that was observed for `days`."""

    faults: tuple[tuple[float, int, float], ...]
    nodes: int
    days: float

    @property
    def rate(self) -> float:
        """Faults per 1,000 node-days."""
        return 1000.0 * len(self.faults) / (self.nodes * self.days)

    def draw(
        self, nodes: int, seconds: float, rng: random.Random, *, repair: bool = False, shift: bool = True
    ) -> list[TraceFault]:
        """Draw a plan for `nodes` over `seconds`. Time is sped up by `nodes / self.nodes`, so that the rate
        per node stays the same; each recorded node stands for that many nodes.

        With `repair`, nodes are down as long as recorded (in real hours); otherwise as long as repairs
        usually take. With `shift`, the plan starts on a random day. The trace starts over at its end.

        Raises UsageError for too many faults.
        """
        factor = nodes / self.nodes
        copies = max(1, math.ceil(factor))
        start = rng.uniform(0.0, self.days) if shift else 0.0
        shifted = sorted(((day - start) % self.days, node, down) for day, node, down in self.faults)
        plan: list[TraceFault] = []
        lap = 0
        while shifted:
            for day, node, down in shifted:
                t = (lap * self.days + day) / factor * DAY_S
                if t >= seconds:
                    return plan
                number = (node + self.nodes * rng.randrange(copies)) % nodes
                plan.append(TraceFault(t, (number,), down_s=down * DAY_S if repair else None))
                _limit(plan)
            lap += 1
        return plan


def read_trace(path: Path | str, nodes: int | None = None) -> Trace:
    """Read a CSV with the header `node,start_day,end_day` (more columns are allowed), or the bundled trace of
    that name. `nodes` is the size of the recorded cluster; None: the number of nodes in the file.

    Raises UsageError for a file that cannot be read or contains no faults.
    """
    if str(path) == BUNDLED_TRACE:
        text = (resources.files("jurymast.sim") / "data" / "infinitehbd_node_faults.csv").read_text("utf-8")
        return _trace(text.splitlines(), BUNDLED_TRACE, nodes or BUNDLED_NODES, BUNDLED_DAYS)
    try:
        text = foreign.read(path, TRACE_BYTES_MAX).decode()
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path}: {told}", hint="a CSV: node,start_day,end_day") from error
    return _trace(text.splitlines(), str(path), nodes, None)


def _trace(lines: Sequence[str], name: str, nodes: int | None, days: float | None) -> Trace:
    faults: list[tuple[float, int, float]] = []
    numbers: dict[str, int] = {}
    rows = csv.DictReader(lines)
    if missing := {"node", "start_day", "end_day"} - set(rows.fieldnames or ()):
        raise UsageError(f"{name}: no column {', '.join(sorted(missing))}")
    last = 0.0
    for row in rows:
        try:
            start, end = float(row["start_day"]), float(row["end_day"])
        except (TypeError, ValueError):
            raise UsageError(f"{name}:{rows.line_num}: start_day and end_day must be numbers") from None
        if not 0.0 <= start <= end < math.inf:
            raise UsageError(f"{name}:{rows.line_num}: must be 0 <= start_day <= end_day")
        faults.append((start, numbers.setdefault(row["node"], len(numbers)), end - start))
        last = max(last, start)
    if not faults or last <= 0.0:
        raise UsageError(f"{name}: no faults")
    # How long the cluster was observed is unknown: the end of the time of n faults is estimated without bias.
    watched = days or last * (len(faults) + 1) / len(faults)
    return Trace(tuple(sorted(faults)), max(nodes or 0, len(numbers)), watched)


OTHERS = "others"
NAMED = 6
# Names come free when the next attempt is launched, well within this time.
WINDOW_S = 60.0
# Losses within this time may be one incident: the time of detection and of stopping the ranks.
TOGETHER_S = 15.0


def names_needed(faults: Sequence[TraceFault]) -> int:
    """Return how many placed nodes need names: the most that a plan hits within a minute, and some for later
    ones. If several are hit at once, there are enough names that their share reaches the limit for a fault of
    the fabric only if it would with a name for every node."""
    together = _most_within(faults, TOGETHER_S)
    wide = math.ceil(together / MANY_LOST_FRACTION) if together > MANY_LOST else 0
    return max(NAMED + _most_within(faults, WINDOW_S), wide)


def _most_within(faults: Sequence[TraceFault], window_s: float) -> int:
    most = hit = first = 0
    for fault in faults:
        hit += len(fault.nodes)
        while fault.t - faults[first].t > window_s:
            hit -= len(faults[first].nodes)
            first += 1
        most = max(most, hit)
    return most


class Names:
    """The names of nodes. Numbers 0 .. active - 1 are placed first; the rest are the spares."""

    def __init__(self, active: int, spares: int, allocation: int, named: int) -> None:
        own = active if active <= named else named
        self.others = active - own  # nodes that `OTHERS` stands for
        numbers = [*range(own), *range(active, active + spares)]
        self._names = {number: f"n{number}" + f".{allocation}" * bool(allocation) for number in numbers}
        # The names lent longest ago come first, because decisions look back at the last incidents' nodes.
        self._lendable = [self._names[number] for number in range(own)]
        self._placed = tuple(self._lendable)

    def all(self) -> tuple[str, ...]:
        return ((OTHERS,) if self.others else ()) + tuple(self._names.values())

    @property
    def active(self) -> int:
        """The number of places, as the state machine counts them."""
        return len(self._lendable) + bool(self.others)

    def of(self, number: int, healthy_placed: Collection[str]) -> str | None:
        """Return the name of a node, which may take over the name of one in `healthy_placed`. None: no name
        is left, because as many nodes as have names are out at the same time."""
        name = self._names.get(number)
        if name is None:
            name = next((n for n in self._lendable if n in healthy_placed), None)
            if name is None:
                return None
            lender = next(other for other, its in self._names.items() if its == name)
            del self._names[lender]
            self._names[number] = name
        if name in self._lendable:
            self._lendable.remove(name)
            self._lendable.append(name)
        return name

    def number_of(self, name: str) -> int | None:
        """Return the number of the node with this name; None if it stands for several."""
        return next((number for number, its in self._names.items() if its == name), None)

    def placed(self, placement: Sequence[str]) -> list[tuple[int, int]]:
        """Note the nodes of the newest attempt, whose names may be lent. Returns, for each new node, the pair
        (number of the node that left the placement, number of the node in its place)."""
        numbers = {name: number for number, name in self._names.items()}
        gone = [numbers[name] for name in self._placed if name not in placement and name in numbers]
        new = [numbers[name] for name in placement if name not in self._placed and name in numbers]
        self._placed = tuple(placement)
        kept = [name for name in self._lendable if name in placement]
        self._lendable = kept + [name for name in placement if name != OTHERS and name not in kept]
        return list(zip(gone, new, strict=False))
