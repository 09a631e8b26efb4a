"""What the health check asks of Slurm and tells it: this node's state and reason, and whose jobs are here."""

from __future__ import annotations

import calendar
import time

from jurymast_site.system import Failed, run

PREFIX = "jurymast: "
STAMP = "%Y-%m-%dT%H:%M:%SZ"  # of a reason's ts=, UTC
# Of sinfo's states: the node takes no job because somebody said so.
OUT = ("drain", "down", "fail", "maint", "error", "power", "reboot")


def node_state(node: str) -> tuple[str, str]:
    """(sinfo's word for the node's state, the reason for it or ""). Raises Failed."""
    told = run(["sinfo", "--noheader", "--all", "--Node", f"--nodes={node}", "--format=%T|%E"])
    lines = told.splitlines()
    if not lines:
        raise Failed(f"Slurm knows no node {node}")
    state, _, reason = lines[0].partition("|")
    return state.strip(), "" if reason.strip() == "none" else reason.strip()


def is_out(state: str) -> bool:
    return state.startswith(OUT)


def is_foreign(state: str, reason: str) -> bool:
    """Whether somebody else took the node out of service."""
    return is_out(state) and not reason.startswith(PREFIX)


def jobs_on(node: str) -> dict[str, int]:
    """{job id: its owner's uid} of all jobs that have this node, those that are ending too. Raises Failed."""
    told = run(["squeue", "--noheader", "--all", f"--nodelist={node}", "--format=%A|%U"])
    rows = (line.strip().split("|") for line in told.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def drained_by_us() -> tuple[dict[str, str], int]:
    """({node out of service for a reason of ours: that reason}, how many nodes there are). Raises Failed."""
    told = run(["sinfo", "--noheader", "--all", "--Node", "--format=%N|%T|%E"])
    nodes = set()
    ours = {}
    for line in told.splitlines():
        name, state, reason = (word.strip() for word in line.split("|", 2))
        nodes.add(name)
        if is_out(state) and reason.startswith(PREFIX):
            ours[name] = reason
    return ours, len(nodes)


def drained_at(reason: str) -> float:
    """When a node was drained for this reason of ours, in seconds since the epoch; 0.0: it does not say."""
    stamp = next((word[3:] for word in reason.split() if word.startswith("ts=")), "")
    try:
        return float(calendar.timegm(time.strptime(stamp, STAMP)))
    except ValueError:
        return 0.0


def drain(node: str, reason: str) -> None:
    """Raises Failed."""
    run(["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"])


def resume(node: str) -> None:
    """Raises Failed."""
    run(["scontrol", "update", f"NodeName={node}", "State=RESUME"])
    state, reason = node_state(node)
    if reason.startswith(PREFIX) and not is_out(state):
        # Newer Slurm keeps the reason (24.11 does), and takes no empty one.
        run(["scontrol", "update", f"NodeName={node}", f"Reason={PREFIX}back in service"])
