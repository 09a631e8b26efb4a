"""A launcher of trainings that a batch script calls: in a training step it becomes the node's agent. It runs
in the Python that trains."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from jurymast import foreign
from jurymast.cluster.sbatch import CommandLine, Given, usable_gpus
from jurymast.core.judges.slurm_variables import step_in
from jurymast.core.state.settings import TaskShares
from jurymast.errors import ClusterUnavailableError
from jurymast.interpreter import run_module
from jurymast.rundir import RunDirectory, renew
from jurymast.script import recognise, shims
from jurymast.script.notes import note, note_first, noted, say
from jurymast.script.recognise import python_command
from jurymast.script.step import ANSWER, ASKED, REACHED, Step
from jurymast.script.trainings import Training

POLL_S = 0.05
# The step's front end runs on the batch host; if it is silent for this long, the job has ended.
ANSWER_LIMIT_S = 600.0


def run(launcher: str, arguments: list[str]) -> int:
    """Run as the launcher's process; returns its exit code. Raises UsageError."""
    if not shims.in_the_script(os.environ):
        _really(launcher, arguments)
    if folder := os.environ.get(shims.STEP_VARIABLE):
        return _join(Path(folder), launcher, arguments)
    if step_in(os.environ) != "batch":
        if os.environ.get("SLURM_PROCID") == "0":  # one of many ranks prints it
            say(f"{launcher}: this step was not recognized as a training and runs without failure handling")
        _really(launcher, arguments)
    # Called by the script itself, on the batch host: run as if srun had started it.
    job = RunDirectory(os.environ[shims.RUN_VARIABLE])
    if _on_each_node(recognise.parse(arguments, os.environ, launch=launcher == "launch"), job):
        say(f"{launcher} uses one node of {job.own_plan().active} and runs there without failure handling")
        _really(launcher, arguments)
    command = run_module("jurymast.script", launcher, *arguments)
    # One INT ends a launcher.
    at_once = Given("quit-on-interrupt", None, ("--quit-on-interrupt",))
    return Step(job).run(CommandLine(options=[at_once], command=command), direct=True)


def _really(launcher: str, arguments: list[str]) -> NoReturn:
    module = "launch" if launcher == "launch" else "run"
    command = [sys.executable, "-m", f"torch.distributed.{module}", *arguments]
    os.execve(sys.executable, command, shims.without_shims(os.environ))


def _join(folder: Path, launcher: str, arguments: list[str]) -> int:
    """Request the training, wait for its run, and become its agent on this node."""
    (folder / REACHED).touch()
    launch = recognise.parse(arguments, os.environ, launch=launcher == "launch")
    if _on_each_node(launch, job := RunDirectory(os.environ[shims.RUN_VARIABLE])):
        node, active = int(os.environ["SLURM_NODEID"]), job.own_plan().active
        if node >= active:
            return 0
        if node == 0:
            say(f"{active} trainings of one node each ({launcher} --nnodes=1) run without failure handling")
        _really(launcher, arguments)
    training = Training(
        script=launch.script, arguments=launch.arguments, module=launch.module, program=launch.program,
        ranks=recognise.rank_count(launch.ranks, usable_gpus(os.environ), len(os.sched_getaffinity(0))),
        directory=os.getcwd(), python=sys.executable, ignored=launch.ignored,
    )  # fmt: skip
    return _train(folder, training)


def _on_each_node(launch: recognise.TorchrunLaunch, job: RunDirectory) -> bool:
    """Whether each node of the job has a training of its own."""
    return launch.nodes == "1" and job.own_plan().active > 1


def run_tasks(count: int, shares: str, command: list[str], *, guessed: bool) -> int:
    """Run `count` tasks of a command on this node, as srun would have started them. `shares`: `TaskShares` as
    JSON. `guessed`: see `RunPlan`."""
    python = python_command(command)
    program, *arguments = command
    training = Training(
        script=python.script if python else program,
        arguments=python.arguments if python else tuple(arguments),
        module=python is not None and python.module,
        program=python is None,
        tasks=True, guessed=guessed, shares=msgspec.json.decode(shares, type=TaskShares), ranks=count,
        directory=os.getcwd(), python=sys.executable,
    )  # fmt: skip
    return _train(Path(os.environ[shims.STEP_VARIABLE]), training)


def _train(folder: Path, training: Training) -> int:
    node = os.environ.get("SLURMD_NODENAME", "")
    number = next(n for n in count(1) if not (folder / f"joined-{n}-{node}").exists())
    (folder / f"joined-{number}-{node}").touch()
    if not (asked := folder / ASKED.format(number)).exists():  # all nodes request the same
        note_first(asked, asdict(training))
    answer = _await(folder / ANSWER.format(number))
    if "exit_code" in answer:
        return int(answer["exit_code"]) if training.tasks else min(int(answer["exit_code"]), 1)
    note(folder / f"guard-{node}", os.getpid())
    return _become_agent(training, answer["run"], answer["supervisor"], node)


def _await(path: Path) -> dict[str, Any]:
    end = time.monotonic() + ANSWER_LIMIT_S
    while time.monotonic() < end:
        answer: dict[str, Any] | None = noted(path)
        if answer is not None:
            return answer
        renew(path.parent)
        time.sleep(POLL_S)
    raise ClusterUnavailableError(f"the batch host did not answer within {ANSWER_LIMIT_S:g} s")


def _become_agent(training: Training, run_directory: str, supervisor: str, node: str) -> NoReturn:
    log = RunDirectory(run_directory).submission / f"job-{os.environ['SLURM_JOB_ID']}-{node}.log"
    descriptor = foreign.writing(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    agent = ["jurymast.agent", run_directory, "--supervisor", supervisor, "--node", node]
    agent += ["--end-as", "task" if training.tasks else "launcher"]
    python = training.python
    os.execve(python, run_module(*agent, python=python), shims.without_shims(os.environ))
