"""The kernel log, if it may be read: what the kernel and drivers report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
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
    doubtful,
    xid_finding,
)
from jurymast_host.memory import is_broken
from jurymast_host.ours import Disks, NvidiaGpus, Processors

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
# GPU-I and GPU-CI: the part of a divided GPU (MIG). Drivers of some years ago leave out "PCI:".
XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)(?: GPU-I:(?P<instance>\d+))?(?: GPU-CI:\d+)?\): "
    r"(?P<code>\d+),? ?(?P<text>.*)"
)
CPU = re.compile(r"CPU[ #]?(\d+)")
OTHERS = "it concerns a part of the machine that this job does not use"


class KernelLog:
    """Reads what is new at each look: events since this job's start, each once. Of what is in the log at the
    first look, the time says whether it is of this job; what comes later always is.

    Only what this job may touch is this job's. What happens to other jobs' GPUs, or to processes outside of
    `cgroup`, is not told; what happens to other processors and disks is told, and is not held against the
    node, and neither is what may be either's. `users`: the user's variables, `directories`: where the job has
    files. `after`: the number of the last message that an earlier process of the probe read.
    """

    def __init__(
        self, root: Path, context: Context, cgroup: str = "", *, directories: Sequence[str] = ("/",),
        users: Mapping[str, str] = os.environ, after: int = -1,
    ) -> None:  # fmt: skip
        self._context = context
        self._cgroup = cgroup.rstrip("/")
        self._killed_in = ""
        self._root = root
        self._gpus = NvidiaGpus(root, context.gpus, users)
        self._cpus = Processors(root)
        self._disks = Disks(root, directories)
        self._after = self.last = after
        self._why_not = ""
        self._looked_at = 0.0
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
        # The log's clock is one of these, depending on the machine, and only one of them is corrected by time
        # servers: after months they differ by minutes. The later one makes a message at worst too old.
        clocks = (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW)
        booted = now - max(map(time.clock_gettime, clocks))
        before, self._looked_at = self._looked_at, now
        for record in self._records():
            head, _, message = record.partition(";")
            fields = head.split(",")
            if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
                continue
            sequence, at = int(fields[1]), min(now, max(before, booted + int(fields[2]) / 1e6))
            self.last = max(self.last, sequence)
            own_words = int(fields[0]) >> 3 == 0  # facility 0: no process can write it
            of_this_job = at >= self._context.started_at or self._after >= 0 or before > 0.0
            if own_words and of_this_job and sequence > self._after:
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
            return self._xid(xid, at)
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
                finding = Finding(
                    probe="host", code=pattern.code, verdict=verdict, kind=pattern.kind, at=at,
                    message=f"the kernel says: {message[:MESSAGE_MAX]}", device=device, once=True,
                )  # fmt: skip
                return finding if self._may_touch(finding, message) else doubtful(finding, OTHERS)
        return None

    def _xid(self, xid: re.Match[str], at: float) -> Finding | None:
        name, ours = self._gpus.at(xid["device"])
        if ours is not False and xid["instance"] is not None:
            ours = self._gpus.has_instance(xid["device"], int(xid["instance"]))
        if ours is False:
            return None
        finding = xid_finding(int(xid["code"]), name, xid["text"], at, self._context)
        if ours is None:
            return doubtful(finding, f"it cannot be told whether this job has the GPU at {xid['device']}")
        return finding

    def _may_touch(self, finding: Finding, message: str) -> bool:
        """Whether a message is about a processor, disk or PCI device that the job may use; True for one that
        concerns the whole machine."""
        if finding.code == "disk-error":
            return self._disks.has(finding.device)
        if finding.code == "pcie-fatal":
            return not self._gpus.is_others(self._at_or_below(finding.device))
        if finding.code in ("machine-check", "cpu-lockup") and (cpu := CPU.search(message)):
            return self._cpus.has(int(cpu[1]))
        return True

    def _at_or_below(self, address: str) -> list[str]:
        """The PCI addresses of GPUs that are this device, or are connected through it."""
        devices = self._root / "sys/bus/pci/devices"
        places = {gpu: Path(os.path.realpath(devices / gpu)).parts for gpu in self._gpus.addresses}
        return [gpu for gpu, parts in places.items() if address.lower() in (gpu, *parts)]

    def _was_ours(self) -> bool:
        """Whether the process that the kernel has just killed was in this job's cgroup."""
        where, self._killed_in = self._killed_in, ""
        return bool(self._cgroup) and f"{where}/".startswith(f"{self._cgroup}/")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
