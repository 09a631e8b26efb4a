"""Two versions of jurymast beside each other: what one of them submitted, the other reads, ends and submits
again; or says which version it is, and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from jurymast.report.which_run import find_run
from support.commands import RUN, swapped
from support.outputs import checked
from support.packages import wheel
from support.runs import SCRIPTS, RunUnderTest, end_all, processes_of, telling_where, tree, wait_gone

OLD, NEW = "0.1.7", "0.2.0"
TRAIN = ("train_tiny.py", "--steps", "1000000", "--step-time", "0.05", "--save-every", "5")
HINT = "use the jurymast that the run was submitted with"


@dataclass(frozen=True)
class Installed:
    """A jurymast of its own, over the packages of this environment."""

    folder: Path
    runs: Path

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "jurymast", *words], cwd=self.runs.parent, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": str(self.folder), "JURYMAST_RUNS": str(self.runs),
                 "JURYMAST_SITE": "", "OMP_NUM_THREADS": "1"},
            capture_output=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def patched(self, folder: Path, file: str, before: str, after: str) -> Installed:
        """A copy with something else in a file."""
        shutil.copytree(self.folder, folder)
        path = folder / "jurymast" / file
        text, number = re.subn(before, after, path.read_text(), count=1, flags=re.MULTILINE)
        assert number == 1, before
        path.write_text(text)
        return Installed(folder, self.runs)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each version is installed, from its wheel."""
    found = {}
    for version in (OLD, NEW):
        made = tmp_path_factory.mktemp(f"v{version}")
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--quiet"]
        target = ["--disable-pip-version-check", "--target", str(made / "lib")]
        subprocess.run([*pip, *target, str(wheel(made, version))], check=True, timeout=240)
        found[version] = made / "lib"
    return found


@pytest.fixture
def old(folders: dict[str, Path], tmp_path: Path) -> Installed:
    (tmp_path / "runs").mkdir()
    return Installed(folders[OLD], tmp_path / "runs")


@pytest.fixture
def new(folders: dict[str, Path], old: Installed) -> Installed:
    return Installed(folders[NEW], old.runs)


@contextmanager
def running(version: Installed, *words: str) -> Iterator[RunUnderTest]:
    """A run that this version submits, or submits again; nothing of it is left afterwards."""
    told = version(*words).splitlines()
    run = RunUnderTest(find_run(next(line for line in told if line.startswith("local-")), version.runs).root)
    pid = json.loads((run.directory.submission / "local.json").read_text())["pid"]
    seen: dict[int, psutil.Process] = {}
    try:
        with telling_where(pid):
            yield run
    finally:
        seen |= {one.pid: one for one in [*tree(pid), *processes_of(run.directory.root)]}
        end_all(list(seen.values()))


def submitted(version: Installed) -> tuple[str, ...]:
    script, *arguments = TRAIN
    return (
        "submit", "--cluster", "local", "--parsable", "--nodes", "1", "--spares", "0", "--",
        str(SCRIPTS / script), *arguments,
    )  # fmt: skip


def test_each_is_the_version_that_it_says(old: Installed, new: Installed) -> None:
    assert old("--version").strip() == f"jurymast {OLD}"
    assert new("--version").strip() == f"jurymast {NEW}"


@pytest.mark.torch
def test_what_one_submitted_the_other_reads_saves_submits_again_and_ends(
    old: Installed, new: Installed
) -> None:
    with running(old, *submitted(old)) as run:
        run.wait_saved(5)
        name = run.directory.root.name
        status = checked(json.loads(new("status", name, "--json")), "status")
        assert status["state"] == "running"
        assert checked(json.loads(new("ps", "--json")), "ps")[0]["run"] == name
        report = checked(json.loads(new("report", name, "--json")), "report")
        assert report["provenance"]["run_version"] == OLD
        assert report["provenance"]["report_version"] == NEW
        assert checked(json.loads(new("save", name, "--json")), "save")["step"] >= 5
        assert "tiny" in new("events", name)
        assert "step" in new("logs", name)

        assert "jurymast submit" in new("resubmit", name, "--dry-run")
        before = set(new.runs.iterdir())
        assert "directory" in new("resubmit", name)
        (again,) = (one for one in set(new.runs.iterdir()) - before if (one / "plan.json").exists())
        second = RunUnderTest(again)
        try:
            second.wait_step(2)
            assert json.loads(old("report", again.name, "--json"))["provenance"]["run_version"] == NEW
            assert "is cancelled" in old("cancel", again.name)
            assert second.state().phase.value == "cancelled"
            wait_gone(again)
        finally:
            end_all(processes_of(again))

        # The run keeps what it began with: its processes are of the version that submitted it.
        assert "is cancelled" in new("cancel", name)
        assert run.state().phase.value == "cancelled"
        wait_gone(run.directory.root)
    versions = {event.version for event in run.events() if hasattr(event, "version")}
    assert versions == {OLD}


@pytest.mark.torch
def test_a_supervisor_of_another_protocol_is_not_asked_and_its_run_can_be_ended(
    old: Installed, new: Installed, tmp_path: Path
) -> None:
    other = new.patched(tmp_path / "other", "wire/protocol.py", r"jurymast/(\d+)", "jurymast/99")
    ours = re.search(r"jurymast/\d+", (old.folder / "jurymast/wire/protocol.py").read_text())
    assert ours
    with running(old, *submitted(old)) as run:
        run.wait_step(2)
        name = run.directory.root.name
        assert json.loads(other("status", name, "--json"))["state"] == "running"
        for words in (("restart", name), ("save", name)):
            told = other(*words, code=76)
            assert f"speaks {ours[0]}, and this jurymast jurymast/99" in told
            assert f"hint: {HINT}" in told
        assert "is cancelled" in other("cancel", name)
        assert run.state().phase.value == "cancelled"
        wait_gone(run.directory.root)


def test_a_journal_of_another_version_is_named_by_all(old: Installed, new: Installed, tmp_path: Path) -> None:
    later = new.patched(tmp_path / "later", "journal.py", r"^VERSION = \d+", "VERSION = 99")
    now = re.search(r"^VERSION = (\d+)", (old.folder / "jurymast/journal.py").read_text(), re.MULTILINE)
    assert now
    swapped().write(old.runs / RUN)
    both = f"has lines of journal version {now[1]}, but this jurymast reads version 99"
    for command in ("status", "report", "events", "checkpoints", "cancel"):
        told = later(command, RUN, code=73)
        assert both in told
        assert f"hint: {HINT}" in told
    (row,) = json.loads(later("ps", "--all", "--json"))
    assert (row["state"], both in row["nodelist"]) == ("unreadable", True)
    (unread,) = json.loads(later("fleet", "--json"))["unreadable"]
    assert both in unread["why"]
    passed = f"not counted: 1 run of journal version {now[1]}; this jurymast reads version 99"
    assert passed in later("nodes")
    assert passed in later("submit", "--dry-run", "--", str(SCRIPTS / TRAIN[0]))
    # The plan can be read all the same, and what was counted once stays counted.
    assert "jurymast submit" in later("resubmit", RUN, "--dry-run")
    assert "not counted" not in old("nodes")
    assert passed not in later("nodes"), "what the other version has counted is kept"
