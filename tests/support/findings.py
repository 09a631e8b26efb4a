"""What the shipped probes say of a node, by code: (probe, verdict, kind). As far as that is read off a number
or a line, the probes' own code reads it here; what they must look for themselves stands in SEEN, and
tests/unit/test_findings.py has them look."""

from __future__ import annotations

from jurymast.health.probe import Context, xid_finding
from jurymast_host import NAME as HOST_PROBE
from jurymast_host.kernel_log import PATTERNS

Said = tuple[str, str, str]
XIDS = (13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 119)
# What the kernel logs.
LINES = {
    "memory-uncorrectable": "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
    "disk-error": "Buffer I/O error on dev sda1, logical block 1310720, lost async page write",
}
SEEN: dict[str, Said] = {
    "gpu-lost": ("nvidia", "bad", "hardware"),
    "gpu-sram-uncorrectable": ("nvidia", "bad", "hardware"),
    "gpu-row-remap-pending": ("nvidia", "suspect", "hardware"),
    "gpu-throttled": ("nvidia", "suspect", "hardware"),
    "gpu-hot": ("nvidia", "suspect", "hardware"),
    "gpu-pcie-width": ("nvidia", "suspect", "hardware"),
    "gpu-fabric": ("nvidia", "suspect", "hardware"),
    "gpus-unseen": ("nvidia", "unknown", "host"),
    "ib-link-down": ("infiniband", "suspect", "network"),  # another port is up
    "ib-device-gone": ("infiniband", "bad", "network"),  # no other is
    "net-link-down": ("infiniband", "bad", "network"),
    "clock-offset": ("agent", "suspect", "host"),
    "driver-wedged": ("nvidia", "bad", "host"),
    "memory-low": ("host", "unknown", "host"),
    "shm-full": ("host", "unknown", "host"),
    "oom-kill": ("host", "unknown", "application"),
    "storage-hangs": ("storage", "suspect", "storage"),
    "storage-full": ("storage", "suspect", "storage"),
}


def _of_xid(number: int) -> Said:
    found = xid_finding(number, "gpu0", "", 0.0, Context())
    return found.probe, found.verdict.value, found.kind


def _of_line(code: str, line: str) -> Said:
    first = next(pattern for pattern in PATTERNS if pattern.regex.match(line))
    assert first.code == code, line
    return HOST_PROBE, first.verdict.value, first.kind


FINDINGS: dict[str, Said] = {
    **{f"xid-{number}": _of_xid(number) for number in XIDS},
    **{code: _of_line(code, line) for code, line in LINES.items()},
    **SEEN,
}
