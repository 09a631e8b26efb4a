"""Reservations that begin while the run has nodes in them, maintenance above all.

Slurm lets a running job go on into such a reservation (IGNORE_JOBS); then an administrator drains its nodes,
powers them off or cancels the job. So ranks leave those nodes in time, as far as there are spares outside
(`Withdrawals`), and otherwise what they have done is on shared storage when it begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Effect, LookAtReservations, Record
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.core.supervision.limit import LEAST_S, MOVED_S, RENEW_S, WRITES, TimeLimit

LOOK_EVERY_S = 30.0
# Ranks begin to leave so long before the last checkpoint has to be begun, so that a move that fails can be
# tried again; and as long before that as a node may take that is to come for it.
LEAVE_S = 300.0
# A beginning that Slurm moves by less is no news.
NEWS_S = 5.0


@dataclass(frozen=True)
class Reservation:
    """What Slurm says of one that the run's job may not use: its `nodes` among those that were asked for."""

    name: str
    nodes: tuple[str, ...]
    starts_at: float  # Unix time
    maintenance: bool = False


class Ahead:
    """`now` is the supervisor's clock. `save_s`: ranks save in this time, and a write to shared storage takes
    `write_s`."""

    def __init__(self, state: RunState, limit: TimeLimit) -> None:
        self._state, self._limit = state, limit
        self._look_at = 0.0
        self._looking = False
        self._saved_for: dict[str, float] = {}  # reservations: the beginning before which the last save is

    def on_time(self, write_s: float, save_s: float, now: float) -> list[Effect]:
        """Look at Slurm's reservations now and then, and say which are near by now."""
        state, out = self._state, list[Effect]()
        if state.phase is not Phase.RUNNING:
            return out
        for one in state.reservations.values():
            if not one.near and now >= one.starts_at - self._leave_s(write_s, save_s):
                out.append(Record(structs.replace(one, t=now, near=True)))
        if not self._looking and now >= self._look_at:
            self._look_at, self._looking = now + LOOK_EVERY_S, True
            out.append(LookAtReservations(tuple(state.nodes)))
        return out

    def _leave_s(self, write_s: float, save_s: float) -> float:
        hold_s = self._state.settings.hold_s if self._state.may_refill else 0.0
        return _last_s(write_s, save_s) + LEAVE_S + hold_s

    def on_reservations_seen(self, found: Sequence[Reservation] | None, now: float) -> list[Effect]:
        """Take in Slurm's reservations; None: it did not say."""
        self._looking = False
        if found is None:
            return []
        known, out = self._state.reservations, list[Effect]()
        here = {one.name: one for one in map(self._of_us, found) if one is not None}
        for name, one in here.items():
            before = known.get(name)
            moved = before is None or abs(one.starts_at - before.starts_at) > NEWS_S
            if before is None or moved or before.nodes != one.nodes:
                near = before is not None and before.near and not moved
                out.append(Record(_event(one, now, near=near)))
        for name in [name for name in known if name not in here]:
            out.append(Record(structs.replace(known[name], t=now, nodes=(), near=False)))
        return out

    def _of_us(self, one: Reservation) -> Reservation | None:
        """The same with those of its nodes that the run still has; None if it begins on none of them while
        the run has them. What began before, Slurm has let this job into."""
        state = self._state
        if not state.allocated_at < one.starts_at < self._limit.ends_at:
            return None
        wanted = frozenset(one.nodes)
        nodes = tuple(
            name
            for name, node in state.nodes.items()
            if name in wanted and (node.role is not Role.FAILED or node.may_return)
        )
        return Reservation(one.name, nodes, one.starts_at, one.maintenance) if nodes else None

    # ---- what does not leave in time

    def begin_last(self, write_s: float, save_s: float, now: float) -> ev.ReservationAhead | None:
        """The reservation before which the last checkpoint is to be begun now, for ranks that have not left
        its nodes; None for none. Each is told once."""
        state = self._state
        for one in state.reservations.values():
            begun = abs(self._saved_for.get(one.name, -math.inf) - one.starts_at) <= MOVED_S
            stays = not state.places.keys().isdisjoint(one.nodes)
            if one.near and stays and not begun and now >= one.starts_at - _last_s(write_s, save_s):
                self._saved_for[one.name] = one.starts_at
                return one
        return None

    @property
    def hurried_until(self) -> float:
        """Until when the newest checkpoint is written again and again."""
        return max(self._saved_for.values(), default=-math.inf)

    def takes_all(self, write_s: float, now: float) -> ev.ReservationAhead | None:
        """The reservation of all nodes that the run has that is about to begin; None for none."""
        state = self._state
        here = {name for name, node in state.nodes.items() if node.role is not Role.FAILED or node.may_return}
        for one in state.reservations.values():
            near = one.starts_at - RENEW_S - WRITES * write_s <= now < one.starts_at
            if near and here <= {*one.nodes}:
                return one
        return None


def _last_s(write_s: float, save_s: float) -> float:
    """How long before its beginning the last checkpoint is begun: as before a time limit."""
    return max(LEAST_S, WRITES * write_s + save_s)


def _event(one: Reservation, now: float, *, near: bool) -> ev.ReservationAhead:
    return ev.ReservationAhead(
        t=now, name=one.name, nodes=one.nodes, starts_at=one.starts_at, maintenance=one.maintenance, near=near
    )
