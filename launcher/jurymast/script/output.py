"""Where a step's output goes: to the file that its srun names, or to one file per task; otherwise to the
standard output of the step's front end, which is the job's output unless the script redirects it. People look
there for what the ranks print."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jurymast.cluster.sbatch_options import CommandLine
from jurymast.errors import RunDirectoryError
from jurymast.journal import FileTail
from jurymast.rundir import RunDirectory

# %n and %t are equal if a node has one task; people look for the rank's number.
TASK_FIELDS = "tnN"
FIELDS = {
    "j": "SLURM_JOB_ID", "A": "SLURM_ARRAY_JOB_ID", "a": "SLURM_ARRAY_TASK_ID", "x": "SLURM_JOB_NAME",
    "u": "USER",
}  # fmt: skip
FIELD = re.compile(r"%(\d*)([a-zA-Z%])")


def expanded(pattern: str, environment: Mapping[str, str], task: int) -> str:
    """srun's file name with its % fields filled in; unknown fields stay."""

    def fill(match: re.Match[str]) -> str:
        width, name = int(match[1] or 0), match[2]
        if name == "%":
            return "%"
        if name in TASK_FIELDS:
            return str(task).zfill(width)
        variable = FIELDS.get(name)
        if variable is None or variable not in environment and name != "A":
            return match[0]
        value = environment.get(variable) or environment["SLURM_JOB_ID"]  # %A outside an array
        return value.zfill(width) if value.isdigit() else value

    return FIELD.sub(fill, pattern)


def is_each_tasks(pattern: str) -> bool:
    """Whether each task has a file of its own."""
    return any(match[2] in TASK_FIELDS for match in FIELD.finditer(pattern))


class Output:
    """The output of one step."""

    def __init__(self, srun: CommandLine, environment: Mapping[str, str]) -> None:
        self._pattern = srun.last("output") or ""
        self._label = srun.has("label")
        self._environment = environment
        mode = srun.last("open-mode") or environment.get("SLURM_OPEN_MODE", "")
        self._new = 0 if mode.startswith("a") else os.O_TRUNC
        self._files: dict[str, int] = {}

    @property
    def common(self) -> int:
        """A descriptor for what the step's command itself prints."""
        return 1 if is_each_tasks(self._pattern) else self._descriptor(0)

    def write(self, rank: int, lines: Sequence[bytes]) -> None:
        """Write a rank's lines. Raises OSError if the reader is gone or the disk is full."""
        prefix = b"%d: " % rank if self._label else b""
        data = b"".join(prefix + line + b"\n" for line in lines)
        while data:
            data = data[os.write(self._descriptor(rank), data) :]

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _descriptor(self, rank: int) -> int:
        if not self._pattern:
            return 1
        name = "/dev/null" if self._pattern == "none" else expanded(self._pattern, self._environment, rank)
        if name not in self._files:
            how = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | self._new
            self._files[name] = os.open(name, how | os.O_CREAT, 0o666)
        return self._files[name]


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
    over = threading.Event()
    thread = threading.Thread(target=_relay, args=(run, output, ranks, after + 1, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _relay(run: RunDirectory, output: Output, ranks: range, attempt: int, over: threading.Event) -> None:
    tails: dict[Path, FileTail] = {}

    def copy(*, whole: bool) -> None:
        for rank in ranks:
            log = run.rank_log(attempt, rank)
            tail = tails.setdefault(log, FileTail(log))
            while lines := tail.lines(READ_BYTES, partial=whole):
                output.write(rank, lines)
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
    except OSError:
        return  # the reader is gone; the logs have everything


def newest_attempt(run: RunDirectory) -> int:
    """The number of the newest attempt; 0 if there is none or it cannot be read."""
    try:
        return run.newest_attempt()
    except RunDirectoryError:
        return 0
