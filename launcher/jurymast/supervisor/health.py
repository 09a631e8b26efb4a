"""What the agents' probes find, as events of the run: each finding once, however often it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields

from jurymast.core import events as ev
from jurymast.core.health import Finding

MESSAGE_MAX = 1000
_FIELDS = [
    field.name for field in fields(ev.HealthFound) if field.name not in ("t", "node", "verdict", "message")
]
Key = tuple[str, str, str, str]


class Health:
    """`feed` takes an event, `now` gives the event's time."""

    def __init__(self, feed: Callable[[ev.Event], None], now: Callable[[], float]) -> None:
        self._feed = feed
        self._now = now
        self._known: dict[Key, Finding] = {}

    def joined(self, node: str, told: Iterable[Finding]) -> None:
        """What holds on a node whose agent has just (re)connected, and what has ended meanwhile."""
        for finding in told:
            self.hear(node, finding)

    def hear(self, node: str, finding: Finding) -> None:
        key = (node, finding.probe, finding.code, finding.device)
        known = self._known.get(key)
        if known is not None and _is_same(known, finding):
            return
        self._known[key] = finding
        values = {name: getattr(finding, name) for name in _FIELDS}
        self._feed(
            ev.HealthFound(
                t=self._now(), node=node, verdict=finding.verdict.value,
                message=finding.message[:MESSAGE_MAX], **values,
            )
        )  # fmt: skip


def _is_same(known: Finding, told: Finding) -> bool:
    if told.once and told.at != known.at:
        return told.at < known.at  # an older event of a hello: it was told before the newer one
    return (known.verdict, known.kind) == (told.verdict, told.kind)
