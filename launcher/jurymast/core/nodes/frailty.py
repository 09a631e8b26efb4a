"""Nodes that are expected to fail more often than others, before they do.

Two things make one: it failed often for its time in service (a lemon), or it failed and is only just back.
When there is a choice they become the spares. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jurymast.core.nodes.history import NodeRecord, PastRun, first_days
from jurymast.core.planning.failure_rate import AFTER_REPAIR, Watched, node_rate

# Below that a difference may be chance, and is not worth another order than the one that Slurm has nodes in.
MATTERS = 2.0


@dataclass(frozen=True, kw_only=True)
class Frail:
    """`node` fails `factor` times as often as the fleet's nodes on average, and `AFTER_REPAIR` times that
    until `fresh_until`; None: for a day from when it serves again. `why`: the evidence."""

    node: str
    factor: float = 1.0
    fresh_until: float | None = 0.0
    why: str = ""

    def times(self, now: float) -> float:
        """How many times as often as others it is expected to fail at `now`; 1.0 when that hardly differs."""
        fresh = self.fresh_until is None or now < self.fresh_until
        times = self.factor * (AFTER_REPAIR if fresh else 1.0)
        return times if times >= MATTERS else 1.0


def frail_nodes(records: Iterable[NodeRecord], fleet: float, now: float) -> list[Frail]:
    """Those whom earlier runs expect to fail more often; `fleet`: failures per 1,000 node-days of all."""
    found = [
        Frail(
            node=record.name, fresh_until=record.fresh_until, why=record.why_frail(now),
            factor=round(node_rate(fleet, record.failures, record.exposure_days) / fleet, 3),
        )
        for record in records
    ]  # fmt: skip
    return sorted((frail for frail in found if frail.times(now) > 1.0), key=lambda frail: frail.node)


def more_exposure(runs: Sequence[PastRun], back: Mapping[str, Sequence[float]]) -> list[Watched]:
    """What placed nodes' days after repairs count beyond other days, so that failures on them do not raise
    the rate that is expected of all. `back`: when nodes that had failed served again."""
    return [
        Watched(start, end, AFTER_REPAIR - 1.0)
        for run in runs
        for span in run.spans
        for node in sorted(back.keys() & (set(span.nodes) - set(span.spares)))
        for start, end in first_days(span, back[node])
    ]
