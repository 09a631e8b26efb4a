"""Decides whether the ranks hang: silence raises the question, looks at their stacks on all nodes answer
it."""

from __future__ import annotations

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.effects import Effect, Record, Send
from jurymast.core.nodes.reports import Reports
from jurymast.core.nodes.silence import HangVerdict, Looks
from jurymast.core.nodes.stacks import UNKNOWN, Stand
from jurymast.core.run.state import Phase, RunState


class Hangs:
    """Watches for hangs. Waits are measured by the clock of `reports`, which stands still while the
    supervisor does."""

    def __init__(self, state: RunState, reports: Reports) -> None:
        self._state, self._reports = state, reports
        self._looks = Looks()
        self._asked = False  # in this silence
        self._asked_at = 0.0
        self._number = 0
        self._answers: dict[int, Stand] = {}

    def tick(self, now: float) -> list[Effect]:
        """Look for hangs. To be called often while the ranks run."""
        if self._state.phase is not Phase.RUNNING:
            return []
        verdict = self._reports.hang()
        if verdict is None:
            self._looks, self._asked = Looks(), False
            return []
        effects: list[Effect] = []
        evidence = verdict.evidence
        if not verdict.certain:
            effects = self._look()
            patience, starting = self._state.hang_patience, verdict.starting
            if not self._looks.stuck(patience, idle=verdict.idle, starting=starting):
                return effects
            evidence += f"; {self._looks.evidence()}"
        self._looks, self._asked = Looks(), False
        return [*effects, Record(self._hung(verdict, evidence, now))]

    def looked(self, message: msg.Looked) -> None:
        """Take in what a node's agent saw."""
        if (message.attempt, message.number) == (self._state.attempt, self._number):
            self._answers.update(message.stands)

    def _look(self) -> list[Effect]:
        """Ask all nodes again, once the answers to the last question are counted."""
        at = self._reports.clock.now
        if at - self._asked_at < self._looks.interval_s():
            return []
        if self._asked:
            self._looks.add(self._asked_at, {**self._silent(), **self._answers})
        self._number += 1
        self._asked, self._asked_at, self._answers = True, at, {}
        look = msg.Look(attempt=self._state.attempt, number=self._number)
        return [Send(node, look) for node in self._state.placement]

    def _silent(self) -> dict[int, Stand]:
        """The ranks without an answer this time: their agent is slow, or their node in a bad state. Nodes
        whose ranks have all ended do not answer."""
        count = self._state.ranks_per_node
        return {
            place * count + local: Stand(UNKNOWN, "no answer")
            for place, node in enumerate(self._state.placement)
            if node not in self._state.finished
            for local in range(count)
        }

    def _hung(self, verdict: HangVerdict, evidence: str, now: float) -> ev.RanksHung:
        return ev.RanksHung(
            t=now, attempt=self._state.attempt, ranks=verdict.ranks, node=verdict.node,
            silent_s=verdict.silent_s, limit_s=verdict.limit_s, evidence=evidence,
        )  # fmt: skip
