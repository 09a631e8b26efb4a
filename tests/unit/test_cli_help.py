"""What help says is true: its examples are commands that we take."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path

import click
import pytest

from jurymast.cli.main import COMMANDS

FOUND = {name: importlib.import_module(f"jurymast.cli.{name}").command for name in COMMANDS}
EXAMPLES = [
    (name, line.strip())
    for name, command in FOUND.items()
    for line in (command.epilog or "").splitlines()
    if line.startswith("  jurymast ")
]


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_is_taken(name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for script in ("job.sbatch", "train.py"):
        Path(script).write_text("#!/bin/sh\n")
    _, called, *words = shlex.split(line)
    assert called == name
    FOUND[name].make_context(name, words).close()


def test_the_commands_that_people_begin_with_have_examples() -> None:
    assert {"submit", "status", "logs", "report", "checkpoints", "plan"} <= {name for name, _ in EXAMPLES}


def test_help_shows_them_line_by_line() -> None:
    command: click.Command = FOUND["submit"]
    shown = command.get_help(click.Context(command, info_name="jurymast submit"))
    assert [line for line in shown.splitlines() if line.lstrip().startswith("jurymast submit ")] == [
        f"    {line}" for name, line in EXAMPLES if name == "submit"
    ]
