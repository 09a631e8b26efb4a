"""Whom a keeper asks for an image, in which order, and what it makes of XORs."""

from __future__ import annotations

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ImageId
from jurymast.core.keeper.restores import Ingredient, ingredients, of_rank, usable, whom_to_ask

BOTH = {"common", "own"}


def source(node: str, part: str = "all", rank: int = 1, group: tuple[int, ...] = ()) -> msg.Source:
    members = tuple(msg.Member(rank=one, sources=(source(f"n{one}", rank=one),)) for one in group)
    return msg.Source(
        tier="peer", node=node, hosts=(node,), port=7, part=part, rank=rank, group=group, members=members
    )


def test_each_source_is_tried_once_for_what_is_still_missing() -> None:
    here, common, own, late = source("n1"), source("n2", "common"), source("n3", "own"), source("n4")
    missing = [BOTH, BOTH, {"common"}, {"common"}, set[str]()]
    tried = usable([here, common, own, late, here], lambda: missing.pop(0))
    assert list(tried) == [here, common, late], "one that has nothing of it is passed over"
    assert not list(usable([late], set))


def test_what_an_image_is_like_other_nodes_that_have_some_of_it_are_asked_once() -> None:
    several = [source("n1"), source("n2", rank=5), source("n3", "own"), source("n3"), source("n2")]
    assert list(whom_to_ask("n1", 1, several)) == [source("n3", "own"), source("n2")]


def test_an_image_is_made_of_the_xor_and_all_others_in_it_and_never_of_other_xors() -> None:
    xor = source("n9", "own", rank=3, group=(3, 1, 2))
    nested = msg.Member(rank=2, sources=(source("n8", group=(2, 4)), source("n2", rank=2)))
    told = msg.Source(
        tier="peer", node="n9", hosts=("n9",), port=7, part="own", rank=3, group=(3, 1, 2),
        members=(nested, *xor.members),
    )  # fmt: skip
    first, *others = ingredients(ImageId(10, 1, 3), told)
    assert first == Ingredient(ImageId(10, 1, 1), (of_rank(told, 1),), (1, 2, 3))
    assert others[0] == Ingredient(ImageId(10, 1, 2), (source("n2", rank=2),))
    assert 3 not in [one.image[2] for one in others], "it is what is missing"
