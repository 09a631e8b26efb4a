"""What must hold for nodes that are to leave, and for ranks that move, although nothing failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision.machine import SAVE_LIMIT_S
from jurymast.core.supervision.withdrawals import LOOK_EVERY_S

if TYPE_CHECKING:
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor
    from jurymast.sim.cluster.training import SimGroup

MOVES_OFF = "44: ranks leave a node that is drained once a spare is ready"
REMOVED = "54: a node that a user wants removed leaves, whichever supervisor heard of it"
NOT_AGAIN = "53: ranks that move although nothing failed do no step again"

# Why ranks move although nothing failed, in plans of nothing else.
MOVES = frozenset({"drained", "admin drains", "slow node", "uneven"})

# From the time when Slurm shows it and a spare is ready, if nothing else happens, in seconds.
MOVED_BY_S = LOOK_EVERY_S + SAVE_LIMIT_S + 20.0
# From the request.
REMOVED_BY_S = SAVE_LIMIT_S + 20.0


class WithdrawalRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._could_since: float | None = None
        self._wanted_since: float | None = None
        self.skipped: set[int] = set()  # attempts in which memory had no room for a save

    def restored(self, group: SimGroup, step: int, done: int) -> None:
        """The group goes on from `step`; ranks had done `done` steps."""
        wanted = self._oracle.cluster.wanted
        if self.skipped & {group.attempt - 1, group.attempt - 2}:
            return
        if step < done and {fault.kind for fault in wanted.faults} <= MOVES and not wanted.tasks:
            self._oracle.fail(NOT_AGAIN, f"attempt {group.attempt} restores step {step} of {done}")

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        state, cluster = supervisor.state, self._oracle.cluster
        now, draining = cluster.world.now, cluster.draining
        stays = [name for name in state.placement if name in draining]
        spare = any(one.role is Role.SPARE and one.name not in draining for one in state.spare_nodes())
        steady = state.phase is Phase.RUNNING and state.incident is None and state.end_order is None
        self._look_at_requests(supervisor, since, steady)
        if not (stays and spare and steady) or cluster.wanted.tasks or now < cluster.slurm_silent_until:
            self._could_since = None
        elif self._could_since is None:
            self._could_since = now
        elif now > max(self._could_since, since) + MOVED_BY_S and self._oracle.storage_fine(MOVED_BY_S):
            self._oracle.fail(MOVES_OFF, f"{stays} since {self._could_since:.1f} s")

    def _look_at_requests(self, supervisor: SimSupervisor, since: float, steady: bool) -> None:
        now, wanted = self._oracle.cluster.world.now, supervisor.state.to_remove
        if not (wanted and steady):
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        elif now > max(self._wanted_since, since) + REMOVED_BY_S and self._oracle.storage_fine(REMOVED_BY_S):
            self._oracle.fail(REMOVED, f"{', '.join(wanted)} since {self._wanted_since:.1f} s")
