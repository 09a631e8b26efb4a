"""What several commands share: RUN, --runs, --json, and how output is shown."""

from __future__ import annotations

import getpass
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jurymast.cli.find import find_run
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory

if TYPE_CHECKING:
    from jurymast.policy.resolve import Resolved
    from jurymast.report.layout import Block

Function = TypeVar("Function", bound=Callable[..., Any])

run_argument: Callable[[Any], Any] = click.argument("run", metavar="RUN")
runs_option: Callable[[Any], Any] = click.option(
    "--runs", type=click.Path(path_type=Path), metavar="DIR",
    help="Where run directories are kept.  [$JURYMAST_RUNS, or ./runs]",
)  # fmt: skip
json_option: Callable[[Any], Any] = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object."
)


def the_run(run: str, runs: Path | None) -> RunDirectory:
    """Raises RunNotFoundError."""
    return find_run(run, runs.expanduser().absolute() if runs is not None else None)


def resolved_policy(file: Path | None) -> Resolved:
    """The policy in force with FILE: the site's, the file's and the defaults. Raises PolicyError."""
    import os

    from jurymast.policy.load import file_layers, site_layers
    from jurymast.policy.resolve import resolve

    layers = site_layers(os.environ)
    return resolve(layers + file_layers(file, str(file)) if file is not None else layers)


def show_json(values: Any) -> None:
    click.echo(json.dumps(values, indent=1))


def show(blocks: Sequence[Block]) -> None:
    """Print on stdout: with colours on a terminal, plainly in a pipe."""
    click.echo(shown(blocks), nl=False, color=True)


def shown(blocks: Sequence[Block]) -> str:
    from jurymast.report.layout import render

    width = shutil.get_terminal_size((110, 24)).columns
    return render(blocks, terminal=sys.stdout.isatty(), width=max(60, width))


def write_page(text: str, path: Path) -> None:
    """Raises RunDirectoryError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror}") from error
    click.echo(f"{path} ({len(text) // 1000} kB)", err=True)


def user() -> str:
    """Who is asking, for the journal."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        import os

        return f"uid {os.getuid()}"
