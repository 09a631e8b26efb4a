"""The machine of what a node writes, and of what it foresees."""

from __future__ import annotations

from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import NodeWrites
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from support.node_model import launch


def write(id: str, tier: str = im.SHARED) -> msg.Write:
    return msg.Write(id=id, tier=tier, step=10, attempt=1, ranks=(0,), world=2)


def cancelled(id: str) -> do.Obey:
    return do.Obey(msg.CancelWrite(id=id))


def test_a_new_write_to_a_tier_voids_the_one_before() -> None:
    writes = NodeWrites(1)
    assert writes.on_write(write("a")) == [do.Obey(write("a"))]
    assert writes.on_write(write("b", im.LOCAL)) == [do.Obey(write("b", im.LOCAL))]
    assert writes.on_write(write("c")) == [cancelled("a"), do.Obey(write("c"))]
    writes.check()
    assert writes.on_write(write("d")) == [cancelled("c"), do.Obey(write("d"))], "a knows it"
    for id in "acd":
        writes.on_write_ended(id)
    assert writes.on_cancel_write("b") == [cancelled("b")]
    assert writes.on_cancel_write("b") == []
    writes.on_write_ended("b")
    assert writes.on_cancel_write("b") == []
    writes.check()


def test_an_order_that_comes_twice_is_one_write() -> None:
    writes = NodeWrites(1)
    writes.on_write(write("a"))
    assert writes.on_write(write("a")) == []
    assert writes.on_cancel_write("a") == [cancelled("a")], "and it can be cancelled"
    writes.on_write_ended("a")
    assert writes.on_write(write("a")) == [], "its end is said again, too"


def test_sizes_are_told_once_all_ranks_of_the_node_have_foreseen_theirs() -> None:
    writes = NodeWrites(2)
    writes.on_launch(launch(1))
    assert writes.on_rank_event(within.Foreseen(local_rank=1, image_bytes=10, own_bytes=3)) == []
    assert writes.on_rank_event(within.Foreseen(local_rank=1, image_bytes=11, own_bytes=4)) == []
    told = writes.on_rank_event(within.Foreseen(local_rank=0, image_bytes=5, own_bytes=2))
    assert told == [do.SayForeseen(16, 6)]
    writes.on_launch(launch(2))
    assert writes.on_rank_event(within.Foreseen(local_rank=0, image_bytes=5, own_bytes=2)) == []


def test_only_the_node_of_rank_0_warms_its_writer_and_once() -> None:
    event = within.CheckpointsKept(directory="/shared", keep=2)
    lead, other = NodeWrites(1), NodeWrites(1)
    lead.on_launch(launch(1, rank=0))
    other.on_launch(launch(1, rank=1))
    assert lead.on_rank_event(event) == [do.WarmWriter()]
    assert lead.on_rank_event(event) == []
    assert other.on_rank_event(event) == []
    other.on_launch(launch(2, rank=0))
    assert other.on_rank_event(event) == [do.WarmWriter()]
