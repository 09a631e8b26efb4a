"""The machine of what a node writes, and of what it foresees."""

from __future__ import annotations

from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import NodeWrites
from jurymast.core.checkpoints import copies as cp
from support.node_model import launch


def write(id: str, tier: str = cp.SHARED) -> msg.Write:
    return msg.Write(id=id, tier=tier, step=10, attempt=1, ranks=(0,), world=2)


def test_a_new_write_to_a_tier_voids_the_one_before() -> None:
    writes = NodeWrites(1)
    assert writes.begin(write("a"), 1.0) == [do.StartWrite(write("a"))]
    assert writes.begin(write("b", cp.LOCAL), 1.0) == [do.StartWrite(write("b", cp.LOCAL))]
    assert writes.begin(write("c"), 2.0) == [do.CancelWrite("a"), do.StartWrite(write("c"))]
    writes.check()
    assert writes.begin(write("d"), 3.0) == [do.CancelWrite("c"), do.StartWrite(write("d"))], "a knows it"
    for id in "acd":
        assert writes.ended(id, 4.0) == []
    assert writes.cancel("b", 5.0) == [do.CancelWrite("b")]
    assert writes.cancel("b", 5.0) == []
    writes.ended("b", 6.0)
    assert writes.cancel("b", 6.0) == []
    writes.check()


def test_an_order_that_comes_twice_is_one_write() -> None:
    writes = NodeWrites(1)
    writes.begin(write("a"), 1.0)
    assert writes.begin(write("a"), 1.1) == []
    assert writes.cancel("a", 2.0) == [do.CancelWrite("a")], "and it can be cancelled"
    writes.ended("a", 3.0)
    assert writes.begin(write("a"), 4.0) == [], "its end is said again, too"


def test_sizes_are_told_once_all_ranks_of_the_node_have_foreseen_theirs() -> None:
    writes = NodeWrites(2)
    writes.launch(launch(1))
    assert writes.rank_said(within.Foreseen(local_rank=1, image_bytes=10, own_bytes=3), 1.0) == []
    assert writes.rank_said(within.Foreseen(local_rank=1, image_bytes=11, own_bytes=4), 1.0) == []
    told = writes.rank_said(within.Foreseen(local_rank=0, image_bytes=5, own_bytes=2), 1.0)
    assert told == [do.SayForeseen(16, 6)]
    writes.launch(launch(2))
    assert writes.rank_said(within.Foreseen(local_rank=0, image_bytes=5, own_bytes=2), 2.0) == []


def test_only_the_node_of_rank_0_warms_its_writer_and_once() -> None:
    event = within.CheckpointsKept(directory="/shared", keep=2)
    lead, other = NodeWrites(1), NodeWrites(1)
    lead.launch(launch(1, rank=0))
    other.launch(launch(1, rank=1))
    assert lead.rank_said(event, 1.0) == [do.WarmWriter()]
    assert lead.rank_said(event, 2.0) == []
    assert other.rank_said(event, 1.0) == []
    other.launch(launch(2, rank=0))
    assert other.rank_said(event, 3.0) == [do.WarmWriter()]
