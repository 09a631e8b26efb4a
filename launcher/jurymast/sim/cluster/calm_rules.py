"""What a simulated cluster owes its run while nothing is wrong in it, and what it may say was wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast.core.state.incident import AHEAD
from jurymast.core.state.run import Phase
from jurymast.sim.cluster.health import SLOW

if TYPE_CHECKING:
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.plans import Fault
    from jurymast.sim.cluster.supervisor import SimSupervisor

TRUE_CAUSE = "16: an incident has a cause that there was, on a node where it was"
STEPS = "17: ranks that are up do steps"
UP_AGAIN = "18: ranks are up soon where there are nodes for them"
LITTLE_LOST = "19: ranks that train save as often as they are to"
ON_STORAGE = "20: what ranks save gets to storage as often as it is to"

STEPS_S, UP_S, MISSED_S = 12.0, 8.0, 7.0
# After a takeover a launch was seen to wait 16 s for a node that stays away, and may have what others lack.
RETURN_S = 15.0
# Until ranks that hang are stopped, and others do steps.
HANG_S = 20.0
# At the beginning, and after a fault, it takes this long until ranks save as before.
BEGINS_S, SETTLED_S = 9.0, 12.0
# Beyond what ranks agree on at most, as if somebody asks for a save; and until one to storage begins.
SAVED_S, BEGUN_S = 2.0, 5.0

# What nobody saw end, the next supervisor is told of as a host that has died; what only some were told begins
# anew.
_UNSEEN = ("host_died",)
_OVER = "relaunch_asked", *_UNSEEN
_LINK = "node_lost", "node_crash", "fabric_fault", "hang", "communication", "restore_failed", *_OVER
_LEAVE = "worker_exit", "worker_killed", "worker_exception"
_ENDS = "preempted", "allocation_lost", "job_ended", "node_taken", "cancelled", *_LEAVE
_STORAGE = "restore_failed", "storage_failed", "worker_exception"
# By kind of fault, the causes that an incident may have. Others are the cause of none.
CAUSES: dict[str, tuple[str, ...]] = {
    "power": (*_LINK, "allocation_lost"), "agent": _LINK, "freeze": _LINK, "isolate": _LINK, "cut": _LINK,
    "snap": _LINK, "half": _LINK, "flaps": _LINK, "agent stops": _LINK, "clock": _LINK, "stall": _LINK,
    "rank": ("worker_killed",), "hang": ("hang",), "host": _UNSEEN, "raises": ("worker_exception",),
    "stopped": ("rank_frozen",), "gpu lost": ("gpu_bad", "node_lost"), "gpu doubtful": ("gpu_suspect",),
    "slow node": ("straggler",), "fails tests": ("gpu_bad", "gpu_suspect", "node_lost"),
    "breaks": (*_LEAVE, "hang", "script_fault"), "caught": (*_LEAVE, "hang"),
    "restart": ("restart_asked",), "rollback": ("rollback_asked",),
    "half told": ("restart_asked", *_OVER), "drained": ("drain_asked",), "admin drains": ("drain_asked",),
    "reserved": (AHEAD,),
    "supervisor": _OVER, "corrupt": ("restore_failed",),
    "storage hangs": ("hang", "node_lost", "allocation_lost", *_STORAGE),
    "storage hangs here": ("node_lost", *_STORAGE), "stale handles": ("node_lost", *_STORAGE),
    "old view": ("node_lost", *_STORAGE), "unmounted": _STORAGE,
    "storage full": ("allocation_lost",),  # a requeue is then not recorded
    "preempted": _ENDS, "killed": _ENDS, "cancelled": _ENDS, "timeout": _ENDS, "grace": _ENDS,
    "step ends": _LINK, "signal": _ENDS, "signal all": _ENDS, "warning": _ENDS,
}  # fmt: skip
# It names a node that was struck, unless it is the first that misses others.
_OF_A_NODE = (
    "worker_killed", "node_lost", "node_crash", "rank_frozen", "gpu_bad", "gpu_suspect", "straggler",
)  # fmt: skip
# If ranks were struck by nothing else, it names the node that was.
_EXACTLY = {"hang", "stopped", "rank", "gpu lost", "gpu doubtful", "slow node"}
_NAMED = {"hang", *_OF_A_NODE} - {"node_lost", "node_crash"}
# After one of these a write waits for long before it is tried again.
AT_STORAGE = {
    "storage hangs",
    "storage full",
    "storage slow",
    "storage hangs here",
    "stale handles",
    "unmounted",
}
# These may show on other nodes than those that they name, also on those of the next allocation.
EVERYWHERE = {"breaks", "step ends", "supervisor", "half told", "signal all", "isolate", "flaps", "stall"}


class CalmRules:
    """Looks now and then, unless the run has independent tasks, whose ends are its business."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle, self._cluster = oracle, oracle.cluster
        self._kinds: set[str] = set()  # of the faults that have struck, on these nodes
        self._nodes: set[str] = set()
        self._struck: set[str] = set()  # without the others that some of these are about
        self._losses = 0  # faults by which a node may be lost
        self.over_at = 0.0  # all of them
        self._told: set[tuple[object, ...]] = set()
        self._up_at = self._down_at = 0.0  # the ranks, when last looked at

    def struck(self, fault: Fault, *nodes: str) -> None:
        self._kinds.add(fault.kind)
        self._losses += "node_lost" in CAUSES.get(fault.kind, ())
        self._struck.add(nodes[0])
        self._nodes.update(nodes)
        lasts_s = 0.0 if fault.kind in (SLOW, "hang", "stopped") else fault.seconds
        self.over_at = max(self.over_at, self._cluster.world.now + lasts_s)

    def may_show_on(self, node: str) -> bool:
        """Whether some fault that has struck may be seen on this node."""
        return node in self._nodes or bool(self._kinds & EVERYWHERE)

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        """`since`: when this supervisor began."""
        if self._cluster.wanted.tasks:
            return
        self._look_at_incidents(supervisor)
        now, oracle, state = self._cluster.world.now, self._oracle, supervisor.state
        over_at = max(self.over_at, since, oracle.storage_touched, oracle.touched_until)
        calm = now > over_at and not supervisor.machine.departure.begun and not self._cluster.network.any_cut
        up = state.phase is Phase.RUNNING and all(map(supervisor.connected, state.placement))
        newest = oracle.newest
        up = up and newest is not None and (not newest.over or newest.caught != "" or newest.has_ended)
        sites = [one for one in self._cluster.sites.values() if not one.ill]
        # One that somebody removes may be there for long.
        here = [one for one in sites if one.agent and supervisor.connected(one.name)]
        fit = [one for one in here if oracle.untouched(one.name, 0.0)]
        enough = len(fit) >= self._cluster.plan.active
        if not calm or up or not enough:
            self._up_at = now
        if not calm or not up or not oracle.trains:
            self._down_at = now
        calm_s = now - max(over_at, self._down_at)
        if calm_s > 0.0:
            self._look_at_steps(calm_s)
            self._look_at_saves(supervisor, calm_s)
        down_s = now - max(over_at, self._up_at, state.not_before - supervisor.now + now)
        tests_s = self._cluster.plan.settings.preflight_s or 0.0
        # Another number of ranks reads what is written first.
        write_s = self._cluster.wanted.copy_s if self._cluster.wanted.least else 0.0
        # A node that stays away may be missed first when others have stopped their ranks.
        missed_s = 0.0
        if oracle.misses_nodes:
            missed_s = RETURN_S if supervisor.machine.watch.away() else MISSED_S
        if down_s > UP_S + tests_s + write_s + missed_s and not state.ended:
            oracle.fail(UP_AGAIN, f"{state.phase.value} for {down_s:.1f} s")

    def _look_at_incidents(self, supervisor: SimSupervisor) -> None:
        causes = {cause for kind in self._kinds for cause in CAUSES.get(kind, ())}
        if self._oracle.cluster.wanted.renews:
            causes.add("requeue_asked")
        if self._oracle.cluster.wanted.least:
            causes.add("grow_asked")
        if self._kinds >= {"host", "supervisor"}:
            causes.add("communication")  # nobody saw it end, and only ranks that it left are heard of
        if self._losses > 1:
            causes.add("script_fault")  # chance may strike the same rank's nodes one after the other
        for one in supervisor.state.incidents[-2:]:
            if one.cause and (one.id, one.cause, one.node) not in self._told:
                self._told.add((one.id, one.cause, one.node))
                elsewhere = one.cause in _OF_A_NODE and one.node != "" and not self.may_show_on(one.node)
                alone = len(self._struck) == 1 and self._kinds <= _EXACTLY and one.cause in _NAMED
                elsewhere |= alone and one.node not in self._struck
                if one.cause not in causes or elsewhere:
                    kinds = sorted(self._kinds)
                    self._oracle.fail(TRUE_CAUSE, f"{one.cause} {one.node} ({one.evidence}) for {kinds}")

    def _look_at_steps(self, calm_s: float) -> None:
        still_s = min(calm_s, self._cluster.world.now - self._oracle.step_at)
        hang = bool(self._kinds & {"hang", "stopped", "breaks"})
        if still_s > (HANG_S if hang else STEPS_S):
            self._oracle.fail(STEPS, f"they have done none for {still_s:.1f} s")

    def _look_at_saves(self, supervisor: SimSupervisor, calm_s: float) -> None:
        settings, copy_s = self._cluster.plan.settings, self._cluster.wanted.copy_s
        unsaved_s, unwritten_s = self._oracle.unsaved_s()
        settled_s = calm_s - (SETTLED_S if self._kinds else BEGINS_S)
        # While a write goes on, one of two slots is not free.
        if settled_s > 0.0 and unsaved_s > max(settings.max_loss_s, copy_s) + SAVED_S:
            self._oracle.fail(LITTLE_LOST, f"{unsaved_s:.1f} s of steps are nowhere")
        every_s = settings.shared_every_s
        if every_s is not None and not self._kinds & AT_STORAGE and settled_s > every_s + 2 * copy_s:
            late_s = unwritten_s - every_s - 2 * copy_s
            if late_s > BEGUN_S:
                self._oracle.fail(ON_STORAGE, f"a write is {late_s:.1f} s late")
