"""A maintenance that an administrator reserves nodes for while a run has them, on a real cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.slurm_runs import TRAIN, SlurmRun, jurymast, policy_file, submit, weights
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# On a busy machine some rank may be slow for long.
SLOW_MAY_BE = "health: {straggler: off}"
# Two minutes: the supervisor looks at reservations every half a minute.
LONG = (*TRAIN[:1], "1500", *TRAIN[2:], "--step-time", "0.08")
NAME = "july"
NOTICED_S = 90.0


@contextmanager
def maintenance(cluster: Cluster, *nodes: str, in_s: int) -> Iterator[float]:
    """Slurm refuses one of nodes that a job has, unless it is to ignore jobs. Gives its beginning."""
    make = [
        "scontrol", "create", f"reservation={NAME}", f"starttime=now+{in_s}", "duration=60", "users=root",
        "flags=maint,ignore_jobs", f"nodes={','.join(nodes)}",
    ]  # fmt: skip
    cluster.slurm(make)
    try:
        yield time.time() + in_s
    finally:
        cluster.slurm(["scontrol", "delete", f"reservation={NAME}"])


def foretold(cluster: Cluster, run: SlurmRun) -> list[str]:
    """What `status` says of it."""
    code, told, error = jurymast(cluster, "status", str(run.directory.root), "--json")
    assert code == 0, error
    status = json.loads(told)
    assert all(one["name"] == NAME and one["maintenance"] for one in status["reservations"])
    return [text for text in status["warnings"] if f"maintenance {NAME} begins on" in text]


def test_ranks_leave_a_node_before_its_maintenance_begins(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    options = ("--policy", policy_file(cluster, tmp_path, SLOW_MAY_BE))
    run = submit(cluster, tmp_path, "--nodes", "2", "--spares", "1", *options, arguments=LONG)
    before = run.wait_safe(20)
    victim = next(node for node in before.placement if node != before.host)
    with maintenance(cluster, victim, in_s=3600):
        run.wait("word of it", lambda s: NAME in s.reservations, limit_s=NOTICED_S)
        (warning,) = foretold(cluster, run)
        assert f"begins on {victim} at " in warning, warning
        assert "the ranks move to" in warning, warning
        assert run.state().incidents == [], "it is far away"
        cluster.slurm(["scontrol", "update", f"reservation={NAME}", "starttime=now+200"])
        starts_at = time.time() + 200.0
        moved = run.wait("the move", lambda s: bool(s.incidents) and s.incident is None, limit_s=240.0)
        assert time.time() < starts_at, run.story()
        assert victim not in moved.placement
        incident = moved.incidents[0]
        told = (incident.cause, incident.charged, incident.action)
        assert told == ("reservation_ahead", "nobody", "swap"), run.story()
        restored = next(e for e in run.events() if isinstance(e, ev.Restored) and e.attempt == 2)
        done = [e.step for e in run.events() if isinstance(e, ev.Progress) and e.t <= restored.t]
        assert restored.step == max(done), "no step is done again"
        assert run.wait_end(400.0).exit_code == 0, run.story()
    assert len(run.state().incidents) == 1, run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*LONG, nodes=2)


@pytest.mark.long
def test_what_is_done_is_on_storage_before_the_maintenance_of_all_nodes_begins(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """Of itself the run would write to storage in ten hours."""
    policy = policy_file(
        cluster, tmp_path, f"{SLOW_MAY_BE}\ncheckpoint: {{tiers: {{shared: {{every: 10h}}}}}}"
    )
    options = ("--nodes", "2", "--spares", "0", "--policy", policy)
    run = submit(cluster, tmp_path, *options, arguments=LONG)
    first = run.wait("the first write", lambda s: s.saved_on("shared") > 0).saved_on("shared")
    with maintenance(cluster, *run.state().placement, in_s=100) as starts_at:
        seen = run.wait("word of it", lambda s: NAME in s.reservations, limit_s=NOTICED_S)
        assert seen.saved_on("shared") == first
        run.wait("a newer write", lambda s: s.saved_on("shared") >= seen.step, limit_s=120.0)
        written = next(
            e
            for e in run.events()
            if isinstance(e, ev.Saved) and e.tier == "shared" and e.ok and e.copied and e.step >= seen.step
        )
        assert written.t < starts_at, run.story()
        assert run.wait_end(400.0).exit_code == 0, "Slurm lets the job go on"
    assert run.state().incidents == [], run.story()
    assert weights(cluster, tmp_path) == trained_plainly(*LONG, nodes=2)
