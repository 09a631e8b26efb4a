"""What people are told of reservations that begin on nodes of a run."""

from __future__ import annotations

from jurymast.core.state.events import ReservationAhead
from jurymast.core.state.run import RunState
from jurymast.core.state.texts import reservation, some
from jurymast.report.text import begins


def foretold(state: RunState, one: ReservationAhead, now: float) -> str:
    """What is about to happen to nodes of the run that others have reserved."""
    what = reservation(one.name, maintenance=one.maintenance)
    ranks = [name for name in one.nodes if name in state.places]
    free = [n for n in state.spare_nodes() if n.name not in {*one.nodes, *state.placement} and not n.going]
    told = begins(what, one.nodes, one.starts_at, now)
    if not ranks:
        return f"{told}: no rank is there"
    if now >= one.starts_at:
        return f"{told}: ranks are on {some(ranks)} until something is taken, or another node is ready"
    if len(free) >= len(ranks) and state.settings.bad_nodes != "report" and not state.alone:
        return f"{told}: the ranks move to {some([node.name for node in free[: len(ranks)]])} before"
    return f"{told}: what is done is written to shared storage before"
