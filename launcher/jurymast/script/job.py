"""The batch process of a batch script: runs the script as sbatch would, on the active nodes as it sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from jurymast import foreign
from jurymast.cluster.allocation import from_slurm_environment, own_directory
from jurymast.cluster.control import STILL_RUNNING, why_ending
from jurymast.cluster.planning import spreads_gpus
from jurymast.cluster.signals import SLURMS_WARNING, WARNINGS
from jurymast.cluster.slurm import script_file, users_script, warns_itself
from jurymast.core.judges.slurm_variables import of_active_nodes
from jurymast.core.state.texts import compressed
from jurymast.reading import to_begin
from jurymast.rundir import RunDirectory, write_json
from jurymast.script import PASSED_ON, WARNING, hold, release, sharing, shims
from jurymast.script.notes import say
from jurymast.script.recognise import COMMENT, read_shell_script
from jurymast.script.step import PROCESS_NAME, REACHES, UNREACHED, true_variables_file

TRAPS_S = 1.0
# torch's own launchers, and what stands in a script without being run by it.
TORCHS = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b")
HERE_DOCUMENT = re.compile(r"<<-?[ \t]*\\?[\"']?(\w+).*?^\t*\1$", re.MULTILINE | re.DOTALL)


def run(run_directory: str, arguments: list[str]) -> int:
    """Run the script; returns its exit code. Raises ClusterUnavailableError, RunDirectoryError."""
    submitted = RunDirectory(Path(run_directory))
    to_begin(submitted.own_plan)
    directory = own_directory(submitted, [users_script(submitted).name])
    plan = directory.own_plan()
    allocation = from_slurm_environment()
    allocation.save(directory)
    around = submitted.submission / script_file(plan).name
    script = users_script(directory)
    shims.write(directory, sys.executable, str(around), _users_path(plan.script), str(script))
    hosts = compressed(allocation.nodes[: plan.active])
    environment = of_active_nodes(os.environ, plan.nodes, plan.active, hosts)
    true = {name: value for name, value in os.environ.items() if environment[name] != value}
    if spreads_gpus(plan) and (each := environment.pop(sharing.GPUS_PER_NODE, "")):
        true[sharing.GPUS_PER_NODE] = each  # the user has not asked for it, but our own steps need it
    write_json(true_variables_file(directory), true)
    code = run_script(
        script, arguments, shims.with_shims(environment, directory), warns=warns_itself(plan),
        goes_on=lambda: why_ending(allocation).why == STILL_RUNNING,
    )  # fmt: skip
    if code == 0:  # else it may not have come to its launcher
        warn_if_none_reached(directory, read_shell_script(str(script)))
    return code


def warn_if_none_reached(job: RunDirectory, text: str) -> None:
    """Say so if no launcher in a `job`'s script has found jurymast. Its steps have said it for themselves."""
    if (job.submission / "steps").exists() or shims.trainings(job).exists():
        return
    if TORCHS.search(HERE_DOCUMENT.sub("", COMMENT.sub("", text))):
        say(f"no launcher in this script {UNREACHED} ({REACHES})")


def _users_path(name: str) -> str:
    """The path of the script that was submitted by this name, as Slurm would show it."""
    path = os.path.join(os.environ.get("SLURM_SUBMIT_DIR", ""), name)
    return os.path.normpath(path) if os.path.isfile(path) else "(null)"


def interpreter(script: Path) -> list[str]:
    """The script's interpreter as the kernel reads it from the first line: a program and at most one
    argument."""
    first, _, _ = foreign.read_own(script, foreign.SCRIPT_BYTES_MAX).partition(b"\n")
    words = os.fsdecode(first).removeprefix("#!").split(None, 1)
    return [word.strip() for word in words] or ["/bin/sh"]


def _warn_trainings(script: int) -> None:
    """Warn the front ends of the script's training steps. Raises nothing: the script's commands come and go
    at any time, and an error in a handler of signals would end the job."""
    with suppress(psutil.Error):
        for process in psutil.Process(script).children(recursive=True):
            with suppress(psutil.Error):
                if process.name() == PROCESS_NAME:
                    process.send_signal(WARNING)


def run_script(
    script: Path, arguments: list[str], environment: dict[str, str], *, warns: bool,
    goes_on: Callable[[], bool],
) -> int:  # fmt: skip
    """Run the script as a child process; returns its exit code. If a signal ends the script, this process
    ends by the same signal. `warns`: USR2 is our own warning of the time limit, not for the script.
    `goes_on`: ask Slurm whether it does not end the job."""
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            return
        if number in WARNINGS:
            _warn_trainings(child.pid)
        if number != SLURMS_WARNING or not warns:
            child.send_signal(number)

    asks: threading.Thread | None = None

    def pass_term_on() -> None:
        """Slurm sends the SIGTERM that ends a job to the script as well, but any other one to this process
        alone: `--signal=B:TERM`, or `scancel --batch`."""
        if goes_on() and child is not None:
            _warn_trainings(child.pid)
            child.terminate()

    def terminated(_number: int, _frame: FrameType | None) -> None:
        nonlocal asks
        if asks is None or not asks.is_alive():
            asks = threading.Thread(target=pass_term_on, daemon=True)
            asks.start()

    hold()
    signal.signal(signal.SIGTERM, terminated)
    for number in PASSED_ON:
        signal.signal(number, pass_on)
    command = [*interpreter(script), str(script), *arguments]
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=release)
        if signal.sigpending():  # it arrived before the script could set its traps
            time.sleep(TRAPS_S)
    finally:
        release()
    code = child.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code
