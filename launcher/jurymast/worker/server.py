"""The server of a node's ranks: one process with torch loaded, from which the host and all ranks are forked.

Importing torch takes seconds, a fork 10 ms. The server has one thread and touches no device, so that its
forks are sound. It serves the host over a socket pair, by JSON lines:

    host -> server   {"start": {"environment": ..., "arguments": ..., "cold": ..., ...}}
    server -> host   {"started": PID}, in the order of the requests; {"ended": PID, "code": exit code}

Variables that the script sets before it imports torch (`os.environ["OMP_NUM_THREADS"] = "4"`) are read from
its text and set before torch is loaded. Only plain settings count: constants, at the top of the script or of
the user's modules, outside of any condition. If the text shows that there are others, ranks start cold.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NoReturn

from jurymast.processes import (
    adopt_orphans,
    allow_core,
    die_first,
    die_with_parent,
    end_like,
    ignore_signals,
    kill_group,
    name_process,
)
from jurymast.worker import before_torch, epilog, preload, rank
from jurymast.worker.agent_pipe import FD_VARIABLE
from jurymast.worker.ready import AFTER_S, Ready, wait_for_order
from jurymast.worker.shares import line, processors

# ---- variables that the script sets

# Prefixes of variables that torch's compiler reads when the script first uses it, or an optimizer: a script
# that names one may set it after it has imported torch.
COMPILER = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS", "AOTINDUCTOR_", "AOT_INDUCTOR_")


def names_compiler(source: str) -> bool:
    """Return whether the script names variables of torch's compiler."""
    return any(prefix in source for prefix in COMPILER)


# ---- the server

# What ranks import anyway; only modules after which a fork is safe, because they touch no device.
FIRST = ["torch"]
THEN = [
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # a process's first optimizer imports it, which takes 0.5 s
    "torch.distributed.checkpoint.state_dict",
    "jurymast.checkpoint.checkpointer",
]
# The part of it that does not load torch's compiler; a script may set the compiler's variables before its
# first use.
WITHOUT_COMPILER = ["torch.distributed", "torch.nn.parallel"]


# A process that was killed takes longer only while a driver or storage holds it.
KILL_LIMIT_S = 2.0


class ForkServer:
    """Starts the host and the ranks. `plan` is the host's (see the agent's `host_plan`); `loaded` has the
    modules of a new interpreter."""

    def __init__(self, loaded: frozenset[str], plan: dict[str, Any]) -> None:
        self._loaded, self._plan = loaded, plan
        self._pid = os.getpid()
        self._ranks_name = Path("/proc/self/comm").read_text().strip()
        self._rest = b""

    def serve(self) -> None:
        """Serve until the host ends, then end with its exit code. Returns only in ranks."""
        die_first()
        die_with_parent()
        allow_core(self._plan["core_bytes"])  # the ranks' is the user's
        adopt_orphans()
        # A signal sent to the whole job must not end the server. The agent decides when it ends.
        ignore_signals()
        name_process("jurymast-server")
        environment = rank.users_environment(os.environ)
        everywhere = os.sched_getaffinity(0)
        self._shares = processors(everywhere, self._plan["ranks"], self._plan["shares"])
        self._bind(0)  # libraries count processors when they are loaded
        self._load(environment)
        os.sched_setaffinity(0, everywhere)
        pipe = int(os.environ.pop(FD_VARIABLE))
        self._environment = environment
        self._wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._ranks: dict[int, dict[str, str] | None] = {}  # their variables; None for one that does nothing
        self._epilogs: dict[int, dict[str, int] | None] = {}  # what the host is told once they have ended
        ours, theirs = socket.socketpair()
        forks_ahead = len(self._bundles) > 1 and not self._plan["program"]
        self._ready = Ready(self._plan["ranks"] if forks_ahead else 0)
        self._host = self._fork()
        if self._host == 0:
            ours.close()
            self._become_host(theirs, pipe)
        theirs.close()
        os.close(pipe)
        self._channel = ours
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        order = self._await_rank()
        self._ready.leave()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._wake_r, wake_w):
            os.close(descriptor)
        ours.close()
        if order["ended"]:
            os._exit(0)
        self._bind(order["local"])
        rank.begin(
            order, parent=self._pid, name=self._ranks_name, environment=self._environment,
            loaded=self._loaded, bundles=self._bundles, presets=self._presets,
            program=self._plan["script"] if self._plan["program"] else "",
            cold=self._cold, repeatable=self._repeatable, says=self._says(order),
            prologs=self._plan["prologs"],
        )  # fmt: skip

    def _bind(self, local_rank: int) -> None:
        """Give this process the processors of the rank with this number on its node, if it has its own."""
        if self._shares:
            os.sched_setaffinity(0, self._shares[local_rank])

    def _says(self, order: dict[str, Any]) -> str:
        """Return what a rank prints before all else."""
        how, own = self._plan["shares"], os.sched_getaffinity(0)
        if not how["verbose"] or not (self._shares or how["bound_to"] == "none"):
            return ""
        return line(own, int(order["environment"]["SLURM_PROCID"]), order["local"], how)

    def _load(self, environment: dict[str, str]) -> None:
        """Load torch and the modules that ranks need, with the variables that the script sets first."""
        found = self._before_torch()
        self._presets = found.presets(environment)
        more = WITHOUT_COMPILER if found.computed or names_compiler(self._source()) else THEN
        own = preload.Bundle(modules={n: m for n, m in sys.modules.items() if n not in self._loaded})
        before = dict(os.environ)
        os.environ.update(self._presets)
        try:
            self._bundles = [own]
            # Libraries that are loaded here have as many threads in each rank.
            alike = len({len(share) for share in self._shares}) <= 1
            if self._plan["warm"] and not self._plan["program"] and alike:
                gc.disable()  # an import makes no garbage, and the search for it takes a fifth of the time
                self._bundles += [preload.load(FIRST, native=True), preload.load(more)]
                # A rank's garbage collections, the last of them at its end, skip what all ranks share: going
                # through it would copy all of its memory, which takes a second.
                gc.freeze()
                gc.enable()
        finally:
            os.environ.clear()
            os.environ.update(before)
        torch_reads = self._bundles[1].reads if len(self._bundles) > 1 else preload.is_native
        shown = [name for name in found.computed if name == before_torch.UNKNOWN or torch_reads(name)]
        self._cold = f"the script sets {', '.join(shown)} before it imports torch" if shown else ""
        self._repeatable = found.repeatable

    def _before_torch(self) -> before_torch.Before:
        if self._plan["program"]:
            return before_torch.Before()
        read = before_torch.of_module if self._plan["module"] else before_torch.of_script
        return read(self._plan["script"], sys.path)

    def _source(self) -> str:
        """Return the script's text; "" for a module, a program, or a file that cannot be read."""
        if self._plan["module"] or self._plan["program"]:
            return ""
        try:
            return Path(self._plan["script"]).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _fork(self) -> int:
        with warnings.catch_warnings():
            # Python 3.12 warns because of numpy's threads, which numpy itself stops before a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            return os.fork()

    def _become_host(self, channel: socket.socket, pipe: int) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            if os.getppid() == self._pid:
                name_process("jurymast-host")
                os.environ[FD_VARIABLE] = str(pipe)
                from jurymast.worker.elastic import serve

                serve(self._plan, channel)
        except Exception:
            traceback.print_exc()  # for the node's log
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _await_rank(self) -> dict[str, Any]:
        """Serve the host; returns only in a new rank, with the request for it."""
        while True:
            both: list[Any] = [self._channel, self._wake_r]
            news, _, _ = select.select(both, [], [], AFTER_S if self._ready.lacks else None)
            if self._wake_r in news:
                os.read(self._wake_r, 4096)
            self._reap()
            if self._channel in news:
                for order in self._orders():
                    self._await_epilogs()
                    pid = (not order["ended"] and self._ready.take(order)) or self._fork()
                    if pid == 0:
                        return order
                    self._ranks[pid] = None if order["ended"] else order["environment"]
                    self._tell({"started": pid})
            elif not news and (ahead := self._fork_ahead()) is not None:
                return ahead

    def _fork_ahead(self) -> dict[str, Any] | None:
        """Fork a process that will be a rank. Returns its order in that process, once it comes, else None."""
        pipe, ours = os.pipe2(os.O_CLOEXEC)
        pid = self._fork()
        if pid == 0:
            os.close(ours)
            return wait_for_order(pipe, self._pid)
        os.close(pipe)
        self._ready.add(pid, ours)
        return None

    def _orders(self) -> list[dict[str, Any]]:
        try:
            data = self._channel.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:  # the host is ending; its exit code is about to come
            self._reap(wait=True)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line)["start"] for line in lines]

    def _reap(self, *, wait: bool = False) -> None:
        """Report ranks that have ended to the host; end with the host's exit code if the host has ended.
        Others that end are what ranks have left behind."""
        while True:
            options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
            ended = os.waitid(os.P_ALL, 0, options)
            if ended is None:
                return
            pid = ended.si_pid
            is_rank = pid in self._ranks
            if is_rank and (ended.si_code != os.CLD_EXITED or ended.si_status != 0):
                # What a failed rank leaves, such as loader workers, would notice only after seconds. The
                # group's id cannot be reused before the rank is reaped.
                kill_group(pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if pid == self._host:
                self._end(code)
            self._ready.ended(pid)
            if is_rank:
                self._rank_ended(pid, code)
            elif told := self._epilogs.pop(pid, None):
                self._tell(told)

    def _rank_ended(self, pid: int, code: int) -> None:
        """Run what runs after this rank, and tell the host that it has ended: as Slurm does, after that; but
        at once of a failure, which others wait for."""
        environment, told = self._ranks.pop(pid), {"ended": pid, "code": code}
        if environment is None or not any(self._plan["epilogs"]):
            self._tell(told)
            return
        if code:
            self._tell(told)
        process = self._begin_epilog({**environment, "SLURM_TASK_PID": str(pid)})
        self._epilogs[process] = None if code else told

    def _begin_epilog(self, environment: dict[str, str]) -> int:
        """Start the programs that run after the rank with this environment; returns their process's id."""
        pid = self._fork()
        if pid:
            return pid
        try:
            die_with_parent()
            if os.getppid() == self._pid:
                name_process(epilog.NAME)
                variables = {**self._environment, **environment}
                rank.redirect_output(variables)
                users, sites = self._plan["epilogs"]
                epilog.run(users, sites, variables)
        finally:
            os._exit(0)

    def _await_epilogs(self) -> None:
        """Wait until all that runs after earlier ranks has ended, which takes a limited time."""
        for pid in [*self._epilogs]:
            os.waitpid(pid, 0)
            if told := self._epilogs.pop(pid):
                self._tell(told)

    def _end(self, code: int) -> NoReturn:
        """End with the host's exit code, after what runs after ranks, if there is something. Ranks that live
        end with this process, or before that."""
        if any(self._plan["epilogs"]):
            for pid in self._ranks:
                kill_group(pid)
            until = time.monotonic() + KILL_LIMIT_S
            while self._ranks and time.monotonic() < until:
                for pid in [pid for pid in self._ranks if os.waitpid(pid, os.WNOHANG)[0]]:
                    self._rank_ended(pid, -signal.SIGKILL)
                time.sleep(0.01)
            self._await_epilogs()
        end_like(code)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the host is ending
