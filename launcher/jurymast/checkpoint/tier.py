"""What every tier of checkpoints does. Tiers differ in where copies live and what they survive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from jurymast.checkpoint.state import Captured, ScriptState


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; but for memory the same on every rank. `error` is one line, empty when `ok`.

    `existing` is True when the step had a complete, verified checkpoint already, which was kept.
    """

    ok: bool
    size_bytes: int = 0
    error: str = ""
    existing: bool = False


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be restored, not yet verified. `entries`: how each entry was saved."""

    step: int
    size_bytes: int
    world_size: int
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)


class RestoreSource(Protocol):
    """Where checkpoints can be restored from. Methods are collective: all ranks call them, with the same
    arguments, and get the same result."""

    name: str

    def candidates(self) -> tuple[list[Candidate], dict[int, str]]:
        """What could be restored, newest first, and why other steps found here cannot be."""

    def load(self, candidate: Candidate, state: ScriptState) -> str:
        """Verify the candidate and load it into `state`. Returns why not, on one line, or ""."""


class Tier(RestoreSource, Protocol):
    """Where all ranks save together. Methods are collective."""

    def save(self, step: int, captured: Captured) -> SaveResult:
        """Make `step` durable here. Failing storage is an answer; CheckpointError: cannot ever be saved."""
