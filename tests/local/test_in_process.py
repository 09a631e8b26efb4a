"""Recovery in process: real ranks, some of which fail, while the others go on in their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.in_process import FAULT_AT, PROCESSES, SCRIPT, STEPS, ended_well, processes, traced, training
from support.runs import jurymast, tree
from support.waiting import wait_until

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*STEPS, nodes=2 * PROCESSES, each=PROCESSES, script=SCRIPT)


@pytest.fixture(scope="module", params=["all", "node"])
def shards(request: pytest.FixtureRequest) -> str:
    """Over what ranks a model is sharded: FSDP2 over all, HSDP over those of a node."""
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed_shards(trained_plainly: Callable[..., str], shards: str) -> str:
    return trained_plainly(*STEPS, "--shards", shards, nodes=2 * PROCESSES, each=PROCESSES, script=SCRIPT)


@pytest.mark.parametrize(
    ("name", "more", "cause"),
    [
        ("SIGKILL", (), "worker_killed"),
        pytest.param("SIGSTOP", ("--workers", "2"), "rank_frozen", id="SIGSTOP-with-loader-workers"),
    ],
)
def test_a_rank_fails_and_the_others_go_on_without_a_lost_step(
    tmp_path: Path, undisturbed: str, name: str, more: tuple[str, ...], cause: str
) -> None:
    with training(tmp_path, "--fault", f"{name}:{FAULT_AT}:2:begin", *more) as run:
        state = ended_well(run, tmp_path, undisturbed)
    incident = state.incidents[0]
    assert (incident.cause, incident.rank, incident.action) == (cause, 2, "in process"), run.story()
    assert (incident.step_lost_from, incident.step_restored) == (FAULT_AT, FAULT_AT), "a step was lost"
    before, after = processes(run, 1), processes(run, 2)
    assert {rank for rank in before if before[rank] == after[rank]} == {0, 1, 3}
    assert {told["pid"] for told in traced(tmp_path) if told["rank"] == 0} == {before[0]}
    assert len(state.incidents) == 1, run.story()


def test_a_rank_that_starts_anew_becomes_a_process_that_was_forked_ahead(
    tmp_path: Path, undisturbed: str
) -> None:
    with training(tmp_path, "--step-time", "0.15") as run:
        node = run.wait_step(1).placement[0]

        def ahead() -> set[int]:
            return {one.pid for one in tree(run.agent_pid(node)) if one.name() == "jurymast-ready"}

        wait_until("processes that wait", lambda: len(ahead()) == PROCESSES)
        waited = ahead()
        os.kill(run.pids(node)[1], signal.SIGKILL)
        ended_well(run, tmp_path, undisturbed)
    assert processes(run, 2)[1] in waited, run.story()


@pytest.mark.parametrize("over", ["", "node"])
def test_a_spare_takes_a_nodes_place_without_a_lost_step_and_the_ranks_of_the_others_go_on(
    tmp_path: Path, trained_plainly: Callable[..., str], over: str
) -> None:
    """The newcomers get weights, or their shards of them, from those that have the same, and what was the own
    of the lost ranks from where that was kept."""
    sharded = ("--shards", over) if over else ()
    weights = trained_plainly(*STEPS, *sharded, nodes=2 * PROCESSES, each=PROCESSES, script=SCRIPT)
    with training(tmp_path, "--stand", str(FAULT_AT), *sharded, spares=1) as run:
        wait_until("ranks that stand", lambda: len([*tmp_path.glob("stands.*")]) == PROCESSES, limit_s=240.0)
        node = run.state().placement[1]
        os.killpg(run.agent_pid(node), signal.SIGKILL)
        state = ended_well(run, tmp_path, weights)
    incident = state.incidents[0]
    assert (incident.action, incident.node) == ("swap", node), run.story()
    assert "2 of 4 ranks go on in their processes" in incident.why
    assert incident.step_restored == FAULT_AT, run.story()
    assert {*incident.tiers} == {"live"}, run.story()
    after = processes(run, 2)
    stayed = next(e for e in run.events() if isinstance(e, ev.WorkersStarted) and e.node != node)
    assert {after[0], after[1]} == {*stayed.pids}, "the ranks of the other node are other processes"


def test_a_rank_that_dies_in_its_update_costs_the_steps_since_the_last_save(
    tmp_path: Path, undisturbed: str
) -> None:
    with training(tmp_path, "--fault", f"SIGKILL:{FAULT_AT}:2:update") as run:
        state = ended_well(run, tmp_path, undisturbed)
    incident = state.incidents[0]
    assert (incident.action, incident.step_restored) == ("in process", 20), run.story()
    before, after = processes(run, 1), processes(run, 2)
    assert {rank for rank in before if before[rank] == after[rank]} == {0, 1, 3}


def test_a_fault_during_the_recovery_is_recovered_from_in_process(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, "--fault", f"SIGKILL:{FAULT_AT}:2:begin", "--again", "2") as run:
        state = ended_well(run, tmp_path, undisturbed)
    assert [one.action for one in state.incidents] == ["in process", "in process"], run.story()
    assert state.incidents[1].step_restored == FAULT_AT, run.story()
    assert processes(run, 1)[0] == processes(run, 3)[0]


@pytest.mark.long  # nine processes compile
def test_ranks_that_live_compile_nothing_again(tmp_path: Path, trained_plainly: Callable[..., str]) -> None:
    weights = trained_plainly(*STEPS, "--compile", nodes=2 * PROCESSES, each=PROCESSES, script=SCRIPT)
    more = ("--compile", "--workers", "2", "--fault", f"SIGKILL:{FAULT_AT}:2:begin")
    with training(tmp_path, *more) as run:
        state = ended_well(run, tmp_path, weights)
    assert (state.incidents[0].action, state.incidents[0].step_restored) == ("in process", FAULT_AT)
    compiled = {
        rank: {told["compiled"] for told in traced(tmp_path) if told["rank"] == rank} for rank in (0, 1, 3)
    }
    assert all(len(counts) == 1 and min(counts) > 0 for counts in compiled.values()), compiled


@pytest.mark.parametrize(
    ("name", "where"), [("SIGKILL", "backward"), pytest.param("SIGSTOP", "begin", marks=pytest.mark.long)]
)
def test_shards_outlive_a_rank_with_their_twins_or_come_from_the_last_save(
    tmp_path: Path, undisturbed_shards: str, shards: str, name: str, where: str
) -> None:
    with training(tmp_path, "--fault", f"{name}:{FAULT_AT}:2:{where}", "--shards", shards) as run:
        state = ended_well(run, tmp_path, undisturbed_shards)
    incident = state.incidents[0]
    assert (incident.rank, incident.action) == (2, "in process"), run.story()
    goes_on = {"all": 20, "node": FAULT_AT}[shards]
    assert incident.step_restored == goes_on, run.story()
    before, after = processes(run, 1), processes(run, 2)
    assert {rank for rank in before if before[rank] == after[rank]} == {0, 1, 3}
    assert len(state.incidents) == 1, run.story()


@pytest.mark.parametrize(
    ("over", "name", "where"),
    [
        ("all", "SIGKILL", "backward"),
        ("node", "SIGSTOP", "begin"),
        pytest.param("", "SIGKILL", "begin", marks=pytest.mark.long),
    ],
)
def test_what_train_makes_itself_is_made_anew_and_restored_and_nothing_of_the_old_is_left(
    tmp_path: Path, trained_plainly: Callable[..., str], over: str, name: str, where: str
) -> None:
    sharded = ("--shards", over) if over else ()
    weights = trained_plainly(*STEPS, *sharded, nodes=2 * PROCESSES, each=PROCESSES, script=SCRIPT)
    more = ("--inside", "--fault", f"{name}:{FAULT_AT}:2:{where}", "--again", "2")
    with training(tmp_path, *sharded, *more) as run:
        state = ended_well(run, tmp_path, weights)
    assert [one.action for one in state.incidents] == ["in process", "in process"], run.story()
    last = state.incidents[1]
    assert last.step_restored == 20, run.story()
    assert last.why.endswith("because `train` makes parts of the state itself"), run.story()
    before, after = processes(run, 1), processes(run, 3)
    assert {rank for rank in before if before[rank] == after[rank]} == {0, 1, 3}
    for rank in (0, 1, 3):
        first, last = (told["held"] for told in traced(tmp_path) if told["rank"] == rank and told["held"])
        assert last["left"] == 0, f"rank {rank} holds what the call of `train` before had made"
        assert last == first, f"rank {rank}"


@pytest.mark.long
def test_ranks_with_much_of_their_own_go_back_to_the_last_save(tmp_path: Path, undisturbed: str) -> None:
    more = "--own-bytes", str(300_000)
    with training(tmp_path, "--fault", f"SIGKILL:{FAULT_AT}:2:begin", *more) as run:
        state = ended_well(run, tmp_path, undisturbed)
        log = run.directory.rank_log(1, 0).read_text()
    incident = state.incidents[0]
    assert (incident.action, incident.step_restored) == ("in process", 20), run.story()
    assert "will go back to the last save" in log


@pytest.mark.long
def test_where_ranks_talk_before_run_all_restart(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, "--fault", f"SIGKILL:{FAULT_AT}:2:begin", "--before") as run:
        state = ended_well(run, tmp_path, undisturbed)
        log = run.directory.rank_log(1, 0).read_text()
    assert [one.action for one in state.incidents] == ["restart"], run.story()
    assert not {*processes(run, 1).values()} & {*processes(run, 2).values()}
    assert "ranks talk to each other before `run`" in log


@pytest.mark.long
def test_who_asks_for_a_restart_gets_new_processes(tmp_path: Path, undisturbed: str) -> None:
    with training(tmp_path, "--step-time", "0.05") as run:
        run.wait_safe(20)
        asked = jurymast("restart", "--runs", str(run.directory.root.parent), run.directory.root.name)
        assert asked.returncode == 0, asked.stderr
        state = ended_well(run, tmp_path, undisturbed)
    assert state.incidents[0].why.endswith("not in process, because new processes were asked for"), (
        run.story()
    )
    assert not {*processes(run, 1).values()} & {*processes(run, 2).values()}
