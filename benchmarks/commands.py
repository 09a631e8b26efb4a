#!/usr/bin/env python3
"""How long people wait for the command, and a node for its agent: `jurymast --help`, and all that an agent
imports before it connects, against `python -c pass`.

Each is started in turn, so that a slow minute slows all alike. A ratio is that of the medians: what is wanted
is 150 and 200 ms where Python itself takes 13.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target

ROUNDS, QUICK_ROUNDS = 41, 5
PYTHON_S = 0.013
NOTHING = "python -c pass"
COMMANDS = {
    NOTHING: ["-c", "pass"],
    "jurymast --help": ["-m", "jurymast", "--help"],
    "agent": ["-c", "import jurymast.agent.__main__"],
}
WANTED_S = {"jurymast --help": 0.150, "agent": 0.200}


def seconds(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds")
    arguments = parser.parse_args()
    about = {**common.machine(), "quick": arguments.quick}
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for counted in [False] + [True] * (QUICK_ROUNDS if arguments.quick else ROUNDS):
        for name, words in COMMANDS.items():
            took = seconds(words)  # what is read for the first time does not count
            times[name] += [took] * counted
    found = {name: common.spread(samples) for name, samples in times.items()}
    rows = [
        Row("start", JURYMAST, name, "s", one.median, one.low, one.high, one.n, samples=times[name])
        for name, one in found.items()
    ]
    nothing = found[NOTHING].median or PYTHON_S
    targets = [
        Target(f"{name} / {NOTHING}", (found[name].median or 0.0) / nothing, wanted_s / PYTHON_S, "lower")
        for name, wanted_s in WANTED_S.items()
    ]
    common.print_report("commands", rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
