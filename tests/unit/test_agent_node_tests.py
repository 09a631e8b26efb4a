"""Tests of a node as its agent has them done: processes, what they are asked, and what is said of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent.ranks import ITSELF, NodeTests
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.settings import Settings
from support.node_model import plan

ALONE = msg.TestAlone(limit_s=60.0)
PAIR = msg.TestPair(name="0-n1-n2", host="10.0.0.1", port=9, rank=1, limit_s=5.0)


def node(ranks: int = 2, gpus: int = 0, *, driver: bool = False, limit_s: float | None = 60.0) -> NodeTests:
    return NodeTests(replace(plan(ranks), settings=Settings(preflight_s=limit_s)), gpus, driver=driver)


def said(effects: list[do.Effect]) -> list[msg.ToSupervisor]:
    return [effect.message for effect in effects if isinstance(effect, do.Send)]


def works(made: NodeTests) -> msg.TestedAlone:
    """The processes do all that they are asked."""
    (first,) = made.on_tests_started(1, 77, "")
    assert first == do.TestDevices(1)
    (together,) = made.on_tests_answered(1, [NodeTimes({"matmul": 1.0}), NodeTimes({"matmul": 3.0})])
    assert together == do.TestTogether(1, ITSELF, "", 77, 20.0, 2, 0)
    (told,) = said(made.on_tests_answered(1, [NodeTimes({"gloo latency": 0.1})] * 2))
    assert isinstance(told, msg.TestedAlone)
    made.check()
    return told


def test_the_devices_are_tested_one_by_one_and_then_together() -> None:
    made = node()
    assert made.on_test_ordered(ALONE, 10.0) == [do.StartTests(1, 2)]
    assert works(made) == msg.TestedAlone(
        port=77, found=NodeTimes({"matmul": 3.0, "local gloo latency": 0.1})
    )


def test_who_asks_again_is_told_the_same_and_nothing_begins_anew() -> None:
    """A supervisor that has taken over, say."""
    made = node()
    made.on_test_ordered(ALONE, 10.0)
    assert made.on_test_ordered(ALONE, 11.0) == []
    told = works(made)
    assert made.on_test_ordered(ALONE, 12.0) == [do.Send(told)]


def test_a_device_that_is_wrong_or_fails_speaks_for_its_node() -> None:
    made = node()
    made.on_test_ordered(ALONE, 10.0)
    made.on_tests_started(1, 77, "")
    (told,) = said(made.on_tests_answered(1, [NodeTimes(wrong="a bit"), NodeTimes(error="no memory")]))
    assert told == msg.TestedAlone(port=77, found=NodeTimes(wrong="a bit", error="no memory"))


def test_processes_that_cannot_be_started_are_an_answer() -> None:
    made = node()
    made.on_test_ordered(ALONE, 10.0)
    assert said(made.on_tests_started(1, 0, "no room")) == [
        msg.TestedAlone(port=0, found=NodeTimes(error="no room"))
    ]


def test_pairs_wait_for_their_turn() -> None:
    made = node()
    (gone,) = said(made.on_test_ordered(PAIR, 9.0))
    assert isinstance(gone, msg.TestedPair)
    assert "no test processes" in gone.error
    made.on_test_ordered(ALONE, 10.0)
    works(made)
    pair = do.TestTogether(1, "0-n1-n2", "10.0.0.1", 9, 5.0, 4, 2)
    assert made.on_test_ordered(PAIR, 11.0) == [pair]
    assert made.on_test_ordered(replace_name(PAIR, "1-n1-n3"), 11.0) == []
    told, after = made.on_tests_answered(
        1, [NodeTimes({"gloo latency": 0.1}), NodeTimes({"gloo latency": 0.2})]
    )
    assert told == do.Send(msg.TestedPair(name="0-n1-n2", times={"gloo latency": 0.2}))
    assert isinstance(after, do.TestTogether)
    assert after.name == "1-n1-n3"


def replace_name(order: msg.TestPair, name: str) -> msg.TestPair:
    return msg.TestPair(name=name, host=order.host, port=order.port, rank=order.rank, limit_s=order.limit_s)


def test_nodes_that_have_just_come_test_themselves_once_if_the_policy_says_so() -> None:
    assert node(limit_s=0.0).on_host_started(10.0) == []
    assert node(limit_s=None).on_host_started(10.0) == []
    made = node(gpus=8, driver=True, limit_s=None)
    assert made.on_host_started(10.0) == [do.StartTests(1, 8)]
    made.on_test_over()
    assert made.on_host_started(11.0) == []


@pytest.mark.parametrize(
    ("ranks", "gpus", "driver", "count"),
    [(8, 4, True, 4), (8, 4, False, 2), (8, 0, True, 2), (1, 0, False, 1)],
)
def test_there_is_a_process_a_device_that_can_be_used(
    ranks: int, gpus: int, driver: bool, count: int
) -> None:
    assert node(ranks, gpus, driver=driver).on_test_ordered(ALONE, 10.0) == [do.StartTests(1, count)]


def test_processes_end_with_their_time_and_nothing_of_them_is_told_after_that() -> None:
    made = node()
    made.on_test_ordered(ALONE, 10.0)
    made.on_tests_started(1, 77, "")
    assert (made.wake_at, made.on_time(69.9)) == (70.0, [])
    assert made.on_time(70.0) == [do.EndTests(1)]
    made.check()
    assert made.on_tests_answered(1, [NodeTimes(), NodeTimes()]) == []
    assert made.on_test_over() == []
    assert made.on_test_ordered(ALONE, 80.0) == [do.StartTests(2, 2)]
    assert made.on_tests_started(1, 77, "") == []
    assert made.on_tests_answered(2, [NodeTimes(), NodeTimes()]) == [], "before they are ready"
    assert made.on_tests_started(2, 78, "") == [do.TestDevices(2)]
