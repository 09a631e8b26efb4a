"""The four failures of a night on call: the first screen of `jurymast status` has the cause and the next
command."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from support.runs import RunUnderTest, hosts, local_run, wait_gone
from support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.torch

ROWS, COLUMNS = 24, 80
TRAIN = """import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

def wait_for_data():
    while True:
        time.sleep(1.0)

def deep(levels, names):
    name = f"level {levels}"
    return deep(levels - 1, [*names, name]) if levels else wide(levels, names)

def wide(levels, names):
    return {}["tokens"]

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(100_000):
    if step == 10 and dist.get_rank() == 1 and sys.argv[1] == "hang":
        wait_for_data()
    if step == 10 and dist.get_rank() == 1 and sys.argv[1] == "raise":
        deep(40, [])
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.02)
"""


def first_screen(run: RunUnderTest) -> str:
    """What a terminal of this size shows, before anybody scrolls."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "jurymast", "status", str(run.directory.root)]
    quiet = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stdout=theirs, env={**quiet, "TERM": "xterm"})
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 1 << 16):
            shown += piece
    except OSError:  # the terminal's other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    rows: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines():
        rows += [line[at : at + COLUMNS] for at in range(0, max(1, len(line)), COLUMNS)]
    return "\n".join(rows[:ROWS])


def said(screen: str) -> str:
    """The words, wherever lines are broken."""
    return " ".join(screen.split())


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_an_exception(tmp_path: Path, script: str) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script=script,
                   arguments=("raise",)) as run:  # fmt: skip
        run.wait_end()
        wait_gone(run.directory.root)
    screen = said(first_screen(run))
    name = run.directory.root.name
    assert "cause worker_exception (rank 1, node local-2)" in screen
    assert "KeyError: 'tokens'" in screen
    assert f"next jurymast logs {name} --rank 1 when it is repaired: jurymast resubmit {name}" in screen


def test_a_hang(tmp_path: Path, script: str) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script=script,
                   arguments=("hang",)) as run:  # fmt: skip
        run.wait_step(10)
        screens: list[str] = []

        def looked() -> bool:
            screens.append(said(first_screen(run)))
            return "restart at" in screens[-1]

        wait_until("look at the ranks' stacks", looked, LIMIT_S)
        state = run.wait("torch's time-out", lambda s: bool(s.incidents) and bool(s.incidents[0].action))
    name = run.directory.root.name
    assert re.search(
        r"no step for [0-9]+ (s|min) \(normally [0-9.]+ m?s\): rank 1 in wait_for_data at train\.py:[0-9]+, "
        r"rank 0 in all_reduce at train\.py:[0-9]+; "
        r"restart at ([0-9]{2}-[0-9]{2} )?[0-9:]{8} unless one of them moves",
        screens[-1],
    ), screens[-1]
    assert f"next jurymast logs {name} --rank 1 jurymast restart {name}, to wait no longer" in screens[-1]
    (incident,) = state.incidents
    assert (incident.cause, incident.rank, incident.node) == ("hang", 1, "local-2"), run.story()
    where = "torch's time-out ended the wait of rank 0; rank 1 in wait_for_data at train.py:"
    assert incident.evidence.startswith(where)


def test_a_node_that_is_lost_without_a_spare(tmp_path: Path, script: str) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--no-requeue", script=script,
                   arguments=("train",)) as run:  # fmt: skip
        state = run.wait_step(5)
        os.kill(run.agent_pid(state.placement[1]), signal.SIGKILL)
        run.wait_end()
        wait_gone(run.directory.root)
    screen = said(first_screen(run))
    assert f"cause node_crash (node {state.placement[1]})" in screen
    assert "no spare is left" in screen
    assert f"next jurymast resubmit {run.directory.root.name} --set spares=1" in screen


def test_a_host_that_crashes(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--no-requeue", script=script,
                   arguments=("train",)) as run:  # fmt: skip
        state = run.wait_step(5)
        agent = run.agent_pid(state.placement[1])
        for host in hosts(agent):
            host.send_signal(signal.SIGSEGV)
        run.wait("the end of the host", lambda state: bool(state.incidents))
        screen = said(first_screen(run))
    assert f"cause host_died (node {state.placement[1]})" in screen
    assert f"{state.placement[1]}: TorchrunHostDied" in screen
    assert "it said last: Fatal Python error: Segmentation fault" in screen, screen


def test_an_environment_without_torch(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "broken" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    paths = filter(None, (str(package.parent), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script=script,
                   arguments=("train",)) as run:  # fmt: skip
        run.wait_end()
        wait_gone(run.directory.root)
    screen, name = said(first_screen(run)), run.directory.root.name
    assert "cause import_failed" in screen
    assert "No module named 'torch' (on local-1, local-2)" in screen
    assert f"next jurymast logs {name} --job when it is repaired: jurymast resubmit {name}" in screen
