"""What every benchmark prints, and how: rows, targets, the machine, statistics.

Times are seconds unless a row's `unit` says otherwise. A value that could not be measured is None (null in
JSON) and comes with a note that says why; nothing is filled in.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

JURYMAST = "jurymast"
BOOTSTRAP_ROUNDS = 4000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and highest sample; None where samples without a value decide it."""

    median: float | None
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Row:
    """One measured quantity of one system in one case. `samples`: every repeat's raw values."""

    case: str
    system: str
    metric: str
    unit: str
    median: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""
    samples: list[Any] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for optional in ("note", "samples"):
            if not values[optional]:
                del values[optional]
        return values


@dataclass(frozen=True)
class Target:
    """What a value is held against. `better`: "lower" or "higher"."""

    name: str
    value: float | None
    target: float
    better: str
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None while there is no value."""
        if self.value is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if not values["note"]:
            del values["note"]
        return values


def spread(samples: Sequence[float | None]) -> Spread:
    """Median, lowest and highest of the samples; one without a value (it never happened) counts as endless.

    So a median exists only when more than half of the samples have a value, and a highest when all have.
    """
    if not samples:
        return Spread(None, None, None, 0)
    ordered = sorted(math.inf if value is None else value for value in samples)
    return Spread(
        _finite(statistics.median(ordered)), _finite(ordered[0]), _finite(ordered[-1]), len(ordered)
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def bootstrap(
    samples: Sequence[float],
    statistic: Callable[[Sequence[float]], float] = statistics.median,
    *,
    rounds: int = BOOTSTRAP_ROUNDS,
    confidence: float = CONFIDENCE,
    seed: int = 1,
) -> tuple[float, float]:
    """Percentile interval of `statistic` over resamples of `samples` with replacement."""
    chance = random.Random(seed)
    found = sorted(statistic(chance.choices(samples, k=len(samples))) for _ in range(rounds))
    tail = (1 - confidence) / 2
    return found[int(tail * (rounds - 1))], found[math.ceil((1 - tail) * (rounds - 1))]


def machine() -> dict[str, Any]:
    """What the numbers were measured on; `load_1m` is the load average when the benchmark began."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "jurymast": version("jurymast"),
        "load_1m": round(os.getloadavg()[0], 2),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def version(package: str) -> str | None:
    """Version of an installed package; None when it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def public_version(package: str) -> str:
    """Without the local part: 2.13.0 for 2.13.0+cpu."""
    return (version(package) or "?").split("+")[0]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def report(
    benchmark: str, rows: Iterable[Row], targets: Iterable[Target], about: dict[str, Any]
) -> dict[str, Any]:
    """The object that `--json` prints; `about` is `machine()` and whatever else the numbers depend on."""
    return {
        "benchmark": benchmark,
        "rows": [row.to_json() for row in rows],
        "targets": [target.to_json() for target in targets],
        "machine": about,
    }


def print_report(
    benchmark: str, rows: list[Row], targets: list[Target], about: dict[str, Any], as_json: bool
) -> None:
    """To standard output: one JSON object, or tables for people."""
    if as_json:
        print(json.dumps(report(benchmark, rows, targets, about)))
    else:
        print(text(rows, targets, about))


def text(rows: Sequence[Row], targets: Sequence[Target], about: dict[str, Any]) -> str:
    """Two tables, rows and targets, with the notes below, and the machine."""
    notes: list[str] = []

    def numbered(note: str) -> str:
        if not note:
            return ""
        if note not in notes:
            notes.append(note)
        return f"[{notes.index(note) + 1}]"

    cells = [("case", "system", "metric", "median", "low", "high", "unit", "n", "")]
    for row in rows:
        figures = (number(row.median), number(row.low), number(row.high))
        cells.append((row.case, row.system, row.metric, *figures, row.unit, str(row.n), numbered(row.note)))
    parts = [table(cells, right=(3, 4, 5, 7))]
    if targets:
        cells = [("target", "value", "", "wanted", "met", "", "", "", "")]
        words = {True: "yes", False: "no", None: "-"}
        for target in targets:
            sign = "<=" if target.better == "lower" else ">="
            wanted = number(target.target)
            cells.append(
                (target.name, number(target.value), sign, wanted, words[target.met],
                 numbered(target.note), "", "", "")
            )  # fmt: skip
        parts.append(table(cells, right=(1, 3)))
    parts += ["\n".join(f"[{i + 1}] {note}" for i, note in enumerate(notes))] if notes else []
    parts.append("\n".join(f"{name}: {value}" for name, value in about.items()))
    return "\n\n".join(parts)


def number(value: float | None) -> str:
    """Four significant digits; more before the point when it needs them."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(lines: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Aligned columns; those in `right` are flush right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    shown = []
    for line in lines:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        shown.append("  ".join(cells).rstrip())
    return "\n".join(shown)


def progress(message: str) -> None:
    """A line for whoever waits, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)
