"""What the state machine wants done. Every instruction carries its reason."""

from __future__ import annotations

import msgspec


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class Launch(Instruction, frozen=True, kw_only=True):
    """Start attempt `attempt`: `placement[i]` is the node with group rank i; the first serves the store."""

    attempt: int
    placement: tuple[str, ...]
    master_address: str
    master_port: int
    mtbf_s: float = 0.0  # the present estimate, for the ranks' cadence; 0: unknown


class StopWorkers(Instruction, frozen=True, kw_only=True):
    """Stop the ranks of `attempt` on these nodes; each answers with WorkersStopped. `stacks`: with
    StacksTaken before, because they hang."""

    attempt: int
    nodes: tuple[str, ...]
    stacks: bool = False


class Dismiss(Instruction, frozen=True, kw_only=True):
    """The node is out: kill its ranks; its agent stays and may be used as a spare again."""

    node: str


class TestNodes(Instruction, frozen=True, kw_only=True):
    """Test these nodes, on which no ranks run, for at most `limit_s`; each answers with NodeTested.

    `partners` are idle nodes to pair them with; they get no verdict.
    """

    nodes: tuple[str, ...]
    limit_s: float
    partners: tuple[str, ...] = ()


class RaiseAlert(Instruction, frozen=True, kw_only=True):
    """Alert people to something that they must decide, first seen on these nodes."""

    nodes: tuple[str, ...]


class Requeue(Instruction, frozen=True, kw_only=True):
    """Return the allocation and request one without `exclude`."""

    exclude: tuple[str, ...]


class Finish(Instruction, frozen=True, kw_only=True):
    """The run is over (succeeded, failed or cancelled): agents leave, the job ends with `exit_code`."""

    state: str
    exit_code: int
