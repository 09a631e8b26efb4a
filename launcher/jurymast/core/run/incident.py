"""A failure and its recovery with the duration of each phase, and warnings that wait for people."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jurymast.core.signatures import Signature


@dataclass
class Alert:
    """Something that people must decide, because no node may be blamed for it. It lasts while more `nodes`
    are affected, the last of them at `until`; alerts of one `subject` soon after each other are one."""

    subject: str
    at: float
    until: float
    message: str
    nodes: dict[str, None]


def because(evidence: str, why: str) -> str:
    """Return a decision's whole reason as one sentence: what was found, and what followed from it."""
    return "; ".join(part for part in (evidence, why) if part)


@dataclass
class Incident:
    """Times are seconds since the epoch, None until known. Steps are the training's own. `why`: the reason
    for `action`, without the evidence."""

    id: int
    fault_at: float
    detected_at: float
    attempt: int
    step_lost_from: int
    cause: str = ""
    charged: str = ""
    node: str = ""
    rank: int | None = None
    evidence: str = ""
    traceback: str = ""
    signature: Signature = Signature()
    action: str = ""
    why: str = ""
    stopped_at: float | None = None
    decided_at: float | None = None
    launched_at: float | None = None
    started_at: float | None = None
    restored_at: float | None = None
    restore_s: float = 0.0
    step_restored: int | None = None
    recovered_at: float | None = None
    ended_at: float | None = None
    tiers: dict[str, int] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return because(self.evidence, self.why)

    @property
    def open(self) -> bool:
        return self.ended_at is None

    def seconds(self) -> dict[str, float]:
        """Return the exclusive phases in order; they sum to the time from fault to recovery (or the last
        known point)."""
        restore_from = None if self.restored_at is None else self.restored_at - self.restore_s
        marks = (
            ("detect", self.detected_at),
            ("diagnose", self.stopped_at),
            ("decide", self.decided_at),
            ("replace", self.launched_at),
            ("launch", restore_from if restore_from is not None else self.started_at),
            ("restore", self.restored_at),
            ("rework", self.recovered_at),
        )
        parts: dict[str, float] = {}
        reached = self.fault_at
        for name, until in marks:
            until = reached if until is None else max(reached, until)
            parts[name] = until - reached
            reached = until
        return parts

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "cause": self.cause, "node": self.node or None, "rank": self.rank,
            "evidence": self.evidence, "traceback": self.traceback or None, "charged": self.charged,
            "action": self.action, "why": self.why, "reason": self.reason, "attempt": self.attempt,
            "at": self.fault_at, "recovered_at": self.recovered_at, "open": self.open,
            "seconds": {name: round(value, 6) for name, value in self.seconds().items()},
            "step_lost_from": self.step_lost_from, "step_restored": self.step_restored, "tiers": self.tiers,
        }  # fmt: skip
