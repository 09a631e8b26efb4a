"""The checker of `benchmarks/chaos.py` notices each planted lie, and says nothing where all is well."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.chaotic.checker import Evidence, Facts, outcome, wrong
from benchmarks.chaotic.faultlog import Struck, read_log, write_log
from benchmarks.chaotic.plans import Fault, Plan

from jurymast.core.state import events as ev
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Exclusion, Phase, RunState
from jurymast.core.state.settings import Settings
from support.runs import ROOT, jurymast
from support.stories import Story

PLAN = Plan(1, 2, 1, (Fault(40, "power"), Fault(120, "rank")))
LOG = [
    Struck("power", "n1", at=100.0, done_at=100.1, until=100.1, phase="running", attempt=1, placed=True),
    Struck("rank", "n2", at=150.0, done_at=150.1, until=150.1, phase="running", attempt=2, placed=True),
]


def saved(step: int, t: float, tier: str) -> ev.Saved:
    return ev.Saved(t=t, attempt=1, step=step, tier=tier, ok=True, stall_s=0.0)


def restored(attempt: int, step: int, t: float, planned: int | None = None) -> list[ev.Event]:
    told = step if planned is None else planned
    return [
        ev.RestorePlanned(
            t=t, attempt=attempt, step=told, tier="memory", expected_s=0.0, tiers={}, reason=""
        ),
        ev.Restored(t=t + 0.2, attempt=attempt, step=step, tier="memory", seconds=0.1),
        ev.Progress(t=t + 1.0, attempt=attempt, step=step + 1, stepped_at=t + 1.0, absolute=True),
    ]


EVENTS = [
    *restored(1, 0, 90.0), saved(30, 98.0, "shared"), saved(40, 99.0, "peer"), *restored(2, 40, 102.0),
    saved(120, 149.0, "peer"), *restored(3, 120, 151.0),
]  # fmt: skip


def incident(id: int, cause: str, node: str, at: float, action: str = "swap") -> Incident:
    return Incident(
        id,
        at,
        at + 0.5,
        id,
        0,
        cause=cause,
        node=node,
        action=action,
        recovered_at=at + 2.0,
        ended_at=at + 2.0,
    )


def evidence(
    events: list[ev.Event] | None = None, log: list[Struck] | None = None, **changes: Any
) -> Evidence:
    """A run with two faults, after which all is well."""
    state = RunState(Settings(), phase=Phase.SUCCEEDED, ended_at=200.0)
    state.incidents = [
        incident(1, "node_lost", "n1", 100.2),
        incident(2, "worker_killed", "n2", 150.1, "restart"),
    ]
    state.excluded = {"n1": Exclusion("it went silent", 101.0)}
    facts = Facts(weights="a" * 64, undisturbed="a" * 64, ended=True, left=[])
    report = {
        "categories": {"training": 90.0, "restart": 10.0}, "allocated_node_seconds": 95.0,
        "queue_node_seconds": 5.0, "incidents": [{}, {}],
    }  # fmt: skip
    plan = changes.get("plan", PLAN)
    return Evidence(
        plan, LOG if log is None else log, facts, EVENTS if events is None else events, state, report
    )


def only(found: list[str], words: str) -> None:
    assert len(found) == 1, found
    assert words in found[0], found


def test_nothing_is_wrong_with_a_run_that_is_well() -> None:
    assert wrong(evidence()) == []


def test_a_changed_weight_is_noticed() -> None:
    one = evidence()
    one.facts = msgspec.structs.replace(one.facts, weights="b" + "a" * 63)
    only(wrong(one), "other weights")
    one.facts = msgspec.structs.replace(one.facts, weights=None)
    only(wrong(one), "wrote no result")


def test_a_leftover_is_noticed() -> None:
    one = evidence()
    one.facts = msgspec.structs.replace(one.facts, left=["n2: pid 7 uid 1001: python"])
    only(wrong(one), "pid 7")


def test_a_missing_incident_is_noticed() -> None:
    one = evidence()
    one.state.incidents.pop()
    one.report["incidents"].pop()
    only(wrong(one), "nobody noticed rank of n2")


def test_an_incident_without_a_fault_is_noticed() -> None:
    one = evidence()
    one.state.incidents.append(incident(3, "hang", "n2", 170.0, "restart"))
    one.report["incidents"].append({})
    only(wrong(one), "incident 3 (hang n2, restart) has no fault")


def test_a_node_that_leaves_for_its_full_disk_has_a_fault() -> None:
    full = Struck("disk full", "n3", at=169.0, done_at=169.1, until=172.0, phase="running", placed=True)
    one = evidence(log=[*LOG, full])
    one.state.incidents.append(incident(3, "host_suspect", "n3", 170.0))
    one.state.excluded["n3"] = Exclusion("disk-full on /scratch", 171.0)
    one.report["incidents"].append({})
    assert wrong(one) == []


def test_the_end_of_the_job_explains_an_incident_that_was_open_then_and_no_other() -> None:
    ended = Struck("preempted", "", at=172.0, done_at=172.1, until=172.1, phase="running")
    one = evidence(log=[*LOG, Struck("agent", "n2", at=170.0, done_at=170.0, until=170.0), ended])
    one.state.incidents.append(incident(3, "preempted", "", 170.1, "requeue"))
    one.report["incidents"].append({})
    assert wrong(one) == []
    one.state.incidents[-1].recovered_at = 170.9
    only(wrong(one), "incident 3 (preempted , requeue) has no fault")


def test_another_cause_and_another_node_are_noticed() -> None:
    one = evidence()
    one.state.incidents[1].cause = "worker_exception"
    assert {words.partition(":")[0] for words in wrong(one)} == {"explained", "noticed"}
    one = evidence()
    one.state.incidents[0].node = "n2"
    only(wrong(one), "power of n1 is told of n2")


def test_a_moment_that_is_off_is_noticed_unless_something_else_struck_then() -> None:
    one = evidence()
    one.state.incidents[0].fault_at = 94.0
    only(wrong(one), "moment 6.0 s off")
    soon = Struck("storage child", "n2", at=101.0, done_at=101.0, until=101.0)
    one = evidence(log=[*LOG, soon])
    one.state.incidents[0].fault_at = 94.0
    assert wrong(one) == []


def test_a_sum_that_is_off_is_noticed() -> None:
    one = evidence()
    one.report["categories"]["training"] = 91.0
    only(wrong(one), "101.000 node-seconds are in categories, 100.000 in all")
    one = evidence()
    one.report["categories"] = {"training": 90.0, "unknown": 10.0}
    only(wrong(one), "nobody knows what 10.0 of 100.0")


def test_a_restore_of_an_older_step_than_was_safe_is_noticed() -> None:
    older = [
        *restored(1, 0, 90.0),
        saved(40, 99.0, "peer"),
        *restored(2, 30, 102.0),
        *restored(3, 120, 151.0),
    ]
    only(wrong(evidence(older)), "attempt 2 was to restore step 30, and 40 was safe")
    # Both nodes that had it were lost, and shared storage had no more.
    both = replace(PLAN, faults=(Fault(40, "power"), Fault(41, "crash"), Fault(120, "rank")))
    assert wrong(evidence(older, plan=both)) == []


def test_a_restore_of_what_was_not_planned_is_noticed_unless_that_was_damaged() -> None:
    other = [*restored(1, 0, 90.0), *restored(2, 30, 102.0, planned=40), *restored(3, 120, 151.0)]
    only(wrong(evidence(other)), "attempt 2 restored step 30, and was told 40")
    damage = Struck("corrupt", at=99.5, done_at=99.5, until=99.5, damaged=(40,))
    assert wrong(evidence(other, log=[*LOG, damage])) == []
    without = [event for event in EVENTS if not (isinstance(event, ev.Restored) and event.attempt == 3)]
    only(wrong(evidence(without)), "attempt 3 did steps and had restored nothing")


def test_a_restore_of_a_newer_step_that_was_on_storage_in_the_meantime_is_right() -> None:
    def found(*in_between: ev.Event) -> list[str]:
        planned, done, stepped = restored(2, 40, 102.0, planned=0)
        assert isinstance(done, ev.Restored)
        done = structs.replace(done, tier="shared")
        return wrong(
            evidence([*restored(1, 0, 90.0), planned, *in_between, done, stepped, *restored(3, 120, 151.0)])
        )

    assert found(saved(40, 102.1, "shared")) == []
    only(found(saved(30, 102.1, "shared")), "attempt 2 restored step 40, and was told 0")


def test_ranks_that_live_may_go_on_from_a_newer_step_than_was_saved_but_from_no_older_one() -> None:
    def lives(step: int) -> list[ev.Event]:
        events = [*restored(1, 0, 90.0), *restored(2, step, 102.0, planned=40), *restored(3, 120, 151.0)]
        return [
            structs.replace(event, tier="live") if isinstance(event, ev.Restored) else event
            for event in events
        ]

    assert wrong(evidence(lives(44))) == []
    only(wrong(evidence(lives(30))), "attempt 2 restored step 30, and was told 40")


def test_a_node_that_nothing_struck_is_not_to_be_excluded() -> None:
    one = evidence()
    one.state.excluded["n3"] = Exclusion("it is slow", 120.0)
    only(wrong(one), "n3 is excluded: it is slow")


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.REQUEUED])
def test_a_run_that_does_not_end_is_noticed(phase: Phase) -> None:
    one = evidence()
    one.state.phase = phase
    only(wrong(one), "the run has not ended")


def test_a_run_may_stop_only_where_every_copy_was_destroyed_and_for_that_reason() -> None:
    lost = replace(
        PLAN, faults=(Fault(40, "corrupt"), Fault(41, "power"), Fault(42, "power"), Fault(120, "rank"))
    )
    for plan, reason, words in (
        (lost, "no checkpoint can be read", ""),
        (lost, "hang", "failed with 78"),
        (PLAN, "no checkpoint can be read", "failed with 78"),
    ):
        one = evidence(plan=plan)
        one.state.phase, one.state.exit_code, one.state.end_reason = Phase.FAILED, 78, reason
        assert [words in line for line in wrong(one)] == [True] * bool(words), wrong(one)


def test_a_cancelled_run_ends_as_cancelled_if_somebody_cancelled_it() -> None:
    one = evidence(plan=replace(PLAN, faults=(*PLAN.faults, Fault(150, "cancelled"))))
    one.state.phase = Phase.CANCELLED
    only(wrong(one), "cancelled with 0")  # it is in the plan, and was not done
    struck = Struck("cancelled", at=190.0, done_at=190.1, until=190.1)
    one = evidence(log=[*LOG, struck], plan=one.plan)
    one.state.phase = Phase.CANCELLED
    assert wrong(one) == []


def test_what_is_kept_is_checked_without_what_it_came_from(tmp_path: Path) -> None:
    """Also of two campaigns in one table."""
    weights = {"a": "a" * 64, "b": "b" * 64}
    for name, sha256 in weights.items():
        folder = tmp_path / name / "run-1"
        folder.mkdir(parents=True)
        story = Story(active=2).allocated()
        story.feed(
            ev.RestorePlanned(
                t=story.t, attempt=1, step=0, tier="", expected_s=1.0, tiers={}, reason=""
            )
        )  # fmt: skip
        story.ranks_up().restored(0).stepped(10).finished().write(folder / "run")
        plan = Plan(1, 2, 1, (Fault(5, "probes"),))
        (folder / "plan.json").write_text(plan.to_json())
        at = story.events[-1].t - 1.0
        write_log(folder / "faults.jsonl", [Struck("probes", "n1", at=at, done_at=at, until=at)])
        facts = Facts(weights=sha256, undisturbed="a" * 64, ended=True, left=[], slurm=f"slurm {name}")
        (folder / "facts.json").write_bytes(msgspec.json.encode(facts))
        (folder / "report.json").write_text(jurymast("report", "--json", str(folder / "run")).stdout)
    (tmp_path / "a" / "campaign-1.json").write_text("{}")
    folders = sorted(str(path) for path in tmp_path.glob("*/*"))
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--json", "--check", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    rows = {(row["case"], row["metric"]): row["median"] for row in told["rows"]}
    assert rows == {
        ("all", "struck"): 2, ("all", "bit-identical"): 1, ("all", "wrong"): 1,
        ("slurm a", "struck"): 1, ("slurm a", "bit-identical"): 1,
        ("slurm b", "struck"): 1, ("slurm b", "wrong"): 1,
        ("probes", "struck"): 2, ("probes", "bit-identical"): 1, ("probes", "wrong"): 1,
    }  # fmt: skip
    assert "b/run-1: outcome: other weights" in done.stderr


def test_it_is_told_how_a_run_ended() -> None:
    one = evidence()
    assert [outcome(one, found) for found in ([], ["left: n2: pid 7"])] == ["bit-identical", "wrong"]
    one.state.phase = Phase.FAILED
    assert outcome(one, []) == "stopped"


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_log(tmp_path / "faults.jsonl", LOG)
    assert read_log(tmp_path / "faults.jsonl") == LOG
