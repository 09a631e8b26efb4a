"""What people are told of a script that ends itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.runs import jurymast, local_run, wait_gone

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("leave", "code", "place"),
    [
        ("sys.exit('no data at /data')", 1, " in load at train.py:5"),
        ("sys.stderr.write('no data at /data'); os._exit(4)", 4, " in load at train.py:5"),
        ("sys.stderr.write('no data at /data'); exit(259)", 3, " in load at train.py:5"),
        ("argparse.ArgumentParser().error('no data at /data')", 2, " in load at train.py:5"),
        # The exit that is told is the one by which it ended.
        ("""
        try: sys.exit(3)
        except SystemExit: sys.exit('no data at /data')""", 1, " in load at train.py:7"),
        ("""
        try: sys.exit(3)
        except SystemExit: sys.stderr.write('no data at /data')
        raise SystemExit(5)""", 5, " in load at train.py:8"),
        ("""
        try: exit()
        except SystemExit: raise SystemExit('no data at /data')""", 1, " in load at train.py:7"),
        # A handler of a signal runs in the midst of the script.
        ("""
        import signal
        def leave(*_): sys.exit('no data at /data')
        signal.signal(signal.SIGALRM, leave)
        signal.raise_signal(signal.SIGALRM)""", 1, " in leave at train.py:7"),
        # One in C is not seen.
        ("""
        import ctypes
        sys.stderr.write('no data at /data')
        ctypes.CDLL(None)._exit(6)""", 6, ""),
    ],
)  # fmt: skip
def test_the_place_and_message_of_an_exit_are_told_as_the_cause(
    leave: str, code: int, place: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import argparse, os, sys\nprint('loading')\ndef load():\n    if True:\n        {leave}\nload()\n"
    )
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script=str(script)) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    failed = {(e.exit_code, e.error) for e in run.events() if isinstance(e, ev.WorkerFailed)}
    assert (failed, state.exit_code) == ({(code, "")}, code)
    shown = " ".join(jurymast("status", str(run.directory.root)).stdout.split())
    assert f"evidence rank 0 on local-1: exit code {code}{place}; its log ends: " in shown, shown
    assert "no data at /data decision" in shown


UNEVEN = """import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
early, how = int(sys.argv[1]), sys.argv[2]
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(3 if dist.get_rank() == early else 6):
    if step == 2 and dist.get_rank() == early and how == "at once":
        os._exit(0)
    if step == 2 and dist.get_rank() == early and how == "another":
        os.execlp("true", "true")
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
"""


@pytest.mark.parametrize(("nodes", "early", "how"), [(1, 1, "data"), (2, 0, "at once"), (1, 0, "another")])
def test_a_rank_that_ends_early_is_named_and_no_node_goes_for_it(
    nodes: int, early: int, how: str, tmp_path: Path
) -> None:
    """Its data were fewer, it leaves without Python's end, or becomes another program. The others lose their
    connections to it, at the same step each time."""
    script = tmp_path / "train.py"
    script.write_text(UNEVEN)
    each = ("--nodes", str(nodes), "--spares", "1", "--nproc-per-node", str(2 // nodes))
    with local_run(tmp_path / "runs", *each, script=str(script), arguments=(str(early), how)) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    told = {(i.cause, i.charged, i.rank) for i in state.incidents}
    assert told == {("worker_exit", "application", early)}, run.story()
    assert (len(state.incidents), state.exit_code) == (3, 1)
    others = f"the others then failed: rank {1 - early} in all_reduce at train.py:14: RuntimeError"
    assert f"rank {early} ended early, with exit code 0; {others}" in state.end_reason
    assert not state.excluded


SLOW_TO_END = """import atexit, os, threading
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def ends():
    dist.destroy_process_group()
    threading.Event().wait()
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(6):
    if step == 3 and dist.get_rank() == 1 and os.environ["JURYMAST_ATTEMPT"] == "1":
        atexit.register(ends)
        raise ValueError("no such sample")
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
"""


def test_an_exception_is_the_cause_though_others_meet_its_consequences_first(tmp_path: Path) -> None:
    """Its rank still runs exit handlers when the other one has failed and all are stopped."""
    script = tmp_path / "train.py"
    script.write_text(SLOW_TO_END)
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script=str(script)) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.rank, incident.node) == ("worker_exception", 1, "local-2"), run.story()
    assert "no such sample" in incident.evidence


EXITS = """import atexit, os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
others = [None] * 2
dist.all_gather_object(others, os.getpid())
def lives(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False
def ends():
    dist.destroy_process_group()
    while sys.argv[1] == "stays" or lives(others[0]):
        time.sleep(0.01)
    os._exit(3)  # as it would have, without the interpreter's end, which takes seconds on a busy machine
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(6):
    if step == 3 and dist.get_rank() == 1 and os.environ["JURYMAST_ATTEMPT"] == "1":
        atexit.register(ends)
        sys.exit(3)
    parameter.grad = torch.ones(1)
    dist.all_reduce(parameter.grad)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("then", "told"),
    [("ends", "exit code 3"), ("stays", "rank 1 ended early, stopped before the exit code was known; the")],
)
def test_a_rank_at_its_end_is_not_done_before_its_exit_code_is_known(
    then: str, told: str, tmp_path: Path
) -> None:
    """The other rank meets its end, and fails, before it has ended."""
    script = tmp_path / "train.py"
    script.write_text(EXITS)
    with local_run(
        tmp_path / "runs", "--nodes", "2", "--spares", "0", script=str(script), arguments=(then,)
    ) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    (incident,) = state.incidents
    assert (incident.cause, incident.charged, incident.rank) == ("worker_exit", "application", 1), run.story()
    assert told in incident.evidence
    assert "exit code 0" not in incident.evidence


SAVES = """import os, signal, time
import torch
rank = int(os.environ["RANK"])
def save(*_):
    if rank == 0:
        time.sleep(3)
        os.write(os.open("saved", os.O_CREAT | os.O_APPEND | os.O_WRONLY), b"saved, ")
    os._exit(143)
signal.signal(signal.SIGTERM, save)
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.05)
"""


def test_a_cancelled_script_has_the_time_to_save_though_other_ranks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would have from scancel: longer than ranks have at a restart."""
    script = tmp_path / "train.py"
    script.write_text(SAVES)
    monkeypatch.chdir(tmp_path)
    each = ("--nodes", "1", "--spares", "0", "--nproc-per-node", "2")
    with local_run(tmp_path / "runs", *each, script=str(script)) as run:
        run.wait_step(1)
        assert jurymast("cancel", str(run.directory.root)).returncode == 0
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (tmp_path / "saved").read_text() == "saved, ", run.story()
    assert state.phase.value == "cancelled"


LEAVES = """import os, signal, sys, time
import torch
rank = int(os.environ["RANK"])
def then(name):
    while not os.path.exists(name):
        time.sleep(0.01)
def save(*_):
    if rank == 0:
        open("left", "w")
        sys.exit(0)
    then("left" if rank == 1 else "go")
    if rank == 1:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    open(f"saved-{rank}", "w")
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.05)
"""


def test_ranks_save_on_after_a_signal_though_others_have_left_and_one_has_lost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under srun; they do not even catch the SIGTERM that would end them. A rank of the same node, too."""
    script = tmp_path / "train.py"
    script.write_text(LEAVES)
    monkeypatch.chdir(tmp_path)
    each = ("--nodes", "2", "--spares", "0", "--nproc-per-node", "3")
    with local_run(tmp_path / "runs", *each, script=str(script)) as run:
        nodes = run.wait_step(1).placement
        for node in nodes:
            os.kill(run.agent_pid(node), signal.SIGUSR1)
        run.wait("the signal", lambda s: s.warned == 1)
        for pid in [pid for node in nodes for pid in run.pids(node)]:
            os.kill(pid, signal.SIGUSR1)
        run.wait("a rank that fails", lambda s: bool(s.findings.failures or s.incidents))
        (tmp_path / "go").touch()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert {file.name for file in tmp_path.glob("saved-*")} == {f"saved-{rank}" for rank in (2, 3, 4, 5)}, (
        run.story()
    )
    assert (state.attempt, state.incidents[-1].action) == (1, "stop"), run.story()


DIVERGES = """import jurymast, torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for step in range(1, 6):
    loss = (parameter * (float("nan") if step > 2 else 1.0)).sum()
    parameter.grad = torch.ones(1)
    SHOWS
    optimizer.step()
"""


@pytest.mark.parametrize("shows", ["jurymast.step(step, loss=loss)", "loss.backward()"])
def test_a_loss_that_is_not_finite_is_told_of_a_run_that_succeeded(shows: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DIVERGES.replace("SHOWS", shows))
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script=str(script)) as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    for command in (("status",), ("ps", "--json", "--runs"), ("report",)):
        where = tmp_path / "runs" if "ps" in command else run.directory.root
        shown = " ".join(jurymast(*command, str(where)).stdout.split())
        assert "the loss was nan at step 3 (rank 0)" in shown, shown
