"""Summaries of the earlier runs of a runs directory, for node history and the failure rate.

Each journal is replayed once; its summary is kept in the runs directory until the journal changes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.core import events as ev
from jurymast.core.nodes.history import NodeDeparture, PastRun, Span
from jurymast.core.run.incident import Incident
from jurymast.core.run.machine import step
from jurymast.core.run.state import Node, Phase, Role, RunState
from jurymast.errors import RunDirectoryError
from jurymast.journal import initial_state, read, take
from jurymast.rundir import RunDirectory, write_json

VERSION = 1

Stamp = list[list[int]]


def summary_file(runs: Path) -> Path:
    """The file with the summaries of this user's earlier runs; users may share the directory."""
    return runs / f".past-runs-{os.geteuid()}.json"


def forgiven_file(runs: Path) -> Path:
    return runs / f".forgiven-nodes-{os.geteuid()}.json"


def past_runs(runs: Path) -> list[PastRun]:
    """All runs of this user below `runs` on Slurm nodes, oldest first. Unreadable ones are left out."""
    kept = _load(summary_file(runs))
    known: dict[str, Any] = {}
    found = []
    for name in _names(runs):
        directory = RunDirectory(runs / name)
        stamp = _stamp(directory)
        known[name] = kept.get(name)
        try:
            run = _kept(known[name], stamp)
        except (KeyError, TypeError, ValueError):  # changed since, or another version
            try:
                run = _read(directory)
            except (RunDirectoryError, OSError, KeyError, TypeError, ValueError):
                del known[name]
                continue
            known[name] = {"stamp": stamp, "run": run.to_json() if run is not None else None}
        if run is not None:
            found.append(run)
    if known != kept:
        # In another user's runs directory, or on a full disk, the next reader replays again.
        with contextlib.suppress(OSError):
            write_json(summary_file(runs), {"v": VERSION, "entries": known}, durable=False)
    return found


def _kept(entry: Any, stamp: Stamp) -> PastRun | None:
    """The kept summary of a run. Raises KeyError, TypeError or ValueError if it no longer holds."""
    if entry["stamp"] != stamp:
        raise ValueError("the journal has changed")
    return PastRun.from_json(entry["run"]) if entry["run"] is not None else None


def forgiven_nodes(runs: Path) -> dict[str, float]:
    """Nodes whose record was cleared, with the time (seconds since the epoch)."""
    kept = _load(forgiven_file(runs))
    return {name: float(at) for name, at in kept.items() if isinstance(at, int | float)}


def forgive(runs: Path, node: str, now: float) -> None:
    """Stop what `node` has done so far from keeping it out of runs. Raises OSError."""
    kept = {**forgiven_nodes(runs), node: now}
    write_json(forgiven_file(runs), {"v": VERSION, "entries": kept})


def _names(runs: Path) -> list[str]:
    """Run ids, oldest first, since they begin with their time. Only this user's runs count: others who may
    write into the directory could invent runs, and with them failures of nodes."""
    try:
        names = sorted(name for name in foreign.names(runs) if not name.startswith("."))
    except OSError:
        return []
    return [name for name in names if foreign.owns(runs / name)]


def _stamp(directory: RunDirectory) -> Stamp:
    """The sizes (bytes) and times of change (ns) of the journal's files, which differ whenever the journal
    has changed."""
    stamp = []
    for path in directory.journal_files():
        try:
            status = foreign.status(path)
        except OSError:
            continue
        stamp.append([status.st_size, status.st_mtime_ns])
    return stamp


def _load(path: Path) -> dict[str, Any]:
    """The entries of the file; {} if it is not this user's, since anybody could have made it."""
    try:
        content = foreign.load_own(path)
        entries = content["entries"] if content["v"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _read(directory: RunDirectory) -> PastRun | None:
    """Replay one run; None for a local one, which has no real nodes. Raises RunDirectoryError."""
    plan = directory.plan()
    if plan.cluster != "slurm":
        return None
    reader = _Reader(initial_state(plan))
    for entry in read(directory):
        take(reader.state, entry, reader.take)
    return reader.summary(plan.run, plan.exclude)


class _Reader:
    """Replays a journal through the run's state machine, and records which nodes left, when and why."""

    def __init__(self, state: RunState) -> None:
        self.state = state
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
        step(state, event)
        self._placed = self._placed or state.placement
        if isinstance(event, ev.AllocationEnded):
            self._close(event.t)
        if isinstance(event, ev.HealthFound) and event.code.startswith("xid-"):
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
        """Take back the node's newest departure: many nodes had the same failure, so none is to blame."""
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

    def summary(self, run: str, excluded: tuple[str, ...]) -> PastRun:
        self._close(self.state.now)
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
