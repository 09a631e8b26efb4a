"""Bugs are planted, one for each rule and for each that was once there: the simulated cluster finds all."""

from __future__ import annotations

import pytest

from jurymast.sim.cluster.cluster import run
from support.planted import PLANTED, plan_for

PLANS = 2000


USUAL_MARKS = (pytest.mark.timeout(900),)  # on a busy machine
# Takes a thousand plans or more to be found, and minutes.
LONG = ("7: the supervisor's pauses count", "1: who is not back yet has nothing")
LONG_MARKS = (pytest.mark.long, pytest.mark.timeout(1800))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONG_MARKS if name in LONG else USUAL_MARKS) for name in PLANTED]
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
