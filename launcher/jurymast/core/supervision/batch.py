"""What the batch process decides. It keeps a supervisor running, and Slurm ends the job when it ends. It
knows nothing of the run but how that ended."""

from __future__ import annotations

import math
from enum import Enum

import msgspec

from jurymast.errors import JurymastError

# Supervisors that live for less than this, one after the other, are started again at once this many times,
# and then after a pause that doubles: a later one may start when the storage has room again.
SHORT_LIFE_S = 60.0
RESTARTS_AT_ONCE = 5
PAUSE_S, PAUSE_MAX_S = 0.5, 15.0
# A successor's requeue takes seconds; one that is not seen by then has failed, and its node may be gone too.
SUCCESSOR_LIMIT_S = 120.0
# A SIGTERM is repeated to supervisors that start this long after it. A later one asks Slurm itself.
TOLD_FOR_S = 120.0
# All agents have ended, and with them another node's supervisor, if it has written nothing for this long.
GONE_S = 10.0
SUPERSEDED = 3  # exit code of a supervisor that a newer epoch replaced


class Outcome(msgspec.Struct, frozen=True):
    """How a run, or its job, ended, as written by the supervisor: the run's state, the job's exit code, and
    nodes that were lost or are to be excluded from a requeued job. `step_alone`: Slurm ended the step of its
    agents, and not the job."""

    state: str
    exit_code: int
    exclude: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    step_alone: bool = False

    @property
    def requeued(self) -> bool:
        return self.state == "requeued"


FAILED = Outcome("failed", JurymastError.exit_code)


class StartSupervisor(msgspec.Struct, frozen=True):
    """Start a supervisor at once. Its start and its end are events."""


class StartAgents(msgspec.Struct, frozen=True):
    """Start the agents of all nodes, once."""


class Forward(msgspec.Struct, frozen=True):
    """Forward a signal to the supervisor: a `warning`, or the end of the job."""

    warning: bool


class RequeueJob(msgspec.Struct, frozen=True):
    """Requeue the job, after removing what is left of the agents."""

    outcome: Outcome


class Say(msgspec.Struct, frozen=True):
    """Write this to the job's log."""

    text: str


class EndJob(msgspec.Struct, frozen=True):
    """End the job, or this life of a requeued job."""

    outcome: Outcome


Effect = StartSupervisor | StartAgents | Forward | RequeueJob | Say | EndJob


class _Phase(Enum):
    SUPERVISED = "a supervisor of this process runs"
    PAUSE = "none stays up: the training is not to blame, and goes on"
    SUPERSEDED = "another node's supervisor decides, and this process keeps the job alive for it"
    REQUEUED = "that one is about to requeue the job, and runs below this process's srun"
    OVER = "the job ends"


class Batch:
    """Decides for the batch process. `on_time` is called now and then while none of its supervisors
    runs. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._phase = _Phase.OVER
        self._started_at = 0.0
        self._short_lives = 0  # one after the other
        self._until = 0.0  # end of a pause, or of the wait for a successor
        self._told_until = -math.inf  # that the job ends
        self._gone_since = math.inf  # no agent is alive

    @property
    def supervised(self) -> bool:
        return self._phase is _Phase.SUPERVISED

    @property
    def over(self) -> bool:
        return self._phase is _Phase.OVER

    def begin(self, now: float) -> list[Effect]:
        """Start the agents and a supervisor. Agents import torch while the supervisor starts."""
        return [*self._start(now), StartAgents()]

    def _start(self, now: float) -> list[Effect]:
        self._phase, self._started_at = _Phase.SUPERVISED, now
        return [StartSupervisor()]

    def on_supervisor_started(self, now: float) -> list[Effect]:
        """A supervisor has started; from now on signals can be forwarded to it. It finds out whether the job
        ends."""
        return [Forward(warning=False)] if now < self._told_until else []

    def on_supervisor_ended(self, code: int, outcome: Outcome | None, now: float) -> list[Effect]:
        """A supervisor ended. `outcome`: what it had written before, if anything."""
        if code == SUPERSEDED:  # then an outcome is the other one's, who acts on it
            self._phase = _Phase.SUPERSEDED
            return []
        if outcome is not None:
            requeue: list[Effect] = [RequeueJob(outcome)] if outcome.requeued else []
            return [*requeue, *self._end(outcome)]
        self._short_lives = self._short_lives + 1 if now < self._started_at + SHORT_LIFE_S else 1
        told = Say(f"the supervisor ended with code {code}")
        more = self._short_lives - RESTARTS_AT_ONCE - 1
        if more < 0:
            return [told, *self._start(now)]
        self._phase = _Phase.PAUSE
        self._until = now + min(PAUSE_MAX_S, PAUSE_S * 2.0 ** min(more, 10))
        why = "jurymast: no supervisor stays up; the ranks go on without failure handling until one does"
        return [told, Say(why)] if more == 0 else [told]

    def on_time(self, outcome: Outcome | None, now: float, *, agents: bool) -> list[Effect]:
        """Decide without a supervisor of this process. `outcome`: what any supervisor has written; `agents`:
        whether some are alive."""
        self._gone_since = math.inf if agents else min(self._gone_since, now)
        match self._phase:
            case _Phase.SUPERSEDED if outcome is None and now >= self._gone_since + GONE_S:
                self._gone_since = math.inf
                gone = (
                    "all agents have ended, and no supervisor has said how the run ended: another one starts"
                )
                return [Say(gone), *self._start(now)]
            case _Phase.PAUSE:
                if not agents:
                    return self._end(outcome or FAILED)
                return self._start(now) if now >= self._until else []
            case _Phase.SUPERSEDED if outcome is not None and outcome.requeued:
                self._phase = _Phase.REQUEUED
                self._until = now if now < self._told_until else now + SUCCESSOR_LIMIT_S
            case _Phase.SUPERSEDED if outcome is not None:
                return self._end(outcome)
        if self._phase is _Phase.REQUEUED and outcome is not None:
            return self._await_requeue(outcome, now)
        return []

    def _await_requeue(self, outcome: Outcome, now: float) -> list[Effect]:
        """Wait until Slurm ends this life of the job. If this process ended first, nothing would be
        requeued."""
        if now < self._until:
            return []
        late = Say("this process requeues the job, unless that is done: its successor's time is over")
        return [late, RequeueJob(outcome), *self._end(outcome)]

    def on_signal(self, now: float, *, warning: bool, supervised: bool) -> list[Effect]:
        """Slurm sent a signal, or somebody else did: only a supervisor finds out, so this process never ends
        for a SIGTERM alone. `supervised`: a supervisor of this process runs and can be told; otherwise a
        `warning` has no effect, and after a SIGTERM one is started at once, or, if a successor is about to
        requeue the job, what it may not come to any more is done here."""
        if not warning:
            self._told_until = now + TOLD_FOR_S
            self._until = min(self._until, now)
        return [Forward(warning)] if supervised else []

    def _end(self, outcome: Outcome) -> list[Effect]:
        self._phase = _Phase.OVER
        return [EndJob(outcome)]
