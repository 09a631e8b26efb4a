"""The machine of an agent's connection: whom it tries and when, how long it waits, when it leaves."""

from __future__ import annotations

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent import link as machine
from jurymast.core.agent.link import SupervisorLink, SupervisorSilence
from jurymast.core.agent.machine import PROBE_ANYWAY_S, AgentMachine
from jurymast.core.agent.ranks import Ranks
from jurymast.core.judges.silence import ANSWER_INTERVAL_S, BEATS, FACTOR, KNOWN_AFTER
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.schedule import Schedule
from support.node_model import launch, plan

PATIENCE_S = 3.0
WAITS = msg.Unrestorable(attempt=2, rank=0, step=40, of=1, why="n5: refused")


def at(port: int, allocation: str = "17.0", epoch: int = 1) -> Endpoint:
    return Endpoint(epoch, ("n9", "10.0.0.9"), port, "n9", allocation, 1)


def connect(port: int) -> do.Connect:
    return do.Connect((("n9", port), ("10.0.0.9", port)))


def link(
    hint: tuple[str, int] | None = None, nodes: int = 1, ranks: Ranks | None = None, node: str = "n1"
) -> SupervisorLink:
    return SupervisorLink(
        node, "17.0", hint, PATIENCE_S, nodes, 0.5, ranks or Ranks(5.0), SupervisorSilence(ANSWER_INTERVAL_S)
    )


def connected(made: SupervisorLink | None = None) -> SupervisorLink:
    made = made or link()
    assert made.start(10.0) == [do.FindSupervisor()]
    assert made.on_supervisor_found(at(7), 10.1) == [connect(7)]
    assert made.on_connected(10.2) == [do.Greet()]
    made.check()
    return made


def test_the_last_supervisor_and_the_newest_are_tried_at_the_same_time() -> None:
    made = connected()
    assert made.on_connection_lost(20.0) == [connect(7)], "a moment before all look at once"
    assert made.on_supervisor_unreached(20.0) == []
    assert made.on_time(made.wake_at) == [connect(7), do.FindSupervisor()]
    assert made.on_supervisor_found(at(8), 20.3) == [connect(8)]
    assert made.on_supervisor_unreached(20.4) == []
    assert made.wake_at == pytest.approx(20.3 + machine.PEEK_EVERY_S), "one try goes on"
    assert made.on_connected(20.5) == [do.Greet()]
    assert made.on_supervisor_found(at(9), 20.6) == []
    assert made.on_supervisor_unreached(20.7) == []
    made.check()


def test_who_is_found_again_is_not_tried_twice() -> None:
    made = connected()
    made.on_connection_lost(20.0)
    made.on_supervisor_unreached(20.0)
    assert made.on_time(20.2) == [connect(7), do.FindSupervisor()]
    assert made.on_supervisor_found(at(7), 20.3) == []
    assert made.on_supervisor_unreached(20.4) == []
    assert made.wake_at == pytest.approx(20.4 + machine.RECONNECT_S)


def test_a_supervisor_of_another_allocation_is_not_ours() -> None:
    made = link()
    made.start(10.0)
    assert made.on_supervisor_found(at(7, "16.0"), 10.1) == []
    hinted = link(("h", 5))
    assert hinted.start(10.0) == [do.Connect((("h", 5),)), do.FindSupervisor()]
    assert hinted.on_supervisor_found(at(7, "16.0"), 10.1) == [do.Connect((("h", 5),))]


def test_storage_that_does_not_answer_ends_nothing() -> None:
    made = link()
    made.start(10.0)
    assert made.on_supervisor_found(None, 12.0) == []
    assert made.on_time(made.wake_at) == [do.FindSupervisor()]


def test_thousands_share_the_looks_into_the_run_directory() -> None:
    nodes = 50_000
    made = connected(link(nodes=nodes))
    every_s = nodes / machine.FINDS_A_SECOND
    assert made.on_connection_lost(100.0) == [connect(7)]
    finds, now = [], 100.0
    while now < 100.0 + 4 * every_s:
        made.on_supervisor_unreached(now)
        now = made.wake_at
        if do.FindSupervisor() in made.on_time(now):
            made.on_supervisor_found(None, now)
            finds.append(now)
    assert finds[0] == pytest.approx(100.0 + every_s / 2, abs=machine.RECONNECT_S), "by its share"
    assert len(finds) == 4


def test_silence_is_the_end_of_a_supervisor() -> None:
    """After a power loss there is no other sign."""
    made = connected()
    made.on_order(msg.GoOn(time=0.0, patience_s=9.0, epoch=1), 11.0)
    made.on_order(msg.Dismiss(), 15.0)
    now = 15.0
    while (now := made.wake_at) < 24.0:
        assert made.on_time(now) == [do.FindSupervisor()], "is there another?"
        assert made.on_supervisor_found(at(7), now) == []
    hangs_up, *others = made.on_time(now)
    assert hangs_up == do.Send(msg.HangsUp()), "one that was only late must not take it for an end"
    assert others == [do.HangUp(), connect(7)]
    assert not made.connected
    made.check()


def answered(made: SupervisorLink, every_s: float = ANSWER_INTERVAL_S, epoch: int = 1) -> float:
    """By a supervisor that answers so often; when it did so last."""
    now = 10.2
    for _ in range(KNOWN_AFTER + 1):
        now += every_s
        made.on_order(msg.GoOn(time=0.0, patience_s=60.0, epoch=epoch), now)
    return now


def test_a_supervisor_that_is_silent_for_longer_than_usual_is_left_for_a_newer_one() -> None:
    made = connected()
    last = answered(made)
    assert made.wake_at == pytest.approx(last + BEATS * ANSWER_INTERVAL_S, abs=0.01)
    now = made.wake_at
    assert made.on_time(now) == [do.FindSupervisor()]
    assert made.wake_at == last + 60.0, "one look at a time"
    assert made.on_supervisor_found(at(7), now + 0.1) == [], "it is still the newest"
    now = made.wake_at
    assert made.on_time(now) == [do.FindSupervisor()]
    effects = made.on_supervisor_found(at(8, epoch=2), now)
    newer = at(8, epoch=2)
    assert effects == [do.Send(msg.HangsUp(newer=newer)), do.HangUp(), connect(8)], "it may not know"
    made.check()
    assert made.on_connected(now + 0.1) == [do.Greet()]


def test_a_supervisor_that_answers_on_time_is_left_once_the_pulse_is_a_newer_one_s() -> None:
    """It may have been stopped for a while, and its own handles of the run directory be stale."""
    made = connected()
    assert made.on_pulse(2, 10.3) == [], "its epoch is not known yet"
    last = answered(made)
    assert made.on_pulse(1, last) == []
    assert made.on_pulse(2, last) == [do.FindSupervisor()]
    assert made.on_pulse(2, last) == [], "one look at a time"
    assert made.on_supervisor_found(at(7), last) == [], "the newer one still reads the journal"
    assert made.on_pulse(2, last) == [do.FindSupervisor()]
    newer = at(8, epoch=2)
    assert made.on_supervisor_found(newer, last) == [
        do.Send(msg.HangsUp(newer=newer)),
        do.HangUp(),
        connect(8),
    ]
    assert made.on_pulse(2, last) == []
    made.check()


def test_a_supervisor_that_was_taken_over_from_says_where_the_next_is() -> None:
    made = connected()
    last = answered(made)
    assert made.on_order(msg.Moved(place=at(8, "16.0", 2)), last) == []
    newer = at(8, epoch=2)
    effects = made.on_order(msg.Moved(place=newer), last)
    assert effects == [do.Send(msg.HangsUp(newer=newer)), do.HangUp(), connect(8)]
    made.check()


def test_who_is_slow_by_habit_is_not_soon_suspected() -> None:
    made = connected()
    last = answered(made, every_s=2.0)
    assert made.wake_at == pytest.approx(last + FACTOR * 2.0, abs=0.01)


def test_the_agent_beside_a_supervisor_that_falls_silent_is_early_with_the_next_although_it_is_slow() -> None:
    """Who takes over gives this node up first: it most likely went with the supervisor."""
    made = connected(link(node="n9"))
    last = answered(made, every_s=2.0)
    assert made.wake_at == pytest.approx(last + BEATS * ANSWER_INTERVAL_S, abs=0.01)


@pytest.mark.parametrize("place", [None, at(8, epoch=0), at(8, "16.0", 2)])
def test_only_a_newer_supervisor_of_this_allocation_is_a_reason(place: Endpoint | None) -> None:
    made = connected()
    answered(made)
    now = made.wake_at
    made.on_time(now)
    assert made.on_supervisor_found(place, now) == []
    assert made.connected


@pytest.mark.parametrize("knows", ["by its word", "by another's", "by the run directory"])
def test_who_knows_a_newer_supervisor_never_goes_back_to_an_older_one(knows: str) -> None:
    """The run directory may be seen as it was a minute ago, and the older one may not know of the newer."""
    made = link()
    made.start(10.0)
    if knows == "by the run directory":
        made.on_supervisor_found(at(8, epoch=2), 10.1)
    else:
        made.on_supervisor_found(at(7), 10.1)
        made.on_connected(10.2)
        answered(made, epoch=2 if knows == "by its word" else 1)
        if knows == "by another's":
            made.on_order(msg.Moved(place=at(8, epoch=2)), 20.0)
        else:
            made.on_connection_lost(20.0)
    assert not made.connected
    for _ in range(made._tries):
        made.on_supervisor_unreached(20.0)
    made.on_time(made.wake_at)
    assert made.on_supervisor_found(at(9, epoch=1), 21.0) == []
    made.on_supervisor_unreached(21.0)
    made.on_time(made.wake_at)
    assert made.on_supervisor_found(at(9, epoch=3), 22.0) == [connect(9)]
    made.check()


def test_a_look_that_is_answered_after_the_connection_was_lost_ends_no_other_try() -> None:
    made = connected()
    answered(made)
    now = made.wake_at
    assert made.on_time(now) == [do.FindSupervisor()]
    assert made.on_connection_lost(now) == [connect(7)]
    assert made.on_supervisor_found(at(7), now) == []
    assert made.on_supervisor_unreached(now) == []
    assert made.wake_at == pytest.approx(now + machine.RECONNECT_S)
    made.check()


def test_a_newer_supervisor_is_found_while_the_last_one_only_seems_to_listen() -> None:
    """It stands still, and its kernel takes connections all the same."""
    made = connected()
    assert made.on_connection_lost(20.0) == [connect(7)]
    for _ in range(2):
        assert made.on_time(made.wake_at) == [do.FindSupervisor()]
        assert made.wake_at == do.NEVER, "one look at a time"
        assert made.on_supervisor_found(at(7), 20.1) == []
    assert made.on_time(made.wake_at) == [do.FindSupervisor()]
    assert made.on_supervisor_found(at(8, epoch=2), 20.7) == [connect(8)]
    assert made.on_connected(20.8) == [do.Greet()]
    made.check()


def test_what_no_hello_tells_waits_for_the_next_supervisor() -> None:
    """A rank that waits for an image must not wait long because its agent reached nobody."""
    made = link()
    made.start(10.0)
    assert made.say(WAITS) == []
    assert made.say(msg.Prefetched(step=40, attempt=1, rank=1, tiers={}, seconds=1.0)) == []
    made.on_supervisor_found(at(7), 10.1)
    assert made.on_connected(10.2) == [do.Greet(), do.Send(WAITS)]
    made.on_order(msg.GoOn(time=0.0, patience_s=3.0, heard=1), 10.9)
    made.on_connection_lost(11.0)
    made.on_supervisor_unreached(11.0)
    assert made.on_connected(12.0) == [do.Greet()], "that was heard"


@pytest.mark.parametrize(
    "word",
    [
        msg.Failed(attempt=2, rank=1, exit_code=1, error="ValueError"),
        msg.Written(id="7", tier="shared", ok=True, size_bytes=9),
    ],
)
def test_what_was_said_over_a_connection_that_was_dead_already_is_said_again(word: msg.Kept) -> None:
    made = connected()
    made.on_order(msg.GoOn(time=0.0, patience_s=3.0, heard=0), 10.5)
    assert made.say(WAITS) == [do.Send(WAITS)]
    assert made.say(word) == [do.Send(word)]
    made.on_order(msg.GoOn(time=0.0, patience_s=3.0, heard=1), 10.6)
    for now in (11.0, 13.0):
        made.on_connection_lost(now)
        made.on_supervisor_unreached(now)
        assert made.on_connected(now + 1.0) == [do.Greet(), do.Send(word)], "until it was heard"
    made.on_order(msg.GoOn(time=0.0, patience_s=3.0, heard=1), 15.0)
    made.on_connection_lost(16.0)
    assert made.on_connected(17.0) == [do.Greet()]
    made.check()


def test_what_waits_has_a_limit() -> None:
    made = link()
    made.start(10.0)
    for _ in range(2 * machine.KEPT_MAX):
        made.say(WAITS)
    assert len(made.on_connected(11.0)) == 1 + machine.KEPT_MAX


def left_after(made: SupervisorLink, now: float, until: float) -> float | None:
    """Seconds from `now`, when the connection is lost, until the agent leaves; None: not before `until`."""
    effects, since = made.on_connection_lost(now), now
    while do.Leave() not in effects:
        if now > until:
            return None
        effects = []
        for _ in range(made._tries):
            effects += made.on_supervisor_unreached(now)
        if not effects:
            now = made.wake_at
            made.on_time(now)
    return now - since


def test_an_agent_leaves_when_nobody_comes_but_never_from_its_ranks() -> None:
    ranks = Ranks(5.0)
    made = connected(link(ranks=ranks))
    idle = left_after(made, 100.0, 4000.0)
    assert idle == pytest.approx(machine.IDLE_ALONE_LIMIT_S, abs=1.0)
    ranks.begin(0.0)
    ranks.on_host_message(msg.Ready(store_port=1), 0.0)
    ranks.on_launch(launch(1), 0.0)
    ranks.on_node_prepared(1, 0.0)
    assert ranks.state == "starting"
    assert left_after(connected(link(ranks=ranks)), 100.0, 4000.0) is None
    ranks.on_host_message(msg.Started(attempt=1, pids=(1,)), 0.0)
    assert left_after(connected(link(ranks=ranks)), 100.0, 4000.0) is None
    ranks.on_host_message(msg.Finished(attempt=1), 0.0)
    done = left_after(connected(link(ranks=ranks)), 100.0, 4000.0)
    assert done == pytest.approx(machine.ALONE_LIMIT_S, abs=1.0)


def test_after_a_sigterm_an_agent_stays_until_its_supervisor_says_leave() -> None:
    """A preempted job's grace time may be long, and another SIGTERM may be a stray one."""
    made = connected()
    for _ in range(2):
        assert made.on_sigterm(20.0) == [do.Send(msg.Terminated())]
    made.on_order(msg.GoOn(time=0.0, patience_s=1e6), 20.0)
    assert do.Leave() not in made.on_time(20.0 + 9 * machine.TERMINATED_LIMIT_S)
    assert made.on_order(msg.Leave(), 900.0) == [do.Leave(ordered=True)]


def test_a_sigterm_without_a_supervisor_is_told_to_the_next_or_else_the_agent_leaves() -> None:
    alone = link()
    alone.start(10.0)
    assert alone.on_sigterm(11.0) == []
    assert do.Leave() not in alone.on_time(10.9 + machine.TERMINATED_LIMIT_S)
    assert alone.on_time(11.0 + machine.TERMINATED_LIMIT_S) == [do.Leave()]
    found = link()
    found.start(10.0)
    found.on_sigterm(11.0)
    assert found.on_connected(12.0) == [do.Greet(), do.Send(msg.Terminated())]
    assert do.Leave() not in found.on_time(11.0 + machine.TERMINATED_LIMIT_S)
    found.on_connection_lost(90.0)
    assert do.Send(msg.Terminated()) not in found.on_connected(91.0), "it was told"


def test_a_sigterm_is_told_again_to_each_supervisor_until_it_is_explained() -> None:
    """The one that was told may be gone before it has said that the job goes on."""
    ranks = Ranks(5.0)
    made = connected(link(ranks=ranks))
    ranks.on_sigterm()
    made.on_sigterm(20.0)
    for lost_at in (21.0, 31.0):
        made.on_connection_lost(lost_at)
        assert do.Send(msg.Terminated()) in made.on_connected(lost_at + 1.0)
    ranks.on_job_goes_on()
    made.on_connection_lost(41.0)
    assert do.Send(msg.Terminated()) not in made.on_connected(42.0)


def test_a_sigterm_without_a_supervisor_ends_no_ranks() -> None:
    ranks = Ranks(5.0)
    ranks.begin(0.0)
    ranks.on_host_message(msg.Ready(store_port=1), 0.0)
    ranks.on_launch(launch(1), 0.0)
    ranks.on_node_prepared(1, 0.0)
    made = link(ranks=ranks)
    made.start(10.0)
    made.on_sigterm(11.0)
    assert do.Leave() not in made.on_time(11.0 + machine.TERMINATED_LIMIT_S)


# All parts together.


def agent(cluster: str = "local") -> AgentMachine:
    made = AgentMachine(plan(cluster=cluster), "n2", "17.0", ("n1", "n2"), None, 0.0)
    made.start(10.0, reachable=False)
    return made


def met(cluster: str = "local") -> AgentMachine:
    made = agent(cluster)
    made.on_supervisor_found(at(7), 10.1)
    greet, beat, start_host, wake = made.on_connected(10.2)
    assert (greet, beat, start_host) == (do.Greet(), do.Beat(0, ()), do.StartHost())
    assert isinstance(wake, do.WakeAt)
    return made


def test_the_last_word_before_hanging_up_is_said() -> None:
    made = met()
    effects = made.on_time(made.link.wake_at)
    assert effects[:2] == [do.Send(msg.HangsUp()), do.HangUp()]
    assert do.Beat not in map(type, made.on_host_message(msg.Started(attempt=1, pids=(1,)), 20.0))


def test_an_agent_that_leaves_does_nothing_more() -> None:
    made = met()
    told = msg.Leave(over=True, exit_code=7)
    assert made.on_order(told, 11.0)[0] == do.Leave(over=True, exit_code=7, ordered=True)
    assert made.on_order(launch(1), 12.0) == []
    assert made.on_host_ended(1, {}, 12.0) == []
    assert made.on_time(99.0) == []


def test_who_lost_its_supervisor_reads_the_pulse_on_slurm_only() -> None:
    assert do.ReadPulse() in met("slurm").on_connection_lost(20.0)
    assert do.ReadPulse() not in met("local").on_connection_lost(20.0)


def test_who_reads_that_a_newer_attempt_has_begun_ends_its_ranks_and_tries_on() -> None:
    made = launched(rank=1)
    assert do.FindSupervisor() in made.on_connection_lost(20.0)
    made.on_supervisor_unreached(20.1)
    effects = made.on_supervisor_found(at(7), 20.2, attempt=2)
    assert do.StopRanks(1) in effects
    assert not [one for one in effects if isinstance(one, do.Leave | do.Send)]
    assert do.FindSupervisor() in made.on_time(made.link.wake_at)
    made.on_host_message(msg.Ready(store_port=2), 22.0)
    made.on_connected(23.0)
    assert (made.ranks.state, made.ranks.attempt) == ("waiting", 1), "as the hello says"
    made.check()


def test_ranks_that_were_replaced_end_also_while_a_silent_supervisor_is_waited_for() -> None:
    """Nothing has closed the connection."""
    made = launched(rank=1)
    assert do.StopRanks(1) in made.on_supervisor_found(at(7), 14.0, attempt=2)
    stopped = do.Send(msg.Stopped(attempt=1, store_port=2))
    assert stopped in made.on_host_message(msg.Ready(store_port=2), 15.0)


def test_what_storage_does_not_say_ends_no_ranks() -> None:
    made = launched(rank=1)
    made.on_connection_lost(20.0)
    for attempt in (None, 0, 1):
        assert do.StopRanks(1) not in made.on_supervisor_found(None, 21.0, attempt=attempt)
    assert made.ranks.state == "starting"


def test_nothing_is_tested_beside_ranks() -> None:
    made, test = met(), msg.TestAlone(limit_s=5.0)
    assert do.StartTests(1, 1) in made.on_order(test, 11.0)
    made.on_host_message(msg.Ready(store_port=1), 12.0)
    ended, makes_room, *_ = made.on_order(launch(1), 13.0)
    assert (ended, makes_room) == (do.EndTests(1), do.Prepare(launch(1)))
    assert do.StartTests not in map(type, made.on_order(test, 14.0))


def test_probes_wait_for_the_host_but_not_for_long() -> None:
    warm, cold = met(), met()
    assert do.StartProbes() in warm.on_host_message(msg.Ready(store_port=1), 12.0)
    assert do.StartProbes() not in warm.on_time(10.0 + PROBE_ANYWAY_S)
    assert do.StartProbes() not in cold.on_time(9.9 + PROBE_ANYWAY_S)
    assert do.StartProbes() in cold.on_time(10.0 + PROBE_ANYWAY_S)


def test_when_to_wake_is_told_again_after_it_has_come() -> None:
    """A timer that fires a moment early must not be the last."""
    made = met()
    wake_at = made.link.wake_at
    assert do.WakeAt(wake_at) in made.on_time(wake_at - 1e-9)


def launched(rank: int) -> AgentMachine:
    made = met()
    made.on_host_message(msg.Ready(store_port=1), 12.0)
    made.on_order(launch(1, rank=rank, port=1), 13.0)
    made.on_node_prepared(1, 13.1)
    return made


def test_the_node_of_rank_0_is_ready_to_write_once_its_script_checkpoints() -> None:
    event = within.CheckpointsKept(directory="/shared", keep=2)
    assert do.WarmWriter() in launched(rank=0).on_rank_event(event, 14.0)
    assert do.WarmWriter() not in launched(rank=1).on_rank_event(event, 14.0)


def test_a_word_on_saves_is_for_one_attempt_and_shown_at_once() -> None:
    made = launched(rank=1)
    old, new = (
        msg.CadenceSet(attempt=attempt, schedule=Schedule(1, 10, 12, 5), decided=0) for attempt in (0, 1)
    )
    assert made.on_order(old, 14.0)[:-1] == []
    assert made.on_order(new, 15.0)[:-1] == [do.Obey(new), do.Beat(1, ())]
