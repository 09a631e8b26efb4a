"""Slurm's other nodes in the simulated cluster, which small jobs of the run get; and what must hold for
them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jurymast.core.run import refill
from jurymast.core.state.effects import Instruction, Requeue
from jurymast.core.state.events import Event, RefillAsked
from jurymast.core.state.incident import AHEAD
from jurymast.core.state.run import Phase, Role
from jurymast.core.supervision.refilling import SmallJob
from jurymast.errors import SubmissionError

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite
    from jurymast.sim.cluster.cluster import Cluster
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

ASKS_RIGHTLY = "41: a run asks for the nodes that it lacks, and for no more"
NEVER_TWICE = "42: no two small jobs may get the same node"
HOLDS = "43: a run holds its nodes while another may come in time"

# From the submission to the start; now and then it takes longer, or Slurm refuses.
STARTS_S, LATE_S = (0.3, 3.0), (5.0, 40.0)
LATE_SHARE, REFUSED_SHARE = 0.15, 0.1
HOLD_S = 25.0
# A run that lacks a node has asked for one by then, if nothing is wrong, in seconds.
ASKED_BY_S = 20.0


@dataclass
class SimSmallJob:
    number: int
    job: str
    exclude: frozenset[str]
    starts_at: float  # in simulated seconds
    site: SimSite | None = None


class OtherNodes:
    """`free`: nodes that no job has."""

    def __init__(self, cluster: Cluster, free: int) -> None:
        self._cluster, self.free = cluster, free
        self.jobs: dict[str, SimSmallJob] = {}
        self._submitted = 0

    def submit(self, number: int, exclude: Collection[str]) -> str:
        """Raises SubmissionError."""
        world = self._cluster.world
        self._cluster.oracle.refill.submitted(number, exclude)
        self._cluster.oracle.pool.submitted(exclude)
        if world.chance.random() < REFUSED_SHARE:
            raise SubmissionError("the user has too many jobs")
        self._submitted += 1
        job = f"8{self._submitted}"
        late = world.chance.random() < LATE_SHARE
        starts_at = world.now + world.between(*(LATE_S if late else STARTS_S))
        self.jobs[job] = SimSmallJob(number, job, frozenset(exclude), starts_at)
        world.at(starts_at, None, self._start, job)
        return job

    def _start(self, job: str) -> None:
        waiting = self.jobs.get(job)
        if waiting is None or not self._cluster.allocated:
            return
        if self.free == 0:
            waiting.starts_at = self._cluster.world.now + LATE_S[1]
            self._cluster.world.at(waiting.starts_at, None, self._start, job)
            return
        self.free -= 1
        waiting.site = self._cluster.add_site(waiting.number)

    def look(self) -> list[SmallJob]:
        return [
            SmallJob(one.number, one.job, "" if one.site is None else one.site.name)
            for one in self.jobs.values()
        ]

    def end(self, job: str) -> None:
        ended = self.jobs.pop(job, None)
        if ended is not None and ended.site is not None:
            ended.site.end_job()
            self._cluster.without.add(ended.site.name)
            self.free += 1

    def end_all(self) -> None:
        for job in [*self.jobs]:
            self.end(job)


class RefillRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._lacks_since: float | None = None
        self._phase = Phase.QUEUED  # the newest supervisor's, before what it records now

    def submitted(self, number: int, exclude: Collection[str]) -> None:
        cluster, others = self._oracle.cluster, self._oracle.cluster.others
        if waiting := [one.number for one in others.jobs.values() if one.site is None]:
            self._oracle.fail(NEVER_TWICE, f"small job {number} is asked for, and {waiting} wait")
        there = {name for name in cluster.sites if name not in cluster.without}
        if missing := sorted(there - {*exclude}):
            self._oracle.fail(NEVER_TWICE, f"small job {number} may get {missing}, which the run has")

    def recorded(self, supervisor: SimSupervisor, event: Event, decided: Sequence[Instruction]) -> None:
        before, self._phase = self._phase, supervisor.state.phase
        if isinstance(event, RefillAsked) and not event.found:
            self._asked(supervisor, event.number)
        if before in (Phase.STOPPING, Phase.WAITING) and any(isinstance(one, Requeue) for one in decided):
            self._requeued(supervisor)

    def _asked(self, supervisor: SimSupervisor, number: int) -> None:
        """Count what lives: nobody may ask for more than what is missing then."""
        state, sites = supervisor.state, self._oracle.cluster.sites
        fine = [
            name
            for name, node in state.nodes.items()
            if node.role is not Role.FAILED
            and not node.going
            and sites[name].agent is not None
            and supervisor.connected(name)
        ]
        if len(fine) >= self._oracle.cluster.wanted.nodes:
            self._oracle.fail(ASKS_RIGHTLY, f"small job {number} is asked for, and {fine} are there")

    def _requeued(self, supervisor: SimSupervisor) -> None:
        state = supervisor.state
        if state.incidents[-1].cause in ("requeue_asked", AHEAD):
            return  # nothing was lost
        decided_at = state.incidents[-1].decided_at or supervisor.now
        held_s = supervisor.now - decided_at
        if not state.may_refill or state.refill_failures or state.end_order or held_s >= HOLD_S:
            return
        self._oracle.fail(HOLDS, f"the run is requeued after {held_s:.1f} s: {state.incidents[-1].why}")

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        """Check that a run that lacks nodes has asked for one."""
        state, cluster = supervisor.state, self._oracle.cluster
        now = cluster.world.now
        alive = sum(node.role is not Role.FAILED or node.may_return for node in state.nodes.values())
        asks = state.may_refill and state.phase in (Phase.RUNNING, Phase.WAITING)
        gave_up = state.refill_failures > 0 or state.end_order is not None
        if not asks or gave_up or alive >= cluster.wanted.nodes or refill.coming(state):
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
        elif now > max(self._lacks_since, since) + ASKED_BY_S and self._oracle.storage_fine(ASKED_BY_S):
            self._oracle.fail(ASKS_RIGHTLY, f"nodes are lacking since {self._lacks_since:.1f} s")
