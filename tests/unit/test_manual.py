"""The manual has a page for each command, which man can show."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from jurymast.cli.main import COMMANDS
from manual import main, pages


def test_each_command_has_a_page_with_its_options_and_examples() -> None:
    found = dict(pages())
    assert {f"jurymast-{name}.1" for name in COMMANDS} < found.keys()
    assert "jurymast-policy-show.1" in found
    submit = found["jurymast-submit.1"]
    assert ".B \\-\\-spares" in submit
    assert "jurymast submit \\-\\-" in submit.partition(".SH EXAMPLES")[2]
    assert ".B jurymast drain" in found["jurymast.1"]


def test_roff_has_nothing_against_them(tmp_path: Path) -> None:
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    main(str(tmp_path))
    for path in sorted(tmp_path.iterdir()):
        command = ["groff", "-man", "-Tascii", "-ww", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == "", path.name
