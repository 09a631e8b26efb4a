"""Where a step's output goes: what srun's options and variables say of it, and the relay of the ranks' logs.

Measured with srun 22.05: a name with a backslash is taken literally, without its backslashes; a number that a
task has selects that task; names that begin with `all` or `-` mean the standard output; widths are at most
10, and names have none.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.sbatch import CommandLine
from jurymast.errors import RunDirectoryError, UsageError
from jurymast.journal import FileTail
from jurymast.rundir import RunDirectory
from jurymast.script.notes import say

# ---- names of files

TASK_FIELDS, STEP_FIELDS = "tnN", "sJ"
FIELD = re.compile(r"%(\d*)([a-zA-Z%])")
WIDTH_MAX = 10
NO_ARRAY = "4294967294"  # Slurm's %a outside an array


def expanded(pattern: str, environment: Mapping[str, str], task: int, node: int = 0, host: str = "") -> str:
    """srun's file name with its % fields filled in, for a task of the step and its node (both by number),
    which is called `host`. Unknown fields stay."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    job = environment.get("SLURM_JOB_ID", "")
    step = environment.get("SLURM_STEP_ID", "")
    values = {
        "t": str(task), "n": str(node), "N": host, "j": job,
        "A": environment.get("SLURM_ARRAY_JOB_ID") or job,
        "a": environment.get("SLURM_ARRAY_TASK_ID") or NO_ARRAY, "s": step,
        "x": environment.get("SLURM_JOB_NAME", ""), "u": environment.get("USER", ""),
    }  # fmt: skip

    def fill(match: re.Match[str]) -> str:
        width, name = min(int(match[1] or 0), WIDTH_MAX), match[2]
        if name == "%":
            return match[1] + "%"
        if name == "J":
            return f"{job.zfill(width)}.{step}"
        if name not in values:
            return match[1] + name if match[1] else match[0]
        return values[name] if name in "xuN" else values[name].zfill(width)

    return FIELD.sub(fill, pattern)


def _has_field(pattern: str, fields: str) -> bool:
    return "\\" not in pattern and any(match[2] in fields for match in FIELD.finditer(pattern))


def is_each_tasks(pattern: str) -> bool:
    """Whether each task has a file of its own."""
    return _has_field(pattern, TASK_FIELDS)


class CannotOpen(UsageError):
    """A file of srun's options cannot be written: srun ends with this code as well."""

    exit_code = 1


# ---- the output

# What srun reads besides its options.
VARIABLES = {"output": "SLURM_STDOUTMODE", "error": "SLURM_STDERRMODE"}
SWITCHES = {"label": "SLURM_LABELIO", "unbuffered": "SLURM_UNBUFFEREDIO"}
NUMBER_FILE = "step-id"  # in a step's folder: Slurm's number of the step


class Output:
    """The output of one step: of `tasks` on each of its `nodes`, as the script sees those. `folder`: the
    step's. Raises CannotOpen."""

    def __init__(
        self,
        srun: CommandLine,
        environment: Mapping[str, str],
        nodes: Sequence[str] = ("",),
        tasks: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.tasks, self._nodes, self._folder = tasks, nodes, folder
        self._environment = environment
        on = {name: srun.has(name) or environment.get(SWITCHES[name], "0") != "0" for name in SWITCHES}
        self._label, self.unbuffered = on["label"], on["unbuffered"]
        mode = srun.last("open-mode") or environment.get("SLURM_OPEN_MODE", "")
        self._new = 0 if mode.startswith("a") else os.O_TRUNC
        self._common: int | None = None
        self._begun: set[str] = set()  # files that were opened before
        self._unfinished: set[int] = set()  # ranks whose last line has no end yet
        count = tasks * len(nodes)
        self._width = len(str(count - 1)) if self._label else 0
        self._only: int | None = None  # the one task whose output is wanted
        self._pattern = self._chosen(srun, "output", count)
        self._check_folder("error", self._chosen(srun, "error", count))
        self._check_folder("output", self._pattern)

    def _chosen(self, srun: CommandLine, option: str, count: int) -> str:
        """The pattern of a file's name; "" for the standard output."""
        said = srun.last(option) or self._environment.get(VARIABLES[option], "")
        if said.startswith("-") or said[:3].lower() == "all":
            return ""
        if said.lower() == "none":
            return os.devnull
        if said.isdigit() and int(said) < count:
            if option == "output":
                self._only = int(said)
            return ""
        return said

    @property
    def common(self) -> int:
        """A descriptor for what the step's command itself prints."""
        if not self._pattern or _has_field(self._pattern, TASK_FIELDS + STEP_FIELDS):
            return 1
        if self._common is None:
            self._common = self._open(self._name(0))
        return self._common

    def write(self, rank: int, data: bytes, task: int | None = None) -> None:
        """Write what a rank has printed, which belongs to this task of the step (or to that of its number).
        Raises OSError if the reader is gone or the disk is full."""
        task = rank if task is None else task
        if self._only is not None and task != self._only:
            return
        if self._label:
            data = self._labelled(rank, data, task)
        if not is_each_tasks(self._pattern):
            if self._pattern and self._common is None:
                self._common = self._open(self._name(0))
            _write(1 if self._common is None else self._common, data)
            return
        descriptor = self._open(self._name(task))  # not kept open: there may be thousands
        try:
            _write(descriptor, data)
        finally:
            os.close(descriptor)

    def _labelled(self, rank: int, data: bytes, task: int) -> bytes:
        """The data with the task before each line that begins in it."""
        within = rank in self._unfinished
        (self._unfinished.discard if data.endswith(b"\n") else self._unfinished.add)(rank)
        lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
        prefix = b"%*d: " % (self._width, task)
        return b"".join(line if within and not n else prefix + line for n, line in enumerate(lines))

    def close(self) -> None:
        if self._common is not None:
            os.close(self._common)
            self._common = None

    def _name(self, task: int) -> str:
        node = task // self.tasks
        host = self._nodes[node] if node < len(self._nodes) else ""
        environment = {**self._environment, "SLURM_STEP_ID": self._step_number()}
        return expanded(self._pattern, environment, task, node, host)

    def _step_number(self) -> str:
        """The number that Slurm has given the step, once its nodes have told it."""
        if self._folder is None or not _has_field(self._pattern, STEP_FIELDS):
            return ""
        try:
            return os.fsdecode(foreign.read_own(self._folder / NUMBER_FILE, foreign.NOTE_BYTES_MAX)).strip()
        except OSError:
            return ""

    def _open(self, name: str) -> int:
        new = 0 if name in self._begun else self._new
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | new
        try:
            descriptor = os.open(name, how, 0o666)
        except OSError as error:
            if name in self._begun:
                raise
            raise CannotOpen(f"srun: could not open stdout file {name}: {error.strerror}") from error
        self._begun.add(name)
        return descriptor

    def _check_folder(self, option: str, pattern: str) -> None:
        """Raise CannotOpen if srun's `option` names a file in a folder that is not there: before the
        training, not when its first line is lost."""
        folder = Path(expanded(pattern, self._environment, 0, 0, self._nodes[0])).parent
        if not folder.is_dir():
            raise CannotOpen(
                f"srun's --{option}={pattern}: there is no folder {folder}",
                hint=f"make it in the script, before srun: mkdir -p {shlex.quote(str(folder))}",
            )


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# ---- the relay

EVERY_S = 0.5
READ_BYTES = 1 << 20
# If there are more ranks, only the first is relayed: one process reads the logs of all.
RANKS_MAX = 64


@contextmanager
def relayed(run: RunDirectory, output: Output, after: int, place: int | None = None) -> Iterator[None]:
    """Copy the ranks' logs to the step's output in this context, on a thread of its own. Leaving the context
    waits until everything is copied.

    Copies attempts later than `after`; all ranks, or only those of the node at this `place`.
    """
    plan = run.plan()
    each, first = plan.ranks_per_node, (place or 0) * plan.ranks_per_node
    ranks = range(plan.active * each) if place is None else range(first, first + each)
    if len(ranks) > RANKS_MAX:
        ranks = ranks[:1]
    tasks = {rank: (rank - first) * output.tasks // each for rank in ranks}
    over = threading.Event()
    thread = threading.Thread(target=_relay, args=(run, output, tasks, after + 1, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _relay(
    run: RunDirectory, output: Output, tasks: Mapping[int, int], attempt: int, over: threading.Event
) -> None:
    """`tasks`: the task of the step to which each rank belongs."""
    tails: dict[Path, FileTail] = {}

    def copy(*, whole: bool) -> None:
        for rank, task in tasks.items():
            log = run.rank_log(attempt, rank)
            tail = tails.setdefault(log, FileTail(log))
            while data := tail.data(READ_BYTES, partial=whole or output.unbuffered, bars=True):
                output.write(rank, data if data.endswith(b"\n") or not whole else data + b"\n", task)
                if not tail.more:
                    break

    last = False
    try:
        while not last:
            last = over.wait(EVERY_S)
            newest = newest_attempt(run)
            while attempt < newest:  # an older attempt is complete
                copy(whole=True)
                attempt += 1
            copy(whole=last)
    except CannotOpen as error:
        say(str(error))
    except OSError:
        return  # the reader is gone; the logs have everything


def newest_attempt(run: RunDirectory) -> int:
    """The number of the newest attempt; 0 if there is none or it cannot be read."""
    try:
        return run.newest_attempt()
    except RunDirectoryError:
        return 0
