"""Numbers, times and sizes for people."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone

from jurymast.core.texts import count as count
from jurymast.core.texts import size as size
from jurymast.core.texts import some as some


def iso(t: float | None) -> str | None:
    """Render seconds since the epoch as ISO 8601 in the local zone, with milliseconds; None stays None."""
    if t is None:
        return None
    return datetime.fromtimestamp(t, timezone.utc).astimezone().isoformat(timespec="milliseconds")


def clock(t: float) -> str:
    """Render seconds since the epoch as local date and time, to the second."""
    return datetime.fromtimestamp(t).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Render a duration: 12.3 s, 4 min 05 s, 3 h 07 min, 2 d 04 h; - if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 or seconds == 0 else "<1 ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def plain_seconds(seconds: float) -> str:
    """Render a number of seconds without unit, for columns; - for none."""
    return "-" if seconds == 0 else f"{seconds:.2f}" if seconds < 100 else f"{seconds:.0f}"


def squeue_time(seconds: float) -> str:
    """Render a run time as squeue does: [days-]hours:minutes:seconds, minutes:seconds below an hour."""
    whole = max(0, int(seconds))
    days, hours, minutes, rest = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60, whole % 60
    if days:
        return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def amounts(tiers: Mapping[str, int]) -> str:
    """Render bytes by tier: 31 MB from memory, 10 MB from peer."""
    return ", ".join(f"{size(count)} from {tier}" for tier, count in tiers.items() if count)


def percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def percent_fine(ratio: float) -> str:
    return f"{100.0 * ratio:.2f} %"


def node_time(node_seconds: float) -> str:
    """Render node-time: 12.3 node-s, 45 node-min, 6.7 node-h."""
    if node_seconds < 120:
        return f"{node_seconds:.1f} node-s"
    if node_seconds < 7200:
        return f"{node_seconds / 60:.1f} node-min"
    return f"{node_seconds / 3600:.1f} node-h"
