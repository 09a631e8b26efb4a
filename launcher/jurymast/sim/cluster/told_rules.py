"""What must hold of what people are told of a run in a simulated cluster, and of who supervises it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, COMMON, OWN, StateId

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

NOT_REPLACED = "57: a supervisor that shows that it lives is not replaced"
STAYS_TOLD = "58: what the history tells of a failure stays there"
NOTE_SAYS = "59: a note says something"
SAVED_IS_TOLD = "60: the newest step that is saved is that which people are told"
JOINS = "76: a supervisor hears all agents that can reach it"
NOT_AGAIN = "61: no node copies again what it has told that it has"

# A pulse that was there for so long, in seconds, is seen by everybody who can read it.
LIVES_S = 5.0
# From the time when both can see each other and the run directory, in seconds.
JOINED_BY_S = 12.0


class ToldRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._cluster = oracle, oracle.cluster
        self._by: SimSupervisor | None = None  # who has told of these incidents
        self._incidents: set[int] = set()
        self._unheard_since: dict[str, float] = {}

    def takes_over(self, agent: SimAgent) -> None:
        """An agent starts the next supervisor. One that has just stood still knows no better."""
        world, disk = self._cluster.world, self._cluster.disk
        steady = agent.process.until < world.now - LIVES_S
        if steady and disk.pulses_since < world.now - LIVES_S and disk.is_pulsing:
            how = f"the supervisor's pulse has been there since {disk.pulses_since:.1f} s"
            self._oracle.fail(NOT_REPLACED, f"{agent.site.name} takes over, and {how}")

    def recorded(self, supervisor: SimSupervisor, event: ev.Event) -> None:
        state = supervisor.state
        if isinstance(event, ev.Noted) and not event.message:
            self._oracle.fail(NOTE_SAYS, f"epoch {supervisor.epoch} notes nothing")
        if isinstance(event, ev.Saved) and event.ok and (state.saved_step or 0) < event.step:
            self._oracle.fail(SAVED_IS_TOLD, f"step {event.step} is saved, and {state.saved_step} is told")
        if supervisor is not self._by:  # what the one before it told last may not have been written
            self._by, self._incidents = supervisor, set()
        there = {one.id for one in state.incidents if one.decided_at is not None}
        if gone := self._incidents - there:
            self._oracle.fail(STAYS_TOLD, f"incidents {sorted(gone)} are not among {sorted(there)}")
        self._incidents = there

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        """`since`: when this supervisor began."""
        oracle, now, node = self._oracle, self._cluster.world.now, supervisor.site.name
        if supervisor.machine.departure.begun or not oracle.storage_fine(JOINED_BY_S):
            self._unheard_since.clear()
            return
        steady = oracle.untouched(node, JOINED_BY_S) and self._cluster.stalled_until < now - JOINED_BY_S
        for site in self._cluster.sites.values():
            can = (
                steady and site.agent is not None and oracle.untouched(site.name, JOINED_BY_S, seen_from=node)
            )
            if not can or supervisor.connected(site.name):
                self._unheard_since.pop(site.name, None)
            elif now > max(since, self._unheard_since.setdefault(site.name, now)) + JOINED_BY_S:
                oracle.fail(JOINS, f"{site.name} is unheard since {self._unheard_since[site.name]:.1f} s")

    def copies(self, supervisor: SimSupervisor, node: str, order: msg.Replicate) -> None:
        """This node is ordered to copy a rank's image, or the part of it that is the rank's own."""
        copies, key = supervisor.machine.checkpoints.copies, StateId(order.step, order.attempt)
        parts = (COMMON, OWN) if order.part == ALL else (order.part,)
        if all(node in copies.nodes_with(key, order.rank, part) for part in parts):
            self._oracle.fail(NOT_AGAIN, f"{node} is to copy the {order.part} part of {order.rank} of {key}")
