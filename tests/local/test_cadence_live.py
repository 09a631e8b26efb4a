"""When a live run saves: all ranks at the same steps, as the journal tells, and at once when asked to."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from jurymast.core.state import events as ev
from jurymast.wire.endpoint import find
from support.outputs import checked
from support.runs import RunUnderTest, jurymast, local_run
from support.saves import agreed, all_alike, named, saved_by_rank, saves
from support.waiting import wait_until

pytestmark = pytest.mark.torch

TRAIN = ("--steps", "100000", "--step-time", "0.05", "--tell-saves")
# Failures are expected so often that the best interval is a few seconds.
OFTEN = "{failures: {rate: 40000}, health: {preflight: off}}\n"


def policy(folder: Path, text: str = OFTEN) -> tuple[str, str]:
    path = folder / "policy.yaml"
    path.write_text(text)
    return "--policy", str(path)


def status(run: RunUnderTest) -> dict[str, Any]:
    told = json.loads(jurymast("status", str(run.directory.root), "--json").stdout)
    found: dict[str, Any] = checked(told, "status")
    return found


def test_a_cadence_is_agreed_on_and_saves_are_made_when_somebody_asks(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", *policy(tmp_path),
                   script="train_tiny.py", arguments=(*TRAIN, "--save-every", "auto")) as run:  # fmt: skip
        root = str(run.directory.root)
        run.wait_step(20)
        assert status(run)["cadence"]["rate"]["mean"] == pytest.approx(40_000, rel=0.1)

        done = jurymast("save", root, "--json")
        assert done.returncode == 0, done.stderr
        step = checked(json.loads(done.stdout), "save")["step"]
        assert [e.step for e in saves(run)] == [step]
        (asked,) = [e for e in agreed(run) if e.by]
        assert asked.first_step == step

        # By now it is known what a save costs.
        run.wait("a cadence", lambda s: bool(s.cadence and s.cadence.stall_s and s.cadence.every_steps))
        run.wait("saves by it", lambda s: bool(s.cadence) and (s.saved_step or 0) > step)
        told = status(run)["cadence"]
        assert 0.5 < told["every_seconds"] < 60.0
        assert told["reason"] == "what loses least at this failure rate"
        assert told["next_save_step"] > step
        assert told["cost_if_rate_twice"] < 0.05
        text = jurymast("status", root).stdout
        assert re.search(r"^saves      every \d+ steps \(.* next at step \d+", text, re.M), text
        assert re.search(r"^failures   (39|40),\d+ per 1,000 node-days expected", text, re.M), text

        # Slurm's warning, as the batch process gets it.
        before = len(agreed(run))
        os.kill(json.loads((run.directory.submission / "local.json").read_text())["pid"], signal.SIGUSR2)
        wait_until("the save", lambda: any(e.by == "Slurm's warning" for e in agreed(run)[before:]))
        warned = agreed(run)[-1].first_step
        run.wait("its end", lambda s: (s.saved_step or 0) >= warned)

        # A node that is taken out by hand costs no step but those since that save.
        victim = run.state().placement[1]
        assert jurymast("drain", root, victim).returncode == 0
        state = run.wait("the swap", lambda s: s.attempt == 2 and s.first_step_at is not None)
        asks = [(e.what, e.by, e.node) for e in run.events() if isinstance(e, ev.Asked)]
        assert ("save", asks[-1][1], victim) in asks
        incident = state.incidents[0]
        assert incident.step_lost_from - (incident.step_restored or 0) < 20, run.story()
        jurymast("cancel", root)
    assert len(all_alike(run, 1)) >= 3, run.story()


def test_supervisors_that_die_leave_the_ranks_agreed(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", *policy(tmp_path),
                   script="train_tiny.py", arguments=(*TRAIN, "--save-every", "1s")) as run:  # fmt: skip
        run.wait("a cadence", lambda s: s.cadence is not None)
        for _ in range(2):
            place = find(run.directory.epochs)
            assert place is not None
            os.kill(place.pid, signal.SIGKILL)
            newest = run.state().saved_step or 0
            run.wait("the next supervisor", lambda s, epoch=place.epoch: s.epoch > epoch)  # type: ignore[misc]
            run.wait("saves under it", lambda s, newest=newest: (s.saved_step or 0) > newest + 40)  # type: ignore[misc]
            assert jurymast("save", str(run.directory.root)).returncode == 0
        assert run.state().incidents == []
        jurymast("cancel", str(run.directory.root))
    # While there is none, nobody frees the memory of earlier saves, so that ranks may have to skip some.
    by_rank = saved_by_rank(run, 1)
    done = max(rank[-1] for rank in by_rank)
    for rank in by_rank:
        assert set(rank) <= set(named(run, 1, done)), by_rank


@pytest.mark.long
def test_ranks_that_save_to_storage_themselves_follow_the_same_schedule(tmp_path: Path) -> None:
    """Their saves are collective: a rank that missed one would hang."""
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0",
                   *policy(tmp_path, "{checkpoint: {cadence: 2s, tiers: {memory: off}}}\n"),
                   script="train_tiny.py", arguments=TRAIN) as run:  # fmt: skip
        run.wait("saves", lambda s: bool(s.cadence) and len(saves(run)) >= 2)
        assert jurymast("save", str(run.directory.root)).returncode == 0
        assert run.state().incidents == []
        jurymast("cancel", str(run.directory.root))
    all_alike(run, 1, "shared")


@pytest.mark.long
def test_a_script_with_steps_of_its_own_saves_besides_when_asked(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--save-every", "100 steps")) as run:  # fmt: skip
        run.wait_step(10)
        step = 0
        while step % 100 == 0:  # a save of its own that comes just then is as good
            step = json.loads(jurymast("save", str(run.directory.root), "--json").stdout)["step"]
        run.wait_saved((step // 100 + 1) * 100)
        jurymast("cancel", str(run.directory.root))
    by_rank = saved_by_rank(run, 1)
    assert by_rank[0] == by_rank[1]
    assert step in by_rank[0]


@pytest.mark.long
def test_without_a_checkpointer_there_is_nothing_to_save(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN[:4], "--save-every", "never")) as run:  # fmt: skip
        run.wait_step(10)
        done = jurymast("save", str(run.directory.root))
        assert done.returncode == 74
        assert "no Checkpointer" in done.stderr
        jurymast("cancel", str(run.directory.root))
