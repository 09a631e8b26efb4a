"""The goodput report of a run as one JSON object: where its node-time went, and what its failures cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jurymast
from jurymast.core.checkpoints.cadence import young_interval_s
from jurymast.core.goodput.accounting import RATIOS, Account, ordered
from jurymast.core.goodput.ledger import Saves
from jurymast.core.planning.failure_rate import default_mtbf_s, mtbf_s
from jurymast.core.planning.reliability import LEVEL, Mtbf, mtbf
from jurymast.core.run.state import RunState
from jurymast.core.settings import RunPlan, Settings
from jurymast.report.liveness import Liveness, look, slurm_jobs
from jurymast.report.view import Watcher, data_gaps, incident_json, public_state, shown_step
from jurymast.report.words import iso

Report = dict[str, Any]


def account_of(watcher: Watcher, life: Liveness, now: float) -> Account:
    """Until `now`; of a run that died without a word, until its last event."""
    return watcher.tail.ledger.account(None if life.kind == "gone" else now)


def report_view(watcher: Watcher, life: Liveness | None = None, now: float | None = None) -> Report:
    """Times in seconds, or ISO 8601 with zone; node-time in node-seconds; ratios 0..1."""
    life = look(watcher.directory, watcher.state) if life is None else life
    now = time.time() if now is None else now
    state, plan = watcher.state, watcher.plan
    account = account_of(watcher, life, now)
    failures = mtbf(_failures(state), _observed_s(account))
    word, why = public_state(state, life)
    return {
        "run": state.run or plan.run, "name": state.name or plan.name, "state": word, "end_reason": why,
        "provisional": not account.final and life.kind != "gone",
        "until": iso(account.end / 1e6) if account.end else None, "warnings": data_gaps(watcher),
        "ratios": account.ratios(), "definitions": RATIOS,
        "categories": {name: account.totals[name] / 1e6 for name in ordered(list(account.totals))},
        "total_node_seconds": sum(account.totals.values()) / 1e6,
        "allocated_node_seconds": account.allocated_us / 1e6,
        "queue_node_seconds": account.queue_us / 1e6,
        "wall_seconds": account.wall_us / 1e6,
        "steps": {
            "done": max(state.best_step, shown_step(state)), "seconds": account.placed_us("step") / 1e6,
        },
        "nodes": {"active": state.active, "spares": state.spares, "seen": len(account.stays)},
        "incidents": [
            {**incident_json(i), "lost_seconds": account.incident_us(i.id) / 1e6} for i in state.incidents
        ],
        "mtbf": _mtbf_json(failures, state),
        "cadence": _cadence_json(watcher.tail.ledger.saves, failures, state),
        "provenance": _provenance(watcher, plan, state),
    }  # fmt: skip


def _failures(state: RunState) -> int:
    """Incidents that nobody asked for."""
    return sum(1 for incident in state.incidents if incident.charged in ("infrastructure", "application"))


def _observed_s(account: Account) -> float:
    """Time during which a failure could have happened: while nodes were allocated."""
    return sum(interval.us for interval in account.timeline) / 1e6


def _mtbf_json(found: Mtbf, state: RunState) -> dict[str, Any]:
    charged = [incident.charged for incident in state.incidents]
    return {
        "seconds": found.mean_s, "low_seconds": found.low_s, "high_seconds": found.high_s, "level": LEVEL,
        "failures": found.failures, "observed_seconds": found.observed_s,
        "by_charge": {who: charged.count(who) for who in ("infrastructure", "application")},
        "predicted_seconds": _predicted_s(state),
    }  # fmt: skip


def _predicted_s(state: RunState) -> float:
    """MTBF of the run's nodes at the policy's rate, or at what fleets report."""
    rate = state.settings.rate
    return default_mtbf_s(state.active) if rate is None else mtbf_s(state.active, rate)


def _cadence_json(saves: Saves, failures: Mtbf, state: RunState) -> dict[str, Any]:
    stall_s = saves.stall_s / saves.done if saves.done else None
    expected_s = failures.mean_s or _predicted_s(state)
    return {
        "setting": cadence_words(state.settings), "saves": saves.done, "failed": saves.failed,
        "interval_seconds": saves.interval_s / saves.intervals if saves.intervals else None,
        "stall_seconds": stall_s, "stall_max_seconds": saves.stall_max_s if saves.done else None,
        "size_bytes": saves.size_bytes or None, "mtbf_used_seconds": expected_s,
        "optimal_seconds": young_interval_s(stall_s, expected_s) if stall_s is not None else None,
    }  # fmt: skip


def cadence_words(settings: Settings) -> str:
    """As a policy spells it; a script that sets its own cadence is not seen here."""
    if settings.cadence_steps is not None:
        return f"{settings.cadence_steps} steps"
    return "auto" if settings.cadence_s is None else f"{settings.cadence_s:g} s"


def _provenance(watcher: Watcher, plan: RunPlan, state: RunState) -> dict[str, Any]:
    started = watcher.facts.started or {}
    return {
        "script": plan.script, "arguments": list(plan.arguments), "python": plan.python,
        "policy_hash": plan.policy_hash, "cluster": plan.cluster, "directory": str(watcher.directory.root),
        "slurm_jobs": [job for job, _ in slurm_jobs(watcher.directory, state)],
        "submitted_at": iso(plan.submitted_at), "ended_at": iso(state.ended_at),
        "run_version": started.get("version") or None, "report_version": jurymast.__version__,
        "generated_at": iso(time.time()),
    }  # fmt: skip


def compare(first: Report, second: Report) -> dict[str, Any]:
    """Two reports side by side: differences are second - first; categories as shares of the node-time."""
    ratios: Mapping[str, Any] = first["ratios"]
    names = ordered(list({*first["categories"], *second["categories"]}))
    return {
        "first": first, "second": second,
        "difference": {
            "ratios": {name: _difference(ratios[name], second["ratios"][name]) for name in ratios},
            "shares": {name: share(second, name) - share(first, name) for name in names},
        },
    }  # fmt: skip


def share(report: Mapping[str, Any], category: str) -> float:
    """The category's part of all node-time, 0..1."""
    total = report["total_node_seconds"]
    return report["categories"].get(category, 0.0) / total if total else 0.0


def _difference(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else second - first
