"""What is journalled of a run without trouble: less and less often, so that a journal of months is still read
in a second. Anything unusual is journalled at once."""

from __future__ import annotations

from statistics import median
from typing import Any

from msgspec import structs

from jurymast.core.judges.energy import EnergyUsed
from jurymast.core.nodes.hangs import Reach, Reports
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Record
from jurymast.core.state.images import StateId
from jurymast.core.state.run import Phase, RunState

# Everything is journalled while a run is young; then about this many lines of a kind until it is twice as
# old. What is not yet journalled is lost if all nodes die at once: never more than the longest pause.
YOUNG_S = 600.0
LINES = 500
PAUSE_MAX_S = 600.0
# A save stalls much longer than usual if it takes this many times as long, and this many seconds more.
LONG_TIMES, LONG_S = 3.0, 0.1
SIZE_MOVED = 0.1
PROGRESS_INTERVAL_S = 2.0


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
    tier: str, key: StateId, now: float, *, size_bytes: int = 0, why: str = "", seconds: float = 0.0
) -> Record:
    """Agents have copied a state to a tier, or (`why`) could not."""
    return Record(
        ev.Saved(
            t=now, attempt=key.attempt, step=key.step, tier=tier, ok=not why, stall_s=0.0,
            size_bytes=size_bytes, error=why, copied=True, seconds=seconds,
        )
    )  # fmt: skip


class Teller:
    """Decides which saves are journalled and when, and how often the progress of the state's attempt is, with
    its regular saves. `now` is Unix time in seconds."""

    def __init__(self, state: RunState, reports: Reports) -> None:
        self._state, self._reports = state, reports
        self._progress_at = 0.0
        self._energy = EnergyUsed(state.joules)
        # By the tier that agents copied to; "" for what the ranks saved.
        self._last: dict[str, ev.Saved] = {}
        self._told_at: dict[str, float] = {}
        self._copies: dict[str, ev.Saved] = {}  # the newest of each tier, untold
        self._usual: list[ev.Saved] = []  # regular saves of the ranks, untold

    @property
    def step(self) -> int:
        """The newest step done, journalled or not; while an attempt has done none, the newest of earlier
        ones."""
        state = self._state
        reach = self._reports.reach() if state.phase is Phase.RUNNING else None
        told = state.step if state.first_step_at is not None else state.best_step
        return told if reach is None else max(told, reach.step)

    def on_energy(self, node: str, joules: float) -> None:
        """A node's heartbeat says what its GPUs have used since its agent first saw them."""
        self._energy.take(node, joules)

    def on_saved(self, save: ev.Saved, now: float) -> bool:
        """Return whether this save is to be journalled now."""
        kind = save.tier if save.copied else ""
        news = is_news(self._state, save, self._last.get(kind))
        self._last[kind] = save
        if news or self._due(kind, now):
            self._told_at[kind] = now
            self._copies.pop(kind, None)
            return True
        if save.copied:
            self._copies[kind] = save
        else:
            self._usual.append(save)
        return False

    def _due(self, kind: str, now: float) -> bool:
        return now >= self._told_at.get(kind, 0.0) + pause_s(self._state, now)

    def on_time(self, now: float, *, forced: bool = False) -> list[ev.Event]:
        """Return what to journal: copies whose time has come, and progress at the first step, if it ends an
        incident, otherwise from time to time. `forced`: all that is untold."""
        if self._state.phase not in (Phase.RUNNING, Phase.STOPPING):
            return []
        copies = [tier for tier in self._copies if forced or self._due(tier, now)]
        self._told_at.update(dict.fromkeys(copies, now))
        told: list[ev.Event] = [structs.replace(self._copies.pop(tier), t=now) for tier in copies]
        first = self._state.first_step_at is None
        interval_s = max(PROGRESS_INTERVAL_S, pause_s(self._state, now))
        due = forced or first or now >= self._progress_at + interval_s
        if not due and self._state.incident is None:
            return told  # to ask all ranks takes long where there are many
        reach = self._reports.reach()
        if reach is None:
            return told
        done = reach.step - self._state.step
        if not first and done <= 0 and not (forced and done == 0 and self._usual):
            return told
        ends = self._state.recovers(reach.step, reach.absolute)
        return [*told, self._progress(now, reach)] if due or ends else told

    def _progress(self, now: float, reach: Reach) -> ev.Progress:
        state, self._progress_at = self._state, now
        saves = self._take_usual(now)
        done, stepped_at = reach.step - state.step, now - reach.ago_s
        took_s = stepped_at - state.stepped_at - saves.get("stall_s", 0.0)
        step_s = took_s / done if done > 0 and state.first_step_at is not None else 0.0
        return ev.Progress(
            t=now, attempt=state.attempt, step=reach.step, stepped_at=stepped_at, absolute=reach.absolute,
            given=reach.given, step_s=max(0.0, step_s), samples=reach.samples, tokens=reach.tokens,
            joules=round(self._energy.total, 1), **saves,
        )  # fmt: skip

    def _take_usual(self, now: float) -> dict[str, Any]:
        """The regular saves of this attempt's ranks that are untold, as fields of the Progress that tells
        them."""
        usual, self._usual = self._usual, []
        if not usual or usual[-1].attempt != self._state.attempt:
            return {}
        self._told_at[""] = now
        stall_s = round(sum(save.stall_s for save in usual), 6)
        newest = usual[-1]
        return {"saves": len(usual), "saved_step": newest.step, "saved_in": newest.tier, "stall_s": stall_s}
