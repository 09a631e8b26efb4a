"""How nodes write a state together: whatever fails, is lost or comes twice, and when, it is published whole
or not at all, and nobody waits for ever."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine, NodeWrites
from jurymast.core.checkpoints.copies import RETRY_S
from jurymast.core.checkpoints.writes import ALONE, WRITE_LIMIT_S
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import WritePhase
from support.node_model import plan
from support.site import ACTIVE, Site

PHASES = [phase for phase in WritePhase if phase > WritePhase.HOLD]
SEEDS = 300
EVENTS = 4000


def begun(until: WritePhase = WritePhase.OPEN) -> tuple[Site, str]:
    """Three nodes with a write that has got to where this phase begins; n1 leads."""
    site = Site(replicas=0)
    site.save()
    (id,) = {order.id for _, order in site.ordered(msg.Write)}
    if until > WritePhase.OPEN:
        site.go_on(id, until=min(until, WritePhase.WRITE))
    if until is WritePhase.SEAL:
        for node in ACTIVE[1:]:
            site.hear(node, written(id))
        site.reach("n1", id, WritePhase.WRITE)
    return site, id


def written(id: str, why: str = "") -> msg.Written:
    return msg.Written(id=id, tier=im.SHARED, ok=not why, why=why, size_bytes=50)


def concerned(phase: WritePhase) -> tuple[str, ...]:
    return ACTIVE[:1] if phase in ALONE else ACTIVE


def parts_of(phase: WritePhase) -> tuple[int, ...]:
    """The lead is told by which ranks the files of the nodes are named."""
    return (0, 1, 2) if phase is WritePhase.SHARE_OUT else ()


def told(site: Site) -> list[tuple[str, WritePhase]]:
    return [(node, order.phase) for node, order in site.ordered(msg.ContinueWrite)]


# ---- the supervisor


def test_each_phase_begins_when_all_have_reached_the_end_of_the_one_before() -> None:
    site, id = begun()
    for phase in PHASES[:-1]:
        for node in concerned(phase):
            assert told(site) == [], f"{phase} is not over"
            if phase is WritePhase.WRITE and node != "n1":
                site.hear(node, written(id))
            else:
                site.reach(node, id, phase)
        following = WritePhase(phase + 1)
        assert site.orders[-len(concerned(following)) :] == [
            (node, msg.ContinueWrite(id=id, phase=following, parts=parts_of(following)))
            for node in concerned(following)
        ]
        site.orders.clear()
    assert site.saved("shared") == []
    site.hear("n1", written(id))
    assert site.saved("shared") == [(10, True)]
    assert site.shared == {(10, 1): 150}
    assert site.ordered(msg.CancelWrite) == []


@pytest.mark.parametrize("phase", PHASES)
def test_what_is_said_twice_too_late_or_too_early_counts_once_or_not(phase: WritePhase) -> None:
    site, id = begun(phase)
    site.ordered(msg.ContinueWrite)
    for node in ACTIVE:
        for other in WritePhase:
            if other is not phase:
                site.reach(node, id, other)
    assert told(site) == []
    for node in concerned(phase)[1:]:
        for _ in range(3):
            site.reach(node, id, phase)
    assert told(site) == [], "the lead is not there yet"


@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_is_back_is_told_again_what_it_is_to_do(phase: WritePhase) -> None:
    site, id = begun(phase)
    turns = site.ordered(msg.ContinueWrite)
    first = {node: order for node, order in turns if order.phase is phase}
    assert set(first) == ({*concerned(phase)} if phase > WritePhase.OPEN else set())
    for node in ACTIVE:
        site.orders.clear()
        site.joined(node)
        again = [order for _, order in site.orders if isinstance(order, msg.Write | msg.ContinueWrite)]
        if phase is WritePhase.SEAL and node != "n1":
            assert again == [], "it has written its share"
        else:
            assert isinstance(again[0], msg.Write)
            assert again[1:] == ([first[node]] if node in first else [])
    if phase < WritePhase.SEAL:
        for node in concerned(phase):
            site.reach(node, id, phase)
            site.orders.clear()
            if node != concerned(phase)[-1]:
                site.joined(node)
                assert site.ordered(msg.ContinueWrite) == [], "it has told how far it is"


@pytest.mark.parametrize("how", ["lost", "started again", "failed"])
@pytest.mark.parametrize("node", ["n1", "n3"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_node_that_is_lost_or_fails_ends_the_write_at_every_phase(
    phase: WritePhase, node: str, how: str
) -> None:
    site, id = begun(phase)
    if how == "lost":
        site.lost(node)
    elif how == "failed":
        site.hear(node, written(id, "no space left"))
    else:
        site.joined(node, incarnation="another")
    if phase is WritePhase.SEAL and node != "n1":
        assert site.ordered(msg.CancelWrite) == [], "its share is there"
        site.hear("n1", written(id))
        assert site.saved("shared") == [(10, True)]
        return
    writing = ("n1",) if phase is WritePhase.SEAL else ACTIVE
    assert [one for one, _ in site.ordered(msg.CancelWrite)] == [one for one in writing if one != node]
    assert site.saved("shared") == [(10, False)]
    if how == "failed":
        assert site.state.saved["shared"].error == f"{node}: no space left"
    for other in ACTIVE:
        if other in site.here:
            site.hear(other, written(id, "it was cancelled"))
    assert site.saved("shared") == [(10, False)], "the first reason is the one that is told"


def test_what_exists_already_ends_the_write_for_all() -> None:
    site, id = begun()
    site.hear("n1", written(id))
    assert site.saved("shared") == [(10, True)]
    assert [node for node, _ in site.ordered(msg.CancelWrite)] == ["n2", "n3"]


def test_who_keeps_the_others_waiting_is_named() -> None:
    site, id = begun(WritePhase.ANNOUNCE)
    site.reach("n1", id, WritePhase.ANNOUNCE)
    site.reach("n2", id, WritePhase.ANNOUNCE)
    site.time += WRITE_LIMIT_S + 1
    site.look()
    assert site.state.saved["shared"].error == f"n3 said nothing for {WRITE_LIMIT_S:.0f} s"
    assert [node for node, _ in site.ordered(msg.CancelWrite)] == ["n1", "n2", "n3"]


def test_a_write_that_makes_progress_is_not_given_up_and_one_that_makes_none_is() -> None:
    site, id = begun(WritePhase.WRITE)
    for _ in range(20):
        site.time += WRITE_LIMIT_S - 1
        site.hear("n2", msg.WriteProgress(id=id, size_bytes=9))
        site.look()
    assert site.ordered(msg.CancelWrite) == []
    site.hear("n2", msg.WriteProgress(id=f"{id}0", size_bytes=9))  # of another write
    site.time += WRITE_LIMIT_S + 1
    site.look()
    assert site.ordered(msg.CancelWrite) != []


def test_who_says_again_what_is_known_makes_no_progress() -> None:
    site, id = begun(WritePhase.ANNOUNCE)
    for _ in range(2):
        site.reach("n1", id, WritePhase.ANNOUNCE)
        site.time += 0.6 * WRITE_LIMIT_S
        site.look()
    assert [node for node, _ in site.ordered(msg.CancelWrite)] == ["n1", "n2", "n3"]


@pytest.mark.parametrize("phase", WritePhase)
def test_a_write_that_the_supervisor_does_not_know_is_cancelled(phase: WritePhase) -> None:
    """It has ended, or an earlier supervisor has ordered it."""
    site, id = begun(WritePhase.ANNOUNCE)
    site.orders.clear()
    site.reach("n2", f"{id}0", phase)
    assert site.orders == [("n2", msg.CancelWrite(id=f"{id}0"))]
    site.hear("n2", written(f"{id}0", "no space left"))
    assert site.checkpoints.writes.knows(id)
    site.hear("n3", written(id, "no space left"))
    site.orders.clear()
    site.reach("n2", id, WritePhase.ANNOUNCE)
    assert site.orders == [("n2", msg.CancelWrite(id=id))]


# ---- the agent


def order(id: str, tier: str = im.SHARED, ranks: tuple[int, ...] = (1,), *, lead: bool = False) -> msg.Write:
    return msg.Write(id=id, tier=tier, step=10, attempt=1, ranks=ranks, world=2, lead=lead)


def turn(id: str, phase: WritePhase) -> msg.ContinueWrite:
    return msg.ContinueWrite(id=id, phase=phase)


def test_a_node_goes_on_once_with_each_phase_that_is_ordered() -> None:
    writes = NodeWrites(1)
    assert writes.on_continue_write(turn("a", WritePhase.ANNOUNCE)) == [], "it knows no such write"
    writes.on_write(order("a"))
    assert writes.on_write_reached("a", WritePhase.HOLD) == [], "nobody waits for that"
    assert writes.on_continue_write(turn("a", WritePhase.OPEN)) == [], "the order to write was for that"
    for phase in (WritePhase.ANNOUNCE, WritePhase.WRITE):
        assert writes.on_continue_write(turn("a", phase)) == [do.Obey(turn("a", phase))]
        assert writes.on_continue_write(turn("a", phase)) == []
        writes.check()
        assert writes.on_write_reached("a", phase) == [do.Send(msg.WriteReached(id="a", phase=phase))]
        assert writes.on_continue_write(turn("a", phase)) == [], "an order that was on its way for long"
        assert writes.on_continue_write(turn("a", WritePhase.ANNOUNCE)) == []
    writes.on_cancel_write("a")
    assert writes.on_continue_write(turn("a", WritePhase.SEAL)) == []
    assert writes.on_write_reached("a", WritePhase.SEAL) == [], "nobody waits for it"
    writes.on_write_ended("a")
    assert writes.on_continue_write(turn("a", WritePhase.SEAL)) == []
    writes.check()


def test_each_supervisor_is_told_how_far_the_writes_are() -> None:
    writes = NodeWrites(1)
    writes.on_write(order("a", im.LOCAL))
    writes.on_write(order("b"))
    assert writes.on_connected() == [do.Send(msg.WriteReached(id="b", phase=WritePhase.HOLD))]
    writes.on_continue_write(turn("b", WritePhase.ANNOUNCE))
    writes.on_write_reached("b", WritePhase.ANNOUNCE)
    assert writes.on_connected() == [do.Send(msg.WriteReached(id="b", phase=WritePhase.ANNOUNCE))]
    writes.on_write(order("c"))
    assert writes.on_connected() == [do.Send(msg.WriteReached(id="c", phase=WritePhase.HOLD))], "b is void"
    writes.on_cancel_write("c")
    assert writes.on_connected() == []
    for id in "bc":
        writes.on_write_ended(id)
    assert writes.on_connected() == []


@pytest.mark.parametrize("reached", [phase for phase in WritePhase if phase < WritePhase.SEAL])
def test_a_supervisor_that_takes_over_ends_the_writes_of_the_one_before_it(reached: WritePhase) -> None:
    """Whoever waits for its turn keeps its images in memory."""
    agent = AgentMachine(plan(), "n2", "17.0", ("n1", "n2"), ("h", 1), 0.0)
    agent.start(0.0, reachable=True)
    agent.on_connected(0.1)
    agent.on_order(order("0001000001"), 0.2)
    for phase in PHASES[1:]:
        if phase <= reached:
            assert do.Obey(turn("0001000001", phase)) in agent.on_order(turn("0001000001", phase), 0.3)
            agent.on_write_reached("0001000001", phase, 0.4)
    agent.on_connection_lost(1.0)
    reached = max(reached, WritePhase.HOLD) if reached is not WritePhase.OPEN else WritePhase.HOLD
    assert agent.on_write_reached("0001000001", reached, 1.1)[:-1] == [], "there is nobody to hear it"
    effects = agent.on_connected(2.0)
    how_far = msg.WriteReached(id="0001000001", phase=reached)
    says = do.Send(how_far)
    assert says in effects
    assert effects.index(do.Greet()) < effects.index(says)
    successor = Site()
    successor.hear("n2", how_far)
    ((node, cancels),) = successor.ordered(msg.CancelWrite)
    assert node == "n2"
    assert do.Obey(cancels) in agent.on_order(cancels, 2.1)
    agent.on_write_ended("0001000001", 2.2)
    agent.on_connection_lost(3.0)
    assert says not in agent.on_connected(4.0)
    agent.check()


# ---- all of them, and everything at once


@dataclass
class Place:
    """What there is of a write on storage."""

    announced: set[int] = field(default_factory=set)
    shared_out: bool = False
    written: set[int] = field(default_factory=set)


@dataclass
class Storage:
    places: dict[str, Place] = field(default_factory=dict)
    published: int = 0


class WritingNode:
    """An agent's machine, and what it does on storage, one thing at a time. `line`: what it has said and
    nobody has heard yet; `orders`: what it was told and has not heard yet."""

    def __init__(self, name: str, storage: Storage, chance: Random, fails: float) -> None:
        self.name, self.storage, self.chance, self.fails = name, storage, chance, fails
        self.machine = NodeWrites(1)
        self.line: deque[msg.ToSupervisor] = deque()
        self.orders: deque[msg.ToAgent] = deque()
        self.writes: dict[str, tuple[msg.Write, deque[msg.ContinueWrite]]] = {}

    def carry_out(self, effects: list[do.Effect]) -> None:
        for effect in effects:
            match effect:
                case do.Send(message):
                    self.line.append(message)
                case do.Obey(msg.Write() as order):
                    first = [turn(order.id, WritePhase.OPEN)] if order.lead else []
                    self.writes[order.id] = order, deque(first)
                case do.Obey(msg.ContinueWrite() as go_on):
                    self.writes[go_on.id][1].append(go_on)
                case do.Obey(msg.CancelWrite(id=id)):
                    if self.writes.pop(id)[0].lead:
                        self.storage.places.pop(id, None)
                    self.machine.on_write_ended(id)
        self.machine.check()

    def heed(self) -> None:
        if self.orders:
            match self.orders.popleft():
                case msg.Write() as order if order.tier == im.SHARED:
                    self.carry_out(self.machine.on_write(order))
                case msg.ContinueWrite() as go_on:
                    self.carry_out(self.machine.on_continue_write(go_on))
                case msg.CancelWrite(id=id):
                    self.carry_out(self.machine.on_cancel_write(id))

    def work(self) -> None:
        ready = [(order, turns) for order, turns in self.writes.values() if turns]
        if not ready:
            return
        order, turns = self.chance.choice(ready)
        phase, last = turns.popleft().phase, WritePhase.SEAL if order.lead else WritePhase.WRITE
        try:
            if self.chance.random() < self.fails:
                raise OSError("an error")
            self.do(phase, order)
        except OSError as error:
            if order.lead:
                self.storage.places.pop(order.id, None)
            self.end(order, str(error))
            return
        if phase is last:
            self.end(order)
        else:
            self.carry_out(self.machine.on_write_reached(order.id, phase))

    def do(self, phase: WritePhase, order: msg.Write) -> None:
        places = self.storage.places
        if phase is WritePhase.OPEN:
            places.clear()
            places[order.id] = Place()
        if order.id not in places:
            raise OSError("its place is gone")
        place = places[order.id]
        match phase:
            case WritePhase.ANNOUNCE:
                place.announced.update(order.ranks)
            case WritePhase.SHARE_OUT:
                assert place.announced == set(range(order.world)), "not all are announced"
                place.shared_out = True
            case WritePhase.WRITE:
                assert place.shared_out, "nobody knows who writes what"
                place.written.update(order.ranks)
            case WritePhase.SEAL:
                assert place.written == set(range(order.world)), "a part is missing"
                del places[order.id]
                self.storage.published += 1

    def end(self, order: msg.Write, why: str = "") -> None:
        del self.writes[order.id]
        self.line.append(written(order.id, why))
        self.machine.on_write_ended(order.id)


class Run:
    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.storage = Storage()
        self.site = Site(replicas=0)
        fails = chance.choice((0.0, 0.02, 0.1))
        self.nodes = {name: WritingNode(name, self.storage, chance, fails) for name in self.site.state.nodes}
        self.faults = chance.choice((0.0, 0.01, 0.05))
        self.ended = 0

    def live(self) -> None:
        self.site.save()
        for number in range(EVENTS):
            self.pass_on()
            if not self.site.checkpoints.writes.any_under_way and self.idle():
                if number > EVENTS / 2:
                    return
                self.again()
            fault = self.chance.random() < self.faults and number < EVENTS / 2
            self.fault() if fault else self.something()
        raise AssertionError(f"nobody goes on: {[(one.name, one.writes) for one in self.nodes.values()]}")

    def idle(self) -> bool:
        return not any(node.writes or node.line or node.orders for node in self.nodes.values())

    def pass_on(self) -> None:
        for name, message in self.site.orders:
            self.nodes[name].orders.append(message)
        self.site.orders.clear()

    def something(self) -> None:
        node = self.chance.choice(list(self.nodes.values()))
        what = self.chance.randrange(3)
        if what == 0:
            node.work()
        elif what == 1:
            node.heed()
        elif node.line:
            message = node.line.popleft()
            assert isinstance(message, msg.WriteReached | msg.Written)
            self.site.hear(node.name, message)

    def again(self) -> None:
        self.ended += 1
        self.site.time += 2 * RETRY_S
        self.site.save(10 * self.ended + 10)

    def fault(self) -> None:
        kind = self.chance.choice(("cut", "cut", "started again", "take-over"))
        if kind == "take-over":
            self.take_over()
            return
        node = self.chance.choice(list(self.nodes.values()))
        if kind == "started again":
            for id in [id for id, (order, _) in node.writes.items() if order.lead]:
                self.chance.choice((self.storage.places.pop, lambda *_: None))(id, None)
            self.nodes[node.name] = WritingNode(node.name, self.storage, self.chance, node.fails)
            self.site.joined(node.name, incarnation=str(self.chance.random()))
            key = self.site.checkpoints.copies.newest_first()
            self.site.save(key[0][0] if key else 10)  # as if it were restored
        else:
            self.connect(node)

    def connect(self, node: WritingNode) -> None:
        """Again, or to another supervisor: what was on its way is lost, but for what is said again."""
        node.orders.clear()
        node.line = deque(one for one in node.line if isinstance(one, msg.Written))
        known = self.site.checkpoints._holders.get(node.name)
        held = [self.site.report(rank, at=at) for rank, name in enumerate(ACTIVE) if name == node.name
                for at, _ in self.site.checkpoints.copies.newest_first()]  # fmt: skip
        self.site.joined(node.name, copies=tuple(held), incarnation=known.incarnation if known else "first")
        node.carry_out(node.machine.on_connected())

    def take_over(self) -> None:
        self.site.orders.clear()
        before, self.site = self.site, Site(replicas=0)
        self.site.state.epoch, self.site.time = before.state.epoch + 1, before.time
        self.site.orders.clear()
        for node in self.nodes.values():
            self.connect(node)
        self.again()


def test_whatever_fails_it_is_published_whole_or_not_at_all_and_nobody_waits_for_ever() -> None:
    published = failed = 0
    for seed in range(SEEDS):
        made = Run(seed)
        try:
            made.live()
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        published += made.storage.published
        failed += made.ended - made.storage.published
    assert min(published, failed) > SEEDS
