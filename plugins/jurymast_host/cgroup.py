"""The memory cgroup in which this process is, and with it the job on this node: version 1 or 2."""

from __future__ import annotations

from pathlib import Path

from jurymast.health.readings import text


def own_memory_cgroup(root: Path) -> tuple[str, Path | None]:
    """(its path as the kernel's log names it, "" when unknown; the file that counts its kills, None when it
    is not to be seen)."""
    path = ""
    for line in (text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            file = root / "sys/fs/cgroup/memory" / place.lstrip("/") / "memory.oom_control"
        elif not controllers:
            file = root / "sys/fs/cgroup" / place.lstrip("/") / "memory.events"
        else:
            continue
        if file.exists():
            return place, file
        path = path or place
    return path, None
