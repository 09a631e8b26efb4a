"""Finds and ends processes: by namespace and recorded identity, never by name."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError, DeadlineError

POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """A process as /proc shows it."""

    pid: int
    node_pid: int  # as the machine itself sees it
    parent: int
    uid: int
    command: str

    def line(self) -> str:
        """For a person to read."""
        return f"pid {self.pid} uid {self.uid}: {self.command}"


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot: with the pid, its identity. 0 when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; it only waits for its parent.
    return 0 if fields[0] == "Z" else int(fields[19])


# Nobody has the number, or a thread has it by now: since Linux 6.9, and before.
_NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)


def send(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal exactly that process; False when it is gone, even if its pid was taken again."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return False
        raise
    try:
        if start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(pidfd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)


def namespace_of(path: Path) -> tuple[int, int] | None:
    """Identity of the namespace a file (of /proc/PID/ns or /run/netns) stands for."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def all_pids() -> Iterator[int]:
    """Every process of the host."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def in_namespaces(kind: str, wanted: Sequence[tuple[int, int] | None]) -> list[int]:
    """Processes whose namespace of that kind ("pid", "net") is one of the wanted ones."""
    known = {item for item in wanted if item is not None}
    return [pid for pid in all_pids() if namespace_of(Path(f"/proc/{pid}/ns/{kind}")) in known]


def describe(pid: int) -> Process | None:
    """What /proc says about a process; None when it is gone or a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if fields["State"].split()[0] in "ZX":
        return None
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return Process(
        pid=pid,
        node_pid=int(fields["NSpid"].split()[-1]),
        parent=int(fields["PPid"]),
        uid=int(fields["Uid"].split()[0]),
        command=text or fields["Name"].strip(),
    )


def matches(process: Process, pattern: re.Pattern[str]) -> bool:
    """Whether the command line, or one NAME=value of the environment, contains the pattern."""
    if pattern.search(process.command):
        return True
    try:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False
    return any(pattern.search(entry) for entry in environment.decode(errors="replace").split("\0") if entry)


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, poll_s: float = POLL_S) -> None:
    """Poll until the condition holds; DeadlineError naming ``what`` after ``deadline_s`` seconds."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineError(f"waited {deadline_s:g} s for {what}")
        time.sleep(poll_s)


def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 30.0) -> str:
    """Run a command of the system and return its output; ClusterError with its message when it fails."""
    try:
        done = subprocess.run(
            list(argv), input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{' '.join(argv)}: no end after {timeout_s:g} s") from None
    if done.returncode != 0:
        message = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise ClusterError(f"{' '.join(argv)}: {message[-1]}")
    return done.stdout


def kill_all(find: Callable[[], list[int]], deadline_s: float) -> None:
    """SIGKILL whatever ``find`` returns until it returns nothing."""

    def gone() -> bool:
        alive = [pid for pid in find() if start_ticks(pid)]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not alive

    wait_until(gone, deadline_s, "the cluster's processes to end")
