"""`jurymast policy`: write a policy file, check one, or show the policy in force."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from jurymast.cli.options import json_option, resolved_policy, show_json
from jurymast.cli.output import echo
from jurymast.errors import PolicyError, UsageError
from jurymast.report.asking import user


@click.group(invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Create, check or show a policy."""
    if context.invoked_subcommand is None:
        echo(context.get_help())


@command.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@json_option
def check(files: tuple[Path, ...], as_json: bool) -> int:
    """Name every mistake in each FILE, with its line, or else in those that are in force here.

    A site's file is checked with the files of all its teams.
    """
    from jurymast.policy.checks import problems_in, problems_in_force

    found = {str(file): problems_in(file, os.environ) for file in files} or problems_in_force(os.environ)
    if as_json:
        show_json([{"file": name, "valid": not lines, "problems": lines} for name, lines in found.items()])
        return PolicyError.exit_code if any(found.values()) else 0
    for name, lines in found.items():
        if not lines:
            echo(f"{name}: valid")
    if not found:
        echo("no policy is in force here but the defaults")
    if any(found.values()):
        raise PolicyError("\n".join(line for lines in found.values() for line in lines))
    return 0


@command.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--origin", is_flag=True, help="Also show where each value came from, and which are locked.")
@json_option
@click.option("--user", metavar="NAME", help="As for this user's jobs.  [you]")
@click.option("--account", metavar="NAME", help="As for jobs of this account.  [your default]")
@click.option("--qos", metavar="NAME", help="As for jobs of this QOS.  [your default]")
@click.option("--partition", metavar="NAME", help="As for jobs in this partition.  [Slurm's default]")
def show(file: Path | None, origin: bool, as_json: bool, **given: str | None) -> None:
    """Print the policy in force with FILE: the site's, the team's, yours, the file's and the defaults."""
    from jurymast.cluster.submitter import JobsSubmitter
    from jurymast.policy.resolve import spelled

    resolved = resolved_policy(file, submitter=JobsSubmitter(given), own=given["user"] in (None, user()))
    for one in resolved.contradictions:
        echo(f"jurymast: note: {one}", err=True)
    if not as_json:
        echo(resolved.yaml(origins=origin), nl=False)
        return
    values: dict[str, object] = {"values": resolved.values}
    if origin:
        values["origins"] = {spelled(key): str(place) for key, place in resolved.origins.items()}
        values["locked"] = {
            spelled(key): str(place) for one in resolved.layers for key, place in one.locked.items()
        }
    show_json(values)


@command.command()
def keys() -> None:
    """Print all keys: what each takes, its default, its meaning."""
    from jurymast.policy.model import keys_text

    echo(keys_text(), nl=False)


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
def init(file: Path) -> None:
    """Write a commented policy to FILE, to start from."""
    from importlib.resources import files

    starter = files("jurymast.policy").joinpath("starter.yaml").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(starter)
    except FileExistsError as error:
        raise UsageError(f"{file} already exists", hint="give another name, or remove it") from error
    except OSError as error:
        raise PolicyError(f"{file}: cannot be written: {error.strerror}") from error
    checked = f"jurymast policy check {shlex.quote(str(file))}"
    echo(f"{file}: written; to check it after changes: {checked}")
