"""Tables for probes: the classification of Xid codes, and limits. The policy's values override the packaged
ones."""

from __future__ import annotations

import re

from jurymast.core.nodes import findings
from jurymast.core.nodes.findings import Finding, Verdict
from jurymast.core.texts import did_you_mean
from jurymast.health.probe import Context
from jurymast.reference import Xid, recovery_actions, thresholds, xids

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
    to be ignored."""
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


def unit_in(text: str) -> str:
    """The part of the GPU that the driver names, such as "GPC 1, TPC 3"; "" if it names none."""
    found = _UNIT.search(text)
    return f"GPC {found[1]}, TPC {found[2]}" if found else ""


def reading(code: int, text: str, context: Context) -> tuple[Verdict, str]:
    """(verdict, kind) of a code by the policy, or else by the table; `unknown` for a code in neither."""
    if str(code) in context.xid:
        return READINGS[context.xid[str(code)]]
    entry = xids().get(code)
    if entry is None:
        return Verdict.UNKNOWN, findings.HARDWARE
    return (_recommended(text, entry) if entry.group == "text" else entry.verdict), entry.kind


def _recommended(text: str, entry: Xid) -> Verdict:
    """The verdict for Xid 154, such as "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot
    Required)"."""
    target = text.lower().rpartition(" to ")[2]
    return next((verdict for words, verdict in recovery_actions().items() if words in target), entry.verdict)


def threshold(context: Context, name: str) -> float:
    """The limit `name` of the context, or else the packaged one. KeyError if there is neither."""
    if name in context.thresholds:
        return float(context.thresholds[name])
    table = thresholds()
    if name not in table:
        raise KeyError(f"no threshold {name}{did_you_mean(name, table)}")
    return table[name].value
