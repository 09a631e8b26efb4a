"""Starts the demo's run, kills one of its nodes, and ends all of its processes, each by its id."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from jurymast.cluster.local import local_process
from jurymast.cluster.planning import OwnOptions, make_plan
from jurymast.cluster.request import Request, build_request, submit
from jurymast.cluster.sbatch_options import CommandLine
from jurymast.policy.load import pairs_layer
from jurymast.policy.resolve import resolve

SCRIPT = Path(__file__).with_name("train_gpt.py")
MODULES = ("jurymast.cluster.batch", "jurymast.supervisor", "jurymast.agent")
# A batch process that is asked to end sends its agents home first.
GRACE_S = 10.0
KILL_LIMIT_S = 5.0
# A socket's address has room for 108 characters, and names below the directory need 50 of them.
TEMPORARY_CHARACTERS = 55


@dataclass(frozen=True)
class Wanted:
    """What the command line requested."""

    nodes: int
    spares: int
    steps: int

    @property
    def save_every(self) -> int:
        """The number of steps between checkpoints: 15 checkpoints in a run, at most 20 steps apart."""
        return max(1, min(20, self.steps // 15))

    @property
    def arguments(self) -> list[str]:
        every = f"{self.save_every} step{'s' if self.save_every > 1 else ''}"
        return ["--steps", str(self.steps), "--save-every", every, "--print-every", "1"]


def request_for(asked: Wanted, runs: Path, working_directory: Path) -> Request:
    """Return the request that `jurymast submit --cluster local` would make, without a site policy."""
    policy = resolve([pairs_layer("the demo", [("spares", asked.spares)])])
    plan = make_plan(
        OwnOptions(nodes=asked.nodes, nproc_per_node=1, name="demo", cluster="local", runs=runs),
        CommandLine(command=[str(SCRIPT), *asked.arguments]),
        policy,
        environment={},
        working_directory=working_directory,
        python=sys.executable,
    )
    return build_request(plan, policy)


class LocalRun:
    """The processes of one run on this machine. Their temporary files are in `temporary`, where a killed node
    leaves its own."""

    def __init__(self, request: Request, temporary: Path) -> None:
        self._request = request
        self._temporary = temporary
        self.directory = request.run_directory

    def start(self) -> None:
        """Submit the run. Raises RunDirectoryError or SubmissionError."""
        # All nodes share this machine's processors, so ranks with a thread per processor would only slow each
        # other.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if len(str(self._temporary)) <= TEMPORARY_CHARACTERS:
            os.environ["TMPDIR"] = str(self._temporary)
        submit(self._request)

    def break_node(self, agent_pid: int) -> int:
        """Kill all processes of a node at once, and return their number.

        `agent_pid` leads the node's process group. Raises ProcessLookupError if it is gone or is not an agent
        of this run.
        """
        try:
            agent = psutil.Process(agent_pid)
            words, members = agent.cmdline(), agent.children(recursive=True)
        except psutil.Error as error:
            raise ProcessLookupError(f"agent {agent_pid} is gone") from error
        if not self._is_ours(words) or os.getpgid(agent_pid) != agent_pid:
            raise ProcessLookupError(f"process {agent_pid} is no agent of this run")
        os.killpg(agent_pid, signal.SIGKILL)  # ranks lead sessions of their own, and go with their host
        return 1 + len(members)

    def await_end(self) -> None:
        """Return when the batch process has ended by itself, or after `GRACE_S` seconds."""
        batch = local_process(self.directory)
        if batch is not None:
            psutil.wait_procs([batch], timeout=GRACE_S)

    def end(self) -> None:
        """End the batch process, which ends the other processes; then kill those of the run that are left."""
        batch = local_process(self.directory)
        if batch is not None:
            with suppress(psutil.NoSuchProcess):
                batch.terminate()
            psutil.wait_procs([batch], timeout=GRACE_S)
        for _ in range(3):  # a process may have started another while it was being ended
            left = self._processes()
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=KILL_LIMIT_S)

    def _is_ours(self, words: list[str]) -> bool:
        return words[1:2] == ["-m"] and words[2] in MODULES and str(self.directory.root) in words[3:]

    def _processes(self) -> list[psutil.Process]:
        """The processes that name the run's directory in their command or environment, except those that only
        watch the run."""
        place, found = str(self.directory.root), []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_an_agent = process.environ().get("JURYMAST_RUN_DIR") == place
                if of_an_agent or self._is_ours(process.cmdline()):
                    found.append(process)
        return found
