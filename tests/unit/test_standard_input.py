"""What tasks that srun would start read as their standard input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import pytest

from jurymast.script.output import CannotOpen
from jurymast.script.srun import parse
from jurymast.script.standard_input import inputs, warn

# Prints the inputs of two tasks on each of two nodes, with these options of srun.
ASKS = """import json, sys
from pathlib import Path
from jurymast.script.srun import parse
from jurymast.script.standard_input import inputs
print(json.dumps(inputs(parse([*sys.argv[2:], "x"]), {}, ["n1", "n2"], 2, Path(sys.argv[1]))))
"""
READS = """import os, sys
from jurymast.worker import rank
rank._redirect_input(os.environ)
print(sys.stdin.read(), end="")
"""


def asked(folder: Path, *options: str, stdin: IO[str] | int) -> list[str]:
    command = [sys.executable, "-c", ASKS, str(folder), *options]
    done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=True, timeout=60)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def of(*options: str, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    srun = parse([*options, "x"])
    assert srun is not None
    return inputs(srun, environment or {}, ["n1", "n2"], 2, Path("/no/step"))


@pytest.mark.parametrize(
    ("options", "environment", "names"),
    [
        (["-i", "one.txt"], {}, ["one.txt"]),
        (["--input=%j.txt"], {"SLURM_JOB_ID": "17"}, ["17.txt"]),
        (["-i", "t%t.txt"], {}, ["t0.txt", "t1.txt", "t2.txt", "t3.txt"]),
        (["-i", "%N.txt"], {}, ["n1.txt", "n1.txt", "n2.txt", "n2.txt"]),
        ([], {"SLURM_STDINMODE": "one.txt"}, ["one.txt"]),
        (["-i", "none"], {"SLURM_STDINMODE": "one.txt"}, []),
    ],
    ids=str,
)
def test_files_are_sruns(
    options: list[str], environment: dict[str, str], names: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name in ("one", "17", "t0", "t1", "t2", "t3", "n1", "n2"):
        Path(f"{name}.txt").touch()
    assert of(*options, environment=environment) == tuple(str(tmp_path / name) for name in names)


def test_a_file_that_is_not_there_is_an_error_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(CannotOpen, match="could not open stdin file /no/such: No such file"):
        of("-i", "/no/such")


def test_tasks_read_the_rest_of_the_file_that_srun_would_read(tmp_path: Path) -> None:
    """Also srun's place in it counts, as in a loop that reads it line by line."""
    (tmp_path / "given").write_text("first\nsecond\n")
    with open(tmp_path / "given", "rb", buffering=0) as given:
        given.read(6)
        (copy,) = asked(tmp_path, stdin=given.fileno())
        assert given.read() == b"", "as srun, which reads all of it"
    assert Path(copy).read_text() == "second\n"


def test_only_the_task_of_that_number_reads(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("text")
    with open(tmp_path / "given") as given:
        assert asked(tmp_path, "-i", "2", stdin=given) == ["", "", str(tmp_path / "stdin"), ""]


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
def test_what_may_never_end_is_not_read(stdin: int, tmp_path: Path) -> None:
    assert asked(tmp_path, stdin=stdin) == []


@pytest.mark.parametrize(
    ("name", "read"), [("given", "text"), ("", ""), ("gone", "")], ids=["file", "none", "lost"]
)
def test_a_rank_reads_its_file(name: str, read: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("text")
    path = str(tmp_path / name) if name else ""
    done = subprocess.run(
        [sys.executable, "-c", READS], env={"JURYMAST_STDIN": path, "PYTHONPATH": ":".join(sys.path)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == read
    assert ("this rank reads nothing" in done.stderr) is (name == "gone")


def test_a_launchers_ranks_are_said_to_read_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    for option in ("none", "one.txt"):
        srun = parse(["-i", option, "torchrun"])
        assert srun is not None
        warn(srun, {})
    printed = "".join(capfd.readouterr())
    assert printed.count("ranks read nothing from the standard input (srun's --input=one.txt)") == 1
