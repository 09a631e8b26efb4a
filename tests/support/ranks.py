"""A few ranks that run one function together; they start fast, forked from a server with torch loaded."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from support.runs import stacks

LIMIT_S = 300.0
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
    context = forking()
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
    run_all(function, processes)
    results = [json.loads(output.read_bytes()) for output in outputs]
    for output in outputs:
        output.unlink()
    return results


def forking() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run_all(what: str, processes: Sequence[BaseProcess]) -> None:
    """Start them and wait for their ends; AssertionError when one fails or takes `LIMIT_S`."""
    for process in processes:
        process.start()
    end = time.monotonic() + LIMIT_S
    told = ""
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                told += stacks(process.pid or 0)
                process.kill()
                process.join()
    failed = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode != 0}
    assert not failed, f"{what}: exit codes of the ranks that failed: {failed}\n{told}"


def run_script(script: Path, size: int, *arguments: str, folder: Path, each: int | None = None) -> None:
    """A user's script on `size` ranks, `each` of them on a node, as plain torchrun would run it in `folder`,
    but without its start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "LOCAL_WORLD_SIZE": str(each or size), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "plain",
        "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    run_all(
        script.name,
        [
            forking().Process(
                target=_be_rank,
                args=(script, arguments, {**common, "RANK": rank, "LOCAL_RANK": rank}, folder),
            )
            for rank in map(str, range(size))
        ],
    )


def _be_rank(script: Path, arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    # As in a rank of torchrun. A lock made as this process was made would leave its file in /dev/shm.
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    # The groups outlive the script: where a DDP model is the last to hold one, freeing it waits for a thread
    # of gloo with the GIL held, and that thread may wait for the GIL.
    dist.destroy_process_group = lambda group=None: None
    runpy.run_path(str(script), run_name="__main__")
    # Without the end of the interpreter: now and then torch's threads abort it, or keep it for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def stop_server() -> None:
    """End the process that ranks are forked from: by SIGKILL, as its interpreter, which has torch loaded,
    may not come to its end."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()
