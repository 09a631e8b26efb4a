"""Who is slow, and whether a swap pays: the judgement over step times, and the state machine around it."""

from __future__ import annotations

import mmap
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.core.judges import stragglers
from jurymast.core.judges.stragglers import Mean, Slow, Stragglers, Windows, slowest
from jurymast.core.state import events as ev
from jurymast.core.state import within
from jurymast.core.state.effects import Effect, Journal, RaiseAlert, Record, SaveFirst
from jurymast.core.state.messages import Times, beat_of
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import Settings
from jurymast.core.supervision.machine import Supervision
from jurymast.worker.link import SLOT_BYTES, Link, read_slot
from support.stories import Story

FACTOR = 1.5
NOISE = st.floats(0.85, 1.15)


def step_means(own_s: list[float], ranks_per_node: int = 1, common_s: float = 0.01) -> list[Mean]:
    """As a synchronous step makes them: whoever is done sooner waits in backward for the slowest."""
    longest_s = max(own_s)
    return [
        Mean(rank, f"n{rank // ranks_per_node}", one_s, longest_s - one_s + common_s)
        for rank, one_s in enumerate(own_s)
    ]


@given(own_s=st.lists(NOISE, min_size=2, max_size=40))
def test_nobody_is_blamed_while_all_are_alike(own_s: list[float]) -> None:
    assert slowest(step_means(own_s), FACTOR) is None


@given(
    own_s=st.lists(NOISE, min_size=2, max_size=40),
    which=st.integers(0, 39),
    scale_s=st.sampled_from([0.001, 0.1, 20.0]),
    slowness=st.floats(2.0, 10.0),
)
def test_a_rank_that_is_twice_as_slow_is_always_found(
    own_s: list[float], which: int, scale_s: float, slowness: float
) -> None:
    which %= len(own_s)
    own_s = [scale_s * one_s for one_s in own_s]
    own_s[which] = slowness * scale_s
    found = slowest(step_means(own_s), FACTOR)
    assert found is not None
    assert (found.rank, found.ranks) == (which, (which,))
    assert found.slowness == pytest.approx(slowness, rel=0.2)
    assert found.lost_s == pytest.approx(own_s[which] - max(s for i, s in enumerate(own_s) if i != which))


@given(own_s=st.lists(NOISE, min_size=2, max_size=40), slowness=st.floats(1.0, 10.0))
def test_slow_everywhere_blames_nobody(own_s: list[float], slowness: float) -> None:
    assert slowest(step_means([slowness * one_s for one_s in own_s]), FACTOR) is None


@given(own_s=st.lists(NOISE, min_size=3, max_size=20), slowness=st.floats(2.0, 10.0))
def test_of_two_equally_slow_nodes_neither_is_blamed(own_s: list[float], slowness: float) -> None:
    assert slowest(step_means([slowness, slowness, *own_s]), FACTOR) is None


def test_a_slow_node_is_told_from_a_slow_rank() -> None:
    whole = slowest(step_means([1.0] * 8 + [3.0] * 8, ranks_per_node=8), FACTOR)
    single = slowest(step_means([1.0] * 15 + [3.0], ranks_per_node=8), FACTOR)
    assert whole is not None
    assert single is not None
    assert (whole.node, whole.ranks) == ("n1", tuple(range(8, 16)))
    assert (single.node, single.ranks) == ("n1", (15,))
    assert slowest(step_means([1.0] * 7 + [3.0], ranks_per_node=8), FACTOR) is None, "no other node"


def test_what_nobody_waits_for_is_no_straggler() -> None:
    """Hidden behind the work of a GPU: all ranks are equally long in backward."""
    means = [Mean(rank, f"n{rank}", 3.0 if rank == 2 else 1.0, 5.0) for rank in range(4)]
    assert slowest(means, FACTOR) is None


def test_a_spread_that_is_wide_anyway_makes_nobody_an_outlier() -> None:
    assert slowest(step_means([0.2, 0.6, 1.0, 1.4, 1.8, 2.2]), FACTOR) is None


# Over several windows.


class Training:
    """Three ranks on three nodes that report every two seconds."""

    def __init__(self) -> None:
        self.windows = Windows(3, FACTOR)
        self.timed = [Times(0, 0.0, 0.0, 0.0)] * 3

    def go_on(self, seconds: float, own_s: list[float]) -> list[tuple[Slow, float]]:
        told = []
        step_s = max(own_s) + 0.01
        steps = max(1, int(2.0 / step_s))
        for _ in range(int(seconds / (steps * step_s))):
            for rank, one_s in enumerate(own_s):
                was = self.timed[rank]
                self.timed[rank] = Times(
                    was.steps + steps,
                    was.forward_s + steps * 0.9 * one_s,
                    was.backward_s + steps * (step_s - one_s),
                    was.update_s + steps * 0.1 * one_s,
                )
                found = self.windows.report(rank, f"n{rank}", self.timed[rank])
                told += [found] if found else []
        return told


def test_slowness_must_last_and_is_told_again_ever_more_rarely() -> None:
    training = Training()
    assert training.go_on(60, [0.1, 0.1, 0.1]) == []
    assert training.go_on(15, [0.1, 0.1, 0.4]) == [], "not long enough"
    assert training.go_on(30, [0.1, 0.1, 0.1]) == []
    told = training.go_on(200, [0.1, 0.1, 0.4])
    assert 2 <= len(told) <= 4
    slow, since_s = told[0]
    assert (slow.rank, slow.node) == (2, "n2")
    assert slow.slowness == pytest.approx(4.0, rel=0.05)
    assert 25 < since_s < 50
    assert told[-1][1] >= 2 * since_s


def test_a_window_has_enough_steps_too() -> None:
    """One rank's evaluation of five minutes lies in a single window of steps."""
    training = Training()
    training.go_on(300, [10.0, 10.0, 10.0])
    assert training.go_on(300, [10.0, 10.0, 310.0]) == []
    assert training.go_on(600, [10.0, 10.0, 10.0]) == []


def test_another_node_begins_anew() -> None:
    training = Training()
    assert [training.go_on(12, own_s) for own_s in ([0.1, 0.1, 0.4], [0.4, 0.1, 0.1], [0.1, 0.4, 0.1])] == [
        [], [], [],
    ]  # fmt: skip


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_that_is_slow_from_the_start_where_no_other_has_an_equal_place_is_slow_by_design(
    slow: int,
) -> None:
    """Rank 0 logs; the last stage of a pipeline has more to do. In a later attempt, on other nodes, too."""
    own_s = [0.4 if rank == slow else 0.1 for rank in range(3)]
    training = Training()
    assert training.go_on(300, own_s) == []
    ordinary = training.windows._ordinary
    again = Training()
    again.windows = Windows(3, FACTOR, ordinary)
    assert again.go_on(300, own_s) == []


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_in_such_a_place_that_was_faster_on_its_earlier_node_is_slow(slow: int) -> None:
    training = Training()
    assert training.go_on(60, [0.1, 0.1, 0.1]) == []
    again = Training()
    again.windows = Windows(3, FACTOR, training.windows._ordinary)
    told = again.go_on(120, [0.4 if rank == slow else 0.1 for rank in range(3)])
    assert {one.rank for one, _ in told} == {slow}


def test_a_rank_with_equals_is_slow_from_the_start() -> None:
    told = Training().go_on(120, [0.1, 0.4, 0.1])
    assert {one.rank for one, _ in told} == {1}


# What the run does about it.


def straggling(story: Story, *, rank: int = 1, **values: Any) -> ev.Straggling:
    """The rank's own part is 0.8 s of a step of 1 s, the others' 0.3 s."""
    story.t += 30.0
    numbers = {"slowness": 2.7, "own_s": 0.8, "typical_s": 0.3, "since_s": 30.0, "lost_s": 0.5, "step_s": 1.0}
    return ev.Straggling(
        t=story.t, attempt=story.state.attempt, node=story.state.placement[rank], rank=rank,
        evidence="slow", **{**numbers, **values},
    )  # fmt: skip


def test_a_straggler_is_swapped_and_becomes_a_suspect() -> None:
    story = Story(active=3).running(100).saved(90)
    slow = story.state.placement[1]
    story.feed(straggling(story))
    story.stopped()
    incident = story.incident
    assert (incident.cause, incident.action, incident.node, incident.rank) == ("straggler", "swap", slow, 1)
    assert incident.charged == "nobody"
    assert "a swap pays off" in incident.reason
    assert "its slowness costs 30 min (50 %) in the next 60 min, and a swap costs about" in incident.reason
    assert story.state.nodes[slow].role is Role.SUSPECT
    assert slow not in story.state.placement
    story.recovered(90, 120)
    assert story.incident.recovered_at is not None


@pytest.mark.parametrize(
    ("settings", "spares", "values", "why"),
    [
        (Settings(bad_nodes="report"), 1, {}, "only reports"),
        (Settings(), 0, {}, "no spare is ready"),
        (Settings(), 1, {"lost_s": 0.002}, "would not pay"),
    ],
)
def test_what_keeps_a_straggler_in_is_noted(
    settings: Settings, spares: int, values: dict[str, Any], why: str
) -> None:
    story = Story(active=3, spares=spares, settings=settings).running(100).saved(90)
    assert story.feed(straggling(story, **values)) == []
    assert story.state.incidents == []
    assert why in story.state.notes[-1][1]


class Beats:
    """Three nodes with a rank each; that of the second one needs longer for its own part of each step."""

    def __init__(self, **settings: Any) -> None:
        self.story = Story(active=3, settings=Settings(**settings)).running(100).saved(90)
        self.stragglers = Stragglers(self.story.state)
        self.steps = 0
        self.effects: list[Effect] = []

    def goes_on(self, steps: int, attempt: int | None = None) -> None:
        for _ in range(steps):
            self.steps += 10
            self.story.t += 10.0
            for rank, node in enumerate(self.story.state.placement):
                own_s = self.steps * (0.8 if rank == 1 else 0.3)
                times = [Times(self.steps, own_s, self.steps - own_s, 0.0)]
                beat = beat_of(self.story.state.attempt if attempt is None else attempt, [], None, times)
                self.effects += self.stragglers.beat(node, beat, self.story.t)


def test_what_is_to_be_swapped_is_saved_first() -> None:
    beats = Beats()
    slow = beats.story.state.placement[1]
    beats.goes_on(2)
    assert beats.effects == [], "it must last"
    while not beats.effects:
        beats.goes_on(1)
    (save,) = beats.effects
    assert isinstance(save, SaveFirst)
    assert slow in save.why
    beats.goes_on(20)
    assert {one.why for one in beats.effects if isinstance(one, SaveFirst)} == {save.why}
    assert isinstance(save.then, ev.Straggling)
    assert save.then.node == slow


def test_a_save_that_is_under_way_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(active=3).running(100).saved(90)
    supervision, asked = Supervision(story.state, "/runs/a", story.t), list[str]()

    def save_to_move(why: str, limit_s: float, now: float) -> bool:
        asked.append(why)
        return True

    monkeypatch.setattr(supervision.agreement, "save_to_move", save_to_move)
    older, newer = straggling(story, lost_s=0.1), straggling(story, lost_s=0.2)
    for event in (older, newer):
        supervision._do([SaveFirst("the swap", event)], story.t)
    assert asked == ["the swap"]
    assert not story.state.findings.straggling
    effects = supervision._saved_first("the swap", True, story.t + 9.0)
    (told,) = (one.event for one in effects if isinstance(one, Journal))
    assert isinstance(told, ev.Straggling)
    assert (told.lost_s, told.t) == (0.2, story.t + 9.0)


def test_a_straggler_that_stays_is_told_at_once() -> None:
    beats = Beats(bad_nodes="report")
    while not beats.effects:
        beats.goes_on(1)
    (told,) = beats.effects
    assert isinstance(told, Record)
    assert isinstance(told.event, ev.Straggling)


def test_times_of_another_attempt_or_phase_are_nobody_s() -> None:
    other = Beats()
    other.goes_on(20, attempt=other.story.state.attempt + 1)
    off = Beats(straggler=0.0)
    off.goes_on(20)
    stopping = Beats()
    stopping.story.state.phase = Phase.STOPPING
    stopping.goes_on(20)
    assert other.effects == off.effects == stopping.effects == []


def test_steps_that_would_be_done_again_count_against_a_swap() -> None:
    story = Story(active=3).running(4000).saved(1)
    event = straggling(story, lost_s=0.1)
    pays, arithmetic = stragglers.worth(story.state, event)
    assert not pays, arithmetic
    assert stragglers.worth(story.state, event, saved=True)[0]


def test_what_a_script_saves_by_itself_is_not_known() -> None:
    """It may have to do half an hour again, at most; after a minute, a minute."""
    story = Story(active=3).allocated().ranks_up().stepped(1, absolute=False).stepped(120, absolute=False)
    event = straggling(story)
    assert stragglers.worth(story.state, event) == (
        True,
        "its slowness costs 30 min (50 %) in the next 60 min, and a swap costs about 119.6 s "
        "(60.0 s restart, 59.6 s done again)",
    )
    story.stepped(7200, absolute=False)
    assert not stragglers.worth(story.state, straggling(story, lost_s=0.4))[0]


def test_a_restart_costs_what_the_runs_own_have_cost() -> None:
    story = Story(active=3).running(100).saved(90)
    story.failed(0)
    story.stopped().recovered(90, 200)
    assert "(1.5 s restart" in stragglers.worth(story.state, straggling(story))[1]


def test_a_place_that_stays_slow_is_the_datas_or_the_codes() -> None:
    story = Story(active=3, spares=2, settings=Settings(excluded_fraction=0.4)).running(100).saved(90)
    first = story.state.placement[1]
    story.feed(straggling(story))
    story.stopped().recovered(90, 200)
    told = story.feed(straggling(story))
    assert [type(instruction) for instruction in told] == [RaiseAlert]
    assert f"rank 1 was slow on {first} as well, so the data or the code is slow" in told[0].reason
    assert not story.state.blames, "the node that was swapped is acquitted"
    assert story.state.nodes[first].role is Role.SPARE
    assert "cleared" in story.state.nodes[first].reason
    assert len(story.state.incidents) == 1
    story.feed(straggling(story, rank=2))
    assert len(story.state.incidents) == 2, "another place may still be swapped"


def test_late_and_foreign_words_change_nothing() -> None:
    story = Story(active=3).running(100).saved(90)
    event = straggling(story)
    story.failed(0)
    assert story.feed(event) == []
    story.stopped().recovered(90, 120)
    assert story.feed(event) == [], "of an earlier attempt"


def test_a_rank_that_failed_by_itself_meanwhile_is_the_cause() -> None:
    story = Story(active=3).running(100).saved(90)
    story.feed(straggling(story))
    story.failed(0)
    story.stopped()
    assert story.incident.cause == "worker_exception"


# Measured in a rank.


def test_a_heartbeat_has_the_times_now_and_then() -> None:
    memory = RankMemory(2)
    watch = RankWatch(memory)
    for local_rank in range(2):
        Link(memory.page, "", local_rank).timed(3, 1.5, 0.25, 0.125 * local_rank)
    assert watch.times() == [(3, 1.5, 0.25, 0.0), (3, 1.5, 0.25, 0.125)]
    assert watch.times() is None
    assert [(beat.step, beat.settled) for beat in memory.beats()] == [(0, 0), (0, 0)]
    memory.page.close()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> tuple[mmap.mmap, Callable[..., None]]:
    """The page that a rank beats into, and one step of it with so many backwards."""
    torch = pytest.importorskip("torch")
    from torch.optim import optimizer as hooks

    from jurymast.worker.hooks import watch_steps

    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(hooks, "_global_optimizer_pre_hooks", OrderedDict())
    monkeypatch.setattr(hooks, "_global_optimizer_post_hooks", OrderedDict())
    page = mmap.mmap(-1, SLOT_BYTES)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    watch_steps(Link(page, "", 0))

    class Slowly(torch.autograd.Function):  # type: ignore[misc, name-defined]
        @staticmethod
        def forward(_ctx: object, value: object) -> object:
            return value

        @staticmethod
        def backward(_ctx: object, gradient: object) -> object:
            spend(0.04)
            return gradient

    def step(backwards: int = 1) -> None:
        for _ in range(backwards):
            spend(0.02)
            Slowly.apply(weight * 1.0).sum().backward()
        optimizer.step()

    return page, step


def spend(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.torch
@pytest.mark.parametrize("backwards", [0, 1, 3])
def test_parts_of_real_steps(steps: tuple[mmap.mmap, Callable[..., None]], backwards: int) -> None:
    page, step = steps
    began = time.monotonic()
    for _ in range(4):
        step(backwards)
    lasted_s = time.monotonic() - began
    count, forward_s, backward_s, update_s = read_slot(page, 0).timed
    assert count == 3, "the first has no beginning"
    assert read_slot(page, 0).beats == 4
    assert forward_s >= 3 * backwards * 0.02
    assert backward_s >= 3 * backwards * 0.04
    assert forward_s + backward_s + update_s <= lasted_s
    if not backwards:
        assert backward_s == 0.0


@pytest.mark.torch
def test_real_steps_without_a_backward_are_told(
    steps: tuple[mmap.mmap, Callable[..., None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[within.FromRank] = []
    monkeypatch.setattr(Link, "emit", lambda _link, message: told.append(message))
    for _ in range(30):
        steps[1](0)
    assert told == [within.LossNotFinite(step=24, loss=within.NONE, of=within.GRADIENT)]


@pytest.mark.torch
def test_an_optimizer_that_takes_over_counts_and_one_beside_it_only_lives(
    steps: tuple[mmap.mmap, Callable[..., None]],
) -> None:
    import torch

    from jurymast.worker.hooks import TAKES_OVER

    page, step = steps
    step()
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    before = read_slot(page, 0)
    for _ in range(5):
        other.step()
    beside = read_slot(page, 0)
    assert beside.beats == before.beats == 1
    assert beside.phase_at > before.phase_at
    for _ in range(TAKES_OVER + 10):  # the second stage of a training
        other.step()
    assert read_slot(page, 0).beats >= 10


def test_a_rank_that_is_slow_wherever_it_runs_is_on_no_bad_node() -> None:
    """Though it was not swapped for that on its first node, but lost its node for another reason."""
    story = Story(active=3, spares=2, settings=Settings(straggler=1.5)).running(100).saved(90)
    first = story.state.placement[1]
    story.feed(straggling(story, lost_s=0.001))
    assert not story.state.incidents, "a swap does not pay"
    story.lost(first)
    story.stopped().recovered(90, 200)
    assert story.state.placement[1] != first
    (told,) = story.feed(straggling(story))
    assert isinstance(told, RaiseAlert)
    assert f"rank 1 was slow on {first} as well" in told.reason
    assert len(story.state.incidents) == 1
