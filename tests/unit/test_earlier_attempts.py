"""What is said of an earlier attempt comes too late, whoever says it, and changes nothing.

JURYMAST_FUZZ=N has N examples of each instead of a few."""

from __future__ import annotations

import copy
import os
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jurymast.core.agent import effects as do
from jurymast.core.agent.ranks import Ranks
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Effect, Journal, Send
from jurymast.core.state.run import Phase, RunState
from support.node_model import launch
from support.stories import Story
from support.successor import Successor

EXAMPLES = int(os.environ.get("JURYMAST_FUZZ", "40"))
NODES = st.sampled_from(["n1", "n2", "n3", "n9"])
FEW = {
    "node": NODES, "tier": st.sampled_from(["memory", "shared"]), "rank": st.integers(-1, 2),
    "local_rank": st.integers(0, 1), "seconds": st.floats(0.0, 1e6), "ranks": st.just((0, 1)),
    "flights": st.just(()), "stands": st.just({}),
}  # fmt: skip
# What a word of an earlier attempt tells rightly: the port of a node whose host waits now, what was saved and
# what that cost, that a script cannot be started warm, where it saves.
STILL_TRUE = {
    ev.WorkersStopped: {"nodes"}, ev.Saved: {"saved", "saved_step", "save_failures", "stalls"},
    ev.ColdStart: {"cold"}, ev.SavesTo: {"checkpoints"},
}  # fmt: skip
OF_ATTEMPTS = [kind for kind in ev.KINDS.values() if "attempt" in kind.__struct_fields__]
SAID = [msg.Started, msg.Failed, msg.Stopped, msg.Finished, msg.Looked, msg.Stacks, msg.Unrestorable]
SAID_BY_RANKS = get_args(within.ForSupervisor)


def values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name in FEW:
        return FEW[name]
    plain: dict[Any, st.SearchStrategy[Any]] = {int: st.integers(0, 100), float: st.floats(0.0, 1e6)}
    return plain[hint] if hint in plain else st.from_type(hint)


@st.composite
def some(draw: st.DrawFn, kind: type[Any], known: dict[str, Any]) -> Any:
    """With values that may mean something in `second_attempt`, and those that are `known`."""
    hints = get_type_hints(kind)
    return kind(**{
        name: known[name] if name in known else draw(values(name, hint)) for name, hint in hints.items()
    })  # fmt: skip


def second_attempt(phase: str) -> Story:
    story = Story().running(40)
    story.failed(0)
    story.stopped().backed_off()
    if phase != "launching":
        story.ranks_up().restored(40)
    if phase in ("training", "stopping"):
        story.stepped(41).stepped(50)
    if phase == "stopping":
        story.failed(1)
    assert story.state.attempt == 2
    return story


PHASES = pytest.mark.parametrize("phase", ["launching", "restored", "training", "stopping"])
EARLIER = st.integers(-1, 1)
FUZZ = settings(
    max_examples=max(EXAMPLES // 8, 1), deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def changed(before: RunState, after: RunState) -> set[str]:
    names = (field.name for field in fields(after))
    return {name for name in names if getattr(before, name) != getattr(after, name)} - {"now"}


@PHASES
@pytest.mark.parametrize("kind", OF_ATTEMPTS)
def test_an_event_of_an_earlier_attempt_decides_nothing(kind: type[ev.Event], phase: str) -> None:
    story = second_attempt(phase)

    @FUZZ
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        event = data.draw(some(kind, {"t": story.t, "attempt": data.draw(EARLIER)}))
        after = copy.deepcopy(story.state)
        assert step(after, event) == []
        assert changed(story.state, after) <= STILL_TRUE.get(kind, set())

    fuzz()


def orders_of(effects: list[Effect]) -> list[object]:
    """What is done, but that it is written down."""
    decided = [one for effect in effects if isinstance(effect, Journal) for one in effect.decided]
    return [*decided, *(effect for effect in effects if not isinstance(effect, Journal))]


@PHASES
@pytest.mark.parametrize("kind", [*SAID, *SAID_BY_RANKS])
def test_what_is_said_of_an_earlier_attempt_decides_nothing(kind: type[Any], phase: str) -> None:
    story = second_attempt(phase)

    @FUZZ
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        supervision = supervised(copy.deepcopy(story))
        state = copy.deepcopy(supervision.machine.state)
        attempt = data.draw(EARLIER)
        said = data.draw(some(kind, {"attempt": attempt}))
        message = said if kind in SAID else msg.RankEvent(attempt=attempt, event=said)
        effects = supervision.hears(data.draw(st.sampled_from(supervision.nodes)), message)
        assert orders_of(effects) == []
        of = next((type(effect.event) for effect in effects if isinstance(effect, Journal)), ev.Tick)
        assert changed(state, supervision.machine.state) <= STILL_TRUE.get(of, set())

    fuzz()


def supervised(story: Story) -> Successor:
    """A supervisor, with the agents of all nodes."""
    made = Successor(story)
    ranks: msg.RanksState = "running" if story.state.phase is Phase.RUNNING else "waiting"
    for node in story.state.placement:
        made.joins(node, attempt=2, ranks=ranks, pids=(1,))
    return made


@pytest.mark.parametrize(("attempt", "told"), [(0, False), (1, False), (2, True)])
def test_a_heartbeat_of_an_earlier_attempt_tells_no_progress(attempt: int, told: bool) -> None:
    supervision = supervised(second_attempt("training"))
    report = msg.RankReport(
        step=90, beats=90, explicit=True, phase="step", quiet_s=0.0, beat_s=0.0, longest_s=0.1, settled=0,
        idle_s=0.0, stopped_s=0.0,
    )  # fmt: skip
    for node in supervision.nodes:
        supervision.hears(node, msg.beat_of(attempt, [report]))
    supervision.machine.on_warning(supervision.story.t)
    supervision.machine.on_sigterm(supervision.story.t)  # now all is told
    assert (supervision.machine.state.step == 90) is told


@pytest.mark.parametrize("attempt", [0, 1])
def test_ranks_of_an_earlier_attempt_that_still_run_are_dismissed(attempt: int) -> None:
    supervision = Successor(second_attempt("training"))
    one, other = supervision.story.state.placement
    effects = supervision.joins(one, attempt=attempt, ranks="running", pids=(1,))
    assert orders_of(effects) == [Send(one, msg.Dismiss())]
    assert orders_of(supervision.joins(other, attempt=2, ranks="running", pids=(1,))) == []


def test_a_node_that_is_prepared_for_an_earlier_attempt_starts_no_ranks() -> None:
    ranks = Ranks(5.0)
    ranks.begin(0.0)
    ranks.on_host_message(msg.Ready(store_port=1), 1.0)
    assert ranks.on_launch(launch(2), 2.0) == [do.Prepare(launch(2))]
    assert ranks.on_launch(launch(3), 3.0) == [do.Prepare(launch(3))]
    assert ranks.on_node_prepared(2, 4.0) == []
    assert ranks.on_node_prepared(3, 5.0) == [do.StartRanks(launch(3), False)]


def test_an_order_about_an_earlier_attempt_is_not_carried_out() -> None:
    """By a supervisor that another has taken over from, say."""

    @FUZZ
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        ranks = Ranks(5.0)
        ranks.begin(0.0)
        ranks.on_host_message(msg.Ready(store_port=1), 1.0)
        ranks.on_launch(launch(3), 2.0)
        ranks.on_node_prepared(3, 2.0)
        if begun := data.draw(st.booleans()):
            ranks.on_host_message(msg.Started(attempt=3, pids=(1,)), 3.0)
        if begun and data.draw(st.booleans()):
            assert ranks.on_stop(3, 3.0, stacks=True) == [do.TakeStacks(3, (1,))]
        before = copy.deepcopy(vars(ranks))
        attempt = data.draw(st.integers(-1, 2))
        assert ranks.on_launch(launch(attempt), 4.0) == []
        assert ranks.on_stop(attempt, 4.0, stacks=data.draw(st.booleans())) == []
        assert ranks.on_look(msg.Look(attempt=attempt, number=1), 4.0) == []
        assert ranks.on_stacks_taken(attempt, 4.0) == []
        assert vars(ranks) == before
        ranks.check()

    fuzz()
