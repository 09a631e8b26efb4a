"""The kernel log, if it may be read: what the kernel and drivers report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jurymast.health.probe import (
    APPLICATION,
    HARDWARE,
    HOST,
    NOT_OBSERVABLE,
    STORAGE,
    Context,
    Finding,
    Verdict,
    xid_finding,
)
from jurymast_host.memory import is_broken

RECORD_BYTES_MAX = 8192
MESSAGE_MAX = 300
OOM_KILL = "oom-kill"
MEMORY = "memory-uncorrectable"
# Messages about a process begin with the process's name, 15 bytes that any user can choose: a crash, memory
# used up, an outdated call. None of them is about hardware. The log shows each unprintable byte as \x and two
# digits.
OF_PROCESS = re.compile(
    r"(\\x[0-9a-f]{2}|.){0,15}(\[\d+\]:? | \(\d+\): |: \d+: |/\d+: | invoked oom-killer: "
    r"|: page allocation failure|: potentially unexpected fatal signal )"
)


@dataclass(frozen=True)
class Pattern:
    """A line of the kernel's. The group `device`, if it exists, names the part."""

    regex: re.Pattern[str]
    code: str
    verdict: Verdict
    kind: str


def _pattern(regex: str, code: str, verdict: Verdict, kind: str) -> Pattern:
    return Pattern(re.compile(regex, re.IGNORECASE), code, verdict, kind)


# The first pattern that matches counts. The texts are those of the kernel's drivers/edac, mm, drivers/nvme,
# block, fs and kernel/watchdog.c. They match only at the beginning of the line and contain nothing but the
# kernel's own words: later in a line there may be a name that a user chose.
PATTERNS = (
    _pattern(r"EDAC (?P<device>MC\d+): \d+ UE ", MEMORY, Verdict.BAD, HARDWARE),
    _pattern(r"Memory failure: 0x[0-9a-f]+: ", MEMORY, Verdict.BAD, HARDWARE),
    _pattern(
        r"mce: Uncorrected|mce: \[Hardware Error\]: CPU \d+: Machine Check Exception", "machine-check",
        Verdict.BAD, HARDWARE,
    ),
    _pattern(
        r"(\{\d+\})?\[Hardware Error\]: .*(Uncorrected|severity: fatal)", "machine-check",
        Verdict.BAD, HARDWARE,
    ),
    _pattern(
        r"(mce: )?(\{\d+\})?\[Hardware Error\]|mce: .*events logged", "machine-check-corrected",
        Verdict.UNKNOWN, HARDWARE,
    ),
    _pattern(
        r"\w+ (?P<device>[0-9a-f:.]+): (AER: )?PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\)", "pcie-fatal",
        Verdict.SUSPECT, HARDWARE,
    ),
    _pattern(
        r"nvme (?P<device>nvme\d+): "
        r"(I/O [\w ()/]*timeout, reset controller|controller is down|Removing after probe)", "disk-error",
        Verdict.SUSPECT, HOST,
    ),
    _pattern(
        r"((blk_update_request: )?I/O error, |Buffer I/O error on )dev (?P<device>[\w-]+), ", "disk-error",
        Verdict.SUSPECT, HOST,
    ),
    _pattern(r"EXT4-fs error \(device (?P<device>[\w-]+)\)", "disk-error", Verdict.SUSPECT, HOST),
    _pattern(
        r"XFS \((?P<device>[\w-]+)\): [\w /]*(I/O error|Corruption|shut(ting)? ?down)", "disk-error",
        Verdict.SUSPECT, HOST,
    ),
    _pattern(
        r"watchdog: BUG: soft lockup - (?P<device>CPU#\d+) stuck", "cpu-lockup", Verdict.SUSPECT, HOST
    ),
    _pattern(r"Memory cgroup out of memory: Killed process", OOM_KILL, Verdict.UNKNOWN, APPLICATION),
    _pattern(r"Out of memory: Killed process", "oom-kill-host", Verdict.UNKNOWN, HOST),
    _pattern(r"INFO: task .* blocked for more than \d+ seconds", "task-blocked", Verdict.UNKNOWN, HOST),
    _pattern(r"nfs: server (?P<device>\S+) not responding", "storage-hangs", Verdict.UNKNOWN, STORAGE),
    _pattern(
        r"(mce: )?(?P<device>CPU\d+): .*cpu clock throttled", "cpu-throttled", Verdict.UNKNOWN, HARDWARE
    ),
)  # fmt: skip
# Precedes the message about the kill itself, and is the only one with the process's cgroup.
OOM = re.compile(r"oom-kill:constraint=CONSTRAINT_MEMCG,.*?task_memcg=(?P<cgroup>/.*?),task=")
XID = re.compile(r"NVRM: Xid \(PCI:(?P<device>[0-9a-fA-F:.]+)\): (?P<code>\d+),? ?(?P<text>.*)")


class KernelLog:
    """Reads what is new at each look: events since this job's start, each once.

    Out-of-memory kills count only if the process was in `cgroup`: a node has other jobs, too.
    """

    def __init__(self, root: Path, context: Context, cgroup: str = "") -> None:
        self._context = context
        self._cgroup = cgroup.rstrip("/")
        self._killed_in = ""
        self._root = root
        self._why_not = ""
        try:
            self._file = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._file, self._why_not = -1, error.strerror or str(error)

    def look(self, now: float) -> Iterator[Finding]:
        """Return the new findings. `now`: seconds since the epoch."""
        if self._file < 0:
            yield Finding(
                probe="host", code=NOT_OBSERVABLE, verdict=Verdict.UNKNOWN, kind=HOST, device="kernel log",
                message=f"/dev/kmsg cannot be read ({self._why_not}): kernel messages cannot be checked",
            )  # fmt: skip
            return
        booted = now - time.clock_gettime(time.CLOCK_MONOTONIC)
        for record in self._records():
            head, _, message = record.partition(";")
            fields = head.split(",")
            if len(fields) < 3 or not (fields[0].isdigit() and fields[2].isdigit()):
                continue
            at = booted + int(fields[2]) / 1e6
            if (
                int(fields[0]) >> 3 == 0 and at >= self._context.started_at
            ):  # facility 0: the kernel's own words
                finding = self._read(message, at)
                if finding is not None:
                    yield finding

    def _records(self) -> Iterator[str]:
        """Yield the first line of each record; the following lines are properties."""
        while True:
            try:
                data = os.read(self._file, RECORD_BYTES_MAX)
            except BrokenPipeError:  # some were overwritten before they were read
                continue
            except OSError:
                return
            if not data:
                return
            yield from (
                line for line in data.decode(errors="replace").splitlines() if not line.startswith(" ")
            )

    def _read(self, message: str, at: float) -> Finding | None:
        """The finding for one message; None if it does not matter."""
        if OF_PROCESS.match(message):
            return None
        if xid := XID.match(message):
            return xid_finding(int(xid["code"]), self._gpu(xid["device"]), xid["text"], at, self._context)
        if oom := OOM.match(message):
            self._killed_in = oom["cgroup"]
        for pattern in PATTERNS:
            if found := pattern.regex.match(message):
                if pattern.code == OOM_KILL and not self._was_ours():
                    return None
                device = found.groupdict().get("device") or ""
                verdict = pattern.verdict
                if pattern.code == MEMORY and not is_broken(self._root):
                    verdict = Verdict.UNKNOWN  # the kernel's counters do not confirm it
                return Finding(
                    probe="host", code=pattern.code, verdict=verdict, kind=pattern.kind, at=at,
                    message=f"the kernel says: {message[:MESSAGE_MAX]}", device=device, once=True,
                )  # fmt: skip
        return None

    def _was_ours(self) -> bool:
        """Whether the process that the kernel has just killed was in this job's cgroup."""
        where, self._killed_in = self._killed_in, ""
        return bool(self._cgroup) and f"{where}/".startswith(f"{self._cgroup}/")

    def _gpu(self, address: str) -> str:
        """ "gpu3" for the PCI address that a Xid line names (0000:3b:00): NVML numbers GPUs in that order."""
        try:
            there = sorted(entry.name.lower() for entry in (self._root / "proc/driver/nvidia/gpus").iterdir())
        except OSError:
            there = []
        number = next((n for n, name in enumerate(there) if name.startswith(address.lower())), None)
        return f"gpu{number}" if number is not None else address

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
