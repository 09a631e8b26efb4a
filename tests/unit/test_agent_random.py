"""The agent's machine under everything at once: see `support.node_model` for what must always hold."""

from __future__ import annotations

import pytest

from support.node_model import Node

SEEDS = 400
EVENTS = 500


def test_what_must_hold_holds_whatever_happens_in_whatever_order() -> None:
    nodes = []
    for seed in range(SEEDS):
        node = Node(seed)
        try:
            node.live(EVENTS)
        except Exception as error:
            pytest.fail(f"seed {seed}, at {node.now:.3f} s: {error!r}")
        nodes.append(node)
    lived = [node for node in nodes if not node.left]
    assert len(lived) > SEEDS / 2, "most of them do not end early"
    assert sum(len(node.started) for node in lived) > 2 * len(lived), "attempts are started"
    assert sum(len(node.told) for node in lived) > len(lived), "and fail"
    assert sum(node.turns for node in nodes) > SEEDS, "writes go on"
    assert sum(node.tests_told for node in nodes) > SEEDS, "nodes are tested"
