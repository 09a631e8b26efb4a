"""The batch process: one a Slurm job, on its first node. Starts the agents and keeps a supervisor running.

It is the job's life as far as Slurm is concerned, so it does as little as possible: a supervisor that
crashes is started again, the agents and the ranks go on meanwhile.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from jurymast import foreign
from jurymast.cluster.agents import Agents, LocalAgents, SrunAgents, end_with_us
from jurymast.cluster.allocation import Allocation, from_slurm_environment, listen
from jurymast.cluster.control import requeue
from jurymast.core.settings import RunPlan
from jurymast.errors import JurymastError
from jurymast.rundir import RunDirectory

SUPERVISOR_RESTARTS_MAX = 5
RESTART_WINDOW_S = 60.0
OUTCOME_POLL_S = 0.5
# A successor's requeue takes seconds; one that is not seen by then has failed, and its node may be gone too.
SUCCESSOR_LIMIT_S = 120.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
SUPERSEDED = 3  # exit code of a supervisor that a newer epoch replaced


class Batch:
    """One allocation, or a training step of one."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, allocation: Allocation, agents: Agents, log: int = 1
    ) -> None:
        """`log`: descriptor of the file that the supervisor writes to."""
        self._directory = directory
        self._plan = plan
        self._allocation = allocation
        self._agents = agents
        self._log = log
        self._listeners = listen(plan.cluster)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._told_to_end = False

    def run(self) -> dict[str, Any]:
        """Until the supervisor says how it ended: {"state": ..., "exit_code": ...}."""
        self._directory.outcome_file.unlink(missing_ok=True)
        self._allocation.save(self._directory)
        for number in SIGNALS:
            signal.signal(number, self._forward)
        crashes: list[float] = []
        try:
            self._start_supervisor()
            # Agents import torch while the supervisor comes up.
            self._agents.start(self._listeners[0].getsockname()[1])
            while True:
                assert self._supervisor is not None
                code = self._supervisor.wait()
                outcome = self._read_outcome()
                if outcome is not None and outcome["state"] == "requeued":
                    self._requeue(outcome)
                if outcome is not None:
                    return outcome
                if code == SUPERSEDED:
                    return self._await_outcome()
                crashes = [t for t in crashes if t > time.monotonic() - RESTART_WINDOW_S] + [time.monotonic()]
                print(f"the supervisor ended with code {code}", flush=True)
                if len(crashes) > SUPERVISOR_RESTARTS_MAX:
                    return self._go_on_without()
                self._start_supervisor()
        finally:
            self._agents.end()
            for listener in self._listeners:
                listener.close()

    def _go_on_without(self) -> dict[str, Any]:
        """No supervisor stays up. The training is not to blame: let the ranks come to their end, unless
        somebody ends the job."""
        print("jurymast: no supervisor stays up; the ranks go on without failure handling", flush=True)
        while not self._told_to_end and self._agents.alive():
            time.sleep(OUTCOME_POLL_S)
        return self._read_outcome() or {"state": "failed", "exit_code": 70}

    def _await_outcome(self) -> dict[str, Any]:
        """Another node's supervisor took over while this one was cut off. It decides; this process only keeps
        the Slurm job alive for it, and ends the job with its code."""
        while (outcome := self._read_outcome()) is None:
            time.sleep(OUTCOME_POLL_S)
        if outcome["state"] == "requeued":
            self._await_requeue(outcome)
        return outcome

    def _await_requeue(self, outcome: dict[str, Any]) -> None:
        """The successor requeues the job after it wrote so. It runs below this process's srun: until Slurm
        ends this life of the job, all must stay as it is, or the job ends with nothing requeued."""
        end = time.monotonic() + SUCCESSOR_LIMIT_S
        while not self._told_to_end:
            if time.monotonic() > end:
                print(f"requeue: not seen within {SUCCESSOR_LIMIT_S:g} s, done from here", flush=True)
                self._requeue(outcome)
                return
            time.sleep(OUTCOME_POLL_S)

    def _requeue(self, outcome: dict[str, Any]) -> None:
        """Raises ClusterUnavailableError when Slurm refuses."""
        self._agents.give_up()
        if self._plan.cluster == "slurm":
            lost, exclude = outcome["lost"], outcome["exclude"]
            requeue(self._plan, self._allocation, lost, exclude, tell_of_requeue)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            sent = signal.SIGUSR2 if number == signal.SIGUSR2 else signal.SIGTERM
            self._supervisor.send_signal(sent)
        elif number != signal.SIGUSR2:
            self._told_to_end = True

    def _start_supervisor(self) -> None:
        """It inherits the sockets: agents learn its port before it runs, and find it there after a crash.
        Also the signals' block: one that comes before it can answer waits until then."""
        arguments = [sys.executable, "-m", "jurymast.supervisor", str(self._directory.root)]
        files = [listener.fileno() for listener in self._listeners]
        for file in files:
            arguments += ["--listen-fd", str(file)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._supervisor = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                pass_fds=files, preexec_fn=self._tie(),
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._told_to_end:  # while none was there
            self._supervisor.send_signal(signal.SIGTERM)

    def _tie(self) -> Callable[[], None] | None:
        """What is left of a job of its own Slurm ends."""
        return end_with_us if self._plan.cluster == "local" else None

    def _read_outcome(self) -> dict[str, Any] | None:
        try:
            outcome: dict[str, Any] = foreign.load(self._directory.outcome_file)
            return outcome
        except (OSError, ValueError):
            return None


def tell_of_requeue(trouble: str) -> None:
    print(f"requeue: {trouble}", flush=True)


def local_allocation(plan: RunPlan, restarts: int, excluded: set[str]) -> Allocation:
    """Names for the nodes of a local run: never one that was excluded."""
    names: list[str] = []
    number = 0
    while len(names) < plan.nodes:
        number += 1
        if f"local-{number}" not in excluded:
            names.append(f"local-{number}")
    return Allocation(f"local-{os.getpid()}", restarts, tuple(names), names[0], time.time())


def main(run_directory: str) -> int:
    """Exit code of the job: the application's own, or one of `jurymast.errors`."""
    directory = RunDirectory(Path(run_directory))
    plan = directory.plan()
    if plan.cluster == "slurm":
        allocation = from_slurm_environment()
        outcome = Batch(directory, plan, allocation, SrunAgents(run_directory, len(allocation.nodes))).run()
        return int(outcome["exit_code"])
    restarts, excluded = 0, set[str]()
    while True:
        allocation = local_allocation(plan, restarts, excluded)
        outcome = Batch(directory, plan, allocation, LocalAgents(run_directory, allocation.nodes)).run()
        if outcome["state"] != "requeued":
            return int(outcome["exit_code"])
        restarts += 1
        excluded |= set(outcome["exclude"])


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except JurymastError as failure:
        print(f"jurymast: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
