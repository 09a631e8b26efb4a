"""Real runs whose ranks train on the GPU: one of them is killed, and the others restart or live on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.in_process import FAULT_AT, STEPS, ended_well, processes, traced, training
from support.runs import local_run, result, wait_gone
from support.waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.alone]

ON_GPU = ("--device", "cuda")
TINY = ("--steps", "200", "--width", "512", *ON_GPU)
# What a context of CUDA takes is more, what a training's allocations differ by is less.
SPREAD_BYTES = 200 << 20


def test_ranks_restart_in_place_and_the_killed_ones_memory_is_free(
    tmp_path: Path,
    trained_plainly: Callable[..., str],
    used_bytes: Callable[[], int],
    tell: Callable[[str], None],
) -> None:
    weights = trained_plainly(*TINY, each=2)
    before, out = used_bytes(), tmp_path / "out.json"
    with local_run(
        tmp_path / "runs", "--nodes", "1", "--spares", "0", "--nproc-per-node", "2", script="train_tiny.py",
        arguments=(*TINY, "--buffer-mib", "64", "--save-every", "10 steps", "--step-time", "0.02",
                   "--out", str(out)),
    ) as run:  # fmt: skip
        node = run.wait_saved(40).placement[0]
        beside = used_bytes()
        os.kill(run.pids(node)[1], signal.SIGKILL)
        run.wait("recovery", lambda state: bool(state.incidents) and state.incident is None)
        run.wait_step(120)
        again = used_bytes()
        state = run.wait_end()
        wait_gone(run.directory.root)
    incident = state.incidents[0]
    assert (state.exit_code, len(state.incidents)) == (0, 1), run.story()
    assert (incident.cause, incident.action) == ("worker_killed", "restart"), run.story()
    assert (incident.step_restored or 0) >= 40, run.story()
    assert result(out)["sha256"] == weights
    assert again < beside + SPREAD_BYTES, "the killed rank's memory is still taken"
    wait_until("free memory", lambda: used_bytes() < before + SPREAD_BYTES)
    lasted = (incident.recovered_at or 0.0) - incident.fault_at
    tell(f"restart in place: {lasted:.2f} s from the fault, restored in {incident.restore_s:.3f} s")


def test_a_rank_of_nccl_restarts_in_place(tmp_path: Path, trained_plainly: Callable[..., str]) -> None:
    nccl = (*TINY, "--backend", "nccl")
    weights = trained_plainly(*nccl, nodes=1)
    out = tmp_path / "out.json"
    with local_run(
        tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
        arguments=(*nccl, "--save-every", "10 steps", "--step-time", "0.02", "--out", str(out)),
    ) as run:  # fmt: skip
        node = run.wait_saved(40).placement[0]
        os.kill(run.pids(node)[0], signal.SIGKILL)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.exit_code, [one.action for one in state.incidents]) == (0, ["restart"]), run.story()
    assert result(out)["sha256"] == weights


@pytest.mark.parametrize(
    ("name", "where", "norm"),
    [
        ("SIGKILL", "begin", "layer"), ("SIGKILL", "backward", "layer"), ("SIGSTOP", "begin", "layer"),
        ("SIGKILL", "begin", "batch"),
    ],
)  # fmt: skip
def test_ranks_live_on_beside_one_that_fails_without_a_lost_step(
    tmp_path: Path, trained_plainly: Callable[..., str], used_bytes: Callable[[], int],
    tell: Callable[[str], None], name: str, where: str, norm: str,
) -> None:  # fmt: skip
    what = (*ON_GPU, "--width", "1024", "--norm", norm)
    weights = trained_plainly(*STEPS, *what, nodes=4, each=2, script="train_in_process.py")
    before = used_bytes()
    with training(tmp_path, *what, "--fault", f"{name}:{FAULT_AT}:2:{where}") as run:
        state = ended_well(run, tmp_path, weights)
        log = run.directory.rank_log(1, 0).read_text() + run.directory.rank_log(2, 0).read_text()
    incident = state.incidents[0]
    assert (incident.rank, incident.action, incident.step_lost_from) == (2, "in process", FAULT_AT)
    if norm == "layer":
        assert incident.step_restored == FAULT_AT, run.story()
    else:
        # Its buffers are read after each step, which waits for the GPU. Where that takes too long, the ranks
        # go back to the last save, and say so.
        assert incident.step_restored == (20 if "going back to the last save" in log else FAULT_AT)
    first, second = processes(run, 1), processes(run, 2)
    assert {rank for rank in first if first[rank] == second[rank]} == {0, 1, 3}
    wait_until("free memory", lambda: used_bytes() < before + SPREAD_BYTES)
    steps = [(told["attempt"], told["t"]) for told in traced(tmp_path)]
    last, next_ = max(t for a, t in steps if a == 1), min(t for a, t in steps if a == 2)
    decided, restored = incident.decided_at or 0.0, incident.restored_at or 0.0
    tell(f"in process, {name} {where} {norm}: {next_ - last:.2f} s from the last step to the next, of which")
    tell(f"  {decided - incident.fault_at:.2f} s until decided, {restored - decided:.2f} s until restored")
    for line in log.splitlines():
        if "last save" in line:
            tell(f"  {line}")
