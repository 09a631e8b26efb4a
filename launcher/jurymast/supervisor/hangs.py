"""Do the ranks hang? Silence raises the question, looks at their stacks on all nodes answer it."""

from __future__ import annotations

from collections.abc import Callable

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.hang import HangVerdict, Looks
from jurymast.core.nodes.watch import Watch
from jurymast.core.stacks import UNKNOWN, Stand
from jurymast.core.state import RunState
from jurymast.supervisor.progress import Progress


class Hangs:
    """Reads `watch`, asks the agents by `tell`, and feeds RanksHung events of the state's attempt."""

    def __init__(
        self,
        state: RunState,
        watch: Watch,
        progress: Progress,
        tell: Callable[[str, msg.ToAgent], None],
        feed: Callable[[ev.Event], None],
        now: Callable[[], float],
    ) -> None:
        self._state, self._watch, self._progress = state, watch, progress
        self._tell, self._feed, self._now = tell, feed, now
        self._looks = Looks()
        self._asked = False  # in this silence
        self._asked_at = 0.0
        self._number = 0
        self._answers: dict[int, Stand] = {}

    def judge(self) -> None:
        """To be called often while the ranks run."""
        verdict = self._watch.reports.hang()
        if verdict is None:
            self._looks, self._asked = Looks(), False
            return
        evidence = verdict.evidence
        if not verdict.certain:
            self._look()
            patience, starting = self._state.hang_patience, verdict.starting
            if not self._looks.stuck(patience, idle=verdict.idle, starting=starting):
                return
            evidence += f"; {self._looks.evidence()}"
        self._looks, self._asked = Looks(), False
        self._tell_journal(verdict, evidence)

    def _look(self) -> None:
        """Ask all nodes again, once what they answered to the last question is counted."""
        now = self._watch.clock.now
        if now - self._asked_at < self._looks.interval_s():
            return
        if self._asked:
            self._looks.add(self._asked_at, {**self._silent(), **self._answers})
        self._number += 1
        self._asked, self._asked_at, self._answers = True, now, {}
        look = msg.Look(attempt=self._state.attempt, number=self._number)
        for node in self._state.placement:
            self._tell(node, look)

    def _silent(self) -> dict[int, Stand]:
        """Ranks that gave no answer this time: their agent is slow, or their node in a bad state. Those of
        nodes where all have come to their end give none."""
        count = self._state.ranks_per_node
        return {
            place * count + local: Stand(UNKNOWN, "no answer")
            for place, node in enumerate(self._state.placement)
            if node not in self._state.finished
            for local in range(count)
        }

    def hear(self, message: msg.Looked) -> None:
        """What a node's agent saw."""
        if (message.attempt, message.number) == (self._state.attempt, self._number):
            self._answers.update(message.stands)

    def _tell_journal(self, verdict: HangVerdict, evidence: str) -> None:
        self._progress.report(forced=True)
        self._feed(
            ev.RanksHung(
                t=self._now(), attempt=self._state.attempt, ranks=verdict.ranks, node=verdict.node,
                silent_s=verdict.silent_s, limit_s=verdict.limit_s, evidence=evidence,
            )
        )  # fmt: skip
