"""The metrics of a run as of its journal, by Prometheus's conventions: base units, `_total`, `_ratio`.

Each value has the run as a label, so that several runs can share a node exporter. Only nodes that need a look
are named, and no more than a few: a run may have thousands.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jurymast import foreign
from jurymast.core.goodput import CATEGORIES
from jurymast.core.state.findings import Verdict
from jurymast.core.state.images import MEMORY
from jurymast.core.state.incident import CAUSES
from jurymast.core.state.run import Role, RunState
from jurymast.report.status import StatusWatcher, cadence_json, restarts, shown_step, tiers_json

NODES_NAMED = 50
STATES = (
    "queued", "starting", "running", "recovering", "requeued", "succeeded", "failed", "cancelled",
)  # fmt: skip
RATIOS = {"ettr": "ettr", "runtime": "runtime_goodput", "allocation": "allocation_goodput"}
COUNTER, GAUGE, INFO = "counter", "gauge", "info"

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """A metric with all its values, by labels. `kind`: counter, gauge or info."""

    name: str
    kind: str
    meaning: str
    values: list[tuple[Labels, float]]


class RunMetrics:
    """A counter never falls while one process tells it, though the journal may say later that what seemed to
    be one thing was another."""

    def __init__(self, watcher: StatusWatcher) -> None:
        self._watcher = watcher
        self._most: dict[tuple[str, str], float] = {}

    def families(self, now: float) -> list[Family]:
        """All metrics, at `now` (seconds since the epoch). What is not known yet is left out."""
        run = self._watcher.state.run or self._watcher.plan.run
        found: list[Family] = []
        for family in (*_of_the_run(self._watcher, now), *_of_time(self._watcher, now)):
            values: list[tuple[Labels, float]] = [
                ({"run": run, **labels}, self._counted(family, labels, value))
                for labels, value in family.values
            ]
            if values:
                found.append(Family(f"jurymast_{family.name}", family.kind, family.meaning, values))
        return found

    def _counted(self, family: Family, labels: Labels, value: float) -> float:
        if family.kind != COUNTER:
            return value
        key = (family.name, "".join(labels.values()))
        self._most[key] = max(value, self._most.get(key, 0.0))
        return self._most[key]


def _gauge(name: str, meaning: str, value: float | None) -> Family:
    return Family(name, GAUGE, meaning, [] if value is None else [({}, value)])


def _count(name: str, meaning: str, value: float) -> Family:
    return Family(name, COUNTER, meaning, [({}, value)])


def _by(label: str, values: Mapping[str, float]) -> list[tuple[Labels, float]]:
    return [({label: name}, value) for name, value in values.items()]


def _of_the_run(watcher: StatusWatcher, now: float) -> Iterator[Family]:
    state, plan, ledger = watcher.state, watcher.plan, watcher.ledger
    about = {
        "name": state.name or plan.name, "user": foreign.user_name(os.geteuid()), "cluster": plan.cluster,
        "slurm_job": state.slurm_jobs[-1] if state.slurm_jobs else "",
    }  # fmt: skip
    yield Family("run_info", INFO, "what the run is", [(about, 1.0)])
    yield Family(
        "state", GAUGE, "1 for the run's state", _by("state", {s: s == state.public_state for s in STATES})
    )
    yield _gauge("observed_timestamp_seconds", "when the run's journal was last read", now)
    yield _gauge(
        "allocated_timestamp_seconds", "when the nodes of the present Slurm job came",
        state.allocated_at or None,
    )  # fmt: skip
    yield _gauge("step", "newest training step done", shown_step(state))
    yield _gauge("step_seconds", "time that a step takes", state.step_s or None)
    for name, value in (("samples", state.samples_s), ("tokens", state.tokens_s)):
        yield _gauge(f"{name}_per_second", f"{name} that training takes a second", value or None)
    yield _count("steps_total", "steps done, those done again as well", ledger.steps.done)
    yield _count(
        "steps_repeated_total", "steps done again, or that may have been",
        ledger.steps.again + ledger.steps.maybe_again,
    )  # fmt: skip
    yield _gauge("last_progress_timestamp_seconds", "when the newest step was done", state.stepped_at or None)
    yield _count("restarts_total", "times that the ranks were started again", restarts(state))
    yield _count("requeues_total", "times that the Slurm job was requeued", state.restarts)
    causes = Counter(one.cause if one.cause in CAUSES else "other" for one in state.incidents if one.cause)
    yield Family(
        "incidents_total", COUNTER, "failures and other interruptions, by cause",
        _by("cause", {**dict.fromkeys(CAUSES, 0), **causes}),
    )  # fmt: skip
    yield _gauge("alerts", "things that people must decide; jurymast status names them", len(state.alerts))
    yield from _of_nodes(state)
    yield from _of_checkpoints(watcher, now)


def _of_nodes(state: RunState) -> Iterator[Family]:
    roles = Counter(node.role.value for node in state.nodes.values())
    yield Family(
        "nodes", GAUGE, "nodes of the allocation, by state",
        _by("state", {role.value: roles[role.value] for role in Role}),
    )  # fmt: skip
    ready = [node for node in state.spare_nodes() if node.name not in state.places]
    yield _gauge("spares_asked", "spare nodes that were asked for", state.spares)
    yield _gauge("spares_ready", "nodes that can take another one's place now", len(ready))
    yield _gauge("excluded_nodes", "nodes that the run excludes", len(state.excluded))
    named: list[tuple[Labels, float]] = []
    for node in state.nodes.values():
        out = node.role in (Role.FAILED, Role.SUSPECT)
        codes = [f.code for f in node.findings.values() if f.verdict in (Verdict.BAD, Verdict.SUSPECT)]
        if (out or codes) and len(named) < NODES_NAMED:
            code = codes[0] if codes else ""
            named.append(({"node": node.name, "state": node.role.value, "finding": code}, 1.0))
    yield Family(
        "node_in_trouble", GAUGE, f"nodes that are out, suspect or have a finding ({NODES_NAMED} at most)",
        named,
    )  # fmt: skip


def _of_checkpoints(watcher: StatusWatcher, now: float) -> Iterator[Family]:
    state, saves = watcher.state, watcher.ledger.saves
    tiers = tiers_json(state, nodes_gone=state.ended)
    kept = {name: state.saved[name] for name, told in tiers.items() if told["step"] is not None}
    newest = max((tier.step or 0 for tier in kept.values()), default=0)
    yield Family(
        "checkpoint_step", GAUGE, "newest complete step, by tier",
        _by("tier", {name: tier.step or 0 for name, tier in kept.items()}),
    )  # fmt: skip
    yield Family(
        "checkpoint_timestamp_seconds", GAUGE, "when that step was complete there",
        _by("tier", {name: tier.at for name, tier in kept.items()}),
    )  # fmt: skip
    yield Family(
        "checkpoint_size_bytes", GAUGE, "size of a checkpoint",
        _by("tier", {name: tier.size_bytes for name, tier in kept.items()}),
    )  # fmt: skip
    yield Family(
        "checkpoint_write_seconds", GAUGE, "time that the last copy to the tier took",
        _by("tier", {name: tier.seconds for name, tier in kept.items() if name != MEMORY}),
    )  # fmt: skip
    yield Family(
        "checkpoint_failures", GAUGE, "failed saves or copies since the last good one, by tier",
        _by("tier", {name: told["failures"] for name, told in tiers.items()}),
    )  # fmt: skip
    yield Family(
        "write_behind_steps", GAUGE, "steps from the newest one saved anywhere to the tier's own",
        _by("tier", {name: newest - (tier.step or 0) for name, tier in kept.items()}),
    )  # fmt: skip
    yield _gauge(
        "durable_interval_seconds", "planned time between copies to shared storage",
        cadence_json(state, watcher.plan, now)["durable_every_seconds"],
    )  # fmt: skip
    yield _count("saves_total", "checkpoints that the ranks saved", saves.done)
    yield _count("save_failures_total", "saves of the ranks that failed", saves.failed)
    yield _count("save_stall_seconds_total", "time that training stood still for saves", saves.stall_s)


def _of_time(watcher: StatusWatcher, now: float) -> Iterator[Family]:
    account, booked = watcher.ledger.account(now), watcher.ledger.account()
    spent = {category.name: 0.0 for category in CATEGORIES}
    spent.update((name, us / 1e6) for name, us in booked.totals.items())
    yield Family(
        "time_seconds_total", COUNTER, "node-seconds until the journal's last entry, by what was done",
        _by("category", spent),
    )  # fmt: skip
    for name, meaning, at_most in (
        ("goodput_ratio", "share of the time spent on steps that counted; at least this much", False),
        ("goodput_upper_ratio", "at most this much: differs where it is not known which steps are new", True),
    ):
        ratios = account.ratios(at_most=at_most)
        known = {kind: ratio for kind, key in RATIOS.items() if (ratio := ratios[key]) is not None}
        yield Family(name, GAUGE, meaning, _by("kind", known))
