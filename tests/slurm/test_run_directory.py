"""A run directory that hangs, on a real cluster: nothing is decided on what it does not say."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast.report.which_run import find_run
from support.runs import SCRIPTS, result
from support.saves import check_restores
from support.slurm_runs import TRAIN, SlurmRun, jurymast, kill_rank
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

HANGS_S = 600.0
SAVED = 30


@contextmanager
def hanging(disk: Path) -> Iterator[None]:
    """What is written there waits, as with a dead NFS server."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


@pytest.mark.long
@pytest.mark.timeout(HANGS_S + 900.0)
def test_ten_minutes_without_an_answer_and_a_dead_rank_cost_no_step_and_no_node(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """The next attempt waits for as long as its number cannot be written."""
    place, out = cluster.shared / f"{tmp_path.name}-runs", cluster.shared / f"{tmp_path.name}.json"
    place.mkdir()
    with cluster.small_share(place, 256, image=tmp_path / "disk.img") as disk:
        code, told, error = jurymast(
            cluster, "submit", "--runs", str(place), "--parsable", "--nodes", "3", "--spares", "1", "--",
            str(SCRIPTS / "train_tiny.py"), *TRAIN, "--out", str(out),
        )  # fmt: skip
        assert code == 0, error
        run = SlurmRun(cluster, find_run(told.strip(), disk).root, int(told))
        before = run.wait_safe(SAVED)
        with hanging(disk):
            ends_at = time.monotonic() + HANGS_S
            kill_rank(run, before.placement[1])
            wait_until("the end of the ten minutes", lambda: time.monotonic() > ends_at, HANGS_S + 60.0)
            assert run.job_state() == "RUNNING"
        state = run.wait_end()
        assert state.exit_code == 0, run.story()
        assert [(i.cause, i.action) for i in state.incidents] == [("worker_killed", "restart")], run.story()
        assert (state.placement, state.epoch) == (before.placement, before.epoch), run.story()
        check_restores(run, least=SAVED)
        assert result(out)["sha256"] == trained_plainly(*TRAIN, nodes=3)
