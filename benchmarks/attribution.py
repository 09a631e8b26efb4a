"""Who gets the blame: scripted failures through the state machine, scored by culprit, cause, action and
innocents.

The events are what agents and probes tell in each story; that they notice in time is not measured here. Needs
nothing but a few seconds of one processor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from support.scenario_table import SCENARIOS
from support.scenarios import Scenario, play

METRICS = ("culprit", "cause", "action", "innocents", "alert")
ALL = "all scenarios"
# What should come of each story is written in it, so whatever is below 1 is a mistake of one of the two.
WANTED = {"culprit": 0.95, "cause": 0.95, "action": 0.95, "innocents": 1.0, "alert": 0.95}
FIRST = "first to fail"
RULE = "the rule of a launcher that only hears its ranks: whoever fails first is the cause"


def scored(scenarios: Sequence[Scenario]) -> dict[str, list[tuple[list[str], bool]]]:
    """By category, and over all: what is wrong with each scenario's outcome, and whether the first node to
    fail was the culprit."""
    found: dict[str, list[tuple[list[str], bool]]] = {}
    for scenario in scenarios:
        outcome = play(scenario)
        result = outcome.wrong(scenario), outcome.first == scenario.culprit
        for case in (scenario.category, ALL):
            found.setdefault(case, []).append(result)
    found[ALL] = found.pop(ALL)  # last
    return found


def row(case: str, system: str, metric: str, right: Sequence[bool], note: str = "") -> Row:
    value = sum(right) / len(right)
    return Row(case, system, metric, "ratio", value, value, value, len(right), note)


def rows(found: dict[str, list[tuple[list[str], bool]]]) -> list[Row]:
    lines = [row(case, JURYMAST, "all right", [not w for w, _ in results]) for case, results in found.items()]
    results = found[ALL]
    lines += [row(ALL, JURYMAST, f"{m} right", [m not in wrong for wrong, _ in results]) for m in METRICS]
    return [*lines, row(ALL, FIRST, "culprit right", [first for _, first in results], RULE)]


def targets(found: dict[str, list[tuple[list[str], bool]]]) -> list[Target]:
    shares = {m: sum(m not in wrong for wrong, _ in found[ALL]) / len(found[ALL]) for m in METRICS}
    return [Target(f"{metric}_right", value, WANTED[metric], "higher") for metric, value in shares.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="every fourth scenario")
    arguments = parser.parse_args()
    chosen = SCENARIOS[::4] if arguments.quick else SCENARIOS
    found = scored(chosen)
    about = {**common.machine(), "scenarios": len(chosen), "quick": arguments.quick}
    common.print_report("attribution", rows(found), targets(found), about, arguments.json)


if __name__ == "__main__":
    main()
