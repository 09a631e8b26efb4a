"""How a supervisor leaves: the newest checkpoint is written to storage, the agents leave, then the process
ends."""

from __future__ import annotations

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.effects import AskSuperseded, Effect, End, GiveWay, Record, Send
from jurymast.core.nodes.watch import Watch
from jurymast.core.run.state import RunState
from jurymast.core.supervision.launching import may_know_more

# Agents have this long to leave.
LEAVE_LIMIT_S = 4.0
# How long the nodes are kept for the newest checkpoint to get to shared storage, by how the run ends. Slurm
# kills 30 s (KillWait) after a SIGTERM unless the partition's GraceTime says otherwise.
SECURE_LIMIT_S = {"succeeded": 1800.0, "failed": 600.0, "requeued": 300.0}
SECURE_HURRY_S = 20.0
# Users are told this often that the nodes are still kept for this.
TELL_EVERY_S = 30.0


class Departure:
    """Leaves the nodes. `now` is the supervisor's clock. The newest checkpoint may exist only in memory,
    which is lost with the nodes. While it is being written they are watched as usual, because others may hold
    what a lost node did not write."""

    def __init__(self, state: RunState, watch: Watch, checkpoints: Checkpoints) -> None:
        self._state, self._watch, self._checkpoints = state, watch, checkpoints
        self._secure_until: float | None = None
        self._tell_at = 0.0
        self._leave_until: float | None = None
        self._asked = False
        self.unexplained = False  # why the job ends is unknown: it may not end at all
        self.given_up_by = ""  # who does not want to wait for the last checkpoint of an ended run

    @property
    def begun(self) -> bool:
        return self._secure_until is not None

    @property
    def leaving(self) -> bool:
        """Whether agents were told to leave."""
        return self._leave_until is not None

    def begin(self, now: float, *, hurry: bool) -> list[Effect]:
        """Start leaving. `hurry`: Slurm ends the job."""
        if self._secure_until is not None:
            return []
        limit_s = SECURE_LIMIT_S.get(self._state.public_state, SECURE_HURRY_S)
        self._secure_until = now + (SECURE_HURRY_S if hurry else limit_s)
        self._tell_at = now + TELL_EVERY_S
        return self.tick(now)

    def tick(self, now: float) -> list[Effect]:
        """Do what is due. To be called often."""
        if self._secure_until is None:
            return []
        if self._leave_until is None:
            return self._secure(self._secure_until, now)
        if not self._asked and (not self._watch.here or now >= self._leave_until):
            self._asked = True
            return [AskSuperseded()]
        return []

    def _secure(self, until: float, now: float) -> list[Effect]:
        effects = self._checkpoints.secure(now)
        more = may_know_more(self._watch, self._checkpoints)
        if not self._checkpoints.securing.secured or self.unexplained or more:
            given_up = f": {self.given_up_by} ended the wait for it" if self.given_up_by else ""
            if not given_up and now <= until:
                return [*effects, *self._tell(until, now)]
            if lost := self._checkpoints.unsaved():
                text = f"{lost} was lost with the nodes{given_up}"
                effects.append(Record(ev.Noted(t=now, message=text)))
        self._leave_until, self._watch.ending = now + LEAVE_LIMIT_S, True
        over = self._state.ended
        leave = msg.Leave(over=over, exit_code=self._state.exit_code if over else 0)
        return [*effects, *(Send(node, leave) for node in sorted(self._watch.here))]

    def _tell(self, until: float, now: float) -> list[Effect]:
        if now < self._tell_at:
            return []
        self._tell_at = now + TELL_EVERY_S
        shared = self._state.saved.get(cp.SHARED)
        what = self._checkpoints.unsaved() or "what missing nodes hold in memory"
        why = f" ({shared.error})" if shared is not None and shared.error else ""
        text = f"the nodes are kept for up to {until - now:.0f} s more: {what} is not on shared storage{why}"
        return [Record(ev.Noted(t=now, message=text))]

    def superseded(self, by_another: bool, now: float) -> list[Effect]:
        """Take the answer to AskSuperseded: only the newest supervisor may end the job."""
        if by_another:
            return [GiveWay()]
        why, job = self._state.end_reason or "requeued", self._state.allocation.rpartition(".")[0]
        return [Record(ev.AllocationEnded(t=now, slurm_job=job, why=why)), End()]

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert self._leave_until is None or self.begun, "agents were sent home before it began"
