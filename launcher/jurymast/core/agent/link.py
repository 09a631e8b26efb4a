"""An agent's connection to its supervisor: whom to connect to and when, how long to wait for a message, what
to repeat to the next supervisor, and when to leave because no supervisor comes."""

from __future__ import annotations

from collections import deque

from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect
from jurymast.core.agent.ranks import Ranks
from jurymast.core.judges.silence import BEATS, Arrivals
from jurymast.core.state import messages as msg
from jurymast.core.state.messages import Endpoint

# ---- whether the supervisor is heard

# Gaps remembered: half a minute. While everything starts, all is slow.
MEMORY = 60


def recent(every_s: float, now: float) -> Arrivals:
    """Return an Arrivals that remembers only recent signs of life, which come every `every_s` seconds."""
    return Arrivals(every_s, now, deque(maxlen=MEMORY))


class SupervisorSilence:
    """When this agent hears its supervisor. `now` is monotonic, in seconds. `heir`: this node's place from 0
    on among those that take over first; None if it is none of them, or does not know yet. `epoch`: the
    supervisor's; None before its first answer."""

    def __init__(self, answer_every_s: float) -> None:
        """`answer_every_s`: how often a supervisor answers heartbeats, in seconds."""
        self._answer_every_s = answer_every_s
        self.epoch: int | None = None
        self.heir: int | None = None
        self.heard_at = 0.0
        self.suspect_at = NEVER  # silence from then on is unusual for this supervisor,
        self.late_at = NEVER  # and from then on for one that answers on time

    def begin(self, now: float) -> None:
        self._answers = recent(self._answer_every_s, now)
        self.epoch = self.heir = None
        self._heard(now)

    def on_order(self, order: msg.Order, now: float) -> None:
        if isinstance(order, msg.GoOn):
            self._answers.beat(now)
            self.epoch, self.heir = order.epoch, order.heir
        self._heard(now)

    def _heard(self, now: float) -> None:
        self.heard_at, self.suspect_at = now, now + self._answers.limit_s()
        self.late_at = now + BEATS * self._answer_every_s


# ---- the connection

RECONNECT_S = 0.1
# All nodes of a run that lose their supervisor look into the run directory, together this often per second.
FINDS_A_SECOND = 10_000.0
# While the supervisor is silent for longer than usual, or a connection is tried, each agent looks this often
# whether there is a newer one.
PEEK_EVERY_S = 0.25
# Ranks continue without a supervisor. If they have ended and there is still none, the agent leaves. An agent
# without ranks (a spare) waits longer: a supervisor that returns when storage does may have no other.
ALONE_LIMIT_S = 60.0
IDLE_ALONE_LIMIT_S = 1800.0
# After a SIGTERM an agent that has no supervisor waits this long for one, unless its ranks go on: Slurm would
# have ended them as well.
TERMINATED_LIMIT_S = 25.0
KEPT_MAX = 1000


class SupervisorLink:
    """Decides about this agent's connection. `now` is monotonic, in seconds.

    Without a connection it tries in rounds: at the last supervisor's address, and at the same time at the
    newest one in the run directory, because storage may answer later than a living supervisor waits for its
    agent. The next round begins when all tries of one have failed. That takes a while if something listens
    and does not answer, so the run directory is read again and again meanwhile. A supervisor that is silent
    for longer than usual is left as soon as there is a newer one. The agent on the supervisor's own node
    looks for a newer one early, however late answers usually come, because that node is the first to be given
    up.
    """

    def __init__(
        self,
        node: str,
        allocation: str,
        hint: tuple[str, int] | None,
        patience_s: float,
        nodes: int,
        share: float,
        ranks: Ranks,
        silence: SupervisorSilence,
    ) -> None:
        """`hint`: (host, port) of the first supervisor. `share`: from 0 to 1, when this agent of the run's
        `nodes` reads the run directory after all have lost their supervisor at once. `ranks` is only read."""
        self._node, self._allocation = node, allocation
        self._hint = hint
        # After a power loss there is no other sign of a supervisor's end than its silence: no reset comes.
        self._patience_s = patience_s
        self._find_every_s = nodes / FINDS_A_SECOND
        self._share = share
        self._ranks = ranks
        self._silence = silence
        self.connected = False
        self._peeking = False  # a look for a newer one was not answered yet
        self._finding = False  # nor one that is a try
        self._last: Endpoint | None = None
        self._epoch = 0  # the newest that this agent knows of
        self._tries = 0
        self._round_at = NEVER
        self._find_at = 0.0
        self._alone_since = 0.0
        self._leave_at = NEVER
        # Messages that no supervisor has acknowledged, with their numbers over this connection.
        self._kept: list[tuple[int, msg.Kept]] = []
        self._said = 0

    @property
    def wake_at(self) -> float:
        if not self.connected:
            find_at = self._find_at if self._tries and not self._finding else NEVER
            return min(self._round_at, self._leave_at, find_at)
        peek_at = NEVER if self._peeking else self._find_at
        return min(self._hang_up_at, peek_at, self._leave_at)

    @property
    def _hang_up_at(self) -> float:
        return self._silence.heard_at + self._patience_s

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert not (self.connected and self._tries), "a connection, and still waiting for one"
        assert self._tries >= self._finding, "more tries ended than were begun"
        assert len(self._kept) <= KEPT_MAX, "too much is kept for the next supervisor"

    # Looking for a supervisor.

    def start(self, now: float) -> list[Effect]:
        self._alone_since = now
        return self._round(now)

    def _round(self, now: float) -> list[Effect]:
        self._round_at = NEVER
        effects = self._connect(self._last) + (self._find(now) if now >= self._find_at else [])
        return effects or self._over(now)

    def _find(self, now: float) -> list[Effect]:
        self._find_at = now + self._find_every_s
        self._finding = True
        self._tries += 1
        return [do.FindSupervisor()]

    def _connect(self, place: Endpoint | None) -> list[Effect]:
        targets: tuple[tuple[str, int], ...] = ()
        if place is not None and place.allocation == self._allocation:
            targets = tuple((host, place.port) for host in place.hosts)
        elif self._hint is not None:
            targets = (self._hint,)
        if not targets:
            return []
        self._tries += 1
        return [do.Connect(targets)]

    def on_supervisor_found(self, place: Endpoint | None, now: float) -> list[Effect]:
        """Take in the address in the run directory. None: there is none, or shared storage does not answer,
        which is no reason to end the ranks.

        A stale view of the run directory may show a supervisor that has been replaced and does not know it.
        Obeying that one would undo what the newer one did.
        """
        peeked, self._peeking = self._peeking, False
        if place is not None and place.epoch < self._epoch:
            place = None
        if self.connected:
            return self._change_over(place, now)
        if not peeked:
            self._tries, self._finding = self._tries - 1, False
            self._find_at = max(self._find_at, now + PEEK_EVERY_S) if self._tries else self._find_at
        new = place is not None and place != self._last
        self._know(place)
        return (self._connect(place) if new else []) or self._over(now)

    def _know(self, place: Endpoint | None) -> None:
        if place is not None:
            self._last, self._epoch = place, max(self._epoch, place.epoch)

    def on_supervisor_unreached(self, now: float) -> list[Effect]:
        if self.connected:
            return []
        self._tries -= 1
        return self._over(now)

    def _over(self, now: float) -> list[Effect]:
        if self._tries:
            return []
        if now > self._alone_since + self._alone_limit_s():
            return [do.Leave()]  # nobody will ever report it
        self._round_at = now + RECONNECT_S
        return []

    def _alone_limit_s(self) -> float:
        if self._ranks.state in ("starting", "running"):
            return NEVER
        return ALONE_LIMIT_S if self._ranks.state == "finished" else IDLE_ALONE_LIMIT_S

    def _change_over(self, place: Endpoint | None, now: float) -> list[Effect]:
        epoch = self._silence.epoch
        if place is None or not epoch or place.epoch <= epoch or place.allocation != self._allocation:
            return []
        self._know(place)
        return self._hang_up(now, newer=place)

    # Having one.

    def on_connected(self, now: float) -> list[Effect]:
        """Use the first connection that was made; the results of other tries no longer matter."""
        self.connected, self._peeking, self._finding = True, False, False
        self._tries, self._round_at = 0, NEVER
        self._silence.begin(now)
        self._peek_later()
        kept, self._kept, self._said = self._kept, [], 0
        untold = self._leave_at < NEVER or self._ranks.unexplained  # a SIGTERM, or the answer was lost
        again: list[Effect] = [do.Send(msg.Terminated())] if untold else []
        self._leave_at = NEVER
        return [do.Greet(), *again, *(effect for _, message in kept for effect in self.say(message))]

    def on_order(self, order: msg.Order, now: float) -> list[Effect]:
        self._silence.on_order(order, now)
        self._peek_later()
        match order:
            case msg.GoOn():
                self._patience_s = order.patience_s
                self._epoch = max(self._epoch, order.epoch)
                self._kept = [one for one in self._kept if one[0] > order.heard]
            case msg.Moved():
                return self._change_over(order.place, now)
            case msg.Leave():
                return [do.Leave(order.over, order.exit_code, order.grace_s, ordered=True)]
        return []

    def _peek_later(self) -> None:
        supervised_on = self._last.node if self._last else self._hint[0] if self._hint else ""
        silence = self._silence
        peek_at = silence.late_at if supervised_on == self._node else silence.suspect_at
        self._find_at = peek_at + self._find_every_s * self._share

    def say(self, message: msg.ToSupervisor) -> list[Effect]:
        """Send a message now. Send it again over the next connection, unless a hello repeats it or it is
        known to have arrived: this connection may be dead already."""
        if isinstance(message, msg.Kept):
            self._said += self.connected
            self._kept = [*self._kept[-KEPT_MAX + 1 :], (self._said, message)]
        return [do.Send(message)] if self.connected else []

    def on_connection_lost(self, now: float) -> list[Effect]:
        """Note that the connection has ended."""
        if not self.connected:
            return []
        self.connected, self._alone_since = False, now
        self._find_at = now + self._find_every_s * self._share
        return self._round(now)

    def on_time(self, now: float) -> list[Effect]:
        if now >= self._leave_at:
            self._leave_at = NEVER
            if self._alone_limit_s() < NEVER:
                return [do.Leave()]
        if now < self.wake_at:
            return []
        if not self.connected:
            return self._round(now) if now >= self._round_at else self._find(now)
        if now >= self._hang_up_at:
            return self._hang_up(now)
        self._peeking, self._find_at = True, now + max(PEEK_EVERY_S, self._find_every_s)
        return [do.FindSupervisor()]

    def on_pulse(self, epoch: int, now: float) -> list[Effect]:
        """The pulse is that of this epoch. An older supervisor is left even if it answers on time: it may not
        see the newer one, and nobody else would tell it."""
        if not self.connected or self._peeking or epoch <= (self._silence.epoch or epoch):
            return []
        self._peeking = True
        return [do.FindSupervisor()]

    def _hang_up(self, now: float, newer: Endpoint | None = None) -> list[Effect]:
        """Close the connection after telling the supervisor. If it was only late, it must not take this for
        an end; and it may not see that there is a newer one, because its storage hangs."""
        return [do.Send(msg.HangsUp(newer=newer)), do.HangUp(), *self.on_connection_lost(now)]

    def on_sigterm(self, now: float) -> list[Effect]:
        """Report a SIGTERM: Slurm ends the job or takes the node, or it is neither. The supervisor finds out
        which. Until it says "leave", this node's memory may be needed for the last checkpoint, however long
        that takes: a preempted job may have minutes."""
        if self.connected:
            return [do.Send(msg.Terminated())]
        self._leave_at = min(self._leave_at, now + TERMINATED_LIMIT_S)
        return []
