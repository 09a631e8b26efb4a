"""Whom a keeper asks for an image, and in which order."""

from __future__ import annotations

from jurymast.core.keeper.restores import usable, whom_to_ask
from jurymast.core.state import messages as msg

BOTH = {"common", "own"}


def source(node: str, part: str = "all", rank: int = 1) -> msg.Source:
    return msg.Source(tier="peer", node=node, hosts=(node,), port=7, part=part, rank=rank)


def test_each_source_is_tried_once_for_what_is_still_missing() -> None:
    here, common, own, late = source("n1"), source("n2", "common"), source("n3", "own"), source("n4")
    missing = [BOTH, BOTH, {"common"}, {"common"}, set[str]()]
    tried = usable([here, common, own, late, here], lambda: missing.pop(0))
    assert list(tried) == [here, common, late], "one that has nothing of it is passed over"
    assert not list(usable([late], set))


def test_what_an_image_is_like_other_nodes_that_have_some_of_it_are_asked_once() -> None:
    several = [source("n1"), source("n2", rank=5), source("n3", "own"), source("n3"), source("n2")]
    assert list(whom_to_ask("n1", 1, several)) == [source("n3", "own"), source("n2")]
