"""Checkpoints of a live run: damaged in memory, rolled back, refused by storage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from jurymast.core.state import events as ev
from support.outputs import checked
from support.runs import RunUnderTest, jurymast, local_run, result, wait_gone
from support.saves import check_restores

pytestmark = pytest.mark.torch

TRAIN = ("--steps", "100", "--step-time", "0.05", "--save-every", "10 steps")


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN)


def status(run: RunUnderTest) -> dict[str, Any]:
    told = json.loads(jurymast("status", str(run.directory.root), "--json").stdout)
    found: dict[str, Any] = checked(told, "status")
    return found


def images_of(run: RunUnderTest, node: str) -> list[Path]:
    """The buffers of the node's agent, each once: a mapping has a descriptor of its own."""
    found: dict[int, Path] = {}
    for path in Path(f"/proc/{run.agent_pid(node)}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if "jurymast-image" in os.readlink(path):
                found[path.stat().st_ino] = path
    return [*found.values()]


def flip_bits(path: Path) -> None:
    """In many places of what is in use."""
    with open(path, "r+b", buffering=0) as memory:
        for at in range(4096, 200_000, 16_384):
            memory.seek(at)
            byte = memory.read(1)
            memory.seek(at)
            memory.write(bytes([byte[0] ^ 0xFF]))


def test_flipped_bits_in_memory_are_found_and_the_next_copy_is_used(tmp_path: Path, undisturbed: str) -> None:
    out = tmp_path / "out.json"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", script="train_tiny.py",
                   arguments=(*TRAIN, "--out", str(out))) as run:  # fmt: skip
        state = run.wait_safe(30)
        victim = state.placement[1]
        ranks = [psutil.Process(pid) for node in state.placement for pid in run.pids(node)]
        for rank in ranks:  # nothing is saved while the memory is being damaged
            rank.suspend()
        for path in images_of(run, victim):
            flip_bits(path)
        for rank in ranks:
            rank.kill()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert result(out)["sha256"] == undisturbed, run.story()
    check_restores(run, least=30)
    fetched = [e for e in run.events() if isinstance(e, ev.Fetched)]
    assert [e.node for e in fetched] == [victim], run.story()
    assert "corrupt" in " ".join(fetched[0].why)
    assert fetched[0].tiers.get("peer", 0) > 0


def until(file: Path) -> tuple[str, ...]:
    """A training that goes on until the file is there."""
    return (*TRAIN, "--steps", "100000", "--until", str(file))


def test_a_rollback_takes_a_live_run_back_and_nothing_newer_returns(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=until(end)) as run:  # fmt: skip
        run.wait("a shared checkpoint", lambda s: "shared" in s.saved and bool(s.saved["shared"].step))
        oldest = min(int(p.name[5:]) for p in run.directory.checkpoints.glob("step-????????"))
        done = jurymast("checkpoints", str(run.directory.root), "rollback", str(oldest), "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["restarted"] is True
        run.wait("the restart", lambda s: bool(s.incidents) and s.incident is None)
        end.touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert [(i.cause, i.action, i.step_restored) for i in state.incidents] == [
        ("rollback_asked", "restart", oldest)
    ], run.story()


def test_storage_that_fails_is_told_and_caught_up_with(tmp_path: Path) -> None:
    out, end = tmp_path / "out.json", tmp_path / "end"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*until(end), "--out", str(out))) as run:  # fmt: skip
        run.wait_safe(10)  # before that they look there for what to restore
        blocked = run.directory.checkpoints
        blocked.rename(blocked.with_name("elsewhere"))
        blocked.write_text("not a directory")
        run.wait("the failure", lambda s: "shared" in s.saved and s.saved["shared"].failures > 0)
        warned = [text for text in status(run)["warnings"] if "shared tier" in text]
        assert warned, status(run)
        assert str(blocked) in warned[0]
        before = run.state().step
        blocked.unlink()
        state = run.wait("catching up", lambda s: (s.saved["shared"].step or 0) > 0, limit_s=240.0)
        assert state.saved["shared"].failures == 0
        assert run.wait_step(before + 10).incidents == []
        end.touch()
        run.wait_end()
        wait_gone(run.directory.root)
    steps = {int(path.name[5:]) for path in blocked.glob("step-????????")}
    assert result(out)["steps"] in steps  # the last one got there before the nodes were given back


def test_with_memory_off_the_ranks_save_to_storage_themselves(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("checkpoint: {tiers: {memory: off}}\n")
    train = ("--steps", "60", "--save-every", "20 steps")
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py", arguments=train) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert {(e.tier, e.copied) for e in run.events() if isinstance(e, ev.Saved)} == {("shared", False)}
    assert state.saved["shared"].step == 60
