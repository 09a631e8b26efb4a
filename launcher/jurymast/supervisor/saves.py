"""Saves, as the journal is told of them: one that is news at once, the others now and then, together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jurymast.core import events as ev
from jurymast.core.state import RunState
from jurymast.core.telling import is_news, pause_s


@dataclass
class Usual:
    """Saves of the ranks that were as usual: so many, `last` the newest, and how long training stood still
    for all of them."""

    last: ev.Saved
    number: int
    stall_s: float


@dataclass
class Saves:
    """`feed` journals an event, `heard` is told of saves that are not journalled singly, `now` is the
    supervisor's clock."""

    state: RunState
    feed: Callable[[ev.Event], None]
    heard: Callable[[ev.Event], None]
    now: Callable[[], float]
    # By the tier that agents copied to; "" for what the ranks saved.
    _last: dict[str, ev.Saved] = field(default_factory=dict)
    _told_at: dict[str, float] = field(default_factory=dict)
    _copies: dict[str, ev.Saved] = field(default_factory=dict)  # untold, by tier
    _usual: Usual | None = None

    def hear(self, event: ev.Event) -> None:
        """Any event; all but saves are journalled as they are."""
        if not isinstance(event, ev.Saved):
            self.feed(event)
            return
        kind = _kind(event)
        news = is_news(self.state, event, self._last.get(kind))
        self._last[kind] = event
        if news or self._due(kind):
            self._tell(event)
        elif event.copied:
            self._copies[event.tier] = event
        else:
            before = self._usual or Usual(event, 0, 0.0)
            self._usual = Usual(event, before.number + 1, before.stall_s + event.stall_s)
            self.heard(event)

    def look(self, *, forced: bool = False) -> None:
        """Tell of the copies whose time has come, or (`forced`) of all."""
        for save in list(self._copies.values()):
            if forced or self._due(save.tier):
                self._tell(replace(save, t=self.now()))

    def take(self, attempt: int) -> Usual | None:
        """What the ranks of an attempt have saved that the journal does not know: the caller tells it."""
        usual, self._usual = self._usual, None
        if usual is None or usual.last.attempt != attempt:
            return None
        self._told_at[""] = self.now()
        return usual

    @property
    def untold(self) -> bool:
        return self._usual is not None

    def _due(self, kind: str) -> bool:
        return self.now() >= self._told_at.get(kind, 0.0) + pause_s(self.state, self.now())

    def _tell(self, save: ev.Saved) -> None:
        self._told_at[_kind(save)] = self.now()
        if save.copied:
            self._copies.pop(save.tier, None)
        self.feed(save)


def _kind(save: ev.Saved) -> str:
    return save.tier if save.copied else ""
