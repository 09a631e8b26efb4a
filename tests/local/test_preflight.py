"""Tests of nodes before their first attempt, on the local cluster: real test processes, agents and ranks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.run import Role, RunState
from support.runs import command_of, hosts, jurymast, local_run, processes_of, wait_gone

pytestmark = pytest.mark.torch

POLICY = "health:\n  preflight: 60s\n"
# What Python imports by itself at its start: in the test process of one node, each product has a wrong bit.
CORRUPTS_PRODUCTS = """
import os
import sys

if os.environ.get("JURYMAST_NODE") == {node!r} and "jurymast.preflight" in sys.orig_argv:
    import torch

    right = torch.matmul

    def matmul(a, b):
        product = right(a, b)
        product.view(torch.uint8)[7, 300] ^= 1
        return product

    torch.matmul = matmul
"""


# In the tests of two nodes, the first all-reduce stops each process's only thread that could answer.
HANGS_IN_PAIRS = """
import os
import signal
import sys

if "jurymast.preflight" in sys.orig_argv:
    import torch.distributed

    def all_reduce(*data, **options):
        os.kill(os.getpid(), signal.SIGSTOP)

    torch.distributed.all_reduce = all_reduce
"""

SLOW_START = """
import sys
import time

if "jurymast.preflight" in sys.orig_argv:
    time.sleep(10)
"""


def results(run_events: list[ev.Event]) -> dict[str, ev.NodeTested]:
    return {event.node: event for event in run_events if isinstance(event, ev.NodeTested)}


def at_python_start(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Every Python process that is started from now on runs `code` first."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "path"))


def test_a_node_that_calculates_wrong_never_gets_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    at_python_start(tmp_path, monkeypatch, CORRUPTS_PRODUCTS.format(node="local-2"))
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", "--policy", str(policy),
                   script="train_tiny.py", arguments=("--steps", "20")) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
        found = results(run.events())
        told = jurymast("events", str(run.directory.root)).stdout
    assert (state.exit_code, state.incidents, state.attempt) == (0, [], 1), run.story()
    assert {node: event.verdict for node, event in found.items()}["local-2"] == "bad", run.story()
    assert "float32 matrix products on cpu were wrong" in found["local-2"].message
    assert "local-2" not in state.placement
    assert state.nodes["local-2"].role is Role.FAILED
    assert "node local-2 FAILED its tests" in told


def test_tests_that_do_not_work_do_not_keep_the_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    code = "import sys\nif 'jurymast.preflight' in sys.orig_argv:\n    sys.exit('no tests today')\n"
    at_python_start(tmp_path, monkeypatch, code)
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py", arguments=("--steps", "20")) as run:  # fmt: skip
        state: RunState = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.exit_code, state.incidents) == (0, []), run.story()
    assert {event.verdict for event in results(run.events()).values()} == {"unknown"}, run.story()


@pytest.mark.long
def test_tests_that_hang_are_answered_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C code that does not return no limit of torch's helps: its agent says so."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("health:\n  preflight: 20s\n")
    at_python_start(tmp_path, monkeypatch, HANGS_IN_PAIRS)
    with local_run(tmp_path / "runs", "--nodes", "3", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py", arguments=("--steps", "20")) as run:  # fmt: skip
        state: RunState = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    found = results(run.events())
    assert len(found) == 3, run.story()
    assert all("do not answer in time" in one.message for one in found.values()), run.story()


@pytest.mark.long
def test_nodes_are_tested_before_ranks_start_and_a_suspect_once_more(tmp_path: Path) -> None:
    """All of them, also together, and no test process is left beside the ranks. A torchrun host that died
    speaks against its node until the node has passed its tests."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "1", "--policy", str(policy),
                   script="train_tiny.py",
                   arguments=("--steps", "100000", "--step-time", "0.05")) as run:  # fmt: skip
        state = run.wait_step(3)
        processes = processes_of(run.directory.root)
        left = [p.pid for p in processes if "jurymast.preflight" in command_of(p)]
        agents = [p for p in processes if "jurymast.agent" in command_of(p)]
        suspect, before = state.placement[1], run.events()
        for host in hosts(run.agent_pid(suspect)):
            host.kill()
        run.wait(
            "the suspect to pass its tests",
            lambda s: s.nodes[suspect].role is Role.SPARE and s.incident is None,
        )
        jurymast("cancel", str(run.directory.root))
        state = run.wait_end()
        wait_gone(run.directory.root)
    found = results(before)
    assert set(found) == set(state.nodes)
    assert all(event.partner in found for event in found.values()), run.story()
    assert "bad" not in {event.verdict for event in found.values()}, run.story()
    assert (left, len(agents)) == ([], 2 * 3), "each with its guard"
    assert suspect not in state.placement, run.story()
    assert results(run.events()[len(before) :])[suspect].verdict == "ok"
    assert state.nodes[suspect].reason.startswith("passed its tests after")


def test_a_supervisor_that_takes_over_brings_the_tests_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    at_python_start(tmp_path, monkeypatch, SLOW_START)
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", "--policy", str(policy),
                   script="train_tiny.py", arguments=("--steps", "20")) as run:  # fmt: skip
        run.wait("the tests to begin", lambda s: bool(s.testing))
        endpoint = json.loads((run.directory.epochs / "000001.json").read_text())
        os.kill(endpoint["pid"], signal.SIGKILL)
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.epoch, state.exit_code, state.attempt, state.incidents) == (2, 0, 1, []), run.story()
    found = results(run.events())
    assert set(found) == set(state.nodes)
    assert "unknown" not in {event.verdict for event in found.values()}, run.story()
