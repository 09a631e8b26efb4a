"""`jurymast fleet`: sums over groups are sums over runs, nothing flatters, and what is kept is not needed."""

from __future__ import annotations

import csv
import json
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jurymast
from jurymast.cli import fleet as command
from jurymast.cluster.earlier import NodeReader
from jurymast.core.fleet import (
    ASKED_FOR,
    BY,
    DAY_US,
    DAYS_MAX,
    STEP,
    UNDIAGNOSED,
    WAITING,
    Day,
    RunGroup,
    RunSummary,
    failures_of,
    failures_within,
    grouped,
    spares_used,
    spent_by_day,
)
from jurymast.core.goodput import DOUBTFUL, MAYBE_REWORK, PLACED, Account, Interval, Ledger, Stay
from jurymast.core.judges.history import PastRun, Span
from jurymast.core.state import events as ev
from jurymast.core.state.failure_rate import DAY_S, Watched
from jurymast.core.state.incident import Incident
from jurymast.core.state.settings import Price, Settings
from jurymast.journal import initial_state
from jurymast.report import last_words
from jurymast.report.fleet import (
    fleet_blocks,
    fleet_csv,
    fleet_page,
    fleet_view,
    kept_file,
    leave_summary,
    mtbf_text,
    read_fleet,
    read_run,
)
from jurymast.report.goodput import report_view
from jurymast.report.liveness import JournalTail, Liveness
from jurymast.report.status import read_status
from jurymast.rundir import RunDirectory
from support.commands import Place, crash_loop, swapped
from support.random_events import Moment, moments, next_event
from support.stories import START, Story

NOW = START + 3600.0
DAY = int(START // DAY_S)


def summary(name: str = "r", **fields: Any) -> RunSummary:
    past = PastRun(run=name, active=fields.pop("active", 2), failures=fields.pop("failures", ()),
                   spans=fields.pop("spans", ()), ended=fields.pop("ended", True))  # fmt: skip
    return RunSummary(past=past, **{"cluster": "slurm", **fields})


def day(number: int = DAY, wall_us: int = 0, step_us: int = 0, doubtful_us: int = 0, **spent: int) -> Day:
    return Day(number=number, spent=spent, wall_us=wall_us, step_us=step_us, doubtful_us=doubtful_us)


def told(
    story: Story, *, account: str = "", partition: str = "", gpus: int = 0, price: Price | None = None,
    watts: float = 0.0,
) -> Story:  # fmt: skip
    """Slurm had chosen these, so many GPUs were on each node, and all used so much by their counters."""

    def say(entry: Any) -> Any:
        if isinstance(entry, ev.Progress):
            return msgspec.structs.replace(entry, joules=watts * (entry.t - START))
        if isinstance(entry, ev.AllocationStarted):
            return msgspec.structs.replace(entry, account=account, partition=partition)
        return msgspec.structs.replace(entry, gpus=gpus) if isinstance(entry, ev.NodeJoined) else entry

    story.plan = replace(
        story.plan, settings=Settings(preflight_s=0.0, price=price)
    )  # nodes with GPUs are tested
    story.entries = [say(entry) for entry in story.entries]
    return story


def put(story: Story, runs: Path, name: str) -> RunDirectory:
    story.plan = replace(story.plan, run=name)
    return story.write(runs / name)


def view_of(*places: Path, by: tuple[str, ...] = ("team",), since: float | None = None) -> Any:
    return json.loads(json.dumps(fleet_view(read_fleet(places), by, since, NOW)))


# Sums.


def random_account(drawn: list[Moment], active: int, spares: int) -> tuple[Account, RunSummary]:
    """Of a journal in which anything happens."""
    story = Story(active=active, spares=spares)
    ledger, t = Ledger(initial_state(story.plan)), START
    reader = NodeReader(ledger.state, ledger.feed)
    for moment in drawn:
        t += 5000.0 * moment[1]
        reader.take(next_event(ledger.state, t, moment))
    found = ledger.account()
    days = spent_by_day(found, ledger.state.incidents, START, {})
    past = reader.summary("r", ())
    return found, RunSummary(past=past, cluster="slurm", spares_used=spares_used(found), days=days)


@settings(max_examples=150, deadline=None)
@given(st.lists(moments, max_size=60), st.integers(1, 3), st.integers(0, 2))
def test_a_run_cut_into_days_sums_exactly(drawn: list[Moment], active: int, spares: int) -> None:
    account, run = random_account(drawn, active, spares)
    spent = sum((Counter(each.spent) for each in run.days), Counter[str]())
    assert spent.total() == sum(account.totals.values())
    for category in (STEP, MAYBE_REWORK, "unknown", *WAITING):
        assert spent[category] == account.totals[category], category
    assert sum(each.wall_us for each in run.days) == account.wall_us
    assert sum(each.step_us for each in run.days) == account.placed_us(STEP)
    assert list(run.days) == sorted(run.days, key=lambda each: each.number)
    assert run.days, "each run counts somewhere"
    assert RunSummary.from_json(json.loads(json.dumps(run.to_json()))) == run


names = st.sampled_from(["", "a", "b"])
days = st.builds(
    lambda number, spent, *us: day(number, sum(us), *us[:2], **spent),
    st.integers(DAY - 40, DAY),
    st.dictionaries(st.sampled_from([STEP, "unknown", "queue_wait", "gpu_bad"]), st.integers(0, 10**15)),
    *[st.integers(0, 10**15)] * 3,
)  # fmt: skip
runs_of_a_fleet = st.dictionaries(
    st.text(max_size=3),
    st.builds(
        lambda days, **fields: summary(days=tuple({each.number: each for each in days}.values()), **fields),
        st.lists(days, max_size=4), active=st.integers(1, 9), gpus=st.integers(0, 8), ended=st.booleans(),
        user=names, account=names, partition=names, spares=st.integers(0, 3), spares_used=st.integers(0, 3),
    ),
    max_size=8,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(runs_of_a_fleet, st.lists(st.sampled_from(list(BY)), unique=True), st.integers(0, 50))
def test_sums_over_groups_are_sums_over_runs(runs: dict[str, RunSummary], by: list[str], ago: int) -> None:
    since = (DAY - ago) * DAY_S + 7.0
    groups = grouped(runs, by, since)
    kept = [(run, each) for run in runs.values() for each in run.days if each.number >= DAY - ago]
    nodes = sum((Counter(each.spent) for _, each in kept), Counter[str]())
    assert sum((group.nodes for group in groups), Counter[str]()) == nodes
    assert sum(group.gpus.total() for group in groups) == sum(
        run.gpus * sum(us for cause, us in each.spent.items() if cause not in WAITING) for run, each in kept
    )
    assert sum(group.wall_us for group in groups) == sum(run.past.active * each.wall_us for run, each in kept)
    assert {name for group in groups for name in group.runs} == {
        name for name, run in runs.items() if any(each.number >= DAY - ago for each in run.days)
    }
    if "month" not in by:
        assert sum(len(group.runs) for group in groups) == len({id(run) for run, _ in kept})
    assert [group.key for group in groups] == sorted({group.key for group in groups})
    for group in groups:
        assert group.nodes.total() == group.allocated_us + sum(group.nodes[name] for name in WAITING)
        lost, asked = group.lost(), group.asked_for()
        for place, whole in ((0, group.nodes), (1, group.gpus)):
            kept_apart = sum(each[place] for found in (lost, asked) for each in found.values())
            counted = whole[STEP] + sum(whole[name] for name in DOUBTFUL)
            assert whole.total() - sum(whole[name] for name in WAITING) == counted + kept_apart
        assert asked.keys() <= ASKED_FOR
        for ratio in group.ratios().values():
            assert ratio is None or ratio[0] <= ratio[1]


def test_what_was_spent_belongs_to_its_month_and_its_cause() -> None:
    """A run over the end of a month; an incident that nobody has diagnosed yet is none of its categories."""
    first = 20_513 * DAY_US  # 1 March 2026
    timeline = (
        Interval(first - 3_000_000, first + 1_000_000, STEP),
        Interval(first + 1_000_000, first + 3_000_000, "hang", 1),
        Interval(first + 3_000_000, first + 4_000_000, "relaunch", 2),
    )
    waits = (Interval(first - 4_000_000, first - 3_000_000, "requeue_wait", 1),)
    stays = (Stay(first - 3_000_000, first + 4_000_000, PLACED),)
    account = Account(timeline, waits, 3, {"n1": stays, "n2": stays}, None, first + 4_000_000, final=False)
    incidents = [Incident(1, START, START, 1, 0), Incident(2, START, START, 1, 0, cause="node_lost")]
    run = summary(days=spent_by_day(account, incidents, START, {}), gpus=4)
    february, march = grouped({"r": run}, ["month"])
    assert (february.key, march.key) == (("2026-02",), ("2026-03",))
    assert february.nodes == {STEP: 6_000_000, "requeue_wait": 3_000_000}
    assert march.nodes == {STEP: 2_000_000, UNDIAGNOSED: 4_000_000, "node_lost": 2_000_000}
    assert february.gpus == {STEP: 24_000_000}, "without nodes no GPU was held"
    assert [*march.lost()] == [UNDIAGNOSED, "node_lost"]
    assert february.ratios() == {"ettr": (0.75, 0.75), "allocation_goodput": (1.0, 1.0)}


def test_a_journal_that_tells_of_centuries_is_refused() -> None:
    timeline = (Interval(0, (DAYS_MAX + 2) * DAY_US, STEP),)
    with pytest.raises(ValueError, match=f"{DAYS_MAX + 1} days"):
        spent_by_day(Account(timeline, (), 1, {}, None, 0, final=True), [], START, {})


def test_what_may_have_counted_makes_a_range_and_no_better_number() -> None:
    spent = {"step": 50, "unknown": 20, "maybe_rework": 10, "launch": 20}
    (group,) = grouped({"r": summary(days=(day(DAY, 100, 40, 30, **spent),))}, [])
    assert group.ratios() == {"ettr": (0.4, 0.7), "allocation_goodput": (0.5, 0.8)}
    assert group.lost() == {"launch": (20, 0)}
    assert RunGroup().ratios() == {"ettr": None, "allocation_goodput": None}


def test_what_somebody_asked_for_is_not_lost() -> None:
    """Nodes that stand by are lost where no spare was asked for."""
    spent = {"step": 50, "spare_idle": 30, "checkpoint_stall": 4, "drain_asked": 2, "node_lost": 5}
    runs = {
        name: summary(days=(day(DAY, 1, 1, 0, **spent),), spares=spares, gpus=2)
        for name, spares in (("with", 1), ("without", 0))
    }
    (group,) = grouped(runs, [])
    assert group.asked_for() == {"spare_idle": (30, 60), "checkpoint_stall": (8, 16), "drain_asked": (4, 8)}
    assert group.lost() == {"spare_idle": (30, 60), "node_lost": (10, 20)}


def test_used_spares_are_those_that_took_a_place() -> None:
    story = swapped()
    ledger = Ledger(initial_state(story.plan))
    for event in story.events:
        ledger.feed(event)
    assert spares_used(ledger.account()) == 1
    assert spares_used(Ledger(initial_state(story.plan)).account()) == 0


# Failures.


def lasting(failures: list[float], from_day: float, until_day: float, nodes: int = 10) -> RunSummary:
    """Days before `NOW`, on so many nodes."""
    span = Span(
        start=NOW - from_day * DAY_S, end=NOW - until_day * DAY_S, nodes=tuple(map(str, range(nodes)))
    )
    at = tuple(NOW - each * DAY_S for each in failures)
    return summary(active=nodes, spans=(span,), failures=at, days=(day(), day(DAY + 1)))


def test_the_mtbf_is_that_of_one_node_and_of_the_time_it_says() -> None:
    runs = {"a": lasting([1.0, 2.0, 20.0], 28.0, 0.0), "b": lasting([1.001], 28.0, 27.0)}
    found = failures_of(RunGroup(runs=runs, until=NOW), NOW)
    assert (found.week.failures, found.month.failures) == (2, 3), "two at once are one"
    burst_s = 600.0  # in which another failure would not have counted
    assert found.week.observed_s == pytest.approx(10 * (7 * DAY_S - 2 * burst_s))
    assert found.month.observed_s == pytest.approx(10 * (29 * DAY_S - 3 * burst_s))
    assert found.week.mean_s == pytest.approx(found.week.observed_s / 2)
    assert failures_within([Watched(0.0, 10.0, 1.0, (5.0,))], 20.0, 30.0).observed_s == 0.0


@pytest.mark.parametrize(
    ("failures", "from_day", "trend"),
    [
        ([d / 10 for d in range(1, 60)], 28.0, "worse"),
        ([7.5 + d / 10 for d in range(100)], 28.0, "better"),
        ([1.0, 9.0, 16.0, 23.0], 28.0, "unclear"),
        ([], 28.0, "unclear"),
        ([1.0], 5.0, ""),
    ],
)
def test_a_trend_is_told_where_it_is_no_chance(failures: list[float], from_day: float, trend: str) -> None:
    group = RunGroup(runs={"a": lasting(failures, from_day, 0.0)}, until=NOW + DAY_S)
    assert failures_of(group, NOW).trend == trend


def test_the_last_days_are_those_before_now_or_before_the_end_of_a_month() -> None:
    run = lasting([61.0], 90.0, 60.0)
    (group,) = grouped({"a": run}, ["team"])
    assert failures_of(group, NOW).month.observed_s == 0.0, "it has not run for two months"
    (november, *_) = grouped({"a": replace(run, days=(day(20_758),))}, ["month"])
    assert (november.key, november.until) == (("2026-11",), 20_788 * DAY_S)
    (december,) = grouped({"a": replace(run, days=(day(20_788 + 30),))}, ["month"])
    assert december.until == 20_819 * DAY_S


def test_a_month_that_is_over_has_its_own_failures() -> None:
    group = RunGroup(runs={"a": lasting([1.0, 11.0], 28.0, 0.0)}, until=NOW - 10 * DAY_S)
    assert failures_of(group, NOW).week.failures == 1


# What is read.


@pytest.fixture
def place(tmp_path: Path) -> Place:
    found = Place(tmp_path)
    put(told(swapped(), account="vision", partition="h100", gpus=8), found.runs, "20261101-100000-a-0001")
    put(told(swapped(), account="vision", partition="b200"), found.runs, "20261101-100000-b-0002")
    put(crash_loop(), found.runs, "20261101-100000-c-0003")
    put(
        told(swapped(finished=False), account="speech", partition="h100"),
        found.runs,
        "20261101-100000-d-0004",
    )
    return found


def test_a_fleet_of_one_run_tells_what_its_report_tells(tmp_path: Path) -> None:
    run = put(told(swapped(), gpus=8), tmp_path, "20261101-100000-a-0001")
    report = report_view(read_status(run), Liveness("ended"), NOW)
    total = view_of(tmp_path)["total"]
    for name in ("ettr", "allocation_goodput"):
        assert total["ratios"][name] == pytest.approx(report["ratios"][name], abs=1e-12)
    for name in ("total_node_seconds", "allocated_node_seconds"):
        assert total[name] == report[name]
    assert total["waiting"]["node_seconds"] == report["queue_node_seconds"]
    assert total["productive"]["node_seconds"] == report["categories"]["step"]
    assert total["gpu_seconds"] == 8 * report["allocated_node_seconds"]
    assert total["spares"] == {"asked": 1, "used": 1}
    assert total["mtbf"]["28d"]["failures"] == report["mtbf"]["failures"] == 1
    (incident,) = report["incidents"]
    lost = total["lost"]["node_lost"]["node_seconds"]
    of_one = incident["seconds"]["diagnose"]  # the lost node was not placed any more
    assert lost == pytest.approx(2 * incident["lost_seconds"] - of_one), "two nodes were placed"


def test_groups_and_what_the_figures_do_not_hold(place: Place) -> None:
    broken = place.runs / "20261101-100000-e-0005"
    broken.mkdir()
    (broken / "plan.json").write_text("{")
    (place.runs / "no-run").mkdir()
    found = view_of(place.runs, by=("team", "partition"))
    keys = [(g["team"], g["partition"], g["runs"], g["open_runs"]) for g in found["groups"]]
    assert keys == [
        (None, None, 1, 0), ("speech", "h100", 1, 1), ("vision", "b200", 1, 0), ("vision", "h100", 1, 0),
    ]  # fmt: skip
    assert found["provisional"]
    assert (found["total"]["runs"], found["total"]["open_runs"]) == (4, 1)
    assert [Path(each["run"]).name for each in found["unreadable"]] == [broken.name]
    assert "damaged" in found["unreadable"][0]["why"]
    warned = " ".join(found["warnings"])
    for words in ("1 run that could not be read", "no end of 1 run is recorded", "3 runs told of no GPUs"):
        assert words in warned
    assert [row["node"] for row in found["nodes"]] == ["n3"]
    assert found["nodes"][0]["incidents"] == 3
    assert view_of(place.runs, since=START + 2 * DAY_S)["total"]["runs"] == 0
    assert view_of(place.runs, by=("month",))["groups"][0]["month"] == "2026-11"


def test_what_gpus_cost_is_told_by_currency_and_of_runs_with_a_price_only(place: Place) -> None:
    dollars, euros = Price(gpu_hour=2.0, currency="USD"), Price(gpu_hour=3.0, currency="EUR")
    put(told(swapped(), account="one", gpus=8, price=dollars), place.runs, "a-1")
    put(told(crash_loop(), account="one", gpus=8, price=euros), place.runs, "a-2")
    put(told(swapped(), account="two", gpus=8), place.runs, "b-1")
    put(told(swapped(), account="two", price=dollars), place.runs, "b-2")
    view = view_of(place.runs)
    teams = {group["team"]: group for group in view["groups"]}
    one, two = teams["one"], teams["two"]
    assert set(one["cost"]) == set(view["total"]["cost"]) == {"EUR", "USD"}
    assert two["cost"] == {}, "without a price, or without GPUs, nothing is guessed"
    alone = report_view(read_status(RunDirectory(place.runs / "a-1")), Liveness("ended"))["cost"]
    found = one["cost"]["USD"]
    assert (
        found["total"] == pytest.approx(2.0 * found["gpu_seconds"] / 3600.0) == pytest.approx(alone["total"])
    )
    assert found["total"] == pytest.approx(sum(found[part] for part in ("counted", "doubtful", "else")))
    for part in ("counted", "else"):
        assert 0 < found[part] == pytest.approx(alone[part])
    text = place.good("fleet")
    assert f"cost: {found['total']:.2f} USD for" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "COST" in rows["TEAM"]
    assert f"{one['cost']['EUR']['total']:.2f} EUR + {found['total']:.2f} USD" in rows["one"]
    assert "in steps that counted" in text
    lines = {row["team"]: row for row in csv.DictReader(place.good("fleet", "--csv").splitlines())}
    assert {"cost.USD.total", "cost.EUR.else"} <= lines["one"].keys()
    assert float(lines["one"]["cost.USD.total"]) == found["total"]
    assert {value for name, value in lines["two"].items() if name.startswith("cost.")} == {""}, "no 0"
    lost = {value for name, value in lines["two"].items() if name.startswith("lost.")}
    assert "0" in lost - {""} == lost, "of what cost nothing it is known"
    page = fleet_page(view)
    assert "USD" in page
    assert "c-rework" not in page[page.index("<h2>Asked for") :], "which looks lost"


def test_what_gpus_used_is_told_of_runs_whose_counters_were_read_only(place: Place) -> None:
    put(told(swapped(), account="one", gpus=8, watts=1e6), place.runs, "a-1")
    put(told(swapped(), account="one", gpus=8, watts=2e6), place.runs, "a-2")
    put(told(swapped(), account="one", gpus=8), place.runs, "a-3")
    view = view_of(place.runs)
    teams = {group["team"]: group for group in view["groups"]}
    alone = [
        report_view(read_status(RunDirectory(place.runs / name)), Liveness("ended"))["energy"]
        for name in ("a-1", "a-2")
    ]
    found = teams["one"]["energy"]
    assert found == view["total"]["energy"]
    assert found["kwh"] == pytest.approx(sum(each["kwh"] for each in alone))
    watts = [each["gpu_watts"] for each in alone]
    assert found["gpu_watts"] == pytest.approx(sum(watts) / 2), "not over the GPUs of a-3"
    assert teams["vision"]["energy"] is None
    assert "no energy counter of 2 runs with GPUs was read: no energy of theirs" in view["warnings"]
    text = place.good("fleet")
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "ENERGY" in rows["TEAM"]
    assert f"{found['kwh']:,.1f} kWh" in rows["one"]
    assert "kWh" not in rows["vision"]
    assert f"energy: at least {found['kwh']:,.1f} kWh, " in text
    lines = {row["team"]: row for row in csv.DictReader(place.good("fleet", "--csv").splitlines())}
    assert (float(lines["one"]["energy.kwh"]), lines["vision"]["energy.kwh"]) == (found["kwh"], "")
    assert "kWh" in fleet_page(view)


def test_energy_belongs_to_the_day_on_which_it_was_read(tmp_path: Path) -> None:
    story = told(swapped(), gpus=8, watts=1e6)
    progress = [entry for entry in story.entries if isinstance(entry, ev.Progress)]
    late = (DAY + 1) * DAY_S + 1.0 - progress[-1].t  # so that the last reading is just after midnight

    def later(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return (entry[0] + late, entry[1]) if entry[0] >= progress[-1].t else entry
        return msgspec.structs.replace(entry, t=entry.t + late) if entry.t >= progress[-1].t else entry

    story.entries = [*map(later, story.entries)]
    run = read_run(put(story, tmp_path, "a-1"))
    before, after = progress[-2].joules, progress[-1].joules - progress[-2].joules
    assert [each.millijoules for each in run.days] == [round(1e3 * before), round(1e3 * after)]


def test_a_run_that_has_ended_leaves_its_summary_and_nobody_reads_its_journal(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = put(told(swapped(), account="one", gpus=8), place.runs, "a-1")
    going_on = put(told(swapped(finished=False)), place.runs, "a-2")
    whole = {run: read_run(run) for run in (ended, going_on)}
    for run in whole:
        last_words.main(str(run.root))
    assert ended.summary_file.exists()
    assert not going_on.summary_file.exists()
    journals: list[Path] = []
    of = JournalTail.new

    def noted(tail: JournalTail) -> Iterator[dict[str, Any]]:
        journals.append(tail.directory.root)
        return of(tail)

    monkeypatch.setattr(JournalTail, "new", noted)
    assert [read_run(run) for run in whole] == [*whole.values()]
    assert journals == [going_on.root]
    (journal,) = ended.journal_files()
    journal.write_bytes(journal.read_bytes() + b"{}\n")
    assert read_run(ended).whole is False
    assert journals[1:] == [ended.root], "it does not fit any more"


@pytest.mark.parametrize(
    "value", [-1, 1 << 70, 10**400, math.nan, math.inf, "<script>", [], None, True, 0.5], ids=str
)
def test_whatever_a_summary_says_a_fleet_is_told(tmp_path: Path, value: object) -> None:
    price = Price(gpu_hour=1.0, currency="USD")
    run = put(told(swapped(), gpus=8, price=price, watts=1e6), tmp_path, "a-1")
    leave_summary(run)
    left = json.loads(run.summary_file.read_text())
    for *above, last in places_in(left):
        changed = inner = json.loads(json.dumps(left))
        for name in above:
            inner = inner[name]
        inner[last] = value
        run.summary_file.write_text(json.dumps(changed))
        kept_file(tmp_path).unlink(missing_ok=True)
        view = view_of(tmp_path)
        assert view["total"]["runs"] in (0, 1), (above, last)  # an observed one counts nowhere
        assert fleet_blocks(view)
        assert fleet_csv(view)
        assert fleet_page(view).count("<script>") == 1, "the page's own"
    for damage in ("", "[", "[]", "7", "null", "{}", '{"version": 1}'):
        run.summary_file.write_text(damage)
        assert read_run(run).past.run == "a-1"


def places_in(value: Any, *above: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value within this one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*above, name)
        yield from places_in(inner, *above, name)


def test_a_copy_of_a_run_does_not_count_again(place: Place) -> None:
    """In another runs directory, or in the same. The one of which the journal goes further counts."""
    before = view_of(place.runs)["total"]
    longer = swapped(finished=False)
    longer.stepped(90)
    put(told(longer, account="speech"), place.root / "more", "20261101-100000-d-0004")
    found = view_of(place.runs, place.root / "more", place.runs)
    assert found["total"]["runs"] == before["runs"]
    assert found["total"]["productive"]["node_seconds"] > before["productive"]["node_seconds"]
    assert "a copy of a run in 1 more directory" in " ".join(found["warnings"])


def test_a_hostile_journal_ends_nothing(place: Place) -> None:
    (journal,) = (place.runs / "20261101-100000-a-0001" / "journal").iterdir()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines[1:]:
        if line.get("event") == "Progress":
            line["t"] = line["stepped_at"] = 9e10
    journal.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = view_of(place.runs)
    assert found["total"]["runs"] == 3
    assert "days" in found["unreadable"][0]["why"]


# What is kept.


def blank(journal: Path) -> None:
    """Nothing is left of it, and nothing shows that."""
    before = journal.stat()
    journal.write_bytes(b" " * before.st_size)
    os.utime(journal, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_journal_is_read_once_until_it_changes(place: Place) -> None:
    before = view_of(place.runs)
    assert kept_file(place.runs).stat().st_mode & 0o777 == 0o600
    journals = [path for run in place.runs.glob("2026*") for path in (run / "journal").iterdir()]
    for journal in journals:
        blank(journal)
    assert view_of(place.runs) == before, "what was read is kept"
    for journal in journals:
        os.utime(journal, ns=(1, 1))
    assert view_of(place.runs)["total"]["productive"]["node_seconds"] == 0.0


@pytest.mark.parametrize("how", ["damaged", "cut", "another version", "another field", "a list", "removed"])
def test_what_does_not_fit_is_read_again(place: Place, how: str) -> None:
    before = view_of(place.runs)
    kept = kept_file(place.runs)
    text = kept.read_text()
    changed = {
        "damaged": "\0" * 100, "cut": text[: len(text) // 2],
        "another version": text.replace(jurymast.__version__, "0.0.1").replace('"step": ', '"step": 9'),
        "another field": text.replace('"spares_used"', '"spares_lost"'), "a list": '{"v": 1, "entries": []}',
    }.get(how)  # fmt: skip
    assert changed != text
    kept.write_text(changed) if changed is not None else kept.unlink()
    assert view_of(place.runs) == before
    assert json.loads(kept.read_text()) == json.loads(text), "and kept"


def test_a_directory_that_cannot_be_written_works_without(place: Place) -> None:
    kept_file(place.runs).mkdir()
    assert view_of(place.runs)["total"]["runs"] == 4
    assert not [path for path in place.runs.iterdir() if path.name.startswith("..fleet")], (
        "nothing is left over"
    )


def test_runs_that_are_gone_are_forgotten_and_an_interrupted_look_is_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def reading(directory: RunDirectory) -> RunSummary:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(directory.root.name)
        return read_run(directory)

    monkeypatch.setattr("jurymast.report.fleet.read_run", reading)
    with pytest.raises(KeyboardInterrupt):
        read_fleet([place.runs])
    assert sorted(json.loads(kept_file(place.runs).read_text())["entries"]) == calls
    monkeypatch.undo()
    read_fleet([place.runs])
    (place.runs / calls[0]).rename(place.root / "gone")
    read_fleet([place.runs])
    assert calls[0] not in json.loads(kept_file(place.runs).read_text())["entries"]


# The command.


def test_two_at_once_agree(place: Place) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: place.json("fleet", "--since", "90000d"), range(2))
    for found in (first, second):
        del found["generated_at"], found["since"]
    assert first == second
    assert len(json.loads(kept_file(place.runs).read_text())["entries"]) == 4


def test_the_table_and_the_csv_have_one_row_a_group(place: Place) -> None:
    shown = place.good("fleet", "--by", "team,user", "--by", "partition").splitlines()
    header = next(number for number, line in enumerate(shown) if line.startswith("TEAM"))
    assert shown[header].split()[:4] == ["TEAM", "USER", "PARTITION", "RUNS"]
    rows = [line.split() for line in shown[header + 1 : header + 6]]
    assert [row[0] for row in rows] == ["-", "speech", "vision", "vision", "all"]
    assert rows[1][3] == "1*", "provisional"
    lost = next(number for number, line in enumerate(shown) if line.startswith("LOST TO"))
    asked = next(number for number, line in enumerate(shown) if line.startswith("ASKED FOR"))
    assert any(line.startswith("node lost ") for line in shown[lost:asked])
    assert not any(line.startswith(("spare idle ", "checkpoint stall ")) for line in shown[lost:asked])
    assert any(line.startswith("spare idle ") for line in shown[asked:])
    assert any(line.startswith("checkpoint stall ") for line in shown[asked:])
    assert any(line.startswith("n3 ") for line in shown)
    (first, *others) = csv.DictReader(place.good("fleet", "--csv").splitlines())
    assert len(others) == 2
    assert float(first["ratios.allocation_goodput.low"]) <= float(first["ratios.allocation_goodput.high"])
    assert {
        "team",
        "runs",
        "lost.node_lost.gpu_seconds",
        "asked_for.spare_idle.node_seconds",
        "mtbf.7d.failures",
    } <= first.keys()


def test_a_name_is_no_formula_of_a_spreadsheet_and_no_row_of_its_own(tmp_path: Path) -> None:
    put(
        told(swapped(), account="=cmd|' /C calc'!A0", partition="a\nb,\x1b[2J"),
        tmp_path,
        "20261101-100000-a-0001",
    )
    (row,) = csv.DictReader(fleet_csv(view_of(tmp_path, by=("team", "partition"))).splitlines())
    assert row["team"] == "'=cmd|' /C calc'!A0"
    assert row["partition"].startswith("a b,")
    assert "\x1b" not in row["partition"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--by", "team,moon"), "moon is none of team, partition, user, month"),
        (("--since", "soon"), "soon is not a duration"),
        (("--json", "--csv"), "exclude each other"),
        (("--runs", "nowhere"), "there is no directory"),
    ],
)
def test_what_it_does_not_take(place: Place, words: tuple[str, ...], said: str) -> None:
    done = place.run("fleet", *words)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_command_knows_all_keys(tmp_path: Path) -> None:
    assert tuple(BY) == command.BY
    place = Place(tmp_path)
    assert "no runs in" in place.run("fleet").stderr


def test_days_are_those_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert day(20_512).month == "2026-02"
        assert day(20_513).month == "2026-03"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("failures", "told"),
    [(1, "20 min 00 s to 1 h 00 min"), (4, "20 min 00 s to 1 h 00 min"), (5, "30 min 00 s")],
)
def test_few_failures_give_no_single_mtbf(failures: int, told: str) -> None:
    times = {"node_seconds": 1800.0, "low_node_seconds": 1200.0, "high_node_seconds": 3600.0}
    assert mtbf_text({**times, "failures": failures}) == told


def test_many_runs_are_read_in_several_processes_and_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        Story().running(60 + number).finished().write(tmp_path / f"20261117-10000{number}-gpt-abcd")
        plan = tmp_path / f"20261117-10000{number}-gpt-abcd" / "plan.json"
        plan.write_text(json.dumps({**json.loads(plan.read_text()), "run": f"run-{number}"}))
    (tmp_path / "20261117-100003-gpt-abcd" / "plan.json").write_text("{")
    alone = read_fleet([tmp_path])
    kept_file(tmp_path).unlink()
    monkeypatch.setattr("jurymast.report.fleet.MANY", 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert read_fleet([tmp_path]) == alone
    assert [len(alone.runs), len(alone.unreadable)] == [5, 1]
    Story().running(90).finished().write(tmp_path / "20261117-200000-gpt-abcd")
    assert len(read_fleet([tmp_path]).runs) == 6
