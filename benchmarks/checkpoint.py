#!/usr/bin/env python3
"""What a checkpoint costs: the stall of a save, memory, restores from every tier, replicas, writes to disk.

Everything is held against the limit that this machine sets to the same bytes at the same time: a plain copy
in the rank's own thread, a plain TCP transfer, a plain write. In each round every system has a turn, in
random order, alone on the machine, with processes of its own; each save follows such a copy. Ratios of
neighbours hold on a busy machine; seconds need a quiet one.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from benchmarks.tiers.child import ChildError
from benchmarks.tiers.trial import Case, Figures, Trial, measure_jurymast, measure_peer

GIB = (2.0, 6.0)
RANKS = (1, 2)
ROUNDS = 3
SAVES = 3
QUICK_GIB = 0.25
DISK = Path("/var/tmp")
CACHE = Path("/var/cache/jurymast-bench")
INSTALL_LIMIT_S = 300.0
# torchsnapshot does not pin what it imports; these work with it. torch is ours.
TORCHSNAPSHOT = (
    "torchsnapshot==0.1.0",
    "aiofiles==25.1.0",
    "nest-asyncio==1.6.0",
    "importlib-metadata<7",
    "zipp",
)
NVRX = "nvrx 0.4.1 local checkpoints"
NVRX_NEEDS = "not measured: it takes only tensors that are on a GPU (BasicTensorAwareStateDict asserts it)"
SMALL_NOTE = "the copy's target is 1 GiB, used several times: there is no room for more"
UNITS = {
    "stall over a copy": "ratio",
    "stall": "s",
    "copy": "s",
    "from the stall's end until whole": "s",
    "until the peer holds it": "s",
    "memory": "states",
    "fresh pages of a save": "pages",
    "peer transfer over TCP": "ratio",
    "peer transfer": "GB/s",
    "peer transfer over TCP, encrypted": "ratio",
    "peer transfer, encrypted": "GB/s",
    "write over a plain one": "ratio",
    "write": "GB/s",
}
LIVE = "into live tensors that were touched before; every byte is compared"
NOTES = {
    "memory": "beyond the state itself, at most, in sizes of the state: private memory and shared memory",
    "fresh pages of a save": "page faults of the ranks until the save was whole, and pages of new files",
    "from the stall's end until whole": "jurymast: the agent holds it, hashed; others: all of it is written",
    "until the peer holds it": "hashed, sent and verified; into memory that was used before",
    "peer transfer over TCP": "authenticated by AES-GMAC and verified; plain TCP does neither",
}


@dataclass(frozen=True)
class Entrant:
    """`kind`: see tiers.systems; `loads`: where it restores from."""

    kind: str
    label: str
    loads: tuple[str, ...] = ()
    note: str = ""


def entrants() -> list[Entrant]:
    torch = common.public_version("torch")
    return [
        Entrant("jurymast", common.JURYMAST),
        Entrant("torch.save", f"torch.save {torch}", ("memory",), "restored by torch.load(mmap=True)"),
        Entrant("dcp.save", f"dcp.save {torch}", ("memory", "disk")),
        Entrant("dcp.async_save", f"dcp.async_save {torch}"),
        Entrant(
            "dcp.async_save-stager", f"dcp.async_save {torch}, one DefaultStager", (),
            "shared memory, asynchronous; the stall includes the staging, until which no tensor may change",
        ),
        Entrant("torchsnapshot", "torchsnapshot 0.1.0 async_take"),
    ]  # fmt: skip


QUICK_KINDS = ("jurymast", "torch.save", "dcp.save", "dcp.async_save-stager")
# What the targets are about, and jurymast's own metrics that peers have no counterpart of.
TARGETS = (
    ("stall_over_copy", "stall over a copy", 1.1, "lower"),
    ("fresh_pages_per_save", "fresh pages of a save", 0.0, "lower"),
    ("own_memory_restore_over_copy", "restore over a copy, own memory", 1.2, "lower"),
    ("peer_over_tcp", "peer transfer over TCP", 0.8, "higher"),
    ("write_over_plain", "write over a plain one", 0.8, "higher"),
)


@dataclass
class Bench:
    """`figures` and `notes` by case and kind."""

    cases: Sequence[Case]
    systems: Sequence[Entrant]
    rounds: int
    saves: int
    disk: Path
    cache: Path
    seed: int = 1
    figures: dict[tuple[Case, str], Figures] = field(default_factory=dict)
    notes: dict[tuple[Case, str], dict[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        chance = random.Random(self.seed)
        for case in self.cases:
            for number in range(1, self.rounds + 1):
                for one in chance.sample(list(self.systems), len(self.systems)):
                    if one.kind not in self.missing:
                        self._turn(case, one, number)

    def _turn(self, case: Case, one: Entrant, number: int) -> None:
        trial = Trial(case, self.saves, self.disk)
        what = ""
        try:
            if one.kind == "jurymast":
                measure_jurymast(trial)
            else:
                measure_peer(trial, one.kind, self._environment(one), one.loads)
        except ChildError as error:
            what = str(error)
            trial.notes[""] = what
        known = self.figures.setdefault((case, one.kind), {})
        for metric, values in trial.figures.items():
            known.setdefault(metric, []).extend(values)
        self.notes.setdefault((case, one.kind), {}).update(trial.notes)
        told = ", ".join(
            f"{metric} {common.number(common.spread(values).median)}"
            for metric, values in trial.figures.items()
            if UNITS.get(metric, "ratio") in ("ratio", "pages", "states")
            and not metric.startswith("restore, ")
        )
        common.progress(f"{case.name}, round {number} of {self.rounds}, {one.label}: {told} {what}".rstrip())
        for metric, why in trial.notes.items():
            if metric:
                common.progress(f"  no {metric}: {why}")

    def _environment(self, one: Entrant) -> dict[str, str]:
        return {"PYTHONPATH": str(_snapshot_place(self.cache))} if one.kind == "torchsnapshot" else {}

    # ---- what is printed

    def rows(self) -> list[Row]:
        found = [row for case in self.cases for one in self.systems for row in self._rows(case, one)]
        if any(one.kind == "torchsnapshot" for one in self.systems):
            found += [
                Row(case.name, NVRX, "stall over a copy", "ratio", None, None, None, 0, NVRX_NEEDS)
                for case in self.cases
            ]
        return found

    def _rows(self, case: Case, one: Entrant) -> list[Row]:
        figures = self.figures.get((case, one.kind), {})
        notes = {**self.notes.get((case, one.kind), {})}
        rows = [
            self._row(case, one, metric, values)
            for metric, values in sorted(figures.items(), key=lambda pair: _place(pair[0]))
        ]
        lost = [metric for metric in notes if metric and metric not in figures]
        if one.kind in self.missing or ("" in notes and "stall over a copy" not in figures):
            lost.append("stall over a copy")
        for metric in lost:
            why = notes.get(metric) or self.missing.get(one.kind) or notes.get("", "")
            rows.append(Row(case.name, one.label, metric, _unit(metric), None, None, None, 0, why))
        return rows

    def _row(self, case: Case, one: Entrant, metric: str, values: list[float]) -> Row:
        found = common.spread(values)
        note = NOTES.get(metric, LIVE if metric.startswith("restore") else "")
        if metric in ("stall over a copy", "copy") and case.window_bytes < case.state_bytes:
            note = SMALL_NOTE
        if one.note and metric in ("stall over a copy", "restore over a copy, memory"):
            note = f"{note}; {one.note}" if note else one.note
        return Row(
            case.name, one.label, metric, _unit(metric), found.median, found.low, found.high, found.n, note,
            list(values),
        )  # fmt: skip

    def targets(self) -> list[Target]:
        """Of one rank with the smallest state; 2 GiB unless it is a quick run."""
        case = min(self.cases, key=lambda one: (one.ranks, one.gib))
        figures = self.figures.get((case, "jurymast"), {})
        notes = self.notes.get((case, "jurymast"), {})
        found = []
        for name, metric, wanted, better in TARGETS:
            value = common.spread(list(figures.get(metric, []))).median
            note = case.name if value is not None else notes.get(metric) or notes.get("", "not run")
            found.append(Target(name, value, wanted, better, note))
        return found


def _place(metric: str) -> int:
    return list(UNITS).index(metric) if metric in UNITS else len(UNITS)


def _unit(metric: str) -> str:
    if metric.startswith("restore, "):
        return "s"
    return UNITS.get(metric, "ratio")


def _snapshot_place(cache: Path) -> Path:
    return cache / "torchsnapshot-0.1.0"


def install_torchsnapshot(cache: Path) -> str:
    """Into a directory of its own, beside our torch, unless it is there; why it could not be, or ""."""
    place = _snapshot_place(cache)
    if (place / ".complete").exists():
        return ""
    common.progress(f"installing torchsnapshot into {place}")
    shutil.rmtree(place, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*pip, "--target", str(place), *TORCHSNAPSHOT],
            capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"could not be installed within {INSTALL_LIMIT_S:.0f} s"
    if done.returncode != 0:
        return f"could not be installed: {done.stderr.strip()[-300:]}"
    (place / ".complete").touch()
    return ""


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same shape, in a minute")
    parser.add_argument(
        "--gib",
        nargs="+",
        type=float,
        metavar="GIB",
        help=f"state on the machine [{' '.join(map(_short, GIB))}]",
    )
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="ranks that share it [1 2]")
    parser.add_argument("--rounds", type=int, help=f"turns of each system in each case [{ROUNDS}]")
    parser.add_argument("--saves", type=int, help=f"measured saves (and restores, ...) in a turn [{SAVES}]")
    kinds = [one.kind for one in entrants()]
    parser.add_argument(
        "--systems", nargs="+", choices=kinds, metavar="SYSTEM", help=f"all, or some of: {', '.join(kinds)}"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order of systems [1]")
    parser.add_argument("--disk", type=Path, default=DISK, help=f"a directory on a local disk [{DISK}]")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where a peer is installed [{CACHE}]")
    return parser


def _short(value: float) -> str:
    return f"{value:g}"


def bench_of(arguments: argparse.Namespace) -> Bench:
    quick = bool(arguments.quick)
    sizes = arguments.gib or ([QUICK_GIB] if quick else list(GIB))
    ranks = arguments.ranks or ([1] if quick else list(RANKS))
    kinds = arguments.systems or (QUICK_KINDS if quick else [one.kind for one in entrants()])
    return Bench(
        cases=[Case(gib, count) for gib in sizes for count in ranks],
        systems=[one for one in entrants() if one.kind in kinds],
        rounds=arguments.rounds or (1 if quick else ROUNDS),
        saves=arguments.saves or SAVES,
        disk=arguments.disk,
        cache=arguments.cache,
        seed=arguments.seed,
    )


def about(bench: Bench) -> dict[str, Any]:
    return {
        **common.machine(),
        "rounds": bench.rounds,
        "saves_of_a_turn": bench.saves,
        "state": "66 parameters, half bfloat16, half float32, and their Adam: 264 tensors, one thread a rank",
        "disk": str(bench.disk),
        "low_and_high": "lowest and highest sample",
    }


def _end(number: int, _frame: object) -> NoReturn:
    common.progress(f"ended by {signal.Signals(number).name}")
    sys.exit(128 + number)


def main() -> int:
    arguments = options().parse_args()
    signal.signal(signal.SIGTERM, _end)
    bench = bench_of(arguments)
    if any(one.kind == "torchsnapshot" for one in bench.systems) and (
        why := install_torchsnapshot(bench.cache)
    ):
        bench.missing["torchsnapshot"] = why
    described = about(bench)
    bench.run()
    common.print_report("checkpoint", bench.rows(), bench.targets(), described, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
