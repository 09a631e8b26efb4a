"""What must hold of the account of a run in a simulated cluster, as reports make it from the journal."""

from __future__ import annotations

from jurymast.core.goodput import Ledger
from jurymast.core.state import events as ev
from jurymast.journal import initial_state, take
from jurymast.sim.cluster.health import WATTS
from jurymast.sim.cluster.world import RunDisk


class AccountRules:
    """`ledger`: the product's. `done`, `again`: the steps that the journal tells of, and those of them that
    had been done before, counted from the first and the last that it tells of each attempt."""

    def __init__(self, disk: RunDisk) -> None:
        self.ledger = Ledger(initial_state(disk.plan))
        # What ranks do between two supervisors, and where they began, may be told late or not at all: the
        # ledger then takes all steps from 0 on for steps of this attempt.
        self._late = len(disk.journal) > 1
        self._first: dict[int, int] = {}  # by attempt: what its ranks restored, and how far they came
        self._last: dict[int, int] = {}
        self.done = self.again = 0
        self._began = 0.0
        for entry in disk.entries():
            take(self.ledger.state, entry, self._feed)
        best = 0
        for attempt, last in sorted(self._last.items()):
            first = self._first.get(attempt, 0)
            self.done += last - first
            self.again += max(0, min(last, best) - first)
            best = max(best, last)

    def _feed(self, event: ev.Event) -> None:
        self.ledger.feed(event)
        self._began = self._began or event.t
        # Ranks may go on while the last checkpoint of a run that has ended is written.
        if getattr(event, "attempt", 0) != self.ledger.state.attempt or self.ledger.state.ended:
            return
        if isinstance(event, ev.Restored):
            self._first[event.attempt] = event.step
        elif isinstance(event, ev.Progress) or (isinstance(event, ev.Saved) and not event.copied):
            self._late |= event.attempt not in self._first
            self._last[event.attempt] = max(event.step, self._last.get(event.attempt, 0))

    def wrong(self) -> str:
        """Return what is wrong with the ledger's account, or ""."""
        account, steps = self.ledger.account(), self.ledger.steps
        counted = sum(account.totals.values())
        if counted != account.allocated_us + account.queue_us:
            return f"{counted} us are in categories, {account.allocated_us} + {account.queue_us} in all"
        if not self._late and (steps.done, steps.again) != (self.done, self.again):
            told = f"{steps.done} steps, {steps.again} of them again"
            return f"{told}; the journal tells of {self.done} and {self.again}"
        state = self.ledger.state
        if state.joules > (most := WATTS * len(state.nodes) * (state.now - self._began)):
            return f"{state.joules:.0f} J were used, and nodes can have used {most:.0f} J"
        return ""
