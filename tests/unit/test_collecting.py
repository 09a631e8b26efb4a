"""What another number of ranks saved is brought to every node's memory, or else to shared storage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jurymast.core.checkpoints.collecting import STILL_S
from jurymast.core.checkpoints.copies import RETRY_S, Copies, collectable, is_collected
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Launch
from jurymast.core.state.images import ALL, COMMON, LOCAL, MEMORY, OWN, PEER, Copy, StateId
from jurymast.core.state.messages import Room
from jurymast.core.state.run import RESTORE_TRIES, Phase
from support.site import ACTIVE, Site

KEY = StateId(20, 1)
PLENTY = Room(10_000, "memory.max")


def held(*places: tuple[str, int, str, str], common: str = "same") -> Copies:
    copies = Copies()
    for node, rank, tier, part in places:
        copies.hold(Copy(node, tier, *KEY, rank, 3, part, 100, 60 if common else 0, common))
    return copies


def test_a_node_lacks_what_it_has_not_in_memory_and_of_alike_parts_one_is_enough() -> None:
    copies = held(
        ("n1", 0, MEMORY, ALL), ("n1", 2, PEER, OWN), ("n2", 1, MEMORY, ALL), ("n1", 1, LOCAL, ALL),
        ("s1", 0, PEER, OWN),
    )  # fmt: skip
    assert copies.lacking(KEY, "n1") == [(1, OWN)], "the disk is no memory"
    assert copies.lacking(KEY, "n2") == [(0, OWN), (2, OWN)]
    assert copies.lacking(KEY, "n3") == [(0, ALL), (1, OWN), (2, OWN)]
    assert copies.lacking(KEY, "s1") == [(0, COMMON), (1, OWN), (2, OWN)]
    assert not is_collected(copies, KEY, ["n1"])
    copies.hold(Copy("n1", PEER, *KEY, 1, 3, OWN, 100, 60, "same"))
    assert is_collected(copies, KEY, ["n1"])
    assert not is_collected(copies, KEY, ["n1", "n2"])


def test_without_parts_that_are_alike_a_node_lacks_whole_images() -> None:
    copies = held(("n1", 0, MEMORY, ALL), ("n2", 1, MEMORY, ALL), ("n2", 2, PEER, OWN), common="")
    assert copies.lacking(KEY, "n2") == [(0, OWN)]
    assert copies.lacking(KEY, "n1") == [(1, OWN), (2, OWN)], "which is the same there"


def test_every_node_must_have_room_for_all_and_for_what_its_ranks_save_next() -> None:
    copies = held(("n1", 0, MEMORY, ALL), ("n2", 1, MEMORY, ALL), ("n1", 2, PEER, OWN))
    # n1 has 140 and lacks 40; of what its rank saves next two images have 60, and two own parts of 60 each.
    need = {"n1": 140 + 40 + 2 * (60 + 2 * 60), "n2": 100 + 80 + 2 * (60 + 2 * 60)}
    rooms = {node: Room(count, "memory.max") for node, count in need.items()}
    assert collectable(copies, KEY, ["n1", "n2"], 1, rooms)
    for node in need:
        short = {**rooms, node: Room(need[node] - 1, "memory.max")}
        assert not collectable(copies, KEY, ["n1", "n2"], 1, short)
    assert not collectable(copies, KEY, ["n1", "n2"], 1, {"n1": PLENTY})
    copies.drop_where(node="n1", tiers=(PEER,))
    assert not collectable(copies, KEY, ["n1", "n2"], 1, rooms), "rank 2's image is nowhere"


def lost_one(room: Room | None = PLENTY) -> Site:
    """The state of three ranks is to go on with two: the spare has what the lost node's rank alone had."""
    site = Site()
    site.save(20)
    site.replicas_made(20)
    for node in (*ACTIVE, "s1"):
        if room is not None:
            site.hear(node, msg.Foreseen(image_bytes=100, own_bytes=40, room=room))
    site.lost("n2")
    site.state.attempt, site.state.placement = 2, ("n1", "n3")
    site.orders.clear()
    return site


def reshard(site: Site) -> str:
    effects, waits = site.checkpoints.reshard(2, site.time)
    site.do(effects)
    return waits


def orders(site: Site) -> list[tuple[str, int, str]]:
    return [(node, order.rank, order.part) for node, order in site.ordered(msg.Replicate)]


def report(rank: int, part: str) -> msg.CopyReport:
    return msg.CopyReport(
        step=20, attempt=1, rank=rank, world=3, tier="peer", part=part, size_bytes=100, common_bytes=60,
        common_id="same at 20",
    )  # fmt: skip


def came(site: Site, node: str, rank: int, part: str) -> None:
    site.hear(node, msg.Held(copies=(report(rank, part),)))


def collect(site: Site) -> None:
    for one in orders(site):
        came(site, *one)


LAUNCH = Launch(attempt=2, placement=("n1", "n3"), master_address="", master_port=1, reason="")


def test_fewer_ranks_get_everything_into_the_memory_of_their_nodes_and_nothing_is_written() -> None:
    site = lost_one()
    assert reshard(site) == "step 20, of which each node gets all 3 images"
    assert reshard(site) != ""
    wanted = [("n1", 1, "own"), ("n1", 2, "own"), ("n3", 0, "own"), ("n3", 1, "own")]
    assert sorted(orders(site)) == wanted, "once each"


def test_what_is_collected_is_what_they_restore() -> None:
    site = lost_one()
    assert reshard(site)
    collect(site)
    assert reshard(site) == ""
    chosen = site.choose(LAUNCH)
    assert (chosen.tier, chosen.step, chosen.tiers) == ("memory", 20, {"memory": 300})
    assert "3 ranks saved it, and each node has the images of all" in chosen.reason
    told = site.checkpoints.restore.message("n3", range(1, 2))
    assert told == msg.Restore(step=20, attempt=1, ranks={1: ()}, world=3)
    assert site.ordered(msg.Write) == []


def fails(site: Site) -> None:
    site.hear("n3", msg.Unreplicated(step=20, attempt=1, rank=1, part="own", why="timed out"))


def is_full(site: Site) -> None:
    site.hear("n1", msg.Refused(why="no memory"))


def stands_still(site: Site) -> None:
    site.time += STILL_S + 0.1


@pytest.mark.parametrize("goes_wrong", [fails, is_full, stands_still])
def test_if_anything_goes_wrong_the_state_is_written_instead(goes_wrong: Callable[[Site], None]) -> None:
    site = lost_one()
    assert reshard(site)
    goes_wrong(site)
    assert reshard(site) == "the checkpoint of step 20, which is written for 2 ranks"


def test_what_comes_slowly_is_waited_for() -> None:
    site = lost_one()
    assert reshard(site)
    for one in orders(site)[:3]:
        site.time += 0.9 * STILL_S
        came(site, *one)
        assert reshard(site) == "step 20, of which each node gets all 3 images"


@pytest.mark.parametrize("room", [None, Room(300, "memory.max")], ids=["unknown", "too small"])
def test_without_room_the_state_is_written(room: Room | None) -> None:
    site = lost_one(room)
    assert reshard(site) == "the checkpoint of step 20, which is written for 2 ranks"
    assert orders(site) == [("n1", 1, "all")], "for the write"


def test_what_ranks_could_not_restore_from_memory_is_written() -> None:
    site = lost_one()
    assert reshard(site)
    collect(site)
    assert reshard(site) == ""
    site.state.unrestored[KEY] = RESTORE_TRIES
    site.state.attempt = 3
    assert reshard(site) == "the checkpoint of step 20, which is written for 2 ranks"


def test_a_try_that_failed_is_repeated_for_the_next_launch() -> None:
    site = lost_one()
    assert reshard(site)
    fails(site)
    assert reshard(site).endswith("which is written for 2 ranks")
    site.state.attempt = 3
    site.time += RETRY_S
    assert reshard(site) == "step 20, of which each node gets all 3 images"


def restored() -> Site:
    """Two ranks run, which have restored what three saved."""
    site = lost_one()
    assert reshard(site)
    collect(site)
    assert reshard(site) == ""
    site.state.phase = Phase.LAUNCHING
    site.choose(LAUNCH)
    site.state.phase = Phase.RUNNING
    return site


def test_what_all_nodes_have_is_safe_so_that_older_images_go() -> None:
    """In a rank's other slot there may be one, and without a free slot it saves nothing."""
    site = restored()
    site.look()
    told = {node: (order.step, order.attempt) for node, order in site.ordered(msg.Committed)}
    assert told == {"n1": (20, 1), "n3": (20, 1), "s1": (20, 1)}


def test_an_image_that_is_found_damaged_is_collected_again_before_older_ones_go() -> None:
    site = restored()
    site.ordered(msg.Replicate)
    site.hear("n3", msg.Dropped(copy=report(0, "own"), why="it is corrupt"))
    site.look()
    assert site.ordered(msg.Committed) == []
    assert orders(site) == [("n3", 0, "own")]
    came(site, "n3", 0, "own")
    site.look()
    assert {node for node, _ in site.ordered(msg.Committed)} == {"n1", "n3", "s1"}


def test_a_node_without_room_for_it_keeps_nobody_from_saving() -> None:
    site = restored()
    site.hear("n3", msg.Dropped(copy=report(0, "own"), why="it is corrupt"))
    site.hear("n3", msg.Refused(why="no memory"))
    site.look()
    assert {node for node, _ in site.ordered(msg.Committed)} == {"n1", "n3", "s1"}
