"""Bugs are planted, one for each rule and for each that was once there: the simulated cluster finds all."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

import pytest

from jurymast.sim.cluster.cluster import run
from support.planted import PLANTED, plan_for

PLANS = 2000
# By bug, a plan that found it. The bug is looked for in all plans, from the first on, where that one does not
# find it any more; with JURYMAST_UPDATE_GOLDEN (and `-n0`) always, and what finds it is written down here.
FINDERS = Path(__file__).parents[1] / "data" / "planted.json"


@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, attribute, value in PLANTED[name][1]:
        monkeypatch.setattr(target, attribute, value)
    finders = json.loads(FINDERS.read_text())
    first = [] if os.environ.get("JURYMAST_UPDATE_GOLDEN") else [finders.get(name, 0)]
    seeds = chain(first, range(PLANS))
    found = next((r for seed in seeds if (r := run(plan_for(name, seed))).broken), None)
    assert found is not None, f"not found by {PLANS} plans"
    if name[0].isdigit():
        rule = name.partition(":")[0]
        assert found.broken.startswith(f"{rule}:"), f"another rule was broken: {found.broken}"
    print(f"{name}: plan {found.plan.seed}: {found.broken}")
    if not first:
        finders[name] = found.plan.seed
        kept = {one: seed for one, seed in sorted(finders.items()) if one in PLANTED}
        FINDERS.write_text(json.dumps(kept, indent=1) + "\n")


def test_the_plans_that_find_planted_bugs_break_no_rule_without_them() -> None:
    finders = json.loads(FINDERS.read_text())
    assert sorted(finders) == sorted(PLANTED)
    assert [name for name, seed in finders.items() if run(plan_for(name, seed)).broken] == []
