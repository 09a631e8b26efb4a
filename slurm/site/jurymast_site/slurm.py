"""The health check's requests to Slurm: this node's state and reason, its jobs, and drain and resume."""

from __future__ import annotations

import calendar
import time

from jurymast_site.system import Failed, run

PREFIX = "jurymast: "
STAMP = "%Y-%m-%dT%H:%M:%SZ"  # of a reason's ts=, in UTC
# The beginnings of sinfo's states for a node that takes no jobs because it was taken out of service.
OUT = ("drain", "down", "fail", "maint", "error", "power", "reboot")


def node_state(node: str) -> tuple[str, str]:
    """Return (sinfo's state of the node, its reason or ""). Raises Failed."""
    told = run(["sinfo", "--noheader", "--all", "--Node", f"--nodes={node}", "--format=%T|%E"])
    lines = told.splitlines()
    if not lines:
        raise Failed(f"Slurm knows no node {node}")
    state, _, reason = lines[0].partition("|")
    return state.strip(), "" if reason.strip() == "none" else reason.strip()


def is_out(state: str) -> bool:
    return state.startswith(OUT)


def is_foreign(state: str, reason: str) -> bool:
    """Whether the node was taken out of service by somebody else."""
    return is_out(state) and not reason.startswith(PREFIX)


def jobs_on(node: str) -> dict[str, int]:
    """Return {job id: owner's uid} of all jobs that have this node, including ending ones. Raises Failed."""
    told = run(["squeue", "--noheader", "--all", f"--nodelist={node}", "--format=%A|%U"])
    rows = (line.strip().split("|") for line in told.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def drained_by_us() -> tuple[dict[str, str], int]:
    """Return ({node that we drained: its reason}, number of nodes in Slurm). Raises Failed."""
    told = run(["sinfo", "--noheader", "--all", "--Node", "--format=%N|%T|%E"])
    nodes = set()
    ours = {}
    for line in told.splitlines():
        if line.count("|") < 2:
            continue  # a reason goes on
        name, state, reason = (word.strip() for word in line.split("|", 2))
        nodes.add(name)
        if is_out(state) and reason.startswith(PREFIX):
            ours[name] = reason
    return ours, len(nodes)


def drained_at(reason: str) -> float:
    """When a node was drained for this reason, in seconds since the epoch; 0.0 if the reason does not say."""
    stamp = next((word[3:] for word in reason.split() if word.startswith("ts=")), "")
    try:
        return float(calendar.timegm(time.strptime(stamp, STAMP)))
    except ValueError:
        return 0.0


def drain(node: str, reason: str) -> None:
    """Drain the node. Raises Failed."""
    run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])


def resume(node: str) -> None:
    """Return the node to service. Raises Failed."""
    run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
    state, reason = node_state(node)
    if reason.startswith(PREFIX) and not is_out(state):
        # Newer Slurm (24.11) keeps the reason, and accepts no empty one.
        run(["scontrol", "update", f"NodeName={node}", f"Reason={PREFIX}back in service"])
