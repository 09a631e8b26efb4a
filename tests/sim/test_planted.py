"""Bugs are planted, one for each rule and for each that was once there: the simulated cluster finds all."""

from __future__ import annotations

import pytest

from jurymast.sim.cluster.cluster import run
from support.planted import PLANTED, plan_for

PLANS = 2000


# Takes a thousand plans or more to be found.
LONG = ("7: the supervisor's pauses count",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in PLANTED]
)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, attribute, value in PLANTED[name][1]:
        monkeypatch.setattr(target, attribute, value)
    found = next((r for seed in range(PLANS) if (r := run(plan_for(name, seed))).broken), None)
    assert found is not None, f"not found by {PLANS} plans"
    if name[0].isdigit():
        rule = name.partition(":")[0]
        assert found.broken.startswith(f"{rule}:"), f"another rule was broken: {found.broken}"
    print(f"{name}: plan {found.plan.seed}: {found.broken}")
