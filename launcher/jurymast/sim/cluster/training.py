"""The ranks of one attempt: they meet, restore, step together, save by the agreed cadence, and fail
together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.images import LIVE, MEMORY, SHARED, StateId
from jurymast.core.state.messages import RankReport, Times
from jurymast.keeper.manifest import RestoreStatus
from jurymast.sim.cluster.health import NOISE, SLOW
from jurymast.sim.cluster.keeper import COMMON_BYTES, SIZE_BYTES
from jurymast.sim.cluster.rejoining import newest_live
from jurymast.sim.cluster.world import KEEP, Steps, Token
from jurymast.worker.link import DOUBT_LIMIT_S, SCHEDULE_BYTES, ScheduleFollower, ScheduleRecord

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent, SimHost
    from jurymast.sim.cluster.cluster import Cluster

RETRY_S = 0.1
# So long ranks wait for memory that are to be placed anew after a save, in seconds.
ROOM_LIMIT_S = 30.0
# Ranks that may go on in their processes wait so long to hear that the attempt has ended.
HOLD_LIMIT_S = 10.0
STALL_S, GO_ON_S = (0.001, 0.02), (0.01, 0.2)
TOGETHER_S = (0.1, 0.5)  # a save to shared storage by all ranks
# Of a step, what ranks do by themselves, and wait for others: most ranks, and the slow ones.
OWN_SHARES = (0.3, 0.7), (0.8, 0.2)
_serial = itertools.count(1)


class Waits(Exception):
    """A rank waits at a step for the schedule."""


class Page:
    """The page of one node's ranks, on which the agent writes the cadence."""

    def __init__(self) -> None:
        self.record = ScheduleRecord(memoryview(bytearray(SCHEDULE_BYTES)))
        self.settled = 0
        self.doubts_since: float | None = None


@dataclass(eq=False)
class SimMember:
    """One node's ranks in a group."""

    agent: SimAgent
    host: SimHost
    order: msg.Launch
    page: Page
    follower: ScheduleFollower
    joined_at: float
    hung: bool = False
    lives: bool = False  # some of its ranks go on in their processes
    stopped_at: float = 0.0  # its processes, by a signal; 0.0: they are not
    own_s: float = 0.0  # of its steps, what it did by itself, and waited for others
    waits_s: float = 0.0
    gone: bool = False
    left: bool = False  # with exit code 0
    saves_until: float = 0.0  # by itself, after a signal that it caught


@dataclass(eq=False)
class SimGroup:
    """Ranks that met at one store."""

    cluster: Cluster
    order: msg.Launch
    name: tuple[int, str, int]
    members: dict[int, SimMember] = field(default_factory=dict)
    phase: str = "starting"
    step: int = 0
    beats: int = 0
    beat_at: float = 0.0
    longest_s: float = 0.0
    stepping_since: float = 0.0
    over: bool = False
    finished: bool = False
    number: int = field(default_factory=partial(next, _serial))
    history: tuple[object, ...] = ()
    caught: str = ""  # how they take the signal that they have caught: see `sim.cluster.caught`
    caught_at: float = 0.0
    told: bool = False  # their agents tell of it

    @property
    def attempt(self) -> int:
        return self.order.attempt

    @property
    def world(self) -> int:
        return self.order.world * self.cluster.ranks_per_node

    @property
    def nodes(self) -> list[str]:
        return [member.agent.site.name for member in self.members.values()]

    @property
    def has_ended(self) -> bool:
        """Whether all its ranks have ended with exit code 0, the training being done or not."""
        left = [member for member in self.members.values() if member.left]
        return self.finished or len(left) == self.order.world

    def runs(self, member: SimMember) -> bool:
        """Whether some rank of this node has not ended."""
        return not (member.gone or member.left)

    # ---- rendezvous

    def join(self, place: int, member: SimMember) -> None:
        if self.over:
            return
        self.members[place] = member
        if len(self.members) == self.order.world:
            self.phase = "restoring"
            self.cluster.oracle.group_started(self)
            for one in self.members.values():
                self._tell_of_checkpoints(one)
            self.cluster.world.go(None, self._restore())

    def _tell_of_checkpoints(self, member: SimMember) -> None:
        """As a Checkpointer does when it is made."""
        tell = member.agent.rank_said
        tell(within.CheckpointsKept(directory="/checkpoints", keep=KEEP))
        tell(within.Cadence(steps=self.cluster.plan.settings.cadence_steps))
        for local in range(self.cluster.ranks_per_node):
            own_bytes = SIZE_BYTES - COMMON_BYTES
            tell(within.Foreseen(local_rank=local, image_bytes=SIZE_BYTES, own_bytes=own_bytes))

    def leave(self, member: SimMember, *, loud: bool) -> None:
        """The node's ranks are gone; `loud`: the others learn it."""
        if member.gone:
            return
        member.gone = True
        self.over = True
        if not loud:
            return
        for other in self.members.values():
            if not other.gone and other.saves_until <= self.cluster.world.now:
                world = self.cluster.world
                why = "Connection closed by peer"
                hold_s = HOLD_LIMIT_S if self.cluster.wanted.lives else 0.0
                after_s = hold_s + world.between(0.02, 0.5)
                world.after(after_s, other.host.process, other.host.fail, self, 1, why)

    def fail_all(self, why: str) -> None:
        self.over = True
        for member in self.members.values():
            if not member.gone:
                self.cluster.world.after(0.02, member.host.process, member.host.fail, self, 1, why)

    def kill(self, member: SimMember) -> None:
        """One of this node's ranks is killed."""
        member.host.fail(self, -9, "")

    # ---- restoring

    def _restore(self) -> Steps[None]:
        cluster, world = self.cluster, self.cluster.world
        if self.order.spare and (live := newest_live(self)) is not None:
            yield world.now + world.between(*GO_ON_S)
            if not self.over:
                self._go_on(live, LIVE)
            return
        count = range(cluster.ranks_per_node)
        keepers = [member.agent.keeper for member in self.members.values()]
        while not self.over:
            status = {keeper.status(local) for keeper in keepers for local in count}
            if not status.isdisjoint((RestoreStatus.PENDING, RestoreStatus.FAILED)) or self._blocked():
                yield world.now + 0.03
                continue
            if status == {RestoreStatus.ELSEWHERE}:
                lead = self.members[0].agent
                cluster.storage.do(lead.site.name, lead.process, self._newest_shared, self._from_shared)
                world.go(None, self._tell_of_wait())
                return
            ready = status in ({RestoreStatus.READY}, {RestoreStatus.COLLECTED})
            each = (keeper.restored(local) for keeper in keepers for local in count if ready)
            found = [one for theirs in each for one in theirs]
            if ready:
                cluster.oracle.restores(self, found)
            if len({key for key, _ in found}) == 1:
                self._begin(*found[0], MEMORY)
            else:
                self.fail_all("memory has no one step (and attempt) for all ranks")
            return

    def _tell_of_wait(self) -> Steps[None]:
        world = self.cluster.world
        since = world.now
        while True:
            yield world.now + within.RESTORE_TOLD_S
            if self.over or self.phase != "restoring":
                return
            if not self._blocked():
                waits = within.RestoreWaits(path="/checkpoints", seconds=world.now - since)
                self.members[0].agent.rank_said(waits)

    def _newest_shared(self) -> StateId | None:
        node = self.members[0].agent.site.name
        seen = self.cluster.disk.shared if self.cluster.storage.sees_checkpoints(node) else ()
        return max(seen, default=None)

    def _from_shared(self, key: StateId | None | OSError) -> None:
        if self.over:
            return
        if isinstance(key, OSError):
            self.fail_all(str(key))
        elif key is not None:
            self._begin(key, self.cluster.disk.shared[key][1], SHARED)
        elif self.order.saved:
            self.cluster.oracle.unfound(self)
            self.fail_all(
                f"step {self.order.saved} of this run was saved, but there is no checkpoint in sight"
            )
        else:
            self._begin(None, None, "")

    def _begin(self, key: StateId | None, token: Token | None, tier: str) -> None:
        self.cluster.oracle.restored(self, key)
        self._go_on(token, tier)

    def _go_on(self, token: Token | None, tier: str) -> None:
        self.step = token.step if token is not None else 0
        self.history = (*((token.history[-1], token.step) if token is not None else ()), self.number)
        if tier == LIVE and token is not None:
            self.cluster.oracle.sparing.goes_on(self, token)
        lead = self.members[0].agent
        said = within.Restored(step=self.step, tier=tier, seconds=0.1, size_bytes=SIZE_BYTES)
        lead.rank_said(said)
        self.cluster.oracle.missed.restored(self)
        self.phase, self.stepping_since = "training", self.cluster.world.now
        for member in self.members.values():
            member.follower.passed(self.step)
            member.agent.keeper.wants()
        world = self.cluster.world
        world.after(world.between(0.05, 0.4), None, world.go, None, self._train())

    # ---- training

    def _blocked(self) -> bool:
        now, network = self.cluster.world.now, self.cluster.network
        members = list(self.members.values())
        for member in members:
            if member.hung or member.gone or not member.host.process.alive or member.host.process.until > now:
                return True
        return network.any_cut and any(
            not network.joins(one.agent.site.name, other.agent.site.name)
            for one, other in itertools.combinations(members, 2)
        )

    def _train(self) -> Steps[None]:
        world = self.cluster.world
        while not self.over:
            if self._blocked() or self.caught:
                yield world.now + RETRY_S
                continue
            if self.cluster.breaks(self):
                continue
            if 0 < self.cluster.wanted.last_step <= self.step:
                self._finish()
                return
            self.step += 1
            self.beats += 1
            if self.beat_at:
                self.longest_s = max(self.longest_s, world.now - self.beat_at)
            self.beat_at = world.now
            self.cluster.oracle.stepped(self)
            while (due := self._due()) is None:
                yield world.now + 0.05
                if self.over:
                    return
            if due and self.refused:
                yield from self._save_together()
            else:
                yield from self._make_room(due)
                if self.over:
                    return
                for member in due:
                    self._save(member)
            if self.over:
                return
            while self._stays():
                yield world.now + RETRY_S
                if self.over:
                    return
            step_s = self.cluster.step_s * (0.9 + 0.2 * world.chance.random())
            if self.cluster.timed:
                self._count(step_s)
            yield world.now + (step_s + (STALL_S[1] if due else 0.0))

    def _finish(self) -> None:
        self.over = self.finished = True
        world = self.cluster.world
        for member in self.members.values():
            world.after(world.between(0.01, 0.2), member.host.process, member.host.finish, self)

    def _due(self) -> list[SimMember] | None:
        """Return whose ranks save after this step; None while one waits for the schedule."""
        members = self.members.values()
        try:
            return [one for one in members if one.follower.due(self.step) or self._own_cadence()]
        except Waits:
            return None

    def _stays(self) -> bool:
        """Whether a rank waits after this step to be placed anew."""
        try:
            for member in self.members.values():
                member.follower.stay(self.step)
        except Waits:
            self.phase = "saving"
            return True
        self.phase = "training"
        return False

    def _own_cadence(self) -> bool:
        steps = self.cluster.plan.settings.cadence_steps
        return steps is not None and self.step % steps == 0

    @property
    def refused(self) -> bool:
        """Some node lacks the memory. All ranks then save to shared storage together."""
        keepers = (member.agent.keeper for member in self.members.values())
        return any(mine.refused for keeper in keepers for mine in keeper.machine.ranks)

    def _save_together(self) -> Steps[None]:
        self.phase = "saving"
        first, disk = self.members[0].agent, self.cluster.disk
        key, token = StateId(self.step, self.attempt), Token(self.step, self.history)
        began = self.cluster.world.now
        yield began + self.cluster.world.between(*TOGETHER_S)

        def publish() -> None:
            if not self.over:
                disk.publish(key, token)

        done = yield from self.cluster.storage.work(first.site.name, publish, writes=True)
        if self.over:
            return
        for member in self.members.values():
            member.follower.passed(self.step)
        error = str(done) if isinstance(done, OSError) else ""
        stall_s = self.cluster.world.now - began
        first.rank_said(within.Saved(step=self.step, tier=SHARED, ok=not error, stall_s=stall_s, error=error))
        self.phase = "training"

    def _make_room(self, due: Sequence[SimMember]) -> Steps[None]:
        """Ranks that are to be placed anew wait for memory: see `Checkpointer`."""
        end, world = self.cluster.world.now + ROOM_LIMIT_S, self.cluster.world
        moving = [one.agent.keeper for one in due if one.follower.stays(self.step)]
        ranks = range(self.cluster.ranks_per_node)
        while not all(keeper.free(local) for keeper in moving for local in ranks):
            self.phase = "saving"
            if self.over or self.refused or world.now > end:
                break
            yield world.now + RETRY_S
        self.phase = "training"

    def _save(self, member: SimMember) -> None:
        keeper, key = member.agent.keeper, StateId(self.step, self.attempt)
        token = Token(self.step, self.history)
        stall_s = self.cluster.world.between(*STALL_S)
        for local in range(self.cluster.ranks_per_node):
            if keeper.free(local):
                keeper.save(local, key, token, self.world, stall_s)
                self.cluster.oracle.saved(member.agent.site.name)
            else:
                self.cluster.oracle.skipped(self, member.agent.site.name)
                member.agent.rank_said(within.Skipped(local_rank=local, step=self.step, why=within.Skip.BUSY))
        member.follower.passed(self.step)

    # ---- what is seen of them

    def reports(self, member: SimMember) -> list[RankReport]:
        now = self.cluster.world.now
        since = self.beat_at or member.joined_at
        quiet_s = now - since
        phase = within.DONE if member.left else self.phase
        report = RankReport(
            self.step if self.beats else 0, self.beats, True, phase, quiet_s,
            now - self.beat_at if self.beats else None, self.longest_s, member.page.settled,
            quiet_s if self.stuck(member) else 0.0, now - member.stopped_at if member.stopped_at else 0.0,
        )  # fmt: skip
        return [report] * self.cluster.ranks_per_node

    def stuck(self, member: SimMember) -> bool:
        """Whether the ranks of this node do nothing but wait."""
        if member.saves_until > self.cluster.world.now and not member.hung:
            return False
        return self._blocked() or self.over or self.phase != "training"

    def _count(self, step_s: float) -> None:
        for place, member in self.members.items():
            slow = place == self.cluster.slow_place or member.agent.site.ill == SLOW
            own, waits = OWN_SHARES[slow]
            noise = self.cluster.world.between(*NOISE)
            member.own_s += own * noise * step_s
            member.waits_s += (waits + own * (1.0 - noise)) * step_s

    def times(self, member: SimMember) -> list[Times] | None:
        """How long the parts of all steps took, if it matters."""
        if not self.cluster.timed:
            return None
        return [Times(self.beats, member.own_s, member.waits_s, 0.0)] * self.cluster.ranks_per_node


def follower(cluster: Cluster, page: Page) -> ScheduleFollower:
    def settled(number: int) -> None:
        page.settled = number
        page.doubts_since = None

    def wait(known: object) -> None:
        if not known():  # type: ignore[operator]
            if page.doubts_since is None:
                page.doubts_since = cluster.world.now
            if cluster.world.now < page.doubts_since + DOUBT_LIMIT_S:
                raise Waits
        page.doubts_since = None

    return ScheduleFollower(
        page.record, settled, repeat=cluster.plan.settings.cadence_steps is None, wait=wait
    )
