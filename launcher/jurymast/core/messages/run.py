"""Messages about the life of attempts: agents join and leave; ranks are started, stopped, fail and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jurymast.core import within
from jurymast.core.checkpoints.cadence import Schedule
from jurymast.core.checkpoints.foresight import Room
from jurymast.core.message import ToAgent, ToAsker, ToSupervisor
from jurymast.core.messages.checkpoints import CopyReport, Restore
from jurymast.core.nodes.findings import Finding
from jurymast.core.run.incident import Alert


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
    `step`), save, or how (the run's condition)."""

    what: str
    by: str
    node: str = ""
    step: int | None = None


class Accepted(ToAsker, frozen=True, kw_only=True):
    """The request is carried out. `gives_up`: what a run that had ended was still waiting for, or ""."""

    gives_up: str = ""


class Declined(ToAsker, frozen=True, kw_only=True):
    """The request cannot be carried out now, or not at all."""

    why: str


class Condition(ToAsker, frozen=True, kw_only=True):
    """The run's condition where its journal may be silent: what it `waits` for, and why the `journal` cannot
    be written, "" for neither; the newest `step` done."""

    state: str
    waits: str
    journal: str
    step: int
    alerts: tuple[Alert, ...] = ()


RanksState = Literal["warming", "waiting", "starting", "running", "finished"]


class Hello(ToSupervisor, frozen=True, kw_only=True):
    """An agent's first message: who it is, its newest `attempt` and what that attempt's `ranks` do, and what
    survives a supervisor: `copies` of images, `room` for more, and what its probes found (`health`).
    `data_port`: where it serves images; `domain`: the switches above it, "" if unknown."""

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


class Ready(ToSupervisor, frozen=True, kw_only=True):
    """The node's torchrun host is warm; its next store listens on `store_port`."""

    store_port: int


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
    """All ranks of the node are gone; `store_port` 0: its host, too."""

    attempt: int
    store_port: int


class Finished(ToSupervisor, frozen=True, kw_only=True):
    """Every rank of the node has ended with exit code 0."""

    attempt: int


class RankEvent(ToSupervisor, frozen=True, kw_only=True):
    """A message of a rank of the node."""

    attempt: int
    event: within.ForSupervisor


class Terminated(ToSupervisor, frozen=True, kw_only=True):
    """The agent got a SIGTERM."""


class HangsUp(ToSupervisor, frozen=True, kw_only=True):
    """The agent has heard nothing for too long and looks for another supervisor, or has found a `newer`
    one."""

    newer: Endpoint | None = None


class Leaving(ToSupervisor, frozen=True, kw_only=True):
    """The agent gives up its node."""

    why: str


class Launch(ToAgent, frozen=True, kw_only=True):
    """Start the ranks of `attempt`: this node has group rank `rank` of `world` nodes. `mtbf_s`: expected
    seconds between failures, 0.0 if unknown; `cold`: do not preload anything for the script; `restore` None:
    the ranks look in the shared tier themselves, where the run had `saved` this step last (0: none). `nodes`:
    names of all, in the order of their ranks, in Slurm's notation."""

    attempt: int
    rank: int
    world: int
    master_address: str
    master_port: int
    mtbf_s: float = 0.0
    cold: bool = False
    saved: int = 0
    restore: Restore | None = None
    nodes: str = ""


class Stop(ToAgent, frozen=True, kw_only=True):
    """Stop the ranks of `attempt`, if requested after recording their `stacks`."""

    attempt: int
    stacks: bool = False


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


class Leave(ToAgent, frozen=True, kw_only=True):
    """End this agent; `over`: the run has ended as well, with this `exit_code`."""

    over: bool = False
    exit_code: int = 0
