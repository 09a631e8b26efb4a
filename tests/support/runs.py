"""A run under test, seen through its journal: wait for what happens, find the processes to hurt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil

from jurymast.core.state import events as ev
from jurymast.core.state.run import RunState
from jurymast.jobs import await_ended
from jurymast.journal import JournalFollower, events, read
from jurymast.processes import is_tracker
from jurymast.report.which_run import find_run
from jurymast.rundir import RunDirectory
from support.waiting import LIMIT_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
POLL_S = 0.05
PROCESSES_POLL_S = 0.2  # a look at all processes of this machine takes 20 ms and more


class RunUnderTest:
    """Reads the journal of a run; every wait has a deadline and says what it last saw."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(directory)
        self._journal = JournalFollower(self.directory)  # tests ask many times a second
        self._events: tuple[int, list[ev.Event]] = (-1, [])  # as of so many bytes

    def events(self) -> list[ev.Event]:
        size_bytes = sum(path.stat().st_size for path in self.directory.journal_files())
        if self._events[0] != size_bytes:
            self._events = (size_bytes, list(events(read(self.directory))))
        return list(self._events[1])

    def state(self) -> RunState:
        """As the journal says it now; what comes later does not change it."""
        return deepcopy(self._journal.catch_up())

    def look(self) -> RunState:
        """As the journal says it now; it follows the journal, at the next look."""
        return self._journal.catch_up()

    def wait(self, what: str, condition: Callable[[RunState], bool], limit_s: float = LIMIT_S) -> RunState:
        end = time.monotonic() + limit_s
        while True:
            state = self._journal.catch_up()
            if condition(state):
                return deepcopy(state)
            if state.ended or time.monotonic() > end:
                raise AssertionError(f"waited for: {what}\n{self.story()}")
            time.sleep(POLL_S)

    def wait_step(self, step: int, limit_s: float = LIMIT_S) -> RunState:
        return self.wait(f"step {step}", lambda s: s.step >= step and s.incident is None, limit_s)

    def wait_saved(self, step: int, limit_s: float = LIMIT_S) -> RunState:
        return self.wait(f"a checkpoint of step {step}", lambda s: (s.saved_step or 0) >= step, limit_s)

    def wait_safe(self, step: int, limit_s: float = LIMIT_S) -> RunState:
        """A checkpoint that outlives any one node."""

        def safe(state: RunState) -> bool:
            return any(
                (tier.step or 0) >= step for name, tier in state.saved.items() if name in ("peer", "shared")
            )

        return self.wait(f"a safe checkpoint of step {step}", safe, limit_s)

    def newest_saved(self, *tiers: str, attempt: int = 1) -> int:
        """The newest step that one of the tiers had when the attempt after `attempt` was planned."""
        newest = 0
        for event in self.events():
            if isinstance(event, ev.RestorePlanned) and event.attempt > attempt:
                break
            if isinstance(event, ev.Saved) and event.ok and event.tier in tiers:
                newest = max(newest, event.step)
        return newest

    def wait_end(self, limit_s: float = LIMIT_S) -> RunState:
        return self.wait("the end of the run", lambda s: s.ended, limit_s)

    def pids(self, node: str) -> tuple[int, ...]:
        """Process ids of the node's ranks, as the node itself sees them."""
        started = [e for e in self.events() if isinstance(e, ev.WorkersStarted) and e.node == node]
        return started[-1].pids

    def agent_pid(self, node: str) -> int:
        joined = [e for e in self.events() if isinstance(e, ev.NodeJoined) and e.node == node]
        return joined[-1].pid

    def story(self) -> str:
        """The journal and the logs, for a failed test."""
        lines = [json.dumps(entry)[:400] for entry in read(self.directory)]
        for log in [*self.directory.submission.glob("*.log"), *self.directory.logs.glob("*/*.log")]:
            lines += [f"== {log}", log.read_text(errors="replace")[-2000:]]
        return "\n".join(lines)


def jurymast(
    *arguments: str, environment: dict[str, str] | None = None, within: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would; `within`: the command that starts it, like `unshare`."""
    return subprocess.run(
        [*within, sys.executable, "-m", "jurymast", *arguments], capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    )  # fmt: skip


def hosts(agent: int) -> list[psutil.Process]:
    """The torchrun hosts of an agent."""
    return [process for process in tree(agent) if process.name() == "jurymast-host"]


def command_of(process: psutil.Process) -> list[str]:
    """The words of its command; none if it has ended by now."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also of a zombie
        return []


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@contextmanager
def local_run(
    runs: Path, *options: str, script: str, arguments: tuple[str, ...] = (), within: tuple[str, ...] = ()
) -> Iterator[RunUnderTest]:
    """Submit to the local cluster; whatever is left of it afterwards is ended and counted as a failure."""
    done = jurymast("submit", "--cluster", "local", "--runs", str(runs), "--parsable", *options, "--",
                    str(SCRIPTS / script), *arguments, within=within)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunUnderTest(find_run(done.stdout.strip(), runs).root)
    seen: dict[int, psutil.Process] = {}
    pid = json.loads((run.directory.submission / "local.json").read_text())["pid"]
    try:
        with telling_where(pid):
            yield run
    finally:
        for process in tree(pid):
            seen[process.pid] = process
        end_all(list(seen.values()))


def end_all(processes: list[psutil.Process]) -> None:
    """Kill processes. Python's resource trackers among them remove what the others leave, and end."""
    for process in processes:
        if is_tracker(process.pid):
            continue
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    await_ended([process.pid for process in processes], 60)


def processes_of(directory: Path) -> list[psutil.Process]:
    """Every process on this machine whose environment or command line names the run directory."""
    named = os.fsencode(directory)
    found = []
    for number in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path("/proc", number, "cmdline").read_bytes().split(b"\0")
            variables = Path("/proc", number, "environ").read_bytes().split(b"\0")
            if int(number) != os.getpid() and (named in command or b"JURYMAST_RUN_DIR=" + named in variables):
                found.append(psutil.Process(int(number)))
        except (OSError, psutil.NoSuchProcess):
            continue  # gone meanwhile
    return found


def wait_gone(directory: Path, limit_s: float = LIMIT_S) -> None:
    """No process of an ended run is left, once it has brought its last checkpoint to storage."""
    wait_until("outcome", RunDirectory(directory).outcome_file.exists, LIMIT_S)
    end = time.monotonic() + limit_s
    while left := processes_of(directory):
        if time.monotonic() > end:
            told: list[Any] = [(p.pid, command_of(p)[:6]) for p in left]
            end_all(left)
            raise AssertionError(f"left over after the run: {told}")
        time.sleep(PROCESSES_POLL_S)


@contextmanager
def telling_where(pid: int) -> Iterator[None]:
    """When a test fails within this, print where all processes of `pid` stand: a wait that never ended has no
    other witness."""
    try:
        yield
    except BaseException:
        for process in tree(pid):
            print(stacks(process.pid))
        raise


def stacks(pid: int) -> str:
    """Where a process stands, in Python and below, as far as can be seen."""
    kernel = [_read(Path("/proc", str(pid), name)) for name in ("comm", "wchan")]
    command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{pid} {kernel}: {error}"
    return f"{pid} {kernel}: {done.stdout or done.stderr}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError as error:
        return str(error.strerror)


def result(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
