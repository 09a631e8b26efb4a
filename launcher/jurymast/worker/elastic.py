"""torch's LocalElasticAgent with our patience: quick looks, short stops, no barrier at the exit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import is_nccl_available
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from jurymast.worker import entry, error_file, stack_signal
from jurymast.worker.rendezvous import AgentRendezvous

# torch polls its ranks; here a look waits until one has ended or a stop was asked, which takes no processor
# time from the ranks. Now and then it looks anyway.
MONITOR_INTERVAL_S = 0.001
LOOK_LIMIT_S = 1.0
# torch counts its own restarts; ours are decided and counted by the supervisor.
UNLIMITED = 2**31
KILL_LIMIT_S = 2.0
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class RankLogs(LogsSpecs):
    """Names each rank's log and error file, and hands ranks the attempt's environment.

    The ranks redirect themselves: torch would open one file twice and truncate it.
    """

    def __init__(self, logs: Path, temporary: Path, rendezvous: AgentRendezvous) -> None:
        super().__init__()
        self._logs, self._temporary, self._rendezvous = logs, temporary, rendezvous
        self.error_files: dict[int, str] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        attempt = self._rendezvous.attempt
        folder = self._logs / f"attempt-{attempt:04d}"
        with contextlib.suppress(OSError):  # on a full disk: ranks without a log train as well
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        record = self._rendezvous.environment.get(stack_signal.FLIGHT_VARIABLE)
        if record and is_nccl_available():  # the others keep no record of their flight
            Path(record).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for local_rank, environment in envs.items():
            rank = int(environment["RANK"])
            failure = str(self._temporary / f"error-{attempt}-{local_rank}.json")
            self.error_files[local_rank] = failure
            environment[error_file.PATH_VARIABLE] = failure
            stacks = stack_signal.file_name(attempt, local_rank)
            environment[stack_signal.PATH_VARIABLE] = str(self._temporary / stacks)
            environment[entry.LOG_VARIABLE] = str(folder / f"rank-{rank:05d}.log")
            environment["JURYMAST_ATTEMPT"] = str(attempt)
            if self._rendezvous.mtbf_s:
                environment["JURYMAST_MTBF_S"] = str(self._rendezvous.mtbf_s)
            environment["TORCHELASTIC_RESTART_COUNT"] = str(attempt - 1)
            environment.update(self._rendezvous.environment)
        console = dict.fromkeys(envs, "")
        return LogsDest(stdouts=console, stderrs=dict(console), error_files=dict(self.error_files))

    @property
    def root_log_dir(self) -> str:
        return str(self._logs)


class ImpatientAgent(LocalElasticAgent):
    """One node's ranks. Failures go to the jurymast agent; the next rendezvous brings the decision."""

    def __init__(self, spec: WorkerSpec, logs: RankLogs, rendezvous: AgentRendezvous, grace_s: float) -> None:
        super().__init__(spec, logs_specs=logs, start_method="forkserver")
        self._rank_logs = logs
        self._rendezvous_handler = rendezvous
        self._grace_s = grace_s
        self._reported: set[int] = set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._reported = set()
        started: dict[int, Any] = super()._start_workers(worker_group)
        # torch has just taken these. Slurm sends them to everything there is, and the agent decides.
        for number in ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        pids = [started[local_rank] for local_rank in sorted(started)]
        self._rendezvous_handler.pipe.tell("started", attempt=self._rendezvous_handler.attempt, pids=pids)
        return started

    def _processes(self) -> list[Any]:
        started = getattr(self._pcontext, "_pc", None)
        return list(started.processes) if started is not None else []

    def _report_failures(self) -> list[int]:
        """Tell the agent about ranks that ended badly and were not reported yet; returns all local ranks
        that failed."""
        failed = [i for i, process in enumerate(self._processes()) if process.exitcode not in (None, 0)]
        for local_rank in failed:
            if local_rank not in self._reported:
                self._reported.add(local_rank)
                worker = self._worker_group.workers[local_rank]
                self._rendezvous_handler.pipe.tell(
                    "failed", attempt=self._rendezvous_handler.attempt, rank=worker.global_rank,
                    exit_code=self._processes()[local_rank].exitcode,
                    **error_file.read(self._rank_logs.error_files.get(local_rank, "")),
                )  # fmt: skip
        return failed

    def _wait_for_news(self) -> None:
        running = [process.sentinel for process in self._processes() if process.exitcode is None]
        connection.wait([*running, self._rendezvous_handler.pipe.stop_signal], LOOK_LIMIT_S)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_news()
        if self._report_failures():
            return RunResult(state=WorkerState.FAILED)
        if all(process.exitcode == 0 for process in self._processes()):
            return RunResult(state=WorkerState.SUCCEEDED)
        return RunResult(state=WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_torchs: Any, **_own: Any) -> None:
        """Report what has already failed, then SIGTERM, grace, SIGKILL. torch's own patience, passed in
        different ways by its releases, does not count."""
        self._report_failures()
        processes = self._processes()
        for number, limit_s in ((death_sig, self._grace_s), (signal.SIGKILL, KILL_LIMIT_S)):
            living = [process for process in processes if process.is_alive()]
            for process in living:
                _kill(process.pid, number)
                _kill(process.pid, signal.SIGCONT)  # a stopped process acts on SIGTERM only when it goes on
            if wait_until(lambda: not any(process.is_alive() for process in processes), limit_s):
                break
        super()._shutdown(signal.SIGKILL)
        self._pcontext = None

    def _exit_barrier(self) -> None:
        """torch waits up to 300 s for the other nodes here; the supervisor knows when all are done."""

    def _record_worker_events(self, result: RunResult) -> None:
        """torch's own event log wants return values, which ranks that end by exit code do not give."""


def wait_until(condition: Callable[[], bool], limit_s: float, period_s: float = 0.005) -> bool:
    """Poll `condition` until it holds or `limit_s` have passed."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(period_s)
    return True


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class _Unused:
    """In place of what torch makes to carry return values: our ranks end by exit code and give none."""


def _make_no_semaphores() -> None:
    """torch makes seven named semaphores an attempt, which a SIGKILL would leave as files in /dev/shm."""
    context: Any = multiprocessing.get_context("forkserver")
    context.SimpleQueue = context.Event = _Unused


def serve(plan: dict[str, Any]) -> NoReturn:
    """Run attempts until the agent ends this process. `plan`: see the agent's `host_plan`."""
    _make_no_semaphores()
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    parameters = RendezvousParameters("jurymast", "agent", plan["run"], 1, max(1, plan["nodes"]))
    rendezvous = get_rendezvous_handler(parameters)
    assert isinstance(rendezvous, AgentRendezvous)
    script = entry.Script(plan["script"], tuple(plan["arguments"]), plan["module"], plan["directory"])
    logs = RankLogs(Path(plan["logs"]), Path(plan["temporary"]), rendezvous)
    while True:
        spec = WorkerSpec(
            role="default", local_world_size=plan["ranks"], entrypoint=entry.run, args=(script,),
            rdzv_handler=rendezvous, max_restarts=UNLIMITED, monitor_interval=MONITOR_INTERVAL_S,
        )  # fmt: skip
        agent = ImpatientAgent(spec, logs, rendezvous, plan["grace_s"])
        agent.run()
        # All ranks of this node are done. Another node's failure may still need them once more.
        rendezvous.pipe.tell("finished", attempt=rendezvous.attempt)
