"""`jurymast demo`: a run on the local cluster, from start to end."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import click

from jurymast import foreign
from jurymast.cli import patience
from jurymast.cli.options import show_json
from jurymast.cli.output import echo
from jurymast.errors import JurymastError, RunFailedError
from jurymast.rundir import RunDirectory, default_runs

if TYPE_CHECKING:
    from jurymast.demo import LocalRun, Screen, Wanted

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@click.command()
@click.option("-N", "--nodes", type=click.IntRange(1, 32), default=4, metavar="N", help="Active nodes.  [4]")
@click.option("--spares", type=click.IntRange(0, 8), default=1, metavar="N", help="Spare nodes.  [1]")
@click.option("--steps", type=click.IntRange(30), default=240, metavar="N", help="Steps to train.  [240]")
@click.option("--no-fault", is_flag=True, help="Run without faults.")
@click.option("--keep", is_flag=True, help="Keep the run directory, in $JURYMAST_RUNS or ./runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")
def command(nodes: int, spares: int, steps: int, no_fault: bool, keep: bool, as_json: bool) -> int:
    """Train a small GPT on this machine, kill a rank and a node on the way, and recover.

    The nodes are groups of processes; everything else works as on a cluster. Takes one to two minutes.
    """
    from jurymast.cluster.planning import need_torch
    from jurymast.demo import LocalRun, Screen, Show, Wanted, request_for

    need_torch("with which the demo trains", "run the demo")
    wanted = Wanted(nodes, spares, steps)
    screen = Screen(sys.stderr if as_json else sys.stdout)
    patience.follow_on()  # the processes that it starts must be ended
    with _folder(keep) as folder:
        local = LocalRun(request_for(wanted, folder.runs, Path.cwd()), folder.temporary)
        directory = local.directory
        _introduce(screen, wanted, with_fault=not no_fault)
        with _ended_with_us(local, screen):
            show = Show(local, wanted, screen, with_fault=not no_fault)
            show.run()
        folder.worth_keeping = show.state.exit_code != 0
        page = directory.root / "report" / "report.html" if keep else folder.path / "report.html"
        _report(directory, page, quiet=as_json)
        if as_json:
            values = {**show.to_json(), "directory": str(directory.root), "report": str(page)}
            show_json(values)
        _point_to(screen, directory, page, kept=keep or folder.worth_keeping)
        if show.state.exit_code == 0 and not no_fault and not show.shown:
            raise RunFailedError("the run succeeded, but it did not lose and replace a rank and a node")
        return show.state.exit_code


@dataclass
class Folder:
    """The demo's directories. The run directory is in `runs`, which is elsewhere with --keep."""

    path: Path
    runs: Path
    worth_keeping: bool = False

    @property
    def temporary(self) -> Path:
        return self.path / "tmp"


@contextmanager
def _folder(keep: bool) -> Iterator[Folder]:
    """Afterwards only the report is left; nothing of an interrupted demo, and everything of a failed one."""
    path = Path(tempfile.mkdtemp(prefix="jurymast-demo-", dir=foreign.temporary_place()))
    folder = Folder(path, default_runs() if keep else path / "runs")
    folder.temporary.mkdir()
    try:
        yield folder
    except JurymastError:
        folder.worth_keeping = True
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(folder.temporary, ignore_errors=True)
        if not folder.worth_keeping and not keep:
            shutil.rmtree(folder.runs, ignore_errors=True)
        with suppress(OSError):
            path.rmdir()  # fails if there is still something to read in it


@contextmanager
def _ended_with_us(local: LocalRun, screen: Screen) -> Iterator[None]:
    """No process of the run is left after this context, even if it is left by an error or a signal."""

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in END_SIGNALS}
    try:
        yield
        local.await_end()
    except BaseException:
        screen.say("ending all processes of the run")
        raise
    finally:
        # Ending takes a few seconds at most; a second Ctrl-C must not interrupt it halfway.
        for number in (signal.SIGINT, *END_SIGNALS):
            before.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN)
        local.end()
        screen.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _introduce(screen: Screen, wanted: Wanted, *, with_fault: bool) -> None:
    from jurymast.demo import SCRIPT
    from jurymast.report.text import count

    spare = f" and {wanted.spares} spare" if wanted.spares else ""
    words = ["jurymast", "submit", "--cluster", "local", "--nodes", str(wanted.nodes)]
    words += ["--spares", str(wanted.spares), "--", str(SCRIPT), *wanted.arguments]
    screen.write(
        "A small GPT is trained on the source code of Python's standard library, "
        f"on {count(wanted.nodes, 'node')}{spare} simulated on this machine."
    )
    if with_fault:
        screen.write("On the way, a rank is killed, and then a node with all that runs on it.")
    screen.write(f"$ {shlex.join(words)}\n")


def _report(directory: RunDirectory, page: Path, *, quiet: bool) -> None:
    """Run `jurymast report`, as a page and, unless `quiet`, as text."""
    from jurymast.cli.report import command as report

    page.parent.mkdir(mode=0o700, exist_ok=True)
    report.main([str(directory.root), "--html", str(page)], standalone_mode=False)
    if not quiet:
        echo()
        report.main([str(directory.root)], standalone_mode=False)


def _point_to(screen: Screen, directory: RunDirectory, page: Path, *, kept: bool) -> None:
    from jurymast.demo import can_open_a_browser

    screen.write(f"\nreport as an HTML page: {page}")
    if kept:
        screen.write(f"run directory: {directory.root} (RUN for jurymast status, events and logs)")
    else:
        screen.write(
            "the run directory is removed; with --keep it stays, for jurymast status, events and logs"
        )
    if can_open_a_browser():
        webbrowser.open(page.as_uri())
