"""Whom a keeper asks for an image, in which order, and what it makes of XORs."""

from __future__ import annotations

from jurymast.core import messages as msg
from jurymast.core.keeper.restores import (
    FromHere,
    FromPeer,
    Gathering,
    Ingredient,
    ManifestSearch,
    Rebuild,
    ingredients,
    of_rank,
)  # fmt: skip

BOTH = {"common", "own"}


def source(node: str, part: str = "all", rank: int = 1, group: tuple[int, ...] = ()) -> msg.Source:
    members = tuple(msg.Member(rank=one, sources=(source(f"n{one}", rank=one),)) for one in group)
    return msg.Source(
        tier="peer", node=node, hosts=(node,), port=7, part=part, rank=rank, group=group, members=members
    )


def test_each_source_is_tried_once_for_what_is_still_missing() -> None:
    here, common, own, late = source("n1"), source("n2", "common"), source("n3", "own"), source("n4")
    gathering = Gathering("n1", [here, common, own, late])
    assert gathering.next(BOTH) == FromHere(here)
    assert gathering.next(BOTH) == FromPeer(common)
    assert gathering.next({"common"}) == FromPeer(late), "one that has nothing of it is passed over"
    assert gathering.next(BOTH) is None
    assert Gathering("n1", [late]).next(()) is None


def test_an_xor_is_rebuilt_from_and_one_that_is_fetched_itself_is_not() -> None:
    xor = source("n4", group=(2, 1))
    assert Gathering("n1", [xor]).next(BOTH) == Rebuild(xor)
    assert Gathering("n1", [xor], of_xor=True).next(BOTH) == FromPeer(xor)
    assert Gathering("n4", [xor], of_xor=True).next(BOTH) == FromHere(xor)


def test_what_an_image_is_like_other_nodes_that_have_some_of_it_are_asked_once() -> None:
    asked = ManifestSearch(
        "n1", 1, [source("n1"), source("n2", rank=5), source("n3", "own"), source("n3"), source("n2")]
    )
    found = [asked.next(), asked.next(), asked.next()]
    assert found == [source("n3", "own"), source("n2"), None]


def test_an_image_is_made_of_the_xor_and_all_others_in_it_and_never_of_other_xors() -> None:
    xor = source("n9", "own", rank=3, group=(3, 1, 2))
    nested = msg.Member(rank=2, sources=(source("n8", group=(2, 4)), source("n2", rank=2)))
    told = msg.Source(
        tier="peer", node="n9", hosts=("n9",), port=7, part="own", rank=3, group=(3, 1, 2),
        members=(nested, *xor.members),
    )  # fmt: skip
    first, *others = ingredients((10, 1, 3), told)
    assert first == Ingredient((10, 1, 1), (of_rank(told, 1),), (1, 2, 3))
    assert others[0] == Ingredient((10, 1, 2), (source("n2", rank=2),))
    assert 3 not in [one.image[2] for one in others], "it is what is missing"
