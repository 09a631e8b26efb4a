"""How late the supervisor's own loop is: no evidence against anybody, and agents are told to be patient."""

from __future__ import annotations

from jurymast.core.nodes.heartbeat import answer_every_s, patience_s

# A loop that stood still for so long is told of.
TOLD_S = 2.0
# How late it was counts half after a minute or two.
KEPT, MOST_S = 0.999, 5.0


class Lateness:
    """`patience_s` each agent is to have, in seconds, and `answer_every_s` its heartbeats are answered."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._late_s = 0.0
        self.overslept(0.0, 0)

    def overslept(self, seconds: float, agents: int) -> str:
        """By so much the loop was late at its newest tick; it hears so many agents. What is worth telling
        of that, or ""."""
        self._late_s = min(MOST_S, max(seconds, KEPT * self._late_s))
        self.patience_s = round(patience_s(self._heartbeat_s, agents, self._late_s), 1)
        self.answer_every_s = answer_every_s(self._heartbeat_s, agents)
        if seconds <= TOLD_S:
            return ""
        return f"the supervisor stood still for {seconds:.1f} s: no node is blamed for that time"
