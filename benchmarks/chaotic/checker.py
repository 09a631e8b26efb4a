"""Holds what is left of a run against the log of what struck it: the weights, the steps that were restored,
the journal's account, and what the run left behind. It reads evidence only: anybody can do it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.chaotic.faultlog import Struck, read_log
from benchmarks.chaotic.plans import ENDS_JOB, KINDS, NODE, RANK, Plan, cancels, destroys, loses_replicas
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.images import LIVE, SHARED
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import ENDED, Phase, RunState
from jurymast.journal import events, initial_state, read
from jurymast.rundir import RunDirectory

# An incident may begin this long before the log says that its fault was done, and this long after it was
# over: a node that is gone may be missed, and what it held, only by the next allocation.
EARLY_S, LATE_S = 1.0, 60.0
# Alone: no other fault strikes, or is in force, for so long before it and after it.
BEFORE_S, AFTER_S = 15.0, 6.0
NEAR_S = 3.0
# Faults that strike while the run is about to end need not be noticed.
LAST_S = 5.0
SUM_S, UNKNOWN_SHARE = 1e-3, 0.01
# The kinds whose incidents name another node than the one that was struck, as nobody can know better.
_NAMES_OTHERS = frozenset({"hang"})
# Where one of these struck, other nodes may look as if they were lost.
_SEEN_ELSEWHERE = frozenset({
    "storage hangs", "run directory hangs", "stall", "suspended", "supervisor", "isolate", "one way", "flaps",
})  # fmt: skip


class Facts(msgspec.Struct):
    """What a trial found besides the run's directory. `left`: what the run had left behind; `weights`: None
    if there are none; `ended`: within its time."""

    weights: str | None
    undisturbed: str
    ended: bool
    left: list[str]
    slurm: str = ""  # the cluster's release
    seconds: float = 0.0
    load: float = 0.0  # of the machine, when the run ended
    revision: str = ""  # of jurymast, as git names it


@dataclass
class Evidence:
    plan: Plan
    log: list[Struck]
    facts: Facts
    events: list[ev.Event]
    state: RunState
    report: dict[str, Any]
    journal_trouble: str = ""
    _struck: list[Struck] = field(init=False)

    def __post_init__(self) -> None:
        self._struck = [one for one in self.log if not one.why_not and one.kind in KINDS]

    @property
    def struck(self) -> list[Struck]:
        """What was really done."""
        return self._struck


def load(folder: Path) -> Evidence:
    """What a trial has kept."""
    directory = RunDirectory(folder / "run")
    found = list(events(read(directory)))
    state = initial_state(directory.plan())
    trouble = ""
    for event in found:
        try:
            step(state, event)
        except Exception as error:
            trouble = f"{type(event).__name__} at {event.t}: {type(error).__name__}: {error}"
            break
    report = folder / "report.json"
    return Evidence(
        Plan.from_json((folder / "plan.json").read_text()), read_log(folder / "faults.jsonl"),
        msgspec.json.decode((folder / "facts.json").read_bytes(), type=Facts), found, state,
        json.loads(report.read_text()) if report.exists() else {}, trouble,
    )  # fmt: skip


def wrong(evidence: Evidence) -> list[str]:
    """Return everything that is wrong, one line each."""
    rules = (_outcome, _restores, _account, _explained, _noticed, _taken_out, _left)
    return [f"{rule.__name__[1:]}: {words}" for rule in rules for words in rule(evidence)]


BROKEN = "wrong"
_AS_IT_SHOULD = {Phase.SUCCEEDED: "bit-identical", Phase.CANCELLED: "cancelled", Phase.FAILED: "stopped"}
OUTCOMES = (*_AS_IT_SHOULD.values(), BROKEN)


def outcome(evidence: Evidence, found: Sequence[str]) -> str:
    """How the run ended, in which `found` is wrong."""
    return BROKEN if found else _AS_IT_SHOULD.get(evidence.state.phase, BROKEN)


def _outcome(evidence: Evidence) -> Iterator[str]:
    state, facts = evidence.state, evidence.facts
    if evidence.journal_trouble:
        yield f"the journal cannot be played again: {evidence.journal_trouble}"
    if not facts.ended or state.phase not in ENDED:
        yield f"the run has not ended: {state.phase.value}, step {state.step}"
    elif state.phase is Phase.SUCCEEDED:
        if facts.weights is None:
            yield "it succeeded and wrote no result"
        elif facts.weights != facts.undisturbed:
            yield f"other weights than an undisturbed run's: {facts.weights[:12]}, {facts.undisturbed[:12]}"
    elif not _rightly_ended(evidence):
        yield f"{state.phase.value} with {state.exit_code}: {state.end_reason}"


def _rightly_ended(evidence: Evidence) -> bool:
    state = evidence.state
    cancelled = any(one.kind == "cancelled" for one in evidence.struck)
    if state.phase is Phase.CANCELLED:
        return cancels(evidence.plan) and cancelled
    return destroys(evidence.plan) and "checkpoint" in state.end_reason


def _restores(evidence: Evidence) -> Iterator[str]:
    """Nothing older was restored than what the plan cannot have destroyed; and what was said was done."""
    safe_in = ("shared",) if loses_replicas(evidence.plan) else ("shared", "peer")
    safe, planned = 0, None
    restored, written = set[int](), set[int]()
    for event in evidence.events:
        if isinstance(event, ev.Saved) and event.ok and event.tier in safe_in:
            safe = max(safe, event.step)
            written |= {event.step} if event.tier == SHARED else set()
        elif isinstance(event, ev.RestorePlanned):
            planned = event
            if event.step < (floor := _floor(evidence, safe, event.t)):
                yield f"attempt {event.attempt} was to restore step {event.step}, and {floor} was safe"
        elif isinstance(event, ev.Restored):
            restored.add(event.attempt)
            damaged = any(one.damaged for one in evidence.struck)
            told = None if planned is None else planned.step
            # Ranks that live have it, or its write was over in the meantime.
            found = event.tier == LIVE or (event.tier == SHARED and event.step in written)
            newer = found and told is not None and event.step > told
            if told is None or (event.step != told and not newer and not (damaged and event.step < told)):
                yield f"attempt {event.attempt} restored step {event.step}, and was told {told}"
        elif isinstance(event, ev.Progress) and event.attempt not in restored:
            restored.add(event.attempt)
            yield f"attempt {event.attempt} did steps and had restored nothing"


def _floor(evidence: Evidence, safe: int, t: float) -> int:
    """What was safe, unless it was damaged since."""
    damaged = [step for one in evidence.struck if one.at <= t for step in one.damaged]
    return 0 if damaged and (destroys(evidence.plan) or safe in damaged) else safe


def _account(evidence: Evidence) -> Iterator[str]:
    report = evidence.report
    if not report:
        yield "there is no report"
        return
    booked = sum(report["categories"].values())
    asked = report["allocated_node_seconds"] + report["queue_node_seconds"]
    if abs(booked - asked) > SUM_S:
        yield f"{booked:.3f} node-seconds are in categories, {asked:.3f} in all"
    unknown = report["categories"].get("unknown", 0.0)
    if unknown > UNKNOWN_SHARE * booked and evidence.state.phase is Phase.SUCCEEDED:
        yield f"nobody knows what {unknown:.1f} of {booked:.1f} node-seconds were for"
    told, happened = len(report["incidents"]), len(evidence.state.incidents)
    if told != happened:
        yield f"{told} incidents in the report, {happened} in the run"


def _explained(evidence: Evidence) -> Iterator[str]:
    """Each incident has a fault that may have led to it."""
    for one in evidence.state.incidents:
        if one.cause and not any(may_be(struck, one) for struck in evidence.struck):
            yield (
                f"incident {one.id} ({one.cause} {one.node}, {one.action}) has no fault: {one.evidence[:200]}"
            )


def may_be(struck: Struck, one: Incident) -> bool:
    """Whether the fault may have led to the incident."""
    causes = KINDS[struck.kind].causes
    begins, ends = struck.at - EARLY_S, struck.until + LATE_S
    # The end of the job is the cause of what else was lost just before it, and was not decided on yet.
    over_at = one.recovered_at or one.ended_at or one.detected_at
    last = over_at if struck.kind in ENDS_JOB else one.detected_at
    return one.cause in causes and begins <= last and one.fault_at <= ends


def _noticed(evidence: Evidence) -> Iterator[str]:
    """Each fault that shows was noticed; if nothing else was wrong, under its own name, there and then."""
    last_s = (evidence.state.ended_at or float("inf")) - LAST_S
    for one in evidence.struck:
        kind = KINDS[one.kind]
        elsewhere = kind.strikes in (RANK, NODE) and not one.placed
        if not kind.shows or elsewhere or one.done_at > last_s:
            continue
        alone = one.phase == "running" and not _others(evidence.struck, one)
        incidents = evidence.state.incidents
        found = [it for it in incidents if _within(it, one) and (not alone or it.cause in kind.causes)]
        if not found:
            yield f"nobody noticed {one.kind} of {one.node or 'the run'} at step {one.step}"
        elif alone:
            named = kind.strikes in (RANK, NODE) and one.kind not in _NAMES_OTHERS
            if named and not any(it.node == one.node for it in found):
                yield f"{one.kind} of {one.node} is told of {', '.join(it.node or 'nobody' for it in found)}"
            off_s = min(abs(it.fault_at - one.at) for it in found)
            if off_s > NEAR_S + one.done_at - one.at:
                yield f"{one.kind} of {one.node}: the journal has its moment {off_s:.1f} s off"


def _within(incident: Incident, one: Struck) -> bool:
    """Whether the incident was open when the fault struck, or began soon after."""
    over_at = incident.ended_at or incident.recovered_at or float("inf")
    return incident.fault_at <= one.until + LATE_S and over_at >= one.at - EARLY_S


def _others(struck: Sequence[Struck], one: Struck) -> list[Struck]:
    return [
        other
        for other in struck
        if other is not one and other.at <= one.done_at + AFTER_S and other.until >= one.at - BEFORE_S
    ]


def _taken_out(evidence: Evidence) -> Iterator[str]:
    """Only nodes at which something struck."""
    guilty = {name for one in evidence.struck if KINDS[one.kind].outs for name in (one.node, one.other)}
    stalls = any(one.kind in _SEEN_ELSEWHERE for one in evidence.struck)
    for name in evidence.state.excluded:
        if name not in guilty and not stalls:
            yield f"{name} is excluded: {evidence.state.excluded[name].reason}"


def _left(evidence: Evidence) -> Iterator[str]:
    yield from evidence.facts.left
