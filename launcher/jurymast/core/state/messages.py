"""Messages between agents, the supervisor, commands and torchrun hosts: every kind is a class here.

`read_said`, `read_order`, `read_answer` and their like parse them from bytes where they arrive; anything else
becomes an Unreadable. Code that distinguishes them uses `match` and ends with `errors.never`, so that mypy
reports kinds that were forgotten.

In messages about images, a state is named by `step` and `attempt`, an image also by `rank`; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Literal

import msgspec

from jurymast.core.state import images as im
from jurymast.core.state import within
from jurymast.core.state.evidence import Entered, NodeTimes, RankPlace, SparedRank
from jurymast.core.state.findings import Finding
from jurymast.core.state.heartbeats import Beat as Beat
from jurymast.core.state.heartbeats import CadenceReport as CadenceReport
from jurymast.core.state.heartbeats import RankReport as RankReport
from jurymast.core.state.heartbeats import RanksSeen as RanksSeen
from jurymast.core.state.heartbeats import Times as Times
from jurymast.core.state.heartbeats import Trained as Trained
from jurymast.core.state.heartbeats import beat_of as beat_of
from jurymast.core.state.heartbeats import how_far as how_far
from jurymast.core.state.images import Part
from jurymast.core.state.images import Source as Source
from jurymast.core.state.incident import Alert
from jurymast.core.state.message import ToAgent as ToAgent
from jurymast.core.state.message import ToAsker, reader
from jurymast.core.state.message import ToSupervisor as ToSupervisor
from jurymast.core.state.message import Unreadable as Unreadable
from jurymast.core.state.message import encode as encode
from jurymast.core.state.message import out_of_place as out_of_place
from jurymast.core.state.schedule import Schedule

# Images: who holds which, who copies what where, and what an attempt restores.

HeldTier = Annotated[str, msgspec.Meta(pattern=f"^({im.MEMORY}|{im.PEER}|{im.LOCAL})$")]


class CopyReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A verified copy of (a `part` of) an image on the reporting node. `size_bytes` is the whole image's
    size; the training stood still `stall_s` for it."""

    tier: HeldTier
    step: int
    attempt: int
    rank: int
    world: int
    part: Part
    size_bytes: int
    common_bytes: int = 0
    common_id: str = ""
    stall_s: float = 0.0

    def on(self, node: str) -> im.Copy:
        """Return it as the supervisor counts it."""
        return im.Copy(
            node, self.tier, self.step, self.attempt, self.rank, self.world, self.part,
            self.size_bytes, self.common_bytes, self.common_id,
        )  # fmt: skip


class Restore(msgspec.Struct, frozen=True, kw_only=True):
    """The state from which an attempt continues, and for each rank of the node where to get its image, best
    first; () if the node has it in its own memory: see `AskSources`. `world`: so many other ranks saved it,
    and the node has the images of all of them; 0: as many as restore it."""

    step: int
    attempt: int
    ranks: dict[int, tuple[Source, ...]]
    world: int = 0


class Held(ToSupervisor, frozen=True, kw_only=True):
    """A copy is verified and held from now on."""

    copies: tuple[CopyReport, ...]


class Dropped(ToSupervisor, frozen=True, kw_only=True):
    """A copy is no longer held, but not by order; `why` is "" unless it was corrupt."""

    copy: CopyReport
    why: str = ""


class Refused(ToSupervisor, frozen=True, kw_only=True):
    """This node cannot give the memory for a replica."""

    why: str


class Room(msgspec.Struct, frozen=True):
    """`free` bytes are available, after subtracting a reserve; `limit`: the file that limits them."""

    free: int
    limit: str


class Foreseen(ToSupervisor, frozen=True, kw_only=True):
    """How large this node's ranks' images will be together, how much of that only they have, the room."""

    image_bytes: int
    own_bytes: int
    room: Room


class Prefetched(ToSupervisor, frozen=True, kw_only=True):
    """A rank's image is whole in its slot. It lists the bytes by tier, and why sources were passed over."""

    step: int
    attempt: int
    rank: int
    tiers: dict[str, int]
    seconds: float
    passed_over: tuple[str, ...] = ()


class Unrestorable(ToSupervisor, frozen=True, kw_only=True):
    """The image that `rank` is to restore in `attempt`, of `step` of attempt `of`, cannot be brought here."""

    attempt: int
    rank: int
    step: int
    of: int
    why: str


class AskSources(ToSupervisor, frozen=True, kw_only=True):
    """The image to restore from the node's own memory is missing: who else has it? Answered by Sources."""

    step: int
    attempt: int
    rank: int


class Unreplicated(ToSupervisor, frozen=True, kw_only=True):
    """An order by Replicate could not be carried out."""

    step: int
    attempt: int
    rank: int
    part: Part
    why: str


class Written(ToSupervisor, frozen=True, kw_only=True):
    """A node's part of a write has ended; `why` if it is not `ok`. `gone`: an image was no longer in memory,
    as ranks have saved anew since the order, which says nothing of the storage."""

    id: str
    tier: str
    ok: bool
    size_bytes: int = 0
    why: str = ""
    gone: bool = False


class WritePhase(IntEnum):
    """What nodes that write one checkpoint do, one phase after another: the next one is ordered when all that
    take part in this one have reached its end."""

    HOLD = 0  # each node holds its images; begun by the order to write
    OPEN = 1  # the lead makes a directory, and removes those that others left half-done; begun by it as well
    ANNOUNCE = 2  # each node describes its images there
    SHARE_OUT = 3  # the lead decides who writes what, and puts that there
    WRITE = 4  # each node writes its share
    SEAL = 5  # the lead makes one checkpoint of all shares, and gives it its name


class WriteReached(ToSupervisor, frozen=True, kw_only=True):
    """The node has done its part in this phase of a write; it says so again to each new supervisor."""

    id: str
    phase: WritePhase


class WriteProgress(ToSupervisor, frozen=True, kw_only=True):
    """The node has written so many bytes of its part so far. Sent every few seconds while that goes on."""

    id: str
    size_bytes: int


class Replicate(ToAgent, frozen=True, kw_only=True):
    """Hold this part of another node's image, from one of `sources`."""

    step: int
    attempt: int
    rank: int
    part: Part
    sources: tuple[Source, ...]


class Sources(ToAgent, frozen=True, kw_only=True):
    """Where else a rank's image is, best first; () if nowhere."""

    step: int
    attempt: int
    rank: int
    sources: tuple[Source, ...]


class Committed(ToAgent, frozen=True, kw_only=True):
    """This state is safe: older states may go."""

    step: int
    attempt: int


class Void(ToAgent, frozen=True, kw_only=True):
    """This state will never be complete."""

    step: int
    attempt: int


class ForgetNewer(ToAgent, frozen=True, kw_only=True):
    """The run goes back to `step`."""

    step: int


class GiveSlotsUp(ToAgent, frozen=True, kw_only=True):
    """The nodes are about to be released, and ranks save no more: use free slots for other nodes' images."""


class Write(ToAgent, frozen=True, kw_only=True):
    """Copy the images of these `ranks`, of `world` in all, to a tier; `lead`: bring all nodes' parts
    together. `root`: the shared directory, if it is known."""

    id: str
    tier: str
    step: int
    attempt: int
    ranks: tuple[int, ...]
    world: int
    lead: bool = False
    root: str = ""


class ContinueWrite(ToAgent, frozen=True, kw_only=True):
    """Go on with this phase of a write to shared storage. `parts` is for the lead that shares out: the first
    rank of each node, by which its files are named."""

    id: str
    phase: WritePhase
    parts: tuple[int, ...] = ()


class CancelWrite(ToAgent, frozen=True, kw_only=True):
    """Stop writing."""

    id: str


FromKeeper = Held | Dropped | Refused | Prefetched | AskSources | Unrestorable | Unreplicated
AboutCheckpoints = FromKeeper | Foreseen | WriteReached | WriteProgress | Written
KeeperOrder = Replicate | Sources | Committed | Void | ForgetNewer | GiveSlotsUp
CheckpointOrder = KeeperOrder | Write | ContinueWrite | CancelWrite


# Attempts: agents join and leave; ranks are started, stopped, fail and end.


@dataclass(frozen=True)
class Endpoint:
    """Where to reach a supervisor. `hosts`: names and addresses to try, best first; `allocation`: the Slurm
    job and its restart count."""

    epoch: int
    hosts: tuple[str, ...]
    port: int
    node: str
    allocation: str
    pid: int


class Ask(ToSupervisor, frozen=True, kw_only=True):
    """A request `what` by the user `by`: cancel, restart, drain (replacement of `node`), rollback (to
    `step`), save, requeue, timeout (the same, as if the job's time were up), how (the run's condition), or,
    by the batch process, `events.STEP_ENDED`."""

    what: str
    by: str
    node: str = ""
    step: int | None = None


class Accepted(ToAsker, frozen=True, kw_only=True):
    """The request is carried out. `gives_up`: what a run that had ended was still waiting for, or "".
    `unwritten`: it is not in the journal, so that the next supervisor would not know of it."""

    gives_up: str = ""
    unwritten: bool = False


class Declined(ToAsker, frozen=True, kw_only=True):
    """The request cannot be carried out now, or not at all."""

    why: str


class Condition(ToAsker, frozen=True, kw_only=True):
    """What the journal may not show ("" for nothing): what the run `waits` for, why the `journal` cannot be
    written, how `silent` ranks are. Others wait for `late`; all restart at `restart_at`, if it is not 0."""

    state: str
    waits: str
    journal: str
    step: int
    alerts: tuple[Alert, ...] = ()
    silent: str = ""
    restart_at: float = 0.0
    late: tuple[int, ...] = ()


class Ready(ToSupervisor, frozen=True, kw_only=True):
    """The node's torchrun host is warm; its next store listens on `store_port`. These ranks are `spared`."""

    store_port: int
    spared: tuple[SparedRank, ...] = ()


class Started(ToSupervisor, frozen=True, kw_only=True):
    """The ranks of the node run as these processes, by local rank."""

    attempt: int
    pids: tuple[int, ...]


class Failed(ToSupervisor, frozen=True, kw_only=True):
    """A rank has failed; the fields are those of `core.events.WorkerFailed`."""

    attempt: int
    rank: int
    exit_code: int
    error: str = ""
    message: str = ""
    traceback: str = ""
    oom_kills: int | None = 0
    shm_used: float = 0.0
    log: str = ""


class Stopped(ToSupervisor, frozen=True, kw_only=True):
    """All ranks of the node have left the attempt, and are gone but for those that are `spared`;
    `store_port` 0: its host is gone, too."""

    attempt: int
    store_port: int
    spared: tuple[SparedRank, ...] = ()


class Finished(ToSupervisor, frozen=True, kw_only=True):
    """Every rank of the node has ended with exit code 0; or these `ranks` have, of tasks that may each be for
    themselves."""

    attempt: int
    ranks: tuple[int, ...] = ()


RanksState = Literal["warming", "waiting", "starting", "running", "finished"]


class Hello(ToSupervisor, frozen=True, kw_only=True):
    """An agent's first message: who it is, its newest `attempt` and what its `ranks` do, `copies` of images,
    `room` for more, findings (`health`). It serves images at `data_port`. `oom_kills`: see `NodeJoined`.
    `ended`: which ranks have failed here, and how tasks ended, in any attempt; `group_made`: one of them made
    a process group. `clock`: this node's, by which findings have their times, in seconds since the epoch.
    `refill`: the number of the small job that brings the node to the run; 0: the run's own job. `spared`:
    ranks of `attempt` that wait for the next."""

    node: str
    allocation: str
    address: str
    incarnation: str
    pid: int
    boot_id: str
    gpus: int
    attempt: int
    ranks: RanksState
    store_port: int
    pids: tuple[int, ...]
    data_port: int
    copies: tuple[CopyReport, ...] = ()
    room: Room | None = None
    domain: str = ""
    health: tuple[Finding, ...] = ()
    clock: float = 0.0
    oom_kills: int = 0
    ended: tuple[Finished | Failed, ...] = ()
    group_made: bool = False
    refill: int = 0
    spared: tuple[SparedRank, ...] = ()


class RankEvent(ToSupervisor, frozen=True, kw_only=True):
    """A message of a rank of the node."""

    attempt: int
    event: within.ForSupervisor


class Terminated(ToSupervisor, frozen=True, kw_only=True):
    """The agent got a SIGTERM."""


class HangsUp(ToSupervisor, frozen=True, kw_only=True):
    """The agent has heard nothing for too long and looks for a supervisor, or has found a `newer` one."""

    newer: Endpoint | None = None


class Leaving(ToSupervisor, frozen=True, kw_only=True):
    """The agent gives up its node. `environment`: because the run's Python cannot load torch there."""

    why: str
    environment: bool = False


class Launch(ToAgent, frozen=True, kw_only=True):
    """Start the ranks of `attempt`: this node has group rank `rank` of `world` nodes, whose names `nodes` has
    in the order of ranks, in Slurm's notation. `mtbf_s`: expected seconds between failures, 0.0 if unknown;
    `cold`: preload nothing for the script; `restore` None: the ranks look in the shared tier, where `saved`
    is the newest step known (0: none), or an older one than those in `unreadable`, which failed repeatedly.
    `ended`: local ranks, tasks, that are not started again; `spare`: ranks that are spared go on in their
    processes, otherwise they end first; they go back to step `chosen` if that is newer than what they have.
    The agent adds the ranks' `environment`."""

    attempt: int
    rank: int
    world: int
    master_address: str
    master_port: int
    mtbf_s: float = 0.0
    cold: bool = False
    saved: int = 0
    unreadable: tuple[int, ...] = ()
    restore: Restore | None = None
    nodes: str = ""
    ended: tuple[int, ...] = ()
    spare: bool = False
    chosen: int = 0
    environment: dict[str, str] = {}


class Stop(ToAgent, frozen=True, kw_only=True):
    """Stop the ranks of `attempt` within the policy's grace, or this one if it is longer; if requested after
    their `stacks`. `job_ends`: Slurm may signal them as well; `spare`: those that can leave their step wait
    in their processes."""

    attempt: int
    stacks: bool = False
    grace_s: float = 0.0
    job_ends: bool = False
    spare: bool = True


class Dismiss(ToAgent, frozen=True, kw_only=True):
    """The node leaves the attempt: kill its ranks; its agent stays."""


class CadenceSet(ToAgent, frozen=True, kw_only=True):
    """When all ranks save; `decided`: the schedule's number, or -number if it is void; 0: only proposed."""

    attempt: int
    schedule: Schedule
    decided: int


class GoOn(ToAgent, frozen=True, kw_only=True):
    """The supervisor lives. `time`: its clock, seconds since the epoch. An agent that hears nothing for
    `patience_s` seconds looks for another supervisor, of a newer epoch than this `epoch`. It has `heard` this
    many of the messages that are Kept over this connection. `heir`: this node's place from 0 on among those
    that take over first; None: it is none of them."""

    time: float
    patience_s: float
    heard: int = 0
    epoch: int = 0
    heir: int | None = None


class Moved(ToAgent, frozen=True, kw_only=True):
    """The run has a newer supervisor at this address."""

    place: Endpoint


class JobGoesOn(ToAgent, frozen=True, kw_only=True):
    """Slurm does not end the job, although this agent got a SIGTERM."""


class Leave(ToAgent, frozen=True, kw_only=True):
    """End this agent and its ranks, see `effects.Leave`."""

    over: bool = False
    exit_code: int = 0
    grace_s: float = 0.0


# Nodes and their ranks: findings, stacks, tests. Their heartbeats are in heartbeats.py.


class Look(ToAgent, frozen=True, kw_only=True):
    """Request the places at which the ranks of `attempt` are. `number` identifies the question."""

    attempt: int
    number: int


class Looked(ToSupervisor, frozen=True, kw_only=True):
    """The answer to Look, by rank."""

    attempt: int
    number: int
    stands: dict[int, RankPlace]


class Stacks(ToSupervisor, frozen=True, kw_only=True):
    """Where ranks were just before they were stopped; the fields are those of `core.events.StacksTaken`."""

    attempt: int
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    places: tuple[str, ...]
    folder: str
    recorded: bool = False
    records: tuple[int, ...] = ()
    flights: tuple[Entered, ...] = ()


class HealthFound(ToSupervisor, frozen=True, kw_only=True):
    """A finding on the reporting node. `clock`: see `Hello`."""

    finding: Finding
    clock: float


class LeaveVerdict(ToAgent, frozen=True, kw_only=True):
    """Report to the site, in the name of this Slurm `job`, that the node is bad."""

    job: str
    finding: Finding


class VerdictLeft(ToSupervisor, frozen=True, kw_only=True):
    """The verdict was left for the site; else `why` it could not be."""

    why: str = ""


class TestAlone(ToAgent, frozen=True, kw_only=True):
    """Test the node by itself, within `limit_s` seconds."""

    limit_s: float


class TestPair(ToAgent, frozen=True, kw_only=True):
    """Test the node with another one: `rank`s 0 and 1, which meet at the first's store by the `name`."""

    name: str
    host: str
    port: int
    rank: int
    limit_s: float


class TestOver(ToAgent, frozen=True, kw_only=True):
    """End the test processes."""


class TestedAlone(ToSupervisor, frozen=True, kw_only=True):
    """The node's own tests are done. `port` of the node's store for pairs; 0: none."""

    port: int
    found: NodeTimes


class TestedPair(ToSupervisor, frozen=True, kw_only=True):
    """The pair's test is done: seconds by measure, none if it failed with `error`."""

    name: str
    times: dict[str, float]
    error: str = ""


# An agent repeats these over its next connection unless they were acknowledged: no hello contains them.
Kept = Failed | RankEvent | AskSources | Unrestorable | Written

_Said = (
    Hello | Ready | Started | Failed | Stopped | Finished | RankEvent | Terminated | HangsUp | Leaving
    | Looked | Stacks | HealthFound | VerdictLeft | TestedAlone | TestedPair | AboutCheckpoints | Ask
)  # fmt: skip
_Order = (
    Launch | Stop | Dismiss | CadenceSet | GoOn | Moved | JobGoesOn | Leave | Look | LeaveVerdict | TestAlone
    | TestPair | TestOver | CheckpointOrder
)  # fmt: skip

# Readers for the supervisor, an agent, and a command.
Said = Beat | _Said | Unreadable
Order = _Order | Unreadable
Answer = Accepted | Declined | Condition | Unreadable

_read_beat: Callable[[bytes], Beat | Unreadable] = reader(Beat)
_read_words: Callable[[bytes], Said] = reader(_Said)
read_order: Callable[[bytes], Order] = reader(_Order)
read_answer: Callable[[bytes], Answer] = reader(Accepted | Declined | Condition)


def read_said(payload: bytes) -> Said:
    return _read_beat(payload) if payload[:1] == b"[" else _read_words(payload)
