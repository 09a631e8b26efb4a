"""Ends that are foreseen: the job's at its time limit, and that of nodes when a reservation begins. What the
ranks have done is saved before, and written to shared storage at once; or the job is requeued before, if the
policy says so."""

from __future__ import annotations

from jurymast.core.checkpoints.agreement import Agreement
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.state import events as ev
from jurymast.core.state.effects import AskTimeLimit, Effect, Record
from jurymast.core.state.run import RunState
from jurymast.core.state.texts import NODES_TOLD, reservation, some
from jurymast.core.supervision.ahead import Ahead
from jurymast.core.supervision.limit import RENEW_S, TimeLimit
from jurymast.core.supervision.renewal import Renewal

# What follows a save waits for it this long at least, in seconds, and as many steps as ranks may need to
# agree on one of them.
SAVE_LIMIT_S, SAVE_LIMIT_STEPS = 60.0, 6
# Who requests the last save before an end, which is then written to storage at once.
WARNING, TIME_LIMIT, RESERVATION = "Slurm's warning", "the job's time limit", "a reservation ahead"
LAST = frozenset({WARNING, TIME_LIMIT, RESERVATION})


class ForeseenEnds:
    """`now` is the supervisor's clock."""

    def __init__(self, state: RunState, agreement: Agreement, checkpoints: Checkpoints) -> None:
        self._state, self._agreement, self._checkpoints = state, agreement, checkpoints
        self.limit = TimeLimit(state.signal_s, state.keeps_s)
        self.ahead = Ahead(state, self.limit)
        self.renewal = Renewal(state, self.limit)
        self._write_s = 0.0  # what a write to shared storage takes, if anything is foreseen

    @property
    def save_limit_s(self) -> float:
        return SAVE_LIMIT_S + SAVE_LIMIT_STEPS * self._state.step_s + sum(self._state.stalls)

    def ask(self, now: float) -> list[Effect]:
        """Ask Slurm now and then where the ends are."""
        out: list[Effect] = []
        if now >= self.limit.ask_at:
            self.limit.asked(now)
            out.append(AskTimeLimit())
        if self.limit.unwarned or self.renewal.is_wanted or self._state.reservations:
            self._write_s = self._checkpoints.write_s(now)
        return [*out, *self.ahead.on_time(self._write_s, self.save_limit_s, now)]

    def anew(self, now: float) -> ev.Asked | None:
        """The order to requeue the job, if it is to be requeued now."""
        if self.renewal.is_due(self._write_s, now):
            return self.renewal.order(TIME_LIMIT, self.renewal.left_s, now, timeout=True)
        one = self.ahead.takes_all(self._write_s, now)
        if one is None or not self.renewal.may_begin_anew:
            return None
        by = reservation(one.name, maintenance=one.maintenance)
        return ev.Asked(t=now, what=ev.REQUEUE, by=by, reserved=True)

    def anew_within_s(self, order: ev.Asked) -> float:
        """How long ranks may take to agree on the save before this order."""
        return (RENEW_S if order.reserved else self.renewal.left_s) / 3.0

    def last_saves(self, now: float) -> list[Effect]:
        """Have the last checkpoint begun as long before an end as it takes. Slurm's own warning of the time
        limit does not know how long that is, and the job may have none."""
        write_s, save_s, out = self._write_s, self.save_limit_s, list[Effect]()
        told = f"a write to shared storage takes {write_s:.0f} s: the newest step is saved and written now"
        if self.limit.is_near(write_s, save_s, now):
            self.limit.begun()
            text = f"the job reaches its time limit in {self.limit.ends_at - now:.0f} s, and {told}"
            out += [_noted(text, now), *self.save(TIME_LIMIT, now)]
        if (one := self.ahead.begin_last(write_s, save_s, now)) is not None:
            left_s = max(0.0, one.starts_at - now)
            nodes = some([name for name in one.nodes if name in self._state.places], NODES_TOLD)
            what = reservation(one.name, maintenance=one.maintenance)
            text = f"{what} begins in {left_s:.0f} s, ranks are still on {nodes}, and {told}"
            out += [_noted(text, now), *self.save(RESERVATION, now)]
        return out

    def save(self, by: str, now: float) -> list[Effect]:
        """Have what is done saved, and then written to storage."""
        if not self._agreement.save_first(by, self.save_limit_s, now):
            return self.hasten(now)
        return [Record(ev.Asked(t=now, what="save", by=by))]

    def hasten(self, now: float) -> list[Effect]:
        until = max(self.limit.hurried_until, self.ahead.hurried_until)
        return self._checkpoints.hasten(now, until)


def _noted(text: str, now: float) -> Effect:
    return Record(ev.Noted(t=now, message=text))
