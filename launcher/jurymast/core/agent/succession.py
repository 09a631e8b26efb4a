"""Who takes over when the supervisor's node dies, and when."""

from __future__ import annotations

from collections.abc import Sequence

from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect
from jurymast.core.agent.link import SupervisorSilence, recent

# So many nodes are named by the supervisor as those that take over first.
HEIRS = 3
# How often a supervisor updates its pulse.
PULSE_INTERVAL_S = 0.5
# A process that merely crashed is started again within this time, by the batch process.
RESTART_S = 4.0
# Agents try one after the other; the claim of an epoch settles a tie.
STAGGER_S = 2.0
# The heirs that the supervisor named, then all others in the allocation's order.
PLACE_UNKNOWN = 10
LOOK_S = 0.25
# Nodes late in the order look rarely: if thousands looked this often, they would keep the storage busy.
LOOK_SHARE = 0.1
# The first heir gets a process ready, but not while everything starts.
STANDBY_AFTER_S = 5.0


def epoch_of(pulse: str) -> int:
    return int(pulse.partition(":")[0])


class Succession:
    """One agent's part in the succession. It decides from the supervisor's messages, from readings of the
    supervisor's pulse in the run directory, and from this node's place in the order. `now` is monotonic, in
    seconds.

    - Two supervisors are prevented elsewhere: each has to claim an epoch, and an epoch has one claimant. The
      order of nodes only keeps agents from trying at once.
    - The first few in the order, whom the supervisor names, read the pulse all the time; the others once they
      have lost their supervisor.
    - A supervisor that is heard is never replaced. Nor is one whose connection closed, while its batch
      process may still start it again; that process has a listening port meanwhile.
    - A node that is merely cut off does not take over: while the pulse changes, the supervisor lives and
      others hear it. The pulse counts as quiet from the answer of one reading to the request of a later
      reading with the same value, so that storage that answers late, or not at all, is not taken for a quiet
      supervisor. A pulse that was slow before has more time, as with heartbeats; the silence of a supervisor
      that ended does not count for the next.
    - An agent that never met a supervisor starts none: the batch process starts the first one.
    - An agent has at most one supervisor here, and reads one pulse at a time.
    """

    def __init__(self, node: str, nodes: Sequence[str], silence: SupervisorSilence, *, enabled: bool) -> None:
        """`nodes`: all of the allocation, in its order. Not `enabled`: the batch process cannot die alone.
        `silence` is only read."""
        self._enabled = enabled
        self._silence = silence
        self._own_place = HEIRS + (nodes.index(node) if node in nodes else PLACE_UNKNOWN)
        self._met = False
        self._alone = False  # a supervisor was there and is not any more
        self._restarts_until = 0.0
        self._stands_by = False
        self._stand_by_at = NEVER
        self._look_at = 0.0
        self._asked_at: float | None = None  # a reading that was not answered yet
        self._pulse = ""
        self._quiet_since: float | None = None
        self._quiet_s = 0.0
        self._pulses = recent(PULSE_INTERVAL_S, 0.0)
        self._supervises = False

    @property
    def _place(self) -> int:
        return self._own_place if self._silence.heir is None else self._silence.heir

    @property
    def _looks(self) -> bool:
        return self._alone or (self._met and self._silence.heir is not None)

    @property
    def wake_at(self) -> float:
        look_at = self._look_at if self._looks and self._asked_at is None else NEVER
        return min(look_at, self._stand_by_at)

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert self._met or not self._alone, "who never met a supervisor misses one"
        assert self._enabled or self.wake_at == NEVER, "a run whose batch process cannot die alone is watched"
        assert not (self._stands_by and self._supervises), "one process stands by and another supervises"

    # The supervisor.

    def on_supervisor_answered(self, now: float) -> list[Effect]:
        """Note that this agent is connected to a supervisor."""
        self._met, self._alone, self._quiet_since = self._enabled, False, None
        self._restarts_until = 0.0
        return []

    def on_order(self, now: float) -> list[Effect]:
        """Note an answer of the supervisor, which may change this node's place."""
        first = self._met and self._silence.heir == 0 and not self._supervises
        if first and not self._stands_by and self._stand_by_at == NEVER:
            self._stand_by_at = now + STANDBY_AFTER_S
        if first or self._silence.epoch is None:
            return []
        self._stand_by_at = NEVER
        ended, self._stands_by = self._stands_by, False
        return [do.EndStandby()] if ended else []

    def on_connection_closed(self, now: float) -> None:
        """Note that the supervisor's process ended, or refuses this agent."""
        self._restarts_until = now + RESTART_S

    def on_connection_refused(self, now: float) -> None:
        """Note that nothing listens at its address, so its batch process is gone as well."""
        self._restarts_until = 0.0

    def on_no_answer(self, now: float) -> list[Effect]:
        """Note that this agent is no longer connected."""
        self._alone = self._met
        return self.on_time(now)

    # Its pulse.

    def on_time(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if now >= self._stand_by_at:
            self._stand_by_at, self._stands_by = NEVER, True
            effects.append(do.StandBy())
        if now >= self.wake_at:
            self._asked_at = now
            effects.append(do.ReadPulse())
        return effects

    def on_pulse(self, value: str | None, now: float) -> list[Effect]:
        """Take in a reading of the pulse, "EPOCH:COUNT"; None: storage did not answer."""
        asked_at, self._asked_at = self._asked_at, None
        self._look_at = now + self._look_every_s()
        if value is None or asked_at is None or not self._looks or self._supervises:
            return []
        if self._quiet_since is None or value != self._pulse:
            if self._quiet_since is not None and epoch_of(value) == epoch_of(self._pulse):
                self._pulses.gaps.append(self._quiet_s)
            self._pulse, self._quiet_since, self._quiet_s = value, now, 0.0
            return []
        self._quiet_s = asked_at - self._quiet_since
        if self._quiet_s <= self._pulses.limit_s() + STAGGER_S * self._place or self._may_live(now):
            return []
        silent_s = now - max(self._quiet_since - LOOK_S, self._silence.heard_at)
        self._quiet_since, self._supervises = None, True
        self._stand_by_at, self._stands_by = NEVER, False
        return [do.StartSupervisor(epoch_of(value), silent_s)]

    def _look_every_s(self) -> float:
        return LOOK_S if self._place < HEIRS else max(LOOK_S, LOOK_SHARE * STAGGER_S * self._place)

    def _may_live(self, now: float) -> bool:
        return now < self._restarts_until if self._alone else now < self._silence.suspect_at

    def on_supervisor_ended(self, now: float) -> list[Effect]:
        """Note that the supervisor that was started on this node has ended."""
        self._supervises = False
        return self.on_time(now)
