"""Every order to leave can be hurried, repeated or revoked, also by way of another supervisor, and every end
leaves an outcome that is read rightly: each pair of orders, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from msgspec import structs

from jurymast.core.judges import explained
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, End, Journal, Send, WhyEnding
from jurymast.core.state.run import Phase
from jurymast.core.supervision.departure import (
    CLEAR_LIMIT_S,
    KEPT_STILL_S,
    KILL_WAIT_S,
    LEAVE_LIMIT_S,
    RESERVE_S,
    SPARED_S,
    Departure,
)
from jurymast.core.supervision.machine import Supervision
from support.stories import Story
from support.successor import Successor, image, sent_home, written

# What is longer than KillWait, and short enough to be simulated for each pair.
GRACE_S, STILL_S = 40.0, 20.0


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for how in KEPT_STILL_S:
        monkeypatch.setitem(KEPT_STILL_S, how, STILL_S)


class Leaving:
    """A run of two nodes and a spare, whose newest checkpoint is in memory only. Storage is slow: nothing is
    written unless `progress` is told, and Slurm answers as it is `asked`."""

    def __init__(self) -> None:
        self.story = Story(active=2, spares=1).running()
        self.effects: list[Effect] = []
        self.takes_over()

    def takes_over(self) -> None:
        """Another supervisor, which knows only the journal, and asks the agents and Slurm."""
        self.after = Successor(self.story)
        for rank, node in enumerate(self.story.state.placement):
            ranks = {"ranks": "running", "attempt": 1} if self.story.state.phase is Phase.RUNNING else {}
            copies = (image(rank), image(1 - rank, "peer"))
            self.did(self.after.joins(node, copies=copies, **ranks))
        for node in self.story.state.nodes:
            if node not in self.story.state.placement:
                self.did(self.after.joins(node))

    @property
    def machine(self) -> Supervision:
        return self.after.machine

    @property
    def departure(self) -> Departure:
        return self.machine.departure

    def did(self, effects: list[Effect]) -> None:
        self.effects += effects
        self.machine.check()

    def waits(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds)):
            if End() in self.effects:
                return
            self.did(self.after.waits(1.0))

    def says(self, why: str, kill_in_s: float | None = KILL_WAIT_S) -> None:
        by = "scancel" if why == "cancelled" else ""
        self.did(self.machine.on_end_explained(WhyEnding(), why, by, self.story.t, kill_in_s))

    def asks(self, what: str) -> None:
        _, effects = self.machine.on_request(msg.Ask(what=what, by="ada"), self.story.t)
        self.did(effects)

    @property
    def home(self) -> bool:
        return sent_home(self.effects)


def warning(run: Leaving) -> None:
    run.did(run.machine.on_warning(run.story.t))


def sigterm(run: Leaving) -> None:
    """Slurm does not answer."""
    run.did(run.machine.on_sigterm(run.story.t))


def agents_sigterm(run: Leaving) -> None:
    for node in run.story.state.placement:
        run.did(run.after.hears(node, msg.Terminated()))


def stray(run: Leaving) -> None:
    sigterm(run)
    run.says("running", None)


def ended_by_slurm(why: str, kill_in_s: float = KILL_WAIT_S) -> Callable[[Leaving], None]:
    def order(run: Leaving) -> None:
        sigterm(run)
        run.says(why, kill_in_s)

    order.__name__ = why
    return order


def user_cancel(run: Leaving) -> None:
    run.asks("cancel")


def requeue(run: Leaving) -> None:
    """The run's own: nodes are lost, and too few are left."""
    if run.story.state.phase is Phase.RUNNING:
        one, other = run.story.state.placement
        for node in run.story.state.nodes:
            if node not in (one, other):
                run.did(run.machine.record(ev.NodeLost(t=run.story.t, node=node, how="closed", silent_s=0.0)))
        run.did(run.machine.record(ev.NodeLost(t=run.story.t, node=other, how="closed", silent_s=0.0)))
        run.did(run.machine.record(ev.WorkersStopped(t=run.story.t, node=one, attempt=1, store_port=1)))
        run.waits(explained.LIMIT_S)


def script_ends(run: Leaving) -> None:
    for node in run.story.state.placement:
        run.did(run.machine.record(ev.NodeFinished(t=run.story.t, node=node, attempt=1)))


def takeover(run: Leaving) -> None:
    run.takes_over()


preempted = ended_by_slurm("preempted", GRACE_S + KILL_WAIT_S)
timeout, cancelled, requeued = (ended_by_slurm(why) for why in ("timeout", "cancelled", "requeued"))
# Who wants the nodes back for good, and what the run is then.
FINAL = {
    preempted: "requeued", timeout: "failed", cancelled: "cancelled", requeued: "requeued",
    user_cancel: "cancelled", requeue: "requeued", script_ends: "succeeded",
}  # fmt: skip
PASSING = (warning, sigterm, agents_sigterm, stray, takeover)
ORDERS = [*PASSING, *FINAL]


def names(order: Callable[[Leaving], None]) -> str:
    return order.__name__


def state_of(run: Leaving) -> str:
    """What the outcome says."""
    return "requeued" if run.departure.requeues else str(run.story.state.public_state)


@pytest.mark.parametrize("second", ORDERS, ids=names)
@pytest.mark.parametrize("first", ORDERS, ids=names)
def test_each_pair_of_orders(first: Callable[[Leaving], None], second: Callable[[Leaving], None]) -> None:
    run = Leaving()
    first(run)
    run.waits(2.0)
    second(run)
    finals = [order for order in (first, second) if order in FINAL]
    if not finals or (second is stray and first in (preempted, requeued)):  # Slurm has changed its mind
        run.waits(KILL_WAIT_S + SPARED_S + 2.0)
        assert not run.home
        assert not run.departure.begun, "it goes on"
        assert run.story.state.phase is Phase.RUNNING
        return
    forgotten = second is takeover and first in (preempted, requeued)
    if forgotten:  # only Slurm knows, and is asked by the new supervisor
        assert WhyEnding() in run.after.effects
        run.says(first.__name__, GRACE_S)
    run.waits(GRACE_S + KILL_WAIT_S + STILL_S + LEAVE_LIMIT_S)
    assert run.home, "the nodes are kept for ever"
    assert End() in run.effects
    assert state_of(run) in {FINAL[order] for order in finals}
    if first is requeue and second in (timeout, cancelled, user_cancel):
        assert state_of(run) == FINAL[second], "nobody would ever start it again"
    ended = [e for e in run.effects if isinstance(e, Journal) and isinstance(e.event, ev.AllocationEnded)]
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("order", "least", "most"),
    [(timeout, 20, KILL_WAIT_S - 5), (cancelled, 20, KILL_WAIT_S - 5),
     (preempted, GRACE_S + KILL_WAIT_S - 10, GRACE_S + KILL_WAIT_S - 5),
     (user_cancel, KILL_WAIT_S, KILL_WAIT_S), (requeue, 0, 0)],
    ids=lambda value: value.__name__ if callable(value) else "",
)  # fmt: skip
def test_ranks_have_slurms_grace_less_what_the_last_checkpoint_took(
    order: Callable[[Leaving], None], least: float, most: float
) -> None:
    """A script may save when it gets a SIGTERM. Slurm's was 3 s before the order to leave."""
    run = Leaving()
    order(run)
    run.waits(3.0)
    (one, write), (other, _) = written(run.effects).items()
    for phase in list(msg.WritePhase)[1:-1]:
        for node in (one, other) if phase is msg.WritePhase.ANNOUNCE else (one,):
            run.did(run.after.hears(node, msg.WriteReached(id=write.id, phase=phase)))
    for node in (other, one):
        run.did(run.after.hears(node, msg.Written(id=write.id, tier="shared", ok=True, size_bytes=9, why="")))
    run.waits(1.0)
    leave = [e.message for e in run.effects if isinstance(e, Send) and isinstance(e.message, msg.Leave)]
    assert leave
    assert all(least <= one.grace_s <= most for one in leave), leave
    run.waits(least - 2.0 if least else LEAVE_LIMIT_S + 1.0)
    assert (End() in run.effects) == (order is requeue), "agents are waited for while their ranks save"


def test_a_second_cancel_does_not_wait_for_ranks_that_save() -> None:
    run = Leaving()
    user_cancel(run)
    user_cancel(run)
    run.waits(1.0)
    assert run.home
    user_cancel(run)
    run.waits(LEAVE_LIMIT_S + 1.0)
    assert End() in run.effects


def test_agents_of_a_run_that_is_over_have_time_to_clear_their_disks() -> None:
    run = Leaving()
    script_ends(run)
    run.waits(STILL_S + 1.0)
    assert run.home
    run.waits(LEAVE_LIMIT_S + 2.0)
    assert End() not in run.effects
    run.waits(CLEAR_LIMIT_S)
    assert End() in run.effects


@pytest.mark.parametrize("own", [requeue, script_ends, user_cancel], ids=names)
@pytest.mark.parametrize("times", [1, 2])
def test_slurms_order_hurries_a_departure_of_the_run_s_own(
    own: Callable[[Leaving], None], times: int
) -> None:
    """It was ignored, and the job killed with no outcome."""
    run = Leaving()
    own(run)
    run.waits(1.0)
    for _ in range(times):
        timeout(run)
        assert not run.home
    run.waits(KILL_WAIT_S - 1.0)
    assert End() in run.effects, "killed without an outcome"


def test_the_end_of_a_grace_time_hurries_what_had_more_time() -> None:
    run = Leaving()
    preempted(run)
    run.waits(5.0)
    assert not run.home, "there is more time"
    sigterm(run)  # whoever preempts may end it sooner; Slurm does not answer any more
    run.waits(KILL_WAIT_S - 1.0)
    assert End() in run.effects


def test_slurms_signal_hurries_agents_that_wait_for_ranks_to_save() -> None:
    run = Leaving()
    user_cancel(run)
    user_cancel(run)
    run.waits(1.0)
    assert run.home, "for whose ranks a cancelled run has as long as a cancelled job"
    timeout(run)
    run.waits(KILL_WAIT_S - RESERVE_S - 1.0)
    assert End() not in run.effects, "ranks still have time before Slurm kills them"
    run.waits(RESERVE_S)
    assert End() in run.effects, "killed without an outcome"


def test_slurms_answer_to_a_repeated_signal_gives_back_the_time_that_there_is() -> None:
    run = Leaving()
    preempted(run)
    sigterm(run)  # Slurm signals more than once
    run.says("preempted", GRACE_S + KILL_WAIT_S)
    run.waits(KILL_WAIT_S + 20.0)
    assert not run.home


def test_an_unexplained_signal_has_the_newest_checkpoint_written_at_once() -> None:
    run = Leaving()
    first = next(iter(written(run.effects).values()))  # of the state that the agents told of
    for node in run.story.state.placement:
        run.did(run.after.hears(node, msg.Written(id=first.id, tier="shared", ok=True, size_bytes=9, why="")))
    for rank, node in enumerate(run.story.state.placement):
        held = msg.Held(copies=(structs.replace(image(rank), step=16),))
        run.did(run.after.hears(node, held))
    run.effects.clear()
    sigterm(run)
    assert {order.step for order in written(run.effects).values()} == {16}


def test_all_agents_signals_are_one_question_to_slurm() -> None:
    run = Leaving()
    run.effects.clear()
    agents_sigterm(run)
    agents_sigterm(run)
    assert sum(isinstance(one, WhyEnding) for one in run.effects) == 1


def test_slurm_that_says_later_that_the_job_goes_on_revokes_the_departure() -> None:
    run = Leaving()
    agents_sigterm(run)
    run.did(run.machine.on_end_explained(WhyEnding("n2", 1), "unknown", "", run.story.t))
    assert run.departure.begun
    run.says("running", None)
    assert not run.departure.begun
    assert not run.machine.watch.ending
    assert run.story.state.phase is Phase.RUNNING
    run.waits(60.0)
    assert not run.home


@pytest.mark.parametrize("explained_before", [False, True])
def test_agents_with_a_signal_are_told_when_the_job_goes_on(explained_before: bool) -> None:
    """Until then they tell of no failure of their ranks."""
    run = Leaving()
    agents_sigterm(run)
    if explained_before:  # Slurm revokes what it ordered
        run.says("preempted", GRACE_S)
    run.effects.clear()
    run.says("running", None)
    goes_on = [one.node for one in run.effects if isinstance(one, Send) and one.message == msg.JobGoesOn()]
    assert goes_on == sorted(run.story.state.placement)
    run.effects.clear()
    run.says("running", None)
    assert not run.effects, "told twice"


def test_a_node_that_goes_after_its_agents_signal_was_taken_and_has_not_failed() -> None:
    run = Leaving()
    node, _ = run.story.state.placement
    run.did(run.after.hears(node, msg.Terminated()))
    run.did(run.machine.on_end_explained(WhyEnding(node, 1), "running", "", run.story.t))
    assert run.story.state.phase is Phase.RUNNING, "it may have been a stray signal"
    run.did(run.after.hears(node, msg.Leaving(why="")))
    (lost,) = run.story.state.findings.lost
    assert lost.how == "taken"


def test_a_write_that_makes_progress_keeps_the_nodes_and_one_that_makes_none_does_not() -> None:
    run = Leaving()
    run.effects.clear()
    requeue(run)
    run.waits(6.0)
    ((node, order),) = written(run.effects).items()
    for _ in range(5):
        run.did(run.after.hears(node, msg.WriteProgress(id=order.id, size_bytes=9)))
        run.waits(STILL_S - 5.0)
        assert not run.home
    run.waits(STILL_S + 2.0)
    assert run.home


def test_a_user_gives_up_the_wait_for_the_last_checkpoint_by_a_second_cancel() -> None:
    run = Leaving()
    for _ in range(2):
        assert not run.home
        run.asks("cancel")
        run.waits(1.0)
    assert run.home
