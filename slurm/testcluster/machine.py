"""A machine of the cluster: becomes its first process (PID 1), and starts and reaps its daemons.

Run as a script with the path of its JSON specification. Prints ``{"pid": N}`` (as the host sees it) once
the machine's root is built, and stays in the background. SIGUSR1 stops the last daemon and starts it again;
SIGUSR2 does so by SIGKILL.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testcluster import kernel, rootfs

_SIGNALS = {signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2}
_STOP_DEADLINE_S = 30.0
_SOCKET_DEADLINE_S = 60.0
_POLL_S = 0.01


class Daemons:
    """The machine's daemons, started in order."""

    def __init__(self, specs: list[dict[str, Any]]) -> None:
        self._specs = specs
        self._running: list[subprocess.Popen[bytes] | None] = [None] * len(specs)

    def start_all(self) -> None:
        """Start every daemon, each after the files it waits for exist."""
        for index in range(len(self._specs)):
            self.start(index)

    def start(self, index: int) -> None:
        """Start one daemon."""
        spec = self._specs[index]
        for directory, uid, gid in spec["directories"]:
            Path(directory).mkdir(parents=True, exist_ok=True)
            os.chown(directory, uid, gid)
        _wait_for(spec["after"])
        _wait_for_port(spec["port"])
        with Path(spec["log"]).open("ab") as log:
            self._running[index] = subprocess.Popen(
                spec["argv"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=spec["env"],
                user=spec["uid"],
                group=spec["gid"],
                extra_groups=[],
                start_new_session=True,
                # Blocked here for sigwait; a blocked signal would be inherited down to the users' tasks.
                preexec_fn=_unblock_signals,
            )

    def restart_last(self, number: signal.Signals) -> None:
        """End the last daemon by this signal, and start it again."""
        index = len(self._specs) - 1
        running = self._running[index]
        if running is not None and running.poll() is None:
            running.send_signal(number)
            try:
                running.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
        self.start(index)

    def reap(self) -> None:
        """Collect every dead child, including orphans of the jobs: nobody else would."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for index, running in enumerate(self._running):
                if running is not None and running.pid == pid:
                    self._running[index] = None
                    code = os.waitstatus_to_exitcode(status)
                    print(f"{self._specs[index]['argv'][0]} ended with {code}", flush=True)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _wait_for(path: str | None) -> None:
    deadline = time.monotonic() + _SOCKET_DEADLINE_S
    while path is not None and not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not appear in {_SOCKET_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


def _wait_for_port(port: int | None) -> None:
    """Wait until a daemon of this machine takes connections; it may do so at one address only."""
    deadline = time.monotonic() + _SOCKET_DEADLINE_S
    listens = re.compile(rf"^ *\d+: \w+:{port or 0:04X} \w+:\w+ 0A ", re.MULTILINE)
    while port is not None and not listens.search(Path("/proc/net/tcp").read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens on port {port} after {_SOCKET_DEADLINE_S:.0f} s")
        time.sleep(_POLL_S)


def _live(spec: dict[str, Any], ready_fd: int) -> NoReturn:
    os.setsid()
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        rootfs.build(rootfs.RootPlan.from_json(spec["root"]))
        os.write(ready_fd, b"ok")
        os.close(ready_fd)
        daemons = Daemons(spec["daemons"])
        daemons.start_all()
        while True:
            received = signal.sigwait(_SIGNALS)
            if received != signal.SIGCHLD:
                daemons.restart_last(signal.SIGTERM if received == signal.SIGUSR1 else signal.SIGKILL)
            daemons.reap()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> int:
    """Enter the namespaces, leave the machine running in the background, report its process id."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    if spec["cgroup"]:
        (Path(spec["cgroup"]) / "cgroup.procs").write_text("0")
    netns = os.open(spec["netns"], os.O_RDONLY | os.O_CLOEXEC)
    kernel.setns(netns, kernel.CLONE_NEWNET)
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID)
    socket.sethostname(spec["name"])
    ready, ready_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        _live(spec, ready_write)
    os.close(ready_write)
    if os.read(ready, 16) != b"ok":
        print(f"machine {spec['name']} did not start: see {spec['log']}", file=sys.stderr)
        return 1
    print(json.dumps({"pid": pid}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
