"""The `jurymast` command. A subcommand's module is imported when it is called, so that help is quick."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

import click
from click.shell_completion import CompletionItem

from jurymast.cli import patience
from jurymast.cli.output import echo
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import JurymastError, RunDirectoryError, UsageError

# What each does. Its module in this package has a click command called `command`.
COMMANDS = {
    "submit": "Submit a training run.",
    "resubmit": "Submit a run's command again.",
    "ps": "List my runs.",
    "status": "Show how a run is doing.",
    "events": "Show what happened in a run, and why.",
    "logs": "Print what the ranks wrote.",
    "checkpoints": "List, verify, pin or roll back a run's checkpoints.",
    "report": "Show where a run's time went.",
    "plan": "Estimate failures, cadence, spares and goodput of a run.",
    "cancel": "End a run.",
    "restart": "Restart a run's ranks.",
    "save": "Save a checkpoint of a run now.",
    "drain": "Replace a node of a run by a spare.",
    "nodes": "Show the history of each node over all runs.",
    "pool": "Show the nodes that wait for any of my runs.",
    "fleet": "Show goodput, failures and losses of all runs together.",
    "doctor": "Check whether this site is ready, and what to do if not.",
    "health": "Check this machine with the health probes.",
    "simulate": "Simulate a policy against failures.",
    "demo": "Run a demonstration on this machine.",
    "policy": "Create, check or show a policy.",
    "schema": "Print the JSON Schema of what commands print, and of policies.",
    "completion": "Print the completion script for a shell.",
}


class LazyGroup(click.Group):
    """A group whose commands are looked up in COMMANDS."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"jurymast.cli.{name}").command
        return command

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if words and words[0] not in COMMANDS and not context.resilient_parsing:
            raise UsageError(
                f"there is no command {words[0]}{did_you_mean(words[0], COMMANDS)}", hint="jurymast --help"
            )
        return super().resolve_command(context, words)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [CompletionItem(n, help=text) for n, text in COMMANDS.items() if n.startswith(incomplete)]
        return found or super().shell_complete(context, incomplete)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="RUN is a run id or its beginning, a Slurm job id, a run directory, or `last`.",
)
@click.version_option(package_name="jurymast", message="%(prog)s %(version)s")
def cli() -> None:
    """Submit training runs to Slurm, keep them running through failures, and see where the time went."""


def main(words: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are printed only here."""
    _open_what_is_closed()
    over = patience.begin()
    try:
        words = sys.argv[1:] if words is None else words
        result = cli.main(args=words or ["--help"], prog_name="jurymast", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except JurymastError as error:
        return _complain(str(error), error.hint, error.exit_code)
    except click.UsageError as error:
        place = error.ctx.command_path if error.ctx else "jurymast"
        return _complain(_lowered(error.format_message()), f"{place} --help", UsageError.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _complain("interrupted", "", 130)
    except BrokenPipeError:  # the reader (head, less) has ended
        _drop_output()
        return 141
    except OSError as error:
        _drop_output()
        return _complain(_trouble(error), "", RunDirectoryError.exit_code)
    except Exception as error:
        echo(traceback.format_exc(), err=True)
        return _complain(f"internal error: {error!r}", "please report it", JurymastError.exit_code)
    finally:
        over.set()


def _open_what_is_closed() -> None:
    """Open closed standard streams (`>&-`): Python has no stream for them, and the next file would get their
    number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _drop_output() -> None:
    """Discard the rest of the buffer: otherwise Python would report an error when it flushes at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trouble(error: OSError) -> str:
    """The message for a system error that no command handles itself."""
    try:
        os.getcwd()
    except OSError:
        return "the working directory no longer exists: change to one that does"
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename else f"cannot write the output: {what}"


def _complain(message: str, hint: str, code: int) -> int:
    echo(f"jurymast: error: {message}", err=True)
    if hint:
        echo(f"  hint: {hint}", err=True)
    return code


def _lowered(text: str) -> str:
    return (text[:1].lower() + text[1:]).rstrip(".")
