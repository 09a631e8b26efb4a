"""What jurymast would have made of a job that it only observed (`sim.instead`): as JSON and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.estimate import Estimate
from jurymast.core.goodput import ordered
from jurymast.core.state.settings import RunPlan
from jurymast.report.text import Block, Line, Table, between, count, duration, node_time, percent
from jurymast.sim.bounds import StandsStill
from jurymast.sim.checkpoints import NODE_CRASH, read_measured
from jurymast.sim.instead import Instead, instead
from jurymast.sim.replay import NotReplayed

View = dict[str, Any]
RATIOS = ("runtime_goodput", "allocation_goodput")


def instead_view(found: Estimate, plan: RunPlan) -> View:
    """The key `instead` of the report: what the job would have had, with the script `as_it_is`, and
    `with_checkpointer`, if lost nodes fell silent. The ratios are the least and the greatest of these, and of
    those of nodes that crashed. `why_none`: why that is not known; `stopped`: why jurymast would have ended
    the job at the last of `incidents`."""
    view: View = {"spares": plan.spares, "why_none": None, "stopped": None, "incidents": []}
    measured = read_measured()
    try:
        as_it_is, with_ours = instead(found, plan, measured)
        crashed = instead(found, plan, measured, lost=NODE_CRASH)
    except (NotReplayed, StandsStill) as problem:
        return {**view, "why_none": str(problem)}
    view["incidents"] = _incidents(found, as_it_is)
    if as_it_is.stopped:
        return {**view, "stopped": as_it_is.stopped}
    answers = [_answer(one) for one in (as_it_is, with_ours, *crashed)]
    was_s = found.account.allocated_us / 1e6
    low, high = ({name: bound(one[name] for one in answers) for name in RATIOS} for bound in (min, max))
    saved = sorted(was_s - one["allocated_node_seconds"] for one in answers)
    return {
        **view, "as_it_is": answers[0], "with_checkpointer": answers[1], "ratios": low,
        "ratios_at_most": high, "allocated_node_seconds": was_s, "saved_node_seconds": saved[0],
        "saved_node_seconds_at_most": saved[-1], "durations": measured.source,
    }  # fmt: skip


def _answer(found: Instead) -> View:
    goodput = dict(zip(RATIOS, (found.goodput, found.allocated), strict=True))
    spent = {name: found.seconds[name] for name in ordered(list(found.seconds)) if found.seconds[name] > 0.0}
    return {**goodput, "allocated_node_seconds": found.node_s, "seconds": spent}


def _incidents(found: Estimate, as_it_is: Instead) -> list[View]:
    """What jurymast would have done about each failure, in the order in which they struck, and the seconds
    until the script trained again."""
    return [
        {
            "cause": one.cause, "action": one.action, "step": found.origin + one.step_lost_from,
            "seconds": as_it_is.start_s
            + sum(seconds for part, seconds in one.seconds().items() if part != "rework"),
        }
        for one in as_it_is.incidents
    ]  # fmt: skip


def instead_blocks(report: Mapping[str, Any]) -> list[Block]:
    view = report["instead"]
    blocks: list[Block] = [Line("what jurymast would have done", "bold")]
    blocks += [Line(f"  {text}", indent=4) for text in instead_sentences(report)]
    if view["incidents"]:
        rows = [
            [str(one["step"]), one["cause"], one["action"], duration(one["seconds"])]
            for one in view["incidents"]
        ]
        blocks.append(Table(("AT STEP", "CAUSE", "ACTION", "TRAINS AGAIN AFTER"), rows, frozenset({0, 3})))
    return [*blocks, Line(f"  ({told})", "dim", 3)] if (told := assumed(view)) else blocks


def assumed(view: Mapping[str, Any]) -> str:
    """What the answer rests on; "" without one."""
    if "durations" not in view:
        return ""
    return (
        "by a simulation of the job's own failures, each at its step, with the job's own time to start and "
        f"{view['durations']}; with the script as it is, which goes back as far as it did: "
        f"{percent(view['as_it_is'][RATIOS[0]])}, with jurymast.Checkpointer "
        f"by the policy's cadence: {percent(view['with_checkpointer'][RATIOS[0]])}; the range is of such "
        "answers, so that the truth may lie outside of it"
    )


def instead_sentences(report: Mapping[str, Any]) -> list[str]:
    view = report["instead"]
    spares = f"with {count(view['spares'], 'spare')}"
    if view["why_none"] is not None:
        return [f"not known: {view['why_none']}"]
    if view["stopped"]:
        failures = count(len(view["incidents"]), "failure")
        return [f"{spares}, it would have ended the job after {failures}: {view['stopped']}"]
    told = [
        f"{name.replace('_', ' ')} {between(least, view['ratios_at_most'][name])} {spares}, instead of "
        f"{between(report['ratios'][name], report['ratios_at_most'][name])}"
        for name, least in view["ratios"].items()
    ]
    return [*told, f"{_saved(view)}, of {node_time(view['allocated_node_seconds'])} allocated"]


def _saved(view: Mapping[str, Any]) -> str:
    """The node-time saved, with that of the spares; the range may begin below nothing, or end there."""
    low, high = view["saved_node_seconds"], view["saved_node_seconds_at_most"]
    if low >= 0.0:
        return f"{node_time(low)} to {node_time(high)} saved"
    if high <= 0.0:
        return f"nothing saved: {node_time(-high)} to {node_time(-low)} more"
    return f"between {node_time(-low)} more and {node_time(high)} saved"
