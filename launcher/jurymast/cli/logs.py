"""`jurymast logs`: the ranks' output, merged."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jurymast import foreign
from jurymast.cli import patience
from jurymast.cli.options import examples, run_argument, runs_option, the_run
from jurymast.cli.output import echo
from jurymast.errors import RunDirectoryError, RunNotFoundError, UsageError
from jurymast.rundir import RunDirectory, rank_of

if TYPE_CHECKING:
    from jurymast.journal import FileTail

FOLLOW_EVERY_S = 0.2
READ_BYTES, TAIL_BYTES = 1 << 20, 1 << 26
# If there are more ranks, not all of them are shown by default.
RANKS_SHOWN_MAX = 64
# A progress bar has no line ends; as it is, it is printed as often as this.
BAR_EVERY_S = 5.0
# Following thousands of logs reads at most this many per second: storage serves others, too.
FILES_A_SECOND = 2000.0


@click.command(
    epilog=examples(
        "jurymast logs 4711 --follow", "jurymast logs 4711 --rank 3 --attempt 2", "jurymast logs 4711 --job"
    )
)
@run_argument
@click.option(
    "-r", "--rank", type=click.IntRange(0), multiple=True, metavar="R",
    help=f"Only this rank.  [all; of more than {RANKS_SHOWN_MAX}: rank 0 and those that incidents name]",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="All ranks, however many there are.")
@click.option("-a", "--attempt", type=click.IntRange(1), metavar="A", help="Which attempt.  [the newest]")
@click.option("-f", "--follow", is_flag=True, help="Continue through later attempts until the run ends.")
@click.option("-n", "--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines of each rank.")
@click.option(
    "--job",
    is_flag=True,
    help="The log of the job instead: supervisor, agents and Slurm; always of an observed job.",
)
@runs_option
def command(
    run: str, rank: tuple[int, ...], everything: bool, attempt: int | None, follow: bool, tail: int | None,
    job: bool, runs: Path | None,
) -> None:  # fmt: skip
    """Print what the ranks wrote, each line with its rank; of a job that is only observed, its output.

    Lines have no timestamps, so lines of different ranks appear in the order in which they are read.
    """
    directory = the_run(run, runs, only_look=True)
    job = job or directory.plan().observed  # which has no ranks
    if job and (rank or everything or attempt):
        raise UsageError(
            "--job, as of an observed job, shows the log of the whole: leave out --rank, --all and --attempt"
        )
    if rank and everything:
        raise UsageError("--rank and --all exclude each other")
    chosen = attempt or directory.newest_attempt()
    find = _Finder(directory, rank, everything=everything, job=job)
    if not find(chosen) and not follow:
        raise RunNotFoundError(find.nothing(chosen))
    if follow:
        patience.follow_on()
    with suppress(KeyboardInterrupt):
        _print(find, chosen, tail=tail, follow=follow, fixed=attempt is not None)


class _Finder:
    """Finds the logs to show, as {prefix: file} of an attempt, in the order of ranks."""

    def __init__(
        self, directory: RunDirectory, ranks: tuple[int, ...], *, everything: bool, job: bool
    ) -> None:
        self.directory, self.job = directory, job
        self._ranks = tuple(sorted(set(ranks)))
        plan = directory.plan()
        self._count = plan.active * plan.ranks_per_node
        self._apart = plan.stderr_apart
        self._observed = plan.observed
        self._outputs: list[Path] = []  # of an observed job
        self._everything = everything or self._count <= RANKS_SHOWN_MAX
        self._chosen: dict[int, tuple[int, ...]] = {}

    def __call__(self, attempt: int) -> dict[str, Path]:
        if self.job:
            return self._job_files()
        ranks = self._ranks or self._telling(attempt)
        if ranks:
            logs = [self.directory.rank_log(attempt, rank) for rank in ranks]
        else:
            logs = self.directory.rank_logs(attempt)
        named = [(f"[r{rank_of(log)}] ", log) for log in logs]
        if self._apart:
            pairs = (((name, log), (f"{name[:-2]} err] ", log.with_suffix(".err"))) for name, log in named)
            named = [entry for pair in pairs for entry in pair]
        return {name: path for name, path in named if foreign.exists(path)}

    def nothing(self, attempt: int) -> str:
        """Why there is nothing to show."""
        if self._observed:
            where = ", ".join(map(str, self._outputs)) or "a file that Slurm no longer knows"
            return f"the job has written nothing yet to {where}"
        if self.job:
            return f"there is no job log yet in {self.directory.submission}"
        if not attempt:
            return f"no attempt of {self.directory.root.name} has started yet"
        wanted = f" of rank {', '.join(map(str, self._ranks))}" if self._ranks else ""
        have = sorted(path.name for path in foreign.found(self.directory.logs, "attempt-*"))
        others = f"the newest are of {', '.join(have[-5:])}" if have else "no attempt has written one"
        return f"there is no log{wanted} for attempt {attempt}; {others}"

    def _job_files(self) -> dict[str, Path]:
        from jurymast.report.text import one_line

        if self._observed:
            from jurymast.report.observed import output_files

            self._outputs = self._outputs or output_files(self.directory)
            found = [path for path in self._outputs if foreign.exists(path)]
        else:
            found = foreign.found(self.directory.submission, "job-*.log")
        files = sorted(found, key=_changed_at)
        return {f"[{one_line(path.stem)}] " if len(files) > 1 else "": path for path in files}

    def _telling(self, attempt: int) -> tuple[int, ...]:
        """The ranks that are shown if there are very many; () for all."""
        if self._everything:
            return ()
        if attempt not in self._chosen:
            from jurymast.report.status import read_status

            incidents = read_status(self.directory).state.incidents
            failed = (i.rank for i in incidents if i.attempt == attempt and i.rank is not None)
            ranks = tuple(sorted({0, *(rank for rank in failed if rank >= 0)}))
            self._chosen[attempt] = ranks
            told = ", ".join(map(str, ranks))
            echo(f"-- rank {told} of {self._count} (--rank R, or --all) --", err=True)
        return self._chosen[attempt]


def _changed_at(path: Path) -> float:
    try:
        return foreign.status(path).st_mtime
    except OSError:  # who reads it says why
        return 0.0


def _print(find: _Finder, attempt: int, *, tail: int | None, follow: bool, fixed: bool) -> None:
    """Print the logs in rank order; with `follow`, then also new lines and, unless `fixed`, later
    attempts."""
    from jurymast.journal import FileTail

    directory = find.directory
    tails: dict[Path, FileTail] = {}
    unread: set[Path] = set()
    bars: dict[Path, tuple[float, bytes]] = {}
    began = attempt
    for over in _rounds(directory, follow, tails):
        newest = attempt if fixed else _newest(directory, attempt)
        for number in range(attempt, newest + 1):
            files = find(number)
            if not find.job and number > began and files and not tails.keys() & set(files.values()):
                echo(f"-- attempt {number} --", err=True)
            for prefix, path in files.items():
                source = tails.setdefault(path, FileTail(path, one_of_many=True))
                _copy(source, prefix, tail, whole=over)
                if source.error is not None and path not in unread:
                    unread.add(path)
                    echo(f"-- {prefix}{path}: {source.error.strerror} --", err=True)
                if not over:
                    _show_bar(source, prefix, bars)
        attempt, tail = newest, None
    if tails and unread == tails.keys():
        raise RunDirectoryError("none of these logs can be read")


def _newest(directory: RunDirectory, attempt: int) -> int:
    """The newest attempt, or `attempt` if none can be read: a moment's failure of the storage does not end
    --follow."""
    try:
        return max(attempt, directory.newest_attempt())
    except RunDirectoryError:
        return attempt


def _rounds(directory: RunDirectory, follow: bool, files: Sized) -> Iterator[bool]:
    """Yield once, or until the run has ended; True in the last round, in which unfinished lines are printed,
    too."""
    if not follow:
        yield True
        return
    from jurymast.report.status import StatusWatcher

    watcher, over = StatusWatcher(directory), False
    while not over:
        watcher.poll()
        over = watcher.state.ended or watcher.gone()
        yield over
        if not over:
            time.sleep(max(FOLLOW_EVERY_S, len(files) / FILES_A_SECOND))


def _copy(source: FileTail, prefix: str, tail: int | None, *, whole: bool) -> None:
    kept: list[bytes] = []
    if tail is not None:  # the file may be a colleague's, and have no end
        source.leave_out(max(TAIL_BYTES, tail << 10))
    while True:
        lines = [_last_state(line) for line in source.lines(READ_BYTES, partial=whole)]
        if tail is None:
            _echo(prefix, lines)
        else:
            kept = (kept + lines)[-tail:] if tail else []
        if not source.more:
            break
    _echo(prefix, kept)


def _show_bar(source: FileTail, prefix: str, shown: dict[Path, tuple[float, bytes]]) -> None:
    """Print the progress bar with which the log ends, if it has moved. `shown`: when which was, by file."""
    now = time.monotonic()
    at, before = shown.get(source.path, (-BAR_EVERY_S, b""))
    if now >= at + BAR_EVERY_S and (bar := _last_state(source.bar())) not in (b"", before):
        _echo(prefix, [bar])
        shown[source.path] = now, bar


def _last_state(line: bytes) -> bytes:
    """Of a progress bar, what a terminal would show last."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _echo(prefix: str, lines: list[bytes]) -> None:
    if lines:
        echo("\n".join(prefix + line.decode(errors="replace") for line in lines))
