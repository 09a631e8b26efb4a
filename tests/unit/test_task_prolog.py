"""What runs before and after each task of Slurm's does so for each rank that stands for one, and changes its
environment as Slurm would have it: compared with srun 22.05, 24.11 and 26.05 by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jurymast.cluster import control
from jurymast.script import step
from jurymast.script.srun import parse
from jurymast.worker import epilog
from jurymast.worker.prolog import PrologError, applied, run

PROLOG = """#!/bin/sh
echo "print   hello $SLURM_PROCID $SLURM_SCRIPT_CONTEXT"
echo "export A = b$SLURM_PROCID"
echo "  export C=d"
echo "export D="
echo "unset GONE  "
echo "noise"
echo "export"
echo on stderr >&2
cat
exit ${FAILS-0}
"""


@pytest.fixture
def prolog(tmp_path: Path) -> str:
    path = tmp_path / "prolog"
    path.write_text(PROLOG)
    path.chmod(0o700)
    return str(path)


def test_a_prologs_lines_change_its_ranks_variables(prolog: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = {"SLURM_PROCID": "3", "GONE": "1", "KEPT": "1", "PATH": os.environ["PATH"]}
    after = run([prolog], before)
    assert after == {
        "SLURM_PROCID": "3", "KEPT": "1", "PATH": os.environ["PATH"], "A": " b3", "D": "",
        "SLURM_SCRIPT_CONTEXT": "prolog_task",
    }  # fmt: skip
    assert capfd.readouterr() == ("hello 3 prolog_task\n", "")


def test_the_second_prolog_finds_what_the_first_has_exported(tmp_path: Path) -> None:
    for name, text in (("first", "echo export A=1"), ("second", "echo export B=$A$A")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    after = run([str(tmp_path / "first"), str(tmp_path / "second")], {})
    assert (after["A"], after["B"]) == ("1", "11")


def test_a_failed_prolog_is_its_tasks_end(prolog: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    programs = {prolog: 3, str(tmp_path / "nowhere"): 1, str(tmp_path / "plain"): 1, "prolog": 1}
    codes = {}
    for program in programs:
        with pytest.raises(PrologError, match="the task prolog") as failed:
            run([program], {"FAILS": "3", "PATH": os.environ["PATH"]})
        codes[program] = failed.value.code
    assert codes == programs


def test_lines_without_a_name_or_in_other_words_mean_nothing() -> None:
    variables = {"A": "1"}
    assert applied(["export =x", "unset", "unset B", "exportA=2", "print", ""], variables) == [""]
    assert variables == {"A": "1"}


@pytest.mark.parametrize(
    ("typed", "variable", "site", "found"),
    [
        ("--task-prolog=/own", "", "(null)", ("/own",)),
        ("--task-prolog=/own", "/other", "/etc/site.sh", ("/etc/site.sh", "/own")),
        ("", "/other", "(null)", ("/other",)),
        ("--task-prolog=", "/other", "/etc/site.sh", ("/etc/site.sh",)),
        ("", "", "(null)", ()),
    ],
)
def test_the_sites_prolog_is_before_the_users(
    typed: str, variable: str, site: str, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_config", lambda: f"TaskEpilog = /e\nTaskProlog   = {site}\nTmpFS = /tmp\n")
    srun = parse([*typed.split(), "python", "train.py"])
    assert srun is not None
    assert step.prologs(srun, {"SLURM_TASK_PROLOG": variable} if variable else {}) == found


@pytest.mark.parametrize(
    ("typed", "variable", "own"),
    [("--task-epilog=/own", "/other", "/own"), ("", "/other", "/other"), ("--task-epilog=", "/other", "")],
)
def test_the_users_epilog_is_before_the_sites(
    typed: str, variable: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_config", lambda: "TaskEpilog = /e\nTaskProlog   = /p\nTmpFS = /tmp\n")
    srun = parse([*typed.split(), "python", "train.py"])
    assert srun is not None
    assert step.epilogs(srun, {"SLURM_TASK_EPILOG": variable}) == (own, "/e")


def test_epilogs_run_in_turn_and_say_how_they_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    monkeypatch.delattr(os, "pidfd_open", raising=False)  # as in Pythons that are built for many systems
    noted = tmp_path / "noted"
    note = f'echo "$0 $SLURM_PROCID $SLURM_SCRIPT_CONTEXT" >> {noted}; echo no; echo yes >&2'
    first, second = program("first", f"{note}; exit 3"), program("second", note)
    epilog.run(first, second, {"SLURM_PROCID": "2"})
    assert noted.read_text() == f"{first} 2 epilog_task\n{second} 2 epilog_task\n"
    assert capfd.readouterr() == ("", f"yes\nthe task epilog {first} failed with 3\nyes\n")
    epilog.run("here", str(tmp_path / "missing"), {})
    assert capfd.readouterr().err == (
        "the task epilog here cannot be run: its path does not begin with /\n"
        f"the task epilog {tmp_path}/missing cannot be run: No such file or directory\n"
    )
    monkeypatch.setattr(epilog, "USERS_LIMIT_S", 0.1)
    epilog.run(program("hangs", "exec sleep 3600"), second, {"SLURM_PROCID": "3"})
    assert noted.read_text().endswith(f"{second} 3 epilog_task\n")
    assert "hangs was killed after 0.1 s\nyes\n" in capfd.readouterr().err
