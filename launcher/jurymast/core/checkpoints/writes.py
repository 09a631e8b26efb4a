"""Brings committed states to local, shared and object storage: when, by which nodes, and with what result.

A write is ordered by `messages.Write`. There is one per tier at a time. It fails with the first node that
fails or is lost, and is tried later with the state that is newest by then. If other nodes have the same whole
images, they then write what the failed node has not written.

To shared storage, the nodes that have images of a state write it together, as one checkpoint. They do so in
phases (`messages.WritePhase`). Each node says when it has reached the end of a phase, and the next one is
ordered when all have. What they tell each other lies in files, whose names are known and which are there by
then; so nobody looks for anything there before it has come.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import takewhile

from jurymast.core.checkpoints.agreement import NextSave
from jurymast.core.checkpoints.copies import RATES, Copies, Reachability, Retries
from jurymast.core.judges.cadence import durable_interval_s, durable_share
from jurymast.core.judges.forecast import IDLE_SHARE, Saving
from jurymast.core.run.recording import copied
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Send
from jurymast.core.state.images import StateId
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.run import RunState

# A copy that takes this long, and three times as long as the one before, is slower than storage should be.
LATE_S = 15.0
LATE_TIMES = 3.0
# Extra time for the first one: its process has to start and import torch.
FIRST_S = 15.0


def durable_every_s(state: RunState, took_s: float, now: float) -> float | None:
    """Return the seconds between durable copies, each of which takes `took_s`, that lose least by what is
    known of saves and failures; None until both are. The tiers from which the run was restored
    show how many failures the tiers in memory did not survive."""
    known, settings = state.cadence, state.settings
    if known is None or not (known.stall_s and known.mtbf_s):
        return None
    share = durable_share(
        *state.restores(),
        copies_elsewhere=bool(settings.replicas) and len(state.nodes) > 1,
    )
    cheap = Saving(known.stall_s, known.copy_s, known.slowdown)
    durable = Saving(0.0, took_s, known.slowdown)
    return durable_interval_s(cheap, durable, known.mtbf_s, share, settings.max_loss_s, now - state.began_at)


def usual_s(state: RunState, tier: str, size_bytes: int, nodes: int) -> float:
    """Return how long a copy to the tier takes: as long as the last one, or as its size says."""
    known = state.saved.get(tier)
    if known is not None and known.seconds:
        return known.seconds
    return FIRST_S + size_bytes / (RATES[tier] * nodes)


def late_after_s(state: RunState, tier: str, size_bytes: int, nodes: int) -> float:
    """Return how long a copy to the tier may take before the user is told that the storage is slow, or
    hangs."""
    return LATE_S + LATE_TIMES * usual_s(state, tier, size_bytes, nodes)


SHARED_PAUSE_MIN_S = 1.0
# Of two intervals between saves, so much is left just after a save.
JUST_AFTER = 1.9
# After a warning that the job ends soon (Slurm's comes 2 to 3 minutes before), storage is not left idle for
# this long.
HASTE_S = 300.0
# A node gives up its part once nothing of it has got to storage for this long, whatever its size: this is
# longer than the replacement of a file server takes.
STILL_LIMIT_S = 600.0
# If no node has made progress for this long, those that are behind have lost the write. Hanging storage they
# notice, and report, earlier.
WRITE_LIMIT_S = 1.5 * STILL_LIMIT_S
# A lead that fails removes what is there, and then reports why. That is the reason for people to see, so who
# follows and finds nothing there waits this long to be cancelled before it reports that.
GIVEN_UP_S = 60.0
# Phases in which only the lead has something to do.
ALONE = (WritePhase.OPEN, WritePhase.SHARE_OUT, WritePhase.SEAL)


@dataclass
class OpenWrite:
    """One state on its way to a tier. `waiting`: nodes that have not reported the end, and their orders; from
    `late_at` on the write takes longer than it should. `lead` brings the parts of all nodes together; "":
    nobody does. `behind`: the nodes that have not reached the end of this `phase`. `moved_at`: when a node
    last reported progress."""

    id: str
    tier: str
    key: StateId
    started_at: float
    waiting: dict[str, msg.Write]
    late_at: float
    lead: str
    size_bytes: int = 0
    phase: WritePhase = WritePhase.OPEN
    behind: set[str] = field(default_factory=set)
    moved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.moved_at = self.started_at
        self.begin(WritePhase.OPEN)

    def begin(self, phase: WritePhase) -> None:
        self.phase = phase
        self.behind = {self.lead} if self.lead and phase in ALONE else set(self.waiting)

    def order(self) -> msg.ContinueWrite:
        """Return the order to go on with this phase."""
        shares_out = self.phase is WritePhase.SHARE_OUT
        parts = tuple(order.ranks[0] for order in self.waiting.values()) if shares_out else ()
        return msg.ContinueWrite(id=self.id, phase=self.phase, parts=parts)


class Writes:
    """Decides about writes, and when one that failed is tried again (`retries`, by tier). `shared` maps the
    states that are complete in the shared tier to their size in bytes. Times are Unix times in seconds."""

    def __init__(
        self, state: RunState, copies: Copies, next_save: Callable[[], NextSave | None] = lambda: None
    ) -> None:
        self._state, self._copies, self._holders = state, copies, copies.holders
        self._next_save = next_save
        self.shared: dict[StateId, int] = {}
        self._under_way: dict[str, OpenWrite] = {}  # by tier
        self._next_at: dict[str, float] = {}
        self._ended_at: dict[str, float] = {}
        self._tried: dict[str, StateId] = {}
        self._gone: dict[str, StateId] = {}  # by tier, whose last write found an image gone
        self.retries = Retries()
        self._reach = Reachability(tries=1)
        self._numbers = itertools.count(1)
        self._newest_object: StateId = StateId(-1, -1)
        self._wrote_before = False
        self.moved_at = -math.inf  # the last progress of any write
        self._hastened: StateId | None = None  # this state, or a newer one, is wanted there at once
        self._hasty_until = -math.inf

    @property
    def any_under_way(self) -> bool:
        return bool(self._under_way)

    def knows(self, id: str) -> bool:
        return any(write.id == id for write in self._under_way.values())

    def is_writing(self, tier: str) -> bool:
        return tier in self._under_way

    def free(self, tier: str, now: float) -> bool:
        """Whether no write to this tier is under way, and its last failure is some time ago."""
        return not self.is_writing(tier) and self.retries.due(tier, now)

    def ready(self, key: StateId, now: float) -> bool:
        """Whether this state can be written to shared storage now, in a hurry. What one node could not write
        others write at once, if they have it: only a second node's failure says something about the
        storage."""
        if self.is_writing(im.SHARED):
            return False
        unfit = self.unfit(im.SHARED, now)
        writers = (self.writer(key, rank, unfit) for rank in range(self._copies.world(key)))
        if len(unfit) == 1 and all(node and node not in unfit for node in writers):
            return now >= self.retries.calm_at(im.SHARED)
        return self.retries.due(im.SHARED, now, hurry=True)

    def due_at(self, tier: str) -> float:
        """Return when the next write to the tier may begin, if none is under way; 0.0: at once."""
        return self._next_at.get(tier, 0.0)

    def takes_s(self, key: StateId, now: float) -> float:
        """Return how long it takes to write this state to shared storage, as far as that was measured: a
        write that is under way may show that storage is slower by now."""
        nodes = max(1, len(self._state.placement))
        usual = usual_s(self._state, im.SHARED, self._copies.size_bytes(key), nodes)
        write = self._under_way.get(im.SHARED)
        return usual if write is None else max(usual, now - write.started_at)

    def hasten(self, key: StateId, now: float, until: float) -> None:
        """Have this state, or a newer one, written to shared storage as soon as no other write is under way
        (that one may be the last to succeed), and for a while, or `until` later, each that is the newest when
        a write ends."""
        newest = max(map(im.age, self.shared), default=(-1, -1))
        self._hastened = key if im.age(key) > newest else None
        self._hasty_until = max(now + HASTE_S, until)

    # ---- beginning

    def look(self, key: StateId, now: float) -> list[Effect]:
        """Have the committed state written to every tier where that is due."""
        settings = self._state.settings
        effects: list[Effect] = []
        if settings.local_path and self._due(im.LOCAL, key, now):
            effects += self.write(im.LOCAL, key, now)
        if self._due(im.SHARED, key, now) and key not in self.shared:
            effects += self.write(im.SHARED, key, now)
        if settings.object_url and self.shared and now >= self._next_at.get(im.OBJECT, 0.0):
            newest = max(self.shared, key=im.age)
            if im.age(newest) > im.age(self._newest_object) and self.free(im.OBJECT, now):
                self._next_at[im.OBJECT] = now + settings.object_every_s
                effects += self.write(im.OBJECT, newest, now)
        return effects

    def _due(self, tier: str, key: StateId, now: float) -> bool:
        hurry = tier == im.SHARED and (self._hastened is not None or now < self._hasty_until)
        idle = self.ready(key, now) if hurry else self.free(tier, now) and now >= self.due_at(tier)
        due = idle and self._tried.get(tier) != key and self._copies.in_memory(key)
        return due and (hurry or not self._costs_a_save(tier, key, now))

    def _costs_a_save(self, tier: str, key: StateId, now: float) -> bool:
        """Whether this state's slots would not be free for the save after the next one, if a write took as
        long as the last one. What takes longer than ranks take from save to save begins just after one; but
        a write that is due waits no longer than that."""
        last = self._state.saved.get(tier)
        if last is None or not self._state.settings.memory:
            return False
        saves = self._next_save()
        due_at = max(self.due_at(tier), self._ended_at.get(tier, -math.inf))
        if saves is None or last.seconds <= saves.every_s or now > due_at + saves.every_s:
            return False
        # The newest save may have the other slot already, though it is not whole everywhere.
        until_s = saves.in_s + (0.0 if key.step < saves.latest else saves.every_s)
        return until_s < min(last.seconds, JUST_AFTER * saves.every_s)

    def write(self, tier: str, key: StateId, now: float) -> list[Effect]:
        """Have the agents copy a state to a tier; does nothing if an image is whole on no node."""
        writers = self._writers(tier, key, now)
        if not writers:
            return []
        name = f"{self._state.epoch:04x}{next(self._numbers):06x}"
        self._tried[tier] = key
        size_bytes = self.shared.get(key, 0) if tier == im.OBJECT else self._copies.size_bytes(key)
        late_at = now + late_after_s(self._state, tier, size_bytes, len(writers))
        world = self._copies.world(key)
        orders = {
            node: msg.Write(
                id=name, tier=tier, step=key.step, attempt=key.attempt, ranks=tuple(ranks), world=world,
                lead=0 in ranks or tier == im.OBJECT, root=self._state.checkpoints,
            )
            for node, ranks in writers.items()
        }  # fmt: skip
        lead = next((node for node, order in orders.items() if order.lead and tier != im.LOCAL), "")
        self._under_way[tier] = OpenWrite(name, tier, key, now, orders, late_at, lead)
        return [Send(node, order) for node, order in orders.items()]

    def _writers(self, tier: str, key: StateId, now: float) -> dict[str, list[int]]:
        """Return the nodes that write, and which ranks' images; empty if the state cannot be written."""
        unfit = self.unfit(tier, now)
        if tier == im.OBJECT:
            here = [node for node in (*self._state.placement, *self._holders) if node in self._holders]
            lead = next((node for node in here if node not in unfit), "")
            return {lead: []} if lead else {}
        writers: dict[str, list[int]] = {}
        for rank in range(self._copies.world(key)):
            node = self.writer(key, rank, unfit)
            if not node:
                return {}
            writers.setdefault(node, []).append(rank)
        return writers

    def unfit(self, tier: str, now: float) -> Set[str]:
        """Return the nodes that could not write there lately. If no node can write, any node may have caused
        it. A node's own disk has no other writer."""
        if tier == im.LOCAL:
            return frozenset()
        failing = {node for node, of in self._reach.given_up(now) if of == tier}
        return frozenset() if failing >= self._holders.keys() else failing

    def writer(self, key: StateId, rank: int, unfit: Set[str]) -> str:
        """Return the node that writes the rank's image, preferably one that is not `unfit` and has it in one
        piece; "" for none."""
        own = self._state.node_of(rank)
        if own in self._holders and own not in unfit and self._copies.has_whole(key, rank, own):
            return own
        copies = [copy for copy in self._copies.of(key, rank) if copy.node in self._holders]
        whole = [copy for copy in copies if copy.part == im.ALL]
        whole.sort(key=lambda copy: (copy.tier != im.MEMORY, copy.tier == im.LOCAL))
        both = [node for node in self._copies.nodes_with_both(key, rank) if node in self._holders]
        return min([*(copy.node for copy in whole), *both], key=lambda node: node in unfit, default="")

    # ---- going on

    def on_progress(self, message: msg.WriteProgress, now: float) -> None:
        """A node has written more of its part."""
        for write in self._under_way.values():
            if write.id == message.id:
                self._moved(write, now)

    def _moved(self, write: OpenWrite, now: float) -> None:
        write.moved_at = self.moved_at = now

    def on_write_reached(self, node: str, message: msg.WriteReached, now: float) -> list[Effect]:
        """A node has reached the end of a phase; it may have said so before."""
        write = self._under_way.get(im.SHARED)
        if write is None or write.id != message.id:
            # It has ended, or is an earlier supervisor's: nobody would ever have the node go on.
            return [Send(node, msg.CancelWrite(id=message.id))]
        return self._passed(write, node, now) if message.phase is write.phase else []

    def _passed(self, write: OpenWrite, node: str, now: float) -> list[Effect]:
        """A node has nothing left to do in this phase. Order the next one after the last node."""
        if node in write.behind:
            self._moved(write, now)
        write.behind.discard(node)
        if write.behind or write.phase is WritePhase.SEAL:
            return []
        write.begin(WritePhase(write.phase + 1))
        order = write.order()
        return [Send(one, order) for one in write.waiting if one in write.behind]

    # ---- ending

    def on_written(self, node: str, message: msg.Written, now: float) -> list[Effect]:
        write = self._under_way.get(message.tier)
        if write is None or write.id != message.id or node not in write.waiting:
            return []
        pair = node, message.tier
        if message.gone and write.key != self._gone.get(message.tier):
            self._gone[message.tier] = write.key  # what ranks have saved instead is written next
            self._tried.pop(write.tier, None)
            del write.waiting[node]
            return self._close(write, now)
        if not message.ok:
            self._reach.failed(pair, now)
            return self._failed(write, node, f"{node}: {message.why}", now)
        self._reach.worked(pair)
        write.size_bytes += message.size_bytes
        del write.waiting[node]
        # The lead reports after all others, unless a complete checkpoint of this step existed already.
        if node == write.lead or not write.waiting:
            return self._end(write, "", now)
        return self._passed(write, node, now)

    def on_agent_joined(self, node: str) -> list[Effect]:
        """A node's agent is here again: repeat its orders, which it may have missed."""
        effects: list[Effect] = []
        for write in self._under_way.values():
            if node in write.waiting:
                effects.append(Send(node, write.waiting[node]))
                if write.phase > WritePhase.OPEN and node in write.behind:
                    effects.append(Send(node, write.order()))
        return effects

    def on_node_lost(self, node: str, why: str, now: float) -> list[Effect]:
        """The node is lost and will not report on its orders. The tier has not failed: what others hold is
        written soon, for there may be little time left."""
        self._reach.forget(node)
        theirs = [write for write in self._under_way.values() if node in write.waiting]
        return [effect for write in theirs for effect in self._failed(write, node, why, now, lost=True)]

    def go_back(self, step: int, now: float) -> list[Effect]:
        """The run goes back: nothing newer is written or counts."""
        why = f"the run goes back to step {step}"
        newer = [write for write in self._under_way.values() if write.key.step > step]
        effects = [effect for write in newer for effect in self._end(write, why, now)]
        self.shared = {one: size for one, size in self.shared.items() if one[0] <= step}
        return effects

    def on_restored(self, attempt: int, step: int) -> None:
        """An attempt restored from storage. Newer states there that earlier attempts wrote no longer count:
        they were passed over as damaged, or somebody has moved them away."""
        self.shared = {one: size for one, size in self.shared.items() if one[0] <= step or one[1] >= attempt}

    def look_for_late(self, now: float) -> list[Effect]:
        """End writes that make no progress, and report once those that take longer than they should."""
        effects: list[Effect] = []
        for write in list(self._under_way.values()):
            if now > write.moved_at + WRITE_LIMIT_S:
                why = f"{min(write.behind)} said nothing for {WRITE_LIMIT_S:.0f} s"
                effects += self._end(write, why, now)
            elif now > write.late_at:
                write.late_at = math.inf
                why = f"not written after {now - write.started_at:.0f} s: the storage is slow or hangs"
                effects.append(copied(write.tier, write.key, now, why=why))
        return effects

    def _failed(
        self, write: OpenWrite, node: str, why: str, now: float, *, lost: bool = False
    ) -> list[Effect]:
        """A node will never finish its part."""
        del write.waiting[node]
        return self._end(write, why, now, lost=lost)

    def _end(self, write: OpenWrite, why: str, now: float, *, lost: bool = False) -> list[Effect]:
        """End a write: it is complete, or (`why`) will not be, and then no node continues. `lost`: because a
        node was lost."""
        effects = self._close(write, now)
        took_s = now - write.started_at
        if why:
            self._tried.pop(write.tier, None)
            is_news = (
                self.retries.interrupted(write.tier, now)
                if lost
                else self.retries.failed(write.tier, why, now)
            )
            if not is_news:
                return effects
        else:
            self._succeeded(write, took_s, now)
        told = copied(write.tier, write.key, now, size_bytes=write.size_bytes, why=why, seconds=took_s)
        return [*effects, told]

    def _close(self, write: OpenWrite, now: float) -> list[Effect]:
        """Have no node continue with a write."""
        del self._under_way[write.tier]
        self._ended_at[write.tier] = now
        cancel = msg.CancelWrite(id=write.id)
        return [Send(node, cancel) for node in sorted(write.waiting)]

    def _succeeded(self, write: OpenWrite, took_s: float, now: float) -> None:
        self.retries.succeeded(write.tier)
        if write.tier == im.SHARED:
            self.shared[write.key] = write.size_bytes
            if self._hastened is not None and im.age(write.key) >= im.age(self._hastened):
                self._hastened = None
            self._next_at[im.SHARED] = now + self._shared_pause_s(took_s, now)
        elif write.tier == im.OBJECT:
            self._newest_object = write.key

    def _shared_pause_s(self, took_s: float, now: float) -> float:
        """The pause between writes. The first write takes longer than any other: its process has to start."""
        settings = self._state.settings
        if settings.shared_every_s is not None:
            return max(0.0, settings.shared_every_s - took_s)
        if settings.cadence_steps is not None or settings.cadence_s is not None:
            return 0.0
        first, self._wrote_before = not self._wrote_before, True
        least_s = SHARED_PAUSE_MIN_S if first else max(SHARED_PAUSE_MIN_S, IDLE_SHARE * took_s)
        return max(least_s, (durable_every_s(self._state, took_s, now) or 0.0) - took_s)

    # ---- what is not there yet

    def unsaved(self) -> list[StateId]:
        """Return the states that would be lost with these nodes, the newest first."""
        newest = max(map(im.age, self.shared), default=(-1, -1))
        newer = takewhile(lambda key: im.age(key) > newest, self._copies.newest_first())
        return [key for key in newer if self._copies.restorable(key)]

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        for tier, write in self._under_way.items():
            assert write.tier == tier, f"a write to {write.tier} is counted as one to {tier}"
            assert write.behind, f"the write to {tier} waits for nobody"
            assert write.behind <= write.waiting.keys(), f"the write to {tier} waits for nodes that are done"
            gone = write.waiting.keys() - self._holders.keys()
            assert not gone, f"the write to {tier} waits for {', '.join(sorted(gone))}, not here"
