"""Finds where the ranks of a node hang: their stacks, and what the kernel and NCCL know about them.

This happens between the supervisor's order to stop and the stop itself, on all nodes at the same time, within
`LIMIT_S`; it usually takes 10 to 100 ms. Recovery does not wait for late answers. Meanwhile a thread writes
the files to `evidence/attempt-NNNN` of the run directory, because storage may hang.

There are three sources: the rank itself (`worker.stack_signal`); py-spy, if installed, for ranks that do not
answer; and /proc. torch's flight recorder keeps each rank's newest collectives, and writes them when they
time out or when its pipe is written to. Its records show which ranks entered which collective; they are
pickles, of which only plain values are accepted.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import psutil

from jurymast import foreign, programs
from jurymast.core.judges import stacks
from jurymast.core.judges.silence import works
from jurymast.core.judges.stacks import entered
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import Entered, RankPlace
from jurymast.core.state.settings import RunPlan
from jurymast.processes import process_state
from jurymast.rundir import RunDirectory, make_folder, ranks_folder, write_atomically
from jurymast.worker import stack_signal

# ---- torch's flight records

RECORD_BYTES_MAX = 64 << 20


class _PlainValues(pickle.Unpickler):
    """Unpickles dictionaries, lists, texts and numbers. A pickle that names anything to import is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("not a plain value")


def read(path: Path, rank: int) -> list[Entered]:
    """Return how far the rank is in each of its groups; [] for a record that is unfinished or has another
    format."""
    try:
        record = _PlainValues(BytesIO(foreign.read(path, RECORD_BYTES_MAX))).load()
        return entered(rank, record) if isinstance(record, Mapping) else []
    except (OSError, pickle.UnpicklingError, EOFError, MemoryError, RecursionError, OverflowError):
        return []
    except (LookupError, TypeError, ValueError, AttributeError):
        return []


# ---- stacks

LIMIT_S = 2.0
POLL_S = 0.02
WORKER_LIMIT_S = 0.3
LOADER_WORKER = "pt_data_worker"
SPAWNED = "--multiprocessing-fork"
FORK_SERVER = "multiprocessing.forkserver"
# A file that has not grown for this many looks is complete, because faulthandler writes no end mark.
STILL_LOOKS = 2
STACK_BYTES_MAX = 256 * 1024
PROC_FILES = ("status", "wchan", "syscall", "stack")
FLIGHT_EVENTS = "2000"
PY_SPY = "py-spy"
# The variable's names in newer and older releases of torch.
BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
RECORD_VARIABLES = (stack_signal.FLIGHT_VARIABLE, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
TIMEOUT_VARIABLES = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
PIPE_VARIABLES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
# Newer releases warn about this variable in every rank's log, and older ones have such a buffer by default.
NEVER_SET = "TORCH_NCCL_TRACE_BUFFER_SIZE"


@dataclass
class _SeenRank:
    rank: int
    pid: int
    dump: Path
    size: int = 0
    still: int = 0
    text: str = ""
    proc: dict[str, str] = field(default_factory=dict)
    workers: list[stacks.LoaderWorker] = field(default_factory=list)

    def answered(self) -> bool:
        """Return whether the rank's file has the main thread's stack, and no longer grows."""
        size = _size(self.dump)
        self.still = self.still + 1 if size and size == self.size else 0
        self.size = size
        if self.still < STILL_LOOKS:
            return False
        self.take_answer()
        return stack_signal.OWN_THREAD in self.text

    def take_answer(self) -> None:
        """Read the rank's answer, as far as it is written."""
        with suppress(OSError):
            self.text = foreign.read(self.dump, RECORD_BYTES_MAX).decode(errors="replace")[:STACK_BYTES_MAX]

    def process(self) -> str:
        """Describe the process from /proc in a few words: "state D, in nfs_wait_on_request"."""
        state = process_state(self.pid)[0]
        where = self.proc.get("wchan", "").strip()
        waits = where and where != "0" and not where.startswith("(")
        return (f"state {state}" if state else "ended") + (f", in {where}" if waits else "")

    def place(self) -> stacks.Place:
        at = stacks.place(stacks.frames(self.text), self.process())
        return stacks.behind(at, self.workers)

    def stand(self, busy: int) -> RankPlace:
        return stacks.stand(stacks.frames(self.text), self.place(), busy)


class StackTaker:
    """Collects stacks. `say` sends a message to the supervisor; `temporary` is the agent's own directory,
    which also has the files and pipes that the ranks make."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        temporary: Path,
        say: Callable[[msg.Looked | msg.Stacks], None],
    ) -> None:
        self._directory = directory
        self._count = plan.ranks_per_node
        self._temporary = temporary
        self._say = say
        self._attempt = 0
        self._first = 0
        self._activity: dict[int, Activity] = {}

    def launch(self, order: msg.Launch) -> dict[str, str]:
        """Prepare for a new attempt. Return the variables that its ranks need, except those that the user has
        set under any of the names that torch's releases use."""
        self._attempt, self._first = order.attempt, order.rank * self._count
        values = (
            (BUFFER_VARIABLES, FLIGHT_EVENTS),
            (TIMEOUT_VARIABLES, "1"),
            (RECORD_VARIABLES, str(self._flight_record(""))),
            (PIPE_VARIABLES, self._flight_pipe),
        )
        return {
            name: value for names, value in values if not _users(names) for name in names if name != NEVER_SET
        }

    @property
    def _flight_pipe(self) -> str:
        """The path to which torch appends RANK.pipe; not on shared storage, which may not support pipes."""
        return str(self._temporary / f"flight-{self._attempt}-")

    def _flight_record(self, rank: object) -> Path:
        return ranks_folder(self._directory.evidence(self._attempt), self._first) / f"flight-{rank}"

    def _ranks(self, pids: list[int]) -> list[_SeenRank]:
        names = (stack_signal.file_name(self._attempt, i) for i in range(len(pids)))
        return [
            _SeenRank(self._first + i, pid, self._temporary / name)
            for i, (pid, name) in enumerate(zip(pids, names, strict=True))
        ]

    async def look(self, number: int, pids: list[int]) -> None:
        """Report where these ranks are, so that the supervisor sees whether they move. No file is written."""
        ranks, attempt = self._ranks(pids), self._attempt
        await asyncio.to_thread(_ask, ranks, time.monotonic() + LIMIT_S)
        before = self._activity
        self._activity = await asyncio.to_thread(lambda: {pid: _used(pid, before.get(pid)) for pid in pids})
        stands = {rank.rank: rank.stand(self._activity[rank.pid].busy) for rank in ranks}
        self._say(msg.Looked(attempt=attempt, number=number, stands=stands))

    async def take(self, pids: list[int]) -> None:
        """Report where these ranks are, within `LIMIT_S`, and save the evidence."""
        ranks = self._ranks(pids)
        folder, end = self._directory.evidence(self._attempt), time.monotonic() + LIMIT_S
        asked, records = self._ask_flight_recorders(ranks), list[int]()
        flights: list[Entered] = []
        looked, recorded = threading.Event(), threading.Event()

        def look() -> None:
            _look(ranks, end)
            looked.set()
            _save(
                ranks, ranks_folder(folder, self._first)
            )  # also creates the directory that flight recorders write to
            sizes = dict.fromkeys(asked, 0)
            while len(records) < len(asked) and time.monotonic() < end:
                time.sleep(POLL_S)
                for rank, size in sizes.items():
                    path = self._flight_record(rank)
                    sizes[rank] = _size(path)
                    if size and size == sizes[rank] and rank not in records:  # no longer growing
                        records.append(rank)
                        flights.extend(read(path, rank))
            recorded.set()

        threading.Thread(target=look, name="stacks", daemon=True).start()
        known = recorded if asked else looked  # of storage, only records are awaited
        while not known.is_set() and time.monotonic() < end:
            await asyncio.sleep(POLL_S)
        places = [rank.place() for rank in ranks]
        self._say(
            msg.Stacks(
                attempt=self._attempt, ranks=tuple(rank.rank for rank in ranks),
                kinds=tuple(place.kind for place in places), places=tuple(place.text for place in places),
                folder=str(folder.relative_to(self._directory.root)),
                recorded=bool(asked), records=tuple(sorted(records)), flights=tuple(flights),
            )
        )  # fmt: skip

    def _ask_flight_recorders(self, ranks: list[_SeenRank]) -> list[int]:
        """Ask flight recorders to write their records; return the ranks asked. Ranks without NCCL have no
        pipe. If the user has chosen where records go, none is asked."""
        asked: list[int] = []
        if _users(RECORD_VARIABLES):
            return asked
        for rank in ranks:
            try:
                pipe = os.open(
                    f"{self._flight_pipe}{rank.rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
                )
            except OSError:
                continue
            with open(pipe, "wb", buffering=0) as file:
                file.write(b"1\n")
            asked.append(rank.rank)
        return asked


def _users(names: tuple[str, ...]) -> bool:
    return any(name in os.environ for name in names)


def _look(ranks: list[_SeenRank], end: float) -> None:
    _ask(ranks, end)
    for rank in ranks:
        if not rank.text:
            rank.text = _from_outside(rank.pid, end - time.monotonic())


def _ask(ranks: list[_SeenRank], end: float) -> None:
    """Ask all ranks at once, read /proc meanwhile, and wait for those that can answer."""
    waiting = []
    for rank in ranks:
        if _can_answer(rank) and stack_signal.listens(rank.pid):
            with suppress(OSError):  # an earlier answer must not count
                os.truncate(rank.dump, 0)
            stack_signal.ask(rank.pid)
            waiting.append(rank)
    for rank in ranks:
        rank.proc = {name: _text_of(f"/proc/{rank.pid}/{name}") for name in PROC_FILES}
        # Provisional, from outside, so that one that is stopped or gone is reported even if time runs out.
        workers = enumerate(loader_workers(rank.pid))
        rank.workers = [stacks.LoaderWorker(number, process_state(pid)[0], ()) for number, pid in workers]
    while waiting and time.monotonic() < end:
        time.sleep(POLL_S)
        waiting = [rank for rank in waiting if _can_answer(rank) and not rank.answered()]
    for rank in waiting:  # if this process got little processor time, the answer may be there already
        rank.take_answer()
    for rank in ranks:
        if rank.place().kind in stacks.MAY_BLOCK:
            _ask_workers(rank, end)


def _ask_workers(rank: _SeenRank, end: float) -> None:
    """Ask the rank's loader workers one after another, because those forked from the rank answer into the
    rank's file."""
    own, found = rank.text, list[stacks.LoaderWorker]()
    for pid in loader_workers(rank.pid):
        worker = _SeenRank(rank.rank, pid, rank.dump)
        if _can_answer(worker) and stack_signal.listens(pid):
            _ask_one(worker, min(end, time.monotonic() + WORKER_LIMIT_S))
        text = worker.text or _from_outside(pid, end - time.monotonic())
        stack, state, number = tuple(stacks.frames(text)), process_state(pid)[0], len(found)
        if stack and not stacks.loads_data(stack):
            continue
        found.append(stacks.LoaderWorker(number, state, stack))
        own += f"\nloader worker {number}, process {pid} (state {state or 'gone'}):\n{text}"
    rank.text, rank.workers = own, found


def _ask_one(process: _SeenRank, end: float) -> None:
    with suppress(OSError):
        os.truncate(process.dump, 0)
        stack_signal.ask(process.pid)
    while time.monotonic() < end and not process.answered():
        time.sleep(POLL_S)


def loader_workers(pid: int) -> list[int]:
    """Return a rank's loader workers in the order in which they started. torch names them; if none has that
    name (torchdata's have not), every process that multiprocessing has started counts."""
    named, started = list[tuple[float, int]](), list[tuple[float, int]]()
    with suppress(psutil.Error):
        command = psutil.Process(pid).cmdline()
        for child in _family(pid):
            with suppress(psutil.Error):
                age = (child.create_time(), child.pid)
                if child.name() == LOADER_WORKER:
                    named.append(age)
                elif _is_started(child, pid, command):
                    started.append(age)
    return [worker for _, worker in sorted(named or started)]


def _is_started(child: psutil.Process, rank: int, command: list[str]) -> bool:
    """Whether multiprocessing has started this process of a rank: by fork, spawn, or its fork server, which
    is none of those that it starts, and their parent. It is the usual way from Python 3.14 on."""
    own = child.cmdline()
    if any(FORK_SERVER in word for word in own):
        return child.ppid() != rank
    return own == command or SPAWNED in own


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


@dataclass(frozen=True)
class Activity:
    """What a rank and its descendants had used by then: seconds of processors, and bytes read and written.
    `busy`: how many looks have found them at work since the look before."""

    at: float
    cpu_s: float
    size: int
    busy: int = 0


def _used(pid: int, before: Activity | None) -> Activity:
    now, cpu_s, size = time.monotonic(), process_state(pid)[1], _bytes(pid)
    for child in _family(pid):
        cpu_s += process_state(child.pid)[1]
        size += _bytes(child.pid)
    if before is None:
        return Activity(now, cpu_s, size)
    busy = before.busy + works(now - before.at, cpu_s - before.cpu_s, size - before.size)
    return Activity(now, cpu_s, size, busy)


def _bytes(pid: int) -> int:
    """Return rchar + wchar of /proc/PID/io, see proc(5); 0 if it cannot be read."""
    fields = dict(line.split(": ") for line in _text_of(f"/proc/{pid}/io").splitlines() if ": " in line)
    return int(fields.get("rchar", 0)) + int(fields.get("wchar", 0))


def _can_answer(rank: _SeenRank) -> bool:
    """Return whether the process is neither gone nor stopped."""
    return process_state(rank.pid)[0] not in ("", "T", "Z")


def _from_outside(pid: int, limit_s: float) -> str:
    """Return the stacks that py-spy reads from the process's memory, even if it is stopped; "" without py-spy
    or the permission."""
    program = programs.located(PY_SPY)
    if program is None or limit_s <= 0.0:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = programs.run(command, capture_output=True, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout[:STACK_BYTES_MAX]


def _save(ranks: list[_SeenRank], folder: Path) -> None:
    """Write one file for all ranks of the node; best effort: the incident has the essentials."""
    if not ranks:
        return
    parts = []
    for rank in ranks:
        parts += [f"rank {rank.rank}, process {rank.pid}: {rank.place().text}\n", rank.text]
        parts += [f"/proc/{rank.pid}/{name}:\n{text.strip()}\n" for name, text in rank.proc.items()]
    name = f"stacks-{ranks[0].rank:05d}-{ranks[-1].rank:05d}.txt"
    with suppress(OSError):
        make_folder(folder)
        text = "\n".join(part for part in parts if part)
        write_atomically(folder / name, text.encode(), durable=False)


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        return f"({error.strerror})"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
