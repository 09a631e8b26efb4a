"""Random plans of faults against simulated clusters: no rule may be broken, and the rules notice what is."""

from __future__ import annotations

from jurymast.sim.cluster.__main__ import several
from jurymast.sim.cluster.cluster import run
from jurymast.sim.cluster.plans import Plan, random_plan

SEEDS = range(200)


def test_no_rule_is_broken() -> None:
    results = several(True, SEEDS)
    assert [f"{one.broken} {one.plan.to_json()}" for one in results if one.broken] == []
    assert sum(one.steps for one in results) > 50 * len(SEEDS), "the ranks train"
    restores = sum(len(one.restores) for one in results)
    assert restores > 1.5 * len(SEEDS), "attempts end, and others restore"
    assert sum(one.state == "succeeded" for one in results) > len(SEEDS) / 6, "runs come to their end"
    assert sum(one.lives > 1 for one in results) > len(SEEDS) / 10, "and go on after a requeue"
    assert sum("None" not in restore for one in results for restore in one.restores) > len(SEEDS) / 3


def test_a_seed_and_its_json_give_the_same_again() -> None:
    plan = random_plan(7)
    first, again = run(plan), run(Plan.from_json(plan.to_json()))
    assert (first.events, first.steps, first.restores) == (again.events, again.steps, again.restores)
