"""Reads what the ranks of a training recorded, and measures a recovery from nothing else.

The ranks' lines are `TIME STEP ATTEMPT HOST PID PROCESSOR`, TIME in seconds since the Unix epoch; all nodes
are on one machine, so there is one clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """A rank has done a step. `pid` is as the rank's node numbers it, `cpu` its processor time so far."""

    rank: int
    time: float
    step: int
    attempt: str
    host: str
    pid: int
    cpu: float = 0.0

    @property
    def process(self) -> tuple[int, str, int, str]:
        """Tells processes apart, even those that got the same pid in different attempts."""
        return (self.rank, self.host, self.pid, self.attempt)


class StepFiles:
    """The step files of one training, read on as they grow."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._files = [directory / f"rank-{rank}.txt" for rank in range(ranks)]
        self._read = [0] * ranks
        self.stamps: list[Stamp] = []

    def poll(self) -> list[Stamp]:
        """Everything recorded so far."""
        for rank, path in enumerate(self._files):
            try:
                with path.open("rb") as file:
                    file.seek(self._read[rank])
                    data = file.read()
            except FileNotFoundError:
                continue
            whole = data[: data.rfind(b"\n") + 1]
            self._read[rank] += len(whole)
            self.stamps += [parse(rank, line) for line in whole.decode().splitlines()]
        return self.stamps


def parse(rank: int, line: str) -> Stamp:
    """One line of the rank's file."""
    time, step, attempt, host, pid, cpu = line.split()
    return Stamp(rank, float(time), int(step), attempt, host, int(pid), float(cpu))


def done_by_all(stamps: Iterable[Stamp], ranks: int, until: float = float("inf")) -> tuple[int, float] | None:
    """(step, time) of the last step that every rank had done by `until`: the time the last of them had.

    None when there is none.
    """
    times: dict[int, dict[int, float]] = {}
    for stamp in stamps:
        if stamp.time <= until:
            times.setdefault(stamp.step, {}).setdefault(stamp.rank, stamp.time)
    whole = [step for step, by_rank in times.items() if len(by_rank) == ranks]
    return (max(whole), max(times[max(whole)].values())) if whole else None


@dataclass(frozen=True)
class Recovery:
    """From the last step before a fault to the first new step after it; times as in `Stamp`."""

    last_step: int
    last_at: float
    reached: int
    new_step: int | None
    new_at: float | None
    resumed_at_step: int | None

    @property
    def seconds(self) -> float | None:
        return None if self.new_at is None else self.new_at - self.last_at


def measure(stamps: Iterable[Stamp], ranks: int, fault_at: float) -> Recovery | None:
    """The recovery from a fault at `fault_at`; None when no step was done by all ranks before it.

    Last step: the last that all ranks had done before the fault. Reached: the highest step of any process
    that was there before the fault, even if it did it just after. New step: the first that all ranks have
    done beyond that.
    """
    stamps = list(stamps)
    last = done_by_all(stamps, ranks, fault_at)
    if last is None:
        return None
    before = {stamp.process for stamp in stamps if stamp.time <= fault_at}
    reached = max(stamp.step for stamp in stamps if stamp.process in before)
    after = [stamp for stamp in stamps if stamp.process not in before and stamp.time > fault_at]
    first: dict[int, dict[int, float]] = {}
    for stamp in after:
        if stamp.step > reached:
            first.setdefault(stamp.step, {}).setdefault(stamp.rank, stamp.time)
    new = min((step for step, by_rank in first.items() if len(by_rank) == ranks), default=None)
    return Recovery(
        last[0],
        last[1],
        reached,
        new,
        None if new is None else max(first[new].values()),
        min((stamp.step for stamp in after), default=None),
    )
