"""Nothing is imported from the directory in which a command, or one of our processes, is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jurymast import interpreter
from jurymast.cli.main import COMMANDS
from jurymast.interpreter import AWAY, RUN, run_code, run_module
from jurymast.script import shims

ROOT = Path(__file__).resolve().parents[2]
# Modules that commands and their processes import: Python's own, packages, those that are missing where no
# GPU is, and ours.
NAMES = [
    "json", "queue", "yaml", "torch", "pynvml", "click", "msgspec", "psutil", "logging", "asyncio",
    "argparse", "pathlib", "tempfile", "random", "secrets", "xxhash", "rich", "pydantic", "numpy", "jinja2",
    "submitit", "fsspec", "s3fs", "safetensors", "readline",
]  # fmt: skip
# And what Python itself imports when it is started, from where `python -m` and PYTHONPATH lead it.
FIRST = ["jurymast", "usercustomize", "sitecustomize", "re", "runpy", "contextlib"]


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory full of modules that leave a mark when they are imported, and of a probe that does."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in NAMES:
        plant(folder, name)
    info = folder / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jurymast.probes]\nevil = evil:probe\n")
    plant(folder, "evil")
    (folder / "job").mkdir(mode=0o700)  # a run directory: for one that is not there, processes wait
    (folder / "job" / "plan.json").write_text("{")
    return folder


def plant(folder: Path, name: str) -> None:
    mark = folder.parent / f"ran-{name}"
    (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise ImportError({name!r})\n")


def marks(hostile: Path) -> list[str]:
    return sorted(path.name for path in hostile.parent.glob("ran-*"))


def start(hostile: Path, command: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "HOME": str(hostile.parent), **more}
    return subprocess.run(
        command, cwd=hostile, env=environment, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip


def test_the_trap_works(hostile: Path) -> None:
    start(hostile, [sys.executable, "-c", "import json"])
    assert marks(hostile) == ["ran-json"]


# What each command is called with, so that it does as much as it can without a run.
WORDS = {
    "health": ["--json"], "doctor": ["--json"], "submit": ["--local", "--dry-run", "--", "-m", "nothing"],
    "simulate": ["--help"], "demo": ["--help"], "policy": ["show"], "completion": ["bash"],
    "plan": ["--nodes", "2"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_from_the_directory_it_is_called_in(hostile: Path, command: str) -> None:
    for name in FIRST:
        plant(hostile, name)
    program = str(Path(sys.executable).with_name("jurymast"))
    start(hostile, [program, command, *WORDS.get(command, [])])
    assert marks(hostile) == []


@pytest.mark.parametrize("words", [["health", "--json"], ["doctor", "--json"], ["ps"]], ids=lambda w: w[0])
@pytest.mark.parametrize("way", ["-m", "-um", "an empty part", "a dot"])
def test_nor_where_python_itself_looks_there_first(hostile: Path, words: list[str], way: str) -> None:
    if way.startswith("-"):
        start(hostile, [sys.executable, way, "jurymast", *words])
    else:
        (hostile / "click.py").unlink()  # what is there when the command's own first line is run is Python's
        path = {"an empty part": f"/nowhere:{ROOT / 'launcher'}:", "a dot": f"{ROOT / 'launcher'}:."}[way]
        program = str(Path(sys.executable).with_name("jurymast"))
        start(hostile, [program, *words], PYTHONPATH=path)
    assert marks(hostile) == []


@pytest.mark.parametrize("module", ["jurymast.health.once", "jurymast_nvidia", "jurymast.sim.cluster"])
@pytest.mark.parametrize("way", [["-m"], ["-I", "-m"]], ids=" ".join)
def test_nor_what_an_administrator_starts_by_hand(hostile: Path, way: list[str], module: str) -> None:
    words = ["--plans", "1"] if module == "jurymast.sim.cluster" else []
    start(hostile, [sys.executable, *way, module, *words], PYTHONHASHSEED="0")
    assert marks(hostile) == []


@pytest.mark.parametrize("command", ["ps", "doctor", "nodes"])
def test_no_program_is_started_from_there(hostile: Path, command: str) -> None:
    """By an empty or relative part of PATH, also where no other part has the program."""
    for name in ("squeue", "scontrol", "sinfo", "sbatch", "sacctmgr", "munge", "py-spy", "rm", "env"):
        (hostile / name).write_text(f"#!/bin/sh\n: > ../ran-{name}\n")
        (hostile / name).chmod(0o755)
    (hostile.parent / "runs").mkdir()
    environment = {"JURYMAST_RUNS": str(hostile.parent / "runs"), "PATH": ":.:../hostile:/usr/bin:/bin:"}
    done = start(hostile, [str(Path(sys.executable).with_name("jurymast")), command], **environment)
    assert "Traceback" not in done.stderr
    assert marks(hostile) == []


PROCESSES = [
    "jurymast.agent", "jurymast.supervisor", "jurymast.supervisor.standby", "jurymast.storage",
    "jurymast.storage.export", "jurymast.health", "jurymast.preflight", "jurymast.cluster.batch",
    "jurymast.cluster.lift", "jurymast.script", "jurymast.sim.cluster",
]  # fmt: skip


@pytest.mark.parametrize("module", PROCESSES)
def test_no_process_of_ours_imports_from_its_directory(hostile: Path, module: str) -> None:
    for name in FIRST:
        plant(hostile, name)
    start(hostile, run_module(module, "job", "job"), PYTHONHASHSEED="0")
    assert marks(hostile) == []


def test_nor_by_a_relative_path(hostile: Path) -> None:
    path = f":.:../hostile:{ROOT / 'launcher'}"
    start(hostile, run_module("jurymast.agent", "job"), PYTHONPATH=path)
    assert marks(hostile) == []


@pytest.mark.parametrize("module", ["jurymast.agent", "jurymast.script"])
def test_nor_does_one_in_another_python(hostile: Path, module: str) -> None:
    other = hostile.parent / "bin" / "python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    command = run_module(module, "job", "job", python=str(other))
    start(hostile, command, PYTHONPATH=f".:{ROOT / 'launcher'}:")
    for name in FIRST:
        plant(hostile, name)
    start(hostile, command)
    assert marks(hostile) == []


def test_text_that_is_run_imports_nothing_from_there_either(hostile: Path) -> None:
    for python in ("", "/usr/bin/python3"):
        start(hostile, run_code("import json, queue", python=python), PYTHONPATH=":")
    assert marks(hostile) == []


def test_many_runs_are_read_by_processes_that_import_nothing_from_there(hostile: Path) -> None:
    """Whatever way of starting processes is the usual one: from Python 3.14 on it is a new Python."""
    runs = hostile.parent / "runs"
    for name in ("pickle", "socket", "selectors"):  # which a new one imports before it is told where from
        plant(hostile, name)
    for number in range(3):
        (runs / f"run-{number}").mkdir(parents=True)
    code = (
        "import multiprocessing, os, pathlib; multiprocessing.set_start_method('spawn'); "
        "from jurymast.report import fleet; fleet.MANY = 1; os.sched_getaffinity = lambda pid: {0, 1}; "
        f"print(fleet.read_fleet([pathlib.Path({str(runs)!r})]).copies)"
    )
    assert start(hostile, run_code(code)).stdout == "0\n"
    assert marks(hostile) == []


def test_isolation_reaches_the_children(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's `python -I` reads no variable, and nor do the probes that it starts."""
    program = "from jurymast.interpreter import run_module as r; print(r('jurymast.health')[1:2])"
    assert start(hostile, [sys.executable, "-I", "-c", program]).stdout == "['-I']\n"
    assert start(hostile, [sys.executable, "-s", "-c", program]).stdout == "['-s']\n"
    elsewhere = hostile.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text((hostile / "json.py").read_text())
    start(hostile, [sys.executable, "-I", "-m", "jurymast.health.once"], PYTHONPATH=str(elsewhere))
    assert marks(hostile) == []


def test_a_process_has_the_package_of_the_one_that_started_it(tmp_path: Path) -> None:
    """Also if that was found in the directory of a checkout, and another one is installed."""
    package = tmp_path / "checkout" / "jurymast"
    package.mkdir(parents=True)
    for name in ("__init__.py", "interpreter.py"):
        (package / name).write_text((Path(interpreter.__file__).parent / name).read_text())
    (package / "child.py").write_text("import json; print(__file__)\n")
    (package / "parent.py").write_text(
        "import subprocess; from jurymast.interpreter import run_module\n"
        "subprocess.run(run_module('jurymast.child'), cwd='/', check=True)\n"
    )
    plant(package.parent, "json")
    done = start(package.parent, [sys.executable, "-m", "jurymast.parent"])
    assert done.stdout.strip() == str(package / "child.py"), done.stderr
    assert marks(package.parent) == []


def test_a_directory_that_is_gone_stops_no_process(tmp_path: Path) -> None:
    command = run_code("pass")
    code = (
        f"import os, subprocess, sys\nos.rmdir(os.getcwd())\nsys.exit(subprocess.run({command!r}).returncode)"
    )
    gone = tmp_path / "gone"
    gone.mkdir()
    done = start(gone, [sys.executable, "-c", code])
    assert (done.returncode, done.stderr) == (0, "")


def test_the_hook_of_a_batch_script_does_the_same() -> None:
    text = (Path(shims.__file__).parent / "hook" / "sitecustomize.py").read_text()
    values: dict[str, str] = {}
    start, end = text.index("RUN_MODULE = ("), text.index("def _launcher")
    exec(text[start:end], values)  # its whole text runs only in a job
    assert values["RUN_MODULE"] == f"{AWAY}{RUN}"


def test_what_a_user_imports_is_found_as_without_us(hostile: Path) -> None:
    """A script that imports jurymast, or is a module that does, finds its own files first."""
    (hostile / "json.py").write_text("mine = True\n")
    (hostile / "__init__.py").write_text("")
    (hostile / "train.py").write_text("import jurymast, jurymast.cli, json; print(json.mine)\n")
    for words in (["train.py"], ["-m", "train"], ["-m", "train", "-m", "jurymast"]):
        assert start(hostile, [sys.executable, *words]).stdout == "True\n"
    package = hostile / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import jurymast.cli, json; print(json.mine)\n")
    (package / "__main__.py").write_text("")
    assert start(hostile, [sys.executable, "-m", "package", "jurymast"]).stdout == "True\n"
