"""What a check remembers of one GPU between looks. Times are in seconds since the epoch."""

from __future__ import annotations

from collections import defaultdict, deque


class History:
    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._series: defaultdict[str, deque[tuple[float, float]]] = defaultdict(deque)
        self._minutes: defaultdict[str, set[int]] = defaultdict(set)
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
        if series and value < series[-1][1]:
            series.clear()
        series.append((at, value))
        while len(series) > 2 and series[0][0] < at - window_s:
            series.popleft()
        begin, least = series[0]
        return (value - least) * min(1.0, window_s / max(at - begin, window_s))

    def share(self, state: str, holds: bool, at: float, minutes: int) -> float:
        """The share of the last `minutes` minutes in which the state was seen to hold; 0..1."""
        now, seen = int(at // 60), self._minutes[state]
        if holds:
            seen.add(now)
        seen -= {minute for minute in seen if minute <= now - minutes}
        return len(seen) / minutes

    def streak(self, state: str, holds: bool) -> int:
        """The number of consecutive looks, including this one, in which the state has held."""
        self._streaks[state] = self._streaks[state] + 1 if holds else 0
        return self._streaks[state]
