"""Manual pages of all commands, made from their --help: `.ci/manual.py DIRECTORY`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click

import jurymast
from jurymast.cli.main import COMMANDS, cli

SECTION = 1


def pages() -> Iterator[tuple[str, str]]:
    """(file, text) of each page."""
    yield from _of(cli, None, "jurymast", "Keep training runs going on Slurm.")


def _of(
    command: click.Command, parent: click.Context | None, name: str, text: str
) -> Iterator[tuple[str, str]]:
    """The pages of a command and of its subcommands. `text`: what it does, in one line."""
    context = click.Context(command, info_name=name, parent=parent)
    below: dict[str, tuple[click.Command, str]] = {}
    if isinstance(command, click.Group):
        for each in list(command.commands) or command.list_commands(context):
            child = command.get_command(context, each)
            assert child is not None
            below[each] = child, COMMANDS[each] if command is cli else child.get_short_help_str(200)
    names = [(f"{context.command_path} {each}", what) for each, (_, what) in below.items()]
    yield f"{context.command_path.replace(' ', '-')}.{SECTION}", page(command, context, text, names)
    for each, (child, what) in below.items():
        yield from _of(child, context, each, what)


def page(command: click.Command, context: click.Context, text: str, below: list[tuple[str, str]]) -> str:
    """A page in roff. `text`: what the command does, in one line; `below`: its subcommands."""
    title = context.command_path.replace(" ", "-")
    synopsis = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{title.upper()}" {SECTION} "" "jurymast {jurymast.__version__}" "jurymast"',
        ".SH NAME", f"{_text(title)} \\- {_text(text)}",
        ".SH SYNOPSIS", f".B {_text(context.command_path)}", _text(synopsis),
        *_section("DESCRIPTION", command.help or ""),
    ]  # fmt: skip
    records = [
        record for option in command.get_params(context) if (record := option.get_help_record(context))
    ]
    lines += [".SH OPTIONS"] if records else []
    for option, about in records:
        lines += [".TP", f".B {_text(option)}", _text(about) or "\\&"]
    lines += [".SH COMMANDS"] if below else []
    for name, about in below:
        lines += [".TP", f".B {_text(name)}", _text(about)]
    return "\n".join([*lines, *_section("EXAMPLES", command.epilog or "")]) + "\n"


def _section(title: str, text: str) -> Iterator[str]:
    """The paragraphs of a help text. One that click must not wrap (\\b) keeps its lines."""
    if not text.strip():
        return
    yield f".SH {title}"
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ".PP"
        as_it_is = paragraph.startswith("\b")
        lines = [line for line in paragraph.splitlines() if line.strip("\b ") not in ("", "Examples:")]
        yield from [".nf"] if as_it_is else []
        yield from [_text(line if as_it_is else line.strip()) for line in lines]
        yield from [".fi"] if as_it_is else []


def _text(text: str) -> str:
    """The text with roff's special characters escaped."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main(directory: str) -> None:
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    for name, text in pages():
        (place / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
