"""Nodes that an administrator drains in mid-run: when their ranks move, and that Slurm gets them back."""

from __future__ import annotations

import pytest

from jurymast.cluster import control
from jurymast.core.nodes.health import SickNodes
from jurymast.core.run import refill
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import GiveBack, LookAtNodes, Record
from jurymast.core.state.run import Role
from jurymast.core.state.settings import Settings
from jurymast.core.supervision.withdrawals import (
    BACK_AFTER_S,
    LOOK_LEAST_S,
    LOOK_MOST_S,
    LOOK_SHARE,
    Withdrawals,
)
from support.stories import Story

WHY = "a new firmware"


class Watched:
    """A run that does steps, and what sees to its nodes."""

    def __init__(self, *, spares: int = 1, settings: Settings | None = None) -> None:
        self.story = Story(active=2, spares=spares, settings=settings).running()
        self.sick = SickNodes(self.story.state)
        self.machine = Withdrawals(self.story.state, self.sick)

    def seen(self, **draining: str) -> list[msg.Ask]:
        for effect in self.machine.on_nodes_seen(draining, self.story.t):
            assert isinstance(effect, Record)
            self.story.feed(effect.event)
        return self.machine.moves(self.story.t)

    def saves_first(self, ask: msg.Ask) -> None:
        save, _ = self.machine.save_first(ask, self.story.t)
        assert isinstance(save, Record)
        self.story.feed(save.event)

    def asked(self, ask: msg.Ask) -> None:
        self.story.asked(ask.what, ask.node)


@pytest.mark.parametrize(
    ("took_s", "every_s"), [(0.05, LOOK_LEAST_S), (0.2, 0.2 / LOOK_SHARE), (5.0, LOOK_MOST_S)]
)
def test_slurm_is_asked_as_often_as_it_answers_fast(took_s: float, every_s: float) -> None:
    watched = Watched()
    t = watched.story.t
    nodes = tuple(watched.story.state.nodes)
    assert watched.machine.on_time(t) == [LookAtNodes(nodes)]
    assert watched.machine.on_time(t + 2 * LOOK_MOST_S) == [], "it has not answered"
    watched.machine.on_nodes_seen({}, t + took_s)
    assert watched.machine.on_time(t + every_s - 1.0) == []
    assert watched.machine.on_time(t + every_s + 0.01) == [LookAtNodes(nodes)]


def test_a_slurmctld_that_is_away_is_asked_seldom() -> None:
    watched = Watched()
    t = watched.story.t
    watched.machine.on_time(t)
    watched.machine.on_nodes_seen(None, t + 0.05)
    assert watched.machine.on_time(t + LOOK_MOST_S - 1.0) == []
    assert watched.machine.on_time(t + LOOK_MOST_S) != []


def test_the_ranks_of_a_drained_node_move_to_a_spare_and_slurm_gets_it_back() -> None:
    watched = Watched()
    state = watched.story.state
    victim = next(name for name in state.placement if name != state.host)
    (ask,) = watched.seen(**{victim: WHY})
    assert (ask.what, ask.node, ask.by) == ("drain", victim, f"Slurm's administrator ({WHY})")
    watched.saves_first(ask)
    assert watched.machine.moves(watched.story.t) == [], "once"
    watched.asked(ask)
    watched.story.stopped()
    watched.story.recovered(at_step=10, done=20)
    assert victim not in state.placement
    assert (watched.story.incident.cause, watched.story.incident.charged) == ("drain_asked", "nobody")
    watched.story.wait(BACK_AFTER_S)
    assert watched.sick.on_time(watched.story.t) == [GiveBack("17", victim)]


def test_a_node_is_given_back_also_if_its_ranks_took_long_to_move() -> None:
    watched = Watched()
    victim = next(name for name in watched.story.state.placement if name != watched.story.state.host)
    (ask,) = watched.seen(**{victim: WHY})
    watched.story.wait(2 * BACK_AFTER_S)
    assert watched.sick.on_time(watched.story.t) == [], "they still have it"
    watched.asked(ask)
    watched.story.stopped()
    watched.story.recovered(at_step=10, done=20)
    assert watched.sick.on_time(watched.story.t) == [GiveBack("17", victim)]


def test_ranks_stay_without_a_spare_until_one_is_ready() -> None:
    watched = Watched(spares=0, settings=Settings(refill=True))
    state = watched.story.state
    victim = state.placement[1]
    assert watched.seen(**{victim: WHY}) == []
    assert refill.lacking(state) == 1, "a small job is to bring one"
    watched.story.feed(ev.RefillAsked(t=watched.story.t, number=1))
    watched.story.feed(ev.RefillStarted(t=watched.story.t, number=1, node="n9"))
    watched.story.join("n9")
    assert [ask.node for ask in watched.machine.moves(watched.story.t)] == [victim]


def test_a_spare_that_is_drained_leaves_at_once_and_replaces_nobody() -> None:
    watched = Watched()
    state = watched.story.state
    spare = next(node.name for node in state.nodes.values() if node.role is Role.SPARE)
    both = {spare: WHY, state.placement[1]: WHY}
    (ask,) = watched.seen(**both)
    assert ask.node == spare
    watched.asked(ask)
    assert state.nodes[spare].role is Role.FAILED
    assert watched.machine.moves(watched.story.t) == [], "there is no other one"


@pytest.mark.parametrize("spares", [1, 2])
def test_nodes_that_are_drained_at_once_are_left_together_as_far_as_there_are_spares(spares: int) -> None:
    watched = Watched(spares=spares)
    state, t = watched.story.state, watched.story.t
    both = dict.fromkeys(state.placement, WHY)
    asks = watched.seen(**both)
    for ask in asks:
        watched.saves_first(ask)
    asks += watched.machine.moves(t)
    assert len(asks) == spares
    for ask in asks:
        watched.asked(ask)
    watched.story.stopped()
    assert {*both} & {*state.placement} == {*both} - {ask.node for ask in asks}
    assert watched.story.incident.action == "swap"
    assert len(state.incidents) == 1


@pytest.mark.parametrize(("spares", "action"), [(2, "swap"), (1, "requeue")])
def test_a_node_that_a_user_removes_leaves_also_if_another_is_lost_first(spares: int, action: str) -> None:
    watched = Watched(spares=spares)
    story, (lost, victim) = watched.story, watched.story.state.placement
    watched.saves_first(msg.Ask(what="drain", by="ada", node=victim))
    story.lost(lost)
    story.asked("drain", victim)
    story.stopped()
    assert story.incident.action == action
    assert story.state.nodes[victim].role is Role.FAILED
    assert story.state.nodes[victim].drained
    assert f"also removed: {victim} (as requested)" in story.incident.why or action == "requeue"


def test_a_drained_node_stays_if_another_needs_the_only_spare_and_is_left_once_there_is_one() -> None:
    watched = Watched(spares=1, settings=Settings(refill=True))
    story, (lost, victim) = watched.story, watched.story.state.placement
    (ask,) = watched.seen(**{victim: WHY})
    watched.saves_first(ask)
    story.lost(lost)
    watched.asked(ask)
    story.stopped()
    story.recovered(at_step=10, done=20)
    assert victim in story.state.placement
    assert watched.machine.moves(story.t) == []
    story.feed(ev.RefillAsked(t=story.t, number=1))
    story.feed(ev.RefillStarted(t=story.t, number=1, node="n9"))
    story.join("n9")
    assert [one.node for one in watched.machine.moves(story.t)] == [victim]


def test_all_nodes_leave_that_a_user_removes_one_after_the_other() -> None:
    watched = Watched(spares=2)
    both = watched.story.state.placement
    for node in both:
        watched.story.asked("drain", node)
    watched.story.stopped()
    assert not {*both} & {*watched.story.state.placement}
    assert all(watched.story.state.nodes[node].drained for node in both)


@pytest.mark.parametrize("why", ["", WHY], ids=["by-a-user", "by-an-administrator"])
def test_a_removal_that_waits_for_a_save_outlives_the_supervisor(why: str) -> None:
    watched = Watched()
    state, t = watched.story.state, watched.story.t
    victim = state.placement[1]
    (asked,) = watched.seen(**{victim: why}) if why else [msg.Ask(what="drain", by="ada", node=victim)]
    save, _ = watched.machine.save_first(asked, t)
    assert isinstance(save, Record)
    watched.story.feed(save.event)
    assert watched.machine.moves(t) == [], "it waits for the save"
    watched.sick = SickNodes(state)
    watched.machine = Withdrawals(state, watched.sick)
    watched.story.feed(ev.SupervisorStarted(t=t, epoch=2, node=state.host))
    for name, node in state.nodes.items():
        watched.story.feed(ev.NodeJoined(t=t, node=name, address="", incarnation=node.incarnation))
    assert watched.machine.moves(t) == [], "the ranks are not heard yet"
    assert watched.machine.moves(state.rejoin_until) == [asked]
    assert watched.machine.moves(state.rejoin_until) == [], "once"
    watched.asked(asked)
    watched.story.stopped()
    watched.story.recovered(at_step=10, done=20)
    assert victim not in state.placement
    assert not state.to_remove
    watched.story.wait(BACK_AFTER_S)
    assert watched.sick.on_time(watched.story.t) == ([GiveBack("17", victim)] if why else [])


def test_a_removal_that_was_not_done_is_forgotten_with_the_nodes() -> None:
    watched = Watched()
    state, t = watched.story.state, watched.story.t
    save, _ = watched.machine.save_first(msg.Ask(what="drain", by="ada", node=state.placement[1]), t)
    assert isinstance(save, Record)
    watched.story.feed(save.event)
    assert state.to_remove
    watched.story.allocated(restarts=1)
    assert not state.to_remove


def test_a_node_that_is_not_drained_any_more_stays() -> None:
    watched = Watched(spares=0)
    state = watched.story.state
    victim = state.placement[1]
    watched.seen(**{victim: WHY})
    assert state.nodes[victim].draining == WHY
    watched.seen()
    assert state.nodes[victim].draining == ""
    assert refill.lacking(state) == 0


@pytest.mark.parametrize("silent", [True, False])
def test_slurm_s_silence_and_a_policy_that_only_reports_move_nothing(silent: bool) -> None:
    watched = Watched(settings=None if silent else Settings(bad_nodes="report"))
    victim = watched.story.state.placement[1]
    if silent:
        assert watched.machine.on_nodes_seen(None, watched.story.t) == []
    else:
        assert watched.seen(**{victim: WHY}) == []
        assert watched.story.state.nodes[victim].draining == WHY


def test_what_sinfo_says_of_drained_nodes() -> None:
    told = "n1|a new | firmware\nn1|a new | firmware\nn2|none\n\n"
    assert control.draining_in(told) == {"n1": "a new | firmware", "n2": "none"}


def test_thousands_of_nodes_fit_on_sinfos_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> str:
        commands.append(command)
        return ""

    monkeypatch.setattr(control, "run_command", run)
    control.draining([f"a-long-name-of-a-node-{number:05d}" for number in range(12_500)])
    assert max(len(word) for word in commands[0]) < 1000
