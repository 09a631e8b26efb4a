"""How often nodes failed before this run: journals of earlier runs, Slurm's accounting of other jobs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from jurymast.core.nodes.frailty import frail_nodes, more_exposure
from jurymast.core.nodes.history import PastRun, comebacks, history
from jurymast.core.planning.failure_rate import AFTER_REPAIR, DAY_S, Watched, learned_before, prior
from jurymast.core.settings import RunPlan
from jurymast.past_runs import forgiven_nodes, past_runs

# Two half-lives: what is older hardly counts.
ACCOUNTING_DAYS = 28
ACCOUNTING_LIMIT_S = 10.0
NODE_FAIL = "NODE_FAIL"
FORMAT = "JobIDRaw,State,Start,End,NNodes"


def with_earlier(plan: RunPlan, runs: Path, now: float) -> RunPlan:
    """The plan with what is known by `now` (seconds since the epoch). Never fails: what cannot be read is
    named in the text and counts nothing."""
    if plan.cluster != "slurm":
        return plan
    found = past_runs(runs)
    forgiven = forgiven_nodes(runs)
    seen = [one for run in found for one in watched_in(run)]
    more = more_exposure(found, comebacks(found, forgiven))
    texts = [_told(seen, f"{len(found)} earlier run{'' if len(found) == 1 else 's'}")]
    if more:
        days = sum(one.end_s - one.start_s for one in more) / DAY_S
        texts.append(f"{days:.3g} of them after repairs and counted {AFTER_REPAIR:.0f} times")
    try:
        others = parse_accounting(_accounting(), {job for run in found for job in run.jobs}, now)
        texts.append(_told(others, "other jobs"))
    except (OSError, ValueError, subprocess.SubprocessError):
        others = []
        texts.append("no Slurm accounting")
    incidents, node_days = learned_before([*seen, *more, *others], now, plan.settings.half_life_s / DAY_S)
    fleet = prior(plan.settings.rate).learned(incidents, node_days).rate
    records = history(found, now, plan.settings.exclusion_s, forgiven=forgiven)
    return replace(
        plan,
        earlier_incidents=round(incidents, 6),
        earlier_node_days=round(node_days, 6),
        earlier_text=", ".join(texts),
        frail=tuple(frail_nodes(records.values(), fleet, now)),
    )


def watched_in(run: PastRun) -> list[Watched]:
    """One for each of the run's allocations. Of the nodes only the active ones' failures are counted."""
    if not run.spans:
        return []
    spans = [Watched(span.start, span.end, min(run.active, len(span.nodes))) for span in run.spans]
    return [replace(spans[0], failures_s=run.failures), *spans[1:]]


def parse_accounting(text: str, known: Collection[str], now: float) -> list[Watched]:
    """sacct's lines in FORMAT, times in seconds since the epoch; jobs in `known` have journals, which tell
    more. A job that still runs ends `now`. Raises ValueError for other lines."""
    found = []
    for line in text.splitlines():
        job, state, start, end, nodes = line.split("|")
        if job in known or not start.isdigit():
            continue
        end_s = float(end) if end.isdigit() else now
        failed = (end_s,) if state == NODE_FAIL else ()
        found.append(Watched(float(start), end_s, int(nodes), failed))
    return found


def _accounting() -> str:
    """Of this user's jobs. Raises OSError or SubprocessError where Slurm keeps no accounts."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--duplicates"]
    command += [f"--starttime=now-{ACCOUNTING_DAYS}days", f"--format={FORMAT}"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=ACCOUNTING_LIMIT_S,
        stdin=subprocess.DEVNULL, env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
    )  # fmt: skip
    return done.stdout


def _told(watched: list[Watched], where: str) -> str:
    days = sum(one.nodes * max(0.0, one.end_s - one.start_s) for one in watched) / DAY_S
    failures = sum(len(one.failures_s) for one in watched)
    return f"{failures} in {days:.3g} node-days of {where}"
