"""One figure is the same in every command, for one run's journal."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from support.outputs import checked
from support.runs import jurymast
from support.stories import Story


def test_what_commands_say_of_one_run_agrees(tmp_path: Path) -> None:
    story = Story(began_at=time.time() - 3600.0).running(40)
    story.failed(0)
    story.stopped()
    story.recovered(30, 60)
    story.lost("n3")
    story.stopped()
    story.recovered(50, 80)
    story.finished()
    run = tmp_path / "runs" / story.plan.run
    story.write(run)
    status = json.loads(jurymast("status", str(run), "--json").stdout)
    (row,) = json.loads(jurymast("ps", "--all", "--json", "--runs", str(run.parent)).stdout)
    report = checked(json.loads(jurymast("report", str(run), "--json").stdout), "report")
    assert status["restarts"] == row["restarts"] == len(report["incidents"]) == 2
    assert status["step"] == row["step"] == report["steps"]["done"] == 80
    assert report["mtbf"]["failures"] == report["mtbf"]["by_charge"]["infrastructure"] == 1
    assert status["warnings"] == report["warnings"]


def test_rework_that_the_next_failure_cut_short_is_the_incidents_too(tmp_path: Path) -> None:
    """Nothing was saved, so each attempt does all steps again, and dies before it has them."""
    story = Story(began_at=time.time() - 3600.0).running(40)
    for done in (30, 20):
        story.failed(0)
        story.stopped()
        story.backed_off().ranks_up().restored(0).stepped(done)
    story.failed(0)
    story.stopped()
    run = tmp_path / "runs" / story.plan.run
    story.write(run)
    status = json.loads(jurymast("status", str(run), "--json").stdout)
    report = checked(json.loads(jurymast("report", str(run), "--json").stdout), "report")
    told = [incident["seconds"]["rework"] for incident in status["incidents"]]
    assert told == [incident["seconds"]["rework"] for incident in report["incidents"]]
    assert told[0] > told[1] > told[2] == 0.0
    # The accounts count the first step of each attempt as warm-up, and the one that was cut short as rework.
    counted = report["categories"]["rework"] + report["categories"]["warm_up"]
    assert sum(told) * story.plan.active == pytest.approx(counted, rel=0.05)


def test_time_without_a_step_before_the_end_is_no_rework(tmp_path: Path) -> None:
    story = Story(began_at=time.time() - 3600.0).running(40)
    story.failed(0)
    story.stopped()
    story.backed_off().ranks_up().restored(0).stepped(20)
    stepped_at = story.state.stepped_at
    story.wait(600.0)
    story.asked("cancel")
    story.stopped()
    incident = story.state.incidents[0]
    assert story.state.ended_at is not None
    assert incident.cut_short_at == stepped_at
    run = tmp_path / "runs" / story.plan.run
    story.write(run)
    categories = json.loads(jurymast("report", str(run), "--json").stdout)["categories"]
    assert categories["hang"] >= 600.0 * story.plan.active, "somebody has given up waiting"
    assert categories.get("shutdown", 0.0) < 60.0
