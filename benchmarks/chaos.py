#!/usr/bin/env python3
"""Random faults on real runs, on a real Slurm cluster on this machine: plans drawn by seed, each played on a
run of its own, and everything that is left of it held against the log of what struck it.

Each run's evidence is kept in `--keep`: the plan, the log of the faults, the journal, the logs, the report,
Slurm's words and the verdict. `--check FOLDER` reads them again, wherever they were played; `--replay
PLAN.json` plays a plan again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "slurm"))

from benchmarks import common
from benchmarks.chaotic.checker import OUTCOMES, Evidence, load, may_be, outcome, wrong
from benchmarks.chaotic.plans import KINDS, MOST_FAULTS, NODES, Plan, each_kind, random_plan, seeds
from benchmarks.chaotic.trial import conf, play, stage
from benchmarks.common import JURYMAST, Row, Target
from jurymast.errors import JurymastError
from support.ranks import stop_server
from testcluster import Cluster, ClusterError

DIRECTORY = Path("/var/lib/jurymast-chaos")
PLANS, QUICK_PLANS = 100, 2
WANTED_KINDS = 21
ALL = "all"
SPARED = "recovered in process"


@dataclass
class Campaign:
    """What was played so far: (plan's folder, what is wrong)."""

    keep: Path
    played: list[tuple[Path, list[str]]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def evidence(self) -> Iterator[tuple[Evidence, list[str]]]:
        for folder, found in self.played:
            yield load(folder), found


def run(campaign: Campaign, cluster: Cluster, plans: list[Plan], until: float) -> None:
    with stage(cluster, campaign.keep / ".work") as at:
        for number, plan in enumerate(plans, 1):
            if time.monotonic() > until:
                break
            folder = campaign.keep / f"{time.strftime('%H%M%S')}-{plan.seed}"
            kinds = ", ".join(f"{fault.kind} at {fault.at}" for fault in plan.faults)
            try:
                found = play(at, plan, folder)
            except Exception as error:  # the trial itself: a machine that is too busy, or a fault of ours
                traceback.print_exc()
                campaign.broken.append(f"{folder}: {type(error).__name__}: {error}")
                cluster.repair_all()
                continue
            campaign.played.append((folder, found))
            verdict = "; ".join(found) if found else "ok"
            common.progress(f"{number}/{len(plans)} seed {plan.seed} ({kinds}): {verdict}")


def rows_of(campaign: Campaign) -> list[Row]:
    """In all, by release and by kind of fault: how often it struck, and how those runs ended. By kind: until
    when its incident was over, what was restored, and what was done again."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    samples: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for evidence, found in campaign.evidence():
        struck = Counter(one.kind for one in evidence.struck)
        for case, times in {ALL: struck.total(), evidence.facts.slurm: struck.total(), **struck}.items():
            counts[case].update({"struck": times, outcome(evidence, found): 1})
        for incident in evidence.state.incidents:
            counts[ALL][SPARED] += bool(incident.in_process)
            led = {one.kind for one in evidence.struck if may_be(one, incident)}
            if len(led) == 1 and incident.recovered_at is not None:
                kind = led.pop()
                samples[kind, "fault to recovery", "s"].append(incident.recovered_at - incident.fault_at)
                if incident.step_restored is not None:
                    again = max(0, incident.step_lost_from - incident.step_restored)
                    samples[kind, "done again", "steps"].append(again)
                    samples[kind, "restored", "step"].append(incident.step_restored)
    rows = []
    for case in [ALL, *sorted(set(counts) - {ALL, *KINDS}), *(kind for kind in KINDS if kind in counts)]:
        for metric in ("struck", SPARED, *OUTCOMES):
            if n := counts[case][metric]:
                unit = "runs" if metric in OUTCOMES else "times"
                rows.append(Row(case, JURYMAST, metric, unit, n, n, n, n))
        for (kind, metric, unit), values in samples.items():
            if kind == case:
                spread = common.spread(values)
                told: list[Any] = [round(value, 2) for value in values]
                rows.append(Row(kind, JURYMAST, metric, unit, spread.median, spread.low, spread.high,
                                spread.n, samples=told))  # fmt: skip
    return rows


def targets_of(campaign: Campaign, rows: list[Row]) -> list[Target]:
    bad = [folder.name for folder, found in campaign.played if found]
    kinds = len({row.case for row in rows} & set(KINDS))
    return [
        Target("runs with something wrong", float(len(bad)), 0.0, "lower", ", ".join(bad)),
        Target("trials that broke", float(len(campaign.broken)), 0.0, "lower", "; ".join(campaign.broken)),
        Target("kinds of faults that struck", float(kinds), WANTED_KINDS, "higher"),
    ]


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PLANS} plans")
    parser.add_argument("--plans", type=int, default=PLANS, help=f"how many [{PLANS}]")
    parser.add_argument(
        "--faults", type=int, default=MOST_FAULTS, help=f"of a plan, at the most [{MOST_FAULTS}]"
    )
    parser.add_argument(
        "--each", type=int, nargs="?", const=1, metavar="N", help="each kind once, N on a run [1]"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no plan after so long")
    parser.add_argument("--seed", type=int, help="of the campaign [drawn, and printed]")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=[], metavar="KIND",
                        help=f"faults of these kinds: {', '.join(KINDS)}")  # fmt: skip
    parser.add_argument(
        "--silence", type=float, default=0.0, metavar="SECONDS",
        help="after so much of it a node counts as lost; for a machine that is busy otherwise, where\n"
        "nodes that are well are silent for longer than the 1.5 s that jurymast waits",
    )  # fmt: skip
    parser.add_argument("--in-process", action="store_true", help="ranks that live go on in their processes")
    parser.add_argument(
        "--slurm", nargs="+", default=[None], metavar="RELEASE",
        help="of Slurm: 24.11, 26.05; each plays its part of the plans [the system's]",
    )  # fmt: skip
    parser.add_argument("--replay", type=Path, nargs="+", metavar="PLAN.json", help="play these plans")
    parser.add_argument("--check", type=Path, nargs="+", metavar="FOLDER", help="check what was kept")
    parser.add_argument("--keep", type=Path, default=Path("chaos"), help="folder of the evidence [chaos]")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"the cluster's directory [{DIRECTORY}]")
    return parser


def check_again(campaign: Campaign, folders: list[Path]) -> None:
    for folder in folders:
        try:
            found = wrong(load(folder))
        except (OSError, JurymastError) as error:  # a trial that was cut off
            campaign.broken.append(f"{folder}: {error}")
            continue
        campaign.played.append((folder, found))
        common.progress(f"{folder}: {'; '.join(found) or 'ok'}")


def _plans(arguments: argparse.Namespace) -> tuple[int | None, list[Plan]]:
    if arguments.replay:
        return None, [Plan.from_json(path.read_text()) for path in arguments.replay]
    only = tuple(arguments.only)
    seed = None
    if arguments.each:
        drawn = each_kind(only, arguments.each)
    else:
        seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "big")
        count = QUICK_PLANS if arguments.quick else arguments.plans
        drawn = [random_plan(one, only, arguments.faults) for one in seeds(seed, count)]
    how = {"silent_s": arguments.silence, "in_process": arguments.in_process}
    return seed, [replace(plan, **how) for plan in drawn]


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def _play_all(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, campaign: Campaign
) -> dict[str, Any]:
    """Play the plans on each release, and return what the report is to say of them."""
    signal.signal(signal.SIGTERM, _end)
    try:
        seed, plans = _plans(arguments)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    common.progress(f"seed {seed}, {len(plans)} plans")
    began, parts = time.monotonic(), len(arguments.slurm)
    about = {**common.machine(), "command": sys.argv, "seed": seed, "plans": len(plans)}
    for number, release in enumerate(arguments.slurm):
        until = began + 60.0 * arguments.minutes * (number + 1) / parts
        try:
            cluster = Cluster.up(NODES, directory=arguments.dir, slurm=release, conf=conf(NODES))
        except ClusterError as error:
            parser.error(f"no Slurm cluster on this machine: {error}")
        try:
            run(campaign, cluster, plans[number::parts], until)
        finally:
            stop_server()
            cluster.down()
    return about


def main() -> int:
    parser = options()
    arguments = parser.parse_args()
    if not arguments.check and os.geteuid() != 0:
        parser.error("a Slurm cluster on one machine needs root")
    printed = os.dup(1)
    os.dup2(2, 1)  # what trainings print is no part of the report
    campaign = Campaign(arguments.keep.resolve())
    if arguments.check:
        about = common.machine()
        check_again(campaign, [folder for folder in arguments.check if folder.is_dir()])
    else:
        about = {**_play_all(parser, arguments, campaign), "evidence": str(campaign.keep)}
    rows = rows_of(campaign)
    targets = targets_of(campaign, rows)
    about["played"] = len(campaign.played)
    if not arguments.check:
        kept = campaign.keep / f"campaign-{time.strftime('%H%M%S')}.json"
        kept.write_text(json.dumps(common.report("chaos", rows, targets, about)))
    os.dup2(printed, 1)
    common.print_report("chaos", rows, targets, about, arguments.json)
    return int(any(found for _, found in campaign.played) or bool(campaign.broken))


if __name__ == "__main__":
    sys.exit(main())
