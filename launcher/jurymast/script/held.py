"""Signals that Slurm may send to the batch process before the job ends. They are blocked until the process
can pass them on to the script: a signal that arrives while modules load would end the job."""

from __future__ import annotations

import signal

PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM)


def hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)


def release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
