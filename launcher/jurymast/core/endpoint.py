"""Where a supervisor listens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Endpoint:
    """`hosts`: names and addresses to try, best first; `allocation`: the Slurm job and its restart count."""

    epoch: int
    hosts: tuple[str, ...]
    port: int
    node: str
    allocation: str
    pid: int
