"""A node whose keeper's machine meets everything at once, by seed: ranks that save, die and come back as
others, orders in any sequence, readers that take their time, sources that fail, and memory that is short. It
checks what must always hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from jurymast.core.keeper import effects as do
from jurymast.core.keeper.effects import KeptCopy
from jurymast.core.keeper.holding import SLOTS
from jurymast.core.keeper.machine import KeeperMachine
from jurymast.core.keeper.restores import Filled, Found
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, COMMON, LOCAL, MEMORY, OWN, PEER, ImageId, StateId, age
from jurymast.core.state.messages import Room

MIB = 1 << 20
SIZE, COMMON_BYTES, BEHIND = 5 * MIB, 3 * MIB, 1000
WANTS = (SIZE + BEHIND, 9 * MIB)
PLENTY = 1 << 40
Content = dict[str, object]  # by part, what lies there
READ = ({"ready"}, {"elsewhere"}, {"collected"})  # what ranks hear that can go on


def report(image: ImageId, tier: str, part: str, world: int) -> msg.CopyReport:
    step, attempt, rank = image
    return msg.CopyReport(
        tier=tier, step=step, attempt=attempt, rank=rank, world=world, part=part, size_bytes=SIZE,
        common_bytes=COMMON_BYTES, common_id=f"{step}",
    )  # fmt: skip


def parts(part: str) -> tuple[str, ...]:
    return (COMMON, OWN) if part == ALL else (part,)


@dataclass
class View:
    """What a rank sees of a slot. `mine`: it may write there."""

    buffer: int = 0
    mine: bool = False
    writing: bool = False
    published: ImageId | None = None


@dataclass
class Rank:
    number: int = -1
    restore: str = "pending"
    refused: bool = False
    found: ImageId | None = None
    slots: list[View] = field(default_factory=lambda: [View() for _ in range(SLOTS)])


Waiting = do.Measure | do.Reserve | do.Hash | do.FindImage | do.Verify | do.Fetch | msg.AskSources


class KeeperNode:
    """`events` random ones, and then a time in which all goes well."""

    def __init__(self, seed: int, count: int = 0) -> None:
        """`count`: of ranks, else by chance."""
        self.chance = random.Random(seed)
        self.count = count or self.chance.choice([1, 1, 2])
        self.world = 3 * self.count
        self.machine = KeeperMachine("n1", self.count)
        self.ranks = [Rank() for _ in range(self.count)]
        self.free = self.chance.choice([PLENTY, PLENTY, 60 * MIB, 30 * MIB])
        self.buffers: dict[int, tuple[int, int]] = {}  # capacity, and memory taken
        self.content: dict[int, Content] = {}
        self.served: set[KeptCopy] = set()
        self.waiting: list[Waiting] = []
        self.hurried: set[int] = set()
        self.works: dict[int, Content] = {}  # what was verified, by number
        self.readers: list[tuple[int, Content]] = []
        self.shown: list[tuple[int, Content]] = []  # to ranks of another number
        self.awaited: set[int] = set()
        self.lent: list[int] = []
        self.numbers = 0
        self.attempt = self.step = 0
        self.training = False
        self.safe = (0, -1)  # what the keeper was told of
        self.kept = {self.safe}  # what the newest attempt may need
        self.states: list[StateId] = []
        self.asked: set[tuple[ImageId, str]] = set()
        self.may_go: Callable[[KeptCopy], bool] = lambda copy: False
        self.gone: list[KeptCopy] = []
        self.restored = self.collected = self.replicated = self.failed = 0

    def live(self, events: int) -> None:
        self.launch(None)
        for _ in range(events):
            self.happen()
        self.settle()

    def happen(self) -> None:
        happens = self.chance.choices(
            [self.answer, self.ranks_work, self.order, self.restart, self.read, self.unread, self.flip,
             self.borrow, self.scan],
            [12, 9, 5, 0.6, 1, 2, 0.3, 0.5, 0.2],
        )[0]  # fmt: skip
        happens()

    def settle(self) -> None:
        """Nothing fails any more, and nobody wants anything new."""
        self.free = PLENTY
        self.quiet()
        assert not self.asked, f"nobody was told what came of {self.asked}"
        for rank in self.ranks:
            assert rank.number < 0 or rank.restore != "pending", "a rank waits for what never comes"
        self.launch(None)
        self.quiet()
        for _ in range(3):
            self.step += 1
            for local in range(self.count):
                self.want(local, WANTS[1])
            self.quiet()
            for local in range(self.count):
                assert self.save(local, self.step), f"no slot comes free for local rank {local}"
            self.quiet()
            self.commit(StateId(self.step, self.attempt))
        held = self.machine.holding
        kept = [one for one in held.copies.values() if one.tier != LOCAL]
        assert len(kept) == self.count, "what is passed is not given up"
        assert not held.busy, "memory is never given back"
        assert not held.leaving, "memory is never given back"

    def quiet(self) -> None:
        while self.waiting or self.readers or self.lent:
            self.answer(quietly=True)
            self.unread()
            if self.lent:
                self.give_back()

    # What happens.

    def answer(self, *, quietly: bool = False) -> None:
        """To one of the effects that want one."""
        if not self.waiting:
            return
        effect = self.waiting.pop(self.chance.randrange(len(self.waiting)))
        fails = not quietly and self.chance.random() < 0.15
        match effect:
            case do.Measure():
                taken = {number: allocated for number, (_, allocated) in self.buffers.items()}
                room = Room(self.free - sum(taken.values()), "memory.max")
                self.act(self.machine.on_memory_measured(room, taken))
            case do.Reserve(buffer):
                self.take(buffer, 0, self.buffers[buffer][0])
                self.act(
                    self.machine.on_buffer_reserved(
                        buffer, self.buffers[buffer][1], "no pages" if fails else ""
                    )
                )
            case do.Hash():
                self.hash(effect, fails)
            case do.FindImage(number, image):
                found = None if fails else report(image, PEER, ALL, self.world)
                self.act(
                    self.machine.on_source_found(number, Found(found, WANTS[0], ("a line",) if fails else ()))
                )
            case do.Verify():
                self.verify(effect, fails)
            case do.Fetch():
                self.fetch(effect, fails or effect.number in self.hurried)
            case msg.AskSources(step=step, attempt=attempt, rank=rank):
                sources = () if fails else self.sources(rank)
                answer = msg.Sources(step=step, attempt=attempt, rank=rank, sources=sources)
                self.act(self.machine.on_order(answer))

    def hash(self, effect: do.Hash, fails: bool) -> None:
        image = self.content[effect.buffer].get(OWN)
        assert isinstance(image, ImageId)
        where = effect.local, effect.slot, effect.buffer
        if fails or image.rank != effect.rank:
            self.act(self.machine.on_image_unhashed(*where, effect.rank, image[0], SIZE, "it is damaged"))
        else:
            copy = KeptCopy(report(image, MEMORY, ALL, self.world), effect.buffer)
            self.act(self.machine.on_image_hashed(*where, copy))

    def verify(self, effect: do.Verify, fails: bool) -> None:
        copy = effect.copy
        intact = copy in self.served
        if intact:
            self.works[effect.number] = dict.fromkeys(parts(copy.part), copy.image)
            if fails:
                intact = False
                self.may_go = lambda one: one is copy
                bad = parts(copy.part)[0]
                del self.works[effect.number][bad]
                for buffer, content in self.readers + self.shown:
                    if buffer == copy.buffer:
                        content.pop(bad, None)  # who reads it finds that it is corrupt
        unseen = not fails and intact and self.chance.random() < 0.05
        if unseen:
            del self.works[effect.number]
        self.act(self.machine.on_copy_verified(effect.number, None if unseen else intact))

    def fetch(self, effect: do.Fetch, fails: bool) -> None:
        content, known = self.content[effect.buffer], self.works.get(effect.number, {})
        lacking = [part for part in parts(effect.part) if part not in known]
        for part in lacking:
            others = [
                copy for copy in self.served if copy.buffer == effect.buffer and part in parts(copy.part)
            ]
            assert not others, "a copy is written over"
            content[part] = "half" if fails else effect.image
        self.take(effect.buffer, effect.start, effect.end)
        allocated = self.buffers[effect.buffer][1]
        copy = KeptCopy(report(effect.image, effect.tier, effect.part, self.world), effect.buffer)
        self.failed += fails
        whole = not (fails and lacking)
        behind = BEHIND if effect.behind and self.buffers[effect.buffer][0] >= SIZE + BEHIND else 0
        refused = "no pages" if fails and self.chance.random() < 0.2 else ""
        fetched = Filled(
            copy if whole and not refused else None, behind, {PEER: SIZE}, ("a line",) if fails else (),
            refused, allocated,
        )  # fmt: skip
        self.act(self.machine.on_image_fetched(effect.number, fetched, 1.0))

    def take(self, buffer: int, start: int, end: int) -> None:
        capacity, allocated = self.buffers[buffer]
        assert 0 <= start <= end <= capacity
        self.buffers[buffer] = capacity, min(capacity, max(allocated, end - start))

    # Ranks.

    def ranks_work(self) -> None:
        """Once all have restored, here and elsewhere, they train."""
        answers = {rank.restore for rank in self.ranks if rank.number >= 0}
        if not self.training:
            self.training = answers in READ and self.chance.random() < 0.3
            return
        local = self.chance.randrange(self.count)
        if self.chance.random() < 0.3:
            self.want(local, self.chance.choice(WANTS))
        elif self.chance.random() < 0.2:
            self.step += 1
        else:
            self.save(local, self.step, dies=self.chance.random() < 0.05)

    def want(self, local: int, size: int) -> None:
        self.may_go = lambda copy: copy.image[1] < self.attempt and copy.age != self.safe
        self.act(self.machine.on_memory_wanted(local, size))

    def save(self, local: int, step: int, *, dies: bool = False) -> bool:
        rank = self.ranks[local]
        there = enumerate(rank.slots)
        views = [(number, one) for number, one in there if one.buffer and one.mine and not one.writing]
        image = ImageId(step, self.attempt, rank.number)
        if any(one.published == image for one in rank.slots) or rank.number < 0 or not step:
            return False
        if not views:
            return False
        number, view = self.chance.choice(views)
        assert not any(copy.buffer == view.buffer for copy in self.served), "a rank writes over a copy"
        read = self.readers + self.shown
        assert not any(buffer == view.buffer for buffer, _ in read), "a rank writes what is read"
        view.writing = True
        self.content[view.buffer] = {COMMON: "half", OWN: "half"}
        if dies:
            return False
        self.content[view.buffer] = {COMMON: image, OWN: image}
        view.writing = view.mine = False
        view.published = image
        self.states.append(StateId(step, self.attempt))
        self.act(self.machine.on_image_published(local, number, 0.1))
        return True

    def restart(self) -> None:
        held = [copy.image[:2] for copy in self.served if copy.image[1] <= self.attempt]
        known = [*held, *held, *held, self.chance.choice(self.states)] if self.states else []
        if not known or self.chance.random() < 0.15:
            self.launch(None)
            return
        step, attempt = self.chance.choice(known)
        if self.chance.random() < 0.3:
            self.collect(StateId(step, attempt))
            return
        self.launch(StateId(step, attempt))
        if self.chance.random() < 0.2:  # once more, before that is done
            self.launch(StateId(step, attempt))

    def collect(self, state: StateId) -> None:
        """Another number of ranks restores it: before, the node gets all images."""
        for rank in range(self.world):
            self.replicate(state, rank)
        for _ in range(60):
            self.answer()
        self.launch(state, world=self.world)

    def launch(self, state: StateId | None, numbers: list[int] | None = None, world: int = 0) -> None:
        self.attempt += 1
        self.training = False
        numbers = numbers or self.chance.sample(range(self.world), self.count)
        if self.chance.random() < 0.6 and all(rank.number >= 0 for rank in self.ranks):
            numbers = [rank.number for rank in self.ranks]
        restore = None
        if state is None:
            self.asked.clear()
            self.may_go = lambda copy: copy.tier in (MEMORY, PEER)
            self.safe = (0, -1)
        else:
            told = [self.sources(number) if self.chance.random() < 0.5 else () for number in numbers]
            ranks = {
                number: sources
                for number, sources in zip(numbers, told, strict=True)
                if self.chance.random() < 0.95
            }
            if world:
                ranks = dict.fromkeys(numbers, ())
            restore = msg.Restore(step=state[0], attempt=state[1], ranks=ranks, world=world)
            self.kept = {self.safe, age(state)}
            self.may_go = self.may_make_room
            self.safe = min(self.safe, age(state))
        for rank, number in zip(self.ranks, numbers, strict=True):
            rank.number = number
        self.act(self.machine.on_launch(self.attempt, numbers, self.world, restore, 0.0))

    def may_make_room(self, copy: KeptCopy) -> bool:
        """For what the newest attempt restores."""
        if copy.tier == PEER:
            return copy.age < max(self.kept)
        return copy.tier == MEMORY and copy.image[1] < self.attempt and copy.age not in self.kept

    def sources(self, rank: int) -> tuple[msg.Source, ...]:
        return (msg.Source(tier=PEER, node="n2", hosts=("h",), port=1, part=ALL, rank=rank),)

    # The supervisor.

    def order(self) -> None:
        if not self.states:
            return
        state = self.chance.choice(self.states[-4:])
        kind = self.chance.random()
        if kind < 0.3:
            self.commit(state)
        elif kind < 0.38:
            self.may_go = lambda copy: copy.tier != LOCAL and copy.image[:2] == state
            self.given_up(lambda image: image[:2] == state)
            self.act(self.machine.on_order(msg.Void(step=state[0], attempt=state[1])))
        elif kind < 0.41:
            self.may_go = lambda copy: copy.image[0] > state[0]
            self.given_up(lambda image: image[0] > state[0])
            if self.safe[1] > state[0]:
                self.safe = (0, -1)
            self.act(self.machine.on_order(msg.ForgetNewer(step=state[0])))
        elif kind < 0.43:
            self.act(self.machine.on_order(msg.GiveSlotsUp()))
        else:
            self.replicate(state)

    def commit(self, state: StateId) -> None:
        self.safe = safe = max(self.safe, age(state))
        self.may_go = lambda copy: copy.tier != LOCAL and copy.age < safe
        self.given_up(lambda image: age(image.state) < safe)
        self.act(self.machine.on_order(msg.Committed(step=state[0], attempt=state[1])))

    def given_up(self, which: Callable[[ImageId], bool]) -> None:
        self.asked = {one for one in self.asked if not which(one[0])}

    def replicate(self, state: StateId, rank: int = -1) -> None:
        rank = rank if rank >= 0 else self.chance.randrange(self.world)
        part = self.chance.choice([ALL, OWN, OWN])
        self.asked.add((ImageId(*state, rank), part))
        sources = self.sources(rank)
        order = msg.Replicate(step=state[0], attempt=state[1], rank=rank, part=part, sources=sources)
        self.act(self.machine.on_order(order))

    # Readers, and what goes wrong.

    def read(self) -> None:
        there = sorted((copy for copy in self.served if copy.buffer), key=lambda copy: copy.buffer)
        if there:
            copy = self.chance.choice(there)
            content = {part: self.content[copy.buffer][part] for part in parts(copy.part)}
            self.readers.append((copy.buffer, content))

    def unread(self) -> None:
        if not self.readers:
            return
        buffer, content = self.readers.pop(self.chance.randrange(len(self.readers)))
        now = self.content[buffer]
        assert all(now[part] == what for part, what in content.items()), "it was changed"
        self.act(self.unread_by_all(buffer))

    def unread_by_all(self, buffer: int) -> list[do.Effect]:
        if buffer not in self.awaited or any(one == buffer for one, _ in self.readers + self.shown):
            return []
        self.awaited.discard(buffer)
        return self.machine.on_buffer_unread(buffer)

    def show(self, effect: do.Show) -> list[do.Effect]:
        assert len({own.image.rank for own, _ in effect.images}) == self.world
        if self.chance.random() < 0.1:
            return self.machine.on_shown(effect.number, "too many open files")
        for own, common in effect.images:
            for part, copy in ((OWN, own), (COMMON, common or own)):
                assert copy in self.served, "what is not held is shown"
                assert part in parts(copy.part)
                assert copy.image[:2] == own.image[:2], "the common part is another state's"
                self.shown.append((copy.buffer, {part: self.content[copy.buffer][part]}))
        for rank in self.ranks:
            assert rank.number < 0 or rank.restore == "pending"
            rank.restore = "collected"
        self.collected += 1
        return self.machine.on_shown(effect.number)

    def unshow(self) -> list[do.Effect]:
        shown, self.shown = self.shown, []
        effects: list[do.Effect] = []
        for buffer, content in shown:
            now = self.content[buffer]
            assert all(now[part] == what for part, what in content.items()), "what is shown was changed"
            effects += self.unread_by_all(buffer)
        return effects

    def flip(self) -> None:
        there = sorted(self.served, key=lambda copy: copy.entry)
        if there:
            bad = self.chance.choice(there)
            self.may_go = lambda copy: copy is bad
            self.act(self.machine.on_copy_distrusted(bad, "it is corrupt"))

    def borrow(self) -> None:
        if self.lent and self.chance.random() < 0.6:
            self.give_back()
        else:
            self.numbers += 1
            self.act(self.machine.on_loan_wanted(self.numbers, SIZE, "a copy"))

    def give_back(self) -> None:
        buffer = self.lent.pop()
        assert self.content[buffer] == {ALL: "lent"}, "what was lent is written by somebody else"
        self.act(self.machine.on_loan_returned(buffer))

    def scan(self) -> None:
        known = [copy for copy in self.served if copy.tier == LOCAL]
        found = [copy for copy in known if self.chance.random() < 0.7]
        if self.states:
            image = ImageId(*self.chance.choice(self.states), self.chance.randrange(self.world))
            if image not in {copy.image for copy in known}:
                found.append(KeptCopy(report(image, LOCAL, ALL, self.world), 0))
        self.may_go = lambda copy: copy.tier == LOCAL
        self.act(self.machine.on_disk_scanned(found))

    # What the machine wants, and whether it may.

    def act(self, effects: list[do.Effect]) -> None:
        queue = list(effects)
        while queue:
            queue += self.one(queue.pop(0))
        may_go, self.may_go = self.may_go, lambda copy: False
        for copy in self.gone:
            there = any(one.image == copy.image and one.part in (ALL, copy.part) for one in self.served)
            gone = may_go(copy) or self.may_make_room(copy)
            assert there or gone, f"{copy.entry} is given up, and nobody wanted that"
        self.gone.clear()
        self.machine.check()
        for copy in self.served:
            if copy.buffer:
                found = [self.content[copy.buffer].get(part) for part in parts(copy.part)]
                assert all(one == copy.image for one in found), f"{copy.entry} is {found}"

    def one(self, effect: do.Effect) -> list[do.Effect]:
        match effect:
            case do.Tell(message):
                self.told(message)
            case do.Measure() | do.Reserve() | do.Hash() | do.FindImage() | do.Verify() | do.Fetch():
                self.waiting.append(effect)
            case do.Make(buffers, capacity):
                if self.chance.random() < 0.03 and self.free < PLENTY:
                    return self.machine.on_buffers_made("too many open files")
                for number in buffers:
                    self.buffers[number], self.content[number] = (capacity, 0), {}
                return self.machine.on_buffers_made()
            case do.Unmake(buffer):
                assert not any(one == buffer for one, _ in self.readers + self.shown), (
                    "memory that is read goes"
                )
                del self.buffers[buffer], self.content[buffer]
            case do.Lend(_, buffer):
                if buffer:
                    self.take(buffer, 0, SIZE)
                    self.content[buffer] = {ALL: "lent"}
                    self.lent.append(buffer)
            case do.Serve(copy):
                self.served.add(copy)
            case do.Unserve(copy):
                self.served.remove(copy)
                self.gone.append(copy)
            case do.AwaitReaders(buffer):
                if any(one == buffer for one, _ in self.readers + self.shown):
                    self.awaited.add(buffer)
                else:
                    return self.machine.on_buffer_unread(buffer)
            case do.Show():
                return self.show(effect)
            case do.Unshow():
                return self.unshow()
            case do.Hurry(number):
                self.hurried.add(number)
            case do.EndWork(number):
                self.works.pop(number, None)
                self.hurried.discard(number)
            case _:
                return self.for_rank(effect)
        return []

    def for_rank(self, effect: do.ForRanks) -> list[do.Effect]:
        rank = self.ranks[effect.local]
        match effect:
            case do.Begin():
                rank.restore, rank.refused, rank.found = "pending", False, None
            case do.Elsewhere():
                rank.restore = "elsewhere"
            case do.FailRestore():
                assert rank.restore == "pending"
                rank.restore = "failed"
            case do.Refuse():
                rank.refused = True
            case do.SlotReady():
                assert rank.restore == "pending", "restored twice"
                view = rank.slots[effect.slot]
                content = self.content[view.buffer]
                image = ImageId(effect.report.step, effect.report.attempt, rank.number)
                assert not view.mine, "what is restored can be written over"
                assert content[COMMON] == content[OWN] == image, "another image is restored"
                rank.restore, rank.found = "ready", image
                self.restored += 1
            case do.Mend(_, slot):
                rank.slots[slot].writing = False
                rank.slots[slot].mine = True
            case do.Offer(_, slot, buffer):
                rank.slots[slot] = View(buffer, mine=True)
            case do.Install(_, slot, buffer):
                rank.slots[slot] = View(buffer)
            case do.Free(_, slot):
                rank.slots[slot] = View(rank.slots[slot].buffer, mine=True)
            case do.Detach(_, slot):
                rank.slots[slot] = View()
            case do.Withdraw(local, slot, buffer):
                view = rank.slots[slot]
                if view.mine and not view.writing:
                    rank.slots[slot] = View()
                    return self.machine.on_slot_withdrawn(local, slot, buffer)
            case _:
                pass
        return []

    def told(self, message: msg.FromKeeper) -> None:
        match message:
            case msg.Held():
                for copy in message.copies:
                    image = ImageId(copy.step, copy.attempt, copy.rank)
                    for part in {copy.part, *parts(copy.part)}:
                        self.asked.discard((image, part))
                    self.replicated += copy.tier == PEER
            case msg.Unreplicated():
                assert message.why
                image = ImageId(message.step, message.attempt, message.rank)
                self.asked.discard((image, message.part))
            case msg.AskSources():
                self.waiting.append(message)
            case msg.Unrestorable():
                assert message.attempt == self.attempt, "what an attempt that is over could not restore"
            case _:
                pass
