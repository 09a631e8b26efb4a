"""What must hold of the account of a run in a simulated cluster, as reports make it from the journal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from jurymast.core.goodput import Ledger
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.images import LIVE
from jurymast.journal import initial_state, take
from jurymast.sim.cluster.health import WATTS
from jurymast.sim.cluster.world import RunDisk

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent
    from jurymast.sim.cluster.oracle import Oracle
    from jurymast.sim.cluster.supervisor import SimSupervisor
    from jurymast.sim.cluster.training import SimGroup

NOTHING_MISSED = "55: what ranks said is in the journal, whichever supervisor heard it"

PROMISED = "56: a request that was accepted is in the journal, whichever supervisor accepted it"

# A supervisor that is heard has been told, and has written it, after this long.
SAID_S = 20.0


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
        self._live: set[int] = set()  # attempts whose ranks went on in their processes
        self.done = self.again = 0
        self._began = 0.0
        for entry in disk.entries():
            take(self.ledger.state, entry, self._feed)
        best = began = 0
        for attempt in sorted({*self._live, *self._last}):
            first = self._first.get(attempt, 0)
            last = self._last.get(attempt, first)
            known = max(best, began)
            if attempt in self._live and first > known:  # more than was heard before
                self.done, best = self.done + first - known, first
            began = began if attempt in self._live else first
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
            if event.tier == LIVE:
                self._live.add(event.attempt)
        elif isinstance(event, ev.Progress) or (isinstance(event, ev.Saved) and not event.copied):
            self._late |= event.attempt not in self._first
            self._last[event.attempt] = max(event.step, self._last.get(event.attempt, 0))

    def wrong(self) -> str:
        """Return what is wrong with the ledger's account, or ""."""
        account, steps = self.ledger.account(), self.ledger.steps
        counted = sum(account.totals.values())
        if counted != account.allocated_us + account.queue_us:
            return f"{counted} us are in categories, {account.allocated_us} + {account.queue_us} in all"
        times = account.timeline
        if any(one.end <= one.start for one in times) or any(
            one.end > other.start for one, other in zip(times, times[1:], strict=False)
        ):
            return f"times overlap, or go back: {times[:20]}"
        if not self._late and (steps.done, steps.again) != (self.done, self.again):
            told = f"{steps.done} steps, {steps.again} of them again"
            return f"{told}; the journal tells of {self.done} and {self.again}"
        state = self.ledger.state
        if state.joules > (most := WATTS * len(state.nodes) * (state.now - self._began)):
            return f"{state.joules:.0f} J were used, and nodes can have used {most:.0f} J"
        return ""


class MissedRules:
    """What ranks said that they restored, and what users were told is accepted, and whether the journal tells
    it at the end."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._said: dict[int, tuple[SimAgent, float]] = {}  # by attempt: by whose agent, and when
        self._accepted: list[tuple[str, str]] = []

    def restored(self, group: SimGroup) -> None:
        self._said[group.attempt] = group.members[0].agent, self._oracle.cluster.world.now

    def answered(self, ask: msg.Ask, answer: msgspec.Struct) -> None:
        if isinstance(answer, msg.Accepted) and not answer.unwritten:
            self._accepted.append((ask.what, ask.node))
            if ask.what == "drain":
                self._oracle.withdrawals.accepted(ask.node)

    def at_the_end(self) -> None:
        entries = [*self._oracle.cluster.disk.entries()]
        asked = Counter(
            # Ranks save before their node is removed.
            ("drain" if entry.get("node") else entry["what"], entry.get("node", ""))
            for entry in entries
            if entry.get("event") == "Asked" and entry["by"] == "you"
        )
        if lost := [*(Counter(self._accepted) - asked).elements()]:
            self._oracle.fail(PROMISED, f"of {self._accepted}, {lost} were not")

    def look(self, supervisor: SimSupervisor) -> None:
        """Agents that have lived since then, and are heard, have kept it until it was written."""
        oracle = self._oracle
        disk, now = oracle.cluster.disk, oracle.cluster.world.now
        told = {entry["attempt"] for entry in disk.entries() if entry.get("event") == "Restored"}
        for attempt, (agent, said_at) in self._said.items():
            site = agent.site
            lives = agent.process.alive and agent is site.agent and supervisor.connected(site.name)
            if lives and attempt not in told and said_at < now - SAID_S and oracle.storage_fine(SAID_S):
                oracle.fail(NOTHING_MISSED, f"{site.name} told in vain what attempt {attempt} restored")
