"""Groups of ranks whose XOR is kept: who holds it, what it takes, and what the loss of a node leaves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints import replicas
from jurymast.core.checkpoints.copies import (
    ALL,
    COMMON,
    MEMORY,
    OWN,
    PEER,
    Copies,
    Copy,
    Member,
    Source,
    StateId,
)
from jurymast.core.checkpoints.replicas import Protection, keeping
from support.holding import source as source_of
from support.holding import without

KEY = StateId(10, 1)
SIZE, COMMON_SIZE = 1000, 600


def nodes(count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(count))


def saved(placement: tuple[str, ...], per_node: int, common: str = "same") -> Copies:
    held = Copies()
    world = len(placement) * per_node
    for rank in range(world):
        size = SIZE + rank  # no two are of one length
        node = placement[rank // per_node]
        held.hold(Copy(node, MEMORY, *KEY, rank, world, ALL, size, COMMON_SIZE, common or f"{rank}"))
    return held


def missing(
    held: Copies, key: StateId, placement: tuple[str, ...], per_node: int, kept: Protection
) -> list[replicas.Order]:
    """What must be copied, or made, so that everything is held as `kept` says."""
    orders = replicas.missing_replicas(held, key, placement, per_node, kept.whole)
    return orders + replicas.missing_parity(held, key, placement, per_node, kept.parity)


def obey(held: Copies, placement: tuple[str, ...], per_node: int, kept: Protection) -> list[replicas.Order]:
    """All agents do as they are told."""
    orders = missing(held, KEY, placement, per_node, kept)
    for holder, order in orders:
        group = order.group or (order.rank,)
        for rank in group:
            (own,) = (c for c in held.of(KEY, rank) if c.tier == MEMORY)
            held.hold(Copy(holder, PEER, *KEY, rank, own.world, order.part, own.size_bytes,
                           own.common_bytes, own.common_id, order.group))  # fmt: skip
    return orders


@given(
    active=st.integers(2, 9), per_node=st.integers(1, 3), spares=st.integers(0, 2), size=st.integers(2, 5),
    alike=st.booleans(), switches=st.integers(0, 4),
)  # fmt: skip
def test_any_one_node_may_be_lost(
    active: int, per_node: int, spares: int, size: int, alike: bool, switches: int
) -> None:
    placement, waiting = nodes(active), [f"s{number}" for number in range(spares)]
    domains = {node: f"switch {number % switches}" for number, node in enumerate(placement) if switches}
    held = saved(placement, per_node, "same" if alike else "")
    kept = keeping(placement, per_node, waiting, domains, copies=1, parity=size)
    obey(held, placement, per_node, kept)
    assert not kept.bare
    assert missing(held, KEY, placement, per_node, kept) == []
    for lost in (*placement, *waiting):
        left, survivors = planned_without(held, placement, per_node, lost)
        for rank in range(active * per_node):
            check(left.sources(KEY, rank, survivors[rank // per_node]), rank, lost)


def planned_without(
    held: Copies, placement: tuple[str, ...], per_node: int, lost: str
) -> tuple[Copies, tuple[str, ...]]:
    """What is left, and where the ranks are now."""
    left = without(held, lost)
    assert left.restorable(KEY), lost
    survivors = tuple("fresh" if node == lost else node for node in placement)
    plan = cp.plan_restore(left, {}, survivors, per_node)
    assert (plan.step, plan.tier) == (10, MEMORY)
    return left, survivors


def check(sources: tuple[Source, ...], rank: int, lost: str) -> None:
    """All of the rank's image is named, and nothing of it is on the lost node."""
    assert all(any(source.has(part) for source in sources) for part in (COMMON, OWN))
    for source in sources:
        assert source.node != lost
        assert {one.rank for one in source.members} == set(source.group) - ({rank} if source.group else set())
        for member in source.members:
            assert any(one.has(OWN) for one in member.sources)
            assert source.part == OWN or any(one.has(COMMON) for one in member.sources)
            assert not any(one.group or one.node == lost for one in member.sources)


@given(st.integers(2, 4), st.integers(2, 4), st.integers(1, 8))
def test_a_holder_needs_one_nth_of_the_memory(groups: int, size: int, per_node: int) -> None:
    placement = nodes(groups * size)
    kept = keeping(placement, per_node, [], {}, copies=1, parity=size)
    assert {len(group) for group in kept.parity} == {size}
    assert sorted(rank for group in kept.parity for rank in group) == list(range(len(placement) * per_node))
    held = list(kept.parity.values())
    most = max(held.count(node) for node in placement)
    assert most <= -(-per_node // size) + 1
    assert len(held) * size == len(placement) * per_node


def test_members_are_on_different_switches_where_there_are_enough() -> None:
    placement = nodes(6)
    domains = {node: "left" if number < 3 else "right" for number, node in enumerate(placement)}
    kept = keeping(placement, 1, ["s0"], {**domains, "s0": "third"}, copies=1, parity=2)
    assert {frozenset(domains[placement[rank]] for rank in group) for group in kept.parity} == {
        frozenset({"left", "right"})
    }
    assert set(kept.parity.values()) == {"s0"}


def test_two_lost_members_are_too_many() -> None:
    placement = nodes(3)
    held = saved(placement, 1)
    obey(held, placement, 1, Protection({}, {(0, 1, 2): "s0"}))
    held.drop_where(node="n1")
    assert held.restorable(KEY)
    held.drop_where(node="n2")
    assert not held.restorable(KEY)
    assert not any(source.group for source in held.sources(KEY, 1, "n1"))


def test_a_common_part_that_nobody_else_has_is_in_the_xor() -> None:
    placement = nodes(3)
    for common, part in (("same", OWN), ("", ALL)):
        orders = obey(saved(placement, 1, common), placement, 1, Protection({}, {(0, 1): "n2"}))
        assert [(holder, one.group, one.part) for holder, one in orders] == [("n2", (0, 1), part)]
        assert [member.rank for member in orders[0][1].members] == [0, 1]


def test_parity_on_a_node_that_has_become_a_member_s_is_made_again() -> None:
    held = saved(("n0", "s0", "n2"), 1)
    held.hold(Copy("s0", PEER, *KEY, 0, 3, OWN, SIZE, COMMON_SIZE, "same", (0, 1)))
    orders = missing(held, KEY, ("n0", "s0", "n2"), 1, Protection({}, {(0, 1): "n2"}))
    assert [holder for holder, _ in orders] == ["n2"]


def test_the_source_of_a_lost_part_names_everybody_else() -> None:
    placement = nodes(3)
    held = saved(placement, 1)
    obey(held, placement, 1, Protection({}, {(0, 1): "s0"}))
    held.drop_where(node="n1")
    (found,) = (one for one in held.sources(KEY, 1, "fresh") if one.group)
    member = Member(rank=0, sources=(source_of(PEER, "n0", ALL, 0),))
    assert found == source_of(PEER, "s0", OWN, 1, group=(0, 1), members=(member,))


def test_whole_replicas_while_there_is_memory_and_groups_of_those_for_whom_there_is_none() -> None:
    placement = nodes(4)
    assert keeping(placement, 1, ["s0"], {}, copies=1, parity=0).parity == {}
    full = {*placement, "s0"}
    kept = keeping(placement, 2, ["s0"], {}, copies=1, parity=0, full=full)
    assert kept == Protection(dict.fromkeys(placement, ()), {(0, 2, 4, 6): "s0", (1, 3, 5, 7): "s0"})
    packed = keeping(placement, 1, ["s0"], {}, copies=1, parity=0, full=full, packed={"s0"})
    assert set(packed.parity) == {(0, 2), (1, 3)}
    assert keeping(placement, 1, ["s0"], {}, copies=1, parity=0, full=full, packed=full).bare == set(
        placement
    )
    assert keeping(nodes(2), 1, [], {}, copies=1, parity=0, full=full).parity == {}
    assert keeping(placement, 1, [], {}, copies=0, parity=2) == Protection(dict.fromkeys(placement, ()), {})


def test_an_xor_counts_once_in_what_replicas_take() -> None:
    placement = nodes(3)
    held = saved(placement, 1)
    obey(held, placement, 1, Protection({"n2": ("s0",)}, {(0, 1): "s0"}))
    assert held.replica_bytes(KEY) == (SIZE + 1 - COMMON_SIZE) + (SIZE + 2 - COMMON_SIZE)
