"""Where a step's program is, as srun finds it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jurymast.script.recognise import is_missing, with_its_path
from jurymast.script.srun import parse


@pytest.mark.parametrize(
    ("typed", "path", "missing"),
    [
        ("./launch.sh x", "{here}/./launch.sh", False),
        ("launch.sh x", "{here}/launch.sh", False),
        ("-D sub ls x", "{here}/sub/ls", False),
        ("ls x", shutil.which("ls"), False),
        ("sub/data x", "sub/data", True),
        ("python0.1 x", "python0.1", True),
        ("--container-image=i python0.1 x", "python0.1", False),
    ],
)
def test_a_steps_program_has_its_whole_path_as_srun_gives_it(
    typed: str, path: str, missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name, mode in (("launch.sh", 0o755), ("sub/ls", 0o755), ("sub/data", 0o644)):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(mode)
    monkeypatch.chdir(tmp_path)
    srun = parse(typed.split())
    assert srun is not None
    assert with_its_path(srun).command == [path.format(here=tmp_path), "x"]
    assert is_missing(srun) is missing
