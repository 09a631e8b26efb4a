"""What several commands share: RUN (a run id or its beginning, `last`, a Slurm job id or a run directory),
--runs, --json, output, and requests to a run's supervisor."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from jurymast import foreign
from jurymast.cli.output import echo, echo_coloured
from jurymast.errors import RunDirectoryError, UsageError
from jurymast.report.which_run import find_run, run_ids
from jurymast.rundir import RunDirectory, default_runs

if TYPE_CHECKING:
    from jurymast.cluster.submitter import JobsSubmitter
    from jurymast.policy.resolve import Resolved
    from jurymast.report.text import Block


# Limits of the sizes and numbers of nodes for calculations: far above any real ones.
LARGEST_BYTES = 1e18
MOST_NODES = 1_000_000

Function = TypeVar("Function", bound=Callable[..., Any])


def complete_run(context: click.Context, _argument: click.Parameter, begin: str) -> list[CompletionItem]:
    """This user's runs, newest first, or directories if no run's id begins like this."""
    runs = context.params.get("runs")
    names = run_ids(default_runs() if runs is None else runs)
    found = [CompletionItem(name) for name in names if name.startswith(begin)]
    return found or [CompletionItem(begin, type="dir")]


run_argument: Callable[[Any], Any] = click.argument("run", metavar="RUN", shell_complete=complete_run)


def runs_of(help: str) -> Callable[[Any], Any]:
    """The option --runs; an absolute path, or None if it is not given."""
    return click.option(
        "--runs", type=click.Path(path_type=Path), metavar="DIR", help=help,
        callback=lambda context, option, value: value and value.expanduser().absolute(),
    )  # fmt: skip


runs_option = runs_of("Where run directories are kept.  [$JURYMAST_RUNS, or ./runs]")


def file_option(*names: str, help: str) -> Callable[[Any], Any]:
    """An option that takes the path of a file."""
    return click.option(*names, type=click.Path(path_type=Path), metavar="FILE", help=help)


json_option: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def examples(*lines: str) -> str:
    """The end of a command's help text."""
    return "\n  ".join(("\b\nExamples:", *lines))


def size(text: str) -> float:
    """The number of bytes in 5e12, 5TB or "4.5 TiB". Raises ValueError."""
    match = re.fullmatch(r"([\d.]+(?:e\+?\d+)?) ?([kMGTP]?)(i?)B?", text.strip())
    found = 0.0
    if match is not None:
        found = float(match[1]) * (1024.0 if match[3] else 1000.0) ** " kMGTP".find(match[2] or " ")
    if not 0 < found < LARGEST_BYTES:
        raise ValueError(f"{text} is not a size; write bytes, or a number with a unit, like 5e12 or 5TB")
    return found


def read_by(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """The callback of an option whose text `read` converts, or refuses with ValueError."""

    def callback(context: click.Context, option: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error), context, option) from error

    return callback


checkpoint_bytes_option: Callable[[Any], Any] = click.option(
    "--checkpoint-bytes",
    callback=read_by(size),
    metavar="B",
    help="Size of one checkpoint, like 5e12 or 5TB.",
)


class Number(click.FloatRange):
    """A number in a range. Unlike click's own, which takes nan for in any range, and has none without end."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        number = float(super().convert(value, param, context))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number with an end.", param, context)
        return number


POSITIVE = Number(min=0.0, min_open=True)
storage_option: Callable[[Any], Any] = click.option(
    "--storage-gb-per-s", type=POSITIVE, metavar="W",
    help="Write bandwidth of the shared storage for all nodes together, in 1e9 bytes per second.",
)  # fmt: skip
durations_option = file_option(
    "--durations", "figures", help="YAML with measured durations in place of the packaged ones."
)
recovery_option = click.option(
    "--recovery", "in_process", type=click.Choice(["restart", "in-process"]), default="restart",
    callback=lambda _context, _parameter, value: value == "in-process",
    help="What ranks that live do after a failure; in-process: the script calls Checkpointer.run.  [restart]",
)  # fmt: skip
charts_option = file_option("--html", help="Write an HTML page with charts.")


def spares_option(help: str) -> Callable[[Any], Any]:
    """An option that takes a number of nodes or auto; None if it is not given."""
    return click.option("--spares", callback=_spares, metavar="N|auto", help=help)


def _spares(context: click.Context, option: click.Parameter, value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    if not value.isdigit():
        raise UsageError(f"--spares {value}: must be a number, or auto")
    if int(value) > MOST_NODES:
        raise UsageError(f"--spares {value}: at most {MOST_NODES}")
    return int(value)


def runs_place(runs: Path | None) -> Path:
    """The directory that --runs names, or the usual one. Raises RunDirectoryError if --runs names no
    directory."""
    if runs is not None and not foreign.is_directory(runs):
        raise RunDirectoryError(
            f"there is no directory {runs}", hint="name another one with --runs or JURYMAST_RUNS"
        )
    return runs or default_runs()


def the_run(run: str, runs: Path | None, *, only_look: bool = False) -> RunDirectory:
    """The run that RUN names. With `only_look`, another user's run is accepted, with a note of its owner.
    Raises RunNotFoundError, RunDirectoryError."""
    found = find_run(run, runs)
    if foreign.owns(found.root):
        return found
    status = foreign.link_status(found.root)
    if stat.S_ISLNK(status.st_mode) and not only_look:
        raise RunDirectoryError(
            f"{found.root} is a link of {foreign.user_name(status.st_uid)}",
            hint=f"name the run itself: {os.path.realpath(found.root)}",
        )
    if status.st_uid == os.geteuid():
        raise RunDirectoryError(
            f"other users can write to {found.root}, so its contents cannot be trusted",
            hint=f"if nobody else has changed anything in it, run: chmod go-w {found.root}",
        )
    owner = foreign.user_name(status.st_uid)
    if not only_look:
        raise RunDirectoryError(
            f"{found.root} belongs to {owner}",
            hint="on other users' runs only status, events, logs, report, checkpoints ls and verify work",
        )
    echo(f"jurymast: note: this run belongs to {owner}", err=True)
    return found


def resolved_policy(
    file: Path | None, spares: int | str | None = None, submitter: JobsSubmitter | None = None,
    *, own: bool = True,
) -> Resolved:  # fmt: skip
    """See `cluster.submitter.policy_for`; prints what could not be known of this submitter, or else user."""
    from jurymast.cluster.submitter import JobsSubmitter, policy_for

    found, notes = policy_for(submitter or JobsSubmitter({}), file, spares, own=own)
    for note in notes:
        echo(f"jurymast: note: {note}", err=True)
    return found


# Of all that --json prints (`jurymast schema`). Within a version, fields are only added.
SCHEMA = 1


def json_text(values: Any, indent: int | None = None) -> str:
    """The JSON of an object with its version, or of a list of such objects."""
    several = isinstance(values, list)
    told = [{"schema": SCHEMA, **one} for one in (values if several else [values])]
    return json.dumps(told if several else told[0], indent=indent)


def show_json(values: Any) -> None:
    echo(json_text(values, indent=1))


def show(blocks: Sequence[Block]) -> None:
    """Print on stdout, with colours on a terminal and plainly in a pipe."""
    echo_coloured(shown(blocks))


def shown(blocks: Sequence[Block]) -> str:
    from jurymast.report.text import render

    width = shutil.get_terminal_size((110, 24)).columns
    return render(blocks, terminal=sys.stdout.isatty(), width=max(60, width))


# The kernel's names of what is open already, and of what is no file: nobody can put another there.
_OPEN = ("/dev/fd/", "/dev/std", "/dev/null", "/dev/tty", "/proc/self/fd/")


def write_page(text: str, path: Path) -> None:
    """Write a page. Not through another user's link, which may lead to any file of this user's, nor into
    another user's file or pipe. Raises RunDirectoryError."""
    try:
        if str(path).startswith(_OPEN):
            path.write_text(text, encoding="utf-8")
        else:
            place = foreign.behind_own_link(path)
            descriptor = foreign.writing(place, 0, 0o666, closed=0)
            os.ftruncate(descriptor, 0)  # only now is it known to be this user's
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
    echo(f"{path} ({len(text) // 1000} kB)", err=True)
