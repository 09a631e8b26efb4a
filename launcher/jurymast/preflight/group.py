"""All-reduce among test processes, of one node or of two: how long a small one and a larger one take."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jurymast.preflight.device import quartile

SMALL_BYTES = 8
LARGE_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}
BUDGET_S = 0.5  # of each kind, beyond the first
REPEATS_MAX = 50


def test(order: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Seconds of a small all-reduce ("gloo latency", the median) and of a larger one ("gloo transfer").

    `order`: see `jurymast.preflight.__main__`.

    Raises RuntimeError when the others do not come, or not all answer within `limit_s`.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=order["limit_s"])
    server = dist.TCPStore(
        order["host"], order["port"], is_master=False, wait_for_workers=False, timeout=limit
    )
    dist.init_process_group(
        backend, store=dist.PrefixStore(order["name"], server), rank=order["rank"],
        world_size=order["world"], timeout=limit,
    )  # fmt: skip
    try:
        _all_reduce(torch.zeros(1, device=device))  # connects
        small = torch.zeros(SMALL_BYTES // 4, device=device)
        large = torch.zeros(LARGE_BYTES[device.type] // 4, device=device)
        latency, transfer = statistics.median(_times(small)), quartile(_times(large))
        return {f"{backend} latency": latency, f"{backend} transfer": transfer}
    finally:
        dist.destroy_process_group()


def _times(data: torch.Tensor) -> list[float]:
    """As often as the slowest rank can do it within the budget."""
    first_s = _all_reduce(data)
    slowest = torch.tensor([first_s], device=data.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    repeats = int(min(REPEATS_MAX, BUDGET_S / max(1e-6, float(slowest))))
    return [first_s, *(_all_reduce(data) for _ in range(repeats))]


def _all_reduce(data: torch.Tensor) -> float:
    """Seconds that one took."""
    began = time.perf_counter()
    dist.all_reduce(data)
    if data.device.type == "cuda":
        torch.cuda.synchronize(data.device)
    return time.perf_counter() - began
