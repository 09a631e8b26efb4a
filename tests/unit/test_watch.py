"""The supervisor's ears: who is silent, who is cut off, and how far the ranks are."""

from __future__ import annotations

from typing import Any

from jurymast.core.heartbeat import KNOWN_AFTER, LIMIT_MAX_S, rejoin_limit_s
from jurymast.core.messages import beat_of
from jurymast.core.settings import Settings
from jurymast.core.state import Node, Phase, Role, RunState
from jurymast.supervisor.watch import WATCH_INTERVAL_S, Watch
from support.reports import reported


class Ears:
    """A watch over three nodes whose time passes by hand."""

    def __init__(self) -> None:
        self.real = 100.0
        self.watch = Watch(Settings(), self.real)
        self.state = RunState(settings=Settings(), active=2, attempt=1, placement=("n2", "n3"))
        self.state.phase = Phase.RUNNING
        for order, node in enumerate(("n1", "n2", "n3")):
            self.state.nodes[node] = Node(node, order, Role.SPARE)
            self.watch.joined(node)
            for _ in range(KNOWN_AFTER):
                self.watch.beat(node, beat_of(1, []))

    def passes(self, seconds: float, beating: tuple[str, ...] = ()) -> None:
        """Time goes by in the watch's own rhythm; these nodes beat all along."""
        for _ in range(round(seconds / WATCH_INTERVAL_S)):
            self.real += WATCH_INTERVAL_S
            self.watch.clock.tick(self.real)
            for node in beating:
                self.watch.beat(node, beat_of(1, []))

    def says(self, node: str, step: int, beats: int = 5, **more: Any) -> None:
        self.watch.beat(node, beat_of(1, [reported(step=step, beats=beats, **more)]))


def test_three_missed_heartbeats_are_a_lost_node() -> None:
    ears = Ears()
    ears.passes(1.4, beating=("n1", "n2"))
    assert ears.watch.silent(ears.state) == []
    ears.passes(0.2, beating=("n1", "n2"))
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n3"]


def test_a_node_that_only_starts_may_be_silent_for_long() -> None:
    ears = Ears()
    ears.state.phase = Phase.STARTING
    ears.passes(LIMIT_MAX_S - 1.0)
    assert ears.watch.silent(ears.state) == []
    ears.state.phase = Phase.LAUNCHING  # now it may cost something
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n1", "n2", "n3"]
    ears.state.nodes["n1"].role = ears.state.nodes["n2"].role = Role.JOINING
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n2", "n3"], "n2 has ranks"
    ears.state.phase = Phase.STARTING
    ears.passes(1.5)
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n1", "n2", "n3"]


def test_a_supervisor_that_overslept_blames_nobody() -> None:
    ears = Ears()
    ears.real += 60.0
    ears.watch.clock.tick(ears.real)
    assert ears.watch.silent(ears.state) == []


def test_a_link_that_was_slow_before_gets_more_time() -> None:
    ears = Ears()
    for _ in range(5):
        ears.passes(1.2, beating=("n1", "n2"))
        ears.watch.beat("n3", beat_of(1, []))
    ears.passes(2.5, beating=("n1", "n2"))
    assert ears.watch.silent(ears.state) == []
    ears.passes(1.0, beating=("n1", "n2"))
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n3"]


def test_after_a_takeover_nodes_have_time_to_come_back() -> None:
    ears = Ears()
    ears.watch.expect("n3", 3)
    ears.passes(rejoin_limit_s(3), beating=("n1", "n2"))
    assert ears.watch.silent(ears.state) == []
    ears.passes(3.5, beating=("n1", "n2"))
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n3"]


def test_the_node_of_a_supervisor_that_was_replaced_has_less_time() -> None:
    """It most likely ended with its node; one that lives is back at once."""
    ears = Ears()
    for name in ("n2", "n3"):
        ears.watch.expect(name, 3, abandoned=name == "n3")
    ears.passes(5.0, beating=("n1",))
    assert [node for node, _, _ in ears.watch.silent(ears.state)] == ["n3"]


def test_who_hears_nobody_is_cut_off_itself() -> None:
    ears = Ears()
    ears.passes(1.2, beating=("n1", "n2"))
    assert not ears.watch.isolated("n1")
    ears.passes(1.2, beating=("n1",))
    assert ears.watch.isolated("n1")
    ears.watch.forget("n3")
    assert not ears.watch.isolated("n1")  # a single other node that is silent may as well be dead


def test_the_slowest_rank_says_how_far_all_are() -> None:
    ears = Ears()
    assert ears.watch.reach(ears.state) is None
    ears.says("n2", 41)
    assert ears.watch.reach(ears.state) is None  # n3 has not reported in this attempt
    ears.says("n3", 40)
    reach = ears.watch.reach(ears.state)
    assert reach is not None
    assert (reach.step, reach.absolute) == (40, True)


def test_a_lost_node_does_not_hide_how_far_the_others_came() -> None:
    ears = Ears()
    ears.says("n2", 48)
    ears.says("n3", 40)
    ears.watch.forget("n3")
    reach = ears.watch.reach(ears.state)
    assert reach is not None
    assert reach.step == 48


def test_ranks_that_have_ended_stay_where_they_were() -> None:
    ears = Ears()
    ears.says("n2", 300)
    ears.says("n3", 299)
    ears.watch.beat("n2", beat_of(1, []))
    ears.says("n3", 300)
    reach = ears.watch.reach(ears.state)
    assert reach is not None
    assert reach.step == 300


def test_restored_ranks_that_have_not_stepped_are_nowhere_yet() -> None:
    ears = Ears()
    ears.says("n2", 120, beats=0)
    ears.says("n3", 121)
    assert ears.watch.reach(ears.state) is None


def test_one_rank_that_has_ended_does_not_hide_another_that_is_stuck() -> None:
    ears = Ears()
    ears.says("n2", 300, phase="done")
    ears.says("n3", 299, quiet_s=60.0, idle_s=60.0)
    assert ears.watch.hang(ears.state) is None  # it may evaluate, or save
    ears.says("n3", 299, quiet_s=700.0, idle_s=700.0)
    assert ears.watch.hang(ears.state) is not None
    ears.says("n3", 300, phase="done", quiet_s=700.0)
    assert ears.watch.hang(ears.state) is None
