"""A node's test process, the only part of pre-flight that imports torch: `python -m jurymast.preflight
LOCAL_RANK` tests one device of this node on the agent's request: whether it calculates correctly, and how
fast; and the time of a small and of a larger all-reduce among the test processes of one or two nodes.

JSON lines. In: {"do": "alone"} or {"do": "group", "name", "host", "port", "rank", "world", "limit_s"}. Out:
{"said": "ready", "port"} once torch is imported, then for each order {"said": "done", "name", "times",
"wrong", "error"}; `core.state.evidence.NodeTimes` explains the last three. It ends when its standard input
ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jurymast.processes import die_first, die_with_parent, ignore_signals
from jurymast.wire.addresses import ADDRESS_VARIABLE, listen_at
from jurymast.worker.store import store_at

SEED = 20
# Seconds for all products, and for all copies. Each kind is done at least twice, however long that takes.
PRODUCTS_S = 1.0
COPIES_S = 0.2
COPY_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}
COPY_PARTS = 8


@dataclass(frozen=True)
class Product:
    """A product (rows, inner) x (inner, columns) of whole numbers of at most `most`.

    inner * most^2 is at most the largest number up to which the type has all whole numbers (2^8 for bfloat16,
    2^11 for float16, 2^24 for float32, 2^53 for float64; TF32 takes factors of up to 2^10). So every sum is
    exact in every order, and any other result is wrong.
    """

    name: str
    dtype: torch.dtype
    inner: int
    most: int
    tf32: bool = False


CPU_PRODUCTS = (
    Product("float32", torch.float32, 256, 255),
    Product("float64", torch.float64, 256, 4096),
)
# Rows and columns. On one thread a product takes less than a millisecond, mostly undisturbed by others.
CPU_SIDE = 256
GPU_PRODUCTS = (
    Product("bfloat16", torch.bfloat16, 256, 1),
    Product("float16", torch.float16, 2048, 1),
    Product("tf32", torch.float32, 4096, 63, tf32=True),
    Product("float32", torch.float32, 4096, 63),
    Product("float64", torch.float64, 1024, 4096),
)
GPU_SIDE = 8192


def choose(local_rank: int) -> torch.device:
    """This process's device: a GPU if there are any, else the CPU.

    Raises RuntimeError if there are GPUs, but fewer than processes.
    """
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(f"only {torch.cuda.device_count()} GPUs can be used")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def test_device(device: torch.device) -> tuple[dict[str, float], str]:
    """(seconds by measure, what was wrong or ""). Raises RuntimeError if the device does not work."""
    products = CPU_PRODUCTS if device.type == "cpu" else GPU_PRODUCTS
    times: dict[str, float] = {}
    wrong: list[str] = []
    with torch.inference_mode():
        for product in products:
            seconds, told = multiply(product, device, PRODUCTS_S / len(products))
            times[f"matrix product {product.name}"] = seconds
            wrong += [told] if told else []
        times["memory copy"], told = copy(device)
        wrong += [told] if told else []
    return times, "; ".join(wrong)


def multiply(product: Product, device: torch.device, budget_s: float) -> tuple[float, str]:
    """(seconds per product, what was wrong or ""): repeats the same product and checks each result.

    The first is compared with sums of its rows and columns, calculated in another way and on the CPU, the
    others with the first.
    """
    side = CPU_SIDE if device.type == "cpu" else GPU_SIDE
    generator = torch.Generator().manual_seed(SEED)
    a = torch.randint(-product.most, product.most + 1, (side, product.inner), generator=generator)
    b = torch.randint(-product.most, product.most + 1, (product.inner, side), generator=generator)
    by_column = (a.sum(0) @ b).double()
    by_row = (a @ b.sum(1)).double()
    left, right = a.to(device, product.dtype), b.to(device, product.dtype)
    torch.backends.cuda.matmul.allow_tf32 = product.tf32
    first: Any = None
    wrong, times = 0, list[float]()
    end = time.monotonic() + budget_s
    while len(times) < 2 or time.monotonic() < end:
        began = _now(device)
        result = torch.matmul(left, right)
        times.append(_now(device) - began)
        if first is None:
            first, exact = result, result.double()
            right_sums = torch.equal(exact.sum(0).cpu(), by_column) and torch.equal(
                exact.sum(1).cpu(), by_row
            )
            wrong += not right_sums
        else:
            wrong += not torch.equal(result, first)
    told = f"{wrong} of {len(times)} {product.name} matrix products on {device} were wrong" if wrong else ""
    return quartile(times), told


def copy(device: torch.device) -> tuple[float, str]:
    """(seconds to copy a part of `COPY_BYTES` within the device's memory, what was wrong or "").

    Copies part by part, so that the time is the memory's even if other processes use it in turns.
    """
    count = COPY_BYTES[device.type] // 8
    source = torch.arange(count, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)
    times: list[float] = []
    end = time.monotonic() + COPIES_S
    while len(times) < 2 * COPY_PARTS or time.monotonic() < end:
        for part, into in zip(source.chunk(COPY_PARTS), target.chunk(COPY_PARTS), strict=True):
            began = _now(device)
            into.copy_(part)
            times.append(_now(device) - began)
    same = torch.equal(source, target)
    return quartile(times), "" if same else f"a copy in the memory of {device} differs"


def _now(device: torch.device) -> float:
    """Monotonic seconds, read after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def quartile(times: list[float]) -> float:
    """The lower quartile: what is possible, even on a machine that is also busy otherwise."""
    return sorted(times)[len(times) // 4]


SMALL_BYTES = 8
LARGE_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}
BUDGET_S = 0.5  # for each kind, after the first
REPEATS_MAX = 50


def test_group(order: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Seconds of a small all-reduce ("gloo latency", the median) and of a larger one ("gloo transfer").

    `order`: see `jurymast.preflight`.

    Raises RuntimeError if the others do not come, or do not all answer within `limit_s`.
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
    """Seconds of repeated all-reduces: as many as the slowest rank can do within the budget."""
    first_s = _all_reduce(data)
    slowest = torch.tensor([first_s], device=data.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    repeats = int(min(REPEATS_MAX, BUDGET_S / max(1e-6, float(slowest))))
    return [first_s, *(_all_reduce(data) for _ in range(repeats))]


def _all_reduce(data: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(data)
    return _now(data.device) - began


STORE_LIMIT_S = 30.0


def main() -> int:
    ignore_signals()
    die_first()
    die_with_parent()
    # What a library prints must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    local_rank = int(sys.argv[1])
    # NCCL would end this process if a partner does not answer; this makes the wait raise instead.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"

    listener = listen_at(os.environ.get(ADDRESS_VARIABLE, ""))
    port = listener.getsockname()[1]
    store = None
    answers.write(json.dumps({"said": "ready", "port": port}) + "\n")
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {"said": "done", "times": {}, "wrong": "", "error": ""}
        answer["name"] = order.get("name", "")
        try:
            if order["do"] == "alone":
                answer["times"], answer["wrong"] = test_device(choose(local_rank))
            else:
                if order["rank"] == 0 and store is None:
                    # All pairings that this node leads meet here, each under a name of its own.
                    store = store_at(order["host"], port, STORE_LIMIT_S, listener.detach())
                answer["times"] = test_group(order, choose(local_rank))
        except (RuntimeError, OSError, ValueError) as error:  # torch's and CUDA's errors are RuntimeErrors
            answer["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes a second, and nothing has to be released
