"""Who is at fault? Root cause against cascade, from what one incident gathered.

When a rank dies its peers' collectives fail a moment later, so the loudest report is rarely the cause.
Order of belief: a lost node, a request by hand, a killed process, a stopped process, an exception of the
user's code, an exit code without one, a collective that failed, a hang. Within a class the earliest report.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.core.events import Asked, NodeLost, RanksHung, WorkerFailed

# What torch, gloo, NCCL and the socket layer say when the *other* side went away.
_COMMUNICATION = re.compile(
    r"connection (closed|reset|refused)|broken pipe|peer closed|socket (closed|timeout)|"
    r"ncclremoteerror|nccl(system|internal)error|remote process exited|nccl communicator was aborted|"
    r"timed out waiting .*(recv|send|operation)|gloo.*(timeout|timed out|read error|write error)|"
    r"\bdist(network|store|backend)error|rendezvous.*(closed|timeout)|tcpstore|watchdog",
    re.IGNORECASE,
)

SIGNAL_NAMES = {
    1: "SIGHUP",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
# Python and CUDA code dies of these by itself; the machine is not to blame.
_OWN_SIGNALS = frozenset({4, 6, 8, 11})


@dataclass(frozen=True)
class Cause:
    """`kind` is the incident's class; `charged` says whose restart budget pays: infrastructure,
    application or nobody. `signature` is equal for the same cause coming back."""

    kind: str
    charged: str
    node: str
    nodes: tuple[str, ...]
    rank: int | None
    exit_code: int
    evidence: str
    signature: str


def is_communication(failure: WorkerFailed) -> bool:
    """True for an exception that another rank's or node's end explains."""
    return failure.exit_code > 0 and bool(_COMMUNICATION.search(f"{failure.error} {failure.message}"))


def attribute(
    lost: Sequence[NodeLost], asked: Asked | None, failures: Sequence[WorkerFailed], hung: RanksHung | None
) -> Cause:
    """The root cause of an incident with these findings; at least one must be given (ValueError)."""
    if lost:
        return _lost_cause(lost)
    if asked is not None:
        where = f" {asked.node}" if asked.node else ""
        return _cause(f"{asked.what}_asked", "nobody", asked.node, f"{asked.what}{where} asked by {asked.by}")
    killed = [f for f in failures if f.exit_code < 0 and f.rank >= 0 and -f.exit_code not in _OWN_SIGNALS]
    if killed:
        return _failure_cause("worker_killed", "infrastructure", killed)
    if hung is not None and hung.ranks:
        return _hang_cause("rank_frozen", hung)
    raised = [f for f in failures if f.exit_code > 0 and f.rank >= 0 and not is_communication(f)]
    if raised:
        return _failure_cause("worker_exception" if raised[0].error else "worker_exit", "application", raised)
    died = [f for f in failures if f.rank < 0]
    if died:
        return _failure_cause("host_died", "infrastructure", died)
    crashed = [f for f in failures if f.exit_code < 0]
    if crashed:
        return _failure_cause("worker_crash", "application", crashed)
    if failures:
        return _failure_cause("communication", "infrastructure", failures)
    if hung is not None:
        return _hang_cause("hang", hung)
    raise ValueError("an incident without any finding has no cause")


def _cause(kind: str, charged: str, node: str, evidence: str, *, signature: str = "") -> Cause:
    return Cause(kind, charged, node, (node,) if node else (), None, 0, evidence, signature or kind)


def _lost_cause(lost: Sequence[NodeLost]) -> Cause:
    names = tuple(dict.fromkeys(event.node for event in lost))
    words = {"closed": "its agent's connection was reset", "left": "its agent left"}
    parts = []
    for event in lost:
        told = words.get(event.how) or f"silent for {event.silent_s:.1f} s (limit {event.limit_s:.1f} s)"
        parts.append(f"{event.node}: {told}" + (f", {event.evidence}" if event.evidence else ""))
    kind = "node_lost" if lost[0].how == "silent" else "node_crash"
    node = names[0] if len(names) == 1 else ""
    return Cause(kind, "infrastructure", node, names, None, 0, "; ".join(parts), f"{kind} {node}")


def _failure_cause(kind: str, charged: str, failures: Sequence[WorkerFailed]) -> Cause:
    first = failures[0]
    nodes = tuple(dict.fromkeys(f.node for f in failures))
    told = describe_exit(first.exit_code)
    if first.error:
        told = f"{first.error}: {first.message}" if first.message else first.error
    also = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
    node = nodes[0] if len(nodes) == 1 else ""
    return Cause(
        kind, charged, node, nodes, first.rank, first.exit_code,
        f"rank {first.rank} on {first.node}: {told}{also}",
        f"{kind} {first.exit_code} {first.error} {first.message}"[:400],
    )  # fmt: skip


def _hang_cause(kind: str, hung: RanksHung) -> Cause:
    rank = hung.ranks[0] if hung.ranks else None
    nodes = (hung.node,) if hung.node else ()
    return Cause(kind, "infrastructure", hung.node, nodes, rank, 0, hung.evidence, kind)


def describe_exit(exit_code: int) -> str:
    """What a shell user would call it: "exit code 3", "killed by SIGKILL"."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"killed by {SIGNAL_NAMES.get(-exit_code, f'signal {-exit_code}')}"
