"""What others published about failures, cadences and goodput, beside what jurymast's formulas say; and the
goodput that they and the simulator predict of runs like theirs.

Needs nothing but some seconds of one processor. A case's tolerance is what its published figure was
rounded to, or what its note explains. What the predictions assume is told with them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target
from jurymast.core.judges.cadence import Cadence
from jurymast.core.judges.forecast import DURABLE_SHARE, Question, auto_spares, forecast, goodput, young_s
from jurymast.core.state.failure_rate import DAY_S, mtbf_s, prior
from jurymast.report.plan import plan_view
from jurymast.report.simulation import GOODPUT, simulate
from jurymast.sim.checkpoints import TRAINING_START_S, Durations, read_measured
from jurymast.sim.faults import FaultModel
from jurymast.sim.simulation import Setup

META = "Meta, arXiv 2410.21680"
LLAMA = "Llama 3, arXiv 2407.21783"
FT_HSDP = "FT-HSDP"
MICRON = "Micron/Lightbits"
BYTEROBUST = "ByteRobust"
HLAT = "AWS HLAT"
MLPERF = "MLPerf Storage"
RSC1, RSC2, LLAMA_RATE, MICRON_RATE = 6.50, 2.34, 3.79, 3.87
MINUTE_S, HOUR_S = 60.0, 3600.0


@dataclass(frozen=True)
class Case:
    """`row` numbers the published result; `tolerance` is relative to the published value."""

    row: int
    name: str
    source: str
    metric: str
    unit: str
    published: float
    ours: float
    tolerance: float
    note: str = ""

    @property
    def deviation(self) -> float:
        """Relative."""
        return abs(self.ours / self.published - 1.0)


def gpus_mtbf_s(gpus: int, rate: float) -> float:
    """Of a run on 8-GPU nodes."""
    return mtbf_s(gpus // 8, rate)


def saved_every(gpus: int, rate: float, interval_s: float, restart_s: float) -> float:
    """Exact goodput with saves that cost nothing."""
    return goodput(interval_s, 0.0, gpus_mtbf_s(gpus, rate), restart_s)


def linear_ettr(interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """(1 - (R + Delta/2)/M) / (1 + C/Delta): Meta's form (arXiv 2410.21680), biased low once waste passes
    30 % and 0 where it would be negative. Kept to compare with published figures."""
    return max(0.0, 1.0 - (restart_s + interval_s / 2.0) / mtbf_s) / (1.0 + save_s / interval_s)


def state_bytes(parameters: float, bytes_per_parameter: float = 13.0) -> float:
    """A checkpoint's size. MLPerf Storage's models have 13 (70B, 405B) to 18 bytes (1T) a parameter: weights
    and an Adam optimizer's state in mixed precision; 2 are the weights in bfloat16 alone."""
    return parameters * bytes_per_parameter


def at_young(mtbf: float, save_s: float, restart_s: float) -> tuple[float, float]:
    """Goodput at Young's interval, by Meta's linear form and exactly."""
    tau_s = young_s(save_s, mtbf)
    return linear_ettr(tau_s, save_s, mtbf, restart_s), goodput(tau_s, save_s, mtbf, restart_s)


def micron(restart_s: float = 0.0) -> dict[str, float]:
    """`jurymast plan --nodes 3000 --gpus-per-node 8 --rate 3.87 --checkpoint-bytes 5e12 --restart-s ...`"""
    asked = Question(nodes=3000, rate=prior(MICRON_RATE), checkpoint_bytes=5e12, restart_s=restart_s)
    return plan_view(forecast(asked))


def cases() -> list[Case]:
    return [*_meta(), *_llama(), *_recovery(), *_micron(), *_sizes()]


def _meta() -> Iterator[Case]:
    for gpus, hours in ((16_384, 1.80), (131_072, 0.225)):
        yield Case(
            1, f"RSC-1, {gpus} GPUs", META, "MTTF", "h", hours,
            gpus_mtbf_s(gpus, RSC1) / HOUR_S, 0.01,
        )  # fmt: skip
    table = (
        ("RSC-1, 16k GPUs, save every 60 min", 16_000, RSC1, 60, 5, 0.720),
        ("RSC-1, 16k GPUs, save every 5 min", 16_000, RSC1, 5, 5, 0.934),
        ("RSC-1, 100k GPUs, save every 7 min", 100_000, RSC1, 7, 5, 0.615),
        ("RSC-2, 100k GPUs, save every 2 min, restart 2 min", 100_000, RSC2, 2, 2, 0.941),
    )
    for name, gpus, rate, interval_min, restart_min, published in table:
        yield Case(
            2, name, META, "goodput", "ratio", published,
            saved_every(gpus, rate, interval_min * MINUTE_S, restart_min * MINUTE_S), 0.001,
        )  # fmt: skip
    yield Case(
        2, "RSC-1, 12k GPUs, saves of 10 s", META, "goodput", "ratio", 0.922,
        at_young(gpus_mtbf_s(12_000, RSC1), 10.0, 5 * MINUTE_S)[1], 0.001,
    )  # fmt: skip


def _llama() -> Iterator[Case]:
    mtbf = gpus_mtbf_s(16_384, LLAMA_RATE)
    yield Case(3, "16,384 GPUs", LLAMA, "MTBF", "h", 3.09, mtbf / HOUR_S, 0.003)
    for save_s, restart_min, published in ((10, 10, 0.906), (20, 10, 0.889), (60, 0, 0.901)):
        exact = at_young(mtbf, save_s, restart_min * MINUTE_S)[1]
        yield Case(
            3, f"saves of {save_s} s, restart {restart_min} min", LLAMA, "ETTR", "ratio", published,
            at_young(mtbf, save_s, restart_min * MINUTE_S)[0], 0.001,
            f"published with the linear form, as here; exact: {exact:.3f}",
        )  # fmt: skip


def _recovery() -> Iterator[Case]:
    mtbf = 18 * MINUTE_S
    for restart_min, published in ((10, 0.44), (3, 0.815)):
        exact = math.exp(-restart_min * MINUTE_S / mtbf)
        yield Case(
            4, f"100k GPUs, recovery {restart_min} min", FT_HSDP, "goodput", "ratio", published,
            linear_ettr(1e-9, 0.0, mtbf, restart_min * MINUTE_S), 0.025,
            f"published as 1 - R/M (44 %, 80-83 %), which lets nothing fail during a recovery start it anew; "
            f"exact, saves for free: {exact:.3f}",
        )  # fmt: skip
    yield Case(
        4, "100k GPUs, RSC-1's rate", FT_HSDP, "MTBF", "min", 18.0,
        gpus_mtbf_s(100_000, RSC1) / MINUTE_S, 0.02,
    )  # fmt: skip


def _micron() -> Iterator[Case]:
    for metric, unit, published, key, scale in (
        ("MTTF", "min", 124.0, "mttf_minutes", 1.0),
        ("cadence", "min", 6.2, "cadence_minutes", 1.0),
        ("saves", "1/day", 232.0, "checkpoints_per_day", 1.0),
        ("written", "PB/day", 1.16, "bytes_per_day", 1e15),
        ("average write", "GB/s", 13.5, "average_write_gb_per_s", 1.0),
    ):
        yield Case(
            5, "24,000 GPUs, 5 TB", MICRON, metric, unit, published,
            micron()[key] / scale, 0.006,
        )  # fmt: skip
    bandwidth = micron()["burst_write_gb_per_s"]
    yield Case(
        5, "24,000 GPUs, 5 TB, restart 0", MICRON, "goodput", "ratio", 0.95,
        micron()["goodput"], 0.001, f"needs writes of {bandwidth:.0f} GB/s while training waits",
    )  # fmt: skip
    yield Case(
        5, "24,000 GPUs, 5 TB, restart 10 min", MICRON, "goodput", "ratio", 0.87,
        micron(10 * MINUTE_S)["goodput"], 0.01,
        "published 0.95 - R/M; here a failure may strike the recovery, too",
    )  # fmt: skip


def _sizes() -> Iterator[Case]:
    for name, parameters, published, unit, scale in (
        ("70B", 70e9, 912.0, "GB", 1e9),
        ("405B", 405e9, 5.29, "TB", 1e12),
    ):
        yield Case(
            6, name, MLPERF, "checkpoint", unit, published, state_bytes(parameters) / scale, 0.01,
            "as `plan` takes it where only a number of parameters is given",
        )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A run to predict. `records`: goodputs that others published for such runs, by source; `target`: what
    is wished for here. `storage`: bytes per second from all nodes together."""

    name: str
    nodes: int
    rate: float
    checkpoint_bytes: float
    days: float
    records: tuple[tuple[str, float], ...]
    target: float | None = None
    storage: float = 1e12

    @property
    def durations(self) -> Durations:
        return MEASURED.durations(self.nodes, self.checkpoint_bytes, self.storage)

    def question(self, training_start_s: float) -> Question:
        return Question(
            nodes=self.nodes, rate=prior(self.rate), checkpoint_bytes=self.checkpoint_bytes,
            write_bytes_per_s=self.storage,
            restart_s=self.durations.restart_s - self.durations.warm_up_s + training_start_s,
        )  # fmt: skip

    def restart_allowed_s(self, goodput: float) -> float | None:
        """The longest restart with which the plan still reaches `goodput`, by bisection; None: none does."""
        low, high = 0.0, 3600.0
        for _ in range(40):
            middle = (low + high) / 2.0
            question = replace(self.question(0.0), restart_s=middle)
            low, high = (middle, high) if forecast(question).way.goodput >= goodput else (low, middle)
        return low or None

    def simulated(self, seeds: int) -> list[float]:
        """Goodput with everything that waits for nodes; as many incidents as the rate says, of which the
        share that the plan assumes takes several nodes."""
        seconds, durations = self.days * DAY_S, self.durations
        setup = Setup(
            nodes=self.nodes, spares=auto_spares(self.nodes, self.rate), seconds=seconds,
            durations=durations,
        )  # fmt: skip
        model = FaultModel(rate=self.rate * (1.0 + 1.5 * DURABLE_SHARE), multi=DURABLE_SHARE)
        outcomes = simulate(
            setup, lambda rng: model.draw(setup.nodes + setup.spares, seconds, rng),
            Cadence(), seeds,
        )  # fmt: skip
        return [outcome.ratios[GOODPUT] or 0.0 for outcome in outcomes]


MEASURED = read_measured()
PREDICTIONS = (
    Prediction("16,384 GPUs, r = 3.79, 405B", 2048, LLAMA_RATE, 5.29e12, 30, ((LLAMA, 0.90),), 0.99),
    Prediction("100,000 GPUs, r = 6.5, 405B", 12_500, RSC1, 5.29e12, 7, ((FT_HSDP, 0.80),), 0.95),
    Prediction("100,000 GPUs, r = 6.5, 1T", 12_500, RSC1, 18e12, 7, ((FT_HSDP, 0.80),), 0.95),
    Prediction("9,600 GPUs, r = 3.8, 405B", 1200, 3.8, 5.29e12, 30, ((BYTEROBUST, 0.97),)),
    Prediction("4,096 accelerators on 256 nodes, r = 5, 70B", 256, 5.0, 0.912e12, 30, ((HLAT, 0.9881),)),
)


def predicted(seeds: int) -> tuple[list[Row], list[Target]]:
    rows, targets = [], []
    for each in PREDICTIONS:
        common.progress(f"predicting {each.name}")
        for source, value in each.records:
            note = "published; the denominators differ, and who counts what"
            rows.append(Row(each.name, source, "goodput", "ratio", value, value, value, 1, note))
        found = common.spread([*each.simulated(seeds)])
        figures = (found.median, found.low, found.high, found.n)
        note = "includes waiting for nodes; low and high: seeds"
        rows.append(Row(each.name, common.JURYMAST, "goodput, simulated", "ratio", *figures, note))
        for start_s in (0.0, TRAINING_START_S, 2.0 * TRAINING_START_S):
            plan = forecast(each.question(start_s))
            metric, note = f"goodput, planned, training starts in {start_s:g} s", "low and high: rates, 90 %"
            figures = (plan.way.goodput, plan.low, plan.high, 1)
            rows.append(Row(each.name, common.JURYMAST, metric, "ratio", *figures, note))
        if each.target is not None:
            allowed_s = each.restart_allowed_s(each.target)
            name = f"restart that still leaves {each.target:g}"
            rows.append(Row(each.name, "limit", name, "s", allowed_s, allowed_s, allowed_s, 1))
            targets.append(Target(f"{each.name}: simulated goodput", found.median, each.target, "higher"))
    return rows, targets


def assumed() -> list[str]:
    """Of the predictions."""
    return [
        f"from a lost node to new ranks 1.6 s, restore at {MEASURED.restore / 1e9:g} GB/s a node, saves at "
        f"{MEASURED.copy / 1e9:g} GB/s a node: {MEASURED.source}; at scale not tried",
        f"from new ranks to their first step {TRAINING_START_S:g} s: communicators, compiled code, data "
        "loaders; nobody measured it",
        "shared storage takes 1 TB/s from all nodes together",
        f"{100 * DURABLE_SHARE:g} % of incidents take several neighbours: in the plan with both copies of "
        "something, in the simulator with those that they hold",
        f"a lost node is replaced in {Durations().repair_s / 3600.0:g} h; spares as `spares: auto` has them",
        "nothing hangs, the script never fails, no rank is slow",
    ]


def rows_of(found: list[Case]) -> list[Row]:
    """Published and ours, one below the other."""
    rows = []
    for case in found:
        name = f"{case.row}: {case.name}"
        for system, value in ((case.source, case.published), (common.JURYMAST, case.ours)):
            note = case.note if system == common.JURYMAST else ""
            rows.append(Row(name, system, case.metric, case.unit, value, value, value, 1, note))
    return rows


def targets_of(found: list[Case]) -> list[Target]:
    return [
        Target(f"{case.row}: {case.name}: {case.metric}, deviation", case.deviation, case.tolerance, "lower")
        for case in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="simulate each prediction once, not three times")
    arguments = parser.parse_args()
    found = cases()
    rows, targets = predicted(1 if arguments.quick else 3)
    about = {**common.machine(), "assumed": assumed()}
    common.print_report(
        "published", rows_of(found) + rows, targets_of(found) + targets, about, arguments.json
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
