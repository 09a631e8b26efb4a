"""What commands say of runs that are not ours, are cut short, or are damaged: one line, never a traceback."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jurymast.cli.main import main
from jurymast.core.settings import RunPlan
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory
from support.commands import RUN, Place, crash_loop, swapped

NOBODY = 65534
MINE = "20261118-100000-mine-bbbb"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Other people's runs in the same runs directory.


@pytest.fixture
def among_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Place]:
    """This process is nobody, with one run of its own beside one of root's."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(dir="/tmp") as root:  # pytest's own is root's alone
        place = Place(Path(root))
        for name, value in place.environment().items():
            monkeypatch.setenv(name, value)
        place.story(swapped())
        mine = place.story(swapped(), MINE).root
        for path in (mine, *mine.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        (place.root / "train.py").touch()
        place.root.chmod(0o755)
        place.runs.chmod(0o1777)
        monkeypatch.chdir(place.root)
        # Modules are imported when they are needed, and the interpreter may be root's alone.
        for words in (["ps"], ["report", MINE], ["nodes"], ["cancel", MINE], ["checkpoints", MINE], SUBMIT):
            main(list(words))
        (place.runs / ".past-runs.json").unlink()
        capsys.readouterr()
        os.seteuid(NOBODY)
        try:
            yield place
        finally:
            os.seteuid(0)


SUBMIT = ["submit", "--dry-run", "--json", "--", "train.py"]


def test_other_peoples_runs_are_passed_over(among_others: Place, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["ps", "--all"], ["nodes", "--all"], ["status", MINE], SUBMIT):
        assert main(list(words)) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        assert RUN not in out
        assert MINE in out or words[0] in ("nodes", "submit")
        if words[0] == "submit":
            assert "of 1 earlier run," in json.loads(out)["plan"]["earlier_text"]


@pytest.mark.parametrize("command", ["status", "cancel", "report", "checkpoints"])
def test_whose_run_it_is_that_one_may_not_see(
    among_others: Place, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    for name in (RUN, str(among_others.runs / RUN)):
        assert main([command, name]) == 73
        assert f"{RUN} belongs to root" in capsys.readouterr().err


# Directories that are no run, or a damaged one.


def test_a_directory_without_a_plan_is_not_called_missing(place: Place) -> None:
    (place.runs / "cut-short").mkdir()
    done = place.run("status", "cut-short")
    assert done.returncode == 73
    assert "cut-short has no plan.json" in done.stderr
    assert place.json("ps") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged: no JSON"),
        ('{"run": "x"}', "is damaged: something"),
        ("[]", "is damaged: something"),
    ],
)
def test_a_damaged_plan_is_told_in_words(place: Place, text: str, says: str) -> None:
    directory = place.story(swapped())
    directory.plan_file.write_text(text)
    done = place.run("status", RUN)
    assert done.returncode == 73
    assert says in done.stderr
    assert "__init__" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_at_submit_leaves_no_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(place.runs / "new")

    def full(path: Path, data: bytes, *, durable: bool = True) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jurymast.rundir.write_atomically", full)
    with pytest.raises(RunDirectoryError, match="No space left"):
        directory.create()
    assert not directory.root.exists()
