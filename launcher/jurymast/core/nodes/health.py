"""What the agents' probes find, as events of the run: each finding once, however often it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from jurymast.core import events as ev
from jurymast.core.effects import Effect, Record
from jurymast.core.nodes.findings import Finding

MESSAGE_MAX = 1000
_FIELDS = [
    field.name for field in fields(ev.HealthFound) if field.name not in ("t", "node", "verdict", "message")
]
Key = tuple[str, str, str, str]


class Health:
    def __init__(self) -> None:
        self._known: dict[Key, Finding] = {}

    def joined(self, node: str, told: Iterable[Finding], now: float) -> list[Effect]:
        """What holds on a node whose agent has just (re)connected, and what has ended meanwhile."""
        return [effect for finding in told for effect in self.found(node, finding, now)]

    def found(self, node: str, finding: Finding, now: float) -> list[Effect]:
        key = (node, finding.probe, finding.code, finding.device)
        known = self._known.get(key)
        if known is not None and _is_same(known, finding):
            return []
        self._known[key] = finding
        values = {name: getattr(finding, name) for name in _FIELDS}
        event = ev.HealthFound(
            t=now, node=node, verdict=finding.verdict.value, message=finding.message[:MESSAGE_MAX], **values
        )
        return [Record(event)]


def _is_same(known: Finding, told: Finding) -> bool:
    if told.once and told.at != known.at:
        return told.at < known.at  # an older event of a hello: it was told before the newer one
    return (known.verdict, known.kind) == (told.verdict, told.kind)
