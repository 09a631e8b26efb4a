"""A real Prometheus scrapes a real run, at its port and through a real node exporter; and answers all that
the dashboard and the alerts ask."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.ports import free_port
from support.runs import ROOT, local_run
from support.waiting import wait_until

SITE = ROOT / "slurm" / "site" / "metrics"
TRAIN = ("--steps", "100000", "--step-time", "0.05", "--save-every", "20 steps", "--samples", "64")
PROGRAMS = ("prometheus", "promtool", "prometheus-node-exporter")
pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, PROGRAMS)),
    reason="needs Prometheus: apt-get install prometheus prometheus-node-exporter",
)
ALERTS = yaml.safe_load((SITE / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = {panel["title"]: panel for panel in json.loads((SITE / "dashboard.json").read_text())["panels"]}
# Of a run of seconds without trouble of that kind: no series is right for them.
MAY_BE_EMPTY = {"jurymast_checkpoint_failures", "jurymast_durable_interval_seconds"}


@contextmanager
def running(*command: str, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Prometheus:
    url: str
    run: str
    at: float = 0.0

    def get(self, path: str, **words: str) -> Any:
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
            told = json.load(answer)
        assert told["status"] == "success"
        return told["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series that answer, when all of the run was known."""
        found: list[dict[str, Any]] = self.get("query", query=text, time=str(self.at or time.time()))[
            "result"
        ]
        return found

    def jobs_that_know(self, text: str) -> set[str]:
        try:
            return {series["metric"]["job"] for series in self.query(text)}
        except OSError:  # it starts
            return set()


def settings(run: Path, exporter: int) -> dict[str, Any]:
    def job(name: str, **more: Any) -> dict[str, Any]:
        return {"job_name": name, "scrape_interval": "1s", **more}

    return {
        "rule_files": [str(SITE / "alerts.yaml")],
        "global": {"evaluation_interval": "1s"},
        "scrape_configs": [
            job(
                "port",
                authorization={"credentials_file": str(run / "metrics.token")},
                file_sd_configs=[{"files": [str(run / "metrics.json")], "refresh_interval": "1s"}],
            ),
            job("node", static_configs=[{"targets": [f"127.0.0.1:{exporter}"]}]),
        ],
    }


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped a run in which a node was lost."""
    folder = tmp_path_factory.mktemp("prometheus")
    policy, texts = folder / "policy.yaml", folder / "texts"
    texts.mkdir()
    policy.write_text(yaml.safe_dump({"metrics": {"port": "any", "textfile": str(texts)}}))
    options = ("--nodes", "2", "--spares", "1", "--policy", str(policy))
    with ExitStack() as stack:
        run = stack.enter_context(local_run(
            folder, *options, script="train_tiny.py", arguments=TRAIN,
        ))  # fmt: skip
        exporter, port = free_port(), free_port()
        config = folder / "prometheus.yaml"
        config.write_text(yaml.safe_dump(settings(run.directory.root, exporter)))
        stack.enter_context(running(
            "prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile",
            f"--collector.textfile.directory={texts}", f"--web.listen-address=127.0.0.1:{exporter}",
            log=folder / "exporter.log",
        ))  # fmt: skip
        run.wait_step(10)
        stack.enter_context(running(
            "prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", log=folder / "prometheus.log",
        ))  # fmt: skip
        found = Prometheus(f"http://127.0.0.1:{port}", run.directory.root.name)
        up = "jurymast_restarts_total == {} and on (run, job) jurymast_checkpoint_step"
        wait_until("two scrapes", lambda: found.jobs_that_know(up.format(0)) == {"port", "node"})
        os.killpg(run.agent_pid(run.state().placement[-1]), signal.SIGKILL)
        wait_until("the restart", lambda: found.jobs_that_know(up.format(1)) == {"port", "node"})
        yield Prometheus(found.url, found.run, time.time())


def test_a_run_is_scraped_at_its_port_and_as_a_file(prometheus: Prometheus) -> None:
    found = prometheus.query("jurymast_nodes{state='active'}")
    assert {(s["metric"]["job"], s["metric"]["run"], s["value"][1]) for s in found} == {
        ("port", prometheus.run, "2"),
        ("node", prometheus.run, "2"),
    }
    assert prometheus.query("node_textfile_scrape_error == 0")


@pytest.mark.parametrize("title", ["Nodes", "Restarts and incidents in an hour"])
def test_what_is_scraped_twice_counts_once(prometheus: Prometheus, title: str) -> None:
    for target in PANELS[title]["targets"]:
        both = spelled(target["expr"], prometheus.run)
        one = both.replace("run=~", 'job="port",run=~')
        assert one != both

        def told(query: str) -> dict[str, float]:
            return {str(each["metric"]): float(each["value"][1]) for each in prometheus.query(query)}

        alone = told(one)
        assert told(both).keys() == alone.keys()
        for labels, value in told(both).items():
            assert value < 1.9 * alone[labels] or value == alone[labels] == 0.0, labels


def spelled(expression: str, run: str) -> str:
    """What Grafana makes of it."""
    return expression.replace("$__rate_interval", "1m").replace("$run", run)


@pytest.mark.parametrize("title", PANELS)
def test_the_panel_has_its_series(prometheus: Prometheus, title: str) -> None:
    for target in PANELS[title]["targets"]:
        found = prometheus.query(spelled(target["expr"], prometheus.run))
        if not any(name in target["expr"] for name in MAY_BE_EMPTY):
            assert found, target["expr"]


def test_each_alert_can_be_evaluated(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus.get("rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    wait_until("an evaluation", lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["name"]: rule.get("lastError", "") for rule in rules()} == {
        rule["alert"]: "" for rule in ALERTS
    }

    def alerting() -> set[str]:
        return {rule["name"] for rule in rules() if rule["alerts"]}

    # The run's only spare is used.
    wait_until("the alert", lambda: "JurymastSparesExhausted" in alerting())
    assert "JurymastStalledProgress" not in alerting()


def test_alerts_are_written_as_prometheus_wants() -> None:
    subprocess.run(["promtool", "check", "rules", str(SITE / "alerts.yaml")], check=True, timeout=60)


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    told = yaml.safe_load((SITE / "alerts_test.yaml").read_text())["tests"]
    cases = [
        (case["alertname"], bool(case["exp_alerts"])) for test in told for case in test["alert_rule_test"]
    ]
    assert set(cases) == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}
    done = subprocess.run(
        ["promtool", "test", "rules", str(SITE / "alerts_test.yaml")],
        cwd=SITE, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
