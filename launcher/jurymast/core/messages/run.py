"""The life of a run's attempts: agents come and go, ranks are started, stopped, fail and end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jurymast.core import within
from jurymast.core.checkpoints.cadence import Schedule
from jurymast.core.checkpoints.foresight import Room
from jurymast.core.message import ToAgent, ToAsker, ToSupervisor
from jurymast.core.messages.checkpoints import CopyReport, Restore
from jurymast.core.nodes.findings import Finding
from jurymast.core.run.alert import Alert


@dataclass(frozen=True)
class Endpoint:
    """`hosts`: names and addresses to try, best first; `allocation`: the Slurm job and its restart count."""

    epoch: int
    hosts: tuple[str, ...]
    port: int
    node: str
    allocation: str
    pid: int


class Ask(ToSupervisor, frozen=True, kw_only=True):
    """`what` the user `by` requests: cancel, restart, drain (replacement of `node`), rollback (to `step`),
    save, or how (the run's condition)."""

    what: str
    by: str
    node: str = ""
    step: int | None = None


class Accepted(ToAsker, frozen=True, kw_only=True):
    """It is done now. `gives_up`: what a run that had ended was still waiting for, or ""."""

    gives_up: str = ""


class Declined(ToAsker, frozen=True, kw_only=True):
    """It cannot be done now, or not at all."""

    why: str


class Condition(ToAsker, frozen=True, kw_only=True):
    """How the run is where its journal may be silent: what it `waits` for, and why the `journal` cannot be
    written, "" for neither; the newest `step` done."""

    state: str
    waits: str
    journal: str
    step: int
    alerts: tuple[Alert, ...] = ()


RanksState = Literal["warming", "waiting", "starting", "running", "finished"]


class Hello(ToSupervisor, frozen=True, kw_only=True):
    """An agent's first word: who it is, its newest `attempt` and what that one's `ranks` do, and what it has
    that outlives a supervisor: `copies` of images, `room` for more, and what its probes found (`health`).
    `data_port`: where it serves images; `domain`: the switches above it, "" when they are not known."""

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
    """A rank has ended badly; the fields are those of `core.events.WorkerFailed`."""

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
    """All ranks of the node are gone; `store_port` 0: its host as well."""

    attempt: int
    store_port: int


class Finished(ToSupervisor, frozen=True, kw_only=True):
    """Every rank of the node has ended with exit code 0."""

    attempt: int


class RankEvent(ToSupervisor, frozen=True, kw_only=True):
    """What a rank of the node has said."""

    attempt: int
    event: within.ForSupervisor


class Terminated(ToSupervisor, frozen=True, kw_only=True):
    """The agent got a SIGTERM."""


class HangsUp(ToSupervisor, frozen=True, kw_only=True):
    """The agent has heard nothing for too long: it looks for another supervisor, or has a `newer` one."""

    newer: Endpoint | None = None


class Leaving(ToSupervisor, frozen=True, kw_only=True):
    """The agent gives its node up."""

    why: str


class Launch(ToAgent, frozen=True, kw_only=True):
    """Start the ranks of `attempt`: this node has group rank `rank` of `world` nodes. `mtbf_s`: seconds
    between failures as expected now, 0.0 when not known; `cold`: load nothing ahead of the script; `restore`
    None: the ranks look in the shared tier themselves, where the run had `saved` this step last (0: none).
    `nodes`: names of all, in the order of their ranks, as Slurm writes them."""

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
    """Stop the ranks of `attempt`, if wanted after a look at their `stacks`."""

    attempt: int
    stacks: bool = False


class Dismiss(ToAgent, frozen=True, kw_only=True):
    """The node is out of the attempt: its ranks are killed, its agent stays."""


class CadenceSet(ToAgent, frozen=True, kw_only=True):
    """When all ranks save; `decided`: the schedule's number, or -number: it is void; 0: proposed only."""

    attempt: int
    schedule: Schedule
    decided: int


class GoOn(ToAgent, frozen=True, kw_only=True):
    """The supervisor lives. `time`: its clock, seconds since the epoch; an agent that hears nothing for
    `patience_s` seconds looks for another one, of a newer epoch than this `epoch`. So many of the messages
    that are Kept were `heard` over this connection. `heir`: this node's place among those that are to take
    over first, from 0 on; None: it is none of them."""

    time: float
    patience_s: float
    heard: int = 0
    epoch: int = 0
    heir: int | None = None


class Moved(ToAgent, frozen=True, kw_only=True):
    """The run has a newer supervisor, there."""

    place: Endpoint


class Leave(ToAgent, frozen=True, kw_only=True):
    """Go home; `over`: so is the run, which ends with this `exit_code`."""

    over: bool = False
    exit_code: int = 0
