"""Where a step's output goes: what srun's options and variables say of it, and the relay of the ranks' logs.

Measured with srun 22.05, 24.11 and 26.05: a name with a backslash is taken literally, without its
backslashes; a number that a task has selects that task; names that begin with `all` or `-` mean the standard
output; widths are at most 10, and names have none.
"""

from __future__ import annotations

import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.control import release
from jurymast.cluster.sbatch import CommandLine
from jurymast.errors import RunDirectoryError, UsageError
from jurymast.journal import FileTail
from jurymast.rundir import RunDirectory
from jurymast.script.notes import say

# ---- names of files

TASK_FIELDS, STEP_FIELDS = "tnN", "sJ"
FIELD = re.compile(r"%(\d*)(.?)", re.DOTALL)
WIDTH_MAX = 10
NO_ARRAY = "4294967294"  # Slurm's %a outside an array
# From which releases on srun knows %b, and %r and %S; the latter also leave what they do not know as it is,
# and have 0 for %a outside an array. Those between 22.05, 24.11 and 26.05 were not tried.
TENTHS_SINCE, RESTARTS_SINCE = (24, 11), (26, 5)
# Fields without a width.
NAMES = "xuNS"


def expanded(pattern: str, environment: Mapping[str, str], task: int, node: int = 0, host: str = "") -> str:
    """srun's file name with its % fields filled in, for a task of the step and its node (both by number),
    which is called `host`."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    new = release() >= RESTARTS_SINCE
    job = environment.get("SLURM_JOB_ID", "")
    step = environment.get("SLURM_STEP_ID", "")
    index = environment.get("SLURM_ARRAY_TASK_ID") or ("0" if new else NO_ARRAY)
    values = {
        "t": str(task), "n": str(node), "N": host, "j": job,
        "A": environment.get("SLURM_ARRAY_JOB_ID") or job, "a": index, "s": step,
        "x": environment.get("SLURM_JOB_NAME", ""), "u": environment.get("USER", ""),
    }  # fmt: skip
    if release() >= TENTHS_SINCE:
        values["b"] = index[-1]
    if new:
        values["r"] = environment.get("SLURM_RESTART_COUNT", "0")
        values["S"] = environment.get("SLURM_JOB_SLUID", "")

    def fill(match: re.Match[str]) -> str:
        width, name = min(int(match[1] or 0), WIDTH_MAX), match[2]
        if name == "%" and not match[1]:
            return "%"
        if name == "J":
            return f"{job.zfill(width)}.{step}"
        if name in values:
            return values[name] if name in NAMES else values[name].zfill(width)
        if new:  # a % at the end is lost
            return match[0] if name else match[1]
        return match[1] + name if match[1] else match[0]

    return FIELD.sub(fill, pattern)


def _has_field(pattern: str, fields: str) -> bool:
    return "\\" not in pattern and any(match[2] in {*fields} for match in FIELD.finditer(pattern))


def is_each_tasks(pattern: str) -> bool:
    """Whether each task has a file of its own."""
    return _has_field(pattern, TASK_FIELDS)


class CannotOpen(UsageError):
    """A file of srun's options cannot be opened."""


# ---- the output

# What srun reads besides its options.
VARIABLES = {"output": "SLURM_STDOUTMODE", "error": "SLURM_STDERRMODE"}
SWITCHES = {"label": "SLURM_LABELIO", "unbuffered": "SLURM_UNBUFFEREDIO"}
NUMBER_FILE = "step-id"  # in a step's folder: Slurm's number of the step
# Releases whose srun makes missing folders, with these permissions; those between 22.05 and this one were not
# tried.
MAKES_FOLDERS_SINCE, FOLDER_MODE = (24, 11), 0o755


class Destination:
    """Where the stdout or the stderr of a step's tasks goes: to a file, to one for each task, or to a
    `standard` descriptor. `only`: the one task that is wanted."""

    def __init__(self, option: str, pattern: str, only: int | None, standard: int, step: Naming) -> None:
        self.pattern, self.only, self._standard, self._step = pattern, only, standard, step
        self._option = option
        self.new = step.new
        self._common: int | None = None
        self._begun = step.begun
        self._unfinished: set[int] = set()  # ranks whose last line has no end yet

    @property
    def common(self) -> int:
        """A descriptor for what the step's command itself prints."""
        if not self.pattern or _has_field(self.pattern, TASK_FIELDS + STEP_FIELDS):
            return self._standard
        return self._file()

    def write(self, rank: int, data: bytes, task: int) -> None:
        if self.only is not None and task != self.only:
            return
        if self._step.label:
            data = self._labelled(rank, data, task)
        if not is_each_tasks(self.pattern):
            _write(self._file() if self.pattern else self._standard, data)
            return
        descriptor = self._open(self._step.name(self.pattern, task))  # not kept open: there may be thousands
        try:
            _write(descriptor, data)
        finally:
            os.close(descriptor)

    def begun_file(self, task: int) -> str:
        """The name of this task's own file, which is there from now on; "" if it has none, or if its name
        depends on the step's number, which nobody knows yet."""
        if not is_each_tasks(self.pattern) or _has_field(self.pattern, STEP_FIELDS):
            return ""
        name = self._step.name(self.pattern, task)
        os.close(self._open(name))
        return os.path.abspath(name)

    def is_same_as(self, other: Destination) -> bool:
        """Whether what is written to either comes to the same place in the order in which it is written."""
        if (self.pattern, self.only) != (other.pattern, other.only):
            return False
        return bool(self.pattern) or _are_one_file(self._standard, other._standard)

    def close(self) -> None:
        if self._common is not None:
            os.close(self._common)
            self._common = None

    def _file(self) -> int:
        if self._common is None:
            self._common = self._open(self._step.name(self.pattern, 0))
        return self._common

    def _labelled(self, rank: int, data: bytes, task: int) -> bytes:
        """The data with the task before each line that begins in it."""
        within = rank in self._unfinished
        (self._unfinished.discard if data.endswith(b"\n") else self._unfinished.add)(rank)
        lines = re.findall(rb"[^\n]*\n|[^\n]+", data)
        prefix = b"%*d: " % (self._step.width, task)
        return b"".join(line if within and not n else prefix + line for n, line in enumerate(lines))

    def _open(self, name: str) -> int:
        new = 0 if name in self._begun else self.new
        how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | new
        try:
            try:
                descriptor = os.open(name, how, 0o666)
            except FileNotFoundError:
                provide_folder(os.path.dirname(name))
                descriptor = os.open(name, how, 0o666)
        except OSError as error:
            if name in self._begun:
                raise
            stream = "stdout" if self._option == "output" else "stderr"
            raise CannotOpen(f"srun: could not open {stream} file {name}: {error.strerror}") from error
        self._begun.add(name)
        return descriptor


def provide_folder(path: str) -> bool:
    """Make this folder if it is missing, as newer sruns do; return whether it is there. Raises OSError if it
    cannot be made."""
    if os.path.isdir(path or "."):
        return True
    if release() < MAKES_FOLDERS_SINCE:
        return False
    for folder in [*reversed(Path(path).parents), Path(path)]:
        if not folder.is_dir():
            with suppress(FileExistsError):  # another task has made it
                folder.mkdir(FOLDER_MODE)
    return os.path.isdir(path)


def _are_one_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return True


class Naming:
    """What the names of a step's files and its lines depend on: `tasks` on each of its `nodes`, as the script
    sees those. `folder`: the step's."""

    def __init__(
        self,
        srun: CommandLine,
        environment: Mapping[str, str],
        nodes: Sequence[str],
        tasks: int,
        folder: Path | None,
    ) -> None:
        self.tasks, self.nodes, self._folder, self.environment = tasks, nodes, folder, environment
        self.count = tasks * len(nodes)
        self.begun: set[str] = set()  # files that were opened before
        on = {name: srun.has(name) or environment.get(SWITCHES[name], "0") != "0" for name in SWITCHES}
        self.label, self.unbuffered = on["label"], on["unbuffered"]
        mode = srun.last("open-mode") or environment.get("SLURM_OPEN_MODE", "")
        self.new = 0 if mode.startswith("a") else os.O_TRUNC
        self.width = len(str(self.count - 1)) if self.label else 0

    def name(self, pattern: str, task: int) -> str:
        node = task // self.tasks
        host = self.nodes[node] if node < len(self.nodes) else ""
        environment = {**self.environment, "SLURM_STEP_ID": self._number(pattern)}
        return expanded(pattern, environment, task, node, host)

    def _number(self, pattern: str) -> str:
        """The number that Slurm has given the step, once its nodes have told it."""
        if self._folder is None or not _has_field(pattern, STEP_FIELDS):
            return ""
        try:
            return os.fsdecode(foreign.read_own(self._folder / NUMBER_FILE, foreign.NOTE_BYTES_MAX)).strip()
        except OSError:
            return ""

    def check_folder(self, option: str, pattern: str) -> None:
        """Raise CannotOpen if srun's `option` names a file in a folder that is not there, and that srun would
        not make: before the training, not when its first line is lost."""
        folder = Path(expanded(pattern, self.environment, 0, 0, self.nodes[0])).parent
        try:
            there = provide_folder(str(folder))
        except OSError as error:
            raise CannotOpen(f"srun's --{option}={pattern}: no folder {folder}: {error.strerror}") from error
        if not there:
            raise CannotOpen(
                f"srun's --{option}={pattern}: there is no folder {folder}",
                hint=f"make it in the script, before srun: mkdir -p {shlex.quote(str(folder))}",
            )


class Output:
    """The output of one step: of `tasks` on each of its `nodes`, as the script sees those. `folder`: the
    step's. Raises CannotOpen.

    Without `--error`, stderr goes where `--output` says, but not to the standard output."""

    def __init__(
        self,
        srun: CommandLine,
        environment: Mapping[str, str],
        nodes: Sequence[str] = ("",),
        tasks: int = 1,
        folder: Path | None = None,
    ) -> None:
        step = Naming(srun, environment, nodes, tasks, folder)
        self.tasks, self._count = tasks, step.count
        self.unbuffered, self.label = step.unbuffered, step.label
        said = {name: srun.last(name) or environment.get(VARIABLES[name], "") for name in VARIABLES}
        pattern, only = chosen(said["output"], step.count)
        self.out = Destination("output", pattern, only, 1, step)
        follows = not said["error"] and (pattern or only is not None)
        self._followed = said["output"] if follows else ""
        if follows:
            self.err = self.out
        else:
            self.err = Destination("error", *chosen(said["error"], step.count), 2, step)
            if self.err.is_same_as(self.out):
                self.err = self.out
        step.check_folder("output", pattern)
        step.check_folder("error", self.err.pattern)

    @property
    def stderr_apart(self) -> bool:
        """Whether stderr goes elsewhere than stdout."""
        return self.err is not self.out

    @property
    def common(self) -> int:
        """A descriptor for what the step's command itself prints."""
        return self.out.common

    @property
    def srun_options(self) -> list[str]:
        """What srun must be told for the stderr of the step's command itself: without `--error` it follows
        stdout, which we open in srun's place. If each task has a file, ranks do not write there, and spare
        nodes would have one as well."""
        return [f"--error={self._followed}"] if self._followed and not is_each_tasks(self._followed) else []

    def own_files(self) -> list[tuple[str, str]]:
        """For each task, where its command's own stdout and stderr go, if that is a file for each task; else
        "". Such a command is that of a launcher: other tasks are ranks."""
        files = [(self.out.begun_file(n), self.err.begun_file(n)) for n in range(self._count)]
        return files if self.tasks == 1 and not self.label else []

    def srun_opens_errors(self) -> None:
        """srun itself has begun the common file for stderr, for what the step's command prints there."""
        if (self.stderr_apart or self._followed) and not is_each_tasks(self.err.pattern):
            self.err.new = 0

    def write(self, rank: int, data: bytes, task: int | None = None, *, error: bool = False) -> None:
        """Write what a rank has printed, which belongs to this task of the step (or to that of its number).
        Raises OSError if the reader is gone or the disk is full."""
        (self.err if error else self.out).write(rank, data, rank if task is None else task)

    def close(self) -> None:
        self.out.close()
        self.err.close()


def chosen(said: str, count: int) -> tuple[str, int | None]:
    """The pattern of a file's name, "" for the standard output, and the only one of `count` tasks that is
    wanted, if it is only one."""
    if said.startswith("-") or said[:3].lower() == "all":
        return "", None
    if said.lower() == "none":
        return os.devnull, None
    if said.isdigit() and int(said) < count:
        return "", int(said)
    return said, None


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# ---- the relay

EVERY_S = 0.5
READ_BYTES = 1 << 20
# One process reads the logs of all ranks, at most this many per second: storage serves others, too. If there
# are very many ranks, only the first is relayed.
FILES_A_SECOND = 2000.0
RANKS_MAX = 4096


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
        say(f"of {len(ranks)} ranks only the first is printed here; `jurymast logs {run.root.name}` has all")
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
    unended: dict[Path, bool] = {}

    def copy(*, whole: bool, followed: bool = False) -> None:
        """`followed`: by another attempt, which begins on a line of its own."""
        for rank, task in tasks.items():
            copy_log(run.rank_log(attempt, rank), rank, task, whole=whole, followed=followed)
            if apart:
                errors = run.rank_errors(attempt, rank)
                copy_log(errors, rank, task, whole=whole, followed=followed, error=True)

    def copy_log(
        log: Path, rank: int, task: int, *, whole: bool, followed: bool, error: bool = False
    ) -> None:  # fmt: skip
        tail = tails.setdefault(log, FileTail(log, one_of_many=True))
        while data := tail.data(READ_BYTES, partial=whole or output.unbuffered, bars=True):
            output.write(rank, data, task, error=error)
            unended[log] = not data.endswith(b"\n")
            if not tail.more:
                break
        if whole and unended.pop(log, False) and (followed or output.label):  # srun ends what it labels
            output.write(rank, b"\n", task, error=error)
        if tail.error is not None and log not in unread:
            unread.add(log)
            say(f"{log} is not printed here as long as it cannot be read: {tail.error.strerror}")

    unread: set[Path] = set()
    apart = run.plan().stderr_apart
    every_s = max(EVERY_S, len(tasks) / FILES_A_SECOND)
    last = False
    try:
        while not last:
            last = over.wait(every_s)
            newest = newest_attempt(run)
            while attempt < newest:  # an older attempt is complete
                copy(whole=True, followed=True)
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
