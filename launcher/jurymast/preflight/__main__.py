"""`python -m jurymast.preflight LOCAL_RANK`: tests one device of this node on the agent's request.

JSON lines. In: {"do": "alone"} or {"do": "group", "name", "host", "port", "rank", "world", "limit_s"}. Out:
{"said": "ready", "port"} once torch is imported, then for each order {"said": "done", "times", "wrong",
"error"}; `core.nodes.tests.Alone` explains the last three. It ends when its standard input ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from jurymast.processes import die_with_parent
from jurymast.wire.addresses import ADDRESS_VARIABLE, listen_at

STORE_LIMIT_S = 30.0


def main() -> int:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning signal reaches every process of a step
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent decides
    die_with_parent()
    # What a library prints must not be mixed with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    local_rank = int(sys.argv[1])
    # NCCL would end this process if a partner does not answer; this makes the wait raise instead.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"

    import torch.distributed as dist

    from jurymast.preflight import measurements

    listener = listen_at(os.environ.get(ADDRESS_VARIABLE, ""))
    port = listener.getsockname()[1]
    store = None
    answers.write(json.dumps({"said": "ready", "port": port}) + "\n")
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {"said": "done", "times": {}, "wrong": "", "error": ""}
        try:
            if order["do"] == "alone":
                answer["times"], answer["wrong"] = measurements.test_device(measurements.choose(local_rank))
            else:
                if order["rank"] == 0 and store is None:
                    # All pairings that this node leads meet here, each under a name of its own.
                    store = dist.TCPStore(
                        order["host"], port, is_master=True, master_listen_fd=listener.detach(),
                        wait_for_workers=False, timeout=timedelta(seconds=STORE_LIMIT_S),
                    )  # fmt: skip
                answer["times"] = measurements.test_group(order, measurements.choose(local_rank))
        except (RuntimeError, OSError, ValueError) as error:  # torch's and CUDA's errors are RuntimeErrors
            answer["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes a second, and nothing has to be released
