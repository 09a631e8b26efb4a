"""Keeps nodes that failed earlier runs out of a new one, as long as enough others are left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from jurymast.cluster.allocation import run_command
from jurymast.core.nodes.history import NodeRecord, history
from jurymast.core.settings import Avoided, RunPlan
from jurymast.errors import ClusterUnavailableError
from jurymast.past_runs import forgiven_nodes, past_runs


def keep_out(plan: RunPlan, runs: Path, partition: str, now: float) -> tuple[RunPlan, list[str]]:
    """The plan without nodes that earlier runs below `runs` speak against, and what to tell about it.

    `partition` is a comma list, "" for the default. `now`: seconds since the epoch.
    """
    if plan.cluster != "slurm" or plan.settings.bad_nodes == "report":
        return plan, []
    records = history(past_runs(runs), now, plan.settings.exclusion_s, forgiven=forgiven_nodes(runs))
    wanted = avoided(records.values())
    if not wanted:
        return plan, []
    notes = []
    try:
        usable, known = partition_nodes(partition)
    except ClusterUnavailableError:  # a dry run needs no Slurm
        kept = wanted
    else:
        there = [node for node in wanted if node.node in known]
        fit = fitting([node.node for node in there], usable, plan.nodes)
        kept = [node for node in there if node.node in fit]
        if spared := [node.node for node in wanted if node.node in known and node not in kept]:
            notes.append(f"not kept out, because the run needs {plan.nodes} nodes: {', '.join(spared)}")
    notes = [f"keeps out {node.node} {until_text(node.until)}: {node.why}" for node in kept] + notes
    return replace(plan, avoided=tuple(kept)), notes


def avoided(records: Collection[NodeRecord]) -> list[Avoided]:
    """Nodes to keep out, those that matter most first: for good, then by how long the exclusion lasts."""
    out = sorted(
        (record for record in records if record.excluded),
        key=lambda record: (not record.for_good, -(record.excluded_until or 0.0), record.name),
    )
    return [Avoided(node=r.name, until=None if r.for_good else r.excluded_until, why=r.why) for r in out]


def banned(plan: RunPlan, bad: Sequence[str], partition: str, now: float) -> tuple[list[str], str]:
    """Nodes that a requeued job is not to get, and what to tell about those of `bad` and of earlier runs that
    it may get after all: with too few others left it would wait for ever."""
    asked = list(plan.exclude)
    wanted = [node for node in dict.fromkeys((*bad, *plan.excluded_at(now))) if node not in asked]
    if not wanted:
        return asked, ""
    try:
        usable, _ = partition_nodes(partition)
    except ClusterUnavailableError:
        return sorted({*asked, *wanted}), ""
    kept = fitting(wanted, usable - set(asked), plan.active)
    spared = [node for node in wanted if node not in kept]
    told = f"not excluded, because the run needs {plan.active} nodes: {', '.join(spared)}" if spared else ""
    return sorted({*asked, *kept}), told


def fitting(wanted: Sequence[str], usable: Collection[str], needed: int) -> list[str]:
    """The first of `wanted` that leave at least `needed` of the usable nodes."""
    kept: list[str] = []
    left = len(usable)
    for node in wanted:
        cost = node in usable
        if left - cost >= needed or not cost:
            kept.append(node)
            left -= cost
    return kept


def partition_nodes(partition: str) -> tuple[set[str], set[str]]:
    """(nodes that could serve, all nodes that Slurm knows). Raises ClusterUnavailableError."""
    told = run_command(["sinfo", "--noheader", "--all", "--Node", "--format=%N|%P|%T"])
    asked = set(partition.split(",")) if partition else set()
    usable, known = set(), set()
    for line in told.splitlines():
        name, of, state = (part.strip() for part in line.split("|"))
        known.add(name)
        here = of.removesuffix("*") in asked if asked else of.endswith("*")
        if here and not state.startswith(("down", "drain", "fail")) and not state.endswith("*"):
            usable.add(name)
    return usable, known


def out_of_service(now: float) -> dict[str, tuple[float, str]]:
    """{node: (seconds, reason)} of nodes that Slurm has out of service; empty where there is no Slurm."""
    command = ["sinfo", "--noheader", "--all", "--Node", "--format=%N|%T|%H|%E"]
    try:
        told = run_command(command)
    except ClusterUnavailableError:
        return {}
    found = {}
    for line in told.splitlines():
        name, state, since, reason = (part.strip() for part in line.split("|", 3))
        if state.startswith(("down", "drain", "fail")):
            try:
                seconds = max(0.0, now - datetime.fromisoformat(since).timestamp())
            except ValueError:  # "Unknown"
                seconds = 0.0
            found[name] = seconds, "" if reason == "none" else reason
    return found


def until_text(until: float | None) -> str:
    """Until 2026-11-21 10:00, or for good."""
    return "for good" if until is None else f"until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
