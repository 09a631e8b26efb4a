"""When the supervisor's node dies: which agent starts the next supervisor, on its own node, and when."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.agent.effects import NEVER, Effect, ReadPulse, StartSupervisor

# The batch process restarts a supervisor that merely crashed well before this.
PATIENCE_S = 2.0
# Agents try one after the other, in the allocation's order; the claim of an epoch settles a tie.
STAGGER_S = 2.0
PLACE_UNKNOWN = 10
LOOK_S = 0.25
# Who is late in the order looks seldom: thousands that all looked so often would keep the storage busy.
LOOK_SHARE = 0.1


class Succession:
    """One agent's part in it, decided from its own connection, from readings of the supervisor's pulse in the
    run directory, and from the order of the nodes. `now` is monotonic, in seconds.

    - That two successors never both supervise is not settled here: each has to claim an epoch first, and an
      epoch has one claimant. The order of the nodes only keeps them from trying at once.
    - A node that is merely cut off does not take over: while the pulse changes the supervisor lives, and
      others hear it. Quiet is the time from the answer of one reading to the question of a later one that
      reads the same, so that a storage that answers late, or not at all, is not taken for a quiet supervisor.
    - Who never met a supervisor starts none: it is the batch process's to bring the first one up.
    - An agent has at most one supervisor here, and reads one pulse at a time.
    """

    def __init__(self, node: str, nodes: Sequence[str], *, enabled: bool) -> None:
        """`nodes`: all of the allocation, in its order. Not `enabled`: the batch process cannot die alone."""
        self._enabled = enabled
        place = nodes.index(node) if node in nodes else PLACE_UNKNOWN
        self._patience_s = PATIENCE_S + STAGGER_S * place
        self._look_s = max(LOOK_S, LOOK_SHARE * STAGGER_S * place)
        self._met = False
        self._alone = False  # a supervisor was there and is not any more
        self._look_at = 0.0
        self._asked_at: float | None = None  # a reading that was not answered yet
        self._pulse = ""
        self._quiet_since: float | None = None
        self._supervises = False

    @property
    def wake_at(self) -> float:
        looks = self._alone and not self._supervises and self._asked_at is None
        return self._look_at if looks else NEVER

    def check(self) -> None:
        """What holds between any two events. Raises AssertionError."""
        assert self._met or not self._alone, "who never met a supervisor misses one"
        assert self._enabled or self.wake_at == NEVER, "a run whose batch process cannot die alone is watched"
        assert self._alone or self._quiet_since is None, "a supervisor that answers is thought quiet"

    def answered(self, now: float) -> list[Effect]:
        """This agent is connected to a supervisor."""
        self._met, self._alone, self._quiet_since = self._enabled, False, None
        return []

    def unanswered(self, now: float) -> list[Effect]:
        """It is not any more."""
        self._alone = self._met
        return self.tick(now)

    def tick(self, now: float) -> list[Effect]:
        if now < self.wake_at:
            return []
        self._asked_at = now
        return [ReadPulse()]

    def pulse(self, value: str | None, now: float) -> list[Effect]:
        """`value`: what was read; None: storage did not answer."""
        asked_at, self._asked_at = self._asked_at, None
        self._look_at = now + self._look_s
        if value is None or asked_at is None or not self._alone:
            return []
        if self._quiet_since is None or value != self._pulse:
            self._pulse, self._quiet_since = value, now
        elif asked_at - self._quiet_since > self._patience_s:
            self._quiet_since, self._supervises = None, True
            return [StartSupervisor()]
        return []

    def supervisor_ended(self, now: float) -> list[Effect]:
        """The one that was started here."""
        self._supervises = False
        return self.tick(now)
