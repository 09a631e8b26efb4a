"""The goodput report as a page: whole by itself, whatever a run's texts contain."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from jurymast.core.goodput import CATEGORIES, Account, Interval, Sampled
from jurymast.core.state import events as ev
from jurymast.core.state.run import TierState
from jurymast.core.state.settings import Price, Settings
from jurymast.report import pages
from jurymast.report.curves import curves
from jurymast.report.fleet import Fleet, fleet_page, fleet_view, read_fleet
from jurymast.report.goodput import (
    LEFT_OUT,
    MARKS,
    compare,
    compare_page,
    page,
    report_blocks,
    report_page,
    report_view,
    reported,
    stalls_text,
)
from jurymast.report.liveness import Liveness
from jurymast.report.records import PAGE_CHARACTERS, records_of
from jurymast.report.status import StatusWatcher, read_status
from jurymast.report.text import Line
from support.commands import crash_loop, swapped
from support.stories import START, Story

TABLE = re.compile(r"<table[^>]*>(?!<caption>)")  # without a name

ALIVE, ENDED = Liveness("alive", "RUNNING", "17"), Liveness("ended")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def watcher(story: Story, tmp_path: Path) -> StatusWatcher:
    return read_status(story.write(tmp_path / "run"))


class Page(html.parser.HTMLParser):
    """Collects tags, and checks that they are closed in order."""

    VOID = frozenset({"meta", "br", "link", "img", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"&"


def test_the_page_is_whole_loads_nothing_and_escapes_everything(tmp_path: Path) -> None:
    story = Story().running()
    story.failed(1, error="ValueError", message=EVIL, trace=f"Traceback\n{EVIL}\n")
    story.stopped()
    story.recovered(0, 30)
    watching = watcher(story, tmp_path)
    report = report_view(watching, ALIVE, story.t)
    report["provenance"]["script"] = EVIL
    written = page(report, watching.account(ALIVE, story.t), watching.state)
    parser = Page()
    parser.feed(written)
    assert parser.open == []
    assert "alert(1)" in written
    assert not re.search(r"<script>alert|<img|onerror=alert\(1\)>", written)
    kinds = [tag for tag, _ in parser.tags]
    assert kinds.count("script") == 2, "the page's own, and its figures"
    assert kinds.count("style") == 1
    assert "svg" in kinds
    for _, attributes in parser.tags:
        assert not {"src", "srcset", "style", "onclick", "onload", "onerror"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\((?!#)|@import|https?://", written.split('id="report">')[0])
    embedded = written.split('id="report">')[1].split("</script>")[0]
    assert json.loads(embedded) == json.loads(json.dumps(report))


def test_a_page_of_thousands_of_incidents_stays_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    story = Story().running()
    story.failed(1, error="ValueError")
    story.stopped()
    story.recovered(0, 30)
    watching = watcher(story, tmp_path)
    report = report_view(watching, ALIVE, story.t)
    (one,) = report["incidents"]
    parts = dict.fromkeys(one["seconds"], 0.0)
    report["incidents"] = [
        {**one, "id": n, "traceback": f"{'x' * 3000}{n}", "seconds": {**parts, "detect": 1.0 + (n == 7)}}
        for n in range(1, 2001)
    ]
    written = page(report, watching.account(ALIVE, story.t), watching.state)
    assert len(written.encode()) < 1_000_000
    assert "The 150 costliest of 2000 incidents" in written
    kept = {int(n) for n in re.findall(r'id="incident-(\d+)"', written)}
    assert (len(kept), {7, 2000} <= kept) == (150, True), "the costliest and the newest"
    assert f"x{2000}<" in written, "how the newest failed is told whole"
    assert LEFT_OUT in html.unescape(written)
    assert "2001</td>" in written, "the sum is of all"


def test_the_page_has_the_time_of_a_step_and_the_share_that_counted_over_time(tmp_path: Path) -> None:
    story = Story().running()
    for done, step_s in ((40, 1.0), (80, 2.0), (120, 4.0)):
        story.stepped(done, step_s)
    watching = watcher(story, tmp_path)
    found = report_page(
        report_view(watching, ALIVE, story.t), watching.account(ALIVE, story.t), watching.state
    )
    share, steps = found["curves"]
    assert share.label == "share of the time in steps that counted"
    assert steps.lines[0].tip == "attempt 1: 500 ms to 4.0 s a step"
    heights = [float(point.split(",")[1]) for point in steps.lines[0].points.split()]
    assert heights == sorted(heights, reverse=True), "longer steps are higher"
    assert [tick.label for tick in steps.y_ticks] == ["0 ms", "1.0 s", "2.0 s", "3.0 s", "4.0 s"]


def test_the_share_that_counted_is_a_range_where_nobody_knows(tmp_path: Path) -> None:
    begin, hour = 10**15, 3_600_000_000
    parts = [Interval(begin, begin + hour, "step"), Interval(begin + hour, begin + 2 * hour, "maybe_rework")]
    account = Account(tuple(parts), (), 1, {}, begin, begin + 2 * hour, final=True)
    (share,) = curves(account)
    most, least = share.lines
    assert (most.kind, least.kind) == ("edge", "main")
    assert least.tip.startswith("at least 0.0 % to 100.0 %")
    assert most.tip.startswith("at most 100.0 % to 100.0 %")


def test_of_many_steps_a_thousand_tell_the_pace() -> None:
    paces = Sampled[int]()
    for step in range(100_000):
        paces.take(step)
    gaps = {b - a for a, b in pairwise(paces.kept)}
    assert 500 <= len(paces.kept) <= Sampled.MOST
    assert len(gaps) == 1, "evenly"


def test_saves_starts_swaps_and_findings_are_marked_where_and_when_they_were(tmp_path: Path) -> None:
    story = swapped()
    found_at = story.t
    for node, verdict in (("n1", "bad"), ("n2", "ok"), ("n99", "bad")):
        story.feed(
            ev.HealthFound(
                t=story.t, node=node, probe="nvidia", code=EVIL, verdict=verdict, kind="hardware", message=""
            )
        )
    watching = watcher(story, tmp_path)
    account = watching.account(ALIVE, story.t)
    drawn = pages.timeline(account, watching.state.incidents)
    assert drawn is not None
    of = {kind: [mark for mark in drawn["marks"] if mark.kind == kind] for kind in MARKS}
    lanes = {lane["whole_label"]: lane["y"] for lane in drawn["lanes"]}
    start = min(i.start for i in (*account.waits, *account.timeline))
    (finding,) = of["finding"]
    assert (finding.y, finding.ms) == (lanes["n1"], (round(found_at * 1e6) - start) // 1000)
    (swap,), (begun,) = of["swap"], of["start"]
    assert (swap.y, swap.tip) == (lanes["n1"], "n1, a spare until now, takes a place")
    assert "attempt 2" in begun.tip
    saved = [event for event in story.events if isinstance(event, ev.Saved)]
    assert len(of["save"]) == len(saved) > 0
    assert {mark.y for mark in (*of["save"], begun)} == {drawn["row"]}
    assert drawn["row"] < min(lanes.values())
    written = page(report_view(watching, ALIVE, story.t), account, watching.state)
    assert "<script>alert" not in written
    assert "▼ on a node" in written


def test_of_thousands_of_saves_few_are_marked_and_their_stalls_are_drawn(tmp_path: Path) -> None:
    story = Story().running()
    for done in range(50, 50 * 4000, 50):
        story.stepped(done, step_s=0.01).saved(done, stall_s=0.1 + (done > 100_000))
    watching = watcher(story, tmp_path)
    account = watching.account(ALIVE, story.t)
    drawn = pages.timeline(account, [])
    assert drawn is not None
    assert 100 < len(drawn["marks"]) <= pages.CHART_PX
    (stalls,) = [plot for plot in curves(account) if "stood still" in plot.label]
    assert stalls.lines[0].tip == "attempt 1: 100 ms to 1.1 s a save"
    report = report_view(watching, ALIVE, story.t)
    assert "Training stood still for" in stalls_text(report)
    assert "1.1 s at most" in stalls_text(report)


def test_an_incident_unfolds_to_the_stacks_and_the_last_lines_of_its_rank(tmp_path: Path) -> None:
    watching = watcher(crash_loop(), tmp_path)
    directory, (*_, last) = watching.directory, watching.state.incidents
    log = directory.rank_log(last.attempt, last.rank or 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"old\n" * 9000 + EVIL.encode() + b"\x1b[31m\xff\n" + b"\0" * 50)
    stacks = directory.evidence(last.attempt) / "stacks-00000-00003.txt"
    stacks.parent.mkdir(parents=True)
    stacks.write_text(
        f"rank 0, process 7: in all_reduce\n{EVIL}\n/proc/7/status:\nName: x\n\nrank 1, process 8: y\n"
        + "x" * 10**5
    )
    stacks.with_name("stacks-00008-00008.txt").write_text("rank 8, process 9: in recv\n")
    shown = reported(watching)
    ours, others, lines = shown.records[last.id]
    assert (ours.title, others.title, lines.title) == (
        "stacks of ranks 0 to 3", "stacks of rank 8", f"last lines of rank {last.rank}"
    )  # fmt: skip
    assert "Name: x" not in ours.text
    assert "rank 1, process 8" in ours.text
    written = page(shown.report, shown.account, shown.state, shown.records)
    assert written.count("in all_reduce") == 1 + (shown.report["state"] == "failed")
    assert f"{html.escape(EVIL, quote=False)[:20]}" in written
    assert "\x1b" not in written
    assert "\0" not in written
    assert "<script>alert" not in written
    assert len(written.encode()) < 200_000


def test_the_records_of_many_incidents_leave_the_page_small(tmp_path: Path) -> None:
    watching = watcher(crash_loop(), tmp_path)
    directory, one = watching.directory, watching.state.incidents[0]
    many = [replace(one, id=n, attempt=n) for n in range(1, 201)]
    for incident in many:
        log = directory.rank_log(incident.attempt, incident.rank or 0)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text('"' * 5000)
    found = records_of(directory, many, 1)
    assert 5 < len(found) < 50
    assert 200 in found, "the newest"
    written = sum(len(html.escape(record.text)) for records in found.values() for record in records)
    assert written <= PAGE_CHARACTERS


def test_a_run_s_cost_is_told_where_price_and_gpus_are_known(tmp_path: Path) -> None:
    price = Price(gpu_hour=2.5, currency="CHF")
    story = Story(gpus=8, settings=Settings(price=price, preflight_s=0.0)).running(4000).finished()
    watching = watcher(story, tmp_path)
    account, report = watching.account(ENDED, story.t), report_view(watching, ENDED, story.t)
    cost = report["cost"]
    hours = 8 * report["allocated_node_seconds"] / 3600.0
    assert cost["total"] == pytest.approx(2.5 * hours) == pytest.approx(sum(cost["categories"].values()))
    assert cost["counted"] + cost["doubtful"] + cost["else"] == pytest.approx(cost["total"])
    assert "queue_wait" not in cost["categories"]
    told = f"{cost['total']:.2f} CHF for {hours:.1f} GPU-hours at 2.5 CHF"
    assert any(told in block.text for block in report_blocks(report) if isinstance(block, Line))
    assert told in page(report, account, watching.state)
    assert f"{cost['total']:.2f} CHF" in compare_page(compare(report, report))
    for unknown in (Story(gpus=8, settings=Settings(preflight_s=0.0)), Story(settings=Settings(price=price))):
        other = watcher(unknown.running(), tmp_path / str(id(unknown)))
        shown = report_view(other, ALIVE, unknown.t)
        assert shown["cost"] is None
        assert "CHF" not in page(shown, other.account(ALIVE, unknown.t), other.state).split('id="report">')[0]


def test_what_failed_in_the_same_way_is_told_once(tmp_path: Path) -> None:
    story = Story().running()
    for _ in range(2):
        story.failed(1, trace="Traceback\n  the same\n")
        story.stopped().backed_off()
        story.recovered(0, 30)
    watching = watcher(story, tmp_path)
    written = page(report_view(watching, ALIVE, story.t), watching.account(ALIVE, story.t), watching.state)
    assert written.split('id="report">')[0].count("the same") == 1
    assert "the traceback of #1" in written


def test_every_table_is_named_to_those_who_hear_the_page() -> None:
    templates = Path(pages.__file__).with_name("templates").glob("*.j2")
    nameless = [(file.name, found) for file in templates for found in TABLE.findall(file.read_text())]
    assert nameless == []


def test_a_browser_obeys_no_style_or_script_but_the_pages_own(tmp_path: Path) -> None:
    story = swapped()
    watching = watcher(story, tmp_path)
    written = page(report_view(watching, ALIVE, story.t), watching.account(ALIVE, story.t), watching.state)
    allowed = re.search(r"Content-Security-Policy\"\s+content=\"([^\"]+)\"", written)
    assert allowed is not None
    rules = dict(rule.split(" ", 1) for rule in html.unescape(allowed[1]).split("; "))
    assert rules["default-src"] == "'none'"
    for tag in ("style", "script"):
        (own,) = re.findall(rf"<{tag}>(.*?)</{tag}>", written, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"


def test_hostile_names_are_shown_as_they_are_and_do_nothing(tmp_path: Path) -> None:
    """A run's name, script and arguments are somebody's, and so are the errors of its training."""
    story = Story().running()
    story.failed(1, error=EVIL, message=EVIL, trace=f"\x1b[2J{EVIL}\x00\n")
    watching = watcher(story, tmp_path)
    report = report_view(watching, ALIVE, story.t)
    for key in ("run", "name", "state", "end_reason"):
        report[key] = EVIL
    report["warnings"] = [EVIL]
    report["incidents"][0].update(
        cause=EVIL, node=EVIL, action=EVIL, reason=EVIL, evidence=EVIL, tiers={EVIL: 1}
    )
    report["provenance"] = {EVIL: [EVIL], "directory": EVIL, **dict.fromkeys(report["provenance"], EVIL)}
    report["categories"][EVIL] = 1.0
    watching.state.incidents[0].cause = watching.state.incidents[0].node = EVIL
    watching.state.saved[EVIL] = TierState(step=1, failures=1, error=EVIL)
    account = watching.account(ALIVE, story.t)
    account.stays[EVIL] = account.stays["n1"]
    written = page(report, account, watching.state)
    parser = Page()
    parser.feed(written)
    assert parser.open == []
    assert {tag for tag, _ in parser.tags}.isdisjoint({"img", "iframe", "object", "embed", "form", "base"})
    assert [tag for tag, _ in parser.tags].count("script") == 2
    assert html.unescape(written).count(EVIL) > 10
    assert EVIL not in written
    assert "\x1b" not in written
    assert "\x00" not in written
    for _, attributes in parser.tags:
        assert not [name for name in attributes if name.startswith("on")]


def test_the_page_of_a_fleet_is_whole_loads_nothing_and_escapes_all_names(tmp_path: Path) -> None:
    swapped().write(tmp_path / "run")
    fleet = read_fleet([tmp_path])
    hostile = {
        f"{EVIL}{name}": replace(run, user=EVIL, account=f"\x1b[2J{EVIL}", partition=EVIL)
        for name, run in fleet.runs.items()
    }
    fleet = Fleet(hostile, [(EVIL, EVIL)])
    view = fleet_view(fleet, ("team", "user", "partition", "month"), None, START + 60.0)
    view["warnings"].append(EVIL)
    view["nodes"][0].update(node=EVIL, last_cause=EVIL, last_evidence=EVIL)
    view["total"]["lost"][EVIL] = {"node_seconds": 1.0, "gpu_seconds": 1.0}
    written = fleet_page(view)
    parser = Page()
    parser.feed(written)
    assert parser.open == []
    tags = [tag for tag, _ in parser.tags]
    assert (tags.count("script"), tags.count("style")) == (2, 1)
    assert {"img", "iframe", "object", "embed", "form", "base", "link"}.isdisjoint(tags)
    for _, attributes in parser.tags:
        assert not {"src", "srcset", "style"} & set(attributes)
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
    assert EVIL not in written
    assert "\x1b" not in written
    shown, embedded = written.split('id="fleet">')
    assert html.unescape(shown).count(EVIL) >= 9
    assert not re.search(r"url\((?!#)|@import|https?://", shown)
    assert json.loads(embedded.split("</script>")[0]) == json.loads(json.dumps(view))


def test_a_comparison_of_runs_is_a_page_that_escapes_all_names(tmp_path: Path) -> None:
    story = swapped()
    report = report_view(watcher(story, tmp_path), ENDED, story.t)
    both = compare(report, {**report, "run": EVIL, "categories": {**report["categories"], EVIL: 1.0}})
    written = compare_page(both)
    parser = Page()
    parser.feed(written)
    assert parser.open == []
    assert EVIL not in written
    assert [tag for tag, _ in parser.tags].count("script") == 2
    shown, embedded = written.split('id="compare">')
    assert html.unescape(shown).count(EVIL) >= 5
    assert json.loads(embedded.split("</script>")[0]) == json.loads(json.dumps(both))


def test_every_category_has_a_colour(tmp_path: Path) -> None:
    story = swapped()
    watching = watcher(story, tmp_path)
    written = page(report_view(watching, ALIVE, story.t), watching.account(ALIVE, story.t), watching.state)
    coloured = set(re.findall(r"\.(c-\w+)\{--c:", written))
    assert coloured == {pages.kind(category.name) for category in CATEGORIES} | {pages.kind("of tomorrow")}


# What a deuteranope and a protanope see of red, green and blue light (Machado 2009).
SEEN = {
    "deuteranope": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "protanope": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
}
XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1094, 0.8726))


def mixed(row: Sequence[float], light: Sequence[float]) -> float:
    return sum(part * each for part, each in zip(row, light, strict=True))


def light_of(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def contrast(colour: str, page_colour: str) -> float:
    dark, bright = sorted(mixed(XYZ[1], light_of(each)) for each in (colour, page_colour))
    return (bright + 0.05) / (dark + 0.05)


def place_of(colour: str, seen: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """In CIELAB, as it is seen."""
    light = [min(1.0, max(0.0, mixed(row, light_of(colour)))) for row in seen]
    x, y, z = (mixed(row, light) ** (1 / 3) for row in XYZ)
    return 116 * y, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("background", ["#ffffff", "#14181d"])
def test_lost_time_looks_lost_to_everybody(background: str) -> None:
    """Each category stands out from the page, and those of incidents from steps, whatever one sees."""
    css = (Path(pages.__file__).parent / "templates" / "page.css").read_text()
    assert f"--page:{background};" in css.replace("--page:#fff;", "--page:#ffffff;")
    light, dark = css.split("@media (prefers-color-scheme:dark){\n.c-")
    colours = dict(re.findall(r"\.c-(\w+)\{--c:(#\w{6})\}", light))
    if background != "#ffffff":
        colours |= dict(re.findall(r"(?:^|\.c-)(\w+)\{--c:(#\w{6})\}", dark))
    assert {name: shown for name, shown in colours.items() if contrast(shown, background) < 3.0} == {}
    lost = [each.name for each in CATEGORIES if each.group == "incident"]
    for who, seen in SEEN.items():
        steps = place_of(colours["step"], seen)
        near = [name for name in lost if math.dist(place_of(colours[name], seen), steps) < 20.0]
        assert near == [], who
    assert contrast(colours["failed_node"], "#000000") < contrast(colours["launch"], "#000000")


def test_the_page_shows_what_happened_before_all_else(tmp_path: Path) -> None:
    story = crash_loop()
    watching = watcher(story, tmp_path)
    found = report_page(report_view(watching, ENDED), watching.account(ENDED, story.t), watching.state)
    assert found["tone"] == "bad"
    assert (found["failure"]["cause"], found["failure"]["todo"]) == ("worker_exception", "read the traceback")
    assert "ValueError: bad" in found["failure"]["traceback"]
    assert [each["total"] for each in found["incidents"]] == [
        pytest.approx(sum(each["seconds"].values())) for each in found["incidents"]
    ]
    slices = found["slices"]
    assert sum(each.share for each in slices) == pytest.approx(1.0)
    assert slices[-1].x + slices[-1].share == pytest.approx(1.0)
    assert found["summary"].startswith(
        "12.8 % of 71.1 node-s went into steps that counted. Most of the rest: "
    )
    assert [flag.id for flag in found["timeline"]["flags"]] == [1, 2, 3]


def test_flags_too_close_for_a_number_keep_their_line(tmp_path: Path) -> None:
    story = Story().running()
    for error in ("ValueError", "KeyError"):
        story.failed(1, error=error)
        story.stopped()
        story.recovered(0, story.state.best_step + 1)
    story.stepped(100_000)
    watching = watcher(story, tmp_path)
    drawn = pages.timeline(watching.account(ALIVE, story.t), watching.state.incidents)
    assert drawn is not None
    assert [flag.number for flag in drawn["flags"]] == [True, False]


def test_the_page_of_a_large_run_stays_small(tmp_path: Path) -> None:
    story = Story(active=600, spares=20).allocated().ranks_up().restored(0).stepped(1)
    done = 1
    for round_ in range(30):
        for _ in range(20):
            done += 10
            story.stepped(done).saved(done)
        if round_ % 3 == 0:
            story.lost(story.state.placement[round_])
            story.stopped()
            story.recovered(done, done + 1)
            done += 1
    watching = watcher(story, tmp_path)
    report = report_view(watching, ALIVE, story.t)
    account = watching.account(ALIVE, story.t)
    rows, left_out = pages.rows_of(account)
    assert left_out == 0
    assert len(rows) < 40
    assert any(" x like " in label for label, *_ in rows)
    written = page(report, account, watching.state)
    assert len(written) < 300_000
    assert written.count("<rect") < 3000


def test_coarse_intervals_keep_order_and_gaps() -> None:
    marks = [(0, 10, "step"), (10, 11, "rework"), (11, 30, "step"), (60, 99, "hang")]
    fine = [Interval(*mark) for mark in marks]
    merged = pages.coarse(fine, 0, 100, 10)
    assert [(i.start, i.end, i.category) for i in merged] == [(0, 30, "step"), (60, 100, "hang")]
