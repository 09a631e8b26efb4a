"""The state of a run, computed from its journal. Only `core.run.machine.step` changes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from jurymast.core.state import events as ev
from jurymast.core.state.evidence import MATTERS, SparedRank
from jurymast.core.state.failure_rate import (
    INFRASTRUCTURE,
    FailureRate,
    FrailNode,
    Posterior,
    counted,
)
from jurymast.core.state.findings import APPLICATION, SYMPATHETIC, Finding, Verdict
from jurymast.core.state.images import SHARED, StateId
from jurymast.core.state.incident import (
    Alert,
    Incident,
)
from jurymast.core.state.settings import Settings


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


# A state whose images exist but do not arrive: other nodes may succeed.
RESTORE_TRIES = 3
NOTES_KEPT = 500
# The cost of a save is the median of this many.
STALLS_KEPT = 9
ENDED = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
# Ranks of an attempt run, or are about to, or are being stopped.
WITH_RANKS = frozenset({Phase.LAUNCHING, Phase.RUNNING, Phase.STOPPING})


# Ranks that catch a signal leave within this time, or train on: jobs are rarely warned of their end earlier.
LEAVE_S = 900.0


@dataclass
class Node:
    """A node of the allocation, at place `order`. `ready`: its torchrun host waits for a launch; `heard`: the
    present supervisor has heard it, so it was not lost together with the previous supervisor."""

    name: str
    order: int
    role: Role = Role.JOINING
    reason: str = "its agent has not reported yet"
    since: float = 0.0
    address: str = ""
    incarnation: str = ""
    pid: int = 0
    ready: bool = False
    heard: bool = False
    store_port: int = 0
    drained: bool = False  # by hand: it stays out
    draining: str = ""  # why an administrator drains it, which waits for the run's job; "": nobody does
    reserved: str = ""  # the reservation of others' that soon begins on it; "": none
    bad: bool = False  # a finding took it out: it stays out while the finding holds
    returned: bool = False  # Slurm has it again: the small job that brought it is over
    faultless: bool = False  # lost with many others, or as somebody ordered: it is not excluded
    unloadable: bool = False  # the run's Python cannot load torch on it
    cleared: bool = False  # blamed for what was then found to be no fault of its own
    lost_how: str = ""  # see `events.NodeLost`
    awaited: bool = False  # lost in this way under an earlier supervisor, and not yet under the present one
    findings: dict[str, Finding] = field(default_factory=dict)  # that hold, or events of this allocation
    gpus: int = 0
    tested: str = ""  # verdict of its last tests; "" again once it becomes a suspect
    slowness: float = 1.0  # in those tests, over the median of the nodes tested with it

    def become(self, role: Role, reason: str, t: float) -> None:
        if role is not self.role:
            self.since = t
            self.tested = "" if role is Role.SUSPECT else self.tested
            self.cleared = self.cleared and role is not Role.FAILED
            self.lost_how, self.awaited = "", False
        self.role, self.reason = role, reason

    @property
    def unheard(self) -> bool:
        """Whether it is lost because its supervisor did not hear it. Another one may."""
        return self.lost_how in ("silent", "closed")

    @property
    def marked(self) -> bool:
        """Whether something was found that speaks against it, even if that was not enough to take it out."""
        found = (one for one in self.findings.values() if one.kind not in (SYMPATHETIC, APPLICATION))
        return any(one.verdict in (Verdict.BAD, Verdict.SUSPECT) for one in found)

    @property
    def going(self) -> bool:
        """Whether it is soon to be used for something else, and replaces no other one."""
        return bool(self.draining or self.reserved)

    @property
    def usable(self) -> bool:
        return self.ready and self.heard and self.role in (Role.SPARE, Role.SUSPECT)

    @property
    def coming(self) -> bool:
        """Whether it may be usable soon: it warms up, or is to return to a supervisor that took over."""
        if self.role is Role.ACTIVE:  # as nearly all are
            return False
        here = bool(self.incarnation) and self.role in (Role.JOINING, Role.SPARE, Role.SUSPECT)
        return here and not self.usable or self.may_return

    @property
    def may_return(self) -> bool:
        """Whether it counts as lost, but its agent may yet join a supervisor that took over."""
        return self.awaited and self.role is Role.FAILED and not (self.drained or self.bad)


@dataclass
class Findings:
    """What one incident gathered while its ranks were being stopped. `health`: the nodes that are to leave
    for a finding, with the finding."""

    lost: list[ev.NodeLost] = field(default_factory=list)
    # By node, rank and error, so that a report over two connections counts once.
    failures: dict[tuple[str, int, str], ev.WorkerFailed] = field(default_factory=dict)
    hung: ev.RanksHung | None = None
    asked: ev.Asked | None = None
    leave: set[str] = field(default_factory=set)  # nodes that were asked to leave, maybe more than one
    health: dict[str, Finding] = field(default_factory=dict)
    straggling: ev.Straggling | None = None
    stacks: list[ev.StacksTaken] = field(default_factory=list)
    ended: tuple[int, ...] = ()  # ranks that had reached their script's end before, without an error
    without_code: tuple[int, ...] = ()  # those of them that were stopped before they had an exit code


@dataclass(frozen=True)
class Exclusion:
    """A node that the run has excluded since `at`."""

    reason: str
    at: float


@dataclass(frozen=True)
class EndOrder:
    """Slurm has been ending the job since `at`; `why` as in `events.Signalled`, "" until Slurm has said."""

    at: float
    why: str = ""


@dataclass(frozen=True)
class Fewer:
    """The run went on with so many nodes, fewer than it wanted, since then (Unix time); `until` None: it
    still does."""

    nodes: int
    since: float
    until: float | None = None


@dataclass
class Refill:
    """A node that the run has asked for at `asked_at`. `job`: its small job, "" until Slurm has taken it;
    `node`: "" until that has started; `starts_at`: when Slurm expects that, None if it does not say;
    `served`: its node was ready."""

    number: int
    asked_at: float
    job: str = ""
    node: str = ""
    starts_at: float | None = None
    served: bool = False


@dataclass(frozen=True)
class Blame:
    """A node left the active ones for a finding of the class `cause`. `bad`: it left the run; otherwise it is
    a spare that has to be tested. Findings of one `group` are counted together."""

    node: str
    at: float
    cause: str
    evidence: str
    bad: bool
    group: str


@dataclass(frozen=True)
class Sighting:
    """A finding as reported at `t` by the supervisor's clock."""

    t: float
    node: str
    group: str
    finding: Finding


@dataclass
class TierState:
    """The state of one tier: its newest complete step, and failures since."""

    step: int | None = None
    at: float = 0.0
    size_bytes: int = 0
    seconds: float = 0.0
    failures: int = 0
    error: str = ""
    failed_step: int = 0


@dataclass
class RunState:
    """Everything that decisions read. Times are seconds since the epoch."""

    settings: Settings
    run: str = ""
    name: str = ""
    active: int = 1
    unnamed: int = 0  # active nodes besides those: in a simulation one of them stands for many
    spares: int = 0
    ranks_per_node: int = 1
    alone: bool = False  # its ranks are tasks, of which none has made a process group yet
    kill_on_bad_exit: bool = False  # one of these that fails ends the others
    # Those that have ended with exit code 0; also ranks of a training, if they leave after a signal.
    done: set[int] = field(default_factory=set)
    warned: int = 0  # the newest attempt in which ranks caught a signal: they may leave, some before others
    warned_at: float = 0.0
    submitted_at: float = 0.0
    failures: FailureRate | None = None  # since the first nodes came
    began_at: float = 0.0  # when the first nodes came
    earlier: tuple[float, float] = (0.0, 0.0)  # incidents and node-days of other runs, as of the submission
    frail: dict[str, FrailNode] = field(default_factory=dict)  # by node, as other runs and this one know them
    requeue_allowed: bool = True
    nodes_min: int = 0  # with so many it goes on if others are lacking; 0: with all that it wants
    fewer: list[Fewer] = field(default_factory=list)  # when it did
    may_refill: bool = False  # it may ask for nodes in place of lost ones
    pooled: bool = False  # and take them from a pool
    refills: dict[int, Refill] = field(default_factory=dict)  # of this allocation, by number
    refills_asked: int = 0  # the newest number
    refill_failures: int = 0  # in a row
    refill_trouble: str = ""  # the newest of these
    refill_failed_at: float = 0.0
    signal_s: float = 0.0
    timeouts_most: int = 0  # a function that keeps its own state: so often it is requeued at its time limit
    keeps_s: float = 0.0  # so long before the limit it is told
    timeouts: int = 0  # so often it was

    phase: Phase = Phase.QUEUED
    now: float = 0.0
    epoch: int = 0
    supervised_on: str = ""  # the newest supervisor's node
    # The previous supervisors' nodes that have not been heard since: when each was last heard.
    abandoned: dict[str, float] = field(default_factory=dict)
    rejoin_until: float = 0.0  # after a take-over: until when its placed nodes have to find it
    unfindable: bool = False  # nodes that are to return cannot look it up: the run waits for them
    allocation: str = ""  # job.restarts: a requeued job keeps its id
    slurm_jobs: list[str] = field(default_factory=list)
    restarts: int = 0  # requeues so far
    ordered_restarts: int = 0  # of those, the ones that Slurm or a user ordered
    end_order: EndOrder | None = None  # of the present allocation
    step_alone: bool = False  # Slurm ended the step of all agents, and not the job
    host: str = ""  # the batch host: active only when nothing else is left
    nodes: dict[str, Node] = field(default_factory=dict)
    allocated_at: float = 0.0  # since when the run has its present nodes, as far as is known
    excluded: dict[str, Exclusion] = field(default_factory=dict)
    # Nodes whose failures within this time proved to be the script's.
    acquitted: dict[str, tuple[float, float]] = field(default_factory=dict)
    blames: list[Blame] = field(default_factory=list)  # over all allocations
    seen: dict[str, list[Sighting]] = field(default_factory=dict)  # by node, of the last day
    recent: list[Sighting] = field(default_factory=list)  # on all nodes, of the last minutes
    alerts: list[Alert] = field(default_factory=list)

    attempt: int = 0
    launched: int = 0  # the newest attempt whose launch is recorded
    placement: tuple[str, ...] = ()  # index = group rank
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    spared: dict[str, tuple[SparedRank, ...]] = field(default_factory=dict)  # by node, since it has stopped
    spare: bool = False  # these ranks go on in the next attempt
    anew: bool = True  # all ranks of the present attempt are new processes
    # Nodes with ranks that stay only because no spare was ready, with the blame if it is for a finding.
    kept: dict[str, Blame | None] = field(default_factory=dict)
    deadline: float | None = None  # end of the present phase
    enough_since: float | None = None  # N nodes were ready from here on
    pretested: bool = False  # the nodes of this allocation: once, before its first attempt
    testing: set[str] = field(default_factory=set)  # nodes under test, until `test_until` at the latest
    test_until: float = 0.0
    not_before: float = 0.0  # back-off

    step: int = 0  # newest step done, of this attempt
    stepped_at: float = 0.0
    first_step_at: float | None = None  # of this attempt
    up_at: float = 0.0  # since when all its ranks are up, before that since its launch
    step_s: float = 0.0
    samples: int = 0  # that this attempt has trained on; 0 if the script does not say it
    tokens: int = 0
    joules: float = 0.0  # that GPUs have used in this run, at least; 0.0: their counters were not read
    samples_s: float = 0.0  # a second, lately
    tokens_s: float = 0.0
    time_out_s: float = 0.0  # the longest that the script gave a process group in this attempt
    slow_on: dict[int, tuple[str, ...]] = field(default_factory=dict)  # by rank: nodes on which it was slow
    absolute: bool = False  # `step` is the training's own number; else it counts from the attempt's start
    given_in: int = 0  # the newest attempt in which the script itself said which step it is at
    base: int | None = None  # steps done before this attempt, where the script does not say it
    origin: int | None = None  # the same of the first attempt that did a step
    stepped_first: int = 0  # the number of that attempt
    best_step: int = 0
    saved_step: int | None = None  # newest in any tier
    lost_step: int = 0  # the newest that was saved, if no whole copy of any was left for this attempt
    save_failures: int = 0  # in a row
    stalls: deque[float] = field(default_factory=lambda: deque(maxlen=STALLS_KEPT))  # of the last saves
    saved: dict[str, TierState] = field(default_factory=dict)
    restore: ev.RestorePlanned | None = None  # what this attempt was told to restore
    unanswered: dict[int, ev.RestoreWaits] = field(default_factory=dict)  # by rank of this attempt
    unrestored: dict[StateId, int] = field(default_factory=dict)  # states: attempts that could not
    checkpoints: str = ""  # the shared directory to which the ranks save; "" for the run's own
    loss: ev.LossNotFinite | None = None  # the first that was not finite
    batch_differs: ev.BatchDiffers | None = None  # the newest attempt's that said so
    cold: str = ""  # why ranks load everything by themselves, once one of them had to
    cadence: ev.CadenceSet | None = None  # what this attempt's ranks agreed on last
    to_remove: dict[str, str] = field(default_factory=dict)  # nodes, once ranks have saved: who requested it
    # By name: those that begin while the run has nodes in them.
    reservations: dict[str, ev.ReservationAhead] = field(default_factory=dict)

    findings: Findings = field(default_factory=Findings)
    incidents: list[Incident] = field(default_factory=list)
    without_progress: int = 0  # incidents in a row without a new step between them
    hang_patience: float = 1.0
    exit_code: int = 0
    end_reason: str = ""
    ended_at: float | None = None
    # The last notes for people; no decision depends on them.
    notes: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    # The last line of the journal that led here, by epoch.
    lines_read: dict[str, int] = field(default_factory=dict, repr=False, compare=False)
    # Kept so that a message costs the same in a run of any size.
    _places: tuple[tuple[str, ...], dict[str, int]] = field(
        default=((), {}), init=False, repr=False, compare=False
    )
    awaited: int = field(default=0, init=False, repr=False, compare=False)  # nodes not ready yet, to start
    unstopped: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    # The incidents, how many of them are over and counted, and `restores` of those.
    _counted: tuple[list[Incident], int, int, int] = field(
        default_factory=lambda: ([], 0, 0, 0), init=False, repr=False, compare=False
    )

    def may_leave(self, now: float) -> bool:
        """Whether ranks that end now may do so for a signal that they caught. Many scripts save at one, and
        train on."""
        return self.warned == self.attempt > 0 and now < self.warned_at + LEAVE_S

    @property
    def places(self) -> Mapping[str, int]:
        """The group rank of each placed node."""
        if self._places[0] is not self.placement:
            self._places = self.placement, {name: place for place, name in enumerate(self.placement)}
        return self._places[1]

    @property
    def exposed(self) -> int:
        """Nodes whose failure counts as one of the run."""
        return self.active + self.unnamed

    @property
    def incident(self) -> Incident | None:
        """The incident being recovered from, if any."""
        return self.incidents[-1] if self.incidents and self.incidents[-1].open else None

    def recovers(self, step: int, absolute: bool) -> bool:
        """Return whether the incident ends with this step: the one at which it began is done again. If it is
        not known which step this is, the incident ends with the first, unless the script is about to say
        it."""
        incident = self.incident if self.phase is Phase.RUNNING else None
        return incident is not None and (step > incident.step_lost_from if absolute else not self.given_in)

    def restores(self) -> tuple[int, int]:
        """After how many failures of the infrastructure the run was restored, and after how many of them
        partly from shared storage."""
        if self._counted[0] is not self.incidents:
            self._counted = self.incidents, 0, 0, 0
        _, number, restored, shared = self._counted
        for incident in self.incidents[number:]:
            if incident.charged == INFRASTRUCTURE and incident.tiers:
                restored, shared = restored + 1, shared + (SHARED in incident.tiers)
            if not incident.open:
                number += 1
                self._counted = self.incidents, number, restored, shared
        return restored, shared

    def recount(self) -> None:
        """Let `restores` count all incidents again: one that is over was given another cause."""
        self._counted = [], 0, 0, 0

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def public_state(self) -> str:
        """The word that `status` shows."""
        if self.ended or self.phase in (Phase.QUEUED, Phase.REQUEUED):
            return self.phase.value
        if self.incident is not None:
            return "recovering"
        return "running" if self.phase in (Phase.RUNNING, Phase.STOPPING) else "starting"

    @property
    def may_requeue(self) -> bool:
        most = self.settings.requeues
        return self.requeue_allowed and (most is None or self.restarts - self.ordered_restarts < most)

    def fresh_until(self) -> tuple[float, ...]:
        """For the placed nodes that are in the day after a repair: when that day ends."""
        ends = [frail.fresh_until or 0.0 for name, frail in self.frail.items() if name in self.places]
        return tuple(end for end in ends if end > self.began_at)

    def expected_times(self, node: Node) -> float:
        """Return how many times as often as others `node` is expected to fail."""
        return self.frail[node.name].times(self.now) if node.name in self.frail else 1.0

    def saved_on(self, tier: str) -> int:
        """Return the newest step saved in this tier; 0 for none."""
        known = self.saved.get(tier)
        return known.step or 0 if known is not None else 0

    def only_starts(self, name: str) -> bool:
        """Whether this node warms up, and has no ranks to lose yet."""
        node = self.nodes.get(name)
        warming = node is not None and node.role is Role.JOINING and name not in self.places
        return warming or self.phase is Phase.STARTING

    def failed_to_restore(self) -> set[StateId]:
        """States (step, attempt) that were tried often enough."""
        return {key for key, times in self.unrestored.items() if times >= RESTORE_TRIES}

    def node_of(self, rank: int) -> str:
        """Return the node on which the rank is placed; "" if none is."""
        place = rank // self.ranks_per_node
        return self.placement[place] if 0 <= place < len(self.placement) else ""

    def spare_nodes(self) -> list[Node]:
        """Return usable spares, best first. Suspects, nodes with findings and those that are drained or
        reserved come last, before them slow nodes, then those that are likely to fail, then the node of the
        batch script; otherwise in the order of the allocation. A slow node costs the run speed all the time,
        a failing one some minutes each time."""
        usable = [node for node in self.nodes.values() if node.usable]

        def rank(n: Node) -> tuple[bool, float, float, bool, int]:
            return (
                n.role is Role.SUSPECT or n.going or (n.marked and self.settings.bad_nodes != "report"),
                n.slowness if n.slowness > MATTERS else 0.0,
                self.expected_times(n),
                n.name == self.host,
                n.order,
            )

        return sorted(usable, key=rank)

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert len(set(self.placement)) == len(self.placement), "a node holds two group ranks"
        assert self.started <= set(self.placement), "ranks run on a node outside the placement"
        if self.phase is Phase.RUNNING:
            assert (self.nodes_min or self.active) <= len(self.placement) <= self.active, (
                "running with another number of nodes than asked for"
            )
        for earlier in self.incidents[:-1]:
            assert not earlier.open, "two open incidents"


def failure_rate(state: RunState, now: float) -> Posterior | None:
    """Return the estimate from this run until `now` and earlier ones; None before the first nodes came."""
    if state.failures is None:
        return None
    return state.failures.posterior_at(now, state.exposed, state.fresh_until())


def expected_mtbf_s(state: RunState, now: float) -> float:
    """Return the mean time between failures of the active nodes, in seconds, from the policy's rate and what
    this run and earlier ones have seen until `now`; 0.0 before the first nodes came."""
    found = failure_rate(state, now)
    return 0.0 if found is None else round(found.mtbf_s(counted(state.exposed, state.fresh_until(), now)), 1)
