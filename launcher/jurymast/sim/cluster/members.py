"""A user's pool of waiting nodes in the simulated cluster, whose members other runs take as well, and some of
which do not answer, or end before they join; and what must hold for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from jurymast.core.judges import pool
from jurymast.core.judges.pool import PoolMember, PoolNeed
from jurymast.core.state.run import Phase
from jurymast.errors import RunDirectoryError
from jurymast.sim.cluster.refill import STARTS_S, SimSmallJob
from jurymast.sim.cluster.world import BEGINNING

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimSite
    from jurymast.sim.cluster.cluster import Cluster
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor

ONE_RUN = "65: no two runs take the same node of a pool"
POOL_FIRST = "66: a run takes a node that waits before it asks Slurm for another"
NO_WAIT = "67: a node of a pool that does not answer holds no run up"
AS_WANTED = "68: a pool has as many nodes as the policy says, and no more"

# A pool's nodes end after so long without a run; that says how often a run looks at it.
IDLE_S = 30.0
# Of its members so many do not answer: their nodes are lost, and Slurm does not know. Others end when their
# agents are to start. Another run takes one this often, or while this run looks which there are.
DUMB_SHARE, DIES_SHARE, TAKEN_S, TAKEN_SHARE = 0.2, 0.2, (5.0, 60.0), 0.3
ANSWERS_S, AGENT_S = (0.05, 0.5), (0.1, 1.0)
# By then a run has given up one that does not answer, and has had a pool filled, if nothing else is wrong.
GIVEN_UP_BY_S, FILLED_BY_S = 8.0, 30.0
OWN, ANOTHER = "r", "another run"
T = TypeVar("T")


@dataclass
class WaitingNode:
    """`site`: its node, None while its job waits for one; `owner`: the run that took it; `told_at`: when that
    told it so, in simulated seconds, and `number` as which small job."""

    job: str
    exclude: frozenset[str]
    site: SimSite | None = None
    since: float = 0.0
    owner: str = ""
    told_at: float = math.inf
    number: int = 0
    dumb: bool = False
    dies: bool = False

    @property
    def waits(self) -> bool:
        return self.site is not None and not self.owner


class TeamPool:
    """`wanted`: how many members the policy wants."""

    def __init__(self, cluster: Cluster, wanted: int) -> None:
        self._cluster, self._world, self.wanted = cluster, cluster.world, wanted
        self.members: dict[str, WaitingNode] = {}
        self._submitted = 0
        self.claimed = 0  # by this run
        if wanted:
            self._world.after(self._world.between(*TAKEN_S), None, self._taken_now_and_then)

    def top_up(self, exclude: Collection[str]) -> list[str]:
        jobs = list[str]()
        for _ in range(pool.lacking(self.wanted, len(self.unclaimed()))):
            self._submitted += 1
            jobs.append(f"9{self._submitted}")
            self.members[jobs[-1]] = WaitingNode(jobs[-1], frozenset(exclude))
            self._world.after(self._world.between(*STARTS_S), None, self._start, jobs[-1])
        self._cluster.oracle.pool.topped_up()
        return jobs

    def unclaimed(self) -> list[WaitingNode]:
        return [one for one in self.members.values() if not one.owner]

    def _start(self, job: str) -> None:
        member, free = self.members[job], self._cluster.others
        if free.free == 0:
            self._world.after(self._world.between(*STARTS_S), None, self._start, job)
            return
        free.free -= 1
        member.site, member.since = self._cluster.new_site(), self._world.now
        fate = self._world.chance.random()
        member.dumb, member.dies = fate < DUMB_SHARE, fate > 1.0 - DIES_SHARE

    def signs(self) -> list[PoolMember]:
        return [
            PoolMember(
                job=one.job, node=one.site.name, partition="main", account="", root="", options=(),
                ends_at=None, since=BEGINNING + one.since,
            )
            for one in self.members.values()
            if one.site is not None and not one.owner
        ]  # fmt: skip

    def take(self, job: str, owner: str) -> bool:
        member = self.members.get(job)
        if member is None or member.owner:
            return False
        member.owner = owner
        if owner == OWN:
            self._world.after(pool.TAKEN_LIMIT_S, None, self._not_told, job)
        return True

    def _not_told(self, job: str) -> None:
        """Whoever took it is gone: it ends by itself."""
        member = self.members.get(job)
        if member is not None and math.isinf(member.told_at):
            self.end(job)

    def tell(self, job: str, number: int) -> None:
        member = self.members.get(job)
        if member is None:
            return
        self._cluster.oracle.pool.told(member)
        member.told_at, member.number = self._world.now, number
        if not member.dumb:
            self._world.after(self._world.between(*ANSWERS_S), None, self._answer, job)

    def _answer(self, job: str) -> None:
        """It is one of the run's small jobs from now on."""
        member = self.members.pop(job, None)
        if member is None or member.site is None:  # it was given up just before
            return
        self.claimed += 1
        self._cluster.others.jobs[job] = SimSmallJob(member.number, job, member.exclude, 0.0, member.site)
        if not self._cluster.allocated:
            self._cluster.others.end(job)
            return
        self._cluster.take_in(member.site, member.number)
        then = self._cluster.others.end if member.dies else self._agent
        self._world.after(self._world.between(*AGENT_S), None, then, job)

    def _agent(self, job: str) -> None:
        small = self._cluster.others.jobs.get(job)
        if small is not None and small.site is not None:
            small.site.start_agent()

    def answered(self, job: str) -> bool:
        return job not in self.members

    def withdraw(self, job: str) -> bool:
        member = self.members.get(job)
        if member is None:
            return False
        member.told_at = math.inf
        return True

    def end(self, job: str) -> None:
        member = self.members.pop(job, None)
        if member is not None and member.site is not None:
            self._cluster.others.free += 1

    def taken_by_another(self) -> None:
        """Another run takes a member, keeps its node for a while, and gives it back to Slurm."""
        waiting = [one.job for one in self.members.values() if one.waits]
        if waiting and self.take(job := self._world.chance.choice(waiting), ANOTHER):
            self.members[job].told_at = self._world.now
            self._world.after(self._world.between(*TAKEN_S), None, self.end, job)

    def _taken_now_and_then(self) -> None:
        self.taken_by_another()
        self._world.after(self._world.between(*TAKEN_S), None, self._taken_now_and_then)


class SimPoolAccess:
    """See `supervisor.claiming.PoolAccess`."""

    def __init__(self, supervisor: SimSupervisor, number: int, exclude: Collection[str]) -> None:
        self._supervisor, self._number, self._exclude = supervisor, number, frozenset(exclude)
        self._pool = supervisor.cluster.team

    def now(self) -> float:
        return self._supervisor.wall()

    async def need(self) -> PoolNeed:
        return PoolNeed(
            partition="main", account="", root="", options=(), left_s=math.inf, exclude=self._exclude
        )

    async def waiting(self) -> list[PoolMember]:
        found = await self._ask(self._pool.signs)
        if self._supervisor.world.chance.random() < TAKEN_SHARE:
            self._pool.taken_by_another()
        return found

    async def take(self, job: str) -> bool:
        self._supervisor.acts_for_good()
        return await self._ask(lambda: self._pool.take(job, OWN))

    async def tell(self, member: PoolMember) -> None:
        await self._ask(lambda: self._pool.tell(member.job, self._number))

    async def answered(self, job: str) -> bool:
        return await self._ask(lambda: self._pool.answered(job))

    async def withdraw(self, job: str) -> bool:
        return await self._ask(lambda: self._pool.withdraw(job))

    async def end(self, job: str) -> None:
        self._supervisor.ask_slurm()
        self._pool.end(job)

    async def _ask(self, what: Callable[[], T]) -> T:
        try:
            return await self._supervisor.on_disk(what)
        except OSError as error:
            raise RunDirectoryError(str(error)) from error


class PoolRules:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._lacks_since: float | None = None
        self.may_ask = True  # the member before did not answer, so Slurm is asked

    def told(self, member: WaitingNode) -> None:
        if member.owner != OWN:
            self._oracle.fail(ONE_RUN, f"member {member.job} is {member.owner}'s")

    def submitted(self, exclude: Collection[str]) -> None:
        """The run asks Slurm for a node."""
        cluster = self._oracle.cluster
        long_ago = cluster.world.now - GIVEN_UP_BY_S
        waiting = [one for one in cluster.team.members.values() if one.waits and one.since < long_ago]
        fine = [one.job for one in waiting if one.site is not None and one.site.name not in exclude]
        if fine and not self.may_ask and self._oracle.storage_fine(GIVEN_UP_BY_S):
            self._oracle.fail(POOL_FIRST, f"Slurm is asked for a node, and {fine} wait")

    def topped_up(self) -> None:
        team = self._oracle.cluster.team
        if len(there := [one.job for one in team.unclaimed()]) > team.wanted:
            self._oracle.fail(AS_WANTED, f"{there} are there, and {team.wanted} are wanted")

    def look(self, supervisor: SimSupervisor, since: float) -> None:
        cluster, now = self._oracle.cluster, self._oracle.cluster.world.now
        calm = self._oracle.storage_fine(FILLED_BY_S) and cluster.slurm_silent_until < now - FILLED_BY_S
        stood_still = max(supervisor.site.stopped_until, cluster.stalled_until)
        calm = calm and stood_still < now - FILLED_BY_S
        for member in cluster.team.members.values():
            late = member.owner == OWN and member.told_at < now - GIVEN_UP_BY_S
            if calm and late and since < member.told_at:
                self._oracle.fail(
                    NO_WAIT, f"the run still waits for {member.job} since {member.told_at:.1f} s"
                )
        state = supervisor.state
        full = len(cluster.team.unclaimed()) >= cluster.team.wanted
        if not state.pooled or full or state.phase is not Phase.RUNNING or state.end_order is not None:
            self._lacks_since = None
        elif self._lacks_since is None:
            self._lacks_since = now
        elif calm and now > max(self._lacks_since, since) + FILLED_BY_S:
            self._oracle.fail(AS_WANTED, f"the pool lacks nodes since {self._lacks_since:.1f} s")
