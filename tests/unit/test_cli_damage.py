"""What commands say of runs that are not ours, are cut short, or are damaged: one line, never a traceback."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jurymast.cli.main import main
from jurymast.core.state import events as ev
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory
from support.commands import RUN, Place, swapped

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
        capsys.readouterr()
        os.seteuid(NOBODY)
        try:
            yield place
        finally:
            os.seteuid(0)


SUBMIT = ["submit", "--dry-run", "--", "train.py"]


def test_other_peoples_runs_are_passed_over(among_others: Place, capsys: pytest.CaptureFixture[str]) -> None:
    def told(command: str, *words: str) -> Any:
        assert main([command, "--json", *words]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    assert [row["directory"] for row in told("ps", "--all")] == [str(among_others.runs / MINE)]
    assert {row["runs"] for row in told("nodes", "--all")} == {1}
    assert told("status", MINE)["state"] == "succeeded"
    assert " of 1 earlier run," in told(*SUBMIT)["plan"]["earlier_text"]


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
    done = place.run("status", str(place.bin))
    assert done.returncode == 67
    assert f"{place.bin} is not a run directory: it has no plan.json" in done.stderr
    assert place.json("ps") == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is damaged: not JSON"),
        ('{"run": "x"}', "is damaged: a value"),
        ("[]", "is damaged: a value"),
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


@pytest.mark.parametrize(
    "values", [{"submitted_at": 1e308}, {"submitted_at": -1.0}, {"active": -3}, {"spares": 10**9}]
)
@pytest.mark.parametrize("command", ["status", "report", "events", "checkpoints"])
def test_a_plan_with_numbers_that_cannot_be_is_damaged(
    place: Place, command: str, values: dict[str, float]
) -> None:
    directory = place.story(swapped())
    directory.plan_file.write_text(json.dumps({**json.loads(directory.plan_file.read_text()), **values}))
    done = place.run(command, RUN)
    assert (done.returncode, "Traceback" in done.stderr) == (73, False)
    assert "is damaged: a value of the plan is missing or wrong: Expected" in done.stderr
    assert next(iter(values)) in done.stderr


def test_a_full_disk_at_submit_leaves_no_directory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(place.runs / "new")

    def full(path: Path, data: bytes, *, durable: bool = True) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jurymast.rundir.write_atomically", full)
    with pytest.raises(RunDirectoryError, match="No space left"):
        directory.create()
    assert not directory.root.exists()


# Journals of which something is missing.


def two_epochs(place: Place) -> RunDirectory:
    story = swapped(finished=False)
    story.feed(ev.SupervisorStarted(t=story.t, epoch=2, node="n2"))
    return place.story(story.stepped(70).finished())


def shown(place: Place, says: str) -> None:
    """By the views, and as data."""
    assert any(says in text for text in place.json("status", RUN)["warnings"])
    assert any(says in text for text in place.json("report", RUN)["warnings"])
    for command in ("status", "report"):
        assert f"warning    {says}" in place.good(command, RUN)
    assert says in place.run("events", RUN).stderr


def test_a_whole_journal_is_not_warned_of(place: Place) -> None:
    two_epochs(place)
    told = place.run("events", RUN)
    assert (told.returncode, told.stderr) == (0, "")
    assert not any("journal" in text or "epoch" in text for text in place.json("status", RUN)["warnings"])


def test_the_first_epoch_is_gone(place: Place) -> None:
    directory = two_epochs(place)
    next(directory.journal_files()).unlink()
    shown(place, "the journal begins with epoch-000002.jsonl: what came before is not shown")


def test_the_first_epoch_lost_its_beginning(place: Place) -> None:
    first, _ = two_epochs(place).journal_files()
    lines = first.read_bytes().splitlines(keepends=True)
    first.write_bytes(b"".join(lines[5:]))
    shown(place, "epoch-000001.jsonl: 5 entries missing")


def test_the_first_epoch_ends_within_a_line(place: Place) -> None:
    first, _ = two_epochs(place).journal_files()
    lines = first.read_bytes().splitlines()
    first.write_bytes(b"\n".join(lines)[:-9])
    shown(place, f"epoch-000001.jsonl: line {len(lines)} could not be read")


def test_garbage_in_the_last_file(place: Place) -> None:
    _, last = two_epochs(place).journal_files()
    lines = last.read_bytes().splitlines(keepends=True)
    lines[1:1] = [b"\x00\xff garbage\n", b"[]\n"]
    last.write_bytes(b"".join(lines))
    shown(place, "epoch-000002.jsonl: lines 2, 3 could not be read")
    view = place.json("status", RUN)
    assert (view["state"], view["step"]) == ("succeeded", 70), "the rest counts"


def test_no_journal_at_all(place: Place) -> None:
    directory = two_epochs(place)
    for path in list(directory.journal_files()):
        path.unlink()
    place.program("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    shown(place, "there is no journal in ")
    assert place.json("report", RUN)["until"] is None
    assert "1970" not in place.good("report", RUN)
    page = place.root / "page.html"
    assert place.run("report", RUN, "--html", str(page)).returncode == 0
    assert "1970" not in page.read_text()


# Steps that are in no checkpoint.


def test_steps_that_the_end_lost_are_told(place: Place) -> None:
    place.story(swapped())
    says = "the last 20 steps are in no checkpoint (the newest is step 40)"
    for command in ("status", "report"):
        assert any(says in text for text in place.json(command, RUN)["warnings"])


def test_an_end_that_was_saved_is_not_warned_of(place: Place) -> None:
    place.story(swapped(finished=False).saved(60).finished())
    assert place.json("report", RUN)["warnings"] == []
