"""What is decided about a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jurymast.core.state.run import Blame


@dataclass(frozen=True)
class Decision:
    """`action`: restart, in process, swap, shrink, requeue or stop; `why`: the reason, without the cause's
    evidence; `bad`: nodes that leave the placement, those of `blames` for a finding; `kept`: nodes that stay
    only because no spare is ready, with the finding's blame, if it is for one; `spare`: ranks that live go on
    in their processes."""

    action: str
    why: str
    bad: tuple[str, ...] = ()
    backoff_s: float = 0.0
    blames: tuple[Blame, ...] = ()
    kept: Mapping[str, Blame | None] = field(default_factory=dict)
    spare: bool = False
