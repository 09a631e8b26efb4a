"""A batch script's job: the script runs as sbatch would run it, and its training steps under our agents.

batch host   job ── the user's script
                     └─ srun (ours, found first on PATH): a training step?
                         ├─ no: the real srun
                         └─ yes: the real srun on active and spare nodes, and a supervisor (`step`)
every node               └─ the step's command as the user wrote it
                             └─ torchrun (ours, or its Python by `hook`): becomes the agent (`node`)

Here are also the signals that Slurm may send to the batch process before the job ends, and the script to its
steps. They are blocked until the process can pass them on: a signal that arrives while modules load would end
the job, or the step.
"""

from __future__ import annotations

import signal

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM)
# The batch process sends this to the front ends of the script's trainings if the job's end may be near. The
# script itself may use SIGUSR1 and SIGUSR2 for what it likes.
WARNING = signal.SIGRTMIN + 16


def hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
