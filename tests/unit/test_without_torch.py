"""An environment in which torch cannot be loaded: it is at fault, and not the nodes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jurymast.agent.ranks import unloadable as why_unloadable
from jurymast.cli.main import main
from jurymast.cluster import planning
from jurymast.core.judges.explained import NOBODY_LIMIT_S
from jurymast.core.state import events as ev
from jurymast.core.state.run import Phase
from jurymast.errors import ScriptError
from jurymast.jobs import await_ended
from jurymast.report.status import read_status, status_blocks
from jurymast.report.text import render
from support.stories import Story
from support.waiting import wait_until


def unloadable(story: Story, name: str) -> None:
    why = "the torchrun host died 2 times: ModuleNotFoundError: No module named 'torch'"
    story.feed(ev.NodeLost(t=story.t, node=name, how="environment", silent_s=0.0, evidence=why))


def joined(*names: str) -> Story:
    story = Story(active=2, spares=1)
    story.submitted()
    story.feed(ev.SupervisorStarted(t=story.t, epoch=1, node="n1"))
    story.feed(
        ev.AllocationStarted(
            t=story.t, slurm_job="17", restarts=0, nodes=names, host="n1", eligible_at=story.t
        )
    )
    for name in names:
        story.feed(ev.NodeJoined(t=story.t, node=name, address="10.0.0.1", incarnation=name))
    return story


def test_a_missing_torch_is_the_environments_fault(tmp_path: Path) -> None:
    story = joined("n1", "n2", "n3")
    unloadable(story, "n1")
    unloadable(story, "n2")
    assert story.state.phase is Phase.FAILED
    assert (story.incident.cause, story.incident.charged) == ("import_failed", "application")
    assert not story.state.excluded
    assert story.state.restarts == 0
    view = read_status(story.write(tmp_path / story.plan.run)).view()
    first = render(status_blocks(view, now=story.t), terminal=False).splitlines()[:20]
    assert any("No module named 'torch'" in line for line in first)
    assert any("repair the environment" in line for line in first)


def test_a_node_that_alone_cannot_load_torch_is_replaced() -> None:
    story = joined("n1", "n2")
    unloadable(story, "n1")
    assert not story.state.incidents, "another node shows whose fault it is"
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29000))
    story.wait(1.0)
    assert story.state.phase is Phase.REQUEUED
    assert list(story.state.excluded) == ["n1"]


def test_one_node_of_several_shows_nothing_of_the_environment() -> None:
    story = joined("n1", "n2")
    unloadable(story, "n1")
    story.feed(ev.NodeLost(t=story.t, node="n2", how="closed", silent_s=0.0))
    story.wait(NOBODY_LIMIT_S)  # nobody says that Slurm has ended the step of all agents
    assert story.state.phase is Phase.REQUEUED
    assert "n1" in story.state.excluded


def test_no_node_is_blamed_if_none_has_loaded_torch_in_time(tmp_path: Path) -> None:
    story = joined("n1", "n2", "n3")
    story.wait(story.plan.settings.join_limit_s + 1.0)
    assert story.state.phase is Phase.REQUEUED
    assert story.incident.cause == "storage_failed"
    assert "no node had loaded torch (n1, n2, n3)" in story.incident.evidence
    assert not story.state.excluded
    assert not story.state.frail
    view = read_status(story.write(tmp_path / story.plan.run)).view()
    first = render(status_blocks(view, now=story.t), terminal=False).splitlines()[:20]
    assert any("check the file system; no node is blamed" in line for line in first)


def test_a_node_that_alone_has_not_loaded_torch_in_time_is_replaced() -> None:
    story = joined("n1", "n2")
    story.feed(ev.NodeReady(t=story.t, node="n2", store_port=29000))
    story.wait(story.plan.settings.join_limit_s + 1.0)
    assert story.state.phase is Phase.REQUEUED
    assert story.incident.cause == "node_lost"
    assert list(story.state.excluded) == ["n1"]


def test_why_python_cannot_load_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.99: cannot open shared object file')\n"
    )
    broken = asyncio.run(why_unloadable({**os.environ, "PYTHONPATH": str(tmp_path)}, str(tmp_path)))
    assert broken == "ImportError: libcudart.so.99: cannot open shared object file"
    (tmp_path / "torch.py").unlink()
    (tmp_path / "torch").mkdir()
    for name in ("__init__.py", "distributed.py"):
        (tmp_path / "torch" / name).write_text("")
    assert asyncio.run(why_unloadable({**os.environ, "PYTHONPATH": str(tmp_path)}, str(tmp_path))) == ""


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", r"SIGSEGV while Python loaded torch, at .*/torch\.py:2"),
        ("os.kill(os.getpid(), signal.SIGILL)", r"SIGILL while Python loaded torch, at .*/torch\.py:2"),
        ("os.abort()", r"SIGABRT while Python loaded torch, at .*/torch\.py:2"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"SIGKILL while Python loaded torch"),
        ("os.kill(os.getpid(), signal.SIGRTMIN + 2)", r"signal 36 while Python loaded torch"),
        ("os._exit(3)", r"exit code 3 while Python loaded torch"),
        ("sys.exit('no licence')", r"no licence"),
    ],
)
def test_how_python_ends_while_it_loads_torch(tmp_path: Path, ends: str, why: str) -> None:
    (tmp_path / "torch.py").write_text(f"import os, signal, sys\n{ends}\n")
    broken = asyncio.run(why_unloadable({**os.environ, "PYTHONPATH": str(tmp_path)}, str(tmp_path)))
    assert re.fullmatch(why, broken)


@pytest.mark.parametrize("ends", ["is cancelled", "is killed"])
def test_no_look_at_torch_outlives_the_agent(tmp_path: Path, ends: str) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, time, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    code = (
        "import asyncio, os, sys\n"
        "from jurymast.agent.ranks import unloadable\n"
        "async def look():\n"
        f"    environment = {{**os.environ, 'PYTHONPATH': {str(tmp_path)!r}}}\n"
        f"    task = asyncio.create_task(unloadable(environment, {str(tmp_path)!r}))\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    task.cancel()\n"
        "    await asyncio.wait([task])\n"
        "asyncio.run(look())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as agent:
        wait_until("the look", lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        look = int((tmp_path / "pid").read_text())
        if ends == "is killed":
            agent.kill()
        else:
            agent.communicate(b"\n", timeout=60)
        assert await_ended([look], 120)


@pytest.mark.parametrize(
    "command",
    [["submit", "--dry-run", "--nodes=1", "--", "train.py"], ["demo"], ["demo", "--no-fault"]],
    ids=str,
)
def test_each_command_that_trains_says_so_with_one_code(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(command) == ScriptError.exit_code == 66
    assert f"No module named 'torch' for {sys.executable}" in capfd.readouterr().err
