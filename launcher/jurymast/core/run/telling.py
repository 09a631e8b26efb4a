"""What is journalled of a run without trouble: less and less often, so that a journal of months is still read
in a second. Anything unusual is journalled at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from msgspec import structs

from jurymast.core import events as ev
from jurymast.core.checkpoints.copies import Key
from jurymast.core.effects import Record
from jurymast.core.nodes.reports import Reach, Reports
from jurymast.core.run.state import Phase, RunState

# Everything is journalled while a run is young; then about this many lines of a kind until it is twice as
# old. What is not yet journalled is lost if all nodes die at once: never more than the longest pause.
YOUNG_S = 600.0
LINES = 500
PAUSE_MAX_S = 600.0
# A save stalls much longer than usual if it takes this many times as long, and this many seconds more.
LONG_TIMES, LONG_S = 3.0, 0.1
SIZE_MOVED = 0.1


def pause_s(state: RunState, now: float) -> float:
    """Return the seconds from one regular line to the next of its kind, at `now`."""
    return min(PAUSE_MAX_S, max(0.0, now - state.submitted_at - YOUNG_S) / LINES)


def is_news(state: RunState, save: ev.Saved, last: ev.Saved | None) -> bool:
    """Return whether a save is journalled at once. `last`: the previous one of its kind, journalled or not;
    None: unknown here."""
    if last is None or (last.attempt, last.tier) != (save.attempt, save.tier) or not (save.ok and last.ok):
        return True
    if state.phase is not Phase.RUNNING or state.incident is not None:
        return True
    asked_for = state.cadence is not None and state.cadence.by and save.step == state.cadence.first_step
    usual_s = median(state.stalls) if state.stalls else 0.0
    return (
        bool(asked_for)
        or save.stall_s > LONG_TIMES * usual_s + LONG_S
        or abs(save.size_bytes - last.size_bytes) > SIZE_MOVED * last.size_bytes
    )


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
    """Regular saves of the ranks: how many, the newest as `last`, and how long training stood still for all
    of them."""

    last: ev.Saved
    number: int
    stall_s: float


@dataclass
class SaveTeller:
    """Decides which saves are journalled, and when. Times are Unix times in seconds."""

    state: RunState
    # By the tier that agents copied to; "" for what the ranks saved.
    _last: dict[str, ev.Saved] = field(default_factory=dict)
    _told_at: dict[str, float] = field(default_factory=dict)
    _copies: dict[str, ev.Saved] = field(default_factory=dict)  # untold, by tier
    _usual: Usual | None = None

    def hear(self, save: ev.Saved, now: float) -> list[ev.Saved]:
        """Return what to journal of this save now: the save, or nothing yet."""
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
        """Return the copies to be journalled because their time has come, or (`forced`) all."""
        due = [save for save in self._copies.values() if forced or self._due(save.tier, now)]
        return [self._tell(structs.replace(save, t=now), now) for save in due]

    def take(self, attempt: int, now: float) -> Usual | None:
        """Return what the ranks of an attempt have saved that is not in the journal: the caller journals
        it."""
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


PROGRESS_INTERVAL_S = 2.0


class ProgressTeller:
    """Progress of the state's attempt, with its regular saves. `now` is Unix time in seconds."""

    def __init__(self, state: RunState, reports: Reports, saves: SaveTeller) -> None:
        self._state, self._reports, self._saves = state, reports, saves
        self._progress_at = 0.0

    @property
    def step(self) -> int:
        """The newest step done, journalled or not; while an attempt has done none, the newest of earlier
        ones."""
        state = self._state
        reach = self._reports.reach() if state.phase is Phase.RUNNING else None
        told = state.step if state.first_step_at is not None else state.best_step
        return told if reach is None else max(told, reach.step)

    def look(self, now: float, *, forced: bool = False) -> list[ev.Event]:
        """Return what to journal: at the first step, if it ends an incident, otherwise from time to time."""
        if self._state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        told: list[ev.Event] = [*self._saves.look(now, forced=forced)]
        first, incident = self._state.first_step_at is None, self._state.incident
        interval_s = max(PROGRESS_INTERVAL_S, pause_s(self._state, now))
        due = forced or first or now >= self._progress_at + interval_s
        if not due and incident is None:
            return told  # to ask all ranks takes long where there are many
        reach = self._reports.reach()
        if reach is None:
            return told
        done = reach.step - self._state.step
        if not first and done <= 0 and not (forced and done == 0 and self._saves.untold):
            return told
        ends = self._state.recovers(reach.step, reach.absolute)
        return [*told, self._progress(now, reach)] if due or ends else told

    def _progress(self, now: float, reach: Reach) -> ev.Progress:
        self._progress_at = now
        first, done = self._state.first_step_at is None, reach.step - self._state.step
        stepped_at = now - reach.ago_s
        event = ev.Progress(
            t=now, attempt=self._state.attempt, step=reach.step, stepped_at=stepped_at,
            absolute=reach.absolute,
        )  # fmt: skip
        if (usual := self._saves.take(event.attempt, now)) is not None:
            event = structs.replace(
                event, saves=usual.number, saved_step=usual.last.step, saved_in=usual.last.tier,
                stall_s=round(usual.stall_s, 6),
            )  # fmt: skip
        took_s = stepped_at - self._state.stepped_at - event.stall_s
        step_s = took_s / done if done > 0 and not first else 0.0
        return structs.replace(event, step_s=max(0.0, step_s))
