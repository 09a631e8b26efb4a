"""The supervisor's hand in checkpoints: commits, replicas, drains, and what an attempt restores.

Agents say which images they hold (`core.copies` keeps the count); this orders what follows from it. Nothing
here is journalled but its outcomes: a supervisor that takes over hears the agents' holdings again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import asdict

from jurymast.checkpoint.directory import Rollback
from jurymast.core import copies as cp
from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core import parity
from jurymast.core.copies import Copies, Key, RestorePlan
from jurymast.core.durable import IDLE_SHARE, durable_every_s, late_after_s
from jurymast.core.instructions import Launch
from jurymast.core.reach import Reach
from jurymast.core.state import Phase, Role, RunState
from jurymast.errors import never
from jurymast.keeper.page import REFUSED
from jurymast.supervisor.foresight import Foresight
from jurymast.supervisor.holders import Holder, spelled, spelled_members
from jurymast.supervisor.retries import RETRY_S, Retries

SHARED_PAUSE_MIN_S = 1.0
# Looking at the copies of a hundred thousand ranks takes a while: at most a tenth of the time goes into it,
# and after so many nodes heartbeats are heard.
REST_SHARE = 9.0
SLICE_NODES = 128
# Agents that are silent about a drain for this long have lost it; a hung storage is theirs to notice earlier.
DRAIN_LIMIT_S = 3600.0


@dataclass
class Drain:
    """One set of images on its way to a tier. `waiting`: nodes that have not said how it ended; from
    `late_at` on it takes longer than it should."""

    id: str
    tier: str
    key: Key
    started_at: float
    waiting: set[str]
    late_at: float
    size_bytes: int = 0
    why: str = ""


@dataclass
class _Pass:
    """A look at what replicas are missing of the state `key`, some nodes at a time: `place` is the next one's
    group rank; so much was ordered, and took so many seconds."""

    key: Key
    kept: parity.Keeping
    place: int = 0
    ordered: int = 0
    took_s: float = 0.0


@dataclass
class Tiers:
    """`tell` sends a message to a node's agent, `feed` journals an event, `now` is the supervisor's clock.

    `shared` maps the states that are complete in the shared tier to their size in bytes, `domains` nodes to
    what they share with others that may fail at once, like a switch.
    """

    state: RunState
    tell: Callable[[str, msg.ToAgent], None]
    feed: Callable[[ev.Event], None]
    now: Callable[[], float]
    domains: dict[str, str] = field(default_factory=dict)
    copies: Copies = field(default_factory=Copies)
    shared: dict[Key, int] = field(default_factory=dict)
    rollbacks: list[Rollback] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nodes: dict[str, Holder] = {}
        self._stalls: dict[Key, float] = {}
        self._committed: Key | None = None
        self._committed_at = 0.0
        self._safe: Key | None = None
        self._ordered: dict[str, set[tuple[Key, str, int, tuple[int, ...]]]] = {}  # by holder
        self._pass: _Pass | None = None
        self._drains: dict[str, Drain] = {}
        self._next_at: dict[str, float] = {}
        self._retries = Retries(self.now)
        self._tried: dict[str, Key] = {}
        self._numbers = itertools.count(1)
        self._newest_object: Key = (-1, -1)
        self._drained_before = False
        self._void: Key | None = None
        self._dirty = False
        self._retry_at = math.inf
        self._rest_until = 0.0
        self._told_safe: Key | None = None
        self._gather_at = -math.inf
        self._foresight = Foresight(self._note)
        self._reach = Reach()

    # ---- what agents say

    def joined(self, node: str, hello: msg.Hello) -> None:
        """An agent is here, for the first time or again: what it holds counts anew."""
        self.copies.drop_where(node=node)
        self._nodes[node] = Holder(hello.address, hello.data_port)
        if hello.domain:
            self.domains[node] = hello.domain
        self._foresight.joined(node, hello.room)
        self._ordered.pop(node, None)
        self._reach.forget(node)
        self._held(node, hello.copies)

    def lost(self, node: str) -> None:
        self.copies.drop_where(node=node)
        self._nodes.pop(node, None)
        self._foresight.lost(node)
        self._order_anew()  # what it held for others must live elsewhere again
        for drain in list(self._drains.values()):
            if node in drain.waiting:
                self._drained(drain, node, f"node {node} was lost")

    def hear(self, node: str, message: msg.AboutCheckpoints) -> None:
        match message:
            case msg.Held():
                self._held(node, message.copies)
            case msg.Dropped():
                for copy in message.copy.on(node):
                    self.copies.drop(copy)
                self._order_anew()
                if message.why:
                    self._note(node, f"a copy is no copy any more: {message.why}")
            case msg.Refused():
                if node in self._nodes:
                    self._nodes[node].full = True
                    self._nodes[node].packed |= bool(message.group)
                    self._dirty = True
                self._note(node, message.why)
            case msg.Foreseen():
                self._foresight.hear(node, message)
                self._foresight.look(self.state.placement, self.state.ranks_per_node, self._kept)
            case msg.Prefetched():
                self._prefetched(node, message)
            case msg.Unreplicated():
                self._unreplicated(node, message)
            case msg.Unrestorable():
                self.feed(ev.RestoreFailed(t=self.now(), node=node, **asdict(message)))
            case msg.Drained():
                self._hear_drained(node, message)
            case _:
                never(message)

    def _unreplicated(self, node: str, message: msg.Unreplicated) -> None:
        key = message.step, message.attempt
        self._ordered.get(node, set()).discard((key, message.part, message.rank, message.group))
        self._retry_at = self._gather_at = self.now() + RETRY_S
        pair = node, "" if message.group else self.state.node_of(message.rank)
        if self._reach.failed(pair, self.now()):
            self._note(node, f"rank {message.rank} has no replica of step {key[0]}: {message.why}")
        if pair in self._reach.given_up(self.now()):
            self._dirty = True  # others may hold it

    def skipped(self, step: int, rank: int, why: str) -> None:
        """A rank could not save: then the step will never be complete."""
        if self._void == (step, self.state.attempt):
            return
        self._void = (step, self.state.attempt)
        void = msg.Void(step=step, attempt=self.state.attempt)
        for node in self.state.placement:
            self.tell(node, void)
        self.feed(
            ev.Saved(
                t=self.now(), attempt=self.state.attempt, step=step, tier=cp.MEMORY, ok=False, stall_s=0.0,
                error=f"rank {rank}: {why}",
            )
        )  # fmt: skip
        if why == REFUSED:  # its state outgrew the node: started again, all ranks save to storage
            self.feed(ev.Asked(t=self.now(), what="restart", by=f"jurymast, because rank {rank}: {why}"))

    def _held(self, node: str, reports: Iterable[msg.CopyReport]) -> None:
        for report in reports:
            copies = report.on(node)
            copy = copies[0]
            if any(back.voids(copy.step, copy.attempt) for back in self.rollbacks):
                continue
            for copy in copies:
                self.copies.hold(copy)
            if copy.tier == cp.PEER:
                self._reach.worked((node, "" if copy.group else self.state.node_of(copy.rank)))
            self._stalls[copy.key] = max(self._stalls.get(copy.key, 0.0), report.stall_s)
        self._dirty = True
        if self._commit():
            self.look()  # until it is replicated, a lost node costs the step

    def _note(self, node: str, text: str) -> None:
        self.feed(ev.Noted(t=self.now(), node=node, message=text))

    def _prefetched(self, node: str, message: msg.Prefetched) -> None:
        """Only what did not go as planned is worth a line."""
        if message.passed_over:
            self.feed(
                ev.Fetched(
                    t=self.now(), attempt=self.state.attempt, node=node, rank=message.rank,
                    tiers=message.tiers, why=message.passed_over,
                )
            )  # fmt: skip

    # ---- commit, replicas, drains

    def look(self) -> bool:
        """Order whatever is due. Cheap when nothing is. True when it is to go on at once, once others had
        their turn."""
        if self._committed is not None:
            began = self.now()
            if self._pass is not None and self._pass.key != self._committed:
                self._give_pass_up()
            if self._pass is None and ((self._dirty and began >= self._rest_until) or began > self._retry_at):
                self._dirty, self._retry_at = False, math.inf
                self._begin_pass(self._committed)
            if self._pass is not None:
                self._replicate(self._pass)
            self._drain_committed(self._committed)
        now = self.now()
        for drain in list(self._drains.values()):
            if now > drain.started_at + DRAIN_LIMIT_S:
                for node in list(drain.waiting):
                    self._drained(drain, node, f"{node} said nothing for {DRAIN_LIMIT_S:.0f} s")
            elif now > drain.late_at:
                drain.late_at = math.inf
                why = f"not there after {now - drain.started_at:.0f} s: the storage is slow, or it hangs"
                self._told(drain.tier, drain.key, 0, why)
        return self._pass is not None

    def _commit(self) -> bool:
        """True when a step has just become complete in memory."""
        for key in self.copies.newest_first():
            if self._committed is not None and cp.age(key) <= cp.age(self._committed):
                return False
            if self.copies.in_memory(key):
                self._committed, self._committed_at = key, self.now()
                self.feed(
                    ev.Saved(
                        t=self.now(), attempt=key[1], step=key[0], tier=cp.MEMORY, ok=True,
                        stall_s=self._stalls.pop(key, 0.0), size_bytes=self.copies.size_bytes(key),
                    )
                )  # fmt: skip
                return True
        return False

    def _spares(self) -> list[str]:
        if not self.state.settings.prefer_spares:
            return []
        return [node.name for node in self.state.nodes.values() if node.role is Role.SPARE]

    def _order_anew(self) -> None:
        """Copies are gone: what was ordered, or looked at, says nothing any more."""
        self._ordered.clear()
        self._dirty, self._safe = True, None
        self._give_pass_up()

    def _begin_pass(self, key: Key) -> None:
        if self.state.phase is not Phase.RUNNING:
            self._dirty = True
        elif key != self._safe:
            began = self.now()
            self._pass = _Pass(key, self._kept())
            self._pass.took_s = self.now() - began

    def _give_pass_up(self) -> None:
        """What was looked at is another by now: from the first node on again, after a rest."""
        if self._pass is not None:
            self._dirty, self._rest_until = True, self.now() + REST_SHARE * self._pass.took_s
            self._pass = None

    def _replicate(self, under_way: _Pass) -> None:
        """Order what some nodes lack. Once nothing is missing anywhere, older images may go."""
        if self.state.phase is not Phase.RUNNING:
            self._give_pass_up()
            return
        began, placement, count = self.now(), self.state.placement, self.state.ranks_per_node
        places = range(under_way.place, min(under_way.place + SLICE_NODES, len(placement)))
        missing = cp.missing_replicas(
            self.copies, under_way.key, placement, count, under_way.kept.whole, places
        )
        under_way.place = places.stop
        if under_way.place >= len(placement):
            missing += parity.missing_parity(
                self.copies, under_way.key, placement, count, under_way.kept.parity
            )
        for order in missing:
            self._order(under_way.key, order)
        under_way.ordered += len(missing)
        under_way.took_s += self.now() - began
        if under_way.place >= len(placement):
            self._pass, self._rest_until = None, self.now() + REST_SHARE * under_way.took_s
            if not under_way.ordered:
                self._settle(under_way.key, safe=not under_way.kept.bare)

    def _order(self, key: Key, order: cp.Replication) -> None:
        """Once."""
        ordered = self._ordered.setdefault(order.holder, set())
        name = key, order.part, order.rank, order.group
        if name not in ordered:
            ordered.add(name)
            if order.group:
                self._make_room(key, order)
            self.tell(order.holder, self._replication(key, order))

    def _kept(self) -> parity.Keeping:
        settings = self.state.settings
        return parity.keeping(
            self.state.placement, self.state.ranks_per_node,
            [name for name in self._spares() if name in self._nodes], self.domains,
            copies=settings.replicas, parity=settings.parity,
            full={name for name, node in self._nodes.items() if node.full},
            packed={name for name, node in self._nodes.items() if node.packed},
            apart=self._reach.given_up(self.now()),
        )  # fmt: skip

    def _replication(self, key: Key, order: cp.Replication) -> msg.Replicate:
        return msg.Replicate(
            step=key[0], attempt=key[1], rank=order.rank, part=order.part,
            sources=spelled(order.sources, self._nodes), group=order.group,
            members=spelled_members(order.members, self._nodes),
        )  # fmt: skip

    def _make_room(self, key: Key, order: cp.Replication) -> None:
        """Whole replicas that a full node has of some of a group are in the way of the XOR of all of it."""
        holder = self._nodes.get(order.holder)
        if holder is None or not holder.full or not self.copies.in_memory(key):
            return
        useless = [
            copy
            for rank in order.group
            for copy in self.copies.of(key, rank)
            if copy.node == order.holder and copy.tier == cp.PEER and not copy.group
        ]
        for copy in useless:
            self.copies.drop(copy)
        if useless:
            ranks = tuple(copy.rank for copy in useless)
            self.tell(order.holder, msg.Forget(step=key[0], attempt=key[1], ranks=ranks))

    def _settle(self, key: Key, safe: bool) -> None:
        """Every part is on as many nodes as wanted, or (not `safe`) as have memory for it: agents may give
        older images up."""
        self._safe = key
        replicated = safe and self.state.settings.replicas and len(self._nodes) > 1
        if replicated and key != self._told_safe:
            self._told_safe, took_s = key, self.now() - self._committed_at
            self._told(cp.PEER, key, self.copies.replica_bytes(key), seconds=took_s)
        committed = msg.Committed(step=key[0], attempt=key[1])
        for node in self._nodes:
            self.tell(node, committed)
        for other in self.copies.newest_first():
            if cp.age(other) < cp.age(key):
                self._ask_again(other)
                self.copies.drop_where(other, tiers=(cp.MEMORY, cp.PEER))
        self._ordered.clear()

    def _ask_again(self, key: Key) -> None:
        """Nodes give their replicas of these images up: then they may have room for parity after all."""
        packed = {name for name, node in self._nodes.items() if node.packed and not node.retried}
        held = self.copies.every() if packed else ()
        for name in packed & {copy.node for copy in held if copy.key == key and copy.tier == cp.PEER}:
            self._nodes[name].packed, self._nodes[name].retried = False, True

    def _told(self, tier: str, key: Key, size_bytes: int, why: str = "", seconds: float = 0.0) -> None:
        self.feed(
            ev.Saved(
                t=self.now(), attempt=key[1], step=key[0], tier=tier, ok=not why, stall_s=0.0,
                size_bytes=size_bytes, error=why, copied=True, seconds=seconds,
            )
        )  # fmt: skip

    def _drain_committed(self, key: Key) -> None:
        settings, now = self.state.settings, self.now()
        if settings.local_path and self._due(cp.LOCAL, key, now):
            self.drain(cp.LOCAL, key)
        if self._due(cp.SHARED, key, now) and key not in self.shared:
            self.drain(cp.SHARED, key)
        if settings.object_url and self.shared and now >= self._next_at.get(cp.OBJECT, 0.0):
            newest = max(self.shared, key=cp.age)
            if cp.age(newest) > cp.age(self._newest_object) and self._free(cp.OBJECT):
                self._next_at[cp.OBJECT] = now + settings.object_every_s
                self.drain(cp.OBJECT, newest)

    def _due(self, tier: str, key: Key, now: float) -> bool:
        idle = self._free(tier) and now >= self._next_at.get(tier, 0.0)
        return idle and self._tried.get(tier) != key and self.copies.in_memory(key)

    def copying(self) -> bool:
        """Whether images are on their way to some storage."""
        return bool(self._drains)

    def _free(self, tier: str, hurry: bool = False) -> bool:
        """True when nothing is on its way there, and the last failure is a while ago."""
        return tier not in self._drains and self._retries.due(tier, hurry)

    def _shared_pause_s(self, took_s: float) -> float:
        """The first drain took longer than any other will: its process had to start."""
        settings = self.state.settings
        if settings.shared_every_s is not None:
            return max(0.0, settings.shared_every_s - took_s)
        if settings.cadence_steps is not None or settings.cadence_s is not None:
            return 0.0
        first, self._drained_before = not self._drained_before, True
        least_s = SHARED_PAUSE_MIN_S if first else max(SHARED_PAUSE_MIN_S, IDLE_SHARE * took_s)
        return max(least_s, (durable_every_s(self.state, took_s, self.now()) or 0.0) - took_s)

    def drain(self, tier: str, key: Key) -> bool:
        """Have the agents copy a set of images to a tier; False when no agent has some image whole."""
        writers: dict[str, list[int]] = {}
        if tier == cp.OBJECT:
            writers = {self._lead(): []} if self._lead() else {}
        for rank in range(self.copies.world(key) if tier != cp.OBJECT else 0):
            node = self._writer(key, rank)
            if not node:
                return False
            writers.setdefault(node, []).append(rank)
        if not writers:
            return False
        name = f"{self.state.epoch:04x}{next(self._numbers):06x}"
        self._tried[tier] = key
        size_bytes = self.shared.get(key, 0) if tier == cp.OBJECT else self.copies.size_bytes(key)
        late_at = self.now() + late_after_s(self.state, tier, size_bytes, len(writers))
        self._drains[tier] = Drain(name, tier, key, self.now(), set(writers), late_at)
        for node, ranks in writers.items():
            lead = 0 in ranks or tier == cp.OBJECT
            self.tell(
                node,
                msg.Drain(
                    id=name, tier=tier, step=key[0], attempt=key[1], ranks=tuple(ranks),
                    world=self.copies.world(key), lead=lead,
                ),
            )  # fmt: skip
        return True

    def _lead(self) -> str:
        return self.state.placement[0] if self.state.placement else next(iter(self._nodes), "")

    def _writer(self, key: Key, rank: int) -> str:
        own = self.state.node_of(rank)
        if own and self.copies.has_whole(key, rank, own):
            return own if own in self._nodes else ""
        copies = [copy for copy in self.copies.of(key, rank) if copy.node in self._nodes]
        whole = [copy for copy in copies if copy.part == cp.ALL and not copy.group]
        whole.sort(key=lambda copy: (copy.tier != cp.MEMORY, copy.tier == cp.LOCAL))
        return whole[0].node if whole else ""

    def _hear_drained(self, node: str, message: msg.Drained) -> None:
        drain = self._drains.get(message.tier)
        if drain is None or drain.id != message.id:
            return
        drain.size_bytes += message.size_bytes
        self._drained(drain, node, "" if message.ok else f"{node}: {message.why}")

    def _drained(self, drain: Drain, node: str, why: str) -> None:
        """A node is done with a drain, or will never be."""
        if self._drains.get(drain.tier) is not drain:
            return
        drain.waiting.discard(node)
        drain.why = drain.why or why
        if drain.why:
            cancel = msg.CancelDrain(id=drain.id)
            for other in sorted(drain.waiting):
                self.tell(other, cancel)
            drain.waiting.clear()
        if drain.waiting:
            return
        self._drains.pop(drain.tier, None)
        now = self.now()
        took_s = now - drain.started_at
        if drain.why:
            self._tried.pop(drain.tier, None)
            if not self._retries.failed(drain.tier, drain.why):
                return
        else:
            self._retries.succeeded(drain.tier)
        if not drain.why and drain.tier == cp.SHARED:
            self.shared[drain.key] = drain.size_bytes
            self._next_at[cp.SHARED] = now + self._shared_pause_s(took_s)
        elif not drain.why and drain.tier == cp.OBJECT:
            self._newest_object = drain.key
        self._told(drain.tier, drain.key, drain.size_bytes, drain.why, took_s)

    # ---- restoring

    def go_back(self, step: int) -> None:
        """Nothing newer than `step` is to be restored any more, nor what ranks save before they stop."""
        self.rollbacks.append(Rollback(step, self.state.attempt, self.now()))
        forget = msg.ForgetNewer(step=step)
        for node in self._nodes:
            self.tell(node, forget)
        for key in self.copies.newest_first():
            if key[0] > step:
                self.copies.drop_where(key)
        for drain in list(self._drains.values()):
            if drain.key[0] > step:
                for node in list(drain.waiting):
                    self._drained(drain, node, f"the run goes back to step {step}")
        self.shared = {one: size for one, size in self.shared.items() if one[0] <= step}
        self._committed = None
        self._order_anew()

    def plan(self, launch: Launch) -> RestorePlan:
        """What this attempt restores; journals it."""
        on_shared = {one: self.shared[one, attempt] for one, attempt in sorted(self.shared, key=cp.age)}
        failed, count = self.state.failed_to_restore(), self.state.ranks_per_node
        plan = cp.plan_restore(self.copies, on_shared, launch.placement, count, failed)
        self.feed(
            ev.RestorePlanned(
                t=self.now(), attempt=launch.attempt, step=plan.step, tier=plan.tier,
                expected_s=round(plan.expected_s, 6), tiers=dict(plan.tiers), reason=plan.reason,
            )
        )  # fmt: skip
        if plan.tier == cp.MEMORY:
            self._committed = (plan.step, plan.attempt)
        else:  # agents free what they hold in memory: the ranks will save other states under these steps
            self._committed = None
            self.copies.drop_where(tiers=(cp.MEMORY, cp.PEER))
        self._order_anew()
        return plan

    def restored(self, attempt: int, step: int, tier: str) -> None:
        """The ranks go on from here. If storage was read for it, what earlier attempts have newer there is as
        good as gone: it was passed over as damaged, or somebody has moved it away."""
        if tier != cp.MEMORY:
            self.shared = {
                one: size for one, size in self.shared.items() if one[0] <= step or one[1] >= attempt
            }

    def restore_message(self, plan: RestorePlan, node: str, ranks: range) -> msg.Restore | None:
        """The part of the plan for one node; None: its ranks look in the shared tier themselves."""
        if plan.tier != cp.MEMORY:
            return None
        key = plan.step, plan.attempt
        sources = {rank: spelled(self.copies.sources(key, rank, node), self._nodes) for rank in ranks}
        return msg.Restore(step=plan.step, attempt=plan.attempt, ranks=sources)

    # ---- before the nodes go

    def unsaved(self) -> Key | None:
        """The newest set of images that would be lost with these nodes."""
        newest = max(map(cp.age, self.shared), default=(-1, -1))
        for key in self.copies.newest_first():
            if cp.age(key) <= newest:
                return None
            if self.copies.restorable(key):
                return key
        return None

    def found_on_storage(self, shared: Mapping[Key, int], rollbacks: list[Rollback]) -> None:
        """What earlier supervisors, attempts and runs left there."""
        self.shared = {**shared, **self.shared}
        self.rollbacks += [back for back in rollbacks if back not in self.rollbacks]
        for copy in list(self.copies.every()):
            if any(back.voids(copy.step, copy.attempt) for back in self.rollbacks):
                self.copies.drop(copy)

    def unsaved_text(self) -> str:
        key = self.unsaved()
        return f"the checkpoint of step {key[0]}" if key else "nothing"

    def secure(self) -> bool:
        """Get the newest set of images to the shared tier; True when it is there or cannot be got there.

        To be called again and again until then.
        """
        key = self.unsaved()
        if key is None:
            return True
        if not self._free(cp.SHARED, hurry=True):
            return False
        return not self.drain(cp.SHARED, key) and not self._gather(key)

    def _gather(self, key: Key) -> bool:
        """Have the images that only exist in parts put together on some node; False when nobody can."""
        nodes = [name for name, node in self._nodes.items() if not node.full]
        for number, rank in enumerate(range(self.copies.world(key))):
            if self._writer(key, rank):
                continue
            if not nodes:
                return False
            if self.now() < self._gather_at:
                continue  # what failed just now fails again
            holder = nodes[number % len(nodes)]
            self._order(key, cp.Replication(holder, rank, cp.ALL, self.copies.sources(key, rank, holder)))
        return True
