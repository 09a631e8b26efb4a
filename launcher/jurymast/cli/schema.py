"""`jurymast schema`: the JSON Schema of what a command prints with --json, and of policy files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from jurymast.cli.options import examples, show
from jurymast.cli.output import echo
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import UsageError


def _policy() -> dict[str, Any]:
    from jurymast.policy.model import schema

    return schema()


def _site_policy() -> dict[str, Any]:
    from jurymast.policy.site import site_schema

    return site_schema()


def _journal() -> dict[str, Any]:
    from jurymast.cli.schemas import journal_schema

    return journal_schema()


# What is no command's output: what it is of, and how it is made.
OTHERS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "journal": ("the further fields of events and decisions", _journal),
    "policy": ("a policy file", _policy),
    "site-policy": ("a policy file of a site", _site_policy),
}


def _complete(context: click.Context, option: click.Parameter, begin: str) -> list[CompletionItem]:
    from jurymast.cli.schemas import outputs

    return [CompletionItem(name) for name in (*outputs(), *OTHERS) if name.startswith(begin)]


@click.command(epilog=examples("jurymast schema", "jurymast schema status"))
@click.argument("name", required=False, shell_complete=_complete)
def command(name: str | None) -> None:
    """Print the JSON Schema (draft 2020-12) of NAME, or else list all names."""
    from jurymast.cli.schemas import commands_of, output_schema, outputs
    from jurymast.report.text import Table

    if name is None:
        rows = [(one, ", ".join(commands_of(one))) for one in outputs()]
        rows += [(one, what) for one, (what, _) in OTHERS.items()]
        show([Table(("NAME", "OF"), rows, wrap=False)])
        return
    if name in OTHERS:
        found = OTHERS[name][1]()
    elif name in outputs():
        found = output_schema(name)
    else:
        near = did_you_mean(name, [*outputs(), *OTHERS])
        raise UsageError(f"there is no schema {name}{near}", hint="jurymast schema lists all")
    # As in configs/*.schema.json.
    echo(json.dumps(found, indent=2))
