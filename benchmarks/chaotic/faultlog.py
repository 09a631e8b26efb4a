"""The log of what struck a run, as the nemesis keeps it and the checker reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec


@dataclass
class Struck:
    """What was done: to this `node`, between `at` and `until` (Unix time), while the run was in this `phase`
    of this attempt, at this step. `why_not`: why it could not be done."""

    kind: str
    node: str = ""
    other: str = ""
    at: float = 0.0
    done_at: float = 0.0
    until: float = 0.0
    phase: str = ""
    attempt: int = 0
    step: int = 0
    rank: int | None = None
    placed: bool = False  # the node had ranks
    damaged: tuple[int, ...] = ()  # steps on shared storage
    why_not: str = ""


def write_log(path: Path, log: Iterable[Struck]) -> None:
    path.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in log))


def read_log(path: Path) -> list[Struck]:
    return [msgspec.json.decode(line, type=Struck) for line in path.read_text().splitlines()]
