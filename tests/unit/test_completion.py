"""What shells are offered when they complete a command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.commands import RUN, Place
from support.stories import Story

JURYMAST = str(Path(sys.executable).with_name("jurymast"))


def offered(words: str, runs: Path) -> list[str]:
    """By bash's way of asking; `words`: the line so far, the last of them is to be completed."""
    asking = {
        "_JURYMAST_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "JURYMAST_RUNS": str(runs),
    }
    done = subprocess.run(
        [JURYMAST], env={**os.environ, **asking}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jurymast sta", ["plain,status"]),
        ("jurymast status 2", [f"plain,{RUN}"]),
        ("jurymast status elsewhere/", ["dir,elsewhere/"]),
        ("jurymast status --w", ["plain,--watch"]),
        ("jurymast submit --partition main jo", ["file,jo"]),
        ("jurymast submit --dr", ["plain,--dry-run"]),
        ("jurymast nothing x", []),
    ],
)
def test_what_is_offered(tmp_path: Path, words: str, expected: list[str]) -> None:
    place = Place(tmp_path)
    place.story(Story().running(3))
    assert offered(words, place.runs) == expected


def test_bash_completes_with_what_is_printed_for_it() -> None:
    program = f"""
    source <({JURYMAST} completion bash)
    COMP_WORDS=({JURYMAST} sub) COMP_CWORD=1
    _jurymast_completion {JURYMAST}
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout.split() == ["submit"]


@pytest.mark.parametrize(
    ("shell", "begins"), [("zsh", "#compdef jurymast"), ("fish", "function _jurymast_completion")]
)
def test_other_shells_have_theirs(shell: str, begins: str) -> None:
    done = subprocess.run(
        [JURYMAST, "completion", shell], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(begins)
