"""Images that runs left on a node's own disk."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jurymast.agent.storage_processes import local_root, remove_left_behind
from jurymast.rundir import RunDirectory


@pytest.mark.parametrize(
    ("outcome", "stays"),
    [
        ({"state": "succeeded"}, False), ({"state": "cancelled"}, False), ({"state": "requeued"}, True),
        (None, True), ("torn", True), (["succeeded"], True),
    ],
)  # fmt: skip
def test_images_of_runs_that_have_ended_are_removed(tmp_path: Path, outcome: object, stays: bool) -> None:
    """As of a run that was requeued away from this node, and ended on others."""
    mine = local_root(str(tmp_path / "disk"), "mine")
    runs = tmp_path / "runs"
    for run in ("mine", "other"):
        state = mine.parent / run / "step-10.a1"
        state.mkdir(parents=True, mode=0o700)
        (state / "rank-00000.image").write_bytes(b"x")
        RunDirectory(runs / run).create()
    text = outcome if isinstance(outcome, str) else json.dumps(outcome)
    if outcome is not None:
        RunDirectory(runs / "other").outcome_file.write_text(text)
    remove_left_behind(mine, runs)
    assert ((mine.parent / "other").exists(), mine.exists()) == (stays, True)


def test_images_of_runs_elsewhere_stay(tmp_path: Path) -> None:
    mine = local_root(str(tmp_path), "mine")
    (mine.parent / "elsewhere" / "step-10.a1").mkdir(parents=True, mode=0o700)
    remove_left_behind(mine, tmp_path / "runs")
    assert (mine.parent / "elsewhere").exists()


def test_agents_that_begin_at_the_same_time_use_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path.mkdir

    def mkdir(self: Path, mode: int = 0o777, **more: bool) -> None:
        made(self, mode, **more)  # the other agent's
        made(self, mode, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert local_root(str(tmp_path), "run") == tmp_path / f"jurymast-{os.getuid()}" / "run"
