"""What status tells about the cadence: how often a run saves, and the failure rate that this follows from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.checkpoints.cadence import NEVER, Schedule, cost_if, next_save_step
from jurymast.core.checkpoints.copies import SHARED
from jurymast.core.checkpoints.writes import IDLE_SHARE, durable_every_s
from jurymast.core.planning.failure_rate import failure_times
from jurymast.core.planning.optimum import Saving
from jurymast.core.run.recovery import failure_rate
from jurymast.core.run.state import Phase, RunState
from jurymast.core.settings import RunPlan
from jurymast.report.words import count, duration

LEVEL = 0.95


def next_save(state: RunState) -> int | None:
    """The step that is saved next; None where that is not known."""
    if state.phase is not Phase.RUNNING or state.first_step_at is None:
        return None
    agreed, every = state.cadence, state.settings.cadence_steps
    own = None if every is None else next_save_step(state.step, every)
    if agreed is None:
        return own
    schedule = Schedule(agreed.number, agreed.from_step, agreed.first_step, agreed.every_steps)
    due = schedule.due_after(state.step)
    return own if due == NEVER else min(due, own or due)


def cadence_json(state: RunState, plan: RunPlan, now: float) -> dict[str, Any]:
    """Status' key `cadence`. What is not agreed or measured yet is null."""
    agreed = state.cadence
    shared = state.settings.shared_every_s
    if shared is None and (written := state.saved.get(SHARED)):
        best_s = durable_every_s(state, written.seconds, state.now)
        shared = None if best_s is None else max(best_s, (1.0 + IDLE_SHARE) * written.seconds)
    values: dict[str, Any] = {
        "every_steps": state.settings.cadence_steps, "every_seconds": state.settings.cadence_s,
        "from_step": None, "next_save_step": next_save(state), "reason": None, "asked_by": None,
        "stall_seconds": None, "durable_every_seconds": shared, "mtbf_seconds": None,
        "cost_if_rate_twice": None, "rate": _rate(state, plan, now),
    }  # fmt: skip
    if agreed is None:
        return values
    saving = Saving(agreed.stall_s, agreed.copy_s, agreed.slowdown)
    every_s = agreed.every_steps * agreed.step_s or None
    if shared is not None and every_s is not None:  # what is copied is what was saved
        values["durable_every_seconds"] = max(shared, every_s)
    known = bool(agreed.stall_s and agreed.mtbf_s and every_s)
    values.update(
        every_steps=agreed.every_steps or values["every_steps"], every_seconds=every_s,
        from_step=agreed.from_step, reason=agreed.reason, asked_by=agreed.by or None,
        stall_seconds=agreed.stall_s or None, mtbf_seconds=agreed.mtbf_s or None,
        cost_if_rate_twice=cost_if(every_s, saving, agreed.mtbf_s) if known and every_s else None,
    )  # fmt: skip
    return values


def _rate(state: RunState, plan: RunPlan, now: float) -> dict[str, Any] | None:
    """Failures per 1,000 node-days with the interval of its posterior, and what that rests on."""
    found = failure_rate(state, state.now if state.ended else max(now, state.now))
    if found is None:
        return None
    low, high = found.interval(LEVEL)
    return {
        "mean": found.rate, "low": low, "high": high, "level": LEVEL,
        "failures": len(failure_times(state.incidents)), "earlier": plan.earlier_text or None,
        "node_days": found.exposure_node_days,
    }  # fmt: skip


def cadence_lines(view: Mapping[str, Any]) -> list[str]:
    """For people: the cadence, then the rate."""
    found = view["cadence"]
    rate = found["rate"]
    if rate is None:
        return []
    lines = [f"saves      {told}"] if (told := _saves(found)) else []
    earlier = f", {rate['earlier']}" if rate["earlier"] else ""
    lines.append(
        f"failures   {_number(rate['mean'])} per 1,000 node-days expected "
        f"({100 * rate['level']:.0f} %: {_number(rate['low'])} to {_number(rate['high'])}), "
        f"after {count(rate['failures'], 'failure')} here{earlier}"
    )
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.2g}"


def _saves(found: Mapping[str, Any]) -> str:
    parts = []
    if found["every_steps"]:
        time = f" ({duration(found['every_seconds'])})" if found["every_seconds"] else ""
        parts.append(f"every {count(found['every_steps'], 'step')}{time}")
    elif found["every_seconds"]:
        parts.append(f"every {duration(found['every_seconds'])}")
    if found["next_save_step"] is not None:
        parts.append(f"next at step {found['next_save_step']}")
    if found["durable_every_seconds"]:
        parts.append(f"durable every {duration(found['durable_every_seconds'])}")
    if found["reason"]:
        parts.append(str(found["reason"]))
    if found["cost_if_rate_twice"] is not None:
        parts.append(f"twice the failures would cost {100 * found['cost_if_rate_twice']:.1g} points")
    return ", ".join(parts)
