"""Which nodes Slurm has, and which of them a job is to be kept from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jurymast.core.state.settings import RunPlan
from jurymast.errors import ClusterUnavailableError
from jurymast.jobs import run_command, utc_time


def banned(plan: RunPlan, bad: Sequence[str], partition: str, now: float) -> tuple[list[str], str]:
    """The nodes that a requeued job must not get, and messages about the nodes, of `bad` and of earlier runs,
    that it may get after all: if too few others were left, the job would wait forever."""
    asked = plan.exclude
    wanted = [node for node in dict.fromkeys((*bad, *plan.excluded_at(now))) if node not in asked]
    kept, spared = kept_out(wanted, asked, partition, plan.active)
    told = f"not excluded, because the run needs {plan.active} nodes: {', '.join(spared)}" if spared else ""
    return sorted({*asked, *kept}), told


def most_nodes(plan: RunPlan, banned: Collection[str], partition: str) -> int:
    """How many nodes a requeued job can have at most, without those: a job that asks for more than there are
    is held by Slurm for ever."""
    try:
        usable, _ = partition_nodes(partition)
    except ClusterUnavailableError:
        return plan.nodes
    return max(plan.active, min(plan.nodes, len(usable - {*banned})))


def kept_out(
    wanted: Sequence[str], asked: Sequence[str], partition: str, needed: int
) -> tuple[Sequence[str], list[str]]:
    """Those of the `wanted` exclusions that leave `needed` nodes besides the `asked` ones, and the others."""
    if not wanted:
        return [], []
    try:
        usable, known = partition_nodes(partition)
    except ClusterUnavailableError:  # a dry run works without Slurm
        return wanted, []
    there = [node for node in wanted if node in known]
    kept = fitting(there, usable - set(asked), needed)
    return kept, [node for node in there if node not in kept]


def fitting(wanted: Sequence[str], usable: Collection[str], needed: int) -> list[str]:
    """The first nodes of `wanted` that leave at least `needed` of the usable nodes."""
    kept: list[str] = []
    left = len(usable)
    for node in wanted:
        cost = node in usable
        if left - cost >= needed or not cost:
            kept.append(node)
            left -= cost
    return kept


# The beginnings of the states of a node that runs no job until somebody acts.
_OUT = ("down", "drain", "fail")


def _sinfo(fields: str) -> list[list[str]]:
    """These fields (%N|...) of each node, in each of its partitions. Of a reason, the first line
    counts. Raises ClusterUnavailableError."""
    told = run_command(["sinfo", "--noheader", "--all", "--Node", f"--format={fields}"], utc=True)
    others = fields.count("|")
    lines = [line for line in told.splitlines() if line.count("|") >= others]
    return [[part.strip() for part in line.split("|", others)] for line in lines]


def partition_nodes(partition: str) -> tuple[set[str], set[str]]:
    """Return (nodes that could serve, all nodes that Slurm knows). Raises ClusterUnavailableError."""
    asked = set(partition.split(",")) if partition else set()
    usable, known = set(), set()
    for name, of, state in _sinfo("%N|%P|%T"):
        known.add(name)
        here = of.removesuffix("*") in asked if asked else of.endswith("*")
        if here and not state.startswith(_OUT) and not state.endswith("*"):
            usable.add(name)
    return usable, known


def out_of_service(now: float) -> dict[str, tuple[float, str]]:
    """The nodes that are out of service in Slurm, as {node: (seconds, reason)}; empty if there is no
    Slurm."""
    try:
        nodes = _sinfo("%N|%T|%H|%E")
    except ClusterUnavailableError:
        return {}
    found = {}
    for name, state, since, reason in nodes:
        if state.startswith(_OUT):
            try:
                seconds = max(0.0, now - utc_time(since))
            except ValueError:  # "Unknown"
                seconds = 0.0
            found[name] = seconds, "" if reason == "none" else reason
    return found
