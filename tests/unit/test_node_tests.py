"""Tests of nodes as the supervisor has them done: orders to agents, rounds of pairs, verdicts in time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jurymast.core.judges.tests import ROUNDS_MAX
from jurymast.core.nodes.preflight import ALL_SHARE, ALONE_SHARE, REPEAT_S, Preflight
from jurymast.core.state import effects as ins
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.run import Role
from support.stories import Story

LIMIT_S = 60.0
FAST = {"matmul": 1.0}


class Lab:
    """A run whose nodes are tested before its first attempt; its agents answer when a test says so."""

    def __init__(self, nodes: int = 4) -> None:
        self.story = Story(active=nodes, spares=0).allocated()
        self.state = self.story.state
        for node in self.state.nodes.values():
            node.role = Role.JOINING
        self.names = list(self.state.nodes)
        self.preflight = Preflight(self.state)
        self.now = 1000.0
        self.sent: list[tuple[str, msg.ToAgent]] = []
        self.results: dict[str, ev.NodeTested] = {}

    def does(self, effects: list[Effect]) -> None:
        self.preflight.check()
        for effect in effects:
            match effect:
                case Send():
                    self.sent.append((effect.node, effect.message))
                case Record(event=ev.NodeTested() as event):
                    assert event.node not in self.results, "two verdicts on a node"
                    self.results[event.node] = event
                case _:
                    raise AssertionError(effect)

    def begin(self, *partners: str, nodes: tuple[str, ...] = (), limit_s: float = LIMIT_S) -> Lab:
        chosen = nodes or tuple(name for name in self.names if name not in partners)
        order = ins.TestNodes(reason="r", nodes=chosen, partners=partners, limit_s=limit_s)
        self.does(self.preflight.begin(order, self.now))
        return self

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.does(self.preflight.on_time(self.now))

    def taken(self) -> list[tuple[str, msg.ToAgent]]:
        sent, self.sent = self.sent, []
        return sent

    def asked(self, kind: type[msg.ToAgent]) -> list[str]:
        return [node for node, message in self.sent if isinstance(message, kind)]

    def alone(self, node: str, port: int = 7, **found: str) -> None:
        answer = msg.TestedAlone(port=port, found=NodeTimes(times=FAST, **found))
        self.does(self.preflight.on_test_result(node, answer, self.now))

    def pair(self, node: str, test: msg.TestPair, error: str = "", seconds: float = 1.0) -> None:
        times = {} if error else {"gloo transfer": seconds}
        answer = msg.TestedPair(name=test.name, times=times, error=error)
        self.does(self.preflight.on_test_result(node, answer, self.now))

    def plays(self, slow: str = "") -> list[set[str]]:
        """All orders for pairs are carried out, round after round, the ones that these lead to as well."""
        rounds = []
        while pairs := [(node, one) for node, one in self.taken() if isinstance(one, msg.TestPair)]:
            together: dict[str, set[str]] = {}
            for node, test in pairs:
                together.setdefault(test.name, set()).add(node)
            rounds += list(together.values())
            for node, test in pairs:
                self.pair(node, test, seconds=9.0 if slow in together[test.name] else 1.0)
        return rounds


def test_nodes_are_tested_alone_then_in_pairs_and_each_gets_a_verdict() -> None:
    lab = Lab().begin()
    assert lab.asked(msg.TestAlone) == lab.names
    lab.taken()
    for name in lab.names[:-1]:
        lab.alone(name)
        assert lab.taken() == [], "pairs begin when all have answered"
    lab.now += 2.0
    lab.alone(lab.names[-1])
    (first, one), (second, two), *_ = lab.sent
    assert isinstance(one, msg.TestPair)
    assert isinstance(two, msg.TestPair)
    assert (first, second) == ("n1", "n2")
    assert (one.rank, two.rank, one.port, two.host) == (0, 1, 7, lab.state.nodes["n1"].address)
    assert one.name == two.name
    rounds = lab.plays(slow="n3")
    assert rounds[:2] == [{"n1", "n2"}, {"n3", "n4"}]
    assert {name: result.verdict for name, result in lab.results.items()} == {
        "n1": "ok", "n2": "ok", "n3": "suspect", "n4": "ok",
    }  # fmt: skip
    assert lab.results["n1"].seconds == 2.0


def test_the_processes_end_with_the_tests_and_partners_get_no_verdict() -> None:
    lab = Lab().begin("n4")
    for name in lab.names:
        lab.alone(name)
    for node, test in lab.taken():
        if isinstance(test, msg.TestPair):
            lab.pair(node, test)
    while any(isinstance(message, msg.TestPair) for _, message in lab.sent):
        lab.plays()
    assert set(lab.results) == {"n1", "n2", "n3"}
    lab.passes(LIMIT_S)
    assert lab.taken() == []


def test_who_gives_no_answer_is_asked_again_and_not_waited_for_longer_than_half_the_time() -> None:
    lab = Lab().begin()
    for name in lab.names[:-1]:
        lab.alone(name)
    lab.taken()
    lab.passes(REPEAT_S)
    assert lab.taken() == [("n4", msg.TestAlone(limit_s=LIMIT_S))]
    lab.passes(REPEAT_S / 2)
    assert lab.taken() == []
    lab.passes(ALONE_SHARE * LIMIT_S)
    assert lab.asked(msg.TestPair) == ["n1", "n2"]
    lab.plays()
    assert lab.results["n4"].verdict == "unknown"
    assert "not tested in time" in lab.results["n4"].message
    assert [lab.results[name].verdict for name in lab.names[:-1]] == ["ok"] * 3


def test_verdicts_come_before_the_time_is_up_when_no_pair_answers() -> None:
    lab = Lab().begin()
    for name in lab.names:
        lab.alone(name)
    began = lab.now
    while not lab.results:
        lab.passes(0.05)
        assert lab.now < began + LIMIT_S
    assert lab.now <= began + ALL_SHARE * LIMIT_S + 0.1
    assert set(lab.asked(msg.TestOver)) == set(lab.names)
    assert set(lab.results) == set(lab.names)


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "suspect"), (0.3, "unknown")])
def test_who_is_silent_is_blamed_only_if_the_rounds_had_their_share_of_the_time(
    share: float, verdict: str
) -> None:
    """A supervisor that takes over has tests begun anew in the time that is left."""
    lab = Lab()
    lab.state.settings = replace(lab.state.settings, preflight_s=LIMIT_S)
    lab.begin(limit_s=share * LIMIT_S)
    for name in lab.names:
        lab.alone(name)
    while not lab.results:
        for node, test in lab.taken():
            if isinstance(test, msg.TestPair) and node != "n4":
                lab.pair(node, test, error="timeout" if "n4" in test.name else "")
        lab.passes(0.5)
    assert lab.results["n4"].verdict == verdict
    assert [lab.results[name].verdict for name in ("n1", "n2")] == ["ok"] * 2


def test_who_answers_is_not_blamed_for_partners_that_say_nothing() -> None:
    """Two partners that lose power during the tests say nothing; the node itself answers with an error."""
    lab = Lab(3).begin()
    for name in lab.names:
        lab.alone(name)
    played: set[str] = set()
    while not lab.results:
        for node, test in lab.taken():
            if isinstance(test, msg.TestPair) and node == "n1":
                played.add(test.name)
                lab.pair(node, test, error="the other does not answer")
        lab.passes(0.5)
    assert len(played) == 2
    assert lab.results["n1"].verdict == "unknown"
    assert "no answer from them" in lab.results["n1"].message


def test_nobody_is_blamed_for_a_pair_of_which_neither_answers() -> None:
    lab = Lab(3).begin()
    for name in lab.names:
        lab.alone(name)
    while not lab.results:
        lab.passes(0.5)
    assert {found.verdict for found in lab.results.values()} == {"unknown"}


@pytest.mark.parametrize("role", [Role.FAILED, Role.ACTIVE])
def test_who_has_gone_or_has_ranks_is_not_waited_for(role: Role) -> None:
    lab = Lab().begin()
    for name in lab.names[:-1]:
        lab.alone(name)
    lab.state.nodes["n4"].role = role
    lab.passes(0.05)
    assert lab.asked(msg.TestPair) == ["n1", "n2"]
    (_, test), _ = [(node, one) for node, one in lab.taken() if isinstance(one, msg.TestPair)]
    assert isinstance(test, msg.TestPair)
    lab.pair("n1", test)
    lab.state.nodes["n2"].role = role
    lab.passes(0.05)
    lab.plays()
    assert set(lab.results) == set(lab.names)


def test_a_node_that_came_back_is_asked_anew() -> None:
    lab = Lab().begin()
    for name in lab.names[:2]:
        lab.alone(name)
    lab.taken()
    lab.state.nodes["n4"].role = Role.FAILED
    lab.passes(0.05)
    lab.state.nodes["n4"].role = Role.JOINING
    lab.passes(REPEAT_S)
    assert lab.asked(msg.TestAlone) == ["n3", "n4"]


def test_another_order_ends_the_first_without_verdicts() -> None:
    lab = Lab().begin()
    lab.alone("n1")
    lab.taken()
    lab.begin(nodes=("n1", "n2"))
    orders = [(node, type(message)) for node, message in lab.taken()]
    over = [(name, msg.TestOver) for name in lab.names]
    assert orders == [*over, ("n1", msg.TestAlone), ("n2", msg.TestAlone)], "the end of the first comes first"
    for name in ("n1", "n2"):
        lab.alone(name)
    lab.plays()
    assert set(lab.results) == {"n1", "n2"}


def test_nodes_without_a_store_or_with_an_error_play_with_nobody() -> None:
    lab = Lab().begin()
    lab.alone("n1", port=0)
    lab.alone("n2", error="torch cannot be imported")
    lab.alone("n3")
    lab.alone("n4")
    assert lab.asked(msg.TestPair) == ["n3", "n4"]
    lab.plays()
    assert lab.results["n2"].verdict == "suspect"
    assert lab.results["n1"].verdict == "ok"


def test_answers_that_nobody_waits_for_do_no_harm() -> None:
    lab = Lab()
    lab.alone("n1")
    lab.begin()
    stray = msg.TestedPair(name="0-n1-n2", times={}, error="of an earlier order")
    lab.does(lab.preflight.on_test_result("n1", stray, lab.now))
    lab.does(lab.preflight.on_test_result("nobody", msg.TestedAlone(port=1, found=NodeTimes()), lab.now))
    for name in lab.names:
        lab.alone(name)
    lab.plays()
    lab.alone("n1")
    assert {result.verdict for result in lab.results.values()} == {"ok"}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_every_node_gets_one_verdict_in_time(seed: int) -> None:
    chance = random.Random(seed)
    lab = Lab(chance.randint(1, 9)).begin()
    began, played = lab.now, 0
    while len(lab.results) < len(lab.names):
        for node, message in lab.taken():
            if chance.random() < 0.2:
                lab.state.nodes[node].role = chance.choice((Role.FAILED, Role.JOINING, Role.ACTIVE))
            if isinstance(message, msg.TestAlone) and chance.random() < 0.6:
                lab.alone(node, error="broken" if chance.random() < 0.1 else "")
            elif isinstance(message, msg.TestPair):
                played += message.rank == 0
                if chance.random() < 0.7:
                    lab.pair(node, message, chance.choice(("", "", "refused")), chance.random())
        lab.passes(chance.choice((0.05, 0.5, 5.0)))
        assert lab.now <= began + LIMIT_S, "no verdicts in time"
    assert played <= ROUNDS_MAX * len(lab.names) / 2
