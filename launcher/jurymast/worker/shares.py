"""Which processors each rank of a node has where Slurm would bind its tasks to them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def shares(cores: Mapping[int, tuple[int, int]], count: int, each: int) -> list[list[int]]:
    """Return `each` processors for each of `count` ranks, those of one core together; [] if `each` is 0, or
    there are too few. `cores`: the package and the core of each processor."""
    order = sorted(cores, key=lambda number: (*cores[number], number))
    if not each or count * each > len(order):
        return []
    return [order[number * each :][:each] for number in range(count)]


def cores_of(processors: Collection[int]) -> dict[int, tuple[int, int]]:
    """Return the package and the core of each processor; where Linux does not tell, each is a core."""
    return {
        number: (_read(number, "physical_package_id", 0), _read(number, "core_id", number))
        for number in processors
    }


def _read(number: int, name: str, otherwise: int) -> int:
    from jurymast import foreign  # imported here, because few servers of ranks need it

    try:
        return int(foreign.read(TOPOLOGY / f"cpu{number}" / "topology" / name, foreign.NOTE_BYTES_MAX))
    except (OSError, ValueError):
        return otherwise
