"""A few ranks that run one function together; they start fast, forked from a server with torch loaded."""

from __future__ import annotations

import json
import multiprocessing
import runpy
import secrets
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel", "jurymast.checkpoint.checkpointer"]


def run_ranks(
    script: Path,
    function: str,
    size: int,
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """What `function` of `script` returned on each of `size` ranks of a gloo group.

    The script calls it itself, as CALL tells; raises AssertionError when a rank fails or takes `LIMIT_S`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    nonce = secrets.token_hex(4)
    outputs = [folder / f".result-{nonce}-{rank}" for rank in range(size)]
    processes = []
    for rank, output in enumerate(outputs):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        call = {
            "function": function,
            "arguments": arguments,
            "environment": {**variables, **(environment or {})},
            "store": f"file://{folder}/.store-{nonce}",
            "output": str(output),
        }
        processes.append(context.Process(target=runpy.run_path, args=(str(script), {"CALL": call})))
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    failed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode != 0}
    assert not failed, f"{function}: exit codes of the ranks that failed: {failed}"
    results = [json.loads(output.read_bytes()) for output in outputs]
    for output in outputs:
        output.unlink()
    return results


def stop_server() -> None:
    """End the process that ranks are forked from."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
