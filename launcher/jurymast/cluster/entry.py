"""What the Slurm job runs: submitit unpickles a BatchEntry in the batch process and calls it."""

from __future__ import annotations

import signal
import sys
from typing import NoReturn


class BatchEntry:
    """Runs a run's batch process; pickled by submitit, so it holds nothing but the run directory's path."""

    def __init__(self, run_directory: str) -> None:
        self.run_directory = run_directory

    def __call__(self) -> NoReturn:
        # submitit's handlers ignore SIGTERM and requeue on SIGUSR2 by themselves; whether to requeue is the
        # supervisor's decision, so the batch process starts with the system's defaults.
        for number in (signal.SIGTERM, signal.SIGCONT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        from jurymast.cluster.batch import main
        from jurymast.errors import JurymastError

        # SystemExit passes through submitit, and the job ends with the run's own exit code.
        try:
            sys.exit(main(self.run_directory))
        except JurymastError as error:
            print(f"jurymast: error: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
