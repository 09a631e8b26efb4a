"""What the health check asks of Slurm and tells it: this node's state and reason, and whose jobs are here."""

from __future__ import annotations

from jurymast_site.system import Failed, run

PREFIX = "jurymast: "
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


def drained_by_us() -> tuple[int, int]:
    """(nodes out of service with our reason, all nodes). Raises Failed."""
    told = run(["sinfo", "--noheader", "--all", "--Node", "--format=%N|%T|%E"])
    nodes = {}
    for line in told.splitlines():
        name, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        nodes[name.strip()] = is_out(state.strip()) and reason.strip().startswith(PREFIX)
    return sum(nodes.values()), len(nodes)


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
