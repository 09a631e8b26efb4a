"""What must hold of the incidents of a run in a simulated cluster, and of how far people are told it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jurymast.core.run import size
from jurymast.core.state.effects import Instruction, Launch
from jurymast.core.state.events import Event
from jurymast.core.state.incident import CAUSES, Incident
from jurymast.core.state.run import Phase, Role, RunState

if TYPE_CHECKING:
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

OVER = "71: an incident is over once ranks do steps that none had done before"
IN_ORDER = "72: what is told of an incident is in order"
STEP_IS_TOLD = "73: the step that people are told is one that ranks have done, of just now"
IN_USE = "74: a node that is fine has ranks, or is ready for them"
NO_WAIT = "75: a run waits before an attempt only after failures in a row"
AS_TOLD = "77: the action that is told is what was done"

# What ranks do is told by then, in seconds.
TOLD_BY_S = 6.0
# A node that is fine is ready again by then: it has started anew, and was tested.
READY_BY_S = 20.0
FINE_S = 15.0


class IncidentRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._steps = deque[tuple[float, int, int]](maxlen=8)  # at each look: attempt and step
        self._before: dict[int, int] = {}  # by attempt: the newest step when its ranks met
        self._idle_since: dict[str, float] = {}
        self._steady_since: float | None = None
        self._placed: tuple[int, tuple[str, ...]] = 0, ()  # of the newest attempt, as this supervisor knows

    def recorded(self, supervisor: SimSupervisor, event: Event, decided: Sequence[Instruction]) -> None:
        state = supervisor.state
        if state.phase is Phase.WAITING and state.incidents:
            wait_s = state.not_before - state.now
            since = state.incidents[-1].step_lost_from
            alike = sum(one.step_lost_from >= since for one in state.incidents)
            if alike <= 1 and 0.0 < wait_s < math.inf:  # else Slurm ends the job
                self._oracle.fail(NO_WAIT, f"for {wait_s:.1f} s before attempt {state.attempt + 1}")

        for one in decided:
            if isinstance(one, Launch):
                self._launches(state, one, supervisor.epoch)

    def _launches(self, state: RunState, launch: Launch, epoch: int) -> None:
        (by, before), now = self._placed, launch.placement
        self._placed = epoch, now
        if by != epoch:
            return
        told, others = state.incidents[-1].action, {*now} - {*before}
        if len(now) != len(before):
            right = (size.SHRINK,) if len(now) < len(before) else (size.GROW, "swap")
        else:
            right = ("swap",) if others else ("restart", "in process")
        if told not in right:
            self._oracle.fail(AS_TOLD, f"{told}, and attempt {launch.attempt} is on {now} after {before}")

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        oracle, state, now = self._oracle, supervisor.state, self._oracle.cluster.world.now
        for one in state.incidents[-2:]:
            if wrong := _wrong(one, state.now):
                oracle.fail(IN_ORDER, f"incident {one.id}: {wrong}")
        newest = oracle.newest
        if newest is not None:
            self._before.setdefault(newest.attempt, oracle.best_step)
            self._steps.append((now, newest.attempt, newest.step))
        steady = state.phase is Phase.RUNNING and all(map(supervisor.connected, state.placement))
        steady = steady and newest is not None and newest.attempt == state.attempt
        steady = steady and not oracle.cluster.network.any_cut
        self._steady_since = (self._steady_since or now) if steady else None
        if self._steady_since is not None and not oracle.cluster.wanted.tasks:
            long_s = now - max(since, self._steady_since, oracle.touched_until, oracle.calm.over_at)
            if long_s > TOLD_BY_S:
                self._look_at_steps(supervisor)

    def _look_at_steps(self, supervisor: SimSupervisor) -> None:
        oracle, state, now = self._oracle, supervisor.state, self._oracle.cluster.world.now
        told_by = now - TOLD_BY_S
        mine = [step for at, attempt, step in self._steps if attempt == state.attempt and at < told_by]
        if not mine or oracle.newest is None:
            return
        young = oracle.cluster.plan.submitted_at > 0.0  # of an old run less is journalled
        if young and not mine[-1] <= state.step <= oracle.newest.step:
            how = f"{state.step}, ranks had done {mine[-1]}, and have done {oracle.newest.step}"
            oracle.fail(STEP_IS_TOLD, how)
        if young and state.incident is not None and mine[-1] > self._before.get(state.attempt, 0):
            how = f"incident {state.incident.id} is not, and ranks have done {mine[-1]}"
            oracle.fail(OVER, how)
        self._look_at_nodes(supervisor)

    def _look_at_nodes(self, supervisor: SimSupervisor) -> None:
        oracle, now, state = self._oracle, self._oracle.cluster.world.now, supervisor.state
        for site in oracle.cluster.sites.values():
            node = state.nodes.get(site.name)
            fine = not site.ill and oracle.untouched(site.name, FINE_S, seen_from=supervisor.site.name)
            fine = fine and supervisor.connected(site.name)
            leaves = node is None or node.going or node.drained
            if not fine or node is None or leaves or node.role is Role.ACTIVE or node.usable:
                self._idle_since.pop(site.name, None)
            elif now > self._idle_since.setdefault(site.name, now) + READY_BY_S:
                oracle.fail(IN_USE, f"{site.name} is {node.role.value}: {node.reason}")


def _wrong(one: Incident, now: float) -> str:
    names = "fault_at", "detected_at", "stopped_at", "decided_at", "launched_at", "started_at"
    times = [(name, at) for name in names if (at := getattr(one, name)) is not None]
    for (name, at), (other, then) in zip(times, times[1:], strict=False):
        if then < at:
            return f"{other} is {at - then:.3f} s before {name}"
    if times[-1][1] > now:
        return f"{times[-1][0]} is to come"
    if one.restored_at is not None and one.restored_at < (one.launched_at or math.inf):
        return "ranks have restored before they were launched"
    if one.cause and one.charged != CAUSES[one.cause].charged:
        return f"{one.cause} is charged to {one.charged}"
    return ""
