"""`jurymast logs`: the ranks' output, merged."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jurymast.cli.options import run_argument, runs_option, the_run
from jurymast.errors import RunDirectoryError, RunNotFoundError, UsageError
from jurymast.rundir import RunDirectory

if TYPE_CHECKING:
    from jurymast.report.tail import FileTail

FOLLOW_EVERY_S = 0.2
LOOK_EVERY_S = 5.0
READ_BYTES = 1 << 20


@click.command()
@run_argument
@click.option(
    "-r", "--rank", type=click.IntRange(0), multiple=True, metavar="R", help="Only this rank.  [all]"
)
@click.option("-a", "--attempt", type=click.IntRange(1), metavar="A", help="Which attempt.  [the newest]")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends, through later attempts.")
@click.option("-n", "--tail", type=click.IntRange(0), metavar="N", help="Only the last N lines of each rank.")
@click.option("--job", is_flag=True, help="The job's own log instead: supervisor, agents and Slurm.")
@runs_option
def command(
    run: str, rank: tuple[int, ...], attempt: int | None, follow: bool, tail: int | None, job: bool,
    runs: Path | None,
) -> None:  # fmt: skip
    """Print what the ranks wrote, each line with its rank.

    Lines of different ranks carry no times, so they stand in the order in which they are found.
    """
    directory = the_run(run, runs)
    if job and (rank or attempt):
        raise UsageError("--job is the log of the whole job: it has neither ranks nor attempts")
    chosen = attempt or directory.newest_attempt()
    files = _job_files(directory) if job else _rank_files(directory, chosen, rank)
    if not files and not follow:
        raise RunNotFoundError(*_nothing(directory, chosen, rank, job))
    try:
        _print(directory, chosen, rank, tail=tail, follow=follow, fixed=attempt is not None, job=job)
    except KeyboardInterrupt:
        return


def _nothing(directory: RunDirectory, attempt: int, ranks: tuple[int, ...], job: bool) -> tuple[str]:
    if job:
        return (f"there is no job log yet in {directory.submission}",)
    if not attempt:
        return (f"no attempt of {directory.root.name} has started yet",)
    wanted = f" of rank {', '.join(map(str, ranks))}" if ranks else ""
    have = sorted(path.name for path in directory.logs.glob("attempt-*"))
    others = f"there is {', '.join(have[-5:])}" if have else "no attempt has written one"
    return (f"there is no log{wanted} for attempt {attempt}; {others}",)


def _rank_files(directory: RunDirectory, attempt: int, ranks: tuple[int, ...]) -> dict[str, Path]:
    """{prefix: log file} in the order of ranks."""
    files = {}
    for path in sorted(directory.attempt_logs(attempt).glob("rank-*.log")):
        number = int(path.stem.removeprefix("rank-"))
        if not ranks or number in ranks:
            files[f"[r{number}] "] = path
    return files


def _job_files(directory: RunDirectory) -> dict[str, Path]:
    files = sorted(directory.submission.glob("job-*.log"), key=lambda path: path.stat().st_mtime)
    return {f"[{path.stem}] " if len(files) > 1 else "": path for path in files}


def _print(
    directory: RunDirectory, attempt: int, ranks: tuple[int, ...], *, tail: int | None, follow: bool,
    fixed: bool, job: bool,
) -> None:  # fmt: skip
    """All there is, in rank order; then, with `follow`, what comes, and later attempts unless `fixed`."""
    from jurymast.report.tail import FileTail

    tails: dict[Path, FileTail] = {}
    began = attempt
    for over in _rounds(directory, follow):
        newest = attempt if fixed else _newest(directory, attempt)
        for number in range(attempt, newest + 1):
            files = _job_files(directory) if job else _rank_files(directory, number, ranks)
            if not job and number > began and files.keys() and not tails.keys() & set(files.values()):
                click.echo(f"-- attempt {number} --", err=True)
            for prefix, path in files.items():
                source = tails.setdefault(path, FileTail(path))
                _copy(source, prefix, tail, whole=over)
        attempt, tail = newest, None


def _newest(directory: RunDirectory, attempt: int) -> int:
    """`attempt` while no later one is known: storage that fails for a moment does not end the following."""
    try:
        return max(attempt, directory.newest_attempt())
    except RunDirectoryError:
        return attempt


def _rounds(directory: RunDirectory, follow: bool) -> Iterator[bool]:
    """Once, or until the run has ended; True in the last round, when half a line is all that will come."""
    if not follow:
        yield True
        return
    from jurymast.report.liveness import look
    from jurymast.report.view import Watcher

    watcher = Watcher(directory)
    look_at, over = 0.0, False
    while not over:
        watcher.poll()
        over = watcher.state.ended
        if not over and time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_EVERY_S
            over = look(directory, watcher.state).kind == "gone"
        yield over
        if not over:
            time.sleep(FOLLOW_EVERY_S)


def _copy(source: FileTail, prefix: str, tail: int | None, *, whole: bool) -> None:
    from jurymast.report.layout import clean

    kept: list[bytes] = []
    while lines := source.lines(READ_BYTES, partial=whole):
        if tail is not None:
            kept = (kept + lines)[-tail:] if tail else []
            continue
        for line in lines:
            click.echo(prefix + clean(line.decode(errors="replace")))
    for line in kept:
        click.echo(prefix + clean(line.decode(errors="replace")))
