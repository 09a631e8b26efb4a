"""The supervisor's ears: who is silent, who goes, who is cut off, and how far the ranks are."""

from __future__ import annotations

from typing import Any

import pytest

from jurymast.core.agent.succession import HEIRS
from jurymast.core.judges.silence import (
    ANSWER_INTERVAL_S,
    BEATS,
    KNOWN_AFTER,
    LIMIT_MAX_S,
    LOYAL_S,
    TOLD_S,
    patience_s,
    rejoin_limit_s,
)
from jurymast.core.nodes.acknowledgement import Disk
from jurymast.core.nodes.watch import (
    ABANDONED_LIMIT_S,
    AFTER_OTHERS_S,
    EARLY,
    ISOLATION_LIMIT_S,
    LATE_SHARE,
    LOOK_EVERY_S,
    MANY,
    MANY_LIMIT_S,
    RECONNECT_GRACE_S,
    WATCH_INTERVAL_S,
    Watch,
)
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Answer, Disconnect, Effect, Pulse, Record
from jurymast.core.state.messages import Leaving, beat_of
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.settings import Settings
from support.reports import reported

NAMES = ("n1", "n2", "n3")
# A node of which nothing is known after a take-over: six heartbeats on top of the time to come.
COMES_S = rejoin_limit_s(len(NAMES)) + 3.0
LATE_S = LATE_SHARE * patience_s(Settings().heartbeat_s, len(NAMES))


class Ears:
    """A watch on n1 over some nodes, each with connection 1; n2 and n3 have a rank each."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        self.now = 100.0
        self.state = RunState(settings=Settings(), active=2, attempt=1, placement=("n2", "n3"))
        self.state.phase, self.state.supervised_on = Phase.RUNNING, "n1"
        self.watch = Watch(self.state, self.now)
        self.effects: list[Effect] = []
        for order, node in enumerate(names):
            self.state.nodes[node] = Node(node, order, Role.SPARE, incarnation="i")
            self.watch.on_agent_joined(node, 1)
            for _ in range(KNOWN_AFTER):
                self.beats(node)

    def beats(self, node: str) -> None:
        self.does(self.watch.on_heartbeat(node, beat_of(1, []), self.now))

    def does(self, effects: list[Effect]) -> None:
        self.watch.check()
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Record) and isinstance(effect.event, ev.Unfindable):
                step(self.state, effect.event)

    def passes(self, seconds: float, beating: tuple[str, ...] = ()) -> None:
        """Time goes by in the watch's own rhythm; these nodes beat all along."""
        for _ in range(round(seconds / WATCH_INTERVAL_S)):
            self.now += WATCH_INTERVAL_S
            for node in beating:
                self.beats(node)
            self.does(self.watch.on_time(self.now))

    def stands_still(self, seconds: float) -> None:
        """And wakes up at a tick, before it hears what came meanwhile."""
        self.now += seconds
        self.does(self.watch.on_time(self.now))

    def closes(self, node: str, connection: int = 1, *, reset: bool = False) -> None:
        self.does(self.watch.on_connection_closed(node, connection, self.now, reset=reset))

    def joins(self, node: str, connection: int) -> None:
        self.watch.on_agent_joined(node, connection)
        self.watch.check()

    def events(self) -> list[ev.Event]:
        return [effect.event for effect in self.effects if isinstance(effect, Record)]

    def lost(self) -> list[str]:
        return [event.node for event in self.events() if isinstance(event, ev.NodeLost)]

    def pulses(self) -> list[bool]:
        return [effect.on for effect in self.effects if isinstance(effect, Pulse)]

    def says(self, node: str, step: int, beats: int = 5, **more: Any) -> None:
        ranks = [reported(step=step, beats=beats, **more)]
        self.does(self.watch.on_heartbeat(node, beat_of(1, ranks), self.now))


# Silence.


def test_three_missed_heartbeats_are_a_lost_node() -> None:
    ears = Ears()
    ears.passes(1.4, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(0.2, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    assert Disconnect("n3") in ears.effects
    (event,) = ears.events()
    assert isinstance(event, ev.NodeLost)
    assert (event.how, event.limit_s) == ("silent", 1.5)
    assert abs(event.t - ears.now) < 0.2
    assert event.silent_s > 1.5


def test_a_node_that_only_starts_may_be_silent_for_long() -> None:
    ears = Ears()
    ears.state.phase = Phase.STARTING
    ears.passes(LIMIT_MAX_S - 1.0, beating=("n1",))
    assert ears.lost() == []
    ears.state.nodes["n2"].role = ears.state.nodes["n3"].role = Role.JOINING
    ears.state.phase = Phase.LAUNCHING  # now it may cost something: n2 and n3 have ranks
    ears.joins("n2", 2)
    ears.passes(BEATS * ears.state.settings.heartbeat_s + 0.1, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    warms = Ears()
    warms.state.nodes["n3"].role, warms.state.placement = Role.JOINING, ("n1", "n2")
    warms.passes(LIMIT_MAX_S - 1.0, beating=("n1", "n2"))
    assert warms.lost() == []
    warms.passes(1.5, beating=("n1", "n2"))
    assert warms.lost() == ["n3"]


def test_a_link_that_was_slow_before_gets_more_time() -> None:
    ears = Ears()
    for _ in range(5):
        ears.passes(1.2, beating=("n1", "n2"))
        ears.beats("n3")
    ears.passes(2.5, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(1.0, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


def test_heartbeats_are_answered_now_and_then() -> None:
    ears = Ears()
    ears.effects.clear()
    ears.passes(20.0, beating=("n1",))
    answers = [effect for effect in ears.effects if isinstance(effect, Answer) and effect.node == "n1"]
    assert 20.0 / ANSWER_INTERVAL_S - 1 <= len(answers) <= 20.0 / (EARLY * ANSWER_INTERVAL_S)
    assert answers[-1].patience_s == pytest.approx(3 * ANSWER_INTERVAL_S + LOYAL_S, abs=0.2)


def test_who_goes_when_the_job_ends_is_not_lost() -> None:
    ears = Ears()
    ears.watch.ending = True
    ears.passes(5.0)
    assert ears.lost() == []
    ears.watch.ending = False  # a stray signal
    ears.passes(0.1, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


# The supervisor is late.


def test_a_supervisor_that_overslept_blames_nobody_and_asks_for_patience() -> None:
    ears = Ears()
    ears.stands_still(60.0)
    ears.passes(1.0)
    assert ears.lost() == []
    (note,) = ears.events()
    assert isinstance(note, ev.Noted)
    assert "paused for 59.8 s" in note.message
    ears.effects.clear()
    ears.beats("n1")
    (answer,) = ears.effects
    assert isinstance(answer, Answer)
    assert answer.patience_s > 6.0


def test_a_short_pause_is_not_told() -> None:
    ears = Ears()
    ears.stands_still(TOLD_S)
    assert ears.events() == []


def test_what_came_while_the_supervisor_stood_still_is_heard_before_anybody_is_blamed() -> None:
    """The node's newest heartbeat waits in a socket when its limit is over by the watcher's clock."""
    ears = Ears()
    ears.passes(1.45, beating=("n1", "n2"))
    ears.stands_still(6.0)
    for node in NAMES:
        ears.beats(node)
    ears.passes(1.0)
    assert ears.lost() == []


def test_a_supervisor_that_is_always_late_finds_who_is_dead_nevertheless() -> None:
    ears = Ears()
    for _ in range(20):
        for node in ("n1", "n2"):
            ears.beats(node)
        ears.stands_still(0.4)
    assert ears.lost() == ["n3"]


# Connections.


def test_a_closed_connection_is_a_lost_node_unless_its_agent_is_back_at_once() -> None:
    ears = Ears()
    ears.closes("n2")
    ears.closes("n3")
    assert ears.watch.away() == ["n2", "n3"]
    ears.passes(RECONNECT_GRACE_S - 0.05, beating=("n1",))
    assert ears.lost() == []
    ears.joins("n2", 2)
    ears.passes(BEATS * ears.state.settings.heartbeat_s + 0.1, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    (event,) = ears.events()
    assert isinstance(event, ev.NodeLost)
    assert (event.how, event.limit_s) == ("closed", RECONNECT_GRACE_S)
    ears.passes(5.0, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


@pytest.mark.parametrize("heartbeat_s", [0.5, 3.0])
def test_who_learns_of_a_reset_at_its_next_heartbeat_is_not_lost(heartbeat_s: float) -> None:
    """A process that ends closes its connections in order; a reset came from the way between, and the agent
    need not know of it."""
    ears = Ears()
    ears.watch._heartbeat_s = heartbeat_s
    for node in ("n2", "n3"):
        ears.closes(node, reset=True)
    ears.stands_still(0.15)  # and the supervisor is a little late
    ears.passes(heartbeat_s + 0.1, beating=("n1",))
    assert ears.lost() == []
    ears.joins("n2", 2)
    ears.passes(RECONNECT_GRACE_S, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


@pytest.mark.parametrize(("silent_s", "due_s"), [(0.3, 0.2), (0.6, 0.5)])  # the latter is late already
def test_the_time_to_come_back_after_a_reset_begins_when_a_heartbeat_is_due(
    silent_s: float, due_s: float
) -> None:
    ears = Ears()
    ears.passes(silent_s, beating=("n1", "n2"))
    ears.closes("n3", reset=True)
    ears.passes(due_s + RECONNECT_GRACE_S - 0.05, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(0.15, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


def test_what_is_told_of_an_older_connection_says_nothing_of_the_node() -> None:
    ears = Ears()
    ears.joins("n3", 2)
    ears.closes("n3", 1)
    ears.does(ears.watch.on_hangs_up("n3", 1))
    ears.does(ears.watch.on_agent_leaving("n3", 1, Leaving(why="its host does not start"), ears.now))
    assert ears.watch.away() == []
    ears.passes(5.0, beating=NAMES)
    assert ears.lost() == []
    ears.does(ears.watch.on_agent_leaving("n3", 2, Leaving(why="its host does not start"), ears.now))
    assert ears.lost() == ["n3"]
    ears.closes("n3", 2)
    assert ears.watch.away() == []


def test_who_hangs_up_has_as_long_to_come_back_as_after_a_take_over() -> None:
    ears = Ears()
    ears.effects.clear()
    ears.does(ears.watch.on_hangs_up("n3", 1))
    assert ears.effects == [Disconnect("n3")]
    ears.closes("n3")
    ears.passes(COMES_S - 0.1, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(0.3, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


@pytest.mark.parametrize("before", [True, False])
def test_a_connection_that_closed_about_a_pause_of_the_supervisor_is_no_evidence(before: bool) -> None:
    """Its agent may have given up waiting for an answer, and its new connection waits to be taken."""
    ears = Ears()
    if before:
        ears.closes("n3")
    ears.stands_still(2 * LATE_S)
    if not before:
        ears.closes("n3")
    ears.passes(COMES_S - 0.1, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(0.3, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    later = Ears()
    later.stands_still(2 * LATE_S)
    later.passes(5.0, beating=NAMES)
    later.closes("n3")
    later.passes(2 * RECONNECT_GRACE_S, beating=("n1", "n2"))
    assert later.lost() == ["n3"]


OTHERS = tuple(f"m{i}" for i in range(2 * MANY - 1))


def many_closed() -> Ears:
    ears = Ears((*NAMES, *OTHERS))
    for node in OTHERS:
        ears.closes(node)
        ears.passes(WATCH_INTERVAL_S, beating=NAMES)
    return ears


def test_many_connections_that_close_at_once_have_more_time_to_come_back() -> None:
    ears = many_closed()
    ears.passes(MANY_LIMIT_S - len(OTHERS) * WATCH_INTERVAL_S, beating=NAMES)
    assert ears.lost() == []
    (note,) = ears.events()
    assert isinstance(note, ev.Noted)
    assert "these nodes have 2 s to reconnect" in note.message
    for node in OTHERS[1:]:
        ears.joins(node, 2)
    ears.passes(0.5, beating=(*NAMES, *OTHERS[1:]))
    assert ears.lost() == [OTHERS[0]]
    event = ears.events()[-1]
    assert isinstance(event, ev.NodeLost)
    assert event.how == "closed", "a crash, among others"


def test_many_that_closed_about_a_pause_of_the_supervisor_have_as_long_as_after_a_take_over() -> None:
    ears = many_closed()
    ears.stands_still(2 * LATE_S)
    ears.passes(COMES_S - 0.1, beating=NAMES)
    assert ears.lost() == []
    ears.passes(0.3, beating=NAMES)
    assert set(ears.lost()) == set(OTHERS)


def test_who_hears_nobody_any_more_because_all_connections_broke_is_cut_off() -> None:
    ears = Ears(tuple(f"n{i}" for i in range(1, 2 + MANY)))
    for node in ears.state.nodes:
        if node != "n1":
            ears.closes(node)
    ears.passes(MANY_LIMIT_S, beating=("n1",))
    assert ears.watch.cut_off
    assert ears.lost() == []


# Take-over.


def test_after_a_take_over_nodes_have_time_to_come_back() -> None:
    ears = Ears()
    ears.watch = Watch(ears.state, ears.now - 30.0)  # it had a journal of months to read
    ears.watch.take_over(ears.now)
    for node in ("n1", "n2"):
        ears.joins(node, 1)
    ears.passes(COMES_S - 0.1, beating=("n1", "n2"))
    assert ears.events() == []
    ears.passes(0.3, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


def taken_over(ears: Ears, *nodes: str, silent_s: float = 1.6) -> None:
    """From n3, or supervisors on these nodes, which nobody had heard for so long."""
    ears.state.abandoned = dict.fromkeys(nodes or ("n3",), ears.now - silent_s)
    ears.watch = Watch(ears.state, ears.now)
    ears.watch.take_over(ears.now)


def test_the_node_of_a_supervisor_that_was_replaced_is_lost_soon_after_all_others_are_back() -> None:
    """It most likely ended with its node; one that lives is back with the others."""
    ears = Ears()
    taken_over(ears)
    ears.joins("n1", 1)
    ears.passes(1.0, beating=("n1",))
    assert ears.lost() == []
    ears.joins("n2", 1)
    ears.passes(AFTER_OTHERS_S - 0.05, beating=("n1", "n2"))
    assert ears.lost() == []
    ears.passes(0.15, beating=("n1", "n2"))
    (event,) = ears.events()
    assert isinstance(event, ev.NodeLost)
    assert event.node == "n3"
    assert event.silent_s == pytest.approx(1.6 + 1.0 + AFTER_OTHERS_S, abs=0.2), "from the loss on"


def test_of_several_that_were_replaced_one_after_the_other_none_is_waited_for_longer() -> None:
    ears = Ears((*NAMES, "n4"))
    taken_over(ears, "n2", "n3")
    for node in ("n1", "n4"):
        ears.joins(node, 1)
    ears.passes(AFTER_OTHERS_S + 0.1, beating=("n1", "n4"))
    assert ears.lost() == ["n2", "n3"]


def test_an_agent_whose_supervisor_alone_died_is_back_with_the_others() -> None:
    ears = Ears()
    taken_over(ears)
    for node in NAMES:
        ears.joins(node, 1)
        ears.passes(0.3, beating=NAMES)
    ears.passes(LIMIT_MAX_S, beating=NAMES)
    assert ears.events() == []


def test_the_last_supervisor_s_node_is_not_waited_for_because_another_is_lost_too() -> None:
    ears = Ears((*NAMES, "n4"))
    taken_over(ears)
    for node in ("n1", "n4"):
        ears.joins(node, 1)
    ears.passes(ABANDONED_LIMIT_S + 0.2, beating=("n1", "n4"))
    assert ears.lost() == ["n3"]
    ears.passes(COMES_S, beating=("n1", "n4"))
    assert ears.lost() == ["n3", "n2"]


# Who takes over.


def test_after_a_take_over_the_next_ones_are_known_as_soon_as_they_are_back() -> None:
    ears = Ears()
    taken_over(ears)
    ears.passes(0.5)
    ears.joins("n2", 1)
    ears.passes(2 * WATCH_INTERVAL_S)
    (answer,) = ears.watch.on_heartbeat("n2", beat_of(1, []), ears.now)
    assert isinstance(answer, Answer)
    assert answer.heir == 0


def test_the_next_to_take_over_are_spares_first_and_never_this_node() -> None:
    ears = Ears(("n1", "n2", "n3", "n4", "n5"))
    ears.state.nodes["n2"].role = Role.ACTIVE

    def heirs() -> dict[str, int]:
        ears.effects.clear()
        ears.passes(1.0, beating=tuple(ears.watch.here))
        told = [effect for effect in ears.effects if isinstance(effect, Answer)]
        return {answer.node: answer.heir for answer in told if answer.heir is not None}

    ears.passes(LOOK_EVERY_S, beating=tuple(ears.state.nodes))
    assert heirs() == {"n3": 0, "n4": 1, "n5": 2}
    assert len(heirs()) == HEIRS
    ears.closes("n3")
    assert heirs() == {"n4": 0, "n5": 1, "n2": 2}


def test_while_nobody_else_is_back_the_node_of_the_one_before_has_as_long_as_all_others() -> None:
    """Its storage hangs, say, so that it goes on and all are with it still."""
    ears = Ears()
    taken_over(ears)
    ears.joins("n1", 1)
    ears.passes(ABANDONED_LIMIT_S + 0.5, beating=("n1",))
    assert ears.lost() == []
    ears.joins("n2", 1)
    ears.passes(AFTER_OTHERS_S + 0.1, beating=("n1", "n2"))
    assert ears.lost() == ["n3"], "now it is known to be late"


def test_who_cannot_find_the_supervisor_as_storage_hangs_is_waited_for() -> None:
    ears = Ears()
    ears.state.phase = Phase.STARTING
    ears.watch.take_over(ears.now)
    ears.joins("n1", 2)
    for waited in range(1, 61):
        ears.does(ears.watch.on_disk(Disk(float(waited)), ears.now))
        ears.passes(1.0, beating=("n1",))
    assert not ears.lost()
    assert told(ears) == ["n2, n3"]
    assert ears.state.unfindable
    ears.does(ears.watch.on_disk(Disk(), ears.now))
    assert told(ears) == ["n2, n3", ""]
    assert not ears.state.unfindable
    ears.joins("n2", 2)
    ears.passes(LIMIT_MAX_S + COMES_S, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]


def told(ears: Ears) -> list[str]:
    """Who could not find the supervisor, each time that this was told."""
    return [event.who for event in ears.events() if isinstance(event, ev.Unfindable)]


@pytest.mark.parametrize("waits_s", [0.6, 5.0])
def test_so_is_the_node_of_the_last_supervisor(waits_s: float) -> None:
    """Also as long as nobody would call that hanging; and while not nearly all others are back either."""
    ears = Ears((*NAMES, "n4", "n5"))
    taken_over(ears)
    ears.joins("n1", 1)
    ears.joins("n2", 1)
    for _ in range(10):
        ears.does(ears.watch.on_disk(Disk(waits_s), ears.now))
        ears.passes(1.0, beating=("n1", "n2"))
    assert not ears.lost()


def test_nodes_that_failed_or_never_came_are_not_waited_for() -> None:
    ears = Ears()
    ears.state.nodes["n2"].role, ears.state.nodes["n3"].incarnation = Role.FAILED, ""
    ears.watch = Watch(ears.state, ears.now)
    ears.watch.take_over(ears.now)
    assert ears.watch.away() == ["n1"]


def lost_before(ears: Ears, *nodes: str) -> None:
    """Another supervisor had lost these nodes, because it did not hear them."""
    for node in nodes:
        ears.state.nodes[node].become(Role.FAILED, "silent", ears.now)
        ears.state.nodes[node].awaited = True


def test_who_was_lost_under_an_earlier_supervisor_has_as_long_to_return_as_all_others() -> None:
    ears = Ears((*NAMES, "n4"))
    lost_before(ears, "n2", "n4")
    taken_over(ears)
    assert sorted(ears.watch.away()) == ["n1", "n2", "n3", "n4"]
    for node in ("n1", "n3", "n4"):
        ears.joins(node, 1)
    ears.passes(COMES_S - 1.0, beating=("n1", "n3", "n4"))
    assert ears.lost() == []
    ears.passes(1.5, beating=("n1", "n3", "n4"))
    assert ears.lost() == ["n2"]


def test_who_was_lost_under_an_earlier_supervisor_and_is_dead_delays_nothing_else() -> None:
    """Neither that the last supervisor's node is lost, nor is it a reason to think that this one is cut
    off."""
    ears = Ears((*NAMES, "n4", "n5"))
    lost_before(ears, "n4", "n5")
    taken_over(ears)
    for node in ("n1", "n2"):
        ears.joins(node, 1)
    ears.passes(AFTER_OTHERS_S + 0.15, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    ears.passes(3.0, beating=("n1",))
    assert ears.lost() == ["n3", "n2"]
    assert ears.pulses() == []


# Isolation.


def test_who_hears_nobody_is_cut_off_itself_and_waits_for_a_successor() -> None:
    ears = Ears()
    ears.passes(1.2, beating=("n1",))
    assert ears.watch.cut_off
    assert ears.pulses() == [False]
    ears.passes(ISOLATION_LIMIT_S - 0.5, beating=("n1",))
    assert ears.lost() == []
    ears.passes(0.5, beating=("n1",))  # nobody has taken over: they are dead
    assert ears.lost() == ["n2", "n3"]


def test_one_voice_is_enough_to_hear_that_others_are_dead() -> None:
    ears = Ears()
    ears.passes(1.2, beating=("n1",))
    ears.beats("n2")
    ears.passes(0.2, beating=("n1", "n2"))
    assert not ears.watch.cut_off
    assert ears.pulses() == [False, True]
    ears.passes(BEATS * ears.state.settings.heartbeat_s - 0.3, beating=("n1", "n2"))
    assert ears.lost() == [], "it has its time anew"
    ears.passes(0.3, beating=("n1", "n2"))
    assert ears.lost() == ["n3"]
    ears.passes(3.1, beating=("n1",))  # a single other node that is silent may as well be dead
    assert ears.lost() == ["n3", "n2"]
    assert ears.pulses() == [False, True]


def test_who_hears_somebody_again_gives_the_others_time_to_come_back_too() -> None:
    """A network heals: its nodes come one after the other, over new connections or the old ones."""
    ears = Ears((*NAMES, "n4"))
    ears.passes(ISOLATION_LIMIT_S, beating=("n1",))
    assert ears.watch.cut_off
    ears.passes(0.5, beating=("n1", "n2"))
    ears.passes(0.5, beating=("n1", "n2", "n3"))
    ears.joins("n4", 2)
    ears.passes(2.0, beating=("n1", "n2", "n3", "n4"))
    assert ears.lost() == []


def test_whose_agents_all_look_elsewhere_is_cut_off_too() -> None:
    ears = Ears()
    for node in ("n2", "n3"):
        ears.does(ears.watch.on_hangs_up(node, 1))
    ears.passes(rejoin_limit_s(3), beating=("n1",))
    assert not ears.watch.cut_off
    ears.passes(2.0, beating=("n1",))
    assert ears.watch.cut_off
    ears.passes(ISOLATION_LIMIT_S, beating=("n1",))
    assert ears.lost() == ["n2", "n3"]


# The ranks.


def test_the_slowest_rank_says_how_far_all_are() -> None:
    ears = Ears()
    assert ears.watch.reports.reach() is None
    ears.says("n2", 41)
    assert ears.watch.reports.reach() is None  # n3 has not reported in this attempt
    ears.says("n3", 40)
    reach = ears.watch.reports.reach()
    assert reach is not None
    assert (reach.step, reach.absolute) == (40, True)


def test_a_lost_node_does_not_hide_how_far_the_others_came() -> None:
    ears = Ears()
    ears.says("n2", 48)
    ears.says("n3", 40)
    ears.does(ears.watch.on_agent_leaving("n3", 1, Leaving(why=""), ears.now))
    reach = ears.watch.reports.reach()
    assert reach is not None
    assert reach.step == 48


def test_ranks_that_have_ended_stay_where_they_were() -> None:
    ears = Ears()
    ears.says("n2", 300)
    ears.says("n3", 299)
    ears.beats("n2")
    ears.says("n3", 300)
    reach = ears.watch.reports.reach()
    assert reach is not None
    assert reach.step == 300


def test_restored_ranks_that_have_not_stepped_are_nowhere_yet() -> None:
    ears = Ears()
    ears.says("n2", 120, beats=0)
    ears.says("n3", 121)
    assert ears.watch.reports.reach() is None


def test_one_rank_that_has_ended_does_not_hide_another_that_is_stuck() -> None:
    ears = Ears()
    ears.says("n2", 300, phase="done")
    ears.says("n3", 299, quiet_s=60.0, idle_s=60.0)
    assert ears.watch.reports.hang() is None  # it may evaluate, or save
    ears.says("n3", 299, quiet_s=700.0, idle_s=700.0)
    assert ears.watch.reports.hang() is not None
    ears.says("n3", 300, phase="done", quiet_s=700.0)
    assert ears.watch.reports.hang() is None
