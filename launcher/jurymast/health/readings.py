"""What probes need that read the kernel's files: one value of a file, and what a counter gained of late."""

from __future__ import annotations

from collections import deque
from pathlib import Path


def text(path: Path) -> str | None:
    """What a small file says, stripped; None where it is not there or the driver does not answer (EINVAL,
    EIO, EPERM and so on, by device and driver): that is not known, and never zero."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file with one whole number; None for anything else."""
    said = text(path)
    return int(said) if said is not None and said.lstrip("-").isdigit() else None


class Gains:
    """What a counter gained within the last `window_s` seconds, and since the first look.

    Counters of devices are lifetime totals: the first value is the baseline. One that goes back was reset,
    and counts on from there. One that stops at its largest value (16 bits for some) gains nothing any more.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: int | None = None
        self._gained: deque[tuple[float, int]] = deque()
        self.total = 0

    def add(self, now: float, value: int | None) -> int:
        """The gain within the window that ends at `now` (seconds); None, for not readable, adds nothing."""
        if value is not None:
            gain = value - self._last if self._last is not None else 0
            if gain > 0:
                self._gained.append((now, gain))
                self.total += gain
            self._last = value
        while self._gained and self._gained[0][0] <= now - self._window_s:
            self._gained.popleft()
        return sum(gain for _, gain in self._gained)


# Where the kernel holds a process that waits for storage that nodes share: the file systems' own functions,
# FUSE's, and waiting for a page of any file.
_STORAGE_WAITS = (
    "nfs", "rpc_", "lustre", "ll_", "cl_", "ptlrpc", "ldlm", "osc_", "gpfs", "fuse", "ceph", "cifs",
    "request_wait_answer", "folio_wait", "wait_on_page",
)  # fmt: skip


def waits_for_storage(where: str) -> bool:
    """Whether a process that stands in the kernel function `where` (/proc/PID/wchan) waits for storage."""
    return any(where.lstrip("_").startswith(word) or f"_{word}" in where for word in _STORAGE_WAITS)


def stands_in(pid: int, proc: Path = Path("/proc")) -> tuple[str, str]:
    """A process's state (R, S, D, ...) and the kernel function in which it waits; "" where not known."""
    state = (text(proc / str(pid) / "stat") or "").rpartition(")")[2].split()
    where = text(proc / str(pid) / "wchan") or ""
    return (state[0] if state else ""), where.strip("0")
