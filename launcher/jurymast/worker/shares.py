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


# What Slurm calls the ways of binding in such a line; it makes masks of all others.
WAYS = {"none": "NONE", "map_cpu": "MAP ", "rank": "RANK", "map_ldom": "LDMAP", "mask_ldom": "LDMASK"}


def line(own: Collection[int], task: int, local_rank: int, how: Mapping[str, Any]) -> str:
    """Return what Slurm prints of a task that has its `own` processors and is to say so."""
    to, mask = how["bound_to"], sum(1 << number for number in own)
    unbound = f"{mask:#x}" if how["unbound_mask"] else "0x0"
    way, told = WAYS.get(to.partition(":")[0], "MASK"), unbound if to == "none" else f"{mask:#x} set"
    node = os.uname().nodename.partition(".")[0]
    return f"cpu-bind={way} - {node}, task {task:2} {local_rank:2} [{os.getpid()}]: mask {told}\n"


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
