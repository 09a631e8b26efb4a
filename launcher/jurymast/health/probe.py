"""The interface of health probes, which plugins implement and name under the entry point below; and the
tables that probes use: the classification of Xid codes, and limits. The policy's values override the packaged
ones.

Each probe runs in a process of its own, which is killed if a look takes too long, so it may call drivers
that hang. It decides nothing: it reports findings, and `unknown` if it cannot see.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from jurymast.core.judges.own_health import FAILED
from jurymast.core.state import findings
from jurymast.core.state.findings import (
    APPLICATION,
    HARDWARE,
    HOST,
    NETWORK,
    NOT_OBSERVABLE,
    STORAGE,
    SYMPATHETIC,
    Finding,
    Verdict,
)
from jurymast.core.state.texts import did_you_mean
from jurymast.health.grant import granted_gpus
from jurymast.reference import PROBES, Xid, recovery_action, recovery_actions, thresholds, xids

# Everything that a package with probes needs from jurymast.
__all__ = [
    "APPLICATION",
    "ENTRY_POINTS",
    "HARDWARE",
    "HOST",
    "NETWORK",
    "NOT_OBSERVABLE",
    "STORAGE",
    "SYMPATHETIC",
    "Context",
    "Finding",
    "Probe",
    "Verdict",
    "granted_gpus",
]

# [project.entry-points."jurymast.probes"]  NAME = "package:function"; function(context) -> Probe | None
ENTRY_POINTS = PROBES


@dataclass(frozen=True)
class Context:
    """The facts that a probe may know of the run on this node. Times are in seconds.

    `thresholds` are the limits that the policy sets, in the units that `jurymast health --thresholds`
    shows; `threshold` adds the packaged ones. `xid` maps Xid codes, as text ("79"), to the policy's readings,
    which are keys of READINGS. `paths` are shared directories to which the run writes, `data_paths` shared
    ones that it only reads, `local_path` a directory on this node's own disk ("" if there is none). `gpus` is
    the number that Slurm granted (None if not known). `started_at` is when the job started on this node, in
    seconds since the epoch: older events are not the run's. `fresh`: the run has not done anything yet that a
    probe could see. `memory`: what `remember` returned in an earlier process of this probe on this boot, None
    for the first.
    """

    node: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    xid: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[str] = ()
    data_paths: Sequence[str] = ()
    local_path: str = ""
    gpus: int | None = None
    started_at: float = 0.0
    fresh: bool = True
    memory: Any = None


@runtime_checkable
class Probe(Protocol):
    """A health probe. `name` is the entry point's; `look` is due every `interval_s` seconds, at least 0.1.

    The first look takes the baseline: counters are lifetime totals, and only their gains count. A look
    returns every finding that holds now, not only new ones; events (an Xid) are returned once. A look that
    raises, or takes longer than three intervals (and look-limit-s), is itself a finding.

    What a look does not find again is over. If a part could not be seen this time, return the finding
    NOT_OBSERVABLE for it: then what was found on that `device` (on all devices, for "") is not over.

    A probe may have a method `remember() -> Any`, called after each look. Its result, as JSON, is in
    `Context.memory` when a new process takes the place of one that was killed: baselines outlive the process
    in this way. What an earlier process found is over only when a process looks that continued from its
    memory; without `remember` it holds until the job ends. A probe that keeps nothing between looks returns
    {}.

    A probe may have a method `energy() -> Mapping[str, float]`, called after each look: by device, the joules
    that it has used since any moment, as its counter says. Only devices that are the job's alone count.
    """

    name: str
    interval_s: float

    def look(self, now: float) -> Sequence[Finding]:
        """Return the findings, with `at` in seconds since the epoch, as `now` is. `now` never jumps: it
        ignores that the clock is set during the job. May raise anything: the finding `probe-failed` then
        reports it, with the verdict unknown."""
        ...

    def close(self) -> None:
        """Release handles. Called at most once, when the probes end; not if their process is killed."""
        ...


def open_probe(point: str, context: Context) -> Probe | None:
    """Import a probe's package and call its function ("package:function") with `context`. Return the probe;
    None if it has nothing to see on this machine. Raises whatever the plugin raises, and TypeError if the
    result is not a probe."""
    package, _, path = point.partition(":")
    function: Any = importlib.import_module(package.strip())
    for name in path.partition("[")[0].strip().split("."):
        function = getattr(function, name)
    probe = function(context)
    if probe is None or isinstance(probe, Probe):
        return probe
    raise TypeError(f"{point} returned {probe!r}, which is not a probe")


def failed(name: str, error: BaseException, doing: str) -> Finding:
    """The finding `probe-failed` for the probe `name` that raised `error`: nothing was seen, and no node is
    to blame. `doing` is what it could not do ("look", "be opened"). The message has at most 500
    characters."""
    return Finding(
        probe=name, code=FAILED, verdict=Verdict.UNKNOWN, kind=HOST,
        message=f"the probe could not {doing}: {type(error).__name__}: {error}"[:500],
    )  # fmt: skip


TEXT_MAX = 200
_UNIT = re.compile(r"GPC\W*(\d+)\D+TPC\W*(\d+)", re.IGNORECASE)
# The readings of a code that a policy may set (health.xid), as verdict and kind.
READINGS = {
    "ok": (Verdict.OK, findings.SYMPATHETIC),
    "suspect": (Verdict.SUSPECT, findings.HARDWARE),
    "bad": (Verdict.BAD, findings.HARDWARE),
    "application": (Verdict.UNKNOWN, findings.APPLICATION),
    "sympathetic": (Verdict.UNKNOWN, findings.SYMPATHETIC),
}


def xid_finding(code: int, device: str, text: str, at: float, context: Context) -> Finding:
    """The finding for one Xid event on `device` ("gpu3"), at `at` (seconds since the epoch). `text` is the
    driver's own text, which decides about Xid 154, or "" if it is not known. Every probe reports it as the
    nvidia probe's finding, so that an event that two probes see counts once. The verdict ok means that it is
    to be ignored. Raises KeyError if `context` gives the code a reading that is not in READINGS."""
    entry = xids().get(code)
    verdict, kind = reading(code, text, context)
    said = f" ({' '.join(text.split())[:TEXT_MAX]})" if text else ""
    meaning = f"{entry.meaning}; {entry.action}" if entry else "not in the table of known codes"
    if str(code) in context.xid:
        meaning += f"; the policy reads it as {context.xid[str(code)]}"
    return Finding(
        probe="nvidia", code=f"xid-{code}", verdict=verdict, kind=kind, device=device, at=at, once=True,
        unit=unit_in(text), message=f"Xid {code}: {meaning}{said}",
    )  # fmt: skip


def doubtful(finding: Finding, why: str) -> Finding:
    """The finding of something that may not concern this job, for the reason `why`: it is told, but it is not
    held against the node."""
    if finding.verdict not in (Verdict.BAD, Verdict.SUSPECT):
        return finding
    return replace(finding, verdict=Verdict.UNKNOWN, message=f"{finding.message}; not counted: {why}")


def unit_in(text: str) -> str:
    """The part of the GPU that the driver names, such as "GPC 1, TPC 3"; "" if it names none."""
    found = _UNIT.search(text)
    return f"GPC {found[1]}, TPC {found[2]}" if found else ""


def reading(code: int, text: str, context: Context) -> tuple[Verdict, str]:
    """(verdict, kind) of an Xid code by the policy, or else by the table; `unknown` for a code in neither.
    `text` is the driver's own text, or "". Raises KeyError as `xid_finding` does."""
    if str(code) in context.xid:
        return READINGS[context.xid[str(code)]]
    entry = xids().get(code)
    if entry is None:
        return Verdict.UNKNOWN, findings.HARDWARE
    return (_recommended(text, entry) if entry.group == "text" else entry.verdict), entry.kind


_RECOMMENDED = re.compile(r"\bto\s+(0x[0-9a-f]+)\s*(\(.*)?$", re.IGNORECASE)


def _recommended(text: str, entry: Xid) -> Verdict:
    """The verdict for Xid 154, whose text ends like "changed from 0x0 (None) to 0x2 (Node Reboot
    Required)"; that of the table's class if it says nothing."""
    found = _RECOMMENDED.search(text)
    if found is None:
        return entry.verdict
    words = (found[2] or "").lower()
    named = (action.verdict for action in recovery_actions().values() if action.words.lower() in words)
    return next(named, recovery_action(int(found[1], 16)).verdict)


def threshold(context: Context, name: str) -> float:
    """The limit `name` of the context, or else the packaged one, in the unit that `jurymast health
    --thresholds` shows. Raises KeyError if there is neither."""
    if name in context.thresholds:
        return float(context.thresholds[name])
    table = thresholds()
    if name not in table:
        raise KeyError(f"no threshold {name}{did_you_mean(name, table)}")
    return table[name].value
