"""What a new run learns from earlier ones: how often nodes failed (also by Slurm's accounting of other jobs),
and which nodes to exclude while enough others are left.

Each journal of a runs directory is replayed once; its summary is kept there until the journal changes.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.exclusion import kept_out
from jurymast.cluster.kept import KEPT_BYTES_MAX, Kept, entries_in
from jurymast.core.judges.history import (
    NodeDeparture,
    NodeRecord,
    PastRun,
    Span,
    comebacks,
    frail_nodes,
    history,
    more_exposure,
    watched_in,
)
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import AFTER_REPAIR, DAY_S, Watched, learned_before, prior
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Node, Phase, Role, RunState
from jurymast.core.state.settings import Avoided, RunPlan
from jurymast.errors import ClusterUnavailableError, OtherJournalError, RunDirectoryError
from jurymast.jobs import UNIX_TIMES, run_command
from jurymast.journal import VERSION as JOURNAL_VERSION
from jurymast.journal import initial_state, read, take
from jurymast.reference import counts_against_node
from jurymast.rundir import RunDirectory, run_names, write_json

# ---- earlier runs

VERSION = 1


def summary_file(runs: Path) -> Path:
    """The file with the summaries of this user's earlier runs; users may share the directory."""
    return runs / f".past-runs-{os.geteuid()}.json"


def forgiven_file(runs: Path) -> Path:
    return runs / f".forgiven-nodes-{os.geteuid()}.json"


def past_runs(runs: Path, other: Callable[[int], object] = lambda version: None) -> list[PastRun]:
    """All runs of this user below `runs` on Slurm nodes, oldest first. Unreadable ones are left out; of each
    whose journal is of another version, `other` is told that version."""
    kept: Kept[PastRun | None] = Kept(
        summary_file(runs), VERSION, lambda values: values and PastRun.from_json(values),
        lambda run: run and run.to_json(),
    )  # fmt: skip
    found, names = [], _names(runs)
    for name in names:
        with contextlib.suppress(RunDirectoryError, OSError, KeyError, TypeError, ValueError):
            try:
                found.append(kept.of(RunDirectory(runs / name), _read))
            except OtherJournalError as error:
                other(error.version)
    kept.save(names)
    return _each_once([run for run in found if run is not None])


def passed_over(versions: Sequence[int]) -> list[str]:
    """What to say of runs that were not counted because their journals are of these versions."""
    if not versions:
        return []
    told = ", ".join(
        f"{number} run{'' if number == 1 else 's'} of journal version {version}"
        for version, number in sorted(Counter(versions).items())
    )
    return [f"not counted: {told}; this jurymast reads version {JOURNAL_VERSION}"]


def _each_once(runs: list[PastRun]) -> list[PastRun]:
    """The runs without what another directory of the same run has told: a copy would be a second failure of
    the same node."""
    told: set[tuple[Any, ...]] = set()

    def new(*fact: Any) -> bool:
        known = fact in told
        told.add(fact)
        return not known

    return [
        replace(
            run,
            spans=tuple(span for span in run.spans if new(run.run, "span", span.start)),
            failures=tuple(at for at in run.failures if new(run.run, "failure", at)),
            departures=tuple(left for left in run.departures if new(run.run, left.node, left.at)),
            xids=tuple(seen for seen in run.xids if new(run.run, "xid", seen)),
        )
        for run in runs
    ]


def forgiven_nodes(runs: Path) -> dict[str, float]:
    """Nodes whose record was cleared, with the time (seconds since the epoch)."""
    kept = entries_in(forgiven_file(runs), VERSION)
    return {name: float(at) for name, at in kept.items() if isinstance(at, int | float)}


def forgive(runs: Path, node: str, now: float) -> None:
    """Stop what `node` has done so far from keeping it out of runs. Raises OSError."""
    path = forgiven_file(runs)
    if foreign.is_taken(path):
        with contextlib.suppress(foreign.NotOurs):  # another user's does not count, and is replaced
            foreign.read_own(path, KEPT_BYTES_MAX)  # what cannot be read now would else be lost
    kept = {**forgiven_nodes(runs), node: now}
    write_json(forgiven_file(runs), {"v": VERSION, "entries": kept})


def _names(runs: Path) -> list[str]:
    """Run ids, oldest first, since they begin with their time. Only this user's runs count: others who may
    write into the directory could invent runs, and with them failures of nodes."""
    try:
        names = run_names(runs)
    except OSError:
        return []
    return [name for name in names if foreign.owns(runs / name)]


def _read(directory: RunDirectory) -> PastRun | None:
    """Replay one run; None for a local one, which has no real nodes, and for one that was only observed.
    Raises RunDirectoryError."""
    plan = directory.plan()
    if plan.cluster != "slurm" or plan.observed:
        return None
    state = initial_state(plan)
    reader = NodeReader(state, lambda event: step(state, event))
    for entry in read(directory):
        take(state, entry, reader.take)
    return reader.summary(plan.run, plan.exclude)


class NodeReader:
    """Replays a journal, whose events `advance` applies to `state`, and records which nodes left, when and
    why."""

    def __init__(self, state: RunState, advance: Callable[[ev.Event], object]) -> None:
        self.state = state
        self._advance = advance
        self._spans: list[Span] = []
        self._held: tuple[float, tuple[str, ...]] | None = None  # the current allocation
        self._placed: tuple[str, ...] = ()  # the nodes of its first attempt
        self._roles: dict[str, Role] = {}
        self._left: list[NodeDeparture] = []
        self._xids: list[tuple[float, str, str]] = []
        self._excluded: set[str] = set()

    def take(self, event: ev.Event) -> None:
        state = self.state
        if isinstance(event, ev.AllocationStarted):
            self._close(state.now)  # the last job ended without an entry
            self._held, self._placed = (event.t, event.nodes), ()
            self._roles = {}
        phase = state.phase
        self._advance(event)
        self._placed = self._placed or state.placement
        if isinstance(event, ev.AllocationEnded):
            self._close(event.t)
        if isinstance(event, ev.HealthFound) and counts_against_node(event.code):
            self._xids.append((event.at or event.t, event.node, event.code))
        if len(state.excluded) != len(self._excluded):
            self._excluded |= state.excluded.keys()
        for node in self._changed(event, phase):
            before, now = self._roles.get(node.name, Role.JOINING), node.role
            self._roles[node.name] = now
            out = (Role.FAILED, Role.SUSPECT)
            if node.cleared and before is Role.FAILED and now is not before:
                self._clear(node.name)
            if now in out and before not in out:
                self._left.append(
                    NodeDeparture(
                        node=node.name, at=state.now, cause="", evidence=node.reason,
                        failed=now is Role.FAILED and not node.faultless, by_hand=node.drained,
                    )
                )  # fmt: skip

    def _clear(self, node: str) -> None:
        """Take back the node's newest departure: it proved to be no fault of the node."""
        self._excluded.discard(node)
        for number in reversed(range(len(self._left))):
            if self._left[number].node == node:
                self._left[number] = replace(self._left[number], failed=False)
                return

    def _changed(self, event: ev.Event, before: Phase) -> Iterator[Node]:
        """The nodes whose role this event may have changed; checking all nodes for each event would take too
        long."""
        if self.state.phase is not before:
            yield from self.state.nodes.values()
        elif (node := self.state.nodes.get(getattr(event, "node", ""))) is not None:
            yield node

    def _close(self, t: float) -> None:
        if self._held is not None:
            start, nodes = self._held
            placed = set(self._placed)
            spares = tuple(name for name in nodes if name not in placed)
            self._spans.append(Span(start=start, end=max(t, start), nodes=nodes, spares=spares))
        self._held = None

    def _acquit(self) -> None:
        """Take back what proved to be the script's failures."""
        for node, (since, until) in self.state.acquitted.items():
            self._excluded.discard(node)
            self._left = [
                replace(left, failed=False) if left.node == node and since <= left.at <= until else left
                for left in self._left
            ]

    def summary(self, run: str, excluded: tuple[str, ...]) -> PastRun:
        self._close(self.state.now)
        self._acquit()
        return PastRun(
            run=run,
            active=self.state.active,
            spans=tuple(self._spans),
            failures=tuple(i.fault_at for i in self.state.incidents if i.charged == "infrastructure"),
            departures=tuple(replace(left, cause=_cause(self.state.incidents, left)) for left in self._left),
            xids=tuple(self._xids),
            excluded=tuple(sorted({*excluded, *self._excluded})),
            jobs=tuple(self.state.slurm_jobs),
            ended=self.state.ended,
        )


def _cause(incidents: Sequence[Incident], left: NodeDeparture) -> str:
    """The class of the incident in which the node left; a spare leaves without one."""
    for incident in incidents:
        until = incident.decided_at or incident.ended_at or left.at
        if incident.detected_at <= left.at <= until and incident.node in ("", left.node):
            return incident.cause
    return "drain_asked" if left.by_hand else "lost as a spare"


# ---- how often nodes failed

# Two half-lives: older failures hardly count.
ACCOUNTING_DAYS = 28
ACCOUNTING_LIMIT_S = 10.0
NODE_FAIL = "NODE_FAIL"
FORMAT = "JobIDRaw,State,Start,End,NNodes"


def with_earlier(
    plan: RunPlan, runs: Path, partition: str, now: float, spares_at: Callable[[float], int] | None = None
) -> tuple[RunPlan, list[str]]:  # fmt: skip
    """Return the plan with the failures in earlier runs below `runs` that are known by `now` (seconds since
    the epoch), and with nodes excluded that failed there, and messages about these. `partition` is a comma
    list, "" for the default. `spares_at`: the spares that the plan needs at a failure rate (per 1,000
    node-days), None if their number was asked for. Never fails: sources that cannot be read are named in the
    text and not counted."""
    if plan.cluster != "slurm":
        return plan, []
    others_journals = list[int]()
    found = past_runs(runs, others_journals.append)
    forgiven = forgiven_nodes(runs)
    seen = [one for run in found for one in watched_in(run)]
    more = more_exposure(found, comebacks(found, forgiven))
    texts = [_told(seen, f"{len(found)} earlier run{'' if len(found) == 1 else 's'}")]
    if more:
        days = sum(one.end_s - one.start_s for one in more) / DAY_S
        texts.append(f"{days:.3g} of them after repairs and counted {AFTER_REPAIR:.0f} times")
    try:
        others = parse_accounting(_accounting(), {job for run in found for job in run.jobs}, now)
        texts.append(_told(others, "other jobs"))
    except (ClusterUnavailableError, ValueError):
        others = []
        texts.append("no Slurm accounting")
    incidents, node_days = learned_before([*seen, *more, *others], now, plan.settings.half_life_s / DAY_S)
    fleet = prior(plan.settings.rate).learned(incidents, node_days).rate
    if spares_at is not None:
        plan = replace(plan, spares=spares_at(fleet))
    records = history(found, now, plan.settings.exclusion_s, forgiven=forgiven).values()
    wanted = [] if plan.settings.bad_nodes == "report" else avoided(records)
    names, spared = kept_out([node.node for node in wanted], (), partition, plan.nodes)
    kept = [node for node in wanted if node.node in names]
    notes = passed_over(others_journals)
    notes += [f"{node.node} is excluded {until_text(node.until)}: {node.why}" for node in kept]
    if spared:
        notes.append(f"not excluded, because the run needs {plan.nodes} nodes: {', '.join(spared)}")
    plan = replace(
        plan,
        earlier_incidents=round(incidents, 6),
        earlier_node_days=round(node_days, 6),
        earlier_text=", ".join(texts),
        frail=tuple(frail_nodes(records, fleet, now)),
        avoided=tuple(kept),
    )
    return plan, notes


def parse_accounting(text: str, known: Collection[str], now: float) -> list[Watched]:
    """Parse sacct's lines in FORMAT, with times in seconds since the epoch. Jobs in `known` are left out:
    their journals tell more. A job that still runs is counted until `now`. Raises ValueError for other
    lines."""
    found = []
    for line in text.splitlines():
        job, state, start, end, nodes = line.split("|")
        if job in known or not start.isdigit():
            continue
        end_s = float(end) if end.isdigit() else now
        failed = (end_s,) if state == NODE_FAIL else ()
        found.append(Watched(float(start), end_s, int(nodes), failed))
    return found


def _accounting() -> str:
    """sacct's lines about this user's jobs. Raises ClusterUnavailableError if Slurm keeps no accounts."""
    command = ["sacct", "--noheader", "--parsable2", "--allocations"]
    command += ["--duplicates", f"--starttime=now-{ACCOUNTING_DAYS}days", f"--format={FORMAT}"]
    return run_command(command, ACCOUNTING_LIMIT_S, variables=UNIX_TIMES)


def _told(watched: list[Watched], where: str) -> str:
    days = sum(one.nodes * max(0.0, one.end_s - one.start_s) for one in watched) / DAY_S
    failures = sum(len(one.failures_s) for one in watched)
    return f"{failures} in {days:.3g} node-days of {where}"


# ---- which nodes to exclude


def avoided(records: Collection[NodeRecord]) -> list[Avoided]:
    """The nodes to exclude, most important first: for good, then by how long the exclusion lasts."""
    out = sorted(
        (record for record in records if record.excluded),
        key=lambda record: (not record.for_good, -(record.excluded_until or 0.0), record.name),
    )
    return [Avoided(node=r.name, until=None if r.for_good else r.excluded_until, why=r.why) for r in out]


def until_text(until: float | None) -> str:
    """Render as "until 2026-11-21 10:00" or "for good"."""
    return "for good" if until is None else f"until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
