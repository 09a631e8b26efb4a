"""Broken memory of the host as the kernel counts it, in numbers that no user can change."""

from __future__ import annotations

import re
from pathlib import Path

from jurymast.health.readings import number, text

_DROPPED = re.compile(r"^HardwareCorrupted:\s+(\d+)", re.MULTILINE)


def uncorrectable(root: Path) -> int | None:
    """The number of uncorrectable errors since boot over all controllers; None if no EDAC driver counts."""
    counts = [number(path) for path in (root / "sys/devices/system/edac/mc").glob("mc*/ue_count")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def is_broken(root: Path) -> bool:
    """Whether there was such an error since boot, or the kernel has stopped using a page because of one."""
    dropped = _DROPPED.search(text(root / "proc/meminfo") or "")
    return bool(uncorrectable(root)) or (dropped is not None and int(dropped[1]) > 0)
