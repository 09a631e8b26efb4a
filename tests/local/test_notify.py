"""A run whose policy names somebody to tell."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import yaml

from support.runs import local_run
from support.waiting import wait_until


def test_a_lost_node_and_the_end_of_a_run_are_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read() + chr(10))"
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"notify": [{"command": [sys.executable, "-c", program]}]}))
    options = ("--nodes", "2", "--spares", "1", "--policy", str(policy))
    with local_run(tmp_path, *options, script="train_tiny.py",
                   arguments=("--steps", "120", "--step-time", "0.05")) as run:  # fmt: skip
        run.wait_step(10)
        os.killpg(run.agent_pid(run.state().placement[-1]), signal.SIGKILL)
        run.wait_end()
        wait_until("all notices", lambda: told.exists() and '"finished"' in told.read_text())
    notices = [json.loads(line) for line in told.read_text().splitlines()]
    assert [notice["kind"] for notice in notices] == ["incident", "spare", "finished"]
    assert {notice["run"] for notice in notices} == {run.directory.root.name}
