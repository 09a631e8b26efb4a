"""The process that Slurm or the batch process starts on a node. It starts the agent, and lives on to see how
the agent ends.

An agent that the kernel kills for want of memory cannot tell anybody; its connection is reset as if its node
had crashed. The guard, which holds nothing, knows from the cgroup's count of kills, and starts another agent
at once, which tells the supervisor. It also ends what the ranks of a dead agent leave behind.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jurymast.health.readings import Gains, memory_cgroups, oom_kills, where_kills_count
from jurymast.processes import (
    OF_JOBS,
    TASKS_ALONE_VARIABLE,
    adopt_orphans,
    catches,
    die_with_parent,
    end_like,
    end_strays,
    kill_strays,
)

log = logging.getLogger("jurymast.agent")

# How often the count is read. A kill within the window before the agent's end explains that end (seconds).
LOOK_S, WINDOW_S = 1.0, 5.0
# Agents that live for less than this are started again this often in a row: the node has no memory for them.
SHORT_LIFE_S, RESTARTS_MAX = 60.0, 3
# Slurm's signals to a step reach the agent as well as this process, or this one alone, which passes them on.
_FOR_RANKS: tuple[signal.Signals, ...] = tuple(number for number in OF_JOBS if number != signal.SIGTERM)
_WAITED_FOR = (signal.SIGCHLD, signal.SIGTERM)


def run(agent: Callable[[int], int], killed: int | None = None) -> int:
    """Run `agent` in a process of its own; return its exit code. If a signal ended it, return `killed`, or
    end by that signal if this is None. It is called with the number of kills for want of memory that ended
    the agent before it, 0 for the first."""
    started_by = os.getppid()
    adopt_orphans()
    passed_on = _FOR_RANKS if TASKS_ALONE_VARIABLE in os.environ else ()
    waited_for = (*_WAITED_FOR, *passed_on)
    signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    ignored = [number for number in _FOR_RANKS if number not in passed_on]
    handlers: dict[signal.Signals, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in ignored}
    _, counter = where_kills_count(memory_cgroups())
    kills = short_lives = 0
    while True:
        gains, began = Gains(WINDOW_S), time.monotonic()
        gains.add(began, oom_kills(counter))
        pid = _start(handlers, waited_for)
        if pid == 0:
            return agent(kills)
        code = None
        while code is None:
            received = signal.sigtimedwait(waited_for, LOOK_S)
            if received is not None and received.si_signo in passed_on:
                number = signal.Signals(received.si_signo)
                if catches(pid, number):  # one that is only beginning has no ranks, and would end by it
                    os.kill(pid, number)
            if received is not None and received.si_signo == signal.SIGTERM and os.getppid() != started_by:
                os.kill(pid, signal.SIGTERM)  # only this process was told that the one above it has ended
            code = _reap(pid)
            kills = gains.add(time.monotonic(), oom_kills(counter))
        short_lives = short_lives + 1 if time.monotonic() < began + SHORT_LIFE_S else 1
        if code != -signal.SIGKILL or not kills or short_lives > RESTARTS_MAX:
            end_strays(probes=True)
            if code >= 0:
                return code
            return end_like(code) if killed is None else killed
        log.warning("the agent was killed for want of memory (%d kills in its cgroup): another starts", kills)
        kill_strays()  # without waiting: the supervisor is about to take the node for lost


def _start(handlers: Mapping[signal.Signals, Any], blocked: Collection[signal.Signals]) -> int:
    """Fork; in the new process, undo what is the guard's alone, and return 0."""
    own = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent()
    if os.getppid() != own:
        os._exit(1)
    if os.getsid(0) == own:  # on the local cluster the agent's process group stands for the node
        os.setpgid(0, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
    return 0


def _reap(agent: int) -> int | None:
    """Reap all processes that have ended; return the agent's exit code if it is among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)
