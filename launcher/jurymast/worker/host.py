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

from jurymast.processes import die_with_parent
from jurymast.worker import forkserver
from jurymast.worker.agent_pipe import FD_VARIABLE


def main() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning signal reaches every process of a step
    die_with_parent()
    forkserver.start(int(os.environ[FD_VARIABLE]))
    from jurymast.worker.elastic import serve

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    serve(json.loads(os.environ["JURYMAST_HOST_PLAN"]))


if __name__ == "__main__":
    main()
