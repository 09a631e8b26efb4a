"""What recovery in process spared a run, as far as the journal shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from jurymast.core.goodput import Account
from jurymast.core.state.incident import Incident
from jurymast.report.text import count, duration

# From the launch of an attempt to the end of its first step.
START = frozenset({"relaunch", "restore", "warm_up"})


def in_process_json(account: Account, incidents: Sequence[Incident]) -> dict[str, Any] | None:
    """None if ranks never went on in their processes. Steps that another failure took before the run was
    where it had been are not among those that were spared."""
    spared = [one for one in incidents if one.in_process]
    if not spared:
        return None
    restarted = [one for one in incidents if one.launched_at is not None and not one.in_process]
    kept = sum(one.kept_steps for one in spared if one.recovered_at is not None)
    step_s = median([pace.step_s for pace in account.paces]) if account.paces else None
    began = _starts_s(account)
    return {
        "recoveries": len(spared), "went_back": sum(bool(one.went_back) for one in spared),
        "kept_steps": kept, "kept_seconds": None if step_s is None else kept * step_s,
        "start_seconds": _median(began.get(one.attempt + 1) for one in spared),
        "restart_start_seconds": _median(began.get(one.attempt + 1) for one in restarted),
    }  # fmt: skip


def _starts_s(account: Account) -> dict[int, float]:
    """How long each attempt took that did a step."""
    stepped = {one.attempt for one in account.timeline if one.category in ("step", "rework")}
    found = dict.fromkeys(stepped, 0.0)
    for one in account.timeline:
        if one.attempt in found and one.category in START:
            found[one.attempt] += one.us / 1e6
    return found


def _median(seconds: Iterable[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return median(known) if known else None


def in_process_text(found: Mapping[str, Any]) -> str:
    """The sum of what was spared, and what new processes took in each case."""
    kept = count(found["kept_steps"], "step")
    text = f"after {count(found['recoveries'], 'failure')}; {kept} not done again"
    if found["kept_steps"] and found["kept_seconds"] is not None:
        text += f", about {duration(found['kept_seconds'])} at the median step time"
    if found["went_back"]:
        text += f"; {found['went_back']} went back to a save"
    if found["start_seconds"] is None:
        return text
    text += f"; from launch to first step {duration(found['start_seconds'])}"
    if found["restart_start_seconds"] is None:
        return f"{text} (median; no restart to compare it with)"
    return f"{text}, by restart {duration(found['restart_start_seconds'])} (medians)"
