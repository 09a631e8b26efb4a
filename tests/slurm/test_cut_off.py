"""The only active node is cut off from all others, but not from storage: no collective stops its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import result
from support.saves import check_restores
from support.slurm_runs import TRAIN, jurymast, submit
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]


def test_ranks_that_were_replaced_end_while_their_node_is_cut_off(
    cluster: Cluster, tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    end = cluster.shared / f"{tmp_path.name}.end"
    end.unlink(missing_ok=True)  # an earlier session's
    train = (*TRAIN, "--steps", "1000000", "--until", str(end))
    run = submit(cluster, tmp_path, "--nodes", "1", "--spares", "2", arguments=train)
    state = run.wait_safe(20)
    if state.placement == (state.host,):  # the others were slow; with it the supervisor would be cut off
        assert jurymast(cluster, "drain", str(run.directory.root), state.host)[0] == 0
        run.wait("the swap", lambda s: s.placement != (s.host,) and s.phase.value == "running")
        state = run.wait_safe(40)
    (victim,) = state.placement
    before, ranks = state.attempt, set(run.pids(victim))

    def alive() -> set[int]:
        return {process.node_pid for process in cluster.processes(victim)}

    assert ranks <= alive()
    cluster.fault("partition", victim)
    run.wait("the next attempt", lambda s: s.attempt > before and s.phase.value == "running")
    wait_until("end of the ranks that were replaced", lambda: not ranks & alive())
    assert run.agent_pid(victim) in alive(), "with the images that it holds"
    cluster.fault("heal", victim)
    run.wait("its return", lambda s: s.nodes[victim].role.value in ("suspect", "spare"))
    end.touch()
    state = run.wait_end()
    assert state.exit_code == 0, run.story()
    assert (state.incidents[-1].cause, state.incidents[-1].action) == ("node_lost", "swap"), run.story()
    check_restores(run, least=20)
    done = result(cluster.shared / f"{tmp_path.name}.json")
    assert done["sha256"] == trained_plainly(*TRAIN, "--steps", str(done["steps"]), nodes=1), run.story()
