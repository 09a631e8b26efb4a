"""When the supervisor believes that ranks hang: silence, and looks at their stacks on all nodes."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from jurymast.core.judges.silence import LOOK_AGAIN_S, UNMOVED_S, WatcherClock
from jurymast.core.judges.stacks import CODE, COLLECTIVE
from jurymast.core.nodes.hangs import Hangs, Reports
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.evidence import RankPlace
from jurymast.core.state.messages import beat_of
from jurymast.core.state.run import Phase
from support.reports import reported
from support.stories import Story

TICK_S = 0.1


class Silent:
    """A run of two nodes with a rank each whose ranks have been idle for long. `answers` says what each
    node's agent sees at a look, or None when it says nothing."""

    def __init__(self) -> None:
        self.story = Story(active=2).running(30)
        self.state = self.story.state
        self.clock = WatcherClock(TICK_S, 0.0)
        self.reports = Reports(self.state, self.clock)
        self.hangs = Hangs(self.state, self.reports)
        self.fed: list[ev.Event] = []
        self.answers: dict[str, tuple[str, str] | None] = dict.fromkeys(self.state.placement)
        self.asked = self.number = 0  # of the newest question
        for node in self.state.placement:
            self.reports.expect(node)

    def does(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                self.fed.append(effect.event)
                continue
            assert isinstance(effect, Send)
            look = effect.message
            assert isinstance(look, msg.Look)
            self.asked, self.number = self.asked + 1, look.number
            answer = self.answers[effect.node]
            if answer is not None:
                stands = {self.state.placement.index(effect.node): RankPlace(*answer, answer[1])}
                self.hangs.on_looked(msg.Looked(attempt=look.attempt, number=look.number, stands=stands))

    def passes(
        self, seconds: float, quiet_s: float = 60.0, *, ended: bool = False, gone: Collection[str] = ()
    ) -> bool:
        """True when a hang was told of by then. `ended`: the last rank has come to its end; `gone`: nodes
        without ranks, of which nothing is reported."""
        for _ in range(round(seconds / TICK_S)):
            self.clock.now += TICK_S
            for node in self.state.placement:
                phase = "done" if ended and node == self.state.placement[-1] else "stepping"
                silent = reported(quiet_s=quiet_s, beat_s=quiet_s, longest_s=0.5, idle_s=quiet_s, phase=phase)
                self.reports.on_heartbeat(node, beat_of(self.state.attempt, [] if node in gone else [silent]))
            self.does(self.hangs.on_time(self.story.t))
            if any(isinstance(event, ev.RanksHung) for event in self.fed):
                return True
        return False


def test_ranks_that_step_are_not_looked_at() -> None:
    silent = Silent()
    assert not silent.passes(20.0, quiet_s=0.3)
    assert silent.asked == 0


def test_ranks_that_step_are_not_examined_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of nodes that would take the supervisor half of its time."""
    silent = Silent()
    examined: list[object] = []
    monkeypatch.setattr("jurymast.core.nodes.hangs.RankView", lambda *fields, **_: examined.append(fields))
    assert not silent.passes(5.0, quiet_s=0.3)
    assert examined == []


def test_all_in_collectives_is_a_hang_within_seconds() -> None:
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in all_reduce at a.py:1"))
    assert silent.passes(4 * LOOK_AGAIN_S)
    (hung,) = [event for event in silent.fed if isinstance(event, ev.RanksHung)]
    assert "all ranks waited for each other" in hung.evidence


def test_people_are_told_that_ranks_are_silent_before_it_is_a_hang() -> None:
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in barrier at a.py:30"))
    silent.answers[silent.state.placement[1]] = (CODE, "in upload at a.py:26")
    assert not silent.passes(1.0, quiet_s=0.3)
    assert silent.hangs.silent == silent.hangs.quiet() == ""
    assert not silent.passes(UNMOVED_S / 2)
    assert silent.hangs.silent == (
        "no step for 60 s (normally 500 ms): rank 1 in upload at a.py:26, rank 0 in barrier at a.py:30"
    )
    assert silent.hangs.late == (1,)
    left_s = silent.hangs.restart_at - silent.story.t
    assert 29 <= left_s / 60 <= 31, "torch's own time-out ends such a wait first"
    assert silent.hangs.quiet() == "no step for 60 s (normally 500 ms)", "also where it cannot be a hang yet"
    assert not silent.passes(1.0, quiet_s=0.3)
    assert silent.hangs.silent == "", "they step again"


def test_a_rank_that_waits_for_a_service_while_the_others_wait_for_it_goes_on() -> None:
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in barrier at a.py:30"))
    silent.answers[silent.state.placement[0]] = (CODE, "in sleep at a.py:26")
    assert not silent.passes(190.0)


@pytest.mark.parametrize("seen_to_end", [False, True])
def test_where_silent_ranks_were_is_known_though_one_fails_before_they_count_as_hanging(
    seen_to_end: bool,
) -> None:
    """torch's time-out ends the wait of one: the others are stopped at once."""
    silent = Silent()
    waits, works = (COLLECTIVE, "in barrier at a.py:30"), (CODE, "in sleep at a.py:26")
    silent.answers = dict(zip(silent.state.placement, (works, waits), strict=True))
    assert not silent.passes(20.0)
    assert silent.hangs.seen(silent.story.t) == [], "nothing has failed"
    assert not silent.passes(0.5, ended=seen_to_end)
    silent.story.failed(1, error="RuntimeError", message="Timed out waiting 12000ms for recv operation")
    silent.does(silent.hangs.seen(silent.story.t))
    told = [(e.node, e.ranks, e.kinds, e.places) for e in silent.fed if isinstance(e, ev.StacksTaken)]
    assert told == [
        (node, (rank,), (kind,), (text,))
        for rank, (node, (kind, text)) in enumerate(zip(silent.state.placement, (works, waits), strict=True))
    ]
    assert silent.hangs.seen(silent.story.t) == [], "the next one that fails tells nothing new"


def test_a_longer_time_out_that_the_script_gave_its_groups_is_waited_for_in_that_attempt() -> None:
    """Also by a supervisor that takes over, which knows the journal only."""
    silent = Silent()
    story, state = silent.story, silent.state

    def given(seconds: float, attempt: int) -> None:
        story.feed(ev.TimeOutSet(t=story.t, attempt=attempt, rank=0, seconds=seconds))

    def restarts_in_min() -> float:
        silent.hangs = Hangs(state, silent.reports)
        silent.answers = dict.fromkeys(state.placement, (COLLECTIVE, "in barrier at a.py:30"))
        silent.answers[state.placement[1]] = (CODE, "in upload at a.py:26")
        assert not silent.passes(UNMOVED_S / 2)
        return (silent.hangs.restart_at - story.t) / 60

    for seconds in (7200.0, 3600.0):
        given(seconds, attempt=state.attempt)
        assert 119 <= restarts_in_min() <= 121
    story.failed(0)
    story.stopped()
    story.ranks_up().stepped(31)
    given(7200.0, attempt=1)
    assert 29 <= restarts_in_min() <= 31, "the script may have been changed"


@pytest.mark.parametrize("said", [None, 0, 1, 2])
def test_a_heartbeat_that_contradicts_itself_says_no_progress(said: int | None) -> None:
    """One rank, and what so many have said of their steps."""
    silent = Silent()
    trained = None if said is None else [msg.Trained(samples=7)] * said
    for node in silent.state.placement:
        silent.reports.on_heartbeat(node, beat_of(silent.state.attempt, [reported()], trained=trained))
    reach = silent.reports.reach()
    assert (None if reach is None else reach.samples) == {None: 0, 0: None, 1: 7, 2: None}[said]


def test_a_step_that_was_long_once_does_not_delay_for_ever_how_soon_a_hang_is_found() -> None:
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in all_reduce at a.py:1"))

    def attempt(longest_s: float) -> None:
        report = reported(quiet_s=0.3, beat_s=0.3, longest_s=longest_s, idle_s=0.0, phase="stepping")
        for node in silent.state.placement:
            silent.reports.on_heartbeat(node, beat_of(silent.state.attempt, [report]))
        silent.reports.attempt_over()

    attempt(1800.0)
    attempt(0.0)  # which has not come to a step
    assert not silent.passes(20.0), "a step may be as long again"
    for _ in range(8):
        attempt(0.5)
    assert silent.passes(20.0)


def test_a_hang_that_comes_back_is_found_in_twice_the_time_each_time() -> None:
    """Stacks that do not move, though not all ranks wait for each other: two minutes, then four."""
    for patience, at_least_s, at_most_s in ((1.0, 120.0, 135.0), (2.0, 240.0, 255.0)):
        silent = Silent()
        silent.state.hang_patience = patience
        silent.answers = dict.fromkeys(silent.state.placement, (CODE, "in upload at a.py:1"))
        assert not silent.passes(at_least_s)
        assert silent.passes(at_most_s - at_least_s)


def test_a_rank_that_moves_is_waited_for_and_looked_at_seldom() -> None:
    silent = Silent()
    one, other = silent.state.placement
    silent.answers[one] = (COLLECTIVE, "in all_reduce at a.py:1")
    for second in range(300):
        silent.answers[other] = (CODE, f"{second}")
        assert not silent.passes(1.0)
    assert silent.asked < 2 * 300 / 4


def test_an_agent_that_gives_no_answer_cannot_hide_a_hang() -> None:
    silent = Silent()
    silent.answers[silent.state.placement[0]] = (COLLECTIVE, "in all_reduce at a.py:1")
    assert not silent.passes(UNMOVED_S)
    assert silent.passes(30.0)


def test_silence_without_any_answer_is_a_hang_too_but_not_one_silence_after_another() -> None:
    silent = Silent()
    for _ in range(5):
        assert not silent.passes(UNMOVED_S / 2)
        assert not silent.passes(1.0, quiet_s=0.3)
    assert silent.passes(UNMOVED_S + 30.0)


def test_a_node_whose_ranks_have_ended_is_not_waited_for() -> None:
    silent = Silent()
    one, other = silent.state.placement
    silent.answers[one] = (COLLECTIVE, "in all_reduce at a.py:1")
    silent.state.finished.add(other)
    assert silent.passes(4 * LOOK_AGAIN_S)


def test_answers_to_an_older_question_or_of_another_attempt_do_not_count() -> None:
    silent = Silent()
    late = {place: RankPlace(COLLECTIVE, "in all_reduce at a.py:1") for place in range(2)}
    for _ in range(30):
        assert not silent.passes(1.0)
        now, number = silent.state.attempt, silent.number
        for attempt, of in ((now, number - 1), (now - 1, number), (now + 1, number)):
            silent.hangs.on_looked(msg.Looked(attempt=attempt, number=of, stands=late))


def test_only_ranks_that_run_hang() -> None:
    silent = Silent()
    silent.state.phase = Phase.STOPPING
    assert not silent.passes(2 * UNMOVED_S)
    assert silent.asked == 0


def test_ranks_that_still_save_when_others_have_left_after_a_signal_do_not_hang() -> None:
    """They caught it. One rank may have nothing to save, and another save for as long as Slurm leaves it."""
    for caught, ended, hangs in [(True, True, False), (True, False, True), (False, True, True)]:
        silent = Silent()
        silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in all_reduce at a.py:1"))
        if caught:
            silent.story.feed(ev.Signalled(t=silent.story.t, signal=ev.CAUGHT))
        assert silent.passes(60.0, quiet_s=5000.0, ended=ended) is hangs, (caught, ended)


def test_who_takes_over_finds_a_hang_where_the_ranks_of_a_node_ended_before() -> None:
    """That node reports no ranks any more."""
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in all_reduce at a.py:1"))
    gone = silent.state.placement[-1]
    silent.story.feed(ev.NodeFinished(t=silent.story.t, node=gone, attempt=1))
    assert silent.passes(60.0, quiet_s=5000.0, gone=[gone])
    assert silent.reports.ended(silent.story.t) == {silent.state.places[gone]: True}


def test_ranks_that_train_on_after_a_signal_hang_like_others() -> None:
    """As those of a script that saves at it, days before."""
    silent = Silent()
    silent.answers = dict.fromkeys(silent.state.placement, (COLLECTIVE, "in all_reduce at a.py:1"))
    silent.story.feed(ev.Signalled(t=silent.story.t - 1000.0, signal=ev.CAUGHT))
    assert silent.passes(60.0, quiet_s=5000.0, ended=True)
