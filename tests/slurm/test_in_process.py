"""Recovery in process on a real cluster: a rank is killed, or stands still, then a node loses power, and the
others live. With data parallelism, with shards (FSDP2), and with shards of which other nodes have copies
(HSDP)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.incident import Incident
from support.in_process import assert_ranks_are_alike
from support.runs import SCRIPTS
from support.saves import check_restores
from support.slurm_runs import SlurmRun, policy_file, power_loss, submit, weights
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

SCRIPT = SCRIPTS / "train_in_process.py"
TRAIN = ("--steps", "160")
SAVE_EVERY = 10
FAULT_AT = 3 * SAVE_EVERY - 1  # the save before it has had the time of nearly an interval


@dataclass(frozen=True)
class Training:
    """Over what ranks it is sharded ("": over none), and on how many nodes."""

    shards: str
    nodes: int
    each: int
    fault: str = "SIGKILL"
    cause: str = "worker_killed"

    @property
    def arguments(self) -> tuple[str, ...]:
        return (*TRAIN, "--shards", self.shards) if self.shards else TRAIN

    @property
    def loses_steps(self) -> bool:
        """Whether a rank has a part of the model that no other one has."""
        return self.shards == "all"


TRAININGS = {
    "DDP": Training("", nodes=3, each=1),
    "FSDP2": Training("all", nodes=3, each=1),
    "FSDP2-frozen": Training("all", nodes=3, each=1, fault="SIGSTOP", cause="rank_frozen"),
    "HSDP": Training("node", nodes=2, each=2),
}


def pids(run: SlurmRun, attempt: int) -> dict[tuple[str, int], int]:
    """Those of the attempt's ranks, by node and local rank."""
    started = [e for e in run.events() if isinstance(e, ev.WorkersStarted) and e.attempt == attempt]
    return {(e.node, local): pid for e in started for local, pid in enumerate(e.pids)}


def restored(run: SlurmRun, attempt: int) -> ev.Restored:
    return next(e for e in run.events() if isinstance(e, ev.Restored) and e.attempt == attempt)


def lost_steps(incident: Incident) -> int:
    assert incident.step_restored is not None
    return incident.step_lost_from - incident.step_restored


# The others show another thing each, which tests/local/test_in_process.py shows as well.
FIRST = ("DDP", "HSDP")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in TRAININGS]
)
def test_ranks_live_on_beside_a_rank_that_fails_and_a_node_without_power(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str], name: str
) -> None:
    what = TRAININGS[name]
    undisturbed = trained_plainly(
        *what.arguments, nodes=what.nodes * what.each, each=what.each, script=SCRIPT.name
    )
    policy = policy_file(cluster, tmp_path, "health: {straggler: off}")
    failing, folder = what.each, cluster.shared / tmp_path.name  # the first rank of the second node
    run = submit(
        cluster, tmp_path, "--nodes", str(what.nodes), "--nproc-per-node", str(what.each), "--spares", "1",
        "--policy", policy, script=SCRIPT,
        arguments=(*what.arguments, "--step-time", "0.04", "--save-every", f"{SAVE_EVERY} steps",
                   "--trace", str(folder / "trace"), "--fault", f"{what.fault}:{FAULT_AT}:{failing}:begin"),
    )  # fmt: skip
    state = run.wait("the first recovery", lambda s: len(s.incidents) == 1 and s.incident is None)
    failed, first = state.placement[1], state.incidents[0]
    assert (first.cause, first.action, first.node) == (what.cause, "in process", failed), run.story()
    assert lost_steps(first) <= (SAVE_EVERY if what.loses_steps else 0), run.story()
    before, after = pids(run, 1), pids(run, 2)
    assert {rank for rank in before if before[rank] == after[rank]} == {*before} - {(failed, 0)}

    safe = run.wait_safe(4 * SAVE_EVERY)
    lost = next(node for node in reversed(safe.placement) if node != safe.host)
    power_loss(run, lost)
    state = run.wait_end()
    second = state.incidents[1]
    assert (second.action, second.node) == ("swap", lost), run.story()
    ranks = what.nodes * what.each
    assert f"{ranks - what.each} of {ranks} ranks go on in their processes" in second.why
    last = pids(run, 3)
    stayed = {rank for rank in after if rank[0] != lost}
    assert {rank: last[rank] for rank in stayed} == {rank: after[rank] for rank in stayed}
    if what.loses_steps:
        check_restores(run, least=4 * SAVE_EVERY)
        planned = next(e for e in run.events() if isinstance(e, ev.RestorePlanned) and e.attempt == 3)
        assert restored(run, 3).tier == "memory", run.story()
        assert {*planned.tiers} == {"memory", "peer"}, "shards did not come from memory"
        assert planned.tiers["memory"] > planned.tiers["peer"] > 0, run.story()
    else:
        assert (second.step_restored or 0) >= 4 * SAVE_EVERY
    assert (state.phase.value, len(state.incidents)) == ("succeeded", 2), run.story()
    assert weights(cluster, tmp_path) == undisturbed
    assert_ranks_are_alike(folder)
