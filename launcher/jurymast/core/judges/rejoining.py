"""From which step ranks go on after a recovery in process, and who has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from jurymast.core.state.texts import count

# What the reasons to go back say, by which a report knows those that a script can mend.
SHARDS_GONE, AMID_STEP, OWN_GONE = "has the shards of", "failed before the end of", "what is the own of"
MADE_IN_TRAIN = "`train` makes parts of the state itself"
# What is a rank's own is recorded at each step as long as that usually takes this time, in seconds, or this
# share of a step, at most.
OWN_FREE_S, OWN_SHARE = 0.0005, 0.01
# Records by which that is judged once, and how often in a row they have to be too expensive.
OWN_RECORDS, OWN_IN_A_ROW = 20, 3


class OwnCosts:
    """Judges whether it is too expensive to record what is a rank's own. A processor that others use as well
    makes single records slow, and many for a moment: neither is a reason to do without them from then on."""

    def __init__(self) -> None:
        self._costs_s: list[float] = []
        self._since: float | None = None
        self._expensive = 0  # times in a row

    def add(self, cost_s: float, now: float) -> str:
        """Return why no more is to be recorded; "" if it is. `cost_s`: processor time of one more record, in
        seconds; `now`: a clock's time when it was done, in seconds."""
        if self._since is None:  # the first one loads what others use
            self._since = now
            return ""
        self._costs_s.append(cost_s)
        if len(self._costs_s) < OWN_RECORDS:
            return ""
        usual_s, step_s = median(self._costs_s), (now - self._since) / OWN_RECORDS
        self._costs_s, self._since = [], now
        self._expensive = self._expensive + 1 if usual_s > max(OWN_FREE_S, OWN_SHARE * step_s) else 0
        return f"that takes {1000 * usual_s:.1f} ms a step" if self._expensive >= OWN_IN_A_ROW else ""


@dataclass(frozen=True)
class Rejoiner:
    """What one rank has. `live`: its model and optimizer are those after this step (-1: after none, or it is
    new); `own`: the steps of which it has what is its own; `needs_own`: it knows that ranks have such a
    thing, as a new one does not; `part`: which part of the model it has, the same on ranks that are alike;
    `kept`: the steps of which it has what is the own of the rank `ward`; `makes_state`: the function of its
    script makes parts of the state anew."""

    live: int = -1
    own: tuple[int, ...] = ()
    needs_own: bool = False
    part: str = ""
    ward: int = -1
    kept: tuple[int, ...] = ()
    makes_state: bool = False


@dataclass(frozen=True)
class GoOn:
    """All go on after `step`. Ranks in `takers` (its keys) have it, and each gives it to those that it
    names, which have the same part of the model. Of ranks in `records`, what is their own is with the rank
    named there, and nowhere else."""

    step: int
    takers: dict[int, tuple[int, ...]]
    records: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class GoBack:
    """All go back to what was saved."""

    why: str


def are_alike(told: Sequence[tuple[str, str]]) -> bool:
    """Whether ranks with the same part of the model have the same bits of it. `told`: of each rank its part,
    and a digest of the bits, "" where there is none."""
    digests: dict[str, set[str]] = {}
    for part, digest in told:
        digests.setdefault(part, set()).add(digest)
    return all(len(found) == 1 and "" not in found for found in digests.values())


def has_no_twin(parts: Sequence[str]) -> bool:
    """Whether some rank has a part of the model that no other one has. `parts` are those of all ranks."""
    return len(parts) > 1 and any(parts.count(part) == 1 for part in set(parts))


def newest_whole(ranks: Sequence[Rejoiner], saved: int) -> GoOn | GoBack:
    """Return the newest step of which ranks have each part live, and each rank what is its own; or why there
    is none, or an older one than was `saved`, to which all go back then. Ranks are given by number."""
    if any(rank.makes_state for rank in ranks):
        return GoBack(MADE_IN_TRAIN)
    steps = sorted({rank.live for rank in ranks} - {-1}, reverse=True)
    if not steps:
        return GoBack("no rank has the state after a step")
    why = ""
    for step in steps:
        if step < saved:
            return GoBack(why or f"step {saved} was saved, which is newer than the ranks' step {step}")
        if not (why_not := _missing(ranks, step)):
            return GoOn(step, _takers(ranks, step), _records(ranks, step))
        why = why or why_not
    return GoBack(why)


def _missing(ranks: Sequence[Rejoiner], step: int) -> str:
    """What of the state after `step` is on no rank; "" if all is there."""
    there = {rank.part for rank in ranks if rank.live == step}
    lost = [number for number, rank in enumerate(ranks) if rank.part not in there]
    if lost:
        return f"no rank that lives {SHARDS_GONE} {_named(lost)} after step {step}"
    if not any(rank.needs_own for rank in ranks) or not (without := _without_own(ranks, step)):
        return ""
    if not _without_own(ranks, step - 1):
        return f"{_named(without)} {AMID_STEP} step {step}, which others had done"
    return f"{OWN_GONE} {_named(without)} after step {step} is not there"


def _without_own(ranks: Sequence[Rejoiner], step: int) -> list[int]:
    """The ranks for which nobody has what is their own after `step`."""
    elsewhere = _records(ranks, step)
    return [n for n, rank in enumerate(ranks) if step not in rank.own and n not in elsewhere]


def _records(ranks: Sequence[Rejoiner], step: int) -> dict[int, int]:
    """Who has what is the own of ranks that lack it."""
    kept = {rank.ward: number for number, rank in enumerate(ranks) if step in rank.kept}
    return {number: kept[number] for number, rank in enumerate(ranks)
            if step not in rank.own and number in kept}  # fmt: skip


def _named(ranks: Sequence[int]) -> str:
    others = f" and {count(len(ranks) - 1, 'other')}" if len(ranks) > 1 else ""
    return f"rank {ranks[0]}{others}"


def _takers(ranks: Sequence[Rejoiner], step: int) -> dict[int, tuple[int, ...]]:
    takers: dict[int, tuple[int, ...]] = {}
    for part in dict.fromkeys(rank.part for rank in ranks):
        alike = [number for number, rank in enumerate(ranks) if rank.part == part]
        givers = [number for number in alike if ranks[number].live == step]
        needy = [number for number in alike if ranks[number].live != step]
        takers |= {giver: tuple(needy[place :: len(givers)]) for place, giver in enumerate(givers)}
    return takers
