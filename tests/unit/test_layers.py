"""Imports go downwards only: the contracts in pyproject.toml hold, and do catch what they are for. And a
class name leads to one file."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the package in `root`/launcher, whatever is installed."""
    code = f"import sys; sys.path.insert(0, {str(root / 'launcher')!r}); {LINT_IMPORTS}"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)


def test_the_layers_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/run/machine.py", "import subprocess", "core decides, and touches nothing"),
        ("core/judges/cadence.py", "import jurymast.journal", "imports go downwards only"),
        ("cluster/batch.py", "from jurymast.supervisor import clock", "imports go downwards only"),
        (
            "agent/keeping.py",
            "from jurymast.checkpoint import contents",
            "only ranks and the storage process name the tensors of an image",
        ),
        ("report/text.py", "import torch", "the agent, the supervisor and the commands start without torch"),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, file: str, line: str, contract: str) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "launcher", tmp_path / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "launcher" / "jurymast" / file, "a") as module:
        module.write(f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert f"{contract} BROKEN" in done.stdout


def test_what_the_system_s_python_runs_needs_nothing_of_jurymast() -> None:
    """The test cluster and root's programs start without the package."""
    for path in (ROOT / "slurm").rglob("*.py"):
        found = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {getattr(node, "module", None) or node.names[0].name for node in found}
        assert not {name for name in names if name.partition(".")[0] == "jurymast"}, path


# What these say about a thing may have the thing's name.
SAID_BETWEEN = (
    "messages.py",
    "core/state/within.py",
    "core/state/events.py",
    "effects.py",
    "core/state/effects.py",
)


def test_a_class_name_leads_to_one_file() -> None:
    package, found = ROOT / "launcher" / "jurymast", defaultdict[str, set[str]](set)
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path.relative_to(package)))
    assert len(found) > 500
    for name, files in found.items():
        things = [file for file in files if not any(part in file for part in SAID_BETWEEN)]
        assert len(things) <= 1, f"{name} stands in {', '.join(sorted(things))}"
