"""Decides about the checkpoints of a run: commits, replicas, writes to storage, and what attempts restore.

Agents report which images they hold; this decides what to do. Only outcomes are journalled: agents report
what they hold again to a supervisor that takes over. Methods return what is to be done; times are Unix times
in seconds. Before the nodes are released, the newest state is written to the shared tier, because their
memory is lost with them.

Before the first step it reports which nodes will be short of memory, and what to do about it. A state that a
user's rollback covers is void.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from msgspec.structs import asdict

from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.agreement import NextSave
from jurymast.core.checkpoints.collecting import Collecting
from jurymast.core.checkpoints.commit import Commit, Rollback
from jurymast.core.checkpoints.copies import RATES, RETRY_S, Copies, Holder, RestorePlan
from jurymast.core.checkpoints.replicas import Replicas
from jurymast.core.checkpoints.writes import Writes
from jurymast.core.state import events as ev
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Launch, Record, Send
from jurymast.core.state.images import Source, StateId
from jurymast.core.state.run import Phase, Role, RunState
from jurymast.core.state.texts import memory_size
from jurymast.core.state.within import Skip
from jurymast.errors import never

# ---- whether checkpoints fit into memory

# An image or replica stays until a newer one is whole and safe.
AT_ONCE = 2


@dataclass(frozen=True)
class Need:
    """What checkpoints will take on one node: its own ranks' slots, and replicas of other nodes' states."""

    slots_bytes: int = 0
    replicas_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.slots_bytes + self.replicas_bytes


def needs(
    foreseen: Mapping[str, msg.Foreseen], placement: Sequence[str], holders: Mapping[str, tuple[str, ...]]
) -> dict[str, Need]:
    """Return the needs by node. `foreseen` has every node of the placement, `holders` who is to hold its
    replicas. What ranks share counts as replicated."""
    held: dict[str, int] = {}
    for node, theirs in holders.items():
        for holder in theirs:
            held[holder] = held.get(holder, 0) + foreseen[node].own_bytes
    return {
        node: Need(
            AT_ONCE * foreseen[node].image_bytes if node in foreseen else 0, AT_ONCE * held.get(node, 0)
        )
        for node in dict.fromkeys([*placement, *held])
    }


class Shortages:
    """Reports shortages. What a node can give (`rooms`) includes what checkpoints already use there."""

    def __init__(self) -> None:
        self.rooms: dict[str, msg.Room] = {}
        self._foreseen: dict[str, msg.Foreseen] = {}
        self._told: dict[str, Need] = {}

    def on_agent_joined(self, node: str, room: msg.Room | None) -> None:
        self._foreseen.pop(node, None)
        if room is not None:
            self.rooms[node] = room

    def on_node_lost(self, node: str) -> None:
        self._foreseen.pop(node, None)
        self.rooms.pop(node, None)

    def on_foreseen(self, node: str, message: msg.Foreseen) -> None:
        """All ranks of a node have reported how large their states will be."""
        self.on_agent_joined(node, message.room)
        self._foreseen[node] = message

    def complete(self, placement: Sequence[str]) -> bool:
        """Whether every node of the placement has reported."""
        return len(self._foreseen) >= len(placement) and all(node in self._foreseen for node in placement)

    def look(
        self, placement: Sequence[str], holders: Mapping[str, tuple[str, ...]], now: float
    ) -> list[Effect]:
        """Report each shortage once, when the reports are complete."""
        theirs = {node: self._foreseen[node] for node in placement}
        effects: list[Effect] = []
        for node, need in needs(theirs, placement, holders).items():
            room = self.rooms.get(node)
            if room is not None and need.total_bytes > room.free and self._told.get(node) != need:
                self._told[node] = need
                effects.append(Record(ev.Noted(t=now, node=node, message=_shortage(need, room))))
        self._foreseen.clear()
        return effects


def _shortage(need: Need, room: msg.Room) -> str:
    parts = {"two images of each rank": need.slots_bytes, "replicas of other nodes": need.replicas_bytes}
    told = ", ".join(f"{what} {memory_size(count)}" for what, count in parts.items() if count)
    consequence = (
        "all ranks will save to shared storage"
        if need.slots_bytes > room.free
        else "replicas will be kept elsewhere, or only in storage"
    )
    return (
        f"checkpoints will take {memory_size(need.total_bytes)} of this node's memory ({told}), but only "
        f"{memory_size(room.free)} is available (limit: {room.limit}); "
        f"ask Slurm for more --mem, or {consequence}"
    )


# ---- what is restored


class RestoreChoice:
    """`chosen` is what the newest launched attempt restores."""

    def __init__(self, state: RunState, copies: Copies) -> None:
        self._state, self._copies = state, copies
        self.rollbacks: list[Rollback] = []
        self.chosen: RestorePlan | None = None

    def is_void(self, key: StateId) -> bool:
        return bool(self.rollbacks) and any(back.voids(*key) for back in self.rollbacks)

    def go_back(self, step: int, now: float) -> None:
        self.rollbacks.append(Rollback(step, self._state.attempt, now))

    def found_rollbacks(self, rollbacks: Iterable[Rollback]) -> None:
        """Take in the rollbacks found on storage."""
        self.rollbacks += [back for back in rollbacks if back not in self.rollbacks]

    def missed_rollback(self) -> int | None:
        """The step that the newest attempt should have gone back to: the rollback was written to storage
        while no supervisor could be asked, or this one did not know of it yet when it chose."""
        begun, chosen = self._state.attempt, self.chosen
        missed = [back.step for back in self.rollbacks if begun <= back.attempt]
        if chosen is not None:
            missed += [back.step for back in self.rollbacks if back.voids(chosen.step, chosen.attempt)]
        return min(missed, default=None)

    def choose(self, launch: Launch, shared: Mapping[StateId, int], now: float) -> list[Effect]:
        """Choose the state of an attempt. Called once per attempt, because all its nodes must continue from
        one state."""
        on_shared = {key.step: shared[key] for key in sorted(shared, key=im.age)}
        failed, count = self._state.failed_to_restore(), self._state.ranks_per_node
        chosen = self.chosen = cp.plan_restore(self._copies, on_shared, launch.placement, count, failed)
        reason, saved = chosen.reason, max(self._state.lost_step, self._state.saved_step or 0)
        if not chosen.tier and saved:
            reason = f"no whole copy is left of step {saved}, which was the newest, or of an older one"
        if launch.spare:
            reason += "; this is for the case that ranks that live have no newer step"
        return [
            Record(
                ev.RestorePlanned(
                    t=now, attempt=launch.attempt, step=chosen.step, tier=chosen.tier,
                    expected_s=round(chosen.expected_s, 6), tiers=dict(chosen.tiers), reason=reason,
                )
            )
        ]  # fmt: skip

    def unreadable(self) -> tuple[int, ...]:
        """The steps in the shared tier for which ranks may take an older one if they cannot read them."""
        return tuple(sorted(key.step for key in self._state.failed_to_restore() if not key.attempt))

    def message(self, node: str, ranks: range) -> msg.Restore | None:
        """Return what one node's ranks restore; None: they look in the shared tier themselves. Nearly all
        nodes have nearly all images in their own memory. To name other sources for these, too, would take
        most of the time of a launch of thousands of nodes."""
        chosen = self.chosen
        if chosen is None or chosen.tier != im.MEMORY:
            return None
        key = StateId(chosen.step, chosen.attempt)
        sources = {rank: () if chosen.world else self._sources(key, rank, node) for rank in ranks}
        return msg.Restore(step=chosen.step, attempt=chosen.attempt, ranks=sources, world=chosen.world)

    def _sources(self, key: StateId, rank: int, node: str) -> tuple[Source, ...]:
        if self._copies.has_whole(key, rank, node) is not None:
            return ()
        return self._copies.sources(key, rank, node)

    def sources(self, node: str, ask: msg.AskSources) -> Effect:
        """Return the sources for a node that cannot use the image in its own memory."""
        found = self._copies.sources(StateId(ask.step, ask.attempt), ask.rank, node)
        sources = tuple(one for one in found if (one.node, one.tier) != (node, im.MEMORY))
        return Send(node, msg.Sources(step=ask.step, attempt=ask.attempt, rank=ask.rank, sources=sources))


# ---- before the nodes go

# How long others are tried at least after one node could not write: its storage may recover meanwhile.
GATHER_LIMIT_S = 15.0
# To put a state together may take this many times as long as its size says. Transfers that stand still are
# noticed, and reported, within seconds.
GATHER_TIMES = 20.0


class FinalWrite:
    """`secured`: the newest state is written, or none can be. Times are Unix times in seconds."""

    def __init__(self, copies: Copies, commit: Commit, replicas: Replicas, writes: Writes) -> None:
        self._copies, self._holders = copies, copies.holders
        self._commit, self._replicas, self._writes = commit, replicas, writes
        self._gather_at, self._not_gathered = -math.inf, 0
        self._hopeless: set[StateId] = set()  # no node has memory to put these together
        self._kept_older = False  # older states stayed when room was made, in case the newest has none
        self.secured = False
        self._gathered: StateId | None = None
        self.gathers_until = -math.inf  # at the latest nodes have put images of this state together by then

    def not_gathered(self, now: float) -> None:
        """An image could not be put together. What failed just now fails again here, but maybe not on another
        node."""
        self._gather_at, self.gathers_until = now + RETRY_S, now
        self._not_gathered += 1

    def write_newest(self, now: float) -> list[Effect]:
        """Have the newest state written, without anything after which ranks could not save the next one. What
        nodes would have to put together first is left out."""
        keys = self._writes.unsaved()
        return self._write(keys[0], now) if keys else []

    def _write(self, key: StateId, now: float) -> list[Effect]:
        """Have a state written, if that is due; nothing, unless it is whole."""
        return self._writes.write(im.SHARED, key, now) if self._writes.ready(key, now) else []

    def secure(self, now: float) -> list[Effect]:
        """Order what is due. Called repeatedly until `secured`."""
        keys = [key for key in self._writes.unsaved() if key not in self._hopeless] or self._press()
        self.secured = not keys
        if not keys or self._writes.is_writing(im.SHARED):
            return []
        key, unfit = keys[0], self._writes.unfit(im.SHARED, now)
        writers = [self._writes.writer(key, rank, unfit) for rank in range(self._copies.world(key))]
        ranks = [rank for rank, node in enumerate(writers) if not node or node in unfit]
        whole = all(writers)
        tried_until = self._writes.retries.failed_at(im.SHARED) + GATHER_LIMIT_S
        late = whole and now > max(tried_until, self.gathers_until)
        if not ranks or late:
            return self._write(key, now)
        effects = self._have_room_made(keys)
        takers = self._with_room(unfit) or ([] if whole else self._with_room(()))
        if not takers and not whole:
            self._hopeless.add(key)
        if takers and now >= self._gather_at:
            return effects + self._gather(key, ranks, takers, now)
        return effects + self._write(key, now)

    def _press(self) -> list[StateId]:
        """Try again to write the newest state that had no room to be gathered. Older states are in the shared
        tier by now, or had no room either, and are dropped."""
        if not self._kept_older:
            return []
        self._kept_older = False
        newest = self._writes.unsaved()[:1]
        self._hopeless.difference_update(newest)
        for node in self._holders.values():
            node.slotless = False
        return newest

    def _with_room(self, without: Collection[str]) -> list[str]:
        return [name for name, node in self._holders.items() if not node.full and name not in without]

    def _gather(self, key: StateId, ranks: Iterable[int], takers: Sequence[str], now: float) -> list[Effect]:
        """Have these images put together on nodes that can write them: they exist only in parts, or on nodes
        that could not write just now."""
        if key != self._gathered:
            self._gathered = key
            self.gathers_until = now + GATHER_TIMES * self._copies.size_bytes(key) / RATES[im.PEER]
        effects: list[Effect] = []
        for number, rank in enumerate(ranks):
            holder = takers[(number + self._not_gathered) % len(takers)]
            sources = self._copies.sources(key, rank, holder)
            order = msg.Replicate(step=key.step, attempt=key.attempt, rank=rank, part=im.ALL, sources=sources)
            effects += self._replicas.order(holder, order)
        return effects

    def _have_room_made(self, keys: list[StateId]) -> list[Effect]:
        """Ask each node once to make room. It may have memory now although it had refused some: ranks save no
        more, and everything older is in the shared tier unless it is one of these."""
        fresh = {name: node for name, node in self._holders.items() if not node.slotless}
        for node in fresh.values():
            node.full, node.slotless = False, True
            self._kept_older = len(keys) > 1
        older: list[Effect] = []
        if fresh and len(keys) == 1:
            self._commit.go_on_from(keys[0])
            older = self._replicas.give_up_older(keys[0], fresh)
        return [*older, *(Send(name, msg.GiveSlotsUp()) for name in fresh)]


# ---- all of it

# Steps that some rank could not save; other ranks' images of them may still be reported.
VOIDS_KEPT = 16
# If a rank has reported a later save, and ranks could not save this often since, a missing image is not on
# its way: images are reported once they are copied.
VOIDS_AFTER = 2


class Checkpoints:
    """All decisions about checkpoints. `copies` is what the agents report to hold.

    The caller calls `look` from time to time. While `replicas` are under way, it calls `replicas.slice` again
    and again, with other work in between, and reports with `replicas.took` how long each call took.
    """

    def __init__(self, state: RunState, next_save: Callable[[], NextSave | None] = lambda: None) -> None:
        self._state = state
        self.copies = Copies()
        self._holders = self.copies.holders
        self._commit = Commit(state, self.copies)
        self.replicas = Replicas(state, self.copies, self._commit)
        self.writes = Writes(state, self.copies, next_save)
        self.restore = RestoreChoice(state, self.copies)
        self._shortages = Shortages()
        self._held_at = -math.inf  # the last report of an image
        self._void: deque[StateId] = deque(maxlen=VOIDS_KEPT)
        self._told: dict[int, int] = {}  # by rank, the newest step of this attempt that it saved or skipped
        self.final_write = FinalWrite(self.copies, self._commit, self.replicas, self.writes)
        self._collecting = Collecting(state, self.copies, self.replicas, self._shortages.rooms)

    # ---- agents

    def on_agent_joined(self, node: str, hello: msg.Hello, now: float) -> list[Effect]:
        """An agent joined, possibly again: replace what was known about its copies."""
        effects: list[Effect] = []
        before = self._holders.get(node)
        if before is not None and before.incarnation != hello.incarnation:
            effects += self.writes.on_node_lost(node, f"the agent of {node} restarted", now)
        held = {report.on(node) for report in hello.copies}
        gone = [copy for copy in self.copies.on(node) if copy not in held]
        for copy in gone:  # dropped as damaged, maybe, and its word of that was lost with the connection
            self._commit.on_copy_corrupt(copy, f"{node} no longer has its image")
        if gone:
            self._gone(now)
        self.copies.drop_where(node=node)
        self._holders[node] = Holder(hello.address, hello.data_port, hello.incarnation)
        self.replicas.on_agent_joined(node, hello.domain)
        self._shortages.on_agent_joined(node, hello.room)
        effects += self.writes.on_agent_joined(node)
        return [*effects, *self._held(node, hello.copies, now), *self.replicas.tell_safe(node)]

    def on_node_lost(self, node: str, now: float) -> list[Effect]:
        self.copies.drop_where(node=node)
        self._holders.pop(node, None)
        self._shortages.on_node_lost(node)
        self.replicas.on_node_lost(node)
        self._gone(now)  # what it held for others needs another place
        return self.writes.on_node_lost(node, f"node {node} was lost", now)

    def without(self, nodes: Iterable[str], now: float) -> list[Effect]:
        """Treat the copies of these nodes as lost."""
        return [effect for node in nodes if node in self._holders for effect in self.on_node_lost(node, now)]

    def on_message(self, node: str, message: msg.AboutCheckpoints, now: float) -> list[Effect]:
        if node not in self._holders:  # said before it left
            return []
        match message:
            case msg.Held():
                return self._held(node, message.copies, now)
            case msg.Dropped():
                return self._dropped(node, message, now)
            case msg.Refused():
                self.replicas.on_memory_refused(node)
                return [_noted(node, message.why, now)]
            case msg.Foreseen():
                return self._foreseen(node, message, now)
            case msg.Prefetched():
                return self._prefetched(node, message, now)
            case msg.Unreplicated():
                return self._unreplicated(node, message, now)
            case msg.AskSources():
                return [self.restore.sources(node, message)]
            case msg.Unrestorable():
                return [Record(ev.RestoreFailed(t=now, node=node, **asdict(message)))]
            case msg.WriteReached():
                return self.writes.on_write_reached(node, message, now)
            case msg.WriteProgress():
                self.writes.on_progress(message, now)
                return []
            case msg.Written():
                return self.writes.on_written(node, message, now)
            case _:
                return never(message)

    def _held(self, node: str, reports: Iterable[msg.CopyReport], now: float) -> list[Effect]:
        effects: list[Effect] = []
        self._held_at = now
        for report in reports:
            key = StateId(report.step, report.attempt)
            if report.tier == im.MEMORY:
                self._tells(report.rank, key)
            # It was away when this was sent, and has no room until it knows.
            if key in self._void or self.restore.is_void(key):
                effects.append(Send(node, msg.Void(step=key.step, attempt=key.attempt)))
                continue
            copy = report.on(node)
            if self.replicas.gives_up(copy):
                continue
            self.copies.hold(copy)
            self.replicas.on_copy_held(copy)
            self._collecting.on_held(key, now)
            self._commit.on_image_held(key, report.stall_s)
        committed = self._commit.on_time(now)
        # At once, because until the state is replicated, the loss of a node destroys it.
        return [*effects, *committed, *(self.on_time(now) if committed else [])]

    def _dropped(self, node: str, message: msg.Dropped, now: float) -> list[Effect]:
        copy = message.copy.on(node)
        self.copies.drop(copy)
        if message.why:
            self._commit.on_copy_corrupt(copy, f"{node}: {message.why}")
        self._gone(now)
        why = f"copy dropped: {message.why}"
        return [_noted(node, why, now)] if message.why else []

    def _gone(self, now: float) -> None:
        """Note that copies no longer exist."""
        self._commit.broken = True
        self.replicas.order_anew(now)

    def _foreseen(self, node: str, message: msg.Foreseen, now: float) -> list[Effect]:
        self._shortages.on_foreseen(node, message)
        placement = self._state.placement
        if not self._shortages.complete(placement):
            return []
        return self._shortages.look(placement, self.replicas.holders(now), now)

    def _prefetched(self, node: str, message: msg.Prefetched, now: float) -> list[Effect]:
        """Record an image that was brought, if this did not go as planned."""
        if not message.passed_over:
            return []
        fetched = ev.Fetched(
            t=now, attempt=self._state.attempt, node=node, rank=message.rank, tiers=message.tiers,
            why=message.passed_over,
        )  # fmt: skip
        return [Record(fetched)]

    def _unreplicated(self, node: str, message: msg.Unreplicated, now: float) -> list[Effect]:
        self.final_write.not_gathered(now)
        self._collecting.on_replicate_failed(message)
        if not self.replicas.on_replicate_failed(node, message, now):
            return []
        why = f"rank {message.rank} has no replica of step {message.step}: {message.why}"
        return [_noted(node, why, now)]

    # ---- ranks

    def on_save_skipped(self, attempt: int, step: int, rank: int, why: Skip, now: float) -> list[Effect]:
        """A rank could not save, so the step will never be complete."""
        key = StateId(step, attempt)
        self._tells(rank, key)
        if key in self._void or attempt != self._state.attempt:
            return []
        void = self._make_void(key, f"rank {rank}: {why.value}", now)
        effects = void + self._give_incomplete_up(attempt, now)
        if why is Skip.REFUSED:  # its state outgrew the node: started again, all ranks save to storage
            by = f"jurymast, because rank {rank}: {why.value}"
            effects.append(Record(ev.Asked(t=now, what=ev.RELAUNCH, by=by)))
        return effects

    def _give_incomplete_up(self, attempt: int, now: float) -> list[Effect]:
        """Give up states that will never be complete, for example because an image was dropped while no
        supervisor listened: they occupy the ranks' memory."""
        if not self._all_heard() or self._state.phase is not Phase.RUNNING:
            return []
        voids = [step for step, of in self._void if of == attempt]
        late = [
            key
            for key in takewhile(self._commit.is_newer, self.copies.newest_first())
            if key.attempt == attempt and sum(step > key.step for step in voids) >= VOIDS_AFTER
        ]
        why = "some of its images are lost"
        lost = [key for key in late if not self.copies.restorable(key) and self._all_told(key)]
        return [effect for key in lost for effect in self._make_void(key, why, now)]

    def _tells(self, rank: int, key: StateId) -> None:
        if key.attempt == self._state.attempt:
            self._told[rank] = max(key.step, self._told.get(rank, 0))

    def _all_told(self, key: StateId) -> bool:
        """Whether every rank whose image seems to be missing has reported a later one, so that nothing is on
        its way."""
        return all(self._told.get(rank, 0) > key.step for rank in self.copies.not_in_memory(key))

    def _all_heard(self) -> bool:
        """Whether all nodes that an earlier supervisor knew have reported. A node that has not may hold what
        seems to be missing; one that never joined holds nothing."""
        return not any(
            node.incarnation and not node.heard and (node.role is not Role.FAILED or node.may_return)
            for node in self._state.nodes.values()
            if node.name not in self._holders
        )

    def _make_void(self, key: StateId, why: str, now: float) -> list[Effect]:
        """Have agents give up what they hold of a state that is of no use."""
        self._void.append(key)
        self._commit.void(key)
        self.copies.drop_where(key, tiers=(im.MEMORY, im.PEER))
        void = msg.Void(step=key.step, attempt=key.attempt)
        saved = ev.Saved(
            t=now, attempt=key.attempt, step=key.step, tier=im.MEMORY, ok=False, stall_s=0.0, error=why
        )
        return [*(Send(node, void) for node in self._holders), Record(saved)]

    def on_saved_together(self, key: StateId, size_bytes: int) -> None:
        """All ranks have saved this to shared storage together, as they do where a node lacks the memory."""
        if not self.restore.is_void(key):
            self.writes.shared[key] = size_bytes

    def on_restored(self, attempt: int, step: int, tier: str) -> None:
        """Note that the ranks continue from this state."""
        if tier not in (im.MEMORY, im.LIVE):
            self.writes.on_restored(attempt, step)

    # ---- now and then

    def on_time(self, now: float) -> list[Effect]:
        """Order what is due; cheap if nothing is."""
        effects = self._give_useless_up(now)
        if self._commit.key is not None:
            self.replicas.look(self._commit.key, now)
            effects += self.writes.look(self._commit.key, now)
        return effects + self.writes.look_for_late(now)

    def _give_useless_up(self, now: float) -> list[Effect]:
        """Give up a committed state of which an image no longer exists: an older state counts again."""
        key, why = self._commit.key, self._commit.damaged
        if key is None or not self._commit.useless() or not self._all_heard():
            return []
        older = [one for one in self.copies.newest_first() if im.age(one) < im.age(key)]
        self._commit.go_on_from(next((one for one in older if self.copies.in_memory(one)), None))
        self._gone(now)
        return self._make_void(key, why, now)

    # ---- restoring

    def go_back(self, step: int, now: float) -> list[Effect]:
        """Void everything newer than `step`, including what ranks save before they stop."""
        self.restore.go_back(step, now)
        forget = msg.ForgetNewer(step=step)
        effects: list[Effect] = [Send(node, forget) for node in self._holders]
        for key in self.copies.newest_first():
            if key.step > step:
                self.copies.drop_where(key)
        self._commit.go_on_from(None)
        self._gone(now)
        return effects + self.writes.go_back(step, now)

    def choose(self, launch: Launch, now: float) -> list[Effect]:
        """Decide what this attempt restores; `restore.message` tells the nodes."""
        self._told.clear()
        for holder in self._holders.values():
            holder.slotless = False
        effects = self.restore.choose(launch, self.writes.shared, now)
        chosen = self.restore.chosen
        assert chosen is not None
        if chosen.tier == im.MEMORY:
            self._commit.go_on_from(StateId(chosen.step, chosen.attempt))
        else:  # agents drop their replicas without a word
            self.copies.drop_where(tiers=(im.PEER,))
            self._commit.go_on_from(None)
        self._gone(now)
        return effects

    @property
    def saved_on_shared(self) -> int:
        """The newest step known to be in the shared tier, by the journal or by the choice; 0 for none."""
        chosen = self.restore.chosen
        found = chosen.step if chosen is not None and chosen.tier == im.SHARED else 0
        return max(found, self._state.saved_on(im.SHARED))

    def on_storage_read(
        self, shared: Mapping[StateId, int], rollbacks: Iterable[Rollback], now: float
    ) -> list[Effect]:
        """Take in what earlier supervisors, attempts and runs left there: states, and their sizes in
        bytes."""
        self.writes.shared = {**shared, **self.writes.shared}
        self.restore.found_rollbacks(rollbacks)
        void = [copy for copy in self.copies.every() if self.restore.is_void(copy.key)]
        for copy in void:
            self.copies.drop(copy)
        if self._commit.key is not None and self.restore.is_void(self._commit.key):
            self._commit.go_on_from(None)
        if void:
            self._gone(now)
        told = dict.fromkeys((copy.node, *copy.key) for copy in void)
        return [Send(node, msg.Void(step=step, attempt=attempt)) for node, step, attempt in told]

    # ---- before the nodes go

    def unsaved(self) -> str:
        """Say what would be lost with these nodes; "" for nothing."""
        keys = self.writes.unsaved()
        return f"the checkpoint of step {keys[0][0]}" if keys else ""

    def secure(self, now: float, *, for_good: bool = True) -> list[Effect]:
        """Write the newest state to the shared tier, or else the one before it. To be called repeatedly until
        `final_write.secured`: it is written, or none can be. Not `for_good`: training may go on."""
        write = self.final_write.secure if for_good else self.final_write.write_newest
        return self.writes.look_for_late(now) + write(now)

    def reshard(self, world: int, now: float) -> tuple[list[Effect], str]:
        """Have the newest state brought, if it is of another number of ranks than `world`, to where these can
        restore it: to the memory of every node, or else to shared storage. Return also what is waited for; ""
        for nothing. To be called repeatedly, and after all that is left has been reported."""
        newest = next(iter(self.writes.unsaved()), None)
        if newest is None or self.copies.world(newest) == world:
            return [], ""
        collected = self._collecting.look(newest, now)
        if collected is not None:
            return collected
        effects = self.secure(now)
        if self.final_write.secured:
            return effects, ""
        return effects, f"{self.unsaved()}, which is written for {world} ranks"

    @property
    def moved_at(self) -> float:
        """When the newest state last got closer to the shared tier; in the future while nodes may still be
        bringing it together, of which they report only the end."""
        return max(self.writes.moved_at, self._held_at, self.final_write.gathers_until)

    def write_s(self, now: float) -> float:
        """Return how long it takes to write the newest committed state to shared storage."""
        return 0.0 if self._commit.key is None else self.writes.takes_s(self._commit.key, now)

    def hasten(self, now: float, until: float = -math.inf) -> list[Effect]:
        """Have the newest committed state written to shared storage at once: the nodes may go soon, or at
        `until`."""
        if self._commit.key is None:
            return []
        self.writes.hasten(self._commit.key, now, until)
        return self.on_time(now)

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        for copy in self.copies.every():
            assert copy.node in self._holders, f"{copy.node} is not here, and counts as a holder"
            assert not self.restore.is_void(copy.key), f"{copy.key} was rolled back, and still counts"
        self._commit.check()
        self.replicas.check()
        self.writes.check()


def _noted(node: str, text: str, now: float) -> Record:
    return Record(ev.Noted(t=now, node=node, message=text))
