"""The torchrun host: torch's own elastic agent, fed by our rendezvous, one process a node.

Started by the agent on active and spare nodes alike: it imports torch and warms the forkserver up, then
waits in the rendezvous. It only starts, watches and stops the ranks of its node; what happens after a
failure the supervisor decides.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing import forkserver
from typing import Any

# Imported once by the forkserver of every node, active or spare: a worker then starts in milliseconds. Only
# modules that are safe to fork after: they start no thread and touch no device.
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # the first optimizer of a process imports it: 0.5 s
    "torch.distributed.checkpoint.state_dict",
    "jurymast.worker.entry",
    "jurymast.checkpoint.checkpointer",
]


def start_forkserver() -> None:
    """Start it before this process imports torch itself: both imports then run side by side."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def await_forkserver() -> None:
    """Return when the forkserver has imported everything: a node is ready only then."""
    probe = multiprocessing.get_context("forkserver").Process(target=_nothing)
    probe.start()
    probe.join()


def _nothing() -> None:
    pass


def main() -> int:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning signal reaches every process of a step
    start_forkserver()
    from jurymast.worker.elastic import serve

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    return serve(json.loads(os.environ["JURYMAST_HOST_PLAN"]))


def read_error_file(path: str) -> dict[str, str]:
    """{"error": exception class, "message", "traceback"} from torch's error file; {} when there is none."""
    try:
        with open(path) as file:
            message: Any = json.load(file)["message"]
    except (OSError, ValueError, KeyError):
        return {}
    if isinstance(message, str):
        return {"error": "", "message": message[:1000], "traceback": ""}
    name, _, rest = str(message.get("message", "")).partition(": ")
    callstack = str(message.get("extraInfo", {}).get("py_callstack", ""))
    return {"error": name[:200], "message": rest[:1000], "traceback": callstack}


def wait_until(condition: Any, limit_s: float, period_s: float = 0.005) -> bool:
    """Poll `condition` until it holds or `limit_s` have passed."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(period_s)
    return True


if __name__ == "__main__":
    sys.exit(main())
