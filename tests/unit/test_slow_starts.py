"""Programs on storage that hangs: whoever starts one goes on all the same."""

from __future__ import annotations

import asyncio
import select
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jurymast import programs
from jurymast.health import watcher
from jurymast.health.probe import Context
from jurymast.health.watcher import ProbeWatcher
from support.hanging import hanging

LIMIT_S = 120.0
# The loop of an agent that starts a helper, and of a supervisor that asks Slurm in a thread.
LOOP = """
import asyncio, sys
from jurymast import programs
from jurymast.child import Child
sys.executable = sys.argv[1]
async def main():
    for start in (Child.start("jurymast.storage"), asyncio.to_thread(programs.run, [sys.argv[1], "-c", ""])):
        begun = asyncio.ensure_future(start)
        for _ in range(5):
            await asyncio.sleep(0.1)
        print("alive", flush=True)
        begun.cancel()
asyncio.run(main())
"""


def test_the_loop_goes_on_while_a_program_s_storage_hangs(tmp_path: Path) -> None:
    """Its node would be lost: a probe that hangs is started anew, by a Python on the storage that hangs."""
    python = tmp_path / "python"
    shutil.copy(sys.executable, python)
    with subprocess.Popen([sys.executable, "-c", LOOP, str(python)], stdout=subprocess.PIPE) as loop:
        assert loop.stdout is not None
        try:
            with hanging(python):
                for _ in range(2):
                    assert select.select([loop.stdout], [], [], LIMIT_S)[0], "the loop stands still"
                    assert loop.stdout.readline() == b"alive\n"
        finally:
            loop.kill()


def test_a_program_gets_its_words_and_variables_unchanged(tmp_path: Path) -> None:
    told = programs.run(
        [sys.executable, "-c", "import os, sys; print(sys.argv[1:], dict(os.environ))", "A=1", "-i", "--"],
        capture_output=True, env={"B": "2", "odd name": "3"},
    )  # fmt: skip
    assert told.stdout.startswith("['A=1', '-i', '--'] ")
    assert "'B': '2'" in told.stdout
    assert "'odd name': '3'" in told.stdout


def test_a_path_that_looks_like_a_variable_is_run(tmp_path: Path) -> None:
    place = tmp_path / "a=b"
    place.mkdir()
    (place / "say").write_text("#!/bin/sh\necho yes\n")
    (place / "say").chmod(0o755)
    assert programs.run([str(place / "say")], capture_output=True).stdout == "yes\n"


def test_a_program_that_is_not_there_is_told() -> None:
    with pytest.raises(FileNotFoundError):
        programs.run(["no-such-program-here"])


def test_the_loop_goes_on_while_installed_probes_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """That reads hundreds of files, on all nodes at once."""
    found = threading.Event()

    def looks() -> dict[str, str]:
        assert found.wait(LIMIT_S), "the loop stands still"
        return {}

    async def run() -> None:
        running = asyncio.ensure_future(ProbeWatcher(Context(), ["p"], lambda finding: None).run())
        await asyncio.sleep(0.01)
        found.set()
        await running

    monkeypatch.setattr(watcher, "installed", looks)
    asyncio.run(run())
