"""The torchrun host: one process per node with torch's LocalElasticAgent and our rendezvous. It polls more
often than torch's, stops ranks sooner, and has no barrier at the exit.

The host is a fork of the server, on active and spare nodes alike. It waits in the rendezvous, then has the
server start ranks, watches them and stops them. The supervisor decides what happens after a failure.

It also makes the variables that Slurm would have set if it had started the ranks, or a torchrun. Under
`srun torchrun` Slurm starts a torchrun on each node, and ranks have torchrun's variables. Under `srun
python train.py` Slurm starts each rank, and the script makes its process group from Slurm's variables.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import is_nccl_available
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from jurymast.core.judges import task_shares
from jurymast.core.judges.slurm_variables import of_a_task
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import SparedRank
from jurymast.processes import TASKS_ALONE_VARIABLE, catches, kill_group
from jurymast.rundir import RunDirectory, make_folder
from jurymast.worker import link, stack_signal
from jurymast.worker import rank as rank_start
from jurymast.worker.endings import ERROR_FILE_VARIABLE, read_error, read_exit
from jurymast.worker.rendezvous import AgentRendezvous
from jurymast.worker.sparing import JOINS_VARIABLE, LEAVE_LIMIT_S, Sparing

# Variables whose value is a list with an entry for each GPU.
GPUS = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "SLURM_STEP_GPUS",
)  # fmt: skip

GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"


def task_variables(
    rank: Mapping[str, str], step: Mapping[str, str], hosts: str, *, each_rank: bool
) -> dict[str, str]:
    """Return Slurm's variables for the rank with these variables of torch, in a `step` with these, on the
    nodes of the list `hosts`. `each_rank`: Slurm would have started the rank itself, not a torchrun."""
    nodes, node = int(rank["GROUP_WORLD_SIZE"]), int(rank["GROUP_RANK"])
    if not each_rank:
        return of_a_task(step, hosts, nodes=nodes, node=node)
    each, local = int(rank["LOCAL_WORLD_SIZE"]), int(rank["LOCAL_RANK"])
    return of_a_task(step, hosts, nodes=nodes, each=each, node=node, local=local)


def own_gpus(node: Mapping[str, str], local_rank: int, how: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that show a task, by its number on its node, its GPUs, and how many its step has
    there; {} if it sees all. `how`: see `TaskShares`."""
    lists = {name: node[name].split(",") for name in GPUS if name in node}
    told = {
        name: ",".join(devices[place] for place in places)
        for name, devices in lists.items()
        if (places := task_shares.gpus(devices, local_rank, how))
    }
    return told | ({GPUS_ON_NODE: str(how["gpus_on_node"])} if how["gpus_on_node"] else {})


def as_a_task(rank: dict[str, str], step: Mapping[str, str]) -> None:
    """Remove the variables that a rank would not have without torchrun, in a `step` with these: many scripts
    take RANK for a sign of torchrun, and LOCAL_RANK for their GPU, of which a task may see only one. Such a
    script makes its own store, at a port of its own; if it chose a node for that, it gets rank 0's."""
    rank[link.LOCAL_RANK_VARIABLE], rank[link.WORLD_SIZE_VARIABLE] = rank["LOCAL_RANK"], rank["WORLD_SIZE"]
    for name in [*rank]:
        address = name == "MASTER_ADDR" and name in step
        if TORCHRUNS.match(name) and name != ERROR_FILE_VARIABLE and not address:
            del rank[name]


# What torchrun sets for a rank.
TORCHRUNS = re.compile(
    r"TORCHELASTIC_|TORCH_NCCL_ASYNC_ERROR_HANDLING$|MASTER_(ADDR|PORT)$|(LOCAL_|GROUP_|ROLE_|)RANK$|"
    r"(LOCAL_|GROUP_|ROLE_|)WORLD_SIZE$|ROLE_NAME$"
)
# torch polls its ranks. Here each poll waits until a rank has ended or a stop was requested, or for a limited
# time, which takes no processor time from the ranks.
MONITOR_INTERVAL_S = 0.001
LOOK_LIMIT_S = 1.0
# torch limits restarts by itself; here the supervisor decides and counts them.
UNLIMITED = 2**31
KILL_LIMIT_S = 2.0
# Before the others are stopped, ranks at the end of their scripts have so long to end by themselves: one of
# them may be the cause, as its exit code then shows.
ENDING_LIMIT_S, ENDING_LOOK_S = 1.0, 0.02
# Slurm signals one process of a step after another, and the order to stop may overtake that by so long.
SLURMS_SIGNAL_S = 0.5
# Newer torchruns, in which they can be chosen, tell ranks which signals they pass on.
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class RankServer:
    """The connection to the server that forks the ranks of an attempt. Each rank leads a process group of all
    processes that it starts and that make no group of their own."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._rest = b""
        self._ended: dict[int, int] = {}
        self._started: list[int] = []  # by their ids, in the order of the requests
        self._pids: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a rank has ended."""
        return self._channel.fileno()

    def start(
        self,
        envs: dict[int, dict[str, str]],
        args: dict[int, Any],
        *,
        cold: bool,
        ended: Collection[int],
        sparing: Sparing,
    ) -> None:
        """Start ranks with these environments and arguments, by local rank; of those that have `ended`, a
        process that does nothing. Those that were spared go on, and come last, as they wait for others."""
        spared = {local: pid for local in envs if (pid := sparing.spared(local))}
        asked: list[int] = []
        self._started = []

        def ask(local: int) -> None:
            sparing.starts(local)
            what = {"local": local, "cold": cold, "ended": local in ended}
            order = {"start": {"environment": envs[local], "arguments": args[local], **what}}
            self._channel.sendall(json.dumps(order).encode() + b"\n")
            asked.append(local)

        try:
            for local in envs:
                if local not in spared:
                    ask(local)
            for local, pid in spared.items():
                if not sparing.join(local, envs[local]):
                    self._signal(pid, signal.SIGKILL)
                    ask(local)
        finally:  # also of a start that failed half-way, for `stop` to end
            while len(self._started) < len(asked):
                self._receive()
            pids = {**spared, **dict(zip(asked, self._started, strict=True))}
            self._pids = [pids[local] for local in sorted(envs) if local in pids]

    def pids(self) -> dict[int, int]:
        return dict(enumerate(self._pids))

    def codes(self) -> list[int | None]:
        """Return the ranks' exit codes, negative for a signal, or None while they run."""
        return [self._code(pid) for pid in self._pids]

    def lives(self, pid: int) -> bool:
        return self._code(pid) is None

    def _code(self, pid: int) -> int | None:
        while pid not in self._ended and select.select([self._channel], [], [], 0)[0]:
            self._receive()
        return self._ended.get(pid)

    def _receive(self) -> None:
        """Wait for the server's next messages, and record which ranks have started, or ended."""
        data = self._channel.recv(1 << 16)
        if not data:
            os._exit(1)  # the server is gone, so this process ends as well
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            if "ended" in message:
                self._ended[int(message["ended"])] = int(message["code"])
            elif "started" in message:
                self._started.append(int(message["started"]))

    def stop(self, grace_s: float, *, told: bool = False, spared: Collection[int] = ()) -> None:
        """Send SIGTERM to the ranks and their children, such as loader workers, as torchrun does, and SIGKILL
        to those that still run after `grace_s`; forget them. `told`: Slurm has sent SIGTERM to all processes
        here, and a handler must not run twice. Those with the `spared` ids live on."""
        self._pids = [pid for pid in self._pids if pid not in spared]
        for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_LIMIT_S)):
            for pid in self._pids:
                if not (told and number == signal.SIGTERM and catches(pid, number)):
                    self._signal(pid, number)
                self._signal(pid, signal.SIGCONT)  # a stopped process acts on SIGTERM only once it continues
            if self._wait(limit_s):
                break
        self._pids = []

    def end(self, pids: list[int], grace_s: float) -> None:
        """End ranks that were spared after all."""
        kept, self._pids = self._pids, pids
        self.stop(grace_s)
        self._pids = kept

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if self._code(pid) is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill_group(pid) if number == signal.SIGKILL else os.killpg(pid, number)

    def _wait(self, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while None in self.codes():
            left_s = end - time.monotonic()
            if left_s <= 0 or not select.select([self], [], [], left_s)[0]:
                return None not in self.codes()
        return True


class ImpatientAgent(LocalElasticAgent):
    """Runs one node's ranks and reports failures to the jurymast agent. The next rendezvous brings the
    decision. `plan` is that of `serve`, `page` has the ranks' heartbeats."""

    def __init__(
        self,
        spec: WorkerSpec,
        plan: dict[str, Any],
        rendezvous: AgentRendezvous,
        server: RankServer,
        page: link.Page | None,
        sparing: Sparing,
    ) -> None:
        super().__init__(spec, logs_specs=plan)  # only for torch's start_processes, which is not called
        self._plan, self._rendezvous_handler, self._server = plan, rendezvous, server
        self._page, self._sparing = page, sparing
        self._reported: set[int] = set()
        self._job_ends = False  # as far as a SIGTERM tells

    def on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Slurm ends the job, or what this node does for it: a rank may save long after others have ended,
        and only the supervisor stops it, if the job goes on after all."""
        self._job_ends = True

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks with torch's environment and arguments, replacing its `start_processes`."""
        self._reported, self._job_ends = set(), False
        local_elastic_agent.start_processes = self._start_ranks
        started: dict[int, Any] = super()._start_workers(worker_group)
        pids = [started[local_rank] for local_rank in sorted(started)]
        rendezvous = self._rendezvous_handler
        rendezvous.pipe.tell(msg.Started(attempt=rendezvous.launch.attempt, pids=tuple(pids)))
        rendezvous.reach_store()
        return started

    def _start_ranks(self, *, envs: dict[int, dict[str, str]], args: dict[int, Any], **_: Any) -> RankServer:
        """Start the ranks. Unlike torch's function, this installs no signal handlers and redirects no output:
        torch would open one file twice and truncate it."""
        self._complete(envs)
        launch, spared = self._rendezvous_handler.launch, self._rendezvous_handler.spared
        self._rendezvous_handler.spared = ()
        if not launch.spare:
            self._server.end([one.pid for one in spared], self._plan["grace_s"])
            self._sparing.forget()
        self._server.start(envs, args, cold=launch.cold, ended=launch.ended, sparing=self._sparing)
        return self._server

    def _complete(self, envs: dict[int, dict[str, str]]) -> None:
        """Add the attempt's environment, and the names of each rank's files."""
        plan, launch = self._plan, self._rendezvous_handler.launch
        attempt, directory = launch.attempt, RunDirectory(plan["run_directory"])
        logs = {i: directory.rank_log(attempt, int(e["RANK"])) for i, e in envs.items()}
        with contextlib.suppress(OSError):  # on a full disk, for example; ranks can train without a log
            for folder in {log.parent for log in logs.values()}:
                make_folder(folder)
        record = launch.environment.get(stack_signal.FLIGHT_VARIABLE)
        if record and is_nccl_available():  # ranks without NCCL have no flight recorder
            make_folder(Path(record).parent)
        for local_rank, environment in envs.items():
            stacks = stack_signal.file_name(attempt, local_rank)
            environment[ERROR_FILE_VARIABLE] = self._error_file(local_rank)
            environment[stack_signal.PATH_VARIABLE] = os.path.join(plan["temporary"], stacks)
            environment[rank_start.LOG_VARIABLE] = str(logs[local_rank])
            if plan["stderr_apart"]:
                errors = directory.rank_errors(attempt, int(environment["RANK"]))
                environment[rank_start.ERRORS_VARIABLE] = str(errors)
            if inputs := plan["inputs"]:
                environment[rank_start.INPUT_VARIABLE] = inputs[int(environment["RANK"]) % len(inputs)]
            environment["JURYMAST_ATTEMPT"] = str(attempt)
            if launch.saved:
                environment["JURYMAST_SAVED_STEP"] = str(launch.saved)
            if launch.unreadable:
                environment["JURYMAST_UNREADABLE"] = " ".join(map(str, launch.unreadable))
            if launch.mtbf_s:
                environment["JURYMAST_MTBF_S"] = str(launch.mtbf_s)
            environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt - 1)
            if not plan["tasks"]:
                environment.update(self._sparing.environment(local_rank))
            if launch.spare:
                environment[JOINS_VARIABLE] = str(launch.chosen)
            signals = getattr(LaunchConfig, "signals_to_handle", "")
            if signals:
                environment[SIGNALS_VARIABLE] = signals
            environment.update(launch.environment)
            if plan["slurm"]:
                each_rank = plan["tasks"]
                environment.update(task_variables(environment, os.environ, launch.nodes, each_rank=each_rank))
            if plan["tasks"]:
                as_a_task(environment, os.environ)
                environment.update(own_gpus(os.environ, local_rank, plan["shares"]))

    def _error_file(self, local_rank: int) -> str:
        name = f"error-{self._rendezvous_handler.launch.attempt}-{local_rank}.json"
        return os.path.join(self._plan["temporary"], name)

    def _report_failures(self, *, ending: bool = False) -> bool:
        """Tell the agent about failed ranks that were not reported yet, and of those that have ended with
        exit code 0; return whether any has failed.
        `ending`: those count too that have ended by an exception and still run their exit handlers. Others
        may have met the end of such a rank first, and it is about to be ended by us."""
        codes = self._server.codes()
        failed = {local_rank: code for local_rank, code in enumerate(codes) if code}
        if ending:
            lives = (number for number, code in enumerate(codes) if code is None)
            failed |= {number: 1 for number in lives if read_error(self._error_file(number))}
        for local_rank, code in enumerate(codes):
            if code == 0:
                self._report_end(local_rank)
        for local_rank in sorted(failed.keys() - self._reported):
            self._reported.add(local_rank)
            worker = self._worker_group.workers[local_rank]
            code, path = failed[local_rank], self._error_file(local_rank)
            told = read_error(path) or read_exit(path, code)
            attempt = self._rendezvous_handler.launch.attempt
            failure = msg.Failed(attempt=attempt, rank=worker.global_rank, exit_code=code, **told)
            self._rendezvous_handler.pipe.tell(failure)
        return bool(failed)

    def _report_end(self, local_rank: int) -> None:
        """Show that a rank has ended with exit code 0; say it of a task that was not left out."""
        if self._page is not None:
            link.ended(self._page, local_rank)
        rendezvous = self._rendezvous_handler
        if self._plan["guessed"] and local_rank not in {*self._reported, *rendezvous.launch.ended}:
            self._reported.add(local_rank)
            rank = self._worker_group.workers[local_rank].global_rank
            rendezvous.pipe.tell(msg.Finished(attempt=rendezvous.launch.attempt, ranks=(rank,)))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        state = self._ranks_state()
        if state is WorkerState.HEALTHY:
            news: list[Any] = [self._server, self._rendezvous_handler.pipe.stop_signal]
            select.select(news, [], [], LOOK_LIMIT_S)
            state = self._ranks_state()
        return RunResult(state=state)

    def _ranks_state(self) -> WorkerState:
        if self._report_failures():
            # Tasks may each be for themselves, and ranks leave after a signal: the supervisor stops the
            # others if that is not so.
            lives, rendezvous = None in self._server.codes(), self._rendezvous_handler
            parted = rendezvous.pipe.apart == rendezvous.launch.attempt
            alone = self._plan["guessed"] or self._job_ends or parted
            return WorkerState.HEALTHY if lives and alone else WorkerState.FAILED
        done = all(code == 0 for code in self._server.codes())
        return WorkerState.SUCCEEDED if done else WorkerState.HEALTHY

    def _shutdown(self, *_torchs: Any, **_own: Any) -> None:
        """Report what has already failed, then stop the ranks. torch's time limit, which its releases pass in
        different ways, is ignored."""
        self._await_endings()
        self._report_failures(ending=True)
        self._await_slurms_signal()
        grace_s = max(self._plan["grace_s"], self._rendezvous_handler.pipe.grace_s)
        spared, took_s = self._spare(grace_s)
        left_s = max(0.0, grace_s - took_s)
        self._server.stop(left_s, told=self._job_ends, spared=[one.pid for one in spared])
        self._rendezvous_handler.spared = spared
        self._pcontext = None

    def _spare(self, grace_s: float) -> tuple[tuple[SparedRank, ...], float]:
        """Have the ranks that can leave their step, unless the job ends. Return them, and the seconds that it
        took."""
        pipe, began = self._rendezvous_handler.pipe, time.monotonic()
        attempt = self._rendezvous_handler.launch.attempt
        if self._job_ends or not pipe.spares:
            return (), 0.0
        spared = self._sparing.leave(self._server.pids(), attempt, min(LEAVE_LIMIT_S, grace_s))
        return spared, time.monotonic() - began

    def _await_endings(self) -> None:
        """Wait a moment for the ranks that have reached the end of their scripts."""
        end = time.monotonic() + ENDING_LIMIT_S
        while self._end() and (left_s := end - time.monotonic()) > 0:
            select.select([self._server], [], [], min(left_s, ENDING_LOOK_S))

    def _await_slurms_signal(self) -> None:
        """If Slurm may be ending the job, and signals all processes of a step: wait until that has reached
        this one. Otherwise ranks would get a SIGTERM from here, and then Slurm's in the midst of what they do
        at the first."""
        all_signalled = "SLURM_JOB_ID" in os.environ and TASKS_ALONE_VARIABLE not in os.environ
        end = time.monotonic() + SLURMS_SIGNAL_S
        while self._rendezvous_handler.pipe.job_ends and all_signalled and not self._job_ends:
            if time.monotonic() > end:
                break
            time.sleep(0.01)

    def _end(self) -> bool:
        """Whether a rank that lives has reached the end of its script, as far as it is not known by what."""
        return any(
            code is None and self._is_ending(local_rank)
            for local_rank, code in enumerate(self._server.codes())
        )

    def _is_ending(self, local_rank: int) -> bool:
        path = self._error_file(local_rank)
        if os.path.exists(path):
            return not read_error(path)  # torch's @record is writing it
        page = self._page
        return page is not None and link.read_slot(page, local_rank).phase == link.PHASES[link.ENDING]

    def _exit_barrier(self) -> None:
        """Do nothing: torch waits up to 300 s for other nodes; the supervisor knows when all are done."""

    def _record_worker_events(self, result: RunResult) -> None:
        """Do nothing: torch's event log needs return values, but our ranks are programs with exit codes."""


def serve(plan: dict[str, Any], channel: socket.socket) -> NoReturn:
    """Run attempts until the agent ends this process.

    `plan`: see the agent's `host_plan`. `channel`: the connection to the server of the ranks.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    parameters = RendezvousParameters("jurymast", "agent", plan["run"], 1, max(1, plan["nodes"]))
    rendezvous = get_rendezvous_handler(parameters)
    assert isinstance(rendezvous, AgentRendezvous)
    server = RankServer(channel)
    page = link.open_page(os.environ.get(link.PAGE_VARIABLE, ""))
    sparing = Sparing(plan["ranks"], server.lives)
    while True:
        spec = WorkerSpec(
            role="default", local_world_size=plan["ranks"], entrypoint=sys.executable,
            args=tuple(plan["arguments"]), rdzv_handler=rendezvous, max_restarts=UNLIMITED,
            monitor_interval=MONITOR_INTERVAL_S,
        )  # fmt: skip
        agent = ImpatientAgent(spec, plan, rendezvous, server, page, sparing)
        signal.signal(signal.SIGTERM, agent.on_sigterm)
        agent.run()
        # All ranks of this node are done. After another node's failure they may have to run again.
        rendezvous.pipe.tell(msg.Finished(attempt=rendezvous.launch.attempt))
