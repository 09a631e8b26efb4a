"""What must hold for runs that go on with fewer nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Instruction, Launch
from jurymast.core.state.images import ALL, MEMORY, OWN, StateId
from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision.growing import RETRY_S

if TYPE_CHECKING:
    from jurymast.keeper.copies import StoredCopy
    from jurymast.sim.cluster.keeper import SimKeeper
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

NEVER_BELOW = "51: no attempt has fewer nodes than the policy allows"
SPARES_FIRST = "49: no node is done without while a spare is ready"
GROWS = "50: a run takes in nodes that it lacks"
FROM_MEMORY = "69: another number of ranks waits for no storage where memory has what it restores"
SHOWN_WHOLE = "70: another number of ranks reads every rank's image of one state, and none that is corrupt"

# Enough for all images, and for what ranks save next: of so many images of others.
ROOM = 8
# A fault so long ago, in seconds, no longer affects what nodes send each other.
CALM_S = 5.0
# From a launch on, in seconds.
COLLECTED_BY_S = 4.0
# From the time when a node is ready, if nothing else happens, in seconds.
GROWN_BY_S = RETRY_S + 30.0


class SizeRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._nodes = 0  # of the newest attempt
        self._could_since: float | None = None
        self._worlds: dict[int, int] = {}  # the ranks of each attempt
        self._launched_at = 0.0
        self._collects: StateId | None = None  # what the newest attempt needs no storage for

    def recorded(
        self, supervisor: SimSupervisor, event: ev.Event, decided: Sequence[Instruction], since: float
    ) -> None:
        """The supervisor supervises `since` then."""
        for one in decided:
            if isinstance(one, Launch):
                self._launched(supervisor, len(one.placement))
                self._in_memory(supervisor, one, since)
        if isinstance(event, ev.RestorePlanned):
            self._planned(supervisor, event)

    def _in_memory(self, supervisor: SimSupervisor, launch: Launch, since: float) -> None:
        """Note whether memory has all that another number of ranks will restore."""
        oracle, cluster = self._oracle, self._oracle.cluster
        self._worlds[launch.attempt] = len(launch.placement) * cluster.ranks_per_node
        best = oracle.best(supervisor.site.name, supervisor.state.failed_to_restore())
        self._launched_at, self._collects = cluster.world.now, None
        if best is None or best in cluster.disk.shared or cluster.world.now < since + CALM_S:
            return
        changes = self._worlds.get(best.attempt) != self._worlds[launch.attempt]
        if changes and cluster.wanted.room >= ROOM and self._are_fine(supervisor):
            self._collects = best

    def _are_fine(self, supervisor: SimSupervisor) -> bool:
        """Whether the nodes that the run goes on with have been fine for a while."""
        oracle, node = self._oracle, supervisor.site.name
        nodes = all(oracle.untouched(one, CALM_S, seen_from=node) for one in supervisor.state.placement)
        return nodes and oracle.storage_fine(CALM_S) and not oracle.cluster.network.any_cut

    def _planned(self, supervisor: SimSupervisor, event: ev.RestorePlanned) -> None:
        late = self._oracle.cluster.world.now > self._launched_at + COLLECTED_BY_S
        if self._collects and event.tier != MEMORY and late and self._are_fine(supervisor):
            how = f"attempt {event.attempt} restores {event.step} from storage, not {self._collects}"
            self._oracle.fail(FROM_MEMORY, how)

    def shows(
        self, keeper: SimKeeper, shown: Collection[StoredCopy], corrupt: Collection[StoredCopy]
    ) -> None:
        """A node's ranks may read these copies, of which some were `corrupt` when that was begun."""
        node, first = keeper.agent.site.name, next(iter(shown))
        own = {copy.image.rank for copy in shown if copy.part in (ALL, OWN)}
        states = {copy.image.state for copy in shown}
        if own != set(range(first.manifest.world)) or all(copy.part == OWN for copy in shown):
            self._oracle.fail(SHOWN_WHOLE, f"{node} has ranks {own} of {first.manifest.world}")
        if len(states) > 1 or not {*corrupt}.isdisjoint(shown):
            self._oracle.fail(SHOWN_WHOLE, f"{node} has {states}; corrupt: {len({*corrupt} & {*shown})}")

    def _launched(self, supervisor: SimSupervisor, nodes: int) -> None:
        wanted, before = self._oracle.cluster.wanted, self._nodes
        self._nodes = nodes
        least = wanted.least or wanted.active
        if not least <= nodes <= wanted.active:
            self._oracle.fail(NEVER_BELOW, f"attempt {supervisor.state.attempt} has {nodes} nodes")
        left = [one.name for one in supervisor.state.spare_nodes() if one.role is Role.SPARE]
        if left and nodes < before:
            self._oracle.fail(
                SPARES_FIRST, f"attempt {supervisor.state.attempt} has {nodes} nodes, {left} are ready"
            )

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        oracle, state = self._oracle, supervisor.state
        now = oracle.cluster.world.now
        lacks = 0 < len(state.placement) < state.active and not state.alone
        steady = state.phase is Phase.RUNNING and state.incident is None and state.end_order is None
        ready = any(one.role is Role.SPARE and not one.marked for one in state.spare_nodes())
        if not (lacks and steady and ready and oracle.trains and oracle.storage_fine(GROWN_BY_S)):
            self._could_since = None
        elif self._could_since is None:
            self._could_since = now
        elif now > max(self._could_since, since, oracle.unwritable_until) + GROWN_BY_S:
            oracle.fail(GROWS, f"{len(state.placement)} of {state.active} since {self._could_since:.1f} s")
