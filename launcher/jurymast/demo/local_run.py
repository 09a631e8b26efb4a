"""Starting the demo's run, breaking one of its nodes, and ending all of its processes; each by its id."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from jurymast.cluster.local import local_process
from jurymast.cluster.planning import Asked, make_plan
from jurymast.cluster.request import Request, build_request, submit
from jurymast.cluster.sbatch_options import CommandLine
from jurymast.policy.load import pairs_layer
from jurymast.policy.resolve import resolve
from jurymast.rundir import RunDirectory

SCRIPT = Path(__file__).with_name("train_gpt.py")
# A batch process that is asked to end sends its agents home first.
GRACE_S = 10.0
KILL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """What the command line asked for."""

    nodes: int
    spares: int
    steps: int

    @property
    def save_every(self) -> int:
        """Steps between checkpoints: fifteen of them in a run, at most 20 steps apart."""
        return max(1, min(20, self.steps // 15))

    @property
    def arguments(self) -> list[str]:
        every = f"{self.save_every} step{'s' if self.save_every > 1 else ''}"
        return ["--steps", str(self.steps), "--save-every", every, "--print-every", "1"]


def request_for(asked: Wanted, runs: Path, working_directory: Path) -> Request:
    """The request that `jurymast submit --cluster local` would make; no site policy plays a part."""
    policy = resolve([pairs_layer("the demo", [("spares", asked.spares)])])
    plan = make_plan(
        Asked(nodes=asked.nodes, nproc_per_node=1, name="demo", cluster="local", runs=runs),
        CommandLine(own=[], sbatch=[], script=[str(SCRIPT), *asked.arguments]),
        policy,
        environment={},
        working_directory=working_directory,
        python=sys.executable,
    )
    return build_request(plan, policy)


def start(request: Request) -> None:
    """Start the run. Raises RunDirectoryError, SubmissionError."""
    # All nodes share this machine's processors: a rank with a thread for each would only be in the way.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    submit(request)


def break_node(directory: RunDirectory, agent_pid: int) -> int:
    """SIGKILL a node's processes, all at once; how many there were. ProcessLookupError: it is gone.

    `agent_pid` leads the node's process group; one that is not an agent of this run is left alone.
    """
    try:
        words = psutil.Process(agent_pid).cmdline()
    except psutil.Error as error:
        raise ProcessLookupError(f"agent {agent_pid} is gone") from error
    if str(directory.root) not in words or os.getpgid(agent_pid) != agent_pid:
        raise ProcessLookupError(f"process {agent_pid} is no agent of this run")
    members = sum(1 for pid in psutil.pids() if _group_of(pid) == agent_pid)
    os.killpg(agent_pid, signal.SIGKILL)
    return members


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def end_all(directory: RunDirectory) -> None:
    """End the batch process, which ends the rest, then whatever of the run is still there."""
    batch = local_process(directory)
    if batch is not None:
        try:
            batch.terminate()
        except psutil.NoSuchProcess:
            pass
        psutil.wait_procs([batch], timeout=GRACE_S)
    for _ in range(3):  # a process may have started another while it was being ended
        left = processes_of(directory)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=KILL_LIMIT_S)


def processes_of(directory: RunDirectory) -> list[psutil.Process]:
    """This user's processes that work on the run, by its directory in their command or environment."""
    place, found = str(directory.root), []
    for process in psutil.process_iter():
        try:
            ours = place in process.cmdline() or process.environ().get("JURYMAST_RUN_DIR") == place
        except psutil.Error:
            continue
        if ours and process.pid != os.getpid():
            found.append(process)
    return found
