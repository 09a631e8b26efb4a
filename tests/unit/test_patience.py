"""Commands and storage that hangs: they end with an error, or say that they wait where a run is followed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from jurymast import foreign
from jurymast.report.liveness import record_cancel
from support.commands import RUN, Place, swapped
from support.hanging import hanging

# As `jurymast`, but that nobody has to wait for half a minute.
IMPATIENT = """
import sys
from jurymast.cli import main, patience
patience.LIMIT_S = 3.0
sys.exit(main.main())
"""
NO_ANSWER = "its storage has not answered for 3 s"
PLAN, JOURNAL = "plan.json", "journal/epoch-000001.jsonl"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def impatient(place: Place, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Ended at the latest with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", IMPATIENT, *words], cwd=place.root, env=place.environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


# A file of a run, or a directory, and a command that looks into it.
LOOKS = [
    (PLAN, ("status", RUN)),
    (PLAN, ("submit", "train.py")),
    (JOURNAL, ("report", RUN)),
    (JOURNAL, ("events", RUN, "--follow")),
    (JOURNAL, ("nodes",)),
    ("attempt", ("logs", RUN)),
    ("checkpoints", ("checkpoints", RUN, "verify")),
    ("slurm/jobs", ("cancel", RUN)),
    ("..", ("ps",)),
]


def test_a_command_ends_where_storage_hangs(tmp_path: Path) -> None:
    with ExitStack() as held:
        started = []
        for number, (what, words) in enumerate(LOOKS):
            folder = tmp_path / str(number)
            folder.mkdir()
            place = Place(folder)
            run = place.story(swapped(finished="cancel" not in words))
            (place.root / "train.py").touch()
            run.attempt_file.write_text("1")
            for name in ("squeue", "sbatch"):
                place.program(name, "exit 1")
            path = Path(os.path.normpath(run.root / what))
            held.enter_context(hanging(path))
            started.append((path, held.enter_context(impatient(place, *words))))
        for path, command in started:
            _, told = command.communicate(timeout=120)
            assert told == f"jurymast: error: {path}: {NO_ANSWER}\n"
            assert command.returncode == 73


def test_a_run_is_followed_beyond_storage_that_hangs_for_a_while(place: Place) -> None:
    run = place.story(swapped(finished=False))
    log = run.rank_log(2, 0)
    log.parent.mkdir(parents=True)
    log.write_text("one\n")
    run.attempt_file.write_text("2")
    place.program("squeue", "echo 'RUNNING|None'")
    with impatient(place, "logs", RUN, "--follow") as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline() == "[r0] one\n"
        with hanging(log):
            told = command.stderr.readline()
            assert told == f"jurymast: note: {log}: {NO_ANSWER}; waiting for it\n"
        with log.open("a") as file:
            file.write("two\n")
        assert command.stdout.readline() == "[r0] two\n"
        record_cancel(run, by="ada")
        command.communicate(timeout=120)
    assert command.returncode == 0


def test_what_is_waited_for_longest_is_known(tmp_path: Path) -> None:
    assert foreign.unanswered() == ("", 0.0)
    with foreign.asking("outer"):
        with foreign.asking("inner"):
            assert foreign.unanswered()[0] == "inner"
        foreign.names(tmp_path)
        assert foreign.unanswered()[0] == "outer"
    with pytest.raises(FileNotFoundError):
        foreign.read(tmp_path / "nothing", 10)
    with foreign.own_directory(tmp_path) as held, foreign.asking(held / "a"):
        assert foreign.unanswered()[0] == str(tmp_path / "a")
    assert foreign.unanswered() == ("", 0.0)
