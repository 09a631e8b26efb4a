"""`jurymast policy`: write a policy file, check one, or show the policy in force."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from jurymast.cli.options import resolved_policy, show_json
from jurymast.cli.output import echo
from jurymast.errors import PolicyError, UsageError


@click.group(invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Create, check or show a policy."""
    if context.invoked_subcommand is None:
        echo(context.get_help())


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Name every mistake in FILE, with its line."""
    resolved_policy(file)
    echo(f"{file}: valid")


@command.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--origin", is_flag=True, help="Also show where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path | None, origin: bool, as_json: bool) -> None:
    """Print the policy in force with FILE: the site's, the file's and the defaults."""
    resolved = resolved_policy(file)
    if not as_json:
        echo(resolved.yaml(origins=origin), nl=False)
        return
    from jurymast.policy.resolve import spelled

    values: dict[str, object] = {"values": resolved.values}
    if origin:
        values["origins"] = {spelled(key): str(place) for key, place in resolved.origins.items()}
    show_json(values)


@command.command()
def schema() -> None:
    """Print the JSON Schema of policy files, for editors."""
    from jurymast.policy.model import schema_text

    echo(schema_text(), nl=False)


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
