"""Tests of nodes before they are used: for how long, in which pairs, and what the results mean.

Each node is tested alone first, then in pairs: neighbors first, and in the next round the fastest with the
slowest, so that a node that was paired with a culprit gets another partner. A node that is slow or fails with
every partner is the culprit. (The two rounds and the factor two are those of DLRover's node check.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from jurymast.core.state.evidence import MATTERS, NodeTimes
from jurymast.core.state.findings import Verdict
from jurymast.core.state.settings import Settings

# Seconds that `auto` allows nodes with GPUs. NCCL's first connections take seconds, torch's import on a busy
# shared file system far longer.
AUTO_LIMIT_S = 60.0
# A multiple of the median from which a node is slow.
SLOW = 2.0
ROUNDS_MAX = 3
# Seconds below which a difference is noise: no training waits for it, and on busy CPUs it is chance. Named by
# the library that connects the nodes; within one node the measure's name begins with `LOCAL`.
FLOORS_S = {"gloo latency": 0.005, "gloo transfer": 0.01, "nccl latency": 0.0002, "nccl transfer": 0.001}
LOCAL = "local "


def limit_s(settings: Settings, gpus: int) -> float:
    """Return the seconds that tests of a node with this many GPUs may take; 0.0: it is not tested."""
    if settings.preflight_s is None:
        return AUTO_LIMIT_S if gpus > 0 else 0.0
    return settings.preflight_s


def slowest(answers: Iterable[NodeTimes]) -> NodeTimes:
    """Combine the results of a node's devices: the slowest's times, all that was wrong, the first error."""
    times: dict[str, float] = {}
    answers = list(answers)
    for answer in answers:
        for measure, seconds in answer.times.items():
            times[measure] = max(seconds, times.get(measure, 0.0))
    wrong = "; ".join(answer.wrong for answer in answers if answer.wrong)
    return NodeTimes(times, wrong, next((answer.error for answer in answers if answer.error), ""))


@dataclass(frozen=True)
class Pairing:
    """The test of two nodes with each other: seconds by measure, none if it failed. `errors`: what went
    wrong, by the node that it may be the fault of. With neither, it shows nothing of its nodes."""

    nodes: tuple[str, str]
    times: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)

    def partner(self, name: str) -> str:
        return self.nodes[1] if self.nodes[0] == name else self.nodes[0]


@dataclass(frozen=True)
class Judgement:
    """`slowness`: the node's worst measure over the median of all; 1.0 if there is nothing to compare."""

    node: str
    verdict: Verdict
    message: str
    slowness: float = 1.0
    partner: str = ""


def next_round(nodes: Sequence[str], played: Sequence[Pairing]) -> list[tuple[str, str]]:
    """Return who is tested with whom next; [] if that would show nothing new.

    The first round pairs neighbors, and leaves out the last of an odd number; the second pairs the fastest
    with the slowest; with an odd number, a third pairs the two nodes that were left out once.
    """
    games = _by_node(played)
    if not played:
        return list(zip(nodes[::2], nodes[1::2], strict=False))

    def pace(name: str) -> tuple[bool, float]:
        own = games.get(name, [])
        return not own, min((sum(game.times.values()) for game in own if game.times), default=float("inf"))

    due = sorted((name for name in nodes if len(games.get(name, ())) < 2), key=pace)
    half = len(due) // 2
    pairs = list(zip(due[:half], reversed(due[-half:]), strict=True)) if half else []
    met = {frozenset(game.nodes) for game in played}
    if pairs and frozenset(pairs[-1]) in met:  # the middle two are neighbours of the first round
        if len(pairs) == 1:
            return []
        (a, b), (c, d) = pairs[-2:]
        pairs[-2:] = [(a, d), (c, b)]
    return pairs


def judge(nodes: Sequence[str], alone: Mapping[str, NodeTimes], played: Sequence[Pairing]) -> list[Judgement]:
    """Return the verdict on each node. `alone` has no entry for a node that did not answer in time.

    If most nodes fail in the same way, the tests are at fault and no node is blamed.
    """
    wrong = _if_few({name: found.wrong for name, found in alone.items() if found.wrong}, len(alone))
    errors = {name: found.error for name, found in alone.items() if found.error}
    games = _by_node(played)
    errors.update({name: why for name, own in games.items() if (why := _failed(name, own))})
    failed = _if_few(errors, len(alone))
    slow = _slowness(nodes, alone, played)
    partners = {name: game.partner(name) for game in played for name in game.nodes}
    found = []
    for name in nodes:
        partner = partners.get(name, "")
        slowness, worst = slow.get(name, (1.0, ""))
        if name not in alone:
            found.append(Judgement(name, Verdict.UNKNOWN, "not tested in time"))
        elif name in wrong:
            found.append(Judgement(name, Verdict.BAD, wrong[name], slowness, partner))
        elif name in failed:
            found.append(Judgement(name, Verdict.SUSPECT, failed[name], slowness, partner))
        elif alone[name].wrong or name in errors:
            why = f"most nodes failed this way, so none is blamed: {alone[name].wrong or errors[name]}"
            found.append(Judgement(name, Verdict.UNKNOWN, why, slowness, partner))
        elif name in games and not any(game.times or name in game.errors for game in games[name]):
            why = "passed alone; with others there was too little time, or no answer from them"
            found.append(Judgement(name, Verdict.UNKNOWN, why, slowness, partner))
        elif slowness > SLOW:
            found.append(Judgement(name, Verdict.SUSPECT, worst, slowness, partner))
        else:
            message = worst if slowness > MATTERS else "as fast as the others" if worst else "passed"
            found.append(Judgement(name, Verdict.OK, message, slowness, partner))
    return found


def _if_few(blamed: dict[str, str], tested: int) -> dict[str, str]:
    return blamed if len(blamed) == 1 or 2 * len(blamed) < tested else {}


def _by_node(played: Sequence[Pairing]) -> dict[str, list[Pairing]]:
    games: dict[str, list[Pairing]] = {}
    for game in played:
        for name in game.nodes:
            games.setdefault(name, []).append(game)
    return games


def _failed(name: str, games: Sequence[Pairing]) -> str:
    """The reason, if this node failed with two partners."""
    failed = [game for game in games if name in game.errors]
    if len(failed) < 2 or any(game.times for game in games):
        return ""
    partners = ", ".join(game.partner(name) for game in failed)
    return f"failed in pairs with {partners}: {failed[-1].errors[name]}"


def _slowness(
    nodes: Sequence[str], alone: Mapping[str, NodeTimes], played: Sequence[Pairing]
) -> dict[str, tuple[float, str]]:
    """Return, for each node with times, its worst measure over the median of all nodes', and that in words.

    In pairs, a node counts as fast as with its best partner. A pair that cannot be compared counts for
    nothing.
    """
    times = {name: dict(alone[name].times) for name in nodes if name in alone}
    for game in played:
        for name in game.nodes:
            own = times.setdefault(name, {})
            for measure, seconds in game.times.items():
                own[measure] = min(seconds, own.get(measure, seconds))
    slowness: dict[str, tuple[float, str]] = {}
    for measure in sorted({measure for own in times.values() for measure in own}):
        floor = FLOORS_S.get(measure.removeprefix(LOCAL), 1e-9)
        seen = {name: own[measure] for name, own in times.items() if measure in own}
        typical = median_low(list(seen.values()))
        for name, seconds in seen.items():
            ratio = max(floor, seconds) / max(floor, typical)
            if ratio > slowness.get(name, (0.0, ""))[0]:
                told = f"{measure} {_told(seconds)}, the median of {len(seen)} nodes is {_told(typical)}"
                slowness[name] = ratio, told
    return {name: (max(1.0, round(ratio, 2)), told) for name, (ratio, told) in slowness.items()}


def _told(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
