"""How a supervisor leaves: the newest checkpoint is written to storage, the agents leave, then the process
ends. Nor do agents leave before the journal is written: what it lacks only they can tell.

The run itself may want that (it is over, or is to be requeued), or Slurm does (a SIGTERM, and what it
answers when asked why). A departure for Slurm alone is revoked if the job goes on: until Slurm has said why
it ends the job, nothing is done that training could not go on after.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from enum import IntEnum

from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.nodes.watch import Watch
from jurymast.core.state import events as ev
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskSuperseded, Effect, End, GiveWay, Record, Send
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.texts import NODES_TOLD, some
from jurymast.core.supervision.launching import may_know_more

# Slurm's default KillWait: from its SIGTERM to its SIGKILL, until it was asked.
KILL_WAIT_S = 30.0
# Agents have this long to leave, and the outcome needs this long to be written and acted on: that much of the
# time before Slurm's SIGKILL is not for the checkpoint, but at most this share of it.
LEAVE_LIMIT_S = 4.0
# Those of a run that is over have this long, unless Slurm kills them: they also clear the nodes' own disks.
CLEAR_LIMIT_S = 30.0
RESERVE_S, RESERVE_SHARE = 5.0, 1 / 3
# How long the nodes are kept without any progress of the newest checkpoint towards shared storage, by how the
# run ends. As long as there is progress they are kept however long it takes: that depends on its size.
KEPT_STILL_S = {"succeeded": 1800.0, "failed": 600.0, "requeued": 300.0, "cancelled": 60.0}
# Slurm kills a job that it ends. One that lives this much longer, and of which it says nothing, goes on.
SPARED_S = 5.0
# Users are told this often that the nodes are still kept for this.
TELL_EVERY_S = 30.0
# If Slurm ends the job for one of these reasons, the job starts again.
SLURM_REQUEUES = frozenset({"preempted", "requeued"})


class Stage(IntEnum):
    """How far a departure is. It goes back only from SECURES, to STAYS, and from ASKS, to SECURES."""

    STAYS = 0
    SECURES = 1  # the newest checkpoint is being written
    ASKS = 2  # it is being checked whether there is a newer supervisor, whose agents these are
    LEAVES = 3  # agents were told to leave
    CHECKS = 4  # it is being checked again


@dataclass
class SlurmsOrder:
    """Slurm ends the job. `reserve_s` before `kill_at` the nodes are left; `why`: as Slurm says, "" as long
    as it does not."""

    kill_at: float
    reserve_s: float
    why: str = ""


class Departure:
    """Leaves the nodes. `now` is the supervisor's clock. The newest checkpoint may exist only in memory,
    which is lost with the nodes. While it is being written they are watched as usual, because others may hold
    what a lost node did not write."""

    def __init__(self, state: RunState, watch: Watch, checkpoints: Checkpoints) -> None:
        self._state, self._watch, self._checkpoints = state, watch, checkpoints
        self._stage = Stage.STAYS
        self._order: SlurmsOrder | None = None
        self._since = self._tell_at = 0.0
        # Until when ranks may do what they do at a SIGTERM, and then the agents may leave.
        self._grace_until = self._leave_until = math.inf
        self._late: set[str] = set()  # nodes that have missed the order to leave: it came late, or was away
        self.lacks_journal = False  # the agents could leave, but for the journal that is not written
        self.given_up_by = ""  # who does not want to wait for the last checkpoint of an ended run

    @property
    def begun(self) -> bool:
        return self._stage > Stage.STAYS

    @property
    def leaving(self) -> bool:
        """Whether agents were told to leave."""
        return self._stage >= Stage.LEAVES

    @property
    def ordered(self) -> bool:
        """Whether Slurm ends the job, as far as is known."""
        return self._order is not None

    @property
    def unexplained(self) -> bool:
        """Whether Slurm seems to end the job, and has not said why: it may not end at all."""
        return self._order is not None and not self._order.why

    def refusal(self, what: str) -> str:
        """Why it changes nothing that Slurm has ended the step in which the agents were, if that is
        requested; "" if the run ends by that."""
        if what != ev.STEP_ENDED:
            return ""
        if self._own or self.ordered:
            return "the run leaves its nodes in any case"
        here = sorted(self._watch.here)
        return f"agents are connected: {some(here, NODES_TOLD)}" if here else ""

    @property
    def why(self) -> str:
        """Why Slurm ends the job, or ""."""
        return self._order.why if self._order is not None else ""

    @property
    def _own(self) -> bool:
        """Whether the run itself has decided to leave."""
        return self._state.ended or self._state.phase is Phase.REQUEUED

    @property
    def requeues(self) -> bool:
        """Whether the job is to be requeued from here, unless Slurm has done that. It does not requeue a
        preempted job whose script ends before its grace time does."""
        if self._state.phase is Phase.REQUEUED:
            return True
        return self.why in SLURM_REQUEUES and not self._state.ended and self._state.may_requeue

    # ---- events

    def on_run_decision(self, now: float) -> list[Effect]:
        """The run has decided to leave. It may have been said before."""
        self._begin(now)
        return self.on_time(now, unwritten=True)

    def on_sigterm(self, now: float) -> list[Effect]:
        """Slurm seems to end the job, or does so for the second time, as at the end of a preempted job's
        grace time: then nobody has more time than a SIGTERM leaves."""
        kill_at = now + KILL_WAIT_S
        if self._order is None:
            self._order = SlurmsOrder(kill_at, _reserve_s(KILL_WAIT_S))
        self._hurry(self._order, kill_at, now)
        self._begin(now)
        return self.on_time(now, unwritten=True)

    def on_explained(self, why: str, kill_in_s: float | None, now: float) -> list[Effect]:
        """Slurm has said why it ends the job, and when it kills it, if it is asked that (None: unknown)."""
        order = self._order or SlurmsOrder(now + KILL_WAIT_S, _reserve_s(KILL_WAIT_S))
        self._order, order.why = order, why
        if kill_in_s is not None and not self.leaving:
            order.kill_at, order.reserve_s = now + kill_in_s, _reserve_s(kill_in_s)
        self._begin(now)
        return self.on_time(now, unwritten=True)

    def on_revoked(self) -> None:
        """The job goes on. A run that wants to leave by itself still does, at its own pace. One that has left
        its nodes, because Slurm has said why it ends the job, cannot go back."""
        if self._own or not self.leaving:
            self._order = None
        if not self._own and not self.leaving:
            self._stage = Stage.STAYS

    def spared(self, now: float) -> bool:
        """Whether the job lives on although Slurm seemed to end it, and Slurm does not say."""
        order = self._order
        return order is not None and not order.why and not self._own and now > order.kill_at + SPARED_S

    def give_up(self, by: str, now: float) -> None:
        """Somebody does not want to wait for the last checkpoint of an ended run, nor for its ranks."""
        self.given_up_by = by
        if self._stage is Stage.LEAVES:
            self._leave_until = min(self._leave_until, now + LEAVE_LIMIT_S)

    def on_joined(self, node: str) -> None:
        """An agent has joined. It leaves once what it has told is in the journal."""
        if self.leaving:
            self._late.add(node)

    def _begin(self, now: float) -> None:
        if self._stage is Stage.STAYS:
            self._stage, self._since, self._tell_at = Stage.SECURES, now, now + TELL_EVERY_S

    def _hurry(self, order: SlurmsOrder, kill_at: float, now: float) -> None:
        if kill_at < order.kill_at:
            order.kill_at, order.reserve_s = kill_at, _reserve_s(kill_at - now)
        if self._stage is Stage.LEAVES:  # agents have told the ranks how long they have
            self._waits_for_ranks(min(self._grace_until, now + self._grace_s(now)))

    def _waits_for_ranks(self, until: float) -> None:
        self._grace_until = until
        limit_s = CLEAR_LIMIT_S if self._state.ended else LEAVE_LIMIT_S
        if self._order is not None:  # the outcome needs some of what is left until a SIGKILL
            limit_s = min(limit_s, max(0.0, (self._order.kill_at - until) / 2))
        self._leave_until = min(self._leave_until, until + limit_s)

    def on_time(self, now: float, *, unwritten: bool) -> list[Effect]:
        """Do what is due. To be called often. `unwritten`: some lines of the journal are not on the disk
        yet, as that of a decision made now."""
        match self._stage:
            case Stage.SECURES:
                return self._secure(now, unwritten)
            case Stage.ASKS if self._kill:
                return self._leave(now)
            case Stage.LEAVES if not self._waits_for(now) or now >= self._leave_until:
                self._stage = Stage.CHECKS
                return [AskSuperseded()]
            case Stage.LEAVES | Stage.CHECKS if self._late and not self._waits_for_journal(unwritten):
                return self._order_to_leave(self._late, now)
            case _:
                return []

    def _waits_for_journal(self, unwritten: bool) -> bool:
        return unwritten and not (self._kill or self.given_up_by)

    def _secure(self, now: float, unwritten: bool) -> list[Effect]:
        for_good = self._own or not self.unexplained
        effects = self._checkpoints.secure(now, for_good=for_good)
        # While Slurm ends the job no node counts as lost: those that would are not waited for.
        more = {*may_know_more(self._state.attempt, self._watch, self._checkpoints)}
        more -= {*self._watch.silent(now)}
        if not for_good:
            return effects
        secured = self._checkpoints.final_write.secured and not more
        self.lacks_journal = secured and unwritten
        if not secured or unwritten:
            if not self._gives_up(now):
                missing = "what missing nodes hold in memory" if more else "the journal"
                return [*effects, *self._tell(missing, now)]
            if lost := self._checkpoints.unsaved():
                by = f": {self.given_up_by} ended the wait for it" if self.given_up_by else ""
                effects.append(Record(ev.Noted(t=now, message=f"{lost} was lost with the nodes{by}")))
            return effects + self._leave(now)  # storage may not say who is the newest, either
        if self._kill:
            return effects + self._leave(now)
        self._stage = Stage.ASKS
        return [*effects, AskSuperseded()]

    @property
    def _kill(self) -> SlurmsOrder | None:
        """Slurm's order, if it is to kill the job: then that ends, whoever supervises it."""
        return self._order if self._order is not None and self._order.kill_at < math.inf else None

    def _leave(self, now: float) -> list[Effect]:
        self._stage, self._watch.ending = Stage.LEAVES, True
        self._waits_for_ranks(now + self._grace_s(now))
        return self._order_to_leave(self._watch.here, now)

    def _order_to_leave(self, nodes: Set[str], now: float) -> list[Effect]:
        over, grace_s = self._state.ended, max(0.0, self._grace_until - now)
        leave = msg.Leave(over=over, exit_code=self._state.exit_code if over else 0, grace_s=grace_s)
        here = sorted(nodes & self._watch.here)
        self._late -= {*nodes}
        return [Send(node, leave) for node in here]

    def _waits_for(self, now: float) -> set[str]:
        """The nodes whose agents have yet to leave. A leaving agent sends heartbeats until it goes."""
        return self._watch.here.difference(self._watch.silent(now))

    def _grace_s(self, now: float) -> float:
        """How long ranks have for what they do at a SIGTERM, as without us: until the SIGKILL of Slurm that
        is to come, or of one that would come if a cancelled run were a cancelled job."""
        if kill := self._kill:
            return max(0.0, kill.kill_at - kill.reserve_s - now)
        return KILL_WAIT_S if self._order is not None or self._state.public_state == "cancelled" else 0.0

    @property
    def _still_limit_s(self) -> float:
        return KEPT_STILL_S.get(self._state.public_state, KEPT_STILL_S["requeued"])

    def _gives_up(self, now: float) -> bool:
        """Whether the newest checkpoint is not waited for any longer. A SIGKILL that is to come ends that,
        or, without one, a lack of progress."""
        if self.given_up_by:
            return True
        if kill := self._kill:
            return now >= kill.kill_at - kill.reserve_s
        return now > max(self._since, self._checkpoints.moved_at) + self._still_limit_s

    def _tell(self, missing: str, now: float) -> list[Effect]:
        if now < self._tell_at:
            return []
        self._tell_at = now + TELL_EVERY_S
        shared = self._state.saved.get(im.SHARED)
        what = self._checkpoints.unsaved() or missing
        # The newest write that failed may have been of an older step, and in an earlier allocation.
        why = f" (step {shared.failed_step}: {shared.error})" if shared is not None and shared.error else ""
        if kill := self._kill:
            until = f"for up to {kill.kill_at - kill.reserve_s - now:.0f} s more"
        else:
            until = f"until {self._still_limit_s:.0f} s pass without progress"
        text = f"the nodes are kept {until}: {what} is not on shared storage{why}"
        return [Record(ev.Noted(t=now, message=text))]

    def on_superseded(self, by_another: bool, now: float, *, unwritten: bool) -> list[Effect]:
        """Take the answer to AskSuperseded: only the newest supervisor may send agents away, and end the job.
        One that takes over later finds in the journal what was decided, and what agents told in the
        meantime."""
        if by_another:
            return [GiveWay()]
        if self._stage is Stage.ASKS and self._waits_for_journal(unwritten):
            self._stage = Stage.SECURES
            return []
        if self._stage is Stage.ASKS:
            return self._leave(now)
        if self._stage is not Stage.CHECKS:  # the job was about to end before this answer came
            return []
        why = self._state.end_reason or self.why or "requeued"
        job = self._state.allocation.rpartition(".")[0]
        return [Record(ev.AllocationEnded(t=now, slurm_job=job, why=why)), End()]

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert self._own or self.ordered or not self.begun, "nobody wants the nodes back, and they are left"
        assert not (self.leaving and self.unexplained and not self._own), (
            "the nodes are left for a SIGTERM that Slurm has not explained"
        )


def _reserve_s(kill_in_s: float) -> float:
    return min(RESERVE_S, RESERVE_SHARE * max(0.0, kill_in_s))
