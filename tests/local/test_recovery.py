"""The restart ladder on the local cluster: real agents and ranks; a node is a process group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from jurymast.cluster.allocation import local_process
from jurymast.core.state.run import RunState
from support.runs import RunUnderTest, hosts, jurymast, local_run, processes_of, result, wait_gone
from support.saves import check_restores
from support.waiting import wait_until

pytestmark = pytest.mark.torch

STEPS = 120
TRAIN = ("--steps", str(STEPS), "--step-time", "0.05", "--save-every", "10 steps")


@pytest.fixture(scope="module")
def undisturbed(trained_plainly: Callable[..., str]) -> str:
    return trained_plainly(*TRAIN)


def kill_rank(run: RunUnderTest, node: str) -> None:
    os.kill(run.pids(node)[0], signal.SIGKILL)


def crash_node(run: RunUnderTest, node: str) -> None:
    os.killpg(run.agent_pid(node), signal.SIGKILL)


def kill_host(run: RunUnderTest, node: str) -> None:
    """The torchrun host dies under its ranks."""
    for host in hosts(run.agent_pid(node)):
        host.kill()


# Others happen on the real cluster only.
FAULTS = [(kill_rank, "worker_killed", "restart"), (kill_host, "host_died", "swap")]


@pytest.mark.long
def test_fault_after_fault_costs_no_bit(tmp_path: Path, trained_plainly: Callable[..., str]) -> None:
    """First one of the script, then one of a rank, and one that costs a spare."""
    out = tmp_path / "out.json"
    train = (*TRAIN, "--steps", "150")
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", script="train_tiny.py",
                   arguments=(*train, "--raise-once", "15:0", "--out", str(out))) as run:  # fmt: skip
        assert heard_at(run) == {"127.0.0.1"}, "others on this network could talk to a run of this machine"
        run.wait("the exception", partial(recovered, 1))
        for number, (fault, cause, action) in enumerate(FAULTS, 2):
            safe = (run.state().incidents[-1].step_restored or 0) + 20
            fault(run, run.wait_safe(safe).placement[1])
            incident = run.wait(f"the recovery after {cause}", partial(recovered, number)).incidents[-1]
            assert (incident.cause, incident.action) == (cause, action), run.story()
            restored = incident.step_restored or 0
            assert max(safe, run.newest_saved("peer", attempt=number)) <= restored, run.story()
            assert restored <= run.newest_saved("memory", attempt=number), run.story()
            assert set(incident.tiers) == ({"memory"} if action == "restart" else {"memory", "peer"})
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    first = state.incidents[0]
    assert (first.cause, first.rank, first.action) == ("worker_exception", 0, "restart")
    check_restores(run, least=20 * len(FAULTS))
    assert result(out)["sha256"] == trained_plainly(*train)


def heard_at(run: RunUnderTest) -> set[str]:
    """Every address at which a process of the run listens."""
    run.wait("the first step", lambda state: state.step > 0)
    heard: set[str] = set()
    for process in processes_of(run.directory.root):
        with suppress(psutil.NoSuchProcess):  # some only look at something, and end
            connections = process.net_connections()
            heard |= {str(one.laddr[0]) for one in connections if one.status == psutil.CONN_LISTEN}
    return heard


def recovered(number: int, state: RunState) -> bool:
    return len(state.incidents) == number and state.incident is None


@pytest.mark.long
def test_what_is_sent_to_all_of_a_job_costs_no_warm_server(tmp_path: Path) -> None:
    """Ranks come from the same one as before, not from another that outlives its host."""
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="train_tiny.py",
                   arguments=TRAIN) as run:  # fmt: skip
        node = run.wait_saved(20).placement[0]
        rank = psutil.Process(run.pids(node)[0])
        server = rank.ppid()
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(server, number)
        rank.send_signal(signal.SIGTERM)
        run.wait("recovery", lambda state: bool(state.incidents) and state.incident is None)
        assert psutil.Process(run.pids(node)[0]).ppid() == server
        assert run.wait_end().exit_code == 0, run.story()
        wait_gone(run.directory.root)


@pytest.mark.long
def test_no_spare_left_requeues_without_the_bad_node(tmp_path: Path, undisturbed: str) -> None:
    out = tmp_path / "out.json"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--out", str(out))) as run:  # fmt: skip
        lost = run.wait_safe(20).placement[1]
        crash_node(run, lost)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.incidents[0].action == "requeue"
    assert lost in state.excluded
    assert lost not in state.placement
    check_restores(run, least=20)
    assert result(out)["sha256"] == undisturbed


@pytest.mark.long
def test_a_script_that_always_crashes_is_started_three_times_and_told_why(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="crash.py",
                   arguments=("--rank", "1")) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.phase.value == "failed"
    assert state.exit_code == 1
    incident = state.incidents[-1]
    assert (incident.action, incident.rank, incident.node) == ("stop", 1, state.placement[1])
    assert "crash loop" in incident.reason
    assert "ZeroDivisionError" in incident.traceback
    assert len(state.incidents) == 3
    told = jurymast("status", str(run.directory.root))
    assert "ZeroDivisionError" in told.stdout
    assert state.placement[1] in told.stdout


def test_exit_code_of_the_application_passes_through(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script="crash.py",
                   arguments=("--exit", "7")) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 7


def test_a_hang_inside_a_collective_is_found_and_resolved(tmp_path: Path, undisturbed: str) -> None:
    out = tmp_path / "out.json"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--out", str(out), "--hang-once", "25:1")) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert [(i.cause, i.action) for i in state.incidents] == [("hang", "restart")]
    assert state.incidents[0].seconds()["detect"] < 20
    check_restores(run, least=20)
    assert result(out)["sha256"] == undisturbed


def connected_to(port: int, agents: Sequence[psutil.Process]) -> set[int]:
    """Ports from which these agents have connections to the one of their supervisor."""
    found = [one for agent in agents for one in agent.net_connections("tcp") if one.status == "ESTABLISHED"]
    return {one.laddr.port for one in found if one.raddr and one.raddr.port == port}


def test_neither_a_long_rest_nor_a_supervisor_in_trouble_touches_the_ranks(
    tmp_path: Path, undisturbed: str
) -> None:
    """An evaluation in another process, an upload: a rank idles for long, and the others wait for it. The
    supervisor stands still until its agents have hung up, goes on, and crashes."""
    out = tmp_path / "out.json"
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=(*TRAIN, "--rest-once", "25:1:25", "--out", str(out))) as run:  # fmt: skip
        placement = run.wait_saved(10).placement
        endpoint = json.loads((run.directory.epochs / "000001.json").read_text())
        agents = [psutil.Process(run.agent_pid(node)) for node in placement]
        before = connected_to(endpoint["port"], agents)
        os.kill(endpoint["pid"], signal.SIGSTOP)
        wait_until("the end of all patience", lambda: not before & connected_to(endpoint["port"], agents))
        os.kill(endpoint["pid"], signal.SIGCONT)
        run.wait("word of it", lambda s: any("paused for" in text for _, text in s.notes))
        os.kill(endpoint["pid"], signal.SIGKILL)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert (state.epoch, state.attempt, state.incidents) == (2, 1, []), run.story()
    assert result(out)["sha256"] == undisturbed


def test_a_signal_to_the_batch_process_cancels(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_tiny.py",
                   arguments=("--steps", "100000", "--step-time", "0.05")) as run:  # fmt: skip
        run.wait_step(5)
        batch = local_process(run.directory)
        assert batch is not None
        batch.terminate()
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.phase.value == "cancelled"
    assert state.end_reason == "cancel requested by a signal"


def test_an_unmodified_script_is_watched_and_restarted(
    tmp_path: Path, trained_plainly: Callable[..., str]
) -> None:
    """No import of jurymast in it: torch's optimizer hook gives the heartbeats."""
    out, train = tmp_path / "out.json", ("--steps", "100", "--save-every", "10")
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="train_plain.py",
                   arguments=(*train, "--step-time", "0.08", "--checkpoints", str(tmp_path / "own"),
                              "--out", str(out))) as run:  # fmt: skip
        kill_rank(run, run.wait_step(20).placement[1])
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.exit_code, len(state.incidents)) == (0, 1), run.story()
    assert result(out)["restored"] >= 10  # by the script itself
    checkpoints = ("--checkpoints", str(tmp_path / "plain"))
    assert result(out)["sha256"] == trained_plainly(*train, *checkpoints, script="train_plain.py")


@pytest.mark.alone
def test_a_machine_that_is_merely_busy_raises_no_alarm(tmp_path: Path, undisturbed: str) -> None:
    """Two processes that burn each core beside the training: slow heartbeats, no lost node, no hang."""
    out = tmp_path / "out.json"
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", script="train_tiny.py",
                       arguments=(*TRAIN, "--out", str(out))) as run:  # fmt: skip
            state = run.wait_end()
            wait_gone(run.directory.root)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert (state.exit_code, state.incidents) == (0, []), run.story()
    assert result(out)["sha256"] == undisturbed
