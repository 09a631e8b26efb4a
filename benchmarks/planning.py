#!/usr/bin/env python3
"""How long the supervisor thinks about checkpoints of a large run: who holds replicas, what to copy, the plan
of a restore after a lost node.

Processor seconds of pure decisions; what agents would have said is made up: 8 ranks a node, each with a part
that all have alike. Needs nothing but a minute of one processor, and about 1 GB of memory for 100,000 ranks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jurymast.core.state.images import StateId

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import JURYMAST, Row, Target
from jurymast.core.checkpoints.copies import Copies
from jurymast.core.checkpoints.copies import plan_restore as restore_plan
from jurymast.core.checkpoints.replicas import Order, holders, missing_replicas
from jurymast.core.state.images import ALL, MEMORY, PEER, Copy

NODES = (256, 2048, 12500)
ROUNDS = 3
RANKS_PER_NODE = 8
SPARE_SHARE = 64  # nodes for each spare
IMAGE_BYTES = 10**10
COMMON_BYTES = 10**6
KEY = StateId(10, 1)
# A restart takes seconds: thinking about it must be a small part of that, at 100,000 GPUs too.
WANTED_S = {256: 0.2, 2048: 1.0, 12500: 10.0}
Result = TypeVar("Result")


def held(rank: int, node: str, world: int, tier: str = MEMORY, part: str = ALL) -> Copy:
    return Copy(node, tier, *KEY, rank, world, part, IMAGE_BYTES, COMMON_BYTES, "alike")


def taking(times: dict[str, list[float]], what: str, work: Callable[[], Result]) -> Result:
    began = time.process_time()
    result = work()
    times.setdefault(what, []).append(time.process_time() - began)
    return result


def follow(copies: Copies, orders: list[Order], world: int) -> None:
    for holder, order in orders:
        copies.hold(held(order.rank, holder, world, PEER, order.part))


def round_of(nodes: int, times: dict[str, list[float]]) -> None:
    """One save is held and replicated, then a node is lost."""
    world = nodes * RANKS_PER_NODE
    placement = [f"n{number}" for number in range(nodes)]
    spares = [f"s{number}" for number in range(max(1, nodes // SPARE_SHARE))]
    copies = Copies()
    for rank in range(world):
        copies.hold(held(rank, placement[rank // RANKS_PER_NODE], world))
    holding = taking(times, "who holds replicas", lambda: holders(placement, spares, {}, 1, ()))
    orders = taking(
        times, "what to copy", lambda: missing_replicas(copies, KEY, placement, RANKS_PER_NODE, holding)
    )
    follow(copies, orders, world)
    copies.drop_where(node=placement[0])
    swapped = [spares[0], *placement[1:]]
    plan = taking(
        times, "restore plan",
        lambda: restore_plan(copies, {}, swapped, RANKS_PER_NODE),
    )  # fmt: skip
    assert plan.step == KEY[0], plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="256 nodes only")
    arguments = parser.parse_args()
    rows: list[Row] = []
    targets: list[Target] = []
    for nodes in NODES[:1] if arguments.quick else NODES:
        times: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            round_of(nodes, times)
        case = f"{nodes} nodes, {nodes * RANKS_PER_NODE} ranks"
        for what, samples in times.items():
            found = common.spread(samples)
            rows.append(
                Row(case, JURYMAST, what, "s", found.median, found.low, found.high, found.n, samples=samples)
            )
        plans = common.spread(times["restore plan"])
        targets.append(Target(f"restore_plan_{nodes}_nodes", plans.median, WANTED_S[nodes], "lower"))
    about = {**common.machine(), "rounds": ROUNDS, "quick": arguments.quick}
    common.print_report("planning", rows, targets, about, arguments.json)


if __name__ == "__main__":
    main()
