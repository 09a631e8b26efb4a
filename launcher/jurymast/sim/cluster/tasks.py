"""Independent tasks in the simulated cluster: each takes its time, and ends with a code of its own. They save
nothing, and what its node has not told of is lost with the node."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.messages import RankReport, Times
from jurymast.sim.cluster.training import SimGroup, SimMember

if TYPE_CHECKING:
    from jurymast.sim.cluster.plans import Plan

TASK_S = 2.0, 25.0
CODES = 0, 0, 0, 0, 3, 7
# As long as several attempts of the longest task.
ALL_S = 60.0


def task_of(plan: Plan, rank: int) -> tuple[float, int]:
    """How long a task takes, in seconds, and its exit code: the same in each attempt."""
    chance = Random(1000 * plan.seed + rank)
    return chance.uniform(*TASK_S), chance.choice(CODES)


@dataclass(eq=False)
class SimTasks(SimGroup):
    """The tasks of one attempt. `codes`: by rank, of those that have ended in it, or need not begin."""

    codes: dict[int, int] = field(default_factory=dict)

    def _ranks(self, member: SimMember) -> range:
        each = self.cluster.ranks_per_node
        return range(member.order.rank * each, (member.order.rank + 1) * each)

    def _running(self, member: SimMember) -> list[int]:
        return [rank for rank in self._ranks(member) if rank not in self.codes]

    @property
    def any_runs(self) -> bool:
        """Whether some task runs, or is about to be told as ended."""
        return any(map(self.runs, self.members.values()))

    def runs(self, member: SimMember) -> bool:
        return not member.gone and bool(self._running(member))

    def join(self, place: int, member: SimMember) -> None:
        if not self.members:
            self.cluster.oracle.group_started(self)
        self.members[place], self.phase = member, "training"
        world = self.cluster.world
        for local, rank in enumerate(self._ranks(member)):
            if local in member.order.ended:
                self.codes[rank] = 0
                continue
            self.cluster.oracle.tasks.started(rank, self.attempt)
            seconds, code = task_of(self.cluster.wanted, rank)
            world.after(seconds, member.host.process, self._end, member, rank, code)
        self._look(member)

    def leave(self, member: SimMember, *, loud: bool) -> None:
        member.gone = True

    def kill(self, member: SimMember) -> None:
        if running := self._running(member):
            self._end(member, self.cluster.world.chance.choice(running), -9)

    def _end(self, member: SimMember, rank: int, code: int) -> None:
        if member.gone or member.hung or rank in self.codes:
            return
        self.codes[rank] = code
        self.cluster.oracle.tasks.ended(rank, self.attempt, code, member.agent)
        if code:
            error = "" if code < 0 else "RuntimeError"
            failed = msg.Failed(
                attempt=self.attempt, rank=rank, exit_code=code, error=error, message="it fails"
            )
            member.host.say(failed)
        else:
            member.host.say(msg.Finished(attempt=self.attempt, ranks=(rank,)))
        self._look(member)

    def _look(self, member: SimMember) -> None:
        """The host is done once all its tasks are."""
        codes = [self.codes.get(rank) for rank in self._ranks(member)]
        if None not in codes:
            if any(codes):
                member.host.all_ended(self)
            else:
                member.host.finish(self)

    def reports(self, member: SimMember) -> list[RankReport]:
        quiet_s = self.cluster.world.now - member.joined_at
        return [
            RankReport(
                0, 0, True, within.DONE if self.codes.get(rank) == 0 else "starting", quiet_s, None, 0.0,
                member.page.settled, 0.0, 0.0,
            )
            for rank in self._ranks(member)
        ]  # fmt: skip

    def times(self, member: SimMember) -> list[Times] | None:
        return None
