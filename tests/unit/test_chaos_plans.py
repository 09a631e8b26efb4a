"""The generator of `benchmarks/chaos.py`: its plans can be drawn and read again; what is known of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.chaotic.plans import (
    KINDS,
    MOST_FAULTS,
    MOST_OF_SCRIPT,
    NODES,
    SCRIPTS_OWN,
    SHOWN_BY,
    Fault,
    Plan,
    cancels,
    destroys,
    each_kind,
    loses_replicas,
    random_plan,
    seeds,
)

from jurymast.core.state.incident import CAUSES

MANY = 400


def test_a_plan_is_that_of_its_seed_and_of_its_file() -> None:
    for seed in seeds(7, MANY):
        plan = random_plan(seed)
        assert random_plan(seed) == plan
        assert Plan.from_json(plan.to_json()) == plan
    assert seeds(7, 3) == seeds(7, MANY)[:3]


def test_every_kind_is_drawn_and_a_campaign_has_at_least_21() -> None:
    drawn = {fault.kind for seed in seeds(1, MANY) for fault in random_plan(seed).faults}
    assert drawn == set(KINDS)
    assert len(drawn) >= 21


@pytest.mark.parametrize("a_run", [1, 3])
def test_each_kind_can_be_struck_once(a_run: int) -> None:
    plans = each_kind(a_run=a_run)
    assert len(plans) == -(-len(KINDS) // a_run)
    assert {fault.kind for plan in plans for fault in plan.faults} == set(KINDS)
    assert all(Plan.from_json(plan.to_json()) == plan for plan in plans)
    assert all(fault.at < plan.steps for plan in plans for fault in plan.faults)
    assert [plan.faults[0].kind for plan in each_kind(("power", "loader"))] == ["power", "loader"]


def test_a_plan_asks_for_nothing_that_would_rightly_end_the_run_or_cannot_be() -> None:
    for plan in map(random_plan, seeds(3, MANY)):
        assert 1 <= len(plan.faults) <= 5
        assert plan.active + plan.spares <= NODES
        drawn = [fault.kind for fault in plan.faults]
        assert all(drawn.count(kind) <= MOST_OF_SCRIPT for kind in SCRIPTS_OWN)
        assert plan.loader or "loader" not in drawn
        assert plan.spares or "corrupt memory" not in drawn
        assert all((fault.seconds > 0.0) == (KINDS[fault.kind].longest_s > 0.0) for fault in plan.faults)
        assert all(fault.at < plan.steps for fault in plan.faults)


def test_what_damage_does_is_shown_by_a_loss_right_after() -> None:
    drawn = 0
    for plan in map(random_plan, seeds(3, MANY)):
        faults = list(plan.faults)
        for at, fault in enumerate(faults[:-1]):
            if fault.kind in SHOWN_BY and len(faults) < MOST_FAULTS:
                after = [
                    one.kind for one in faults[at + 1 :] if (one.at, one.wait_s) == (fault.at, fault.wait_s)
                ]
                assert SHOWN_BY[fault.kind] in after
                drawn += 1
        if any(fault.kind == "corrupt" for fault in faults):
            assert plan.shared_s  # or nothing that is damaged would be read
            assert not plan.peer
    assert drawn


def test_a_plan_may_have_more_faults() -> None:
    for plan in (random_plan(seed, most=10) for seed in seeds(3, MANY)):
        assert 5 <= len(plan.faults) <= 10
        assert plan.steps == 360
        drawn = [fault.kind for fault in plan.faults]
        assert sum(drawn.count(kind) for kind in SCRIPTS_OWN) <= 3  # jurymast's budget
    assert max(fault.at for seed in seeds(3, MANY) for fault in random_plan(seed, most=10).faults) > 300


def test_faults_may_be_of_some_kinds_only() -> None:
    for seed in seeds(5, 50):
        assert {fault.kind for fault in random_plan(seed, ("loader", "power")).faults} <= {"loader", "power"}


def test_incidents_have_causes_that_there_are() -> None:
    assert {cause for kind in KINDS.values() for cause in kind.causes} <= set(CAUSES)
    assert all(kind.causes for kind in KINDS.values() if kind.shows)


@pytest.mark.parametrize(
    "changed",
    [
        {"faults": [{"at": 3, "kind": "earthquake"}]},
        {"active": 6, "spares": 1},
        {"active": "two"},
        {"seed": None},
    ],
)
def test_what_is_no_plan_is_refused(changed: dict[str, object]) -> None:
    values = {**json.loads(random_plan(1).to_json()), **changed}
    with pytest.raises(ValueError):
        Plan.from_json(json.dumps(values))


def plan(*faults: tuple[int, str], spares: int = 1, peer: bool = True) -> Plan:
    return Plan(1, 2, spares, tuple(Fault(at, kind) for at, kind in faults), peer=peer)


def test_it_knows_which_plans_destroy_every_copy() -> None:
    assert not destroys(plan((30, "power"), (60, "power"), (90, "requeued")))  # what is on storage stays
    assert not destroys(plan((30, "corrupt"), (60, "rank")))  # what is in memory stays
    assert not destroys(plan((30, "corrupt"), (60, "power")))  # its peer has it
    assert destroys(plan((30, "corrupt"), (60, "power"), peer=False))
    assert destroys(plan((30, "corrupt"), (60, "power"), (61, "crash")))
    assert destroys(plan((30, "corrupt"), (60, "preempted")))


def test_it_knows_where_a_step_may_be_lost_that_two_nodes_had() -> None:
    assert not loses_replicas(plan((30, "power"), (100, "power")))
    assert loses_replicas(plan((30, "power"), (35, "power")))
    assert loses_replicas(plan((30, "power"), spares=0))  # it leaves its allocation
    assert loses_replicas(plan((30, "requeued")))
    assert loses_replicas(plan((30, "rank"), peer=False))
    assert loses_replicas(plan((30, "corrupt memory"), (30, "crash")))  # the copy that is left is damaged


def test_it_knows_who_is_cancelled() -> None:
    assert cancels(plan((30, "cancelled")))
    assert not cancels(plan((30, "requeued")))
