"""Commands that show others' runs, where these say ever so much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.cli.main import main
from jurymast.cluster import kept
from jurymast.report.fleet import fleet_blocks, fleet_view, kept_file, leave_summary, read_fleet
from jurymast.report.text import render
from support.commands import swapped
from support.stories import START


def test_ever_so_many_causes_of_a_stranger_s_run_are_few_rows(tmp_path: Path) -> None:
    run = swapped().write(tmp_path / "a-1")
    leave_summary(run)
    left = json.loads(run.summary_file.read_text())
    left["run"]["days"][0]["spent"] |= {f"cause\n{number}{'x' * 1000}": 1_000_000 for number in range(5000)}
    run.summary_file.write_text(json.dumps(left))
    view = fleet_view(read_fleet([tmp_path]), (), None, START + 3600.0)
    lost = sum(spent["node_seconds"] for spent in view["total"]["lost"].values())
    assert 5000 <= lost < 6000
    text = render(fleet_blocks(view), terminal=False).splitlines()
    assert len(text) < 200
    assert max(map(len, text)) < 300


def test_what_strangers_runs_say_without_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be in this user's file, and nobody would read that."""
    monkeypatch.setattr(kept, "KEPT_BYTES_MAX", 100)
    swapped().write(tmp_path / "a-1")
    assert len(read_fleet([tmp_path]).runs) == 1
    assert not kept_file(tmp_path).exists()
    monkeypatch.undo()
    read_fleet([tmp_path])
    assert kept_file(tmp_path).exists()


def test_the_end_of_a_log_of_a_terabyte_is_shown_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = swapped().write(tmp_path / "a-1")
    run.save_attempt(1)
    log = run.rank_log(1, 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\none\ntwo\n")
    assert main(["logs", str(run.root), "--rank", "0", "--tail", "2"]) == 0
    assert capsys.readouterr().out.split() == ["[r0]", "one", "[r0]", "two"]
