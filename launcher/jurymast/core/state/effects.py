"""What the supervisor's machines want done. Their caller carries the effects out, in order.

Instructions come from the run's state machine. Each carries its reason, which the journal shows.
"""

from __future__ import annotations

import msgspec

from jurymast.core.state.events import Event
from jurymast.core.state.message import ToAgent


class Instruction(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


class Launch(Instruction, frozen=True, kw_only=True):
    """Start attempt `attempt`: `placement[i]` is the node with group rank i; the first serves the store."""

    attempt: int
    placement: tuple[str, ...]
    master_address: str
    master_port: int
    mtbf_s: float = 0.0  # the present estimate, for the ranks' cadence; 0: unknown
    ended: tuple[int, ...] = ()  # ranks that are tasks, each for itself, and are not started again
    spare: bool = False  # ranks that are spared go on in their processes


class StopWorkers(Instruction, frozen=True, kw_only=True):
    """Stop the ranks of `attempt` on these nodes; each answers with WorkersStopped. `stacks`: with
    StacksTaken before, because they hang. `grace_s`: they have at least so long."""

    attempt: int
    nodes: tuple[str, ...]
    stacks: bool = False
    grace_s: float = 0.0


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


class Send(msgspec.Struct, frozen=True):
    """Send this to the agent of `node`, if it is connected. Other agents learn what matters when they
    join."""

    node: str
    message: ToAgent


class Record(msgspec.Struct, frozen=True):
    """Write the event to the journal, and let `core.run.machine` decide what follows. Used within
    `core.supervision` only. `flush`: see `Journal`."""

    event: Event
    flush: bool = False


class Answer(msgspec.Struct, frozen=True):
    """Send GoOn to the agent of `node`, with the current time: its heartbeats arrive, and so many of the
    messages that it keeps until then."""

    node: str
    patience_s: float
    heard: int = 0
    epoch: int = 0
    heir: int | None = None


class Disconnect(msgspec.Struct, frozen=True):
    """Close the connection to the agent of `node`, if there is one."""

    node: str


class Pulse(msgspec.Struct, frozen=True):
    """Whether this supervisor shows that it is alive. While it does not, another may take over."""

    on: bool


class GiveBack(msgspec.Struct, frozen=True):
    """Have Slurm remove `node` from the running `job`. Answered by `on_node_given_back`; may take long."""

    job: str
    node: str


class AskForNode(msgspec.Struct, frozen=True):
    """Submit small job `number`, which brings a node to the run, and none of `exclude`. Answered by
    `on_node_asked`."""

    number: int
    exclude: tuple[str, ...]


class LookAtSmallJobs(msgspec.Struct, frozen=True):
    """Ask Slurm which small jobs of the run wait or run. Answered by `on_small_jobs`."""


class EndSmallJob(msgspec.Struct, frozen=True):
    """Have Slurm end this small job of the run. May take long, and nobody waits for it."""

    job: str


class TopUpPool(msgspec.Struct, frozen=True):
    """Submit what the pool of waiting nodes lacks, on none of the nodes of `exclude`. Answered by
    `on_pool_topped_up`."""

    exclude: tuple[str, ...]


class LookAtNodes(msgspec.Struct, frozen=True):
    """Ask Slurm which of these nodes are being drained. Answered by `on_nodes_seen`."""

    nodes: tuple[str, ...]


class LookAtReservations(msgspec.Struct, frozen=True):
    """Ask Slurm which reservations others have of these nodes, or are to have. Answered by
    `on_reservations_seen`."""

    nodes: tuple[str, ...]


class SaveFirst(msgspec.Struct, frozen=True):
    """Have all ranks save for what `why` says, and then record `then`: of several with the same `why` the
    newest. Used within `core.supervision` only."""

    why: str
    then: Event


class Journal(msgspec.Struct, frozen=True):
    """Write this event and the decisions on it to the journal. `flush`: bring it to the disk before what
    follows, if that is possible soon."""

    event: Event
    decided: tuple[Instruction, ...] = ()
    flush: bool = False


class Fence(msgspec.Struct, frozen=True):
    """Write to the run directory that this is the newest attempt, so that earlier ones publish no more
    checkpoints. Answered by `on_fenced`."""

    attempt: int


class WhyEnding(msgspec.Struct, frozen=True):
    """Ask Slurm why the job ends, if it does: for the whole run, or because the agent of `node` got a
    SIGTERM. Answered by `on_end_explained`, unless it is asked once more before the answer: that answer would
    be older than what it is asked for."""

    node: str = ""
    connection: int = 0


class AskTimeLimit(msgspec.Struct, frozen=True):
    """Ask Slurm when it ends the job for its time limit. Answered by `on_time_limit`."""


class LookAtStorage(msgspec.Struct, frozen=True):
    """See which checkpoints are in the directory to which the ranks save, and call `on_storage_read`."""


class AskSuperseded(msgspec.Struct, frozen=True):
    """Check in the run directory whether another supervisor has taken over. Answered by `on_superseded`."""


class End(msgspec.Struct, frozen=True):
    """End this process: everything is decided, and all agents have left or had time to."""


class GiveWay(msgspec.Struct, frozen=True):
    """End this process and nothing else: another supervisor has taken over."""


Effect = (
    Send | Record | Answer | Disconnect | Pulse | GiveBack | AskForNode | LookAtSmallJobs | EndSmallJob
    | TopUpPool | LookAtNodes | LookAtReservations | SaveFirst | Journal | Fence | WhyEnding | AskTimeLimit
    | LookAtStorage | AskSuperseded | End | GiveWay
)  # fmt: skip
