"""`jurymast policy`: check a policy file, or show what it comes to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from jurymast.policy.resolve import Resolved


def _resolved(file: Path | None) -> Resolved:
    from jurymast.policy.load import file_layers, site_layers
    from jurymast.policy.resolve import resolve

    layers = site_layers(os.environ)
    if file is not None:
        layers += file_layers(file, str(file))
    return resolve(layers)


@click.group()
def command() -> None:
    """Check a policy file, or show what it comes to."""


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Name every mistake in FILE, with its line."""
    _resolved(file)
    click.echo(f"{file}: good")


@command.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(file: Path | None, origin: bool, as_json: bool) -> None:
    """Print the policy in force with FILE: the site's, the file's and the defaults."""
    resolved = _resolved(file)
    if not as_json:
        click.echo(resolved.yaml(origins=origin), nl=False)
        return
    import json

    from jurymast.policy.load import spelled

    values: dict[str, object] = {"values": resolved.values}
    if origin:
        values["origins"] = {spelled(key): place for key, place in resolved.origins.items()}
    click.echo(json.dumps(values, indent=1))
