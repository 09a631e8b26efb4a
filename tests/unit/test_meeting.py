"""How nodes write a state together: whatever fails when, it is published whole or not at all, and all end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from jurymast.core.checkpoints.copies import StateId
from jurymast.core.checkpoints.writes import (  # fmt: skip
    CAUSE_FIRST_S,
    THERE,
    Announced,
    Complete,
    Do,
    Fail,
    Meeting,
    Next,
    Pause,
    ReadWhy,
    TellOthers,
    Wait,
)

KEY = StateId(10, 1)
SEEDS = 2000
STEPS_MAX = 3000


def meeting(world: int = 2, *, leads: bool = True) -> Meeting:
    return Meeting(KEY, world, leads=leads)


def announced(rank: int, key: StateId = KEY, world: int = 2) -> Announced:
    return Announced(rank, key, world)


def begun(made: Meeting) -> Next:
    return made.begin(unseen="", rolled_back=False, existing=False)


def read(made: Meeting) -> Meeting:
    """Up to where the lead reads what others have announced."""
    assert begun(made) is Do.OPEN
    assert made.done() is Do.ANNOUNCE
    assert made.done() is Do.READ_LAYOUTS
    return made


def test_what_need_not_or_must_not_be_written_is_not() -> None:
    assert meeting().begin(unseen="", rolled_back=False, existing=True) == THERE
    why = meeting().begin(unseen="", rolled_back=True, existing=True)
    assert why == Fail("step 10 of attempt 1 was rolled back, so it is not written")
    unseen = meeting().begin(unseen="/runs/r", rolled_back=False, existing=False)
    assert isinstance(unseen, Fail)
    assert "/runs/r is not visible on this node" in unseen.why
    late = meeting(leads=False)
    assert begun(late) is Do.FIND_PLACE
    assert late.saw_place(there=False, existing=False) == Wait()
    assert late.saw_place(there=False, existing=True) == THERE


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (announced(1, key=StateId(11, 1)), "rank 1 has an image of another state, step 11"),
        (announced(1, key=StateId(10, 2)), "rank 1 has an image of another state, step 10"),
        (announced(1, world=3), "rank 1 has an image of another state, step 10"),
        (announced(2), "layout-r00001.json names rank 2, and there are 2 ranks"),
    ],
)
def test_states_are_never_mixed(image: Announced, why: str) -> None:
    made = read(meeting())
    assert made.saw_layouts({"layout-r00001.json": [image]}) == TellOthers(why)
    assert made.done() is Do.CLEAN_UP
    assert made.done() == Fail(why)


def test_who_sees_that_another_failed_lets_it_say_why_first() -> None:
    made = read(meeting())
    assert made.others_failed(1, "") == Pause(CAUSE_FIRST_S)
    assert made.done() == ReadWhy(1)
    assert made.others_failed(1, "no space left") is Do.CLEAN_UP
    assert made.done() == Fail("rank 1: no space left")
    silent = read(meeting())
    silent.others_failed(1, "")
    silent.done()
    silent.others_failed(1, "")
    assert silent.done() == Fail("rank 1: its node has failed")


def test_a_place_that_is_gone_was_given_up_by_who_leads() -> None:
    made = meeting(leads=False)
    begun(made)
    made.saw_place(there=True, existing=False)
    made.done()
    assert made.failed("no such file", gone=True) == Pause(CAUSE_FIRST_S)
    assert made.done() == Fail("rank 0's node gave up: its directory is gone")


def test_what_the_ranks_have_saved_themselves_meanwhile_is_left() -> None:
    made = read(meeting(1))
    made.saw_layouts({"layout-r00000.json": [announced(0, world=1)]})
    made.done()
    assert made.done() is Do.READ_PARTS
    assert made.saw_parts(["layout-r00000.json"]) is Do.SEAL
    assert made.sealed(rolled_back=False) is Do.PUBLISH
    assert made.failed("the name is taken", existing=True) is Do.CLEAN_UP
    assert made.done() == THERE


@dataclass
class Place:
    """What there is of it on storage."""

    there: bool = False
    layouts: dict[str, list[Announced]] = field(default_factory=dict)
    shared_out: bool = False
    written: set[int] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    published: bool = False


class Node:
    def __init__(self, place: Place, ranks: list[int], world: int, chance: random.Random) -> None:
        self.place, self.ranks, self.chance = place, ranks, chance
        self.machine = Meeting(KEY, world, leads=0 in ranks)
        self.next = begun(self.machine)
        self.message = f"layout-r{ranks[0]:05d}.json"

    @property
    def over(self) -> bool:
        return isinstance(self.next, Complete | Fail)

    def step(self, fails: float) -> None:
        """`fails`: how likely."""
        if self.chance.random() < fails and self.next is not Do.CLEAN_UP and self.next != Wait():
            self.next = self.machine.failed("an error", gone=self._gone())
        elif isinstance(self.next, Wait):
            self.next = self.machine._doing
        else:
            self.next = self._work(self.next)
        self.machine.check()

    def _gone(self) -> bool:
        return not self.place.there

    def _work(self, what: Next) -> Next:
        place, machine = self.place, self.machine
        if what is Do.FIND_PLACE:
            return machine.saw_place(there=place.there, existing=place.published)
        if what in (Do.ANNOUNCE, Do.READ_LAYOUTS, Do.FIND_SHARES, Do.WRITE, Do.READ_PARTS, Do.SEAL):
            if not place.there:
                return machine.failed("no such file", gone=True)
            for rank, why in place.failed.items():
                if what not in (Do.ANNOUNCE, Do.WRITE):
                    return machine.others_failed(rank, why if self.chance.random() < 0.5 else "")
        match what:
            case Do.OPEN:
                place.there = True
            case Do.ANNOUNCE:
                place.layouts[self.message] = [announced(rank, world=machine._world) for rank in self.ranks]
            case Do.READ_LAYOUTS:
                return machine.saw_layouts(place.layouts)
            case Do.SHARE_OUT:
                place.shared_out = True
            case Do.FIND_SHARES:
                return machine.saw_shares(there=place.shared_out)
            case Do.WRITE:
                place.written.update(self.ranks)
                place.done.add(self.message)
            case Do.READ_PARTS:
                return machine.saw_parts(place.done)
            case Do.SEAL:
                assert place.written == set(range(machine._world)), "a part is missing"
                return machine.sealed(rolled_back=self.chance.random() < 0.02)
            case Do.PUBLISH:
                place.published, place.there = True, False
            case Do.CLEAN_UP:
                place.there = False
            case TellOthers(why):
                place.failed[self.ranks[0]] = why
            case ReadWhy(rank):
                return machine.others_failed(rank, place.failed.get(rank, ""))
            case Pause():
                pass
            case _:
                raise AssertionError(what)
        return machine.done()


def test_whatever_fails_it_is_published_whole_or_not_at_all_and_nobody_waits_for_ever() -> None:
    published = failed = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        world = chance.randint(1, 5)
        cut = chance.randint(1, world)
        place, fails = Place(), chance.choice((0.0, 0.02, 0.1))
        parts = [ranks for ranks in (list(range(cut)), list(range(cut, world))) if ranks]
        nodes = [Node(place, ranks, world, chance) for ranks in parts]
        for _ in range(STEPS_MAX):
            left = [node for node in nodes if not node.over]
            if not left:
                break
            if not place.there and nodes[0].over and not place.published:
                left[-1].next = Fail("cancelled by the supervisor")  # who waits for a place that went before
                continue
            chance.choice(left).step(fails)
        assert all(node.over for node in nodes), f"seed {seed}: {[node.next for node in nodes]}"
        ends = [isinstance(node.next, Complete) for node in nodes]
        assert place.published or not ends[0], f"seed {seed}: the lead ends well"
        assert not place.there, f"seed {seed}: something is left"
        published, failed = published + place.published, failed + (not all(ends))
    assert min(published, failed) > SEEDS / 10
