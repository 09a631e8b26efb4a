"""A run that gives its metrics out, with a node lost and the process that gives them out killed."""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import psutil
import yaml

from support.runs import local_run
from support.waiting import wait_until


def watcher_of(directory: Path) -> psutil.Process:
    (found,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "jurymast.report.watcher" in " ".join(process.info["cmdline"] or ())
        and str(directory) in process.info["cmdline"]
    )
    return found


def test_a_run_is_scraped_and_goes_on_without_who_gives_its_metrics_out(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump({"metrics": {"port": "any", "textfile": str(tmp_path)}}))
    options = ("--nodes", "2", "--spares", "1", "--policy", str(policy))
    with local_run(tmp_path, *options, script="train_tiny.py",
                   arguments=("--steps", "150", "--step-time", "0.05")) as run:  # fmt: skip
        run.wait_step(10)
        os.killpg(run.agent_pid(run.state().placement[-1]), signal.SIGKILL)

        def told() -> str:
            if not run.directory.metrics_file.exists():
                return ""
            (found,) = yaml.safe_load(run.directory.metrics_file.read_text())
            token = run.directory.metrics_token_file.read_text()
            request = urllib.request.Request(f"http://{found['targets'][0]}/metrics")
            request.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(answer.read().decode())

        restarts = f'jurymast_restarts_total{{run="{run.directory.root.name}"}} 1.0'
        wait_until("the swap", lambda: restarts in told())
        assert (tmp_path / f"jurymast-{run.directory.root.name}.prom").exists()
        watcher_of(run.directory.root).kill()
        run.wait_end()
    assert run.state().public_state == "succeeded"
