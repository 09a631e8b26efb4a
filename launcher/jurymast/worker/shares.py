"""Which processors each rank of a node has where Slurm would bind its tasks to them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jurymast.core.judges import task_shares
from jurymast.core.judges.task_shares import Processor

TOPOLOGY = Path("/sys/devices/system/cpu")


def processors(own: Collection[int], count: int, how: Mapping[str, Any]) -> list[list[int]]:
    """Return the processors of each of `count` ranks of this node, of which its job has its `own`; [] if each
    has all of these. `how`: see `TaskShares`."""
    if how["bound_to"] == "none":
        return []
    return task_shares.processors(places(own), own, count, how)


def places(own: Collection[int]) -> dict[int, Processor]:
    """Return where each processor of this machine is; where Linux does not tell, each is a core."""
    numbers = set(own)
    try:
        names = os.listdir(TOPOLOGY)
    except OSError:
        names = []
    found = [int(name[3:]) for name in names if name.startswith("cpu") and name[3:].isdigit()]
    numbers |= {number for number in found if (TOPOLOGY / f"cpu{number}" / "topology").exists()}  # is online
    return {number: _processor(number) for number in sorted(numbers)}


def _processor(number: int) -> Processor:
    socket, die = _read(number, "physical_package_id", 0), max(0, _read(number, "die_id", 0))
    core = _read(number, "core_id", number)  # each die counts its own
    return Processor(socket, die << 16 | core, _domain(number))


def _domain(number: int) -> int:
    try:
        names = os.listdir(TOPOLOGY / f"cpu{number}")
    except OSError:
        return 0
    return next((int(n[4:]) for n in names if n.startswith("node") and n[4:].isdigit()), 0)


def _read(number: int, name: str, otherwise: int) -> int:
    from jurymast import foreign  # imported here, because few servers of ranks need it

    try:
        return int(foreign.read(TOPOLOGY / f"cpu{number}" / "topology" / name, foreign.NOTE_BYTES_MAX))
    except (OSError, ValueError):
        return otherwise
