"""What the state machine tells the edges to do. Every instruction carries its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Instruction:
    reason: str


@dataclass(frozen=True, kw_only=True)
class Launch(Instruction):
    """Start attempt `attempt`: `placement[i]` is the node with group rank i; the first serves the store."""

    attempt: int
    placement: tuple[str, ...]
    master_address: str
    master_port: int
    mtbf_s: float = 0.0  # what is expected by now, for the ranks' cadence; 0: not known


@dataclass(frozen=True, kw_only=True)
class StopWorkers(Instruction):
    """Stop the ranks of `attempt` on these nodes; each answers with WorkersStopped. `stacks`: first with
    StacksTaken, because they hang."""

    attempt: int
    nodes: tuple[str, ...]
    stacks: bool = False


@dataclass(frozen=True, kw_only=True)
class Dismiss(Instruction):
    """This node is out: it kills its ranks; its agent stays and may be asked back as a spare."""

    node: str


@dataclass(frozen=True, kw_only=True)
class TestNodes(Instruction):
    """Test these nodes, on which no ranks run, for at most `limit_s`; each answers with NodeTested.

    `partners` are idle nodes to pair them with; nothing becomes of those.
    """

    nodes: tuple[str, ...]
    limit_s: float
    partners: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RaiseAlert(Instruction):
    """Tell people: something that they must decide, first seen on these nodes."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Requeue(Instruction):
    """Give the allocation back and ask for one without `exclude`."""

    exclude: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Finish(Instruction):
    """The run is over (succeeded, failed or cancelled): agents leave, the job ends with `exit_code`."""

    state: str
    exit_code: int
