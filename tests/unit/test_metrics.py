"""A run's metrics: what they say, and that nobody who scrapes, and no place where they are put, holds
anything up. Scrapes come over real sockets, and the process is a real one."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jurymast import foreign, tracker
from jurymast.core.goodput import CATEGORIES
from jurymast.core.state.events import Event
from jurymast.core.state.findings import HARDWARE, Finding, Verdict
from jurymast.core.state.run import Role
from jurymast.core.state.settings import Exposure
from jurymast.errors import PolicyError
from jurymast.interpreter import run_module
from jurymast.policy.resolve import Layer, resolve
from jurymast.report import exporter, metrics, tracking
from jurymast.report.exporter import Exporter, Snapshot
from jurymast.report.metrics import COUNTER, RunMetrics
from jurymast.report.status import StatusWatcher, read_status
from jurymast.rundir import RunDirectory
from jurymast.wire.addresses import listen_at_all
from support.commands import crash_loop, swapped
from support.runs import ROOT
from support.stories import START, Story
from support.waiting import wait_until

OPEN = "application/openmetrics-text; version=1.0.0"
Values = dict[tuple[str, str], float]


def written(story: Story, root: Path, wanted: Exposure | None = None) -> RunDirectory:
    settings = replace(story.plan.settings, metrics=wanted or Exposure())
    story.plan = replace(story.plan, settings=settings)
    return story.write(root)


def values(watcher: StatusWatcher, now: float) -> Values:
    """By name and the value of the label besides the run's, if there is one."""
    return {
        (family.name.removeprefix("jurymast_"), "/".join(v for k, v in labels.items() if k != "run")): value
        for family in RunMetrics(watcher).families(now)
        for labels, value in family.values
    }


def of(story: Story, tmp_path: Path, now: float | None = None) -> Values:
    return values(read_status(written(story, tmp_path / "run")), story.t if now is None else now)


# ---- what they say


def test_a_run_that_swapped_a_node(tmp_path: Path) -> None:
    found = of(swapped(finished=False), tmp_path)
    assert found["step", ""] == 60
    assert found["steps_total", ""] == 70
    assert found["steps_repeated_total", ""] == 10
    assert found["incidents_total", "node_lost"] == 1
    assert found["incidents_total", "hang"] == 0
    assert found["restarts_total", ""] == 1
    assert (found["spares_asked", ""], found["spares_ready", ""]) == (1, 0)
    assert (found["nodes", "active"], found["nodes", "failed"]) == (2, 1)
    assert found["node_in_trouble", "n3/failed/"] == 1
    assert found["checkpoint_step", "shared"] == 40
    assert [state for (name, state), on in found.items() if name == "state" and on] == ["running"]


def test_node_seconds_sum_up_and_ratios_are_those_of_the_report(tmp_path: Path) -> None:
    story = swapped(finished=False)
    watcher = read_status(written(story, tmp_path / "run"))
    found, account = values(watcher, story.t + 1), watcher.ledger.account()
    spent = sum(value for (name, _), value in found.items() if name == "time_seconds_total")
    assert spent == pytest.approx((account.allocated_us + account.queue_us) / 1e6)
    assert {kind for name, kind in found if name == "time_seconds_total"} >= {c.name for c in CATEGORIES}
    told = watcher.ledger.account(story.t + 1).ratios()
    assert found["goodput_ratio", "runtime"] == told["runtime_goodput"]
    assert found["goodput_ratio", "allocation"] == told["allocation_goodput"]
    assert found["goodput_ratio", "ettr"] == told["ettr"]


def test_a_ratio_is_never_flatter_than_what_is_known(tmp_path: Path) -> None:
    """Where the script resumed is not known, so steps may be new or done again."""
    story = Story().running(10)
    story.stepped(20, absolute=False)
    story.lost("n3")
    story.stopped()
    story.told().ranks_up().stepped(10, absolute=False).stepped(20, absolute=False)
    found = of(story, tmp_path)
    assert found["goodput_ratio", "runtime"] < found["goodput_upper_ratio", "runtime"]


def test_what_is_not_known_yet_is_left_out(tmp_path: Path) -> None:
    found = of(Story().submitted(), tmp_path)
    later = {"step_seconds", "last_progress_timestamp_seconds", "goodput_ratio", "checkpoint_step"}
    assert not {name for name, _ in found} & later
    assert found["state", "queued"] == 1


def test_a_counter_does_not_fall_if_the_past_looks_different(tmp_path: Path) -> None:
    watcher = read_status(written(swapped(finished=False), tmp_path / "run"))
    told = RunMetrics(watcher)

    def repeated() -> float:
        return next(f for f in told.families(START) if f.name == "jurymast_steps_repeated_total").values[0][1]

    assert repeated() == 10
    watcher.ledger.steps.again = 4
    assert repeated() == 10


def test_only_nodes_that_need_a_look_are_named_and_not_too_many(tmp_path: Path) -> None:
    watcher = read_status(written(Story(active=80).running(20), tmp_path / "run"))
    node = watcher.state.nodes["n7"]
    node.findings["x"] = Finding(
        probe="nvidia", code="xid-79", verdict=Verdict.BAD, kind=HARDWARE, message="fell off", at=0.0
    )
    assert [key for name, key in values(watcher, START) if name == "node_in_trouble"] == ["n7/active/xid-79"]
    for node in watcher.state.nodes.values():
        node.role = Role.FAILED
    found = values(watcher, START)
    assert sum(name == "node_in_trouble" for name, _ in found) == metrics.NODES_NAMED
    assert found["nodes", "failed"] == 81


def test_names_follow_prometheus_s_conventions(tmp_path: Path) -> None:
    told = RunMetrics(read_status(written(swapped(), tmp_path / "run"))).families(START)
    assert {family.name for family in told if family.name.endswith("_total")} == {
        family.name for family in told if family.kind == COUNTER
    }
    assert len({family.name for family in told}) == len(told)
    assert all(re.fullmatch(r"jurymast_[a-z_]+", family.name) and family.meaning for family in told)
    assert all({"run"} <= labels.keys() for family in told for labels, _ in family.values)


def test_openmetrics_and_the_older_format_are_read_back(tmp_path: Path) -> None:
    snapshot = Snapshot(RunMetrics(read_status(written(crash_loop(), tmp_path / "run"))).families(START))
    text, content_type = snapshot.encoded(OPEN)
    assert content_type.startswith("application/openmetrics-text")
    read = {
        sample.name: sample.value
        for f in text_string_to_metric_families(text.decode())
        for sample in f.samples
    }
    assert read["jurymast_restarts_total"] == 2
    older, content_type = snapshot.encoded("")
    assert content_type.startswith("text/plain")
    assert b"# TYPE jurymast_restarts_total counter" in older


# ---- the policy


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"port": 70000}, "metrics.port: must be at most 65535"),
        ({"port": "web"}, "metrics.port: web is not a whole number"),
        ({"token": "/home/ada/token"}, "a token is for a port, and there is none"),
        ({"textfile": "prom"}, "prom is not an absolute path"),
        ({"every": "5s"}, "metrics.every: unknown key"),
    ],
)
def test_a_policy_that_gives_nothing_out_is_refused(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(PolicyError) as refused:
        resolve([Layer("policy.yaml", {"metrics": entry})])
    assert problem in str(refused.value)


def test_a_policy_with_metrics_is_refused_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jurymast.policy.model.find_spec", lambda name: None)
    assert not resolve([]).settings().metrics
    with pytest.raises(PolicyError, match="pip install 'jurymast.metrics.'"):
        resolve([Layer("policy.yaml", {"metrics": {"socket": "on"}})])


def test_a_policy_says_where_metrics_are() -> None:
    settings = resolve(
        [Layer("policy.yaml", {"metrics": {"port": "any", "textfile": "/run/prom"}})]
    ).settings()
    assert settings.metrics == Exposure(port=0, textfile="/run/prom")
    assert settings.metrics


@pytest.mark.parametrize(
    ("wanted", "scraped"),
    [
        (Exposure(), False),
        (Exposure(trackers=("mlflow",)), False),
        (Exposure(socket=True), True),
        (Exposure(port=0), True),
        (Exposure(textfile="/run/prom"), True),
    ],
)
def test_metrics_are_given_out_at_any_of_these_places(wanted: Exposure, scraped: bool) -> None:
    assert wanted.scraped is scraped


# ---- scrapes


@contextmanager
def exporting(story: Story, root: Path, wanted: Exposure) -> Iterator[Exporter]:
    watcher = read_status(written(story, root, wanted))
    found = Exporter(watcher, wanted)
    try:
        yield found
    finally:
        found.finish(time.monotonic() + 60.0)


def port_of(directory: Path) -> int:
    (target,) = json.loads((directory / "metrics.json").read_text())
    return int(target["targets"][0].rpartition(":")[2])


def scrape(port: int, token: str = "", path: str = "/metrics", accepts: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Accept": accepts, **({"Authorization": f"Bearer {token}"} if token else {})}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    with closing(connection):
        return answer.status, answer.read().decode()


def test_a_port_answers_only_those_who_have_the_token(tmp_path: Path) -> None:
    with exporting(swapped(), tmp_path / "run", Exposure(port=0)) as found:
        found.look()
        port, file = port_of(tmp_path / "run"), tmp_path / "run" / "metrics.token"
        token = file.read_text()
        assert file.stat().st_mode & 0o777 == 0o600
        assert scrape(port, token)[1].count("jurymast_step{") == 1
        assert scrape(port, token, accepts=OPEN)[1].endswith("# EOF\n")
        assert scrape(port)[0] == scrape(port, token[:-1])[0] == scrape(port, f"{token}x")[0] == 401
        assert "jurymast_" not in scrape(port)[1]
        assert scrape(port, token, "/")[0] == 404
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert file.exists()  # the next supervisor's process answers to the same


def test_a_team_s_token_serves_all_its_runs_if_nobody_else_can_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o644)
    with exporting(swapped(), tmp_path / "run", Exposure(port=0, token=str(token))) as found:
        found.look()
        assert not (tmp_path / "run" / "metrics.json").exists()
        token.chmod(0o600)
        token.write_text("short")
        found._listen()
        token.write_text("0123456789abcdef\n")
        found._listen()
        assert scrape(port_of(tmp_path / "run"), "0123456789abcdef")[0] == 200
    assert "has fewer than 16 characters" in caplog.text
    assert "0123456789" not in caplog.text


def test_a_socket_is_for_the_run_s_user_whatever_the_length_of_its_path(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 40) / "run"
    root.parent.mkdir()
    with exporting(swapped(), root, Exposure(socket=True)) as found:
        found.look()
        assert (root / "metrics.sock").stat().st_mode & 0o777 == 0o600
        folder = os.open(root, os.O_PATH)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"/proc/self/fd/{folder}/metrics.sock")
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        os.close(folder)
    assert answer.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"jurymast_step{" in answer
    assert not (root / "metrics.sock").exists()


def test_scrapers_that_hang_keep_nobody_away_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "SCRAPE_LIMIT_S", 0.5)
    monkeypatch.setattr(exporter.ScrapeHandler, "timeout", 60.0)
    with exporting(swapped(), tmp_path / "run", Exposure(port=0)) as found:
        found.look()
        port, token = port_of(tmp_path / "run"), (tmp_path / "run" / "metrics.token").read_text()
        hanging = [socket.create_connection(("127.0.0.1", port)) for _ in range(exporter.SCRAPES_MOST)]
        for one in hanging:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")

        def answered() -> bool:
            try:
                return scrape(port, token)[0] == 200
            except (OSError, http.client.HTTPException):
                return False

        wait_until("an answer", answered)
        for one in hanging:
            one.close()


def test_who_has_shown_the_token_is_displaced_by_no_crowd(tmp_path: Path) -> None:
    """Others hold all places all the time, and come again and again."""
    with exporting(swapped(), tmp_path / "run", Exposure(port=0)) as found, ExitStack() as opened:
        found.look()
        port, token = port_of(tmp_path / "run"), (tmp_path / "run" / "metrics.token").read_text()

        def crowd() -> None:
            for _ in range(3 * exporter.SCRAPES_MOST):
                one = opened.enter_context(
                    socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
                )
                one.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")

        crowd()
        assert scrape(port, token)[0] == 200, "the newest displaces the oldest"
        slow = opened.enter_context(socket.create_connection(("127.0.0.1", port)))
        slow.sendall(b"GET /metrics HTTP/1.0\r\n")
        crowd()
        slow.sendall(f"Authorization: Bearer {token}\r\n\r\n".encode())
        assert slow.recv(1 << 16).startswith(b"HTTP/1.0 200 OK")


def test_what_could_not_be_renewed_is_not_given_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "STALE_S", -exporter.EVERY_S)
    with exporting(swapped(), tmp_path / "run", Exposure(port=0)) as found:
        found.look()
        token = (tmp_path / "run" / "metrics.token").read_text()
        assert scrape(port_of(tmp_path / "run"), token)[0] == 503


def test_an_occupied_port_is_told_once_and_taken_when_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "LISTEN_AGAIN_S", 0.0)
    with listen_at_all() as taken:
        port = taken.getsockname()[1]
        with exporting(swapped(), tmp_path / "run", Exposure(port=port)) as found:
            found.look()
            found.look()
            assert [m.partition(":")[0] for m in caplog.messages] == ["metrics.port"]
            taken.close()
            found.look()
            assert port_of(tmp_path / "run") == port


# ---- the file


def test_a_file_for_node_exporter_is_there_while_somebody_renews_it(tmp_path: Path) -> None:
    with exporting(swapped(), tmp_path / "run", Exposure(textfile=str(tmp_path))) as found:
        found.look()
        file = tmp_path / f"jurymast-{found._metrics._watcher.plan.run}.prom"
        wait_until("the file", file.exists)
        assert file.stat().st_mode & 0o777 == 0o644
        assert "jurymast_step{" in file.read_text()
    assert [path for path in tmp_path.iterdir() if path.name != "run"] == []


def test_the_file_of_the_next_supervisor_s_process_is_left_alone(tmp_path: Path) -> None:
    with exporting(swapped(), tmp_path / "run", Exposure(textfile=str(tmp_path))) as found:
        found.look()
        file = tmp_path / f"jurymast-{found._metrics._watcher.plan.run}.prom"
        wait_until("the file", lambda: file.exists() and found._boxes[0].empty(time.monotonic() + 60.0))
        other = tmp_path / "other"
        other.write_text("its own")
        other.rename(file)
    assert file.read_text() == "its own"


def test_a_full_disk_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = exporter.OwnFile(tmp_path / "x.prom")
    watcher = read_status(written(swapped(), tmp_path / "run"))
    snapshot = Snapshot(RunMetrics(watcher).families(START))
    assert exporter._write(file, snapshot) == ""
    before, limits = file.path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handled = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        problem = exporter._write(file, snapshot)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handled)
    assert "too large" in problem
    assert file.path.read_text() == before
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["x.prom"]


# ---- the process


@contextmanager
def watching(directory: RunDirectory, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            run_module("jurymast.report.watcher", str(directory.root)),
            stdin=subprocess.PIPE, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_process_leaves_no_file_behind_and_no_token_in_its_log(tmp_path: Path) -> None:
    wanted = Exposure(socket=True, port=0, textfile=str(tmp_path))
    directory = written(swapped(finished=False), tmp_path / "run", wanted)
    left = {
        directory.metrics_file,
        directory.root / "metrics.sock",
        tmp_path / f"jurymast-{swapped().plan.run}.prom",
    }
    with watching(directory, tmp_path / "log") as process:
        wait_until("all files", lambda: all(path.exists() for path in left))
        token = directory.metrics_token_file.read_text()
        assert scrape(port_of(directory.root), token)[0] == 200
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert not any(path.exists() for path in left)
    assert token not in (tmp_path / "log").read_text() + command.decode()


def test_places_that_cannot_be_used_are_told_and_the_rest_works(tmp_path: Path) -> None:
    wanted = Exposure(port=0, textfile=str(tmp_path / "nowhere"))
    directory = written(swapped(finished=False), tmp_path / "run", wanted)
    with watching(directory, tmp_path / "log") as process:
        wait_until("the port", directory.metrics_file.exists)
        wait_until("the warning", lambda: "metrics.textfile" in (tmp_path / "log").read_text())
        assert process.poll() is None
        assert foreign.exists(directory.metrics_token_file)


def test_the_page_lists_all_metrics_and_no_others(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `jurymast_")]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    story = swapped(finished=False)
    story.saved(60, tier="peer")
    watcher = read_status(written(story, tmp_path / "run"))
    assert watcher.state.cadence is None  # so no interval is planned
    watcher.state.samples_s = watcher.state.tokens_s = 1.0
    told = [family.name for family in RunMetrics(watcher).families(START)]
    assert sorted(named) == sorted([*told, "jurymast_durable_interval_seconds"])


# ---- trackers


def test_a_tracker_that_cannot_be_used_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyError, match="abacus cannot be used: no such plugin is installed; there is "):
        resolve([Layer("policy.yaml", {"metrics": {"trackers": ["abacus"]}})])
    monkeypatch.setitem(sys.modules, "jurymast_tensorboard", None)
    with pytest.raises(PolicyError, match="tensorboard cannot be used: "):
        resolve([Layer("policy.yaml", {"metrics": {"trackers": ["tensorboard"]}})])


class Abacus:
    """A tracker of somebody's, which may fail or hang."""

    def __init__(self) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.closed, self.goes_on = threading.Event(), threading.Event()

    def write(self, step: int, at: float, values: dict[str, float]) -> None:
        self.written.append((step, values))
        if len(self.written) == 1:
            raise RuntimeError("a bead is missing")

    def event(self, step: int, at: float, text: str) -> None:
        self.goes_on.wait(60)
        self.events.append(text)

    def close(self) -> None:
        self.closed.set()


def test_a_tracker_gets_each_step_told_and_each_incident_once_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    abacus = Abacus()
    monkeypatch.setattr(tracker, "load", lambda name: lambda run: abacus)
    monkeypatch.setattr(tracking, "CLOSE_S", 0.0)
    story = Story(began_at=time.time()).running(10)
    watcher = StatusWatcher(written(story, tmp_path / "run"))
    told = tracking.Tracking(watcher, ["abacus"])
    watcher.poll()
    told.look()

    def follow(event: Event) -> None:
        watcher.ledger.feed(event)

    story.listeners.append(follow)
    story.stepped(20)
    told.look()
    story.lost("n3")
    story.stopped()
    told.look()
    told.look()
    told.finish(time.monotonic())
    assert not abacus.closed.is_set()
    abacus.goes_on.set()
    assert abacus.closed.wait(60)
    assert [step for step, _ in abacus.written] == [10, 20]
    assert abacus.written[1][1].keys() >= {"step_seconds", "goodput_ratio/runtime", "spares_ready"}
    assert [text.partition(":")[0] for text in abacus.events] == [
        "incident 1",
        "a spare is used for n3, 0 left (node_lost)",
    ]
    assert caplog.messages == ["metrics.trackers: abacus: RuntimeError: a bead is missing"]


def test_the_next_supervisor_s_process_does_not_write_old_incidents_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    abacus = Abacus()
    abacus.goes_on.set()
    monkeypatch.setattr(tracker, "load", lambda name: lambda run: abacus)
    told = tracking.Tracking(read_status(written(swapped(), tmp_path / "run")), ["abacus"])
    told.look()
    told.finish(time.monotonic() + 60.0)
    assert abacus.closed.is_set()
    assert abacus.events == []


def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    import jurymast_mlflow

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    written = jurymast_mlflow.tracker(tracker.TrackedRun("run-1", "gpt", tmp_path))
    for step in (20, 10):  # a failure leads back
        written.write(step, START + step, {"step_seconds": step / 4, "goodput_ratio/runtime": 0.5})
    written.event(20, START + 20, "incident 1: node_lost on n3: é")
    client = mlflow.MlflowClient((tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("jurymast").experiment_id
    (run,) = client.search_runs([experiment])
    found = client.get_metric_history(run.info.run_id, "jurymast/step_seconds")
    assert sorted((one.step, one.value) for one in found) == [(10, 2.5), (20, 5.0)]
    assert run.data.tags["jurymast/incident at step 20"] == "incident 1: node_lost on n3: é"
    written.close()
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_weights_and_biases_has_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs Weights & Biases: pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    import jurymast_wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    written = jurymast_wandb.tracker(tracker.TrackedRun("run-1", "gpt", tmp_path))
    for step in (20, 10):
        written.write(step, START + step, {"step_seconds": step / 4, "goodput_ratio/runtime": 0.5})
    written.event(20, START + 20, "incident 1: node_lost on n3")
    written.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    data, at = file.read_bytes(), 7  # after its name and version: records as in a log of LevelDB
    steps, alerts = [], []
    while at < len(data):
        end = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        record, at = Record.FromString(data[at + 7 : end]), end
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        if "jurymast/step" in items:
            steps.append((int(items["jurymast/step"]), float(items["jurymast/step_seconds"])))
        if record.WhichOneof("record_type") == "alert":
            alerts.append(record.alert.text)
    assert steps == [(20, 5.0), (10, 2.5)]
    assert alerts == ["step 20: incident 1: node_lost on n3"]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = tracker.load("tensorboard")(tracker.TrackedRun("run-1", "gpt", tmp_path))
    for step in (10, 20):
        board.write(step, START + step, {"step_seconds": step / 4, "goodput_ratio/runtime": 0.5})
    board.event(20, START + 20, "incident 1: node_lost on n3: é")
    read = EventAccumulator(str(tmp_path / "tensorboard"))  # before the end: a run may be cut off
    read.Reload()
    assert read.Tags()["scalars"] == ["jurymast/step_seconds", "jurymast/goodput_ratio/runtime"]
    found = [(one.step, one.wall_time, one.value) for one in read.Scalars("jurymast/step_seconds")]
    assert found == [(10, START + 10, 2.5), (20, START + 20, 5.0)]
    (event,) = read.Tensors("jurymast/incidents")
    assert event.tensor_proto.string_val[0].decode() == "incident 1: node_lost on n3: é"
    board.close()
