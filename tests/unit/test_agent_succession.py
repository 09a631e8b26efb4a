"""The machine that decides when an agent starts the next supervisor on its node."""

from __future__ import annotations

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent import succession as machine
from jurymast.core.agent.link import SupervisorSilence
from jurymast.core.agent.succession import HEIRS, LOOK_S, PULSE_INTERVAL_S, RESTART_S, STAGGER_S, Succession
from jurymast.core.judges.silence import BEATS, FACTOR, KNOWN_AFTER, UNKNOWN_BEATS
from jurymast.core.state import messages as msg

NODES = ("n0", "n1", "n2", "n3")
LIMIT_S, UNKNOWN_S = BEATS * PULSE_INTERVAL_S, UNKNOWN_BEATS * PULSE_INTERVAL_S


class Part:
    """One node's part, connected since `now`; as heir it reads a pulse that beats."""

    def __init__(self, node: str = "n0", heir: int | None = None, *, enabled: bool = True) -> None:
        self.now = 100.0
        self.hearing = SupervisorSilence(PULSE_INTERVAL_S)
        self.machine = Succession(node, NODES, self.hearing, enabled=enabled)
        self.beat_every_s = PULSE_INTERVAL_S
        self.lives, self.heard, self.storage = True, True, True
        self.heir = heir
        self.count = self.epoch = 1
        self.beat_at = self.answer_at = self.now
        self.effects: list[tuple[float, do.Effect]] = []
        self.hearing.begin(self.now)
        self.does(self.machine.on_supervisor_answered(self.now))

    def does(self, effects: list[do.Effect]) -> None:
        self.machine.check()
        for effect in effects:
            if isinstance(effect, do.ReadPulse):
                value = f"{self.epoch}:{self.count}" if self.storage else None
                self.does(self.machine.on_pulse(value, self.now))
            else:
                self.effects.append((self.now, effect))

    def passes(self, seconds: float) -> list[do.Effect]:
        """What it does in this time, if each reading is answered at once."""
        before, end = len(self.effects), self.now + seconds
        while self.now < end:
            self.now += 0.01
            if self.lives and self.now >= self.beat_at:
                self.count, self.beat_at = self.count + 1, self.now + self.beat_every_s
            if self.heard and self.now >= self.answer_at:
                self.answer_at = self.now + PULSE_INTERVAL_S
                self.hearing.on_order(msg.GoOn(time=0.0, patience_s=3.0, epoch=1, heir=self.heir), self.now)
                self.does(self.machine.on_order(self.now))
            if self.now >= self.machine.wake_at:
                self.does(self.machine.on_time(self.now))
        return [effect for _, effect in self.effects[before:]]

    def falls_silent(self) -> None:
        """The supervisor's node loses its power."""
        self.lives = self.heard = False

    def loses(self, *, closed: bool = False) -> None:
        """The connection: it hangs up, or it was closed."""
        self.heard = False
        if closed:
            self.machine.on_connection_closed(self.now)
        self.does(self.machine.on_no_answer(self.now))

    def takes_over_within(self, limit_s: float) -> float | None:
        """Seconds from now until it starts a supervisor."""
        began, before = self.now, len(self.effects)
        self.passes(limit_s)
        for at, effect in self.effects[before:]:
            if isinstance(effect, do.StartSupervisor):
                return at - began
        return None


def knows(heir: int | None = 0) -> Part:
    """A node that has heard a supervisor, and watched its pulse, for a while."""
    part = Part(heir=heir)
    part.passes((KNOWN_AFTER + 2) * PULSE_INTERVAL_S)
    assert part.effects == []
    return part


@pytest.mark.parametrize("heir", range(HEIRS))
def test_the_first_few_take_over_one_after_the_other(heir: int) -> None:
    part = knows(heir)
    part.falls_silent()
    took_s = part.takes_over_within(20.0)
    assert took_s is not None
    limit_s = LIMIT_S + STAGGER_S * heir
    assert limit_s - PULSE_INTERVAL_S < took_s <= limit_s + 2 * LOOK_S
    (start,) = [effect for _, effect in part.effects if isinstance(effect, do.StartSupervisor)]
    assert start.after == 1, "whoever is first takes over"
    assert start.silent_s == pytest.approx(took_s, abs=PULSE_INTERVAL_S), "since the loss, as far as is known"


def test_the_next_supervisor_that_is_lost_is_replaced_as_quickly_as_the_one_before() -> None:
    """How long the first was silent, when it had ended, is no habit of the second."""
    part = knows(heir=1)
    part.falls_silent()
    part.passes(LIMIT_S + 1.0)  # another takes over
    part.loses()
    part.epoch += 1
    part.lives = True
    part.passes(2 * LOOK_S)  # it sees the pulse before it is there
    part.heard = True
    part.hearing.begin(part.now)
    part.does(part.machine.on_supervisor_answered(part.now))
    assert do.StartSupervisor not in map(type, part.passes(3.0))
    part.falls_silent()
    took_s = part.takes_over_within(20.0)
    assert took_s is not None
    assert took_s <= LIMIT_S + STAGGER_S + 2 * LOOK_S


@pytest.mark.parametrize("node", ["n0", "n3", "elsewhere"])
def test_the_others_follow_once_they_have_lost_their_supervisor(node: str) -> None:
    place = HEIRS + (NODES.index(node) if node in NODES else machine.PLACE_UNKNOWN)
    part = Part(node)
    part.lives = False
    assert part.passes(10.0) == [], "it does not even look"
    part.loses()
    took_s = part.takes_over_within(60.0)
    assert took_s is not None
    limit_s = UNKNOWN_S + STAGGER_S * place
    assert limit_s < took_s <= limit_s + 2 * machine.LOOK_SHARE * STAGGER_S * place


def test_a_supervisor_that_is_heard_is_never_replaced() -> None:
    part = knows()
    part.lives = False
    assert do.StartSupervisor not in map(type, part.passes(60.0))


def test_a_node_that_is_merely_cut_off_does_not_take_over() -> None:
    part = knows()
    part.loses()
    assert do.StartSupervisor not in map(type, part.passes(120.0))


def test_a_pulse_that_is_slow_by_habit_has_more_time() -> None:
    part = knows()
    part.beat_every_s = 2.0
    part.passes(10.0)
    count = part.count
    while part.count == count:
        part.passes(0.01)
    part.falls_silent()
    took_s = part.takes_over_within(20.0)
    assert took_s is not None
    assert took_s > FACTOR * (2.0 - 2 * LOOK_S)


def test_a_new_epoch_is_a_pulse() -> None:
    part = knows()
    part.falls_silent()
    part.passes(1.2)
    part.epoch = 2
    assert part.passes(1.2) == []


def test_a_process_that_died_alone_has_time_to_be_started_again() -> None:
    part = knows()
    part.lives = False
    part.loses(closed=True)
    took_s = part.takes_over_within(20.0)
    assert took_s is not None
    assert RESTART_S <= took_s < RESTART_S + 2 * LOOK_S


def test_where_nobody_listens_any_more_nobody_starts_it_again() -> None:
    part = knows()
    part.lives = False
    part.loses(closed=True)
    part.machine.on_connection_refused(part.now)
    took_s = part.takes_over_within(20.0)
    assert took_s is not None
    assert took_s <= LIMIT_S + 2 * LOOK_S


def test_storage_that_is_silent_says_nothing_of_the_supervisor() -> None:
    part = knows()
    part.storage = False
    part.falls_silent()
    assert part.takes_over_within(60.0) is None
    part.storage = True
    assert part.takes_over_within(LIMIT_S - 0.1) is not None, "it was quiet all the time"


def test_an_answer_that_comes_late_may_have_been_read_early() -> None:
    part = Part(heir=1)
    made, _ = part.machine, part.passes(0.1)
    part.falls_silent()
    asked_at = made.wake_at
    assert made.on_time(asked_at) == [do.ReadPulse()]
    assert made.on_time(asked_at + 5.0) == [], "one reading at a time"
    now = asked_at + 60.0
    assert made.on_pulse(f"1:{part.count}", now) == []
    assert made.on_time(now + 1.0) == [do.ReadPulse()]
    (start,) = made.on_pulse(f"1:{part.count}", now + 1.0)
    assert isinstance(start, do.StartSupervisor)


def test_who_never_met_a_supervisor_starts_none() -> None:
    made = Succession("n0", NODES, SupervisorSilence(PULSE_INTERVAL_S), enabled=True)
    assert made.on_no_answer(100.0) == []
    assert made.wake_at == do.NEVER


def test_where_the_batch_process_cannot_die_alone_nobody_looks() -> None:
    part = Part(heir=0, enabled=False)
    part.passes(20.0)
    part.lives = False
    part.loses()
    assert part.passes(60.0) == []
    assert part.machine.wake_at == do.NEVER


def test_while_its_own_supervisor_lives_it_starts_no_other() -> None:
    part = knows()
    part.falls_silent()
    assert part.takes_over_within(10.0) is not None
    assert part.takes_over_within(60.0) is None
    part.does(part.machine.on_supervisor_ended(part.now))
    assert part.takes_over_within(60.0) is not None, "it was not up to it, and nobody else came"


def test_who_is_with_the_last_supervisor_again_still_sees_the_pulse_of_its_own() -> None:
    """The last one only stood still, and says that this node is an heir."""
    part = knows()
    part.falls_silent()
    assert part.takes_over_within(10.0) is not None
    part.heard = True
    part.hearing.begin(part.now)
    part.does(part.machine.on_supervisor_answered(part.now))
    part.passes(1.0)
    assert part.machine.wake_at <= part.now + LOOK_S
    assert part.passes(60.0) == []


# The process that stands by.


def test_the_first_in_the_order_gets_a_process_ready_and_only_that_one() -> None:
    part = Part(heir=0)
    assert part.passes(machine.STANDBY_AFTER_S) == [], "not while everything starts"
    assert part.passes(1.0) == [do.StandBy()]
    assert part.passes(60.0) == [], "once"
    part.heir = 1
    assert part.passes(1.0) == [do.EndStandby()]
    assert part.passes(60.0) == []
    assert Part(heir=1).passes(60.0) == []


def test_who_was_the_first_for_a_moment_gets_nothing_ready() -> None:
    part = Part(heir=0)
    part.passes(1.0)
    part.heir = None
    assert part.passes(60.0) == []


def test_it_stands_by_while_the_supervisor_is_silent_and_supervises_then() -> None:
    part = Part(heir=0)
    part.passes(10.0)
    part.falls_silent()
    part.passes(1.0)
    part.loses()
    (start,) = part.passes(5.0)
    assert isinstance(start, do.StartSupervisor)
    part.hearing.begin(part.now)
    part.does(part.machine.on_supervisor_answered(part.now))
    part.heard, part.heir = True, None
    assert part.passes(20.0) == [], "what stood by supervises"
