"""Broken memory of the host as the kernel counts it: numbers that no user can write."""

from __future__ import annotations

import re
from pathlib import Path

from jurymast.health.readings import number, text

_DROPPED = re.compile(r"^HardwareCorrupted:\s+(\d+)", re.MULTILINE)


def uncorrectable(root: Path) -> int | None:
    """Uncorrectable errors since boot over all controllers; None when no EDAC driver counts."""
    counts = [number(path) for path in (root / "sys/devices/system/edac/mc").glob("mc*/ue_count")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def is_broken(root: Path) -> bool:
    """Whether there was such an error since boot, or a page that the kernel uses no more because of one."""
    dropped = _DROPPED.search(text(root / "proc/meminfo") or "")
    return bool(uncorrectable(root)) or (dropped is not None and int(dropped[1]) > 0)
