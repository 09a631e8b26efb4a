"""What a check remembers of one GPU between looks. Times are in seconds since the epoch."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

# A look stands for the time since the one before, but for no more than this (seconds): what happened in a
# longer gap was not seen.
UNSEEN_S = 60.0
# (when, seconds that this look stands for, whether the state held)
Sample = tuple[float, float, bool]


class History:
    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._series: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._samples: defaultdict[str, deque[Sample]] = defaultdict(deque)
        self._streaks: defaultdict[str, int] = defaultdict(int)

    def gained(self, counter: str, value: float) -> float:
        """The growth of `counter` since it was first seen here. A counter that falls starts again."""
        if value < self._first.setdefault(counter, value):
            self._first[counter] = value
        return value - self._first[counter]

    def gained_within(self, counter: str, value: float, at: float, window_s: float) -> float:
        """The growth in the last `window_s` seconds (an average if looks are further apart), or since it was
        first seen here."""
        series = self._series[counter]
        if series and (value < series[-1][1] or at < series[-1][0]):  # reset; or the clock was set back
            series.clear()
        series.append((at, value))
        while len(series) > 2 and series[0][0] < at - window_s:
            series.popleft()
        begin, least = series[0]
        return (value - least) * min(1.0, window_s / max(at - begin, window_s))

    def share(self, state: str, holds: bool, at: float, window_s: float) -> float:
        """The share of the last `window_s` seconds in which the state held, as far as looks tell; 0..1. Time
        before the first look and in long gaps counts as if it had not held."""
        samples = self._samples[state]
        while (
            samples and samples[-1][0] > at
        ):  # a clock that was set back: those times are not known any more
            samples.pop()
        weight = min(at - samples[-1][0], UNSEEN_S) if samples else 0.0
        if len(samples) == 1 and not samples[0][1]:
            samples[0] = (samples[0][0], weight, samples[0][2])  # the first stands for as long as the second
        samples.append((at, weight, holds))
        begin = at - window_s
        while samples[0][0] <= begin:
            samples.popleft()
        return sum(min(covered, when - begin) for when, covered, held in samples if held) / window_s

    def streak(self, state: str, holds: bool) -> int:
        """The number of consecutive looks, including this one, in which the state has held."""
        self._streaks[state] = self._streaks[state] + 1 if holds else 0
        return self._streaks[state]

    def remember(self) -> Any:
        """All of it as JSON, for `recall`."""
        return {
            "first": self._first, "streaks": self._streaks,
            "series": {name: list(series) for name, series in self._series.items()},
            "samples": {name: list(samples) for name, samples in self._samples.items()},
        }  # fmt: skip

    def recall(self, memory: Any) -> None:
        """Go on where another one was. Raises KeyError, TypeError or ValueError for anything else than what
        `remember` returned."""
        self._first = {name: float(value) for name, value in memory["first"].items()}
        self._streaks.update({name: int(count) for name, count in memory["streaks"].items()})
        for name, series in memory["series"].items():
            self._series[name] = deque((float(at), float(value)) for at, value in series)
        for name, samples in memory["samples"].items():
            self._samples[name] = deque((float(at), float(s), bool(held)) for at, s, held in samples)
