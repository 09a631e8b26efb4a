"""Words that come over two connections, and orders that were lost with one: nothing is lost, nothing counts
twice."""

from __future__ import annotations

from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.nodes.acknowledgement import Disk
from jurymast.core.nodes.watch import RECONNECT_GRACE_S, SOON_S
from jurymast.core.state import events as ev
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import Answer, Effect, Journal, Record, Send
from jurymast.core.state.run import Phase
from jurymast.core.supervision.machine import Supervision
from support.reports import hello
from support.stories import Story


def running() -> tuple[Story, Supervision]:
    """Two nodes with ranks, connected."""
    story = Story(active=2, spares=0).running()
    supervision = Supervision(story.state, "/runs/a", story.t)
    supervision.start(story.t)
    for number, node in enumerate(story.state.placement, 1):
        joins(story, supervision, node, number)
    return story, supervision


def joins(
    story: Story, supervision: Supervision, node: str, number: int, ranks: msg.RanksState = "running"
) -> list[Effect]:
    known = story.state.nodes[node].incarnation
    said = hello(node, attempt=1, ranks=ranks, pids=(1,), incarnation=known)
    return supervision.on_agent_joined(node, number, said, story.t)


def failed(rank: int) -> msg.Failed:
    return msg.Failed(attempt=1, rank=rank, exit_code=1, error="ValueError", message="bad")


def saved(step: int) -> msg.RankEvent:
    event = within.Saved(step=step, tier="memory", ok=True, stall_s=0.1, size_bytes=1, error="")
    return msg.RankEvent(attempt=1, event=event)


def looks(story: Story, supervision: Supervision, seconds: float = 1.0) -> None:
    """All of the journal is on the disk, and no newer supervisor is found, again and again."""
    for _ in range(round(seconds / 0.1)):
        story.t += 0.1
        supervision.on_time(story.t, Disk(looked_at=story.t))


def answers(story: Story, supervision: Supervision, node: str, number: int) -> list[int]:
    looks(story, supervision, 2.0)
    effects = supervision.on_message(node, number, msg.Beat(1, []), story.t)
    return [effect.heard for effect in effects if isinstance(effect, Answer)]


def test_an_agent_is_told_how_much_was_heard_over_its_connection() -> None:
    story, supervision = running()
    node = story.state.placement[0]
    assert answers(story, supervision, node, 1) == [0]
    supervision.on_message(node, 1, saved(1), story.t)
    supervision.on_message(node, 1, msg.Held(copies=()), story.t)
    supervision.on_message(node, 1, saved(2), story.t)
    assert answers(story, supervision, node, 1) == [2]
    supervision.on_connection_closed(node, 1, story.t)
    joins(story, supervision, node, 7)
    supervision.on_message(node, 1, saved(3), story.t)
    assert answers(story, supervision, node, 7) == [0], "what came late over the older one will come again"


def test_only_what_every_later_supervisor_will_know_is_acknowledged() -> None:
    """This one may be replaced already: what it writes then does not count."""
    story, supervision = running()
    node = story.state.placement[0]
    supervision.on_message(node, 1, saved(1), story.t)
    looked_at = story.t
    for seconds in range(1, 4):
        supervision.on_time(story.t + seconds, Disk(appended=5, written=5, looked_at=looked_at))
    story.t += 3.0
    beat = msg.Beat(1, [])
    (answer,) = supervision.on_message(node, 1, beat, story.t)
    assert isinstance(answer, Answer)
    assert answer.heard == 0, "the newest look began before it was written"
    assert answers(story, supervision, node, 1) == [1]


def test_a_failure_that_is_said_twice_is_one() -> None:
    story, supervision = running()
    node = story.state.placement[1]
    supervision.on_message(node, 2, failed(1), story.t)
    supervision.on_connection_closed(node, 2, story.t)
    joins(story, supervision, node, 3, "waiting")
    supervision.on_message(node, 3, failed(1), story.t)
    assert (len(story.state.findings.failures), len(story.state.incidents)) == (1, 1)
    other = story.state.placement[0]
    supervision.on_message(other, 1, msg.Stopped(attempt=1, store_port=7), story.t)
    supervision.on_message(node, 3, failed(1), story.t)
    assert (len(story.state.incidents), story.state.phase) == (1, Phase.LAUNCHING)
    supervision.check()


def test_the_reason_stands_for_ranks_that_were_found_gone() -> None:
    """It was said over a connection that was dead already; the hello that comes before it knows no reason."""
    story, supervision = running()
    other, node = story.state.placement
    supervision.on_connection_closed(node, 2, story.t)
    joins(story, supervision, node, 3, "waiting")
    supervision.on_message(node, 3, msg.Failed(attempt=1, rank=1, exit_code=-11), story.t)
    supervision.on_message(other, 1, msg.Stopped(attempt=1, store_port=7), story.t)
    assert (story.incident.cause, story.incident.rank) == ("worker_crash", 1)


def test_a_restore_that_is_said_twice_is_one() -> None:
    story, supervision = running()
    node = story.state.placement[0]
    event = within.Restored(step=20, tier="memory", seconds=0.1, size_bytes=1)
    said = msg.RankEvent(attempt=1, event=event)
    lines = []
    for number in (1, 2):
        lines += supervision.on_message(node, number, said, story.t)
        supervision.on_connection_closed(node, number, story.t)
        joins(story, supervision, node, number + 1)
    assert [one.event.step for one in lines if isinstance(one, Journal)] == [20]  # type: ignore[attr-defined]


def test_a_save_that_is_said_twice_is_one() -> None:
    story, supervision = running()
    node = story.state.placement[0]
    for step in (20, 21, 20, 21, 22):
        supervision.on_message(node, 1, saved(step), story.t)
    assert len(story.state.stalls) + len(supervision._teller._usual) == 3


def test_a_write_whose_order_was_lost_is_ordered_again() -> None:
    story = Story(active=2, spares=0).running()
    checkpoints, nodes = Checkpoints(story.state), story.state.placement
    images = {
        node: msg.CopyReport(step=8, attempt=1, rank=rank, world=2, tier=im.MEMORY, part="all", size_bytes=9)
        for rank, node in enumerate(nodes)
    }
    effects: list[Effect] = []
    for node, image in images.items():
        effects += checkpoints.on_agent_joined(node, hello(node, copies=(image,)), story.t)
    orders = {
        one.node: one for one in effects if isinstance(one, Send) and isinstance(one.message, msg.Write)
    }
    first, second = nodes
    assert set(orders) == {first, second}
    assert orders[first] in checkpoints.on_agent_joined(first, hello(first, copies=(images[first],)), story.t)
    write = orders[first].message
    assert isinstance(write, msg.Write)
    done = msg.Written(id=write.id, tier=write.tier, ok=True)
    checkpoints.on_message(second, done, story.t)
    again = checkpoints.on_agent_joined(second, hello(second, copies=(images[second],)), story.t)
    assert orders[second] not in again, "it has said how that ended"
    of_an_earlier_try = msg.Written(id=f"{write.id}0", tier=write.tier, ok=True)
    assert checkpoints.on_message(first, of_an_earlier_try, story.t) == []
    assert checkpoints.on_message(second, msg.Written(id=write.id, tier=write.tier, ok=False), story.t) == []
    assert checkpoints.writes.any_under_way
    ended = checkpoints.on_message(first, done, story.t)
    assert [
        one.event.tier for one in ended if isinstance(one, Record) and isinstance(one.event, ev.Saved)
    ] == [im.SHARED]
    assert not checkpoints.writes.any_under_way


def test_who_does_not_come_back_is_lost_when_its_time_is_up_and_not_a_tick_later() -> None:
    story, supervision = running()
    story.stepped(1, 1.0)
    supervision.on_time(story.t)
    node, closed_at = story.state.placement[0], story.t
    steady_s = supervision.interval_s
    supervision.on_connection_closed(node, 1, closed_at, reset=True)
    joins(story, supervision, node, 3)
    assert supervision.interval_s == steady_s, "it is back"
    supervision.on_connection_closed(node, 3, closed_at, reset=True)
    assert supervision.steady
    while not story.state.findings.lost:
        assert 0.0 < supervision.interval_s < steady_s
        story.t += supervision.interval_s
        supervision.on_time(story.t)
    limit_s = RECONNECT_GRACE_S + story.state.settings.heartbeat_s
    assert limit_s < story.t - closed_at <= limit_s + SOON_S + 1e-6


def test_all_nodes_tell_of_a_signal_and_it_is_noted_once() -> None:
    story, supervision = running()
    warned = msg.RankEvent(attempt=1, event=within.Warned())
    noted: list[ev.Event] = []
    for number, node in enumerate(story.state.placement, 1):
        effects = supervision.on_message(node, number, warned, story.t)
        noted += [effect.event for effect in effects if isinstance(effect, Journal)]
    assert [event for event in noted if isinstance(event, ev.Signalled)] == [
        ev.Signalled(t=story.t, signal=ev.CAUGHT)
    ]
    assert story.state.warned == 1
