"""The packaged tables that health probes use, and that a policy may override: Xid codes and thresholds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jurymast.core.nodes.findings import Verdict

DATA = Path(__file__).parent / "health" / "data"


@dataclass(frozen=True)
class Xid:
    """One code of NVIDIA's driver. `group` is its class in the table: application, informational, reset,
    drain, decode, text or support; `kind` is one of `core.nodes.findings.KINDS`."""

    code: int
    group: str
    verdict: Verdict
    kind: str
    meaning: str
    action: str
    source: str


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
    for code, entry in table["codes"].items():
        group = table["classes"][entry["class"]]
        found[int(code)] = Xid(
            code=int(code), group=entry["class"], verdict=Verdict(group["verdict"]), kind=group["kind"],
            meaning=entry["meaning"], action=group["action"], source=table["sources"][str(entry["source"])],
        )  # fmt: skip
    return found


@cache
def recovery_actions() -> Mapping[str, Verdict]:
    """The verdicts for the recovery actions that a driver recommends, in lower case and in the words of Xid
    154."""
    return {words: Verdict(verdict) for words, verdict in _table("xid")["recovery"].items()}


@cache
def thresholds() -> Mapping[str, Threshold]:
    return {name: Threshold(name, **entry) for name, entry in _table("thresholds")["limits"].items()}
