"""Which copies there are decides what is committed, what is copied, and what is restored from where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.copies import COMMON_SOURCES, Copies, Retries
from jurymast.core.checkpoints.replicas import holders, missing_replicas
from jurymast.core.state import messages as msg
from jurymast.core.state.images import ALL, COMMON, LOCAL, MEMORY, OWN, PEER, SHARED, Copy, StateId
from support.holding import source as source_of
from support.stories import Story
from support.successor import Successor

NODES = ("n1", "n2", "n3")


def copy_of(
    rank: int, node: str, *, step: int = 10, attempt: int = 1, tier: str = MEMORY, part: str = ALL,
    world: int = 3, common: str = "", size: int = 1000,
) -> Copy:  # fmt: skip
    return Copy(node, tier, step, attempt, rank, world, part, size, 600 if common else 0, common)


def all_of(step: int = 10, attempt: int = 1, common: str = "", held: Copies | None = None) -> Copies:
    """One rank a node, every image in its own node's memory."""
    held = held or Copies()
    for rank, node in enumerate(NODES):
        held.hold(copy_of(rank, node, step=step, attempt=attempt, common=common))
    return held


def test_a_step_is_in_memory_once_every_rank_of_one_attempt_has_it() -> None:
    held = Copies()
    held.hold(copy_of(0, "n1"))
    held.hold(copy_of(1, "n2"))
    held.hold(copy_of(2, "n3", attempt=2))
    assert not held.in_memory(StateId(10, 1))
    assert not held.in_memory(StateId(10, 2))
    held.hold(copy_of(2, "n3"))
    assert held.in_memory(StateId(10, 1))
    held.drop(copy_of(1, "n2"))
    assert not held.in_memory(StateId(10, 1))


def test_a_lost_node_takes_its_memory_and_its_disk_along() -> None:
    held = all_of()
    held.hold(copy_of(0, "n2", tier=PEER))
    held.hold(copy_of(1, "n2", tier=LOCAL))
    held.drop_where(node="n1")
    assert held.restorable(StateId(10, 1))
    held.drop_where(node="n2")
    assert not held.restorable(StateId(10, 1))


def test_sources_come_in_the_order_of_their_speed() -> None:
    held = all_of()
    held.hold(copy_of(0, "n2", tier=PEER))
    held.hold(copy_of(0, "n1", tier=LOCAL))
    held.hold(copy_of(0, "n3", tier=LOCAL))
    assert held.sources(StateId(10, 1), 0, "n1") == (
        source_of(MEMORY, "n1", ALL, 0), source_of(PEER, "n2", ALL, 0), source_of(LOCAL, "n1", ALL, 0),
        source_of(LOCAL, "n3", ALL, 0),
    )  # fmt: skip


def test_a_large_world_names_only_some_that_have_the_common_part_and_not_all_the_same() -> None:
    held, count = Copies(), 1000
    for rank in range(count):
        held.hold(copy_of(rank, f"n{rank}", common="same", world=count))
    held.drop_where(node="n7")
    held.hold(copy_of(7, "n9", tier=PEER, part=OWN, common="same", world=count))
    assert len(held.sources(StateId(10, 1), 7, "n7")) == 1 + COMMON_SOURCES
    assert len(held.sources(StateId(10, 1), 5, "n5")) == 2, "its own, and one more"
    asked = [held.sources(StateId(10, 1), rank, "fresh")[1].node for rank in (5, 6, 7, 998, 999)]
    assert asked == ["n6", "n8", "n8", "n999", "n0"]
    assert held.restorable(StateId(10, 1))


def test_another_rank_s_common_part_counts_when_its_hash_is_the_same() -> None:
    held = all_of(common="same")
    held.hold(copy_of(2, "n2", tier=PEER, part=OWN, common="same"))
    held.drop_where(node="n3")
    assert held.restorable(StateId(10, 1))
    plan = cp.plan_restore(held, {}, ("n1", "n2", "n4"), 1)
    assert (plan.step, plan.attempt, plan.tier) == (10, 1, MEMORY)
    assert plan.tiers == {MEMORY: 2000, PEER: 1000}
    sources = held.sources(StateId(10, 1), 2, "n4")
    assert source_of(PEER, "n2", OWN, 2) in sources
    assert {s.node for s in sources if s.part == ALL or s.part == COMMON} == {"n1", "n2"}


def test_a_common_part_with_another_hash_is_no_source() -> None:
    held = Copies()
    for rank, node in enumerate(NODES):
        held.hold(copy_of(rank, node, common=f"of rank {rank}"))
    held.hold(copy_of(2, "n2", tier=PEER, part=OWN, common="of rank 2"))
    held.drop_where(node="n3")
    assert not held.restorable(StateId(10, 1))


def test_replicas_go_to_spares_first_and_skip_what_data_parallel_ranks_have() -> None:
    holding = holders(NODES, ["s1"], {}, 1, ())
    assert holding == {"n1": ("s1",), "n2": ("s1",), "n3": ("s1",)}
    alone = missing_replicas(all_of(), StateId(10, 1), NODES, 1, holding)
    assert [(holder, o.rank, o.part) for holder, o in alone] == [("s1", rank, ALL) for rank in range(3)]
    alike = missing_replicas(all_of(common="same"), StateId(10, 1), NODES, 1, holding)
    assert [(holder, o.rank, o.part) for holder, o in alike] == [("s1", rank, OWN) for rank in range(3)]
    held = all_of(common="same")
    for rank in range(3):
        held.hold(copy_of(rank, "s1", tier=PEER, part=OWN, common="same"))
    assert missing_replicas(held, StateId(10, 1), NODES, 1, holding) == []


def test_a_node_that_lost_its_image_gets_it_back_from_who_holds_it() -> None:
    holding = holders(NODES, ["s1"], {}, 1, ())
    held = all_of(common="same")
    for rank in range(3):
        held.hold(copy_of(rank, "s1", tier=PEER, part=OWN, common="same"))
    held.drop_where(node="n3")
    back = missing_replicas(held, StateId(10, 1), NODES, 1, holding)
    assert [(holder, o.rank, o.part) for holder, o in back] == [("n3", 2, OWN)]
    assert [source.node for source in back[0][1].sources] == ["s1"]
    assert missing_replicas(held, StateId(10, 1), NODES, 1, holding, unable={"n3"}) == []
    held.hold(copy_of(2, "n3", tier=PEER, part=OWN, common="same"))
    assert missing_replicas(held, StateId(10, 1), NODES, 1, holding) == []


def test_who_has_all_of_an_image_is_asked_for_none_of_it() -> None:
    held = all_of()
    for rank in range(3):
        held.hold(copy_of(rank, NODES[rank], common=f"of rank {rank}"))
        held.hold(copy_of(rank, "s1", tier=PEER, common=f"of rank {rank}"))
    two = dict.fromkeys(NODES, ("s1", "s2"))
    orders = missing_replicas(held, StateId(10, 1), NODES, 1, two)
    assert [(holder, o.rank, o.part) for holder, o in orders] == [("s2", rank, ALL) for rank in range(3)]


def test_partners_are_in_another_failure_domain_where_there_is_one() -> None:
    domains = {"n1": "a", "n2": "a", "n3": "b", "n4": "b"}
    holding = holders(("n1", "n2", "n3", "n4"), [], domains, 1, ())
    assert all(domains[node] != domains[held[0]] for node, held in holding.items())
    assert holders(("n1", "n2"), [], {}, 1, ()) == {"n1": ("n2",), "n2": ("n1",)}
    assert holders(("n1",), [], {}, 1, ()) == {"n1": ()}
    assert holders(("n1", "n2", "n3"), ["s1"], {}, 1, {"s1"})["n1"] in (("n2",), ("n3",))


def test_the_newest_step_wins_however_long_it_takes_to_restore() -> None:
    held = all_of(step=20)
    held.drop_where(node="n1")
    held.hold(copy_of(0, "n2", step=20, tier=LOCAL, size=10**15))
    plan = cp.plan_restore(held, {10: 1}, NODES, 1)
    assert (plan.step, plan.tier) == (20, MEMORY)
    assert plan.reason.startswith("step 20 is the newest complete step")
    assert cp.plan_restore(held, {20: 1}, NODES, 1).tier == MEMORY, "of two that are as new, the nearer one"
    assert cp.plan_restore(held, {21: 10**15}, NODES, 1).tier == SHARED


def test_more_steps_win_also_when_an_earlier_attempt_did_them() -> None:
    held = all_of(step=20)
    for rank, node in enumerate(NODES):
        held.hold(copy_of(rank, node, step=15, attempt=2))
    assert cp.plan_restore(held, {}, NODES, 1).step == 20


def test_what_could_not_be_restored_is_passed_over_but_not_for_nothing() -> None:
    held = all_of(step=20)
    for rank, node in enumerate(NODES):
        held.hold(copy_of(rank, node, step=10))
    assert cp.plan_restore(held, {}, NODES, 1, {StateId(20, 1)}).step == 10
    assert cp.plan_restore(held, {15: 1}, NODES, 1, {StateId(20, 1)}).step == 15
    assert cp.plan_restore(all_of(step=20), {}, NODES, 1, {StateId(20, 1)}).step == 20


def test_nothing_saved_is_a_fresh_start_and_another_world_uses_the_shared_tier() -> None:
    assert cp.plan_restore(Copies(), {}, NODES, 1).tier == ""
    plan = cp.plan_restore(all_of(), {5: 100}, ("n1", "n2"), 1)
    assert (plan.step, plan.tier) == (5, SHARED)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["n1", "n2", "n3", "s1"]), st.sampled_from([10, 20]),
            st.sampled_from([1, 2]), st.sampled_from([MEMORY, PEER, LOCAL]),
            st.sampled_from([ALL, COMMON, OWN]), st.booleans(),
        )
    )
)  # fmt: skip
def test_a_plan_never_mixes_sets_and_covers_every_part(
    drawn: list[tuple[int, str, int, int, str, str, bool]],
) -> None:
    held = Copies()
    for rank, node, step, attempt, tier, part, dropped in drawn:
        copy = copy_of(
            rank, node, step=step, attempt=attempt, tier=tier, part=part, common=f"{step}.{attempt}"
        )
        held.hold(copy)
        if dropped:
            held.drop(copy)
    plan = cp.plan_restore(held, {}, NODES, 1)
    if plan.tier == "":
        assert not any(held.restorable(key) for key in held.newest_first())
        return
    everything = {(c.node, c.part, c.rank) for c in held.every() if c.key == (plan.step, plan.attempt)}
    for rank in range(3):
        sources = held.sources(StateId(plan.step, plan.attempt), rank, NODES[rank])
        for part in (COMMON, OWN):
            assert any(source.has(part) for source in sources)
        for source in sources:
            held_there = {(source.node, part, source.rank) for part in (source.part, ALL)}
            assert held_there & everything
            assert source.rank == rank or source.part == COMMON


def test_images_that_fail_together_are_one_failure_to_reach_a_node() -> None:
    reach = cp.Reachability()
    assert reach.failed(("a", "b"), 10.0)
    assert not reach.failed(("a", "b"), 10.1)
    assert reach.given_up(10.1) == frozenset()
    assert reach.failed(("a", "b"), 10.1 + cp.RETRY_S)
    assert reach.given_up(16.0) == {("a", "b")}
    pause_s = next(iter(reach._failing.values())).until
    assert not reach.failed(("a", "b"), 15.2), "its other image fails as well"
    assert next(iter(reach._failing.values())).until == pause_s


def test_a_try_that_a_lost_node_ended_is_repeated_a_second_later() -> None:
    retries = Retries()
    assert retries.interrupted(SHARED, 100.0), "it is news"
    assert not retries.interrupted(SHARED, 100.5)
    assert (retries.due(SHARED, 101.4), retries.due(SHARED, 101.6)) == (False, True)


def test_replicas_take_a_tenth_of_the_time_at_most() -> None:
    after = Successor(Story().running())
    replicas, now = after.machine.checkpoints.replicas, after.story.t
    after.machine.on_work_done(2.0, now)
    replicas.on_agent_joined("n1", "")
    replicas.look(StateId(10, 1), now + 17.9)
    assert not replicas.under_way
    replicas.look(StateId(10, 1), now + 18.1)
    assert replicas.under_way


def test_who_else_may_hold_a_replica_is_looked_for_as_soon_as_one_node_is_given_up() -> None:
    after = Successor(Story().running())
    replicas, now = after.machine.checkpoints.replicas, after.story.t
    failed = msg.Unreplicated(step=10, attempt=1, rank=0, part=ALL, why="no answer")
    found = []
    for at in (now, now + 30.0):
        replicas.on_replicate_failed("n3", failed, at)
        replicas.look(StateId(10, 1), at)
        found.append(replicas.under_way)
    assert found == [False, True]
