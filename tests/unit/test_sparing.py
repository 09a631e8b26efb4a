"""Recovery in process: when ranks that live go on, what their agent and host do, and from which step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.core.agent import effects as do
from jurymast.core.agent.ranks import Ranks
from jurymast.core.judges.rejoining import (
    MADE_IN_TRAIN,
    GoBack,
    GoOn,
    OwnCosts,
    Rejoiner,
    are_alike,
    has_no_twin,
    newest_whole,
)
from jurymast.core.run.sparing import IN_A_ROW_MAX
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Launch
from jurymast.core.state.evidence import SparedRank
from jurymast.core.state.images import LIVE
from jurymast.worker import sparing
from jurymast.worker.sparing import OWN_BYTES_MAX, OwnRecord, Pipes, RankSide, Sparing
from support.node_model import launch
from support.stories import Story
from support.waiting import wait_until

# ---- the decision


def two_ranks_each(**how: Any) -> Story:
    return Story(active=2, ranks_per_node=2, **how).running(10)


def test_ranks_that_are_spared_go_on_in_their_processes() -> None:
    story = two_ranks_each()
    story.failed(2, -9)
    story.stopped(spared={0: 10, 1: 10, 3: 10})
    assert story.last(Launch).spare
    assert story.incident.action == "in process"
    assert story.incident.why.endswith("; 3 of 4 ranks go on in their processes")
    assert story.last(Launch).reason.startswith("in process after incident 1, same nodes")
    story.recovered(10, 12)
    assert story.incident.step_restored == 10
    story.failed(0, -9)
    story.stopped()
    assert (story.incident.action, story.last(Launch).spare) == ("restart", False), "nobody is spared now"
    assert "process" not in story.incident.why


def test_a_spare_takes_a_lost_nodes_place_beside_ranks_that_go_on() -> None:
    story = two_ranks_each()
    out, stays = story.state.placement[1], story.state.placement[0]
    story.lost(out)
    story.stopped(spared={0: 10, 1: 10})
    decided = story.last(Launch)
    assert (decided.spare, story.incident.action, decided.placement[0]) == (True, "swap", stays)
    assert "2 of 4 ranks go on in their processes" in story.incident.why


def test_a_node_that_is_lost_while_it_waits_spares_nobody() -> None:
    story = Story(active=2, spares=2).running(10)
    story.lost(story.state.placement[1])
    story.stopped(spared={}, explained_yet=False)
    story.feed(
        ev.WorkersStopped(
            t=story.t, node=story.state.placement[0], attempt=1, store_port=1, spared=(SparedRank(0, 1, 10),)
        )
    )
    story.feed(ev.NodeLost(t=story.t, node=story.state.placement[0], how="silent", silent_s=1.6))
    story.explain(True)
    assert not story.last(Launch).spare


@pytest.mark.parametrize("what", ["restart", "rollback"])
@pytest.mark.parametrize("when", ["running", "stopping"])
def test_who_asks_for_new_processes_gets_them(what: str, when: str) -> None:
    story = two_ranks_each()
    if when == "stopping":
        story.failed(2, -9)
    story.asked(what)
    story.stopped(spared={0: 10, 1: 10, 3: 10})
    assert not story.last(Launch).spare
    assert story.incident.why.endswith("; not in process, because new processes were asked for")


def test_a_rollback_that_comes_between_the_decision_and_the_launch_counts() -> None:
    story = Story(active=2, spares=1).running(10)
    for name in story.state.nodes:
        if name not in story.state.placement:
            story.lost(name)
    story.lost(story.state.placement[1])
    story.stopped(spared={0: 10})
    if any(isinstance(one, Launch) and one.attempt == 2 for _, one in story.decisions):
        pytest.fail("nothing is waited for")
    story.asked("rollback")
    assert not story.state.spare


@pytest.mark.parametrize("what", ["restart", "rollback"])
def test_ranks_that_were_to_end_do_not_go_on_if_the_next_attempt_fails_before_they_have(what: str) -> None:
    """They are of the state that was rolled back, or of the processes that nobody wants."""
    story = two_ranks_each()
    story.asked(what)
    story.stopped(spared={0: 10, 1: 10, 2: 10, 3: 10})
    story.backed_off()
    assert (story.state.attempt, story.last(Launch).spare) == (2, False)
    began = story.state.placement[0]
    story.feed(ev.WorkersStarted(t=story.t, node=began, attempt=2, pids=(71, 72)))
    story.failed(0, -9)
    story.stopped(spared={2: 10, 3: 10})  # the other has not begun, and stops what it had
    story.backed_off()
    assert (story.state.attempt, story.last(Launch).spare) == (3, False)


def test_it_is_not_tried_for_ever() -> None:
    story = two_ranks_each(spares=0)
    actions = []
    for number in range(IN_A_ROW_MAX + 1):
        if number:
            story.backed_off().ranks_up()
        story.failed(2 if number % 2 else 0, -9)
        story.stopped(spared={1: 10, 3: 10})
        actions.append(story.incident.action)
    assert actions == ["in process"] * IN_A_ROW_MAX + ["restart"]
    assert "that has failed 3 times without a new step" in story.incident.why


def test_an_update_that_was_cut_short_everywhere_needs_a_save() -> None:
    story = two_ranks_each()
    story.failed(2, -9)
    story.stopped(spared={0: -1, 1: -1, 3: -1})
    assert not story.last(Launch).spare
    assert "no step of theirs is whole, and none was saved" in story.incident.why
    story = two_ranks_each()
    story.feed(
        ev.Saved(t=story.t, attempt=1, step=8, tier="memory", ok=True, stall_s=0.0, size_bytes=1, seconds=0.1)
    )
    story.failed(2, -9)
    story.stopped(spared={0: -1, 1: -1, 3: -1})
    assert story.last(Launch).spare, "they go back to it"


def test_the_incident_says_how_many_steps_were_not_lost() -> None:
    story = two_ranks_each()
    story.failed(2, -9)
    story.stopped(spared={0: 10, 1: 10, 3: 10})
    story.feed(
        ev.RestorePlanned(
            t=story.t, attempt=2, step=7, tier="memory", expected_s=0.1, tiers={"memory": 1}, reason=""
        )
    )
    story.feed(ev.Restored(t=story.t, attempt=2, step=10, tier=LIVE, seconds=0.1))
    assert story.incident.why.endswith("go on in their processes, after step 10, 3 steps newer than the save")


def test_the_incident_says_why_ranks_that_live_went_back_to_a_save() -> None:
    story = two_ranks_each()
    story.failed(2, -9)
    story.stopped(spared={0: 10, 1: 10, 3: 10})
    why = "no rank that lives has the shards of rank 2 after step 10"
    story.feed(ev.Restored(t=story.t, attempt=2, step=8, tier="memory", seconds=0.1, why=why))
    assert story.incident.why.endswith(f"; back to the save of step 8, because {why}")


# ---- the agent

SPARED = (SparedRank(1, 12, 7),)


def waiting_with_spared() -> Ranks:
    ranks = Ranks(5.0)
    ranks.begin(0.0)
    ranks.on_host_message(msg.Ready(store_port=1), 1.0)
    ranks.on_launch(launch(1), 2.0)
    ranks.on_node_prepared(1, 2.0)
    ranks.on_host_message(msg.Started(attempt=1, pids=(11, 12)), 3.0)
    said = ranks.on_host_message(msg.Ready(store_port=2, spared=SPARED), 4.0)
    assert do.Send(msg.Stopped(attempt=1, store_port=2, spared=SPARED)) in said
    ranks.check()
    return ranks


def test_an_agent_tells_who_is_spared_also_when_asked_later() -> None:
    ranks = waiting_with_spared()
    told = ranks.on_stop(1, 5.0)
    assert told == [do.Send(msg.Stopped(attempt=1, store_port=2, spared=SPARED))]


def test_a_node_that_is_dismissed_keeps_no_rank() -> None:
    ranks = waiting_with_spared()
    told = ranks.on_dismissed(5.0)
    assert told == [do.KillRanks((12,)), do.Send(msg.Stopped(attempt=1, store_port=2))]
    ranks.check()


def test_ranks_of_a_node_that_is_dismissed_are_not_spared() -> None:
    ranks = Ranks(5.0)
    ranks.begin(0.0)
    ranks.on_host_message(msg.Ready(store_port=1), 1.0)
    ranks.on_launch(launch(1), 2.0)
    ranks.on_node_prepared(1, 2.0)
    assert ranks.on_dismissed(3.0) == [do.StopRanks(1, spare=False)]


def test_a_launch_takes_them_and_a_host_that_ends_loses_them() -> None:
    ranks = waiting_with_spared()
    ranks.on_launch(launch(2), 5.0)
    ranks.on_node_prepared(2, 5.0)
    assert ranks.spared == ()
    ranks = waiting_with_spared()
    ranks.on_host_ended(-9, {}, 5.0)
    assert ranks.spared == ()
    ranks.check()


# ---- from which step


def test_the_newest_step_that_a_rank_has_and_of_which_all_have_their_own() -> None:
    own = (9, 10)
    ranks = [Rejoiner(10, own, True), Rejoiner(9, own, True), Rejoiner(-1, own), Rejoiner(-1, (9,))]
    assert newest_whole(ranks, 0) == GoOn(9, {1: (0, 2, 3)})
    assert newest_whole([*ranks[:3]], 0) == GoOn(10, {0: (1, 2)})
    new = Rejoiner()
    assert newest_whole([Rejoiner(10), Rejoiner(10), new, new], 0) == GoOn(10, {0: (2,), 1: (3,)})
    made = newest_whole([Rejoiner(10, makes_state=True), Rejoiner(10, makes_state=True), Rejoiner()], 0)
    assert made == GoBack(MADE_IN_TRAIN)
    new_node = newest_whole([Rejoiner(10, own, True), Rejoiner()], 0)
    assert new_node == GoBack("what is the own of rank 1 after step 10 is not there")
    before = newest_whole([Rejoiner(10, own, True), Rejoiner(-1, (8, 9))], 0)
    assert before == GoBack("rank 1 failed before the end of step 10, which others had done")
    cut_short = newest_whole([Rejoiner(-1, own, True), Rejoiner(-1, own)], 0)
    assert cut_short == GoBack("no rank has the state after a step")


def test_all_go_back_to_what_was_saved_if_that_is_newer_than_what_they_have() -> None:
    """Ranks went on from an older step, and a node that has a newer one has come back since."""
    ranks = [Rejoiner(7), Rejoiner(7), Rejoiner()]
    assert newest_whole(ranks, 7) == GoOn(7, {0: (2,), 1: ()})
    assert newest_whole(ranks, 8) == GoBack("step 8 was saved, which is newer than the ranks' step 7")


def test_a_shard_comes_from_its_twin_and_from_nobody_else() -> None:
    """Ranks 0 and 2 have one shard, 1 and 3 the other."""
    kept = [Rejoiner(10, part="a"), Rejoiner(9, part="b"), Rejoiner(part="a"), Rejoiner(10, part="b")]
    assert newest_whole(kept, 0) == GoOn(10, {0: (2,), 3: (1,)})
    behind = [*kept[:3], Rejoiner(9, part="b")]
    assert newest_whole(behind, 0) == GoBack(
        "no rank that lives has the shards of rank 1 and 1 other after step 10"
    )
    lost = [Rejoiner(10, part="a"), Rejoiner(part="b"), Rejoiner(10, part="a"), Rejoiner(part="b")]
    assert isinstance(newest_whole(lost, 0), GoBack)
    alone = [Rejoiner(10, part="a"), Rejoiner(part="b")]
    assert newest_whole(alone, 0) == GoBack("no rank that lives has the shards of rank 1 after step 10")


def test_what_was_lost_with_a_node_is_with_the_rank_that_kept_it() -> None:
    ranks = [Rejoiner(10, (9, 10), True, ward=1, kept=(9, 10)), Rejoiner(), Rejoiner(10, (10,), True)]
    assert newest_whole(ranks, 0) == GoOn(10, {0: (1,), 2: ()}, {1: 0})
    late = [Rejoiner(10, (9, 10), True, ward=1, kept=(8, 9)), *ranks[1:]]
    assert newest_whole(late, 0) == GoBack("what is the own of rank 1 after step 10 is not there")
    both = [*ranks[:1], Rejoiner(own=(10,)), ranks[2]]
    assert newest_whole(both, 0) == GoOn(10, {0: (1,), 2: ()}), "it has it itself"


def test_only_ranks_with_the_same_part_have_to_be_alike() -> None:
    assert are_alike([("a", "1"), ("b", "2"), ("a", "1"), ("b", "2")])
    assert not are_alike([("a", "1"), ("b", "2"), ("a", "3"), ("b", "2")])
    assert not are_alike([("", ""), ("", "")]), "there is nothing to compare"
    assert has_no_twin(["a", "b", "a"])
    assert not has_no_twin(["a", "a"])
    assert not has_no_twin(["a"])


def too_expensive_at(costs_ms: list[float], step_s: float) -> tuple[int, str] | None:
    """At which of these records, one a step, no more are to follow, and why."""
    costs = OwnCosts()
    for number, cost_ms in enumerate(costs_ms):
        if why := costs.add(cost_ms / 1000, number * step_s):
            return number, why
    return None


def test_what_is_expensive_to_record_for_a_while_goes_on_to_be_recorded() -> None:
    """The first record loads what others use; a few are slow as another program has the processor."""
    assert too_expensive_at([50.0, *[0.8] * 60], 0.05) == (60, "that takes 0.8 ms a step")
    assert too_expensive_at([50.0, *[0.8] * 60], 0.1) is None, "less than 1 % of a step"
    assert too_expensive_at([0.0, *[0.4] * 60], 0.001) is None
    assert too_expensive_at([0.0, *[0.2, 30.0, 0.2] * 100], 0.05) is None
    assert too_expensive_at([0.0, *([0.8] * 40 + [0.2] * 20) * 5], 0.05) is None


@given(
    st.lists(
        st.builds(
            Rejoiner, st.integers(-1, 3), st.lists(st.integers(0, 3)).map(tuple), st.booleans(),
            st.sampled_from("ab"), st.integers(-1, 4), st.lists(st.integers(0, 3)).map(tuple),
        ),
        min_size=1,
    )
)  # fmt: skip
def test_everybody_has_it_or_is_given_it_once(ranks: list[Rejoiner]) -> None:
    found = newest_whole(ranks, 0)
    if isinstance(found, GoBack):
        return
    takers = [taker for each in found.takers.values() for taker in each]
    for giver, needy in found.takers.items():
        assert {ranks[taker].part for taker in needy} <= {ranks[giver].part}
    assert all(ranks[giver].live == found.step for giver in found.takers)
    assert sorted(takers) == [number for number, rank in enumerate(ranks) if rank.live != found.step]
    assert all(ranks[keeper].ward == owner for owner, keeper in found.records.items())
    assert all(found.step in ranks[keeper].kept for keeper in found.records.values())
    if any(rank.needs_own for rank in ranks):
        assert all(found.step in rank.own or n in found.records for n, rank in enumerate(ranks))


# ---- what is a rank's own


def test_the_last_two_records_are_kept() -> None:
    record = OwnRecord(bytearray(2 * sparing._SLOT_BYTES))
    record.clear()
    assert record.steps() == []
    for step in (3, 4, 5):
        record.write(step, f"of {step}".encode())
    assert sorted(record.steps()) == [4, 5]
    assert (record.read(4), record.read(5), record.read(3)) == (b"of 4", b"of 5", None)
    record.write(6, b"x" * OWN_BYTES_MAX)
    assert record.read(6) == b"x" * OWN_BYTES_MAX
    assert record.read(5) == b"of 5"


def test_a_record_that_was_cut_short_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    record = OwnRecord(bytearray(2 * sparing._SLOT_BYTES))
    record.clear()
    record.write(1, b"one")
    record.write(2, b"two")
    with pytest.raises(TypeError):
        record.write(3, None)  # type: ignore[arg-type]  # the rank ends in the middle
    assert record.steps() == [2]


# ---- the host and its ranks

RANK = """
import json, os, sys
from jurymast.worker.sparing import Pipes, RankSide
side = RankSide(Pipes.of(os.environ), int(sys.argv[1]))
side.own.write(5, b"mine")
side.say("offers")
print("offered", flush=True)
def told(order):
    print(json.dumps(order), flush=True)
    if "leave" in order and sys.argv[2] == "leaves":
        side.say("left", 7)
side.listen(told)
"""


@contextmanager
def host_with_ranks(*kinds: str) -> Iterator[tuple[Sparing, dict[int, subprocess.Popen[str]]]]:
    ranks: dict[int, subprocess.Popen[str]] = {}
    by_pid: Callable[[int], bool] = lambda pid: any(  # noqa: E731
        one.pid == pid and one.poll() is None for one in ranks.values()
    )
    host = Sparing(len(kinds), by_pid)
    try:
        for local, kind in enumerate(kinds):
            host.starts(local)
            ranks[local] = subprocess.Popen(
                [sys.executable, "-c", RANK, str(local), kind], stdout=subprocess.PIPE, text=True,
                env={**os.environ, **host.environment(local)},
            )  # fmt: skip
        for one in ranks.values():
            assert one.stdout is not None
            assert one.stdout.readline() == "offered\n"
        yield host, ranks
    finally:
        for one in ranks.values():
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()


def test_ranks_leave_and_join_over_the_pipes_of_their_host() -> None:
    with host_with_ranks("leaves", "stays") as (host, ranks):
        pids = {local: one.pid for local, one in ranks.items()}
        assert host.leave(pids, 1, 0.3) == (SparedRank(0, pids[0], 7),)
        assert (host.spared(0), host.spared(1)) == (pids[0], 0)
        assert host.join(0, {"JURYMAST_ATTEMPT": "2"})
        assert not host.join(1, {})
        stdout = ranks[0].stdout
        assert stdout is not None
        orders = [json.loads(stdout.readline()) for _ in range(2)]
        assert orders == [{"leave": 1}, {"join": {"JURYMAST_ATTEMPT": "2"}}]
        assert host.spared(0) == 0, "it goes on"


def test_a_rank_that_has_ended_is_not_spared() -> None:
    with host_with_ranks("leaves") as (host, ranks):
        pid = ranks[0].pid
        assert host.leave({0: pid}, 1, 5.0)
        ranks[0].kill()
        ranks[0].wait()
        assert host.spared(0) == 0
        assert not host.join(0, {})


def test_a_new_process_does_not_inherit_what_its_predecessor_offered_or_was_told() -> None:
    with host_with_ranks("stays") as (host, ranks):
        ranks[0].kill()
        ranks[0].wait()
        os.write(host._orders[0][1], b'{"leave": 1}\n')
        host.starts(0)
        environment = host.environment(0)
        pipes = Pipes.of(environment)
        assert pipes is not None
        side = RankSide(pipes, 0)
        assert side.own.read(5) == b"mine", "its host has kept that"
        heard: list[Any] = []
        threading.Thread(target=side.listen, args=(heard.append,), daemon=True).start()
        side.say("offers")
        host._lives = lambda pid: pid == os.getpid()
        host.leave({0: os.getpid()}, 2, 0.05)
        wait_until("an order", lambda: bool(heard))
        assert heard == [{"leave": 2}]
        host.forget()
        assert side.own.steps() == []


def test_ranks_outside_of_a_host_have_no_pipes() -> None:
    assert Pipes.of({}) is None
    assert Pipes.of({sparing.PIPES_VARIABLE: "one two"}) is None
