"""Saves, as the journal is told of them: one that is news at once, the others now and then, together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from jurymast.core import events as ev
from jurymast.core.checkpoints.copies import Key
from jurymast.core.effects import Record
from jurymast.core.run.state import RunState
from jurymast.core.run.telling import is_news, pause_s


def copied(
    tier: str, key: Key, now: float, *, size_bytes: int = 0, why: str = "", seconds: float = 0.0
) -> Record:
    """Agents have copied a state to a tier, or (`why`) could not."""
    return Record(
        ev.Saved(
            t=now, attempt=key[1], step=key[0], tier=tier, ok=not why, stall_s=0.0, size_bytes=size_bytes,
            error=why, copied=True, seconds=seconds,
        )
    )  # fmt: skip


@dataclass
class Usual:
    """Saves of the ranks that were as usual: so many, `last` the newest, and how long training stood still
    for all of them."""

    last: ev.Saved
    number: int
    stall_s: float


@dataclass
class Saves:
    """Decides which saves the journal is told of, and when. Times are Unix times in seconds."""

    state: RunState
    # By the tier that agents copied to; "" for what the ranks saved.
    _last: dict[str, ev.Saved] = field(default_factory=dict)
    _told_at: dict[str, float] = field(default_factory=dict)
    _copies: dict[str, ev.Saved] = field(default_factory=dict)  # untold, by tier
    _usual: Usual | None = None

    def hear(self, save: ev.Saved, now: float) -> list[ev.Saved]:
        """What is to be journalled of it now: the save, or nothing yet."""
        kind = _kind(save)
        news = is_news(self.state, save, self._last.get(kind))
        self._last[kind] = save
        if news or self._due(kind, now):
            return [self._tell(save, now)]
        if save.copied:
            self._copies[save.tier] = save
        else:
            before = self._usual or Usual(save, 0, 0.0)
            self._usual = Usual(save, before.number + 1, before.stall_s + save.stall_s)
        return []

    def look(self, now: float, *, forced: bool = False) -> list[ev.Saved]:
        """The copies that are to be journalled because their time has come, or (`forced`) all."""
        due = [save for save in self._copies.values() if forced or self._due(save.tier, now)]
        return [self._tell(replace(save, t=now), now) for save in due]

    def take(self, attempt: int, now: float) -> Usual | None:
        """What the ranks of an attempt have saved that the journal does not know: the caller tells it."""
        usual, self._usual = self._usual, None
        if usual is None or usual.last.attempt != attempt:
            return None
        self._told_at[""] = now
        return usual

    @property
    def untold(self) -> bool:
        return self._usual is not None

    def _due(self, kind: str, now: float) -> bool:
        return now >= self._told_at.get(kind, 0.0) + pause_s(self.state, now)

    def _tell(self, save: ev.Saved, now: float) -> ev.Saved:
        self._told_at[_kind(save)] = now
        if save.copied:
            self._copies.pop(save.tier, None)
        return save


def _kind(save: ev.Saved) -> str:
    return save.tier if save.copied else ""
