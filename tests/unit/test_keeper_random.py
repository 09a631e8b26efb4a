"""The keeper's machine under everything at once: see `support.keeper_model` for what must always hold."""

from __future__ import annotations

import pytest

from support.keeper_model import KeeperNode

SEEDS = 400
EVENTS = 400


def test_what_must_hold_holds_whatever_happens_in_whatever_order() -> None:
    nodes = []
    for seed in range(SEEDS):
        node = KeeperNode(seed)
        try:
            node.live(EVENTS)
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        nodes.append(node)
    assert sum(node.restored for node in nodes) > SEEDS, "attempts restore from memory"
    assert sum(node.replicated for node in nodes) > SEEDS, "replicas are made"
    assert sum(node.failed for node in nodes) > SEEDS, "and some are not"
    assert sum(node.collected for node in nodes) > SEEDS / 10, "ranks of another number restore"
