"""`jurymast nodes`, what `submit` makes of it, and `jurymast doctor`: as real processes."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jurymast.cluster.earlier import avoided
from jurymast.cluster.exclusion import banned, fitting, most_nodes
from jurymast.core.judges.history import NodeRecord
from jurymast.core.state.settings import Avoided, RunPlan
from support.commands import Place
from support.outputs import checked
from support.stories import START, Story

LAUNCHER = Path(__file__).parents[2] / "launcher"
LIMITS = """
case "$*" in
*%P*) for n in 1 2 3 4; do echo "n$n|gpu*|idle"; done; echo "n9|other|idle";;
*%H*) echo "n4|drained|2026-11-17T10:00:00|new disk";;
*) echo "gpu*|up|1-infinite|4|idle";;
esac
"""


class Site(Place):
    """With runs on Slurm's nodes."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "train.py").write_text("")

    def rows(self, *words: str) -> list[dict[str, Any]]:
        done = self.run("nodes", "--json", *words)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = checked(json.loads(done.stdout), "nodes")
        return rows

    def fails(self, node: str, name: str, ago_s: float = 3600.0) -> None:
        """A run of this name lost `node` so long ago."""
        story = Story(active=2, spares=1)
        story.t = time.time() - ago_s
        story.running(40).saved(40)
        story.lost(node)
        story.stopped()
        story.recovered(40, 60).finished().write(self.runs / name)

    def submit(self, *words: str) -> tuple[dict[str, Any], str]:
        done = self.run("submit", "--dry-run", "--json", *words, "--", "train.py")
        assert done.returncode == 0, done.stderr
        request: dict[str, Any] = json.loads(done.stdout)
        return request, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_nodes_shows_what_speaks_against_each(place: Site) -> None:
    assert place.rows() == []
    assert "has no runs on Slurm's nodes" in place.run("nodes").stderr
    place.fails("n3", "run-1")
    rows = place.rows()
    assert [(r["node"], r["incidents"], r["strikes"], r["excluded"]) for r in rows] == [
        ("n3", 1, 1, True), ("n1", 0, 0, False), ("n2", 0, 0, False),
    ]  # fmt: skip
    assert (rows[0]["last_cause"], rows[0]["excluded_for_good"], rows[0]["lemon_score"]) == (
        "node_lost", False, 0,
    )  # fmt: skip
    assert (rows[0]["after_repair"], rows[1]["after_repair"]) == (True, False)
    assert rows[0]["rate_times"] == pytest.approx(25.0 * (1 / 3 + 1) * 3, rel=0.02)
    assert rows[0]["why_rate"].startswith("failed once in ")
    assert {signal["name"] for signal in rows[0]["signals"]} >= {"xids", "exclusions", "failure_rate"}
    shown = place.run("nodes").stdout
    assert shown.splitlines()[0].split()[:2] == ["NODE", "RUNS"]
    assert "n3" in shown
    assert "until 20" in shown
    assert re.search(r" x (99|100) .* and has not been used since", shown), shown
    assert "2 nodes without an incident" in shown
    assert "n1" not in shown
    assert "n1" in place.run("nodes", "--all").stdout


def test_slurms_own_word_is_shown_too(place: Site) -> None:
    place.program("sinfo", LIMITS)
    place.fails("n3", "run-1")
    assert not any(row["slurm_reason"] for row in place.rows()), "n4 served no run here"
    place.program("sinfo", LIMITS.replace("n4|drained", "n3|drained"))
    (row,) = [row for row in place.rows() if row["slurm_reason"]]
    assert (row["node"], row["slurm_reason"], row["out_of_service_s"] > 0) == ("n3", "new disk", True)


def test_a_new_run_keeps_out_what_failed_the_last_one(place: Site) -> None:
    place.program("sinfo", LIMITS)
    place.fails("n3", "run-1")
    request, told = place.submit("--nodes", "2", "--spares", "0", "--exclude", "n2")
    assert "--exclude=n2,n3" in request["argv"]
    assert "note: n3 is excluded until 20" in told
    (kept,) = request["plan"]["avoided"]
    assert (kept["node"], "silent" in kept["why"]) == ("n3", True)
    plan = RunPlan.from_json(request["plan"])
    assert plan.excluded_at(plan.submitted_at) == ("n2", "n3")
    assert plan.excluded_at(plan.submitted_at + 86_400.0) == ("n2",), "it expires while the run goes on"
    shown = place.run("submit", "--dry-run", "--nodes", "2", "--", "train.py")
    assert "--exclude=n3" in shown.stdout


def test_three_strikes_are_for_good_until_somebody_forgives(place: Site) -> None:
    for days in (3, 9, 15):
        place.fails("n3", f"run-{days}", ago_s=days * 86_400.0)
    (row,) = [row for row in place.rows() if row["excluded"]]
    assert (row["node"], row["excluded_for_good"], row["strikes"]) == ("n3", True, 3)
    assert "n3 is excluded for good: 3 strikes" in place.submit("--nodes", "2")[1]
    assert not any(row["excluded"] for row in place.rows("--forgive", "n3"))
    assert "excluded" not in place.submit("--nodes", "2")[1]
    done = place.run("nodes", "--forgive", "n33")
    assert (done.returncode, done.stdout) == (64, "")
    assert "had a node n33 (did you mean n3?)" in done.stderr


def test_no_run_is_left_without_enough_nodes(place: Site) -> None:
    place.program("sinfo", LIMITS)
    place.fails("n3", "run-1")
    request, told = place.submit("--nodes", "4", "--spares", "0")
    assert request["plan"]["avoided"] == []
    assert "not excluded, because the run needs 4 nodes: n3" in told
    place.program("sinfo", LIMITS.replace("1 2 3 4", "1 2 4"))
    request, told = place.submit("--nodes", "2", "--spares", "0")
    assert request["plan"]["avoided"] == [], "sbatch would refuse a node that Slurm does not know"


def test_report_and_the_local_cluster_keep_nobody_out(place: Site) -> None:
    place.fails("n3", "run-1")
    policy = place.root / "policy.yaml"
    policy.write_text("nodes_policy: {bad: report}\n")
    assert place.submit("--nodes", "2", "--policy", str(policy))[0]["plan"]["avoided"] == []
    assert place.submit("--nodes", "2", "--cluster", "local")[0]["plan"]["avoided"] == []


@pytest.mark.parametrize(
    ("usable", "needed", "kept"),
    [
        ({"a", "b", "c", "d"}, 2, ["a", "b"]),
        ({"a", "b", "c", "d"}, 3, ["a"]),
        ({"a", "b", "c", "d"}, 4, []),
        ({"b", "c", "d"}, 3, ["a"]),  # a is down anyway
        ({"c"}, 1, ["a", "b"]),
    ],
)
def test_the_worst_are_kept_out_first(usable: set[str], needed: int, kept: list[str]) -> None:
    records = [NodeRecord("b", excluded_until=START), NodeRecord("a", for_good=True), NodeRecord("c")]
    wanted = avoided(records)
    assert [node.node for node in wanted] == ["a", "b"]
    assert fitting([node.node for node in wanted], usable, needed) == kept
    assert wanted[0] == Avoided(node="a", until=None, why="")


def test_a_requeue_excludes_as_long_as_enough_are_left(place: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    place.program("sinfo", LIMITS)
    monkeypatch.setenv("PATH", str(place.bin))
    plan = RunPlan(
        run="r", name="r", directory="/r", cluster="slurm", active=2, spares=0, ranks_per_node=1, script="s",
        exclude=("n1",), avoided=(Avoided(node="n2", until=None, why=""),),
    )  # fmt: skip
    bad = ["n3"]
    assert banned(plan, bad, "", START) == (
        ["n1", "n3"], "not excluded, because the run needs 2 nodes: n2",
    )  # fmt: skip
    assert banned(replace(plan, active=1), bad, "", START) == (["n1", "n2", "n3"], "")
    assert banned(replace(plan, avoided=()), [], "", START) == (["n1"], "")
    assert most_nodes(replace(plan, spares=4), ["n1", "n3"], "") == 2
    assert most_nodes(plan, [], "") == 2, "no more than the run wants"
    place.program("sinfo", "exit 1")
    assert banned(plan, bad, "", START) == (["n1", "n2", "n3"], "")
    assert most_nodes(replace(plan, spares=4), ["n1", "n3"], "") == 6, "nobody knows of fewer"


# Is the site ready?

CONFIG = """
Configuration data as of {now}
ClusterName             = hive
HealthCheckInterval     = 300 sec
HealthCheckProgram      = {program}
JobRequeue              = 1
KillWait                = {kill_wait} sec
SchedulerParameters     = {parameters}
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 24.11.5
"""


def doctor(place: Site, *, kill_wait: int = 30, parameters: str = "(null)", ahead_s: float = 0.0) -> Any:
    for name in ("sbatch", "srun", "squeue", "sinfo", "scancel"):
        place.program(name, "exit 0")
    place.program("munge", "echo MUNGE:AAA:")
    check = place.root / "jurymast-healthcheck"
    check.write_text("#!/bin/sh\n")
    check.chmod(0o755)
    now = f"$(/usr/bin/date -u -d '{ahead_s:.0f} seconds' +%Y-%m-%dT%H:%M:%S)"
    config = CONFIG.format(now=now, program=check, kill_wait=kill_wait, parameters=parameters)
    place.program("scontrol", f'echo "{config}"')
    spool = place.root / "spool"
    spool.mkdir(exist_ok=True)
    spool.chmod(0o1733)
    policy = place.root / "site.yaml"
    policy.write_text(f"nodes_policy: {{spool: {spool}}}\n")
    done = place.run("doctor", "--json", JURYMAST_SITE=str(policy))
    told = json.loads(done.stdout)
    assert done.returncode == (0 if told["ready"] else 1)
    return {check["check"]: (check["answer"], check["found"], check["todo"]) for check in told["checks"]}


def test_doctor_on_a_site_that_is_ready(place: Site) -> None:
    told = doctor(place)
    answers = {name: answer for name, (answer, _, _) in told.items()}
    for name in (
        "slurm",
        "torch",
        "munge",
        "requeue",
        "give nodes back",
        "time to save",
        "lost nodes",
        "clocks",
    ):
        assert answers[name] == "yes", (name, told[name])
    assert told["slurm"][1] == "24.11.5, cluster hive"
    assert answers["health check"] == "yes"
    assert answers["drain"] == "yes"
    assert os.geteuid() != 0 or answers["verdicts"] == "yes"
    assert "no" not in answers.values()


def test_doctor_says_what_to_do(place: Site) -> None:
    told = doctor(place, kill_wait=2, parameters="bf_continue,disable_job_shrink", ahead_s=90.0)
    for name, answer, words in (
        ("give nodes back", "note", "disable_job_shrink"),
        ("time to save", "note", "KillWait=2 s"),
        ("clocks", "no", "differ by"),
    ):
        assert told[name][0] == answer
        assert words in told[name][1]
        assert told[name][2]
    done = place.run("doctor")
    assert done.returncode == 1
    assert "to do\n  clocks: repair NTP" in done.stdout


def test_doctor_where_there_is_no_slurm_and_no_place_to_write(place: Site) -> None:
    told = json.loads(place.run("doctor", "--json", "--runs", "/proc/runs").stdout)
    checks = {check["check"]: check for check in told["checks"]}
    assert not told["ready"]
    assert checks["slurm commands"]["answer"] == checks["runs directory"]["answer"] == "no"
    assert "/proc" in checks["runs directory"]["found"]
    assert all(check["todo"] for check in checks.values() if check["answer"] == "no")
    assert not [name for name in os.listdir("/tmp") if name.startswith(".jurymast-doctor")]
