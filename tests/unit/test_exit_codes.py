"""One exit code, one cause: over all commands, and as the documents have it."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import click
import pytest

from jurymast import errors
from jurymast.cli import main as cli
from jurymast.errors import ClusterUnavailableError, JurymastError
from support.commands import LAUNCHER

TABLE = Path(__file__).parents[2] / "docs" / "failures.md"
# Not by an error of ours: done, Ctrl-C, and a reader that is gone.
PLAIN = {0, 130, 141}
# Commands whose answer is their exit code.
ANSWERS = {"doctor.py": {0, 1}}


def causes() -> list[type[JurymastError]]:
    """The errors with a code of their own; others are kinds of these."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, JurymastError) and "exit_code" in vars(kind)]


def test_each_cause_has_its_own_code() -> None:
    shared = {code for code, number in Counter(kind.exit_code for kind in causes()).items() if number > 1}
    assert shared == set()
    assert all(64 <= kind.exit_code < 128 for kind in causes())
    assert "exit_code" not in vars(errors.ControllerAwayError)
    assert errors.ControllerAwayError.exit_code == ClusterUnavailableError.exit_code


def test_the_table_has_each_code_once() -> None:
    rows = [int(code) for code in re.findall(r"^\| (\d+) \| ", TABLE.read_text(), re.MULTILINE)]
    assert sorted(rows) == sorted([*PLAIN, *(kind.exit_code for kind in causes())])
    assert rows == sorted(rows)


def test_commands_name_no_codes_of_their_own() -> None:
    """They raise the error, or name it: a number in the code would be a second table."""
    for path in (LAUNCHER / "jurymast" / "cli").rglob("*.py"):
        found = set[object]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.search(r"(\bexit|SystemExit)$", ast.unparse(node.func)):
                found |= {one.value for one in node.args if isinstance(one, ast.Constant)}
            if isinstance(node, ast.FunctionDef) and node.name == "command":
                ends = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value]
                ways = [[end.body, end.orelse] if isinstance(end, ast.IfExp) else [end] for end in ends]
                found |= {one.value for way in ways for one in way if isinstance(one, ast.Constant)}
        assert found <= ANSWERS.get(path.name, {0}), path


def test_an_internal_error_is_none_of_the_script_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    def command() -> None:
        raise ZeroDivisionError("by a mistake")

    module = ModuleType("jurymast.cli.mistaken")
    module.command = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "mistaken", "")
    assert cli.main(["mistaken"]) == JurymastError.exit_code
    told = capsys.readouterr().err
    assert "in command\n" in told
    assert "jurymast: error: internal error: ZeroDivisionError('by a mistake')" in told
