"""Tests of nodes: who is tested with whom, what the results say, and what becomes of a node by them."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.judges.tests import (
    AUTO_LIMIT_S,
    ROUNDS_MAX,
    Judgement,
    Pairing,
    judge,
    limit_s,
    next_round,
)
from jurymast.core.nodes import preflight
from jurymast.core.run.machine import resume
from jurymast.core.state import effects as ins
from jurymast.core.state import events as ev
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.findings import Verdict
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import Settings
from support.stories import Story

LATENCY, TRANSFER = "gloo latency", "gloo transfer"
PRODUCT = "matrix product float32"


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def play(nodes: list[str], slow: set[str], *, fails: bool = False) -> list[Pairing]:
    """All rounds; a pair is as slow as its slower node, or fails with it."""
    played: list[Pairing] = []
    for _ in range(ROUNDS_MAX):
        pairs = next_round(nodes, played)
        for pair in pairs:
            bad = slow & set(pair)
            times = {LATENCY: 0.4 if bad else 0.005, TRANSFER: 2.0 if bad else 0.01}
            failed = Pairing(pair, errors=dict.fromkeys(pair, "timeout"))
            played.append(failed if bad and fails else Pairing(pair, times))
    return played


def verdicts(nodes: list[str], slow: set[str], *, fails: bool = False) -> dict[str, Judgement]:
    alone = {name: NodeTimes({PRODUCT: 0.001}) for name in nodes}
    return {found.node: found for found in judge(nodes, alone, play(nodes, slow, fails=fails))}


@given(st.integers(2, 40), st.sets(st.integers(0, 39), max_size=5))
def test_every_node_gets_two_different_partners(count: int, slow: set[int]) -> None:
    nodes = names(count)
    played = play(nodes, {f"n{i}" for i in slow})
    pairs = [frozenset(game.nodes) for game in played]
    assert len(set(pairs)) == len(pairs)
    for name in nodes:
        assert sum(name in pair for pair in pairs) == (2 if count > 2 else 1)


@given(st.integers(3, 40))
def test_nobody_is_in_two_pairs_of_a_round(count: int) -> None:
    played: list[Pairing] = []
    while pairs := next_round(names(count), played):
        in_round = [name for pair in pairs for name in pair]
        assert len(set(in_round)) == len(in_round)
        played += [Pairing(pair, {LATENCY: 0.001}) for pair in pairs]
    assert len(played) == count


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 10])
def test_the_one_culprit_is_found(count: int, fails: bool) -> None:
    for culprit in names(count):
        found = verdicts(names(count), {culprit}, fails=fails)
        blamed = [name for name, judgement in found.items() if judgement.verdict is not Verdict.OK]
        assert blamed == [culprit]
        assert found[culprit].verdict is Verdict.SUSPECT
        assert found[culprit].partner != culprit
        if not fails:
            assert found[culprit].slowness > 50
            median = f"the median of {count} nodes is 10 ms"
            assert found[culprit].message == f"gloo transfer 2.00 s, {median}"


def test_two_culprits_that_are_neighbours_are_found() -> None:
    for pair in combinations(range(8), 2):
        culprits = {f"n{i}" for i in pair}
        found = verdicts(names(8), culprits)
        assert {name for name, judgement in found.items() if judgement.verdict is Verdict.SUSPECT} == culprits


def test_two_nodes_alone_cannot_tell_whose_fault_it_is() -> None:
    for fails in (False, True):
        found = verdicts(names(2), {"n1"}, fails=fails)
        assert {judgement.verdict for judgement in found.values()} == {Verdict.OK}


def test_a_wrong_result_is_bad_and_a_slow_one_suspect() -> None:
    nodes = names(4)
    alone = {name: NodeTimes({PRODUCT: 0.001, "memory copy": 0.01}) for name in nodes}
    alone["n1"] = NodeTimes({PRODUCT: 0.001, "memory copy": 0.01}, wrong="1 of 9 products were wrong")
    alone["n2"] = NodeTimes({PRODUCT: 0.0025, "memory copy": 0.01})
    alone["n3"] = NodeTimes({PRODUCT: 0.0014, "memory copy": 0.01})
    found = {judgement.node: judgement for judgement in judge([*nodes, "n4"], alone, [])}
    assert [(j.verdict.value, j.slowness) for j in found.values()] == [
        ("ok", 1.0), ("bad", 1.0), ("suspect", 2.5), ("ok", 1.4), ("unknown", 1.0),
    ]  # fmt: skip
    assert found["n1"].message == "1 of 9 products were wrong"
    assert found["n2"].message == "matrix product float32 2.5 ms, the median of 4 nodes is 1 ms"


@pytest.mark.parametrize("wrong", [2, 3, 4])
def test_what_most_nodes_fail_is_the_tests_fault(wrong: int) -> None:
    nodes = names(4)
    for broken in (NodeTimes(error="RuntimeError: no"), NodeTimes(wrong="all wrong")):
        alone = {name: broken if i < wrong else NodeTimes({PRODUCT: 0.001}) for i, name in enumerate(nodes)}
        assert {j.verdict for j in judge(nodes[:wrong], alone, [])} == {Verdict.UNKNOWN}


def test_differences_below_what_training_notices_are_noise() -> None:
    alone = {name: NodeTimes() for name in names(3)}
    played = [
        Pairing(("n0", "n1"), {LATENCY: 0.0001}),
        Pairing(("n2", "n0"), {LATENCY: 0.004}),
        Pairing(("n1", "n2"), {LATENCY: 0.004}),
    ]
    assert {j.verdict for j in judge(names(3), alone, played)} == {Verdict.OK}
    assert {j.slowness for j in judge(names(3), alone, played)} == {1.0}


def test_how_long_tests_may_take() -> None:
    assert limit_s(Settings(), 0) == 0.0
    assert limit_s(Settings(), 8) == AUTO_LIMIT_S
    assert limit_s(Settings(preflight_s=0.0), 8) == 0.0
    assert limit_s(Settings(preflight_s=12.0), 0) == 12.0


# The state machine.


def result(story: Story, node: str, verdict: str = "ok", slowness: float = 1.0) -> list[ins.Instruction]:
    story.t += 0.1
    return story.feed(
        ev.NodeTested(t=story.t, node=node, verdict=verdict, slowness=slowness, message="told so")
    )


def orders(story: Story) -> list[ins.TestNodes]:
    return [i for _, i in story.decisions if isinstance(i, ins.TestNodes)]


def after_tests(**verdict: tuple[str, float]) -> Story:
    """Two active nodes and two spares with GPUs, tested with these results (ok, 1.0) unless given."""
    story = Story(spares=2, gpus=8).allocated()
    for node in ("n1", "n2", "n3", "n4"):
        result(story, node, *verdict.get(node, ("ok", 1.0)))
    return story


def test_the_first_attempt_waits_for_tests_and_no_longer_than_they_may_take() -> None:
    story = Story(gpus=8).allocated()
    test = story.last(ins.TestNodes)
    assert (set(test.nodes), test.limit_s, test.partners) == ({"n1", "n2", "n3"}, AUTO_LIMIT_S, ())
    assert (story.state.phase, story.state.attempt) == (Phase.STARTING, 0)
    result(story, "n2")
    story.wait(AUTO_LIMIT_S - 1)
    assert story.state.attempt == 0
    story.wait(1.1)
    assert story.last(ins.Launch).placement == ("n2", "n3")
    assert (story.state.nodes["n2"].tested, story.state.nodes["n3"].tested) == ("ok", "unknown")
    assert len(orders(story)) == 1


def test_the_last_result_starts_the_run() -> None:
    story = after_tests()
    assert story.state.phase is Phase.LAUNCHING
    assert story.last(ins.Launch).placement == ("n2", "n3"), "placement stays that of the allocation"


def test_small_differences_change_no_placement_and_slow_nodes_become_spares() -> None:
    assert after_tests(n2=("ok", 1.2)).state.placement == ("n2", "n3")
    assert after_tests(n2=("ok", 1.3)).state.placement == ("n3", "n4")
    assert after_tests(n2=("ok", 1.5), n3=("ok", 1.3)).state.placement == ("n1", "n4")


def test_suspects_are_used_only_when_nothing_else_is_left() -> None:
    story = after_tests(n2=("suspect", 40.0))
    assert story.state.placement == ("n3", "n4")
    assert (story.state.nodes["n2"].role, story.state.nodes["n2"].reason) == (
        Role.SUSPECT, "tested: told so",
    )  # fmt: skip
    story = after_tests(n1=("suspect", 40.0), n2=("suspect", 5.0), n3=("suspect", 3.0))
    assert story.state.placement == ("n3", "n4")


def test_a_bad_node_is_out_and_too_few_others_mean_a_requeue_without_it() -> None:
    story = after_tests(n2=("bad", 1.0))
    assert (story.state.nodes["n2"].role, story.state.nodes["n2"].bad) == (Role.FAILED, True)
    assert story.state.placement == ("n3", "n4")
    assert story.last(ins.Dismiss).node == "n2"
    story = Story(active=2, spares=0, gpus=1).allocated()
    result(story, "n1")
    result(story, "n2", "bad")
    assert story.last(ins.Requeue).exclude == ("n2",)


def test_bad_nodes_that_are_only_reported_are_used() -> None:
    story = Story(gpus=8, settings=Settings(bad_nodes="report")).allocated()
    for node in ("n1", "n2", "n3"):
        result(story, node, "bad" if node == "n2" else "ok")
    assert story.state.placement == ("n2", "n3")


def test_tests_are_off_without_gpus_or_by_the_policy() -> None:
    assert not orders(Story().allocated())
    assert not orders(Story(gpus=8, settings=Settings(preflight_s=0.0)).allocated())
    assert orders(Story(settings=Settings(preflight_s=9.0)).allocated())[0].limit_s == 9.0


def test_a_node_lost_in_its_tests_is_not_waited_for() -> None:
    story = Story(gpus=8).allocated()
    result(story, "n2")
    result(story, "n1")
    assert story.state.attempt == 0
    story.feed(ev.NodeLost(t=story.t, node="n3", how="silent", silent_s=3.0))
    assert story.last(ins.Launch).placement == ("n1", "n2")


def test_a_supervisor_that_takes_over_has_the_rest_tested() -> None:
    story = Story(gpus=8).allocated()
    result(story, "n2")
    story.wait(20.0)
    (again,) = resume(story.state)
    assert isinstance(again, ins.TestNodes)
    assert again.nodes == ("n1", "n3")
    assert again.limit_s == pytest.approx(AUTO_LIMIT_S - 20.1)


def test_wrong_results_on_many_nodes_at_once_make_none_leave() -> None:
    """At most one node of so few is blamed at a time; the others are used only when nothing else is left."""
    story = after_tests(n2=("bad", 1.0), n3=("bad", 1.0))
    assert [node.role for node in story.state.nodes.values()].count(Role.FAILED) == 1
    assert story.state.placement == ("n1", "n4")
    assert story.state.alerts


# Suspects.


def story_with_suspect(spares: int = 2, ready: bool = True, **settings: float) -> Story:
    """Two active nodes that run; n2's host died under its ranks, a spare has its place."""
    story = Story(spares=spares, gpus=8, settings=Settings(**settings)).allocated()  # type: ignore[arg-type]
    for node in story.state.nodes:
        result(story, node)
    story.ranks_up().restored(0).stepped(5)
    victim = story.state.placement[0]
    story.feed(
        ev.WorkerFailed(t=story.t, node=victim, attempt=1, rank=-1, exit_code=1, error="TorchrunHostDied")
    )
    for node in story.state.placement:
        port = 0 if node == victim else 29001
        story.feed(ev.WorkersStopped(t=story.t, node=node, attempt=1, store_port=port))
    if ready:
        story.feed(ev.NodeReady(t=story.t, node=victim, store_port=29002))
    return story


def test_a_suspect_is_tested_with_idle_spares_once_its_ranks_are_gone_and_the_run_goes_on() -> None:
    story = story_with_suspect(spares=3, ready=False)
    assert story.state.nodes["n2"].role is Role.SUSPECT
    story.ranks_up().restored(0).stepped(6)
    assert len(orders(story)) == 1, "its torchrun host may still be ending"
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29002))
    test = orders(story)[-1]
    assert (test.nodes, set(test.partners)) == (
        ("n2",),
        set(story.state.nodes) - {"n2", *story.state.placement},
    )
    assert result(story, "n2") == []
    assert (story.state.nodes["n2"].role, story.state.nodes["n2"].tested) == (Role.SPARE, "ok")
    assert len(orders(story)) == 2


@pytest.mark.parametrize(
    ("verdict", "role"), [("suspect", Role.SUSPECT), ("unknown", Role.SUSPECT), ("bad", Role.FAILED)]
)
def test_a_suspect_that_does_not_pass_is_not_tested_again(verdict: str, role: Role) -> None:
    story = story_with_suspect().ranks_up().restored(0).stepped(6)
    assert orders(story)[-1].nodes == ("n2",)
    result(story, "n2", verdict)
    story.wait(100.0)
    assert story.state.nodes["n2"].role is role
    assert len(orders(story)) == 2


def needed_suspect(**settings: float) -> Story:
    """n2 is a suspect whose host has just come back when n3 is lost, and there is no spare."""
    story = story_with_suspect(spares=1, ready=False, **settings).ranks_up().restored(0).stepped(6)
    assert story.state.placement == ("n1", "n3")
    story.feed(ev.NodeLost(t=story.t, node="n3", how="silent", silent_s=3.0))
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29002))
    story.feed(ev.WorkersStopped(t=story.t, node="n1", attempt=2, store_port=29003))
    return story


def test_a_suspect_that_is_needed_is_tested_first_and_waited_for() -> None:
    story = needed_suspect()
    assert (orders(story)[-1].nodes, orders(story)[-1].partners) == (("n2",), ())
    assert story.state.phase is Phase.WAITING
    story.wait(10.0)
    assert story.state.attempt == 2
    result(story, "n2", "ok")
    assert (story.state.attempt, story.state.placement) == (3, ("n1", "n2"))


def test_a_suspect_that_is_needed_and_bad_is_not_used() -> None:
    story = needed_suspect()
    result(story, "n2", "bad")
    story.wait(40.0)
    assert set(story.last(ins.Requeue).exclude) == {"n2", "n3"}


def test_a_test_that_never_answers_holds_a_needed_suspect_no_longer_than_it_may_take() -> None:
    story = needed_suspect(preflight_s=20.0)
    story.wait(19.0)
    assert story.state.attempt == 2
    story.wait(1.1)
    assert (story.state.attempt, story.state.placement) == (3, ("n1", "n2"))


def test_tests_that_go_on_are_not_ended_for_those_of_another_suspect() -> None:
    story = story_with_suspect().ranks_up().restored(0).stepped(6)
    assert story.state.testing == {"n2"}
    other = story.state.nodes["n4"]
    other.tested = ""
    assert preflight.before_use(story.state, [other]) == []


def test_without_tests_suspects_are_used_as_ever() -> None:
    story = needed_suspect(preflight_s=0.0)
    assert (orders(story), story.state.attempt) == ([], 3)
