"""The machine of a node's ranks, event by event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jurymast.core.agent import effects as do
from jurymast.core.agent import ranks as machine
from jurymast.core.agent.ranks import Ranks
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from support.node_model import launch

GRACE_S = 5.0
PORT = 4000
PIDS = (11, 12)
EVIDENCE = {"oom_kills": 0, "shm_used": 0.5}


def warm(port: int = PORT, *, tasks: bool = False) -> Ranks:
    ranks = Ranks(GRACE_S, tasks=tasks)
    assert ranks.state == "warming"
    assert ranks.begin(0.0) == [do.StartHost()]
    assert ranks.begin(0.0) == []
    assert ranks.on_host_message(msg.Ready(store_port=port), 1.0) == [do.Send(msg.Ready(store_port=port))]
    return ranks


def starting(attempt: int = 1, *, tasks: bool = False) -> Ranks:
    ranks = warm(tasks=tasks)
    order = launch(attempt)
    assert ranks.on_launch(order, 2.0) == [do.Prepare(order)]
    assert ranks.state == "starting"
    assert ranks.on_node_prepared(attempt, 2.0) == [do.StartRanks(order, cold=False)]
    ranks.check()
    return ranks


def running(attempt: int = 1, *, tasks: bool = False) -> Ranks:
    ranks = starting(attempt, tasks=tasks)
    started = msg.Started(attempt=attempt, pids=PIDS)
    effects = ranks.on_host_message(msg.Started(attempt=attempt, pids=PIDS), 3.0)
    assert effects == [do.Send(started), do.Beat(attempt, PIDS)]
    assert ranks.state == "running"
    return ranks


def finished() -> Ranks:
    ranks = running()
    effects = ranks.on_host_message(msg.Finished(attempt=1), 4.0)
    assert effects == [do.Beat(1, PIDS), do.Send(msg.Finished(attempt=1))]
    assert (ranks.state, ranks.pids) == ("finished", ())
    return ranks


def stopped(attempt: int = 1, port: int = 0) -> do.Send:
    return do.Send(msg.Stopped(attempt=attempt, store_port=port))


def host_died(attempt: int = 1) -> do.Send:
    return do.Send(
        msg.Failed(
            attempt=attempt, rank=-1, exit_code=-9, error="TorchrunHostDied", oom_kills=0, shm_used=0.5,
            message="the node's torchrun host ended (code -9) and took its ranks along",
        )
    )  # fmt: skip


def test_ranks_are_stopped_and_the_next_attempt_starts() -> None:
    ranks = running()
    assert ranks.on_stop(1, 4.0) == [do.StopRanks(1)]
    assert ranks.on_stop(1, 4.1) == [], "once is enough"
    assert ranks.on_host_message(msg.Ready(store_port=4001), 5.0) == [do.Beat(1, PIDS), stopped(1, 4001)]
    assert (ranks.state, ranks.wake_at) == ("waiting", do.NEVER)
    order = launch(2)
    assert ranks.on_launch(order, 6.0) == [do.Prepare(order)]
    assert ranks.on_node_prepared(2, 6.5) == [do.StartRanks(order, cold=False)]
    ranks.check()


@pytest.mark.parametrize("make", [warm, finished])
def test_who_has_no_ranks_answers_a_stop_at_once_and_every_time(make: Callable[[], Ranks]) -> None:
    ranks = make()
    if make is finished:
        assert ranks.on_host_message(msg.Ready(store_port=PORT), 5.0) == [], "there was no word to wait for"
    for _ in range(2):
        assert ranks.on_stop(1, 6.0) == [stopped(1, PORT)]
    assert ranks.on_stop(ranks.attempt, 7.0) == [stopped(ranks.attempt, PORT)]


def test_the_way_back_of_the_host_of_finished_ranks_is_news_to_who_has_asked() -> None:
    ranks = finished()
    assert ranks.on_stop(1, 5.0) == [stopped(1)]
    assert ranks.state == "warming"
    assert ranks.on_host_message(msg.Ready(store_port=4001), 6.0) == [do.Send(msg.Ready(store_port=4001))]


def test_ranks_that_finish_while_they_are_stopped_are_told_as_both() -> None:
    ranks = running()
    ranks.on_stop(1, 4.0)
    assert do.Send(msg.Finished(attempt=1)) in ranks.on_host_message(msg.Finished(attempt=1), 4.1)
    assert stopped(1, 4001) in ranks.on_host_message(msg.Ready(store_port=4001), 4.2)
    ranks.check()


def test_a_host_that_does_not_stop_its_ranks_is_killed() -> None:
    ranks = running()
    ranks.on_stop(1, 4.0)
    at = ranks.wake_at
    assert at == 4.0 + GRACE_S + machine.STOP_MARGIN_S
    assert ranks.on_time(at - 0.1) == []
    assert ranks.on_time(at) == [do.KillRanks(PIDS), do.KillHost()]
    assert ranks.wake_at == do.NEVER
    ended = ranks.on_host_ended(-9, EVIDENCE, at + 0.1)
    assert ended == [do.KillRanks(PIDS), stopped(), do.StartHost()], "no failure: it was asked for"
    assert ranks.on_host_message(msg.Ready(store_port=5), at + 9.0) == [do.Send(msg.Ready(store_port=5))]


def test_ranks_are_looked_at_before_they_are_stopped() -> None:
    ranks = running()
    assert ranks.on_stop(1, 4.0, stacks=True) == [do.TakeStacks(1, PIDS)]
    assert ranks.on_stop(1, 4.5, stacks=True) == []
    assert ranks.on_stacks_taken(1, 5.0) == [do.StopRanks(1)]
    assert ranks.on_stacks_taken(1, 5.1) == []
    assert ranks.wake_at == 5.0 + GRACE_S + machine.STOP_MARGIN_S


def test_stacks_that_never_come_do_not_keep_the_ranks() -> None:
    ranks = running()
    ranks.on_stop(1, 4.0, stacks=True)
    assert ranks.on_time(ranks.wake_at) == [do.StopRanks(1)]
    assert ranks.on_stacks_taken(1, 9.0) == []


def test_stacks_of_ranks_that_have_ended_meanwhile_stop_nothing() -> None:
    ranks = running()
    ranks.on_stop(1, 4.0, stacks=True)
    ranks.on_host_message(msg.Ready(store_port=4001), 4.5)
    ranks.on_launch(launch(2), 4.6)
    ranks.on_node_prepared(2, 4.7)
    assert ranks.on_stacks_taken(1, 5.0) == []
    assert ranks.wake_at == do.NEVER


def test_a_launch_that_is_old_or_was_stopped_already_is_none() -> None:
    ranks = running(3)
    for attempt in (1, 2, 3):
        assert ranks.on_launch(launch(attempt), 4.0) == []
    ranks.on_stop(5, 4.0)
    assert ranks.known == 3, "its ranks are still of this one"
    ranks.on_host_message(msg.Ready(store_port=4001), 5.0)
    assert ranks.known == 5, "the next supervisor may not know that this number is used"
    assert ranks.on_launch(launch(5), 6.0) == []
    assert ranks.on_launch(launch(4), 6.0) == []
    assert ranks.state == "waiting"


def test_a_stop_of_an_attempt_that_was_replaced_does_not_touch_the_new_one() -> None:
    ranks = running(3)
    assert ranks.on_stop(2, 4.0) == []
    assert ranks.state == "running"


def test_a_stop_while_room_is_made_is_answered_and_the_host_never_hears_of_it() -> None:
    ranks = warm()
    ranks.on_launch(launch(1), 2.0)
    assert ranks.on_stop(1, 2.1) == [stopped(1, PORT)]
    assert ranks.on_node_prepared(1, 2.2) == []
    assert ranks.state == "waiting"


def test_a_stop_for_an_attempt_whose_launch_was_lost_ends_what_runs_and_says_so() -> None:
    ranks = running(1)
    assert ranks.on_stop(2, 4.0) == [do.StopRanks(1)]
    assert stopped(2, 4001) in ranks.on_host_message(msg.Ready(store_port=4001), 5.0)


@pytest.mark.parametrize("make", [starting, running])
def test_ranks_that_a_newer_attempt_has_replaced_are_stopped_and_the_node_may_serve_again(
    make: Callable[[int], Ranks],
) -> None:
    ranks = make(3)
    for not_newer in (None, 0, 2, 3):
        assert ranks.on_newest_attempt(not_newer, 9.0) == []
    assert ranks.on_newest_attempt(4, 10.0) == [do.StopRanks(3)], "and nothing else: images stay"
    assert ranks.on_newest_attempt(4, 10.1) == [], "once is enough"
    assert stopped(3, 4001) in ranks.on_host_message(msg.Ready(store_port=4001), 11.0)
    assert (ranks.state, ranks.on_newest_attempt(4, 11.1)) == ("waiting", [])
    order = launch(5)
    assert ranks.on_launch(order, 12.0) == [do.Prepare(order)]
    ranks.check()


def test_a_launch_that_a_newer_attempt_has_replaced_starts_nothing() -> None:
    ranks = warm()
    ranks.on_launch(launch(3), 2.0)
    assert ranks.on_newest_attempt(4, 2.1) == [stopped(3, PORT)]
    assert ranks.on_node_prepared(3, 2.2) == []
    behind = running(3)
    behind.on_launch(launch(4), 4.0)
    assert behind.on_newest_attempt(4, 4.1) == [], "it waits for the ranks before it"
    assert behind.on_newest_attempt(5, 4.2) == []
    assert stopped(4, 4001) in behind.on_host_message(msg.Ready(store_port=4001), 5.0)


def test_ranks_that_do_not_end_when_they_are_replaced_are_killed() -> None:
    ranks = running(3)
    ranks.on_newest_attempt(4, 10.0)
    assert ranks.on_time(10.0 + GRACE_S + machine.STOP_MARGIN_S) == [do.KillRanks(PIDS), do.KillHost()]


def test_a_launch_waits_for_the_ranks_before_it() -> None:
    """Their stop was lost."""
    ranks, order = running(1), launch(2)
    assert ranks.on_launch(order, 4.0) == [do.StopRanks(1)]
    ranks.check()
    effects = ranks.on_host_message(msg.Ready(store_port=4001), 5.0)
    assert effects == [do.Beat(1, PIDS), do.Prepare(order)]
    assert ranks.on_node_prepared(2, 6.0) == [do.StartRanks(order, cold=False)]


def test_a_launch_waits_for_a_host_on_its_way() -> None:
    ranks, order = Ranks(GRACE_S), launch(4)
    ranks.begin(0.0)
    assert ranks.on_launch(order, 1.0) == [do.Prepare(order)]
    assert ranks.on_node_prepared(4, 2.0) == []
    assert ranks.on_host_message(msg.Ready(store_port=PORT), 3.0) == [do.StartRanks(order, cold=False)]


def test_rank_0_does_not_start_when_its_store_went_with_the_host_before() -> None:
    ranks = warm(port=4001)
    ranks.on_launch(launch(2, rank=0, port=PORT), 2.0)
    failed, answer = ranks.on_node_prepared(2, 3.0)
    assert isinstance(failed, do.Send)
    assert isinstance(failed.message, msg.Failed)
    assert (failed.message.attempt, failed.message.error) == (2, "TorchrunHostDied")
    assert answer == stopped(2, 4001)
    ranks = warm(port=4001)
    ranks.on_launch(launch(2, rank=0, port=4001), 2.0)
    assert ranks.on_node_prepared(2, 3.0) == [do.StartRanks(launch(2, rank=0, port=4001), cold=False)]


def test_a_host_that_dies_under_its_ranks_is_a_failure() -> None:
    ranks = running()
    ended = ranks.on_host_ended(-9, EVIDENCE, 4.0)
    assert ended == [do.KillRanks(PIDS), host_died(), stopped(), do.StartHost()]
    assert ranks.state == "warming"


def test_a_host_that_dies_before_it_has_started_ranks_is_one_as_well() -> None:
    assert starting().on_host_ended(-9, EVIDENCE, 4.0) == [host_died(), stopped(), do.StartHost()]
    ranks = warm()
    ranks.on_launch(launch(1), 2.0)
    assert ranks.on_host_ended(-9, EVIDENCE, 4.0) == [host_died(), stopped(), do.StartHost()]
    assert ranks.on_node_prepared(1, 5.0) == [], "that was told"


def test_a_host_that_dies_without_ranks_is_no_failure() -> None:
    assert warm().on_host_ended(1, EVIDENCE, 4.0) == [stopped(0), do.StartHost()]
    ranks = Ranks(GRACE_S)
    ranks.begin(0.0)
    assert ranks.on_host_ended(1, EVIDENCE, 1.0) == [do.StartHost()], "nobody thinks that it waits"


def test_ranks_that_have_finished_stay_so_when_their_host_dies() -> None:
    ranks = finished()
    ranks.on_host_message(msg.Ready(store_port=4001), 5.0)
    assert ranks.on_host_ended(1, EVIDENCE, 6.0) == [do.StartHost()]
    assert (ranks.state, ranks.store_port) == ("finished", 0)


def test_a_host_that_dies_again_and_again_is_given_up() -> None:
    ranks = warm()
    for _ in range(machine.HOST_RESTARTS_MAX):
        assert ranks.on_host_ended(1, EVIDENCE, 5.0)[-1] == do.StartHost()
    leaving = msg.Leaving(why=f"the torchrun host died {machine.HOST_RESTARTS_MAX + 1} times")
    assert ranks.on_host_ended(1, EVIDENCE, 6.0) == [do.Send(leaving), do.Leave()]
    said = {**EVIDENCE, "log": "ImportError: libx.so"}
    leaving = msg.Leaving(why=f"the torchrun host died {machine.HOST_RESTARTS_MAX + 1} times: {said['log']}")
    assert ranks.on_host_ended(1, said, 6.0) == [do.Send(leaving), do.Leave()]


def test_a_host_that_has_started_ranks_counts_anew() -> None:
    ranks = warm()
    for attempt in range(1, 2 * machine.HOST_RESTARTS_MAX):
        ranks.on_host_message(msg.Ready(store_port=PORT), 2.0)
        ranks.on_launch(launch(attempt), 2.0)
        ranks.on_node_prepared(attempt, 2.0)
        ranks.on_host_message(msg.Started(attempt=attempt, pids=PIDS), 3.0)
        assert ranks.on_host_ended(-9, EVIDENCE, 4.0)[-1] == do.StartHost()


def test_a_failed_rank_is_told_with_what_the_node_shows() -> None:
    ranks = running()
    failed = msg.Failed(attempt=1, rank=3, exit_code=-9)
    told = msg.Failed(attempt=1, rank=3, exit_code=-9, oom_kills=2, shm_used=0.1, log="")
    evidence = {"oom_kills": 2, "shm_used": 0.1, "log": ""}
    assert ranks.on_rank_failed(failed, evidence, 4.0) == [do.Beat(1, PIDS), do.Send(told)]
    assert ranks.on_host_message(msg.Ready(store_port=7), 5.0) == [do.Beat(1, PIDS), stopped(1, 7)]


def test_what_the_end_of_the_job_explains_is_no_failure() -> None:
    ranks = running()
    ranks.on_sigterm()
    assert ranks.on_rank_failed(msg.Failed(attempt=1, rank=0, exit_code=-15), {}, 4.0) == [do.Beat(1, PIDS)]
    assert ranks.on_host_message(msg.Ready(store_port=7), 5.0) == [do.Beat(1, PIDS)]
    ranks = running()
    ranks.on_sigterm()
    ranks.on_stop(1, 4.5)
    assert stopped(1, 7) in ranks.on_host_message(msg.Ready(store_port=7), 5.0), "the supervisor waits for it"


def test_ranks_that_exit_with_0_at_a_sigterm_have_not_ended_the_training() -> None:
    """They have saved, and a requeued job goes on from there."""
    ranks, finished = running(), msg.Finished(attempt=1)
    ranks.on_sigterm()
    assert ranks.on_host_message(finished, 4.0) == [do.Beat(1, PIDS)]
    before = ranks.state
    assert not any(isinstance(one, do.Send) for one in ranks.on_host_ended(0, {}, 4.5)), (
        "they had ended before"
    )
    assert ranks.on_job_goes_on() == [do.Send(finished)]
    assert (before, ranks.state) == ("running", "finished"), (
        "nor does a supervisor that comes before learn it"
    )


def test_ranks_that_had_ended_before_a_sigterm_have_ended_for_the_next_supervisor() -> None:
    """The one that they told of it may have died before it heard that."""
    ranks = running()
    ranks.on_host_message(msg.Finished(attempt=1), 4.0)
    ranks.on_sigterm()
    assert (ranks.state, ranks.unexplained) == ("finished", True)


def test_a_failure_after_a_sigterm_is_told_once_the_job_is_known_to_go_on() -> None:
    """It was a stray signal: otherwise nobody would ever hear of the end of these ranks."""
    ranks = running()
    ranks.on_sigterm()
    failed = msg.Failed(attempt=1, rank=0, exit_code=1)
    ranks.on_rank_failed(failed, {}, 4.0)
    ranks.on_host_message(msg.Ready(store_port=7), 5.0)
    assert ranks.on_job_goes_on() == [do.Send(failed), stopped(1, 7)]
    assert ranks.on_job_goes_on() == []
    assert do.Send(failed) in ranks.on_rank_failed(failed, {}, 6.0), "it counts at once again"


def test_how_tasks_ended_is_kept_for_every_supervisor() -> None:
    """But for what the end of the job may explain: such tasks begin anew."""
    ranks, failed = running(tasks=True), msg.Failed(attempt=1, rank=1, exit_code=3)
    done, late = msg.Finished(attempt=1, ranks=(0,)), msg.Finished(attempt=1, ranks=(2,))
    assert ranks.on_host_message(done, 4.0) == [do.Beat(1, PIDS), do.Send(done)]
    assert ranks.state == "running", "others run on"
    ranks.on_rank_failed(failed, {}, 4.1)
    ranks.on_sigterm()
    ranks.on_host_message(late, 4.2)
    assert ranks.ended == {0: done, 1: failed}
    ranks.on_job_goes_on()
    ranks.on_host_message(msg.Ready(store_port=7), 5.0)
    ranks.on_launch(launch(2), 6.0)
    assert ranks.ended == {0: done, 1: failed, 2: late}
    training = running()
    training.on_rank_failed(failed, {}, 4.0)
    assert (training.ended, training.group_made) == ({1: failed}, False), "that of its newest attempt"
    training.on_host_message(msg.Ready(store_port=7), 5.0)
    training.on_launch(launch(2), 6.0)
    assert training.ended == {}
    training.on_rank_event(within.GroupMade(), 7.0)
    assert training.group_made


def test_a_launch_after_a_sigterm_shows_that_the_job_goes_on() -> None:
    ranks = running()
    ranks.on_sigterm()
    ranks.on_rank_failed(msg.Failed(attempt=1, rank=0, exit_code=1), {}, 4.0)
    ranks.on_host_message(msg.Ready(store_port=7), 5.0)
    ranks.on_launch(launch(2), 6.0)
    failed = msg.Failed(attempt=2, rank=0, exit_code=1)
    assert do.Send(failed) in ranks.on_rank_failed(failed, {}, 7.0)
    assert ranks.on_job_goes_on() == []


def test_only_ranks_that_run_are_looked_at() -> None:
    assert running().on_look(msg.Look(attempt=1, number=5), 4.0) == [do.LookAtRanks(5, PIDS)]
    assert running().on_look(msg.Look(attempt=2, number=5), 4.0) == []
    assert starting().on_look(msg.Look(attempt=1, number=5), 4.0) == []


def test_a_supervisor_knows_of_cold_starts_on_other_nodes() -> None:
    ranks = warm()
    ranks.on_launch(launch(1, cold=True), 2.0)
    assert ranks.on_node_prepared(1, 2.0) == [do.StartRanks(launch(1, cold=True), cold=True)]


def test_the_host_learns_of_a_signal_that_ranks_catch() -> None:
    """They may leave, some before others, and it must not end the others for that."""
    event = within.Warned()
    assert running().on_rank_event(event, 4.0) == [
        do.Send(msg.RankEvent(attempt=1, event=event)), do.PartRanks(1)
    ]  # fmt: skip


def test_a_script_that_cannot_use_what_was_loaded_ahead_starts_cold_from_then_on() -> None:
    ranks = running()
    event = within.ColdStart(why="a fork is of no use", seconds=2.0)
    assert ranks.on_rank_event(event, 4.0) == [do.Send(msg.RankEvent(attempt=1, event=event))]
    ranks.on_host_message(msg.Ready(store_port=PORT), 5.0)
    ranks.on_launch(launch(2), 6.0)
    assert ranks.on_node_prepared(2, 6.0) == [do.StartRanks(launch(2), cold=True)]


def test_ranks_have_the_time_that_an_order_gives_them() -> None:
    """A function's, say, for what it keeps before its job is requeued; else what the policy gives."""
    for grace_s, given_s in ((60.0, 60.0), (1.0, GRACE_S), (0.0, GRACE_S)):
        ranks = running()
        assert ranks.on_stop(1, 10.0, grace_s=grace_s) == [do.StopRanks(1, grace_s, spare=not grace_s)]
        assert ranks.on_time(10.0 + given_s) == []
        assert ranks.on_time(10.0 + given_s + machine.STOP_MARGIN_S) != []
