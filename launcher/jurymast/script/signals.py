"""What a signal means that the script sends to a step's srun: what it means to the real srun, which the user
would have had. USR1 and USR2 are for the ranks; HUP, QUIT and TERM end the step, and so does a second INT
within a second."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from types import FrameType
from typing import Protocol

from jurymast.cluster.sbatch import CommandLine
from jurymast.script import WARNING, release

FOR_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
HANDLED = (*FOR_RANKS, *ENDS, signal.SIGINT, signal.SIGALRM, WARNING)
TWICE_S = 1.0
# Options with which srun ends the step at the first INT.
AT_ONCE = ("disable-status", "quit-on-interrupt")


class Told(Protocol):
    """A training that runs in the step."""

    def warned(self) -> None:
        """Its end may be near."""

    def ordered_to_end(self) -> None:
        """The script, or Slurm, ends the step."""


class _Interrupts:
    """Tells an INT that ends the step from one after which srun only tells its state."""

    def __init__(self, srun: CommandLine) -> None:
        self._at_once = srun.has(*AT_ONCE)
        self._came_at = -TWICE_S

    def insist(self) -> bool:
        before, self._came_at = self._came_at, time.monotonic()
        return self._at_once or self._came_at < before + TWICE_S


class StepSignals:
    """Takes the signals for a step's srun, for the rest of this process. They go to the real one (`started`),
    but for those that end a training (`training`): it can still save what it has done."""

    training: Told | None = None
    ended = False  # by a signal while there was no training

    def __init__(self, srun: CommandLine, *, parts: bool = False) -> None:
        """`parts`: the step is one in place of several (see `script.parts`), and a script that signals each
        of them in turn means its ranks once."""
        self._interrupts = _Interrupts(srun)
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._merged_s = TWICE_S if parts else 0.0
        self._came_at: dict[int, float] = {}

    def listen(self) -> None:
        """Take signals from now on, and those that came while this process began."""
        for number in HANDLED:
            signal.signal(number, self._came)
        release()

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        while self._early:
            self._came(self._early.pop(0), None)

    def close(self) -> None:
        """Leave signals alone until this process has ended, which they would end otherwise."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)

    def _came(self, number: int, _frame: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
        elif number in ENDS or (number == signal.SIGINT and self._interrupts.insist()):
            if self.training is not None:
                self.training.ordered_to_end()
            else:
                self.ended = True
                self._process.send_signal(number if number in ENDS else signal.SIGTERM)
        elif number not in FOR_RANKS or not self._again(number):
            if self.training is not None and number in (*FOR_RANKS, WARNING):
                self.training.warned()
            if number != WARNING:
                self._process.send_signal(number)

    def _again(self, number: int) -> bool:
        now, before = time.monotonic(), self._came_at.get(number)
        if before is not None and now < before + self._merged_s:
            return True
        self._came_at[number] = now
        return False


class PartSignals:
    """Takes the signals for the srun of a part: they are for the process that leads all parts."""

    def __init__(self, srun: CommandLine, leader: int) -> None:
        self._interrupts, self._leader = _Interrupts(srun), leader

    def listen(self) -> None:
        for number in (*FOR_RANKS, *ENDS, signal.SIGINT):
            signal.signal(number, self._came)
        release()

    def _came(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if not self._interrupts.insist():
                return
            number = signal.SIGTERM
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._leader, number)
