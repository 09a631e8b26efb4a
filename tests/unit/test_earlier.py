"""What is known of the failure rate before a run: earlier journals and Slurm's accounting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jurymast.cluster.allocation import _times, from_slurm_environment
from jurymast.cluster.earlier import parse_accounting, past_runs, with_earlier
from jurymast.cluster.exclusion import out_of_service
from jurymast.core.judges.history import PastRun, Span, watched_in
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import DAY_S, FailureRate, Watched, learned_before, node_rate, prior
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.journal import initial_state
from jurymast.supervisor.real_io import allocation_begun
from support.stories import Story

NOW = 1_000_000_000.0
RUN = PastRun(
    run="r", active=2, spans=(Span(start=NOW - 3 * DAY_S, end=NOW - DAY_S, nodes=("a", "b", "c")),),
    failures=(NOW - 2 * DAY_S,), jobs=("17",),
)  # fmt: skip


def plan(cluster: str = "slurm") -> RunPlan:
    return RunPlan(
        run="r", name="r", directory="r", cluster=cluster, active=4, spares=1, ranks_per_node=1, script="s"
    )


def test_only_active_nodes_of_a_run_were_watched() -> None:
    assert watched_in(RUN) == [Watched(NOW - 3 * DAY_S, NOW - DAY_S, 2, (NOW - 2 * DAY_S,))]
    assert watched_in(PastRun(run="never started", active=2)) == []


def test_what_is_older_counts_less() -> None:
    incidents, node_days = learned_before(watched_in(RUN), NOW)
    assert incidents == pytest.approx(0.5 ** (2 / 14))
    # four node-days, on average two days old
    assert node_days == pytest.approx(4 * 0.5 ** (2 / 14), rel=0.01)
    assert learned_before(watched_in(RUN), NOW + 14 * DAY_S) == pytest.approx((incidents / 2, node_days / 2))
    assert learned_before([], NOW) == (0.0, 0.0)


def test_it_is_forgotten_as_the_watched_nodes_of_one_run_are() -> None:
    """The same evidence counts alike, seen by the run itself or looked back at."""
    rate = FailureRate(NOW - 3 * DAY_S)
    rate.watched(NOW - 2 * DAY_S, 2)
    assert rate.incident(NOW - 2 * DAY_S)
    rate.watched(NOW - DAY_S, 2)
    rate.watched(NOW, 0)
    incidents, node_days = learned_before(watched_in(RUN), NOW)
    assert rate.posterior.exposure_node_days == pytest.approx(node_days)
    assert rate.posterior.incidents == pytest.approx(incidents)
    known = FailureRate(NOW, prior(), earlier=(incidents, node_days))
    assert known.posterior.incidents == pytest.approx(incidents)
    known.watched(NOW + 14 * DAY_S, 0)
    assert known.posterior.exposure_node_days == pytest.approx(node_days / 2)


def test_failures_that_strike_several_runs_at_once_count_once() -> None:
    both = [Watched(0.0, DAY_S, 1, (100.0,)), Watched(0.0, DAY_S, 1, (160.0, 9000.0))]
    assert learned_before(both, DAY_S, 1e9)[0] == pytest.approx(2.0, rel=1e-6)


def test_accounting_is_read_but_for_jobs_that_have_a_journal() -> None:
    lines = ["17|COMPLETED|100|200|4", "18|NODE_FAIL|100|400|2", "19|RUNNING|150|Unknown|1"]
    text = "\n".join([*lines, "20|PENDING|Unknown|Unknown|9"])
    assert parse_accounting(text, {"17"}, 500.0) == [
        Watched(100.0, 400.0, 2, (400.0,)),
        Watched(150.0, 500.0, 1),
    ]
    with pytest.raises(ValueError):
        parse_accounting("slurm_load: error", set(), 0.0)


def sacct(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Slurm command of this name, first in PATH."""
    path = folder / "bin" / "sacct"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def test_a_plan_knows_what_was_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sacct(
        tmp_path,
        f'[ "$SLURM_TIME_FORMAT" = %s ] && echo "5|NODE_FAIL|{NOW - DAY_S:.0f}|{NOW:.0f}|10"',
        monkeypatch,
    )
    found, _ = with_earlier(plan(), tmp_path / "runs", "", NOW)
    assert found.earlier_text == "0 in 0 node-days of 0 earlier runs, 1 in 10 node-days of other jobs"
    assert found.earlier_incidents == pytest.approx(1.0)
    assert found.earlier_node_days == pytest.approx(9.76, abs=0.01)
    assert initial_state(RunPlan.from_json(found.to_json())).earlier == (
        found.earlier_incidents, found.earlier_node_days,
    )  # fmt: skip


def test_spares_are_chosen_by_the_rate_of_earlier_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = "; ".join(
        f'echo "{n}|NODE_FAIL|{NOW - DAY_S:.0f}|{NOW - 3600 * n:.0f}|10"' for n in range(1, 9)
    )
    sacct(tmp_path, failures, monkeypatch)
    rates: list[float] = []

    def spares(rate: float) -> int:
        rates.append(rate)
        return 7

    found, _ = with_earlier(plan(), tmp_path / "runs", "", NOW, spares)
    assert found.spares == 7
    assert rates[0] > 50.0
    assert with_earlier(plan(), tmp_path / "runs", "", NOW)[0].spares == plan().spares


@pytest.mark.parametrize("number", [0, 1])
def test_times_of_slurm_are_right_in_the_hour_that_comes_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """2026-10-25 02:30 in Berlin is 00:30 and 01:30 in UTC. These commands print a time by their zone."""
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    at = 1792888200 + 3600 * number
    say, later = (f"$(date -d @{when} +%Y-%m-%dT%H:%M:%S)" for when in (at, at + 61))
    job = f"JobId=5 EligibleTime={say} StartTime={later}"
    for program, text in (("scontrol", job), ("sinfo", f"n1|down|{say}|bad disk")):
        (tmp_path / program).write_text(f'#!/bin/sh\necho "{text}"\n')
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert _times("5") == (at, at + 61)
    assert out_of_service(at + 60.0) == {"n1": (60.0, "bad disk")}


def test_the_journal_has_the_partition_and_the_account_that_slurm_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("ID", "NODELIST", "PARTITION", "ACCOUNT"):
        monkeypatch.setenv(f"SLURM_JOB_{name}", f"some-{name.lower()}")
    told = allocation_begun(plan("local"), initial_state(plan("local")), from_slurm_environment(), NOW)
    assert (told.slurm_job, told.partition, told.account) == ("some-id", "some-partition", "some-account")


@pytest.mark.parametrize("body", ["echo Slurm accounting storage is disabled >&2; exit 1", "echo nonsense"])
def test_slurm_without_accounts_is_said_and_no_error(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sacct(tmp_path, body, monkeypatch)
    found, _ = with_earlier(plan(), tmp_path / "runs", "", NOW)
    assert found.earlier_text == "0 in 0 node-days of 0 earlier runs, no Slurm accounting"
    assert (found.earlier_incidents, found.earlier_node_days) == (0.0, 0.0)


def test_nodes_of_a_local_run_are_no_machines(tmp_path: Path) -> None:
    assert with_earlier(plan("local"), tmp_path, "", NOW) == (plan("local"), [])


def test_a_node_that_failed_is_expected_to_fail_again() -> None:
    assert node_rate(5.0, 0, 0.0) == 5.0
    assert node_rate(5.0, 0, 400.0) < 1.0
    assert node_rate(5.0, 2, 28.0) == pytest.approx(5.0 * (1 / 3 + 2) / (1 / 3 + 0.14))
    # Over all nodes it comes to the fleet's rate again. P(n failures) where one is expected on average:
    p, mean = 0.25 ** (1 / 3), 0.0
    for failures in range(200):
        mean += p * node_rate(5.0, failures, 200.0)
        p *= 0.75 * (failures + 1 / 3) / (failures + 1)
    assert mean == pytest.approx(5.0)


def test_bursts_and_forgetting_are_the_policy_s() -> None:
    quick = FailureRate(0.0, prior(), half_life_days=1.0, merge_s=1.0)
    slow = FailureRate(0.0, prior())
    for rate in (quick, slow):
        rate.incident(10.0)
        rate.incident(20.0)
    assert (quick.posterior.incidents, slow.posterior.incidents) == (2.0, 1.0)
    ahead = quick.posterior_at(DAY_S, 3)
    assert ahead.incidents == pytest.approx(1.0, abs=0.001)
    assert quick.posterior.incidents == 2.0, "asking changes nothing"
    assert Settings(half_life_s=DAY_S, burst_s=1.0).half_life_s == DAY_S


def test_xids_that_a_program_causes_do_not_count_in_its_nodes_record(tmp_path: Path) -> None:
    """13, 31 and 43 are the program's errors, 45 is what follows from its end; 79 is a GPU that is gone."""
    story = Story().running(100)
    for number in (13, 31, 43, 45, 79):
        story.t += 600.0
        story.feed(
            ev.HealthFound(
                t=story.t, node="n2", probe="nvidia", code=f"xid-{number}", verdict="unknown",
                kind="application", message="m", device="gpu0", at=story.t,
            )
        )  # fmt: skip
    story.write(tmp_path / "run")
    (past,) = past_runs(tmp_path)
    assert [(node, code) for _, node, code in past.xids] == [("n2", "xid-79")]
