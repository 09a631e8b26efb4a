"""Runs a command inside a machine of the cluster. Run as a script: a JSON specification, then the command.

On the login host the command takes this process's place, so that its process id, signals and exit code are
the caller's to use. On a node it must be a child (a process cannot change its own PID namespace): signals are
passed on, and it dies with this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from testcluster import kernel

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_NOT_FOUND = 127
_NOT_RUNNABLE = 126


def _drop_privileges(spec: dict[str, Any]) -> None:
    if spec["uid"] is not None:
        os.setgroups([])
        os.setgid(spec["gid"])
        os.setuid(spec["uid"])


def _execute(spec: dict[str, Any], argv: list[str]) -> NoReturn:
    try:
        os.chdir(spec["cwd"])
        os.execvpe(argv[0], argv, spec["env"])
    except OSError as error:
        print(f"{argv[0]}: {error.strerror} (in {spec['cwd']})", file=sys.stderr)
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE)


def _as_child(spec: dict[str, Any], argv: list[str]) -> int:
    child = os.fork()
    if child == 0:
        _drop_privileges(spec)
        # After the change of user, which would clear it.
        kernel.die_with_parent(signal.SIGKILL)
        _execute(spec, argv)
    for number in _PASSED_ON:
        signal.signal(number, lambda received, _frame: os.kill(child, received))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    """Enter the machine's namespaces and run the command."""
    spec: dict[str, Any] = json.loads(sys.argv[1])
    argv = sys.argv[2:]
    if spec["cgroup"]:
        (Path(spec["cgroup"]) / "cgroup.procs").write_text("0")
    pidfd = os.pidfd_open(spec["init"])
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET
    if spec["own_pids"]:
        kernel.setns(pidfd, flags | kernel.CLONE_NEWPID)
        return _as_child(spec, argv)
    kernel.setns(pidfd, flags)
    _drop_privileges(spec)
    _execute(spec, argv)


if __name__ == "__main__":
    raise SystemExit(main())
