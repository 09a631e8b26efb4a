"""The torchrun host: torch's own elastic agent, fed by our rendezvous, one process a node.

Started by the agent on active and spare nodes alike: it imports torch, forks the server that
ranks come from, then waits in the rendezvous. It only starts, watches and stops the ranks of its
node; what happens after a failure the supervisor decides.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import Any

from jurymast.worker import forkserver
from jurymast.worker.agent_pipe import FD_VARIABLE


def main() -> int:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning signal reaches every process of a step
    forkserver.die_with_parent()
    forkserver.start(int(os.environ[FD_VARIABLE]))
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
