"""The state of a run: a fold over its journal. Only `core.run.step` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from jurymast.core.events import Asked, NodeLost, RanksHung, RestorePlanned, WorkerFailed
from jurymast.core.failure_rate import FailureRate
from jurymast.core.incident import Incident
from jurymast.core.settings import Settings


class Role(str, Enum):
    ACTIVE = "active"
    SPARE = "spare"
    JOINING = "joining"
    SUSPECT = "suspect"
    FAILED = "failed"


class Phase(str, Enum):
    QUEUED = "queued"
    STARTING = "starting"  # an allocation is here, its nodes are joining
    LAUNCHING = "launching"  # a plan is out, ranks are not up everywhere yet
    RUNNING = "running"
    STOPPING = "stopping"  # ranks are being stopped, evidence comes in
    WAITING = "waiting"  # decided; waits for a back-off or for a spare
    REQUEUED = "requeued"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})


@dataclass
class Node:
    """A node of the allocation, at place `order`. `ready`: its torchrun host waits for a plan."""

    name: str
    order: int
    role: Role = Role.JOINING
    reason: str = "not heard of yet"
    since: float = 0.0
    address: str = ""
    incarnation: str = ""
    pid: int = 0
    ready: bool = False
    store_port: int = 0
    drained: bool = False  # by hand: it stays out

    def become(self, role: Role, reason: str, t: float) -> None:
        if role is not self.role:
            self.since = t
        self.role, self.reason = role, reason

    @property
    def usable(self) -> bool:
        return self.ready and self.role in (Role.SPARE, Role.SUSPECT)


@dataclass
class Findings:
    """What one incident gathered while its ranks were being stopped."""

    lost: list[NodeLost] = field(default_factory=list)
    failures: list[WorkerFailed] = field(default_factory=list)
    hung: RanksHung | None = None
    asked: Asked | None = None

    def __bool__(self) -> bool:
        return bool(self.lost or self.failures or self.hung or self.asked)


@dataclass
class TierState:
    """How one tier's copies stand: its newest complete step, and what went wrong with it since."""

    step: int | None = None
    at: float = 0.0
    size_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    error: str = ""
    failed_step: int = 0
    failed_at: float = 0.0


@dataclass
class RunState:
    """Everything the decisions read. Times are seconds since the epoch."""

    settings: Settings
    run: str = ""
    name: str = ""
    active: int = 1
    spares: int = 0
    ranks_per_node: int = 1
    submitted_at: float = 0.0
    failures: FailureRate | None = None  # since the first nodes came
    requeue_allowed: bool = True

    phase: Phase = Phase.QUEUED
    now: float = 0.0
    epoch: int = 0
    allocation: str = ""  # job.restarts: a requeued job keeps its id
    slurm_jobs: list[str] = field(default_factory=list)
    restarts: int = 0  # requeues so far
    host: str = ""  # the batch host: active only when nothing else is left
    nodes: dict[str, Node] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)  # node -> why

    attempt: int = 0
    placement: tuple[str, ...] = ()  # index = group rank
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    deadline: float | None = None  # of the present phase
    enough_since: float | None = None  # N nodes were ready from here on
    not_before: float = 0.0  # back-off

    step: int = 0  # newest step done, of this attempt
    stepped_at: float = 0.0
    first_step_at: float | None = None  # of this attempt
    step_s: float = 0.0
    absolute: bool = False
    best_step: int = 0
    saved_step: int | None = None  # newest in any tier
    save_failures: int = 0  # in a row
    saved: dict[str, TierState] = field(default_factory=dict)
    restore: RestorePlanned | None = None  # what this attempt was told to restore

    findings: Findings = field(default_factory=Findings)
    incidents: list[Incident] = field(default_factory=list)
    fruitless: int = 0  # incidents in a row without a new step between them
    hang_patience: float = 1.0
    exit_code: int = 0
    end_reason: str = ""
    ended_at: float | None = None
    notes: list[tuple[float, str]] = field(default_factory=list)

    @property
    def incident(self) -> Incident | None:
        """The incident being recovered from, if any."""
        return self.incidents[-1] if self.incidents and self.incidents[-1].open else None

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def public_state(self) -> str:
        """The word `status` shows."""
        if self.ended or self.phase in (Phase.QUEUED, Phase.REQUEUED):
            return self.phase.value
        if self.incident is not None:
            return "recovering"
        return "running" if self.phase in (Phase.RUNNING, Phase.STOPPING) else "starting"

    def spare_nodes(self) -> list[Node]:
        """Usable spares, best first: suspects late, the batch host last, then allocation order."""
        usable = [node for node in self.nodes.values() if node.usable]
        return sorted(usable, key=lambda n: (n.role is Role.SUSPECT, n.name == self.host, n.order))

    def check(self) -> None:
        """Invariants; AssertionError names the one broken."""
        assert len(set(self.placement)) == len(self.placement), "a node holds two group ranks"
        assert self.started <= set(self.placement), "ranks run on a node outside the placement"
        if self.phase is Phase.RUNNING:
            assert len(self.placement) == self.active, "running with another number of nodes than asked for"
        for earlier in self.incidents[:-1]:
            assert not earlier.open, "two open incidents"
