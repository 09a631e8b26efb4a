"""Who has not entered a collective that others are in: from the records of torch's flight recorders.

Each process group numbers its collectives, and all its members enter them in order. So the member whose
newest number is lower than another's is missing there. It may be so because it waits in another group; then
the rank to look at is one that is missing and waits nowhere. Point-to-point transfers are left out: who is
the other side is not in the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A rank is in as many groups as its parallelism has dimensions, and a few more.
GROUPS_MAX = 32
NAME_MAX = 80


@dataclass(frozen=True)
class Entered:
    """How far `rank` is in `group`: the number of the newest collective that it entered (0: none), what that
    was, and whether it still waits there."""

    rank: int
    group: str
    number: int
    collective: str
    waits: bool

    def to_json(self) -> list[Any]:
        return [self.rank, self.group, self.number, self.collective, self.waits]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> Entered:
        """Raises ValueError or TypeError for anything else than `to_json` gave."""
        rank, group, number, collective, waits = values
        return cls(int(rank), str(group), int(number), str(collective), bool(waits))


def entered(rank: int, record: Mapping[str, Any]) -> list[Entered]:
    """What torch's record of one rank comes to (version 2 of its format: torch 2.4 and later). Raises
    KeyError, TypeError, ValueError or AttributeError for what is no such record."""
    newest: dict[str, Mapping[str, Any]] = {}
    for entry in record["entries"]:
        if not entry.get("is_p2p"):
            group = str(entry["process_group"][0])
            if group not in newest or entry["collective_seq_id"] >= newest[group]["collective_seq_id"]:
                newest[group] = entry
    found = [
        Entered(
            rank, group, int(entry["collective_seq_id"]),
            str(entry["profiling_name"]).rpartition(":")[2][:NAME_MAX],
            not entry.get("retired") and entry.get("state") != "completed",
        )
        for group, entry in newest.items()
    ]  # fmt: skip
    never = [group for group in record.get("pg_config", {}) if group and group not in newest]
    found += [Entered(rank, group, 0, "", False) for group in never]
    return found[:GROUPS_MAX]


@dataclass(frozen=True)
class Missing:
    """`ranks` never entered this collective, in which `waiting` are."""

    collective: str
    number: int
    group: str
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]


def missing(seen: Iterable[Entered]) -> Missing | None:
    """The collective that the run hangs in, or None when the records do not tell. Ranks without a record are
    not judged."""
    known = list(seen)
    stuck = {one.rank for one in known if one.waits}
    groups: dict[str, list[Entered]] = {}
    for one in known:
        groups.setdefault(one.group, []).append(one)
    found = [each for name, ones in groups.items() if (each := _of_group(name, ones)) is not None]
    # Who waits somewhere itself is held up; the root is where the missing ones wait nowhere.
    return min(found, key=lambda each: len(stuck & set(each.ranks)) / len(each.ranks), default=None)


def _of_group(name: str, ones: Sequence[Entered]) -> Missing | None:
    furthest = max(ones, key=lambda one: one.number)
    waiting = tuple(sorted({one.rank for one in ones if one.number == furthest.number and one.waits}))
    late = tuple(sorted({one.rank for one in ones if one.number < furthest.number}))
    if not waiting or not late:
        return None
    return Missing(furthest.collective, furthest.number, name, late, waiting)
