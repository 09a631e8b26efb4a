"""Commands as real processes, with runs whose stories were written beforehand to look at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jurymast.rundir import RunDirectory
from support.outputs import checked
from support.stories import START, Story

LAUNCHER = Path(__file__).parents[2] / "launcher"
RUN = "20261117-100000-gpt-abcd"


class Place:
    """A runs directory, and a PATH with nothing but the Slurm commands that a test puts there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs = root / "runs"
        self.bin = root / "bin"
        self.runs.mkdir()
        self.bin.mkdir()

    def story(self, story: Story, name: str = RUN) -> RunDirectory:
        return story.write(self.runs / name)

    def program(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": str(self.bin), "PYTHONPATH": str(LAUNCHER), "JURYMAST_RUNS": str(self.runs),
            "HOME": str(self.root), "LC_ALL": "C.UTF-8", "TZ": "UTC", "USER": "ada", "LOGNAME": "ada",
        }  # fmt: skip

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """With `more` in its environment."""
        return subprocess.run(
            [sys.executable, "-m", "jurymast", *words], cwd=self.root, env=self.environment() | more,
            capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def good(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *words: str) -> Any:
        """What it prints with --json, which must fit its schema."""
        return checked(json.loads(self.good(*words, "--json")), *words)

    @contextmanager
    def following(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on; ended at the latest with the block."""
        with subprocess.Popen(
            [sys.executable, "-m", "jurymast", *words], cwd=self.root, env=self.environment(),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, stdin=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()


def swapped(*, finished: bool = True, began_at: float = START) -> Story:
    story = Story(began_at=began_at).running(40).saved(40).stepped(50)
    story.lost("n3")
    story.stopped()
    story.recovered(40, 60)
    return story.finished() if finished else story


def crash_loop() -> Story:
    story = Story().running()
    for _ in range(3):
        story.failed(1, trace='Traceback\n  File "train.py", line 7\nValueError: bad\n')
        story.stopped()
        if not story.state.ended:
            story.backed_off().ranks_up().restored(0)
    return story
