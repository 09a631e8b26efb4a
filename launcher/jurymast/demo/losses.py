"""The losses that the training prints: read from rank 0's logs while they grow, drawn as a row of blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.journal import FileTail
from jurymast.rundir import RunDirectory

_LINE = re.compile(rb"step (\d+) loss (\S+)")
_WEIGHTS = re.compile(rb"weights sha256 ([0-9a-f]{64})")
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*#%"


@dataclass(frozen=True)
class Loss:
    """One line of rank 0; `text` has the loss as printed, for comparing it to the last digit."""

    attempt: int
    step: int
    text: str

    @property
    def value(self) -> float:
        return float(self.text)


class LossCurve:
    """All losses printed so far, in the order of their attempts; `weights` is the hash at the end."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._tails: dict[int, FileTail] = {}
        self.points: list[Loss] = []
        self.weights = ""

    def poll(self, attempt: int) -> None:
        """Read what is new, up to attempt number `attempt`."""
        for number in range(1, attempt + 1):
            path = self._directory.rank_log(number, 0)
            tail = self._tails.setdefault(number, FileTail(path))
            for line in tail.lines():
                self._take(number, line)

    def _take(self, attempt: int, line: bytes) -> None:
        if found := _LINE.match(line):
            self.points.append(Loss(attempt, int(found[1]), found[2].decode()))
        elif found := _WEIGHTS.match(line):
            self.weights = found[1].decode()

    @property
    def last(self) -> Loss | None:
        return self.points[-1] if self.points else None

    def at(self, step: int) -> Loss | None:
        """The newest loss printed for this step."""
        return next((point for point in reversed(self.points) if point.step == step), None)

    def final(self) -> dict[int, float]:
        """Step to loss, each step as it was done last."""
        return {point.step: point.value for point in sorted(self.points, key=lambda p: (p.attempt, p.step))}

    def repeated(self) -> list[tuple[Loss, Loss]]:
        """(before, again) for every step that two attempts printed."""
        first: dict[int, Loss] = {}
        pairs = []
        for point in self.points:
            before = first.setdefault(point.step, point)
            if before.attempt != point.attempt:
                pairs.append((before, point))
        return pairs


def blocks(values: Sequence[float], width: int, ramp: str = BLOCKS) -> str:
    """`values` as at most `width` characters, low to high; each is the mean of its share of the values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    width = min(width, len(finite))
    edges = [number * len(finite) // width for number in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(means), max(means)
    scale = (len(ramp) - 1) / (high - low) if high > low else 0.0
    return "".join(ramp[round((mean - low) * scale)] for mean in means)
