"""What must hold for nodes that are to leave, and for ranks that move, although nothing failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision.foreseen_ends import SAVE_LIMIT_S
from jurymast.core.supervision.withdrawals import LOOK_MOST_S

if TYPE_CHECKING:
    from jurymast.core.supervision.ahead import Reservation
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor
    from jurymast.sim.cluster.training import SimGroup

MOVES_OFF = "44: ranks leave a node that is drained once a spare is ready"
REMOVED = "54: a node that a user wants removed leaves, whichever supervisor heard of it"
LEAVES_AHEAD = "63: ranks leave a node before a reservation begins on it, once a spare is ready"
SAVED_AHEAD = "64: what ranks have done on nodes is on storage when a reservation begins on them"
NOT_AGAIN = "53: ranks that move although nothing failed do no step again"

# Why ranks move although nothing failed, in plans of nothing else.
MOVES = frozenset({"drained", "admin drains", "slow node", "uneven", "reserved"})

# From the time when Slurm shows it and a spare is ready, if nothing else happens, in seconds.
MOVED_BY_S = LOOK_MOST_S + SAVE_LIMIT_S + 20.0
# A reservation that begins later after it was made is seen, and a checkpoint before it written, in time. What
# ranks do meanwhile is on storage when the next write ends.
SEEN_S, WRITTEN_S = LOOK_MOST_S + 30.0, 12.0
# From the request.
REMOVED_BY_S = SAVE_LIMIT_S + 20.0


class WithdrawalRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._could_since: dict[str, float] = {}  # by rule
        self._steady_since: float | None = None
        self._wanted_since: float | None = None
        self._to_leave: dict[str, int] = {}  # by user's request: in which life of the job
        self.skipped: set[int] = set()  # attempts in which memory had no room for a save

    def accepted(self, node: str) -> None:
        """A user was told that the node is to be removed. The job's next life may have it again."""
        self._to_leave[node] = self._oracle.cluster.restarts

    def restored(self, group: SimGroup, step: int, done: int) -> None:
        """The group goes on from `step`; ranks had done `done` steps."""
        wanted = self._oracle.cluster.wanted
        if self.skipped & {group.attempt - 1, group.attempt - 2}:
            return
        if step < done and {fault.kind for fault in wanted.faults} <= MOVES and not wanted.tasks:
            self._oracle.fail(NOT_AGAIN, f"attempt {group.attempt} restores step {step} of {done}")

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        state, cluster = supervisor.state, self._oracle.cluster
        steady = state.phase is Phase.RUNNING and state.incident is None and state.end_order is None
        self._look_at_requests(supervisor, since, steady)
        asked = steady and not cluster.wanted.tasks and cluster.world.now >= cluster.slurm_silent_until
        self._steady_since = (self._steady_since or cluster.world.now) if asked else None
        reserved = {name for one in cluster.reserved.values() for name in one.nodes}
        for rule, going in ((MOVES_OFF, {*cluster.draining}), (LEAVES_AHEAD, reserved)):
            self._look_at_moves(supervisor, since, rule, going, {*cluster.draining, *reserved}, asked)

    def _look_at_moves(
        self, supervisor: SimSupervisor, since: float, rule: str, going: set[str], unfit: set[str],
        asked: bool,
    ) -> None:  # fmt: skip
        state, now = supervisor.state, self._oracle.cluster.world.now
        stays = [name for name in state.placement if name in going]
        spare = any(one.role is Role.SPARE and one.name not in unfit for one in state.spare_nodes())
        if not (stays and spare and asked):
            self._could_since.pop(rule, None)
            return
        since = max(since, self._could_since.setdefault(rule, now))
        if now > since + MOVED_BY_S and self._oracle.storage_fine(MOVED_BY_S):
            self._oracle.fail(rule, f"{stays} since {self._could_since[rule]:.1f} s")

    def begins(self, supervisor: SimSupervisor, one: Reservation, known_s: float, since: float) -> None:
        """A reservation begins that Slurm has shown for `known_s`. `since`: when this supervisor began."""
        oracle, now = self._oracle, self._oracle.cluster.world.now
        stays = [name for name in supervisor.state.placement if name in one.nodes]
        calm_s = now - max(since, self._steady_since or now, oracle.touched_until)
        if not stays or min(known_s, calm_s) < SEEN_S or not (oracle.trains and oracle.storage_fine(SEEN_S)):
            return
        _, unwritten_s = oracle.unsaved_s()
        if unwritten_s > WRITTEN_S + 2 * oracle.cluster.wanted.copy_s:
            oracle.fail(SAVED_AHEAD, f"{unwritten_s:.1f} s of steps are not, with ranks on {stays}")

    def _look_at_requests(self, supervisor: SimSupervisor, since: float, steady: bool) -> None:
        now, restarts = self._oracle.cluster.world.now, self._oracle.cluster.restarts
        stays = (name for name in supervisor.state.placement if self._to_leave.get(name) == restarts)
        wanted = list(dict.fromkeys([*supervisor.state.to_remove, *stays]))
        if not (wanted and steady):
            self._wanted_since = None
        elif self._wanted_since is None:
            self._wanted_since = now
        elif now > max(self._wanted_since, since) + REMOVED_BY_S and self._oracle.storage_fine(REMOVED_BY_S):
            self._oracle.fail(REMOVED, f"{', '.join(wanted)} since {self._wanted_since:.1f} s")
