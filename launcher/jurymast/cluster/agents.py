"""The processes that carry a run's agents: srun, or each local node's agent itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Protocol

from jurymast.cluster.allocation import LOOPBACK, announced_hosts
from jurymast.processes import die_with_parent

# One node's end must not end the others' tasks.
SURVIVE = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


class Agents(Protocol):
    """Of one allocation, or of one step."""

    def start(self, port: int) -> None:
        """The supervisor listens on this port, here."""

    def alive(self) -> bool: ...

    def end(self) -> None:
        """The run is over here."""

    def give_up(self) -> None:
        """The job is about to be requeued: none may be left, nor the srun that has started them."""


class SrunAgents:
    """One srun for so many nodes."""

    def __init__(self, run_directory: str, nodes: int) -> None:
        self._run_directory, self._nodes = run_directory, nodes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, port: int) -> None:
        command = ["srun", *SURVIVE, "--ntasks-per-node=1", f"--nodes={self._nodes}"]
        command += [f"--ntasks={self._nodes}", "--overlap", "--unbuffered", "--cpu-bind=none"]
        command += agent_command(self._run_directory, announced_hosts()[0], port)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        """The job's end is theirs, and an srun that still waits for a dead node must not hold the job up."""
        if self._process is not None:
            end_srun(self._process)

    def give_up(self) -> None:
        self.end()


class LocalAgents:
    """A process group a node: what happens to the group happens to the node."""

    def __init__(self, run_directory: str, nodes: Sequence[str]) -> None:
        self._run_directory, self._nodes = run_directory, nodes
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, port: int) -> None:
        command = agent_command(self._run_directory, LOOPBACK, port)
        self._processes = [
            subprocess.Popen(
                [*command, "--node", node], stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=end_with_us,
            )
            for node in self._nodes
        ]  # fmt: skip

    def alive(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            process.wait()

    def give_up(self) -> None:
        self.end()


def end_srun(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def agent_command(run_directory: str, host: str, port: int) -> list[str]:
    return [sys.executable, "-m", "jurymast.agent", run_directory, "--supervisor", f"{host}:{port}"]


def end_with_us() -> None:
    """In a new process: SIGTERM when the one that started it is gone."""
    die_with_parent(signal.SIGTERM)
