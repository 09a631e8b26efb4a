"""The batch process: one per Slurm job, on its first node. It starts the agents and keeps a supervisor
running.

The job ends when this process ends, so it does as little as possible. If the supervisor crashes, it is
started again while the agents and the ranks continue; `core.supervision.batch` decides when.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Protocol

import msgspec

from jurymast import foreign, programs
from jurymast.cluster import refill
from jurymast.cluster.allocation import (
    TEARDOWN,
    Allocation,
    announced_hosts,
    from_slurm_environment,
    listen,
    loopback,
    own_directory,
)
from jurymast.cluster.control import (
    STILL_RUNNING,
    UNKNOWN,
    requeue,
    signals_tasks_alone,
    survive,
    unbound,
    why_ending,
)
from jurymast.cluster.signals import WARNINGS
from jurymast.core.state.events import STEP_ENDED
from jurymast.core.state.messages import Accepted
from jurymast.core.state.settings import RunPlan
from jurymast.core.supervision import batch as core
from jurymast.errors import JurymastError, RunDirectoryError, never
from jurymast.interpreter import run_module
from jurymast.processes import (
    TASKS_ALONE_VARIABLE,
    adopt_orphans,
    die_with_parent,
    end_strays,
    ends_within,
    log_as,
)
from jurymast.reading import to_begin
from jurymast.rundir import RunDirectory, renew
from jurymast.wire.channel import ask

log = logging.getLogger("jurymast.batch")


class Agents(Protocol):
    """The agents of one allocation or of one step."""

    def start(self, port: int) -> None:
        """Start the agents. The supervisor listens on this port of this node."""

    def alive(self) -> bool: ...

    def were_killed(self) -> bool:
        """Whether Slurm has ended the step in which all agents were: by `scancel JOB.STEP`, say, or for the
        time limit of its srun. That is no failure of their nodes."""
        return False

    def end(self) -> None:
        """End the agents: the run no longer needs this allocation."""

    def give_up(self) -> None:
        """End the agents, and the srun that started them, before the job is requeued. Those of nodes that
        live have left, and are about to end."""
        self.end()


class SrunAgents(Agents):
    """Agents that one srun starts on `nodes` nodes."""

    def __init__(self, run_directory: str, nodes: int) -> None:
        self._run_directory, self._nodes = run_directory, nodes
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, port: int) -> None:
        # What this process has, the ranks are to have as well: SBATCH_EXPORT=NONE, which means the job, would
        # take PATH and HOME from them.
        command = ["srun", *survive(), "--export=ALL", "--ntasks-per-node=1", f"--nodes={self._nodes}"]
        command += [f"--ntasks={self._nodes}", "--overlap", "--unbuffered", *unbound()]
        command += agent_command(self._run_directory, announced_hosts()[0], port)
        alone = {TASKS_ALONE_VARIABLE: "1"} if signals_tasks_alone() else {}
        self._process = subprocess.Popen(
            command, executable=programs.executable(command[0]), stdin=subprocess.DEVNULL,
            env={**os.environ, **alone},
        )  # fmt: skip

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def were_killed(self) -> bool:
        # The guard of an agent that was killed alone lives, and ends with a code of its own.
        return self._process is not None and says_killed(self._process)

    def end(self) -> None:
        """End srun. The agents end with the job; an srun that waits for a dead node must not delay that."""
        if self._process is not None:
            end_srun(self._process)

    def give_up(self) -> None:
        if self._process is not None:
            end_srun(self._process, LEFT_LIMIT_S)


class LocalAgents(Agents):
    """Agents on this machine. Each has a process group that stands for a node: a fault of the node is one of
    the group."""

    def __init__(self, run_directory: str, nodes: Sequence[str]) -> None:
        self._run_directory, self._nodes = run_directory, nodes
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, port: int) -> None:
        command = agent_command(self._run_directory, loopback(), port)
        adopt_orphans()
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_strays()


def end_srun(process: subprocess.Popen[bytes], limit_s: float = 0.0) -> None:
    """Kill srun, unless it ends within `limit_s` by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    if process.poll() is None:
        process.kill()
    process.wait()


def says_killed(srun: subprocess.Popen[bytes]) -> bool:
    """Whether srun has ended and says that signals have ended its tasks. One that was killed itself says
    nothing: its tasks go on."""
    return (srun.poll() or 0) > SIGNALLED


def agent_command(run_directory: str, host: str, port: int) -> list[str]:
    return run_module("jurymast.agent", run_directory, "--supervisor", f"{host}:{port}")


def end_with_us() -> None:
    """In a new process: arrange for SIGTERM when the process that started it ends."""
    die_with_parent(signal.SIGTERM)


# ---- the batch process

SUM_UP_LIMIT_S = 10.0
BY_STEP = "whoever ended its step in Slurm (as by scancel JOB.STEP, or the time limit of srun)"
# Agents that have left their supervisor have ended so much later, and srun has heard it. What Slurm must kill
# keeps the job from being pending for up to three seconds more.
LEFT_LIMIT_S = 0.5
SIGNALLED = 128  # the exit code of what a signal has ended, less its number
LOOK_S = 0.5
# How long a job whose storage is full, or fails, waits with its beginning, and between two tries.
STORAGE_LIMIT_S, STORAGE_RETRY_S = 3600.0, 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, *WARNINGS)


def ended_alone(agents: Agents, allocation: Allocation, over: threading.Event) -> bool:
    """Wait until Slurm has ended the step of all agents, but not the job. False once it ends the job as well,
    or `over` is set; as long as Slurm does not answer, neither is known."""
    while not over.wait(LOOK_S):
        if agents.were_killed() and (why := why_ending(allocation).why) != UNKNOWN:
            return why == STILL_RUNNING
    return False


class BatchProcess:
    """Runs one allocation, or one training step in it."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, allocation: Allocation, agents: Agents, log: int = 1
    ) -> None:
        """`log`: descriptor of the file to which the supervisor writes."""
        self._directory = directory
        self._plan = plan
        self._allocation = allocation
        self._agents = agents
        self._log = log
        self._listeners = listen(plan.cluster)
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._machine = core.Batch()
        self._outcome: core.Outcome | None = None
        self._over = threading.Event()

    def run(self) -> core.Outcome:
        """Run until the supervisor reports an outcome, and return it. Raises ClusterUnavailableError if Slurm
        refuses to requeue the job."""
        self._note_beginning()
        self._listen()
        try:
            self._do(self._machine.begin(time.monotonic()))
            threading.Thread(target=self._watch_step, daemon=True).start()
            while self._outcome is None:
                if self._machine.supervised and self._supervisor is not None:
                    code = self._supervisor.wait()
                    outcome = self._read_outcome()
                    self._do(self._machine.on_supervisor_ended(code, outcome, time.monotonic()))
                else:
                    time.sleep(LOOK_S)
                    outcome, agents = self._read_outcome(), self._agents.alive()
                    self._do(self._machine.on_time(outcome, time.monotonic(), agents=agents))
            return self._outcome
        finally:
            self._over.set()
            self._agents.end()
            for listener in self._listeners:
                listener.close()

    def _note_beginning(self) -> None:
        """Write whose nodes the run has. Like a supervisor that cannot write, this waits until storage has
        room again: the run would end otherwise, with all that it has saved."""
        end = time.monotonic() + STORAGE_LIMIT_S
        while True:
            try:
                self._directory.outcome_file.unlink(missing_ok=True)
                return self._allocation.save(self._directory)
            except OSError as error:
                if time.monotonic() > end:
                    raise
                log.warning("%s; trying again", error)
            time.sleep(STORAGE_RETRY_S)

    def _do(self, effects: list[core.Effect]) -> None:
        for effect in effects:
            match effect:
                case core.StartSupervisor():
                    self._start_supervisor()
                    self._do(self._machine.on_supervisor_started(time.monotonic()))
                case core.StartAgents():
                    self._agents.start(self._listeners[0].getsockname()[1])
                case core.Forward():
                    if self._supervisor is not None:
                        sent = signal.SIGUSR2 if effect.warning else signal.SIGTERM
                        self._supervisor.send_signal(sent)
                case core.RequeueJob():
                    self._agents.give_up()
                    if self._plan.cluster == "slurm":
                        outcome = effect.outcome
                        requeue(self._plan, self._allocation, outcome.lost, outcome.exclude, tell_of_requeue)
                    refill.end_all(self._plan)
                case core.Say():
                    log.info("%s", effect.text)
                case core.EndJob():
                    refill.end_all(self._plan)
                    self._outcome = effect.outcome
                case _:
                    never(effect)

    def _listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._forward)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._signalled(warning=number in WARNINGS)

    def _signalled(self, *, warning: bool) -> None:
        supervised = self._supervisor is not None and self._supervisor.poll() is None
        self._do(self._machine.on_signal(time.monotonic(), warning=warning, supervised=supervised))

    def _watch_step(self) -> None:
        """If Slurm ends the step of all agents, but not the job, tell the supervisor, who would take all
        nodes for lost. It says no while an agent is left, or if the run has ended or is to be requeued."""
        while ended_alone(self._agents, self._allocation, self._over):
            with contextlib.suppress(JurymastError):
                if isinstance(ask(self._directory, STEP_ENDED, by=BY_STEP), Accepted):
                    return

    def _start_supervisor(self) -> None:
        """Start the supervisor, which inherits the listening sockets: agents know the port before it runs,
        and find it again after a crash. It also inherits the blocked signals: one that arrives early waits
        until it can be handled."""
        self._renew_allocation()
        arguments = run_module("jurymast.supervisor", str(self._directory.root))
        files = [listener.fileno() for listener in self._listeners]
        for file in files:
            arguments += ["--listen-fd", str(file)]
        # Slurm ends the processes that are left of a job; those of a local run end with this process.
        tie = end_with_us if self._plan.cluster == "local" else None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._supervisor = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                pass_fds=files, preexec_fn=tie,
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _renew_allocation(self) -> None:
        """Write the allocation anew if its file is damaged, or no supervisor could start."""
        try:
            Allocation.load(self._directory)
        except RunDirectoryError as error:
            log.warning("%s: written anew", error)
            with contextlib.suppress(OSError):  # the supervisor tries the journal
                self._allocation.save(self._directory)

    def _read_outcome(self) -> core.Outcome | None:
        """Return what a supervisor has written. One on another node waits seconds for this process to act on
        it, and this node's view of the shared directory may be older."""
        try:
            renew(self._directory.root)
            return msgspec.convert(
                foreign.load(self._directory.outcome_file, foreign.PLAN_BYTES_MAX), core.Outcome
            )
        except (OSError, ValueError):
            return None


def tell_of_requeue(trouble: str) -> None:
    """Log what went wrong while the job was requeued."""
    log.warning("requeue: %s", trouble)


def sum_up(run_directory: str, job: str) -> None:
    """Write the run's summary to the end of the job's log. It takes a second, and nothing fails by it."""
    command = run_module("jurymast.report.last_words", run_directory, job)
    with contextlib.suppress(OSError):
        ends_within(subprocess.Popen(command, stdin=subprocess.DEVNULL), SUM_UP_LIMIT_S)


def tear_down(directory: RunDirectory) -> None:
    """Run the shell lines that the submission wants run after everything else, if it has some."""
    try:
        script = foreign.open_own(directory.submission / TEARDOWN)
    except FileNotFoundError:
        return
    except OSError as error:  # the run's outcome stands
        log.warning("the lines for the end are not run: %s", error)
        return
    try:
        shown = f"{foreign.HELD}{script}"  # the very file that was looked at
        with contextlib.suppress(OSError):
            programs.run(["bash", shown], stdin=subprocess.DEVNULL, pass_fds=(script,))
    finally:
        os.close(script)


def local_allocation(plan: RunPlan, restarts: int, excluded: set[str]) -> Allocation:
    """The allocation of a local run, with names for its nodes that were never excluded."""
    names = (name for number in count(1) if (name := f"local-{number}") not in excluded)
    nodes = tuple(islice(names, plan.nodes))
    return Allocation(f"local-{os.getpid()}", restarts, nodes, nodes[0], time.time(), began_at=time.time())


def main(run_directory: str) -> int:
    """Run the job; returns its exit code: the application's own, or one of `jurymast.errors`."""
    directory = RunDirectory(Path(run_directory))
    plan = to_begin(directory.own_plan)
    if plan.cluster == "slurm":
        files = [TEARDOWN] if foreign.exists(directory.submission / TEARDOWN) else []
        directory = own_directory(directory, files)
        run_directory, plan = str(directory.root), directory.own_plan()
        allocation = from_slurm_environment()
        agents = SrunAgents(run_directory, len(allocation.nodes))
        outcome = BatchProcess(directory, plan, allocation, agents).run()
        if not outcome.requeued:
            tear_down(directory)
            sum_up(run_directory, allocation.job)
        return outcome.exit_code
    excluded = set[str]()
    for restarts in count():
        allocation = local_allocation(plan, restarts, excluded)
        outcome = BatchProcess(
            directory, plan, allocation, LocalAgents(run_directory, allocation.nodes)
        ).run()
        if not outcome.requeued:
            break
        excluded |= set(outcome.exclude)
    tear_down(directory)
    return outcome.exit_code


if __name__ == "__main__":
    log_as("batch process")
    try:
        sys.exit(main(sys.argv[1]))
    except JurymastError as failure:
        log.error("%s", failure)
        sys.exit(failure.exit_code)
