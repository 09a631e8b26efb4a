"""The packaged tables that health probes use, and that a policy may override, Xid codes and thresholds; and
which probes are installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jurymast.core.state.findings import Verdict

PROBES = "jurymast.probes"  # the entry points of probes
DATA = Path(__file__).parent / "health" / "data"


@dataclass(frozen=True)
class Xid:
    """One code of NVIDIA's driver. `group` is its class in the table: application, contained, informational,
    reset, drain, decode, test, text or support; `kind` is one of `core.state.findings.KINDS`.
    `against_node`: whether it counts in the node's record. `by_program`: whether what a program asks of a
    healthy GPU can cause it."""

    code: int
    group: str
    verdict: Verdict
    kind: str
    meaning: str
    action: str
    source: str
    against_node: bool
    by_program: bool


@dataclass(frozen=True)
class RecoveryAction:
    """What the driver recommends to do about a GPU, in the words in which Xid 154 ends."""

    words: str
    verdict: Verdict


@dataclass(frozen=True)
class Threshold:
    name: str
    value: float
    unit: str
    meaning: str
    source: str


@cache
def _table(name: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return table


@cache
def xids() -> Mapping[int, Xid]:
    """All codes of the table, by number."""
    table, found = _table("xid"), {}
    for codes, entry in table["codes"].items():
        group = table["classes"][entry["class"]]
        first, _, last = codes.partition("-")
        for code in range(int(first), int(last or first) + 1):
            found[code] = Xid(
                code=code, group=entry["class"], verdict=Verdict(group["verdict"]), kind=group["kind"],
                meaning=entry["meaning"], action=group["action"],
                source=table["sources"][str(entry["source"])], against_node=group["against_node"],
                by_program=entry.get("by_program", False),
            )  # fmt: skip
    return found


def xid_of(finding_code: str) -> Xid | None:
    """The entry for the code of a finding ("xid-79"); None for findings that are no Xids, and for unknown
    Xids."""
    prefix, _, code = finding_code.partition("-")
    return xids().get(int(code)) if prefix == "xid" and code.isdigit() else None


def counts_against_node(finding_code: str) -> bool:
    """Whether a finding with this code is an Xid that counts in its node's record over many runs: not those
    that the program causes, that only accompany others, or whose meaning is unknown."""
    entry = xid_of(finding_code)
    return entry is not None and entry.against_node


@cache
def recovery_actions() -> Mapping[int, RecoveryAction]:
    """What the driver may recommend, by NVML's number (0: nothing)."""
    return {
        int(number): RecoveryAction(entry["words"], Verdict(entry["verdict"]))
        for number, entry in _table("xid")["recovery"].items()
    }


def recovery_action(number: int) -> RecoveryAction:
    """What NVML's number means; one that is not in the table is suspect: the driver wants something done."""
    unknown = RecoveryAction(f"action {number:#x}", Verdict.SUSPECT)
    return recovery_actions().get(number, unknown)


@cache
def thresholds() -> Mapping[str, Threshold]:
    return {name: Threshold(name, **entry) for name, entry in _table("thresholds")["limits"].items()}


def installed() -> dict[str, str]:
    """The installed probes by name, sorted, each as "package:function"; of two with the same name, the first
    on Python's path. Reads only the metadata of packages, and imports none."""
    from importlib.metadata import entry_points  # 5 MB that a probe's process does not need

    found: dict[str, str] = {}
    for point in entry_points(group=PROBES):
        found.setdefault(point.name, point.value)
    return dict(sorted(found.items()))
