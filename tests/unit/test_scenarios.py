"""Who is blamed for what, over a table of failures, and never a healthy node."""

from __future__ import annotations

import pytest

from support.scenario_table import SCENARIOS
from support.scenarios import Scenario, play


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(scenario: Scenario) -> None:
    outcome = play(scenario)
    assert outcome.wrong(scenario) == [], f"{scenario}\n{outcome}"


def test_the_table_is_worth_its_name() -> None:
    assert len(SCENARIOS) >= 40
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
