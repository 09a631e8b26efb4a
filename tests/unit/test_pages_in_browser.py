"""The report's page in a real browser: it loads nothing, can be read, walked by keyboard, looked at closely
and printed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jurymast.core.goodput import PLACED, Account, Interval, Stay
from jurymast.core.state.events import AllocationStarted
from jurymast.report.fleet import fleet_page, fleet_view, read_fleet
from jurymast.report.goodput import compare, compare_page, page, report_view
from jurymast.report.liveness import Liveness
from jurymast.report.status import read_status
from support.commands import crash_loop, swapped
from support.stories import Story

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test installs it")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")

ALIVE = Liveness("alive", "RUNNING", "17")
EVIL = "</script><script>console.error('EVIL')</script><img src=x onerror=console.error('EVIL')>'\"&"
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--no-first-run")  # fmt: skip
PHONE, DARK = {"viewport": {"width": 320, "height": 640}}, {"color_scheme": "dark"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


def hostile() -> Story:
    story = Story().running()
    story.failed(1, error="ValueError", message=EVIL, trace=f"Traceback\n{EVIL}\n")
    story.stopped()
    return story


def written(story: Story, tmp_path: Path, account: Account | None = None) -> Path:
    watching = read_status(story.write(tmp_path / "run"))
    own = watching.account(ALIVE, story.t)
    file = tmp_path / "page.html"
    file.write_text(page(report_view(watching, ALIVE, story.t), account or own, watching.state))
    return file


def opened(browser: Any, file: Path, **looks: Any) -> Any:
    """The page; on it nothing may go wrong, and nothing may be fetched, while it is read."""
    shown = browser.new_context(**looks).new_page()
    shown.wrong = []
    shown.on("console", lambda said: shown.wrong.append(said.text))
    shown.on("pageerror", lambda error: shown.wrong.append(str(error)))
    shown.on("request", lambda asked: shown.wrong.append(asked.url))
    shown.goto(file.as_uri())
    assert shown.wrong == [file.as_uri()]
    return shown


# Text whose contrast to what is behind it is below 4.5.
PALE = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
  const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  const found = [];
  for (const e of document.querySelectorAll("main *")) {
    if (e.closest("svg") || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    const two = [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((a, b) => b - a);
    if ((two[0] + .05) / (two[1] + .05) < 4.5) found.push(e.outerHTML.slice(0, 100));
  }
  return found;
}"""


# Tables that are wider than their place.
BEYOND = """() => [...document.querySelectorAll(".wide")].filter((e) => e.scrollWidth > e.clientWidth)
  .map((e) => e.getAttribute("aria-label"))"""
A4_PX, LAPTOP_PX = 718, 1024


@pytest.mark.parametrize("looks", [{}, DARK, PHONE], ids=["light", "dark", "phone"])
@pytest.mark.parametrize("make", [swapped, crash_loop, hostile, lambda: Story().running()])
def test_every_page_loads_nothing_fits_its_screen_and_can_be_read(
    browser: Any, tmp_path: Path, make: Any, looks: dict[str, Any]
) -> None:
    shown = opened(browser, written(make(), tmp_path), **looks)
    width = shown.viewport_size["width"]
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    assert shown.evaluate(PALE) == []


@pytest.mark.parametrize(("media", "width"), [("print", A4_PX), ("screen", LAPTOP_PX), ("screen", 1440)])
def test_no_table_is_cut_off_on_paper_or_on_a_laptop(
    browser: Any, tmp_path: Path, media: str, width: int
) -> None:
    """With names as long as those of nodes, users and partitions are."""
    story, runs = swapped(), tmp_path / "runs"
    names = {"account": "foundation-models", "partition": "gpu-h200-interactive"}
    story.entries = [
        msgspec.structs.replace(one, **names) if isinstance(one, AllocationStarted) else one
        for one in story.entries
    ]
    story.write(runs / "20261101-100000-a-0001")
    by = ("team", "partition", "user", "month")
    fleet = tmp_path / "fleet.html"
    fleet.write_text(fleet_page(fleet_view(read_fleet([runs]), by, None, story.t)))
    for file in (written(swapped(), tmp_path), fleet):
        shown = opened(browser, file)
        shown.emulate_media(media=media)
        shown.set_viewport_size({"width": width, "height": 1000})
        assert shown.evaluate(BEYOND) == [], file.name


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_so_does_that_of_a_run_that_was_cut_off_in_the_middle_of_a_line(
    browser: Any, tmp_path: Path, share: float
) -> None:
    run = swapped().write(tmp_path / "run")
    (journal,) = run.journal_files()
    whole = journal.read_bytes()
    journal.write_bytes(whole[: whole.index(b"\n", int(share * len(whole))) - 3])
    watching, life = read_status(run), Liveness("gone", "NODE_FAIL", "17")
    now = watching.state.now
    file = tmp_path / "page.html"
    file.write_text(page(report_view(watching, life, now), watching.account(life, now), watching.state))
    shown = opened(browser, file)
    assert shown.evaluate(PALE) == []
    assert "its supervisor recorded no reason" in shown.locator("header").inner_text()


@pytest.mark.parametrize("looks", [{}, DARK, PHONE], ids=["light", "dark", "phone"])
def test_so_does_a_comparison(browser: Any, tmp_path: Path, looks: dict[str, Any]) -> None:
    reports = []
    for make in (swapped, crash_loop):
        story = make()
        reports.append(report_view(read_status(story.write(tmp_path / make.__name__)), ALIVE, story.t))
    file = tmp_path / "page.html"
    file.write_text(compare_page(compare(*reports)))
    shown = opened(browser, file, **looks)
    assert shown.evaluate("document.documentElement.scrollWidth") <= shown.viewport_size["width"]
    assert shown.evaluate(PALE) == []


def test_by_keyboard_one_comes_to_everything_and_sees_where_one_is(browser: Any, tmp_path: Path) -> None:
    shown = opened(browser, written(crash_loop(), tmp_path))
    met = []
    for _ in range(60):
        shown.keyboard.press("Tab")
        where, outline = shown.evaluate(
            "() => { const e = document.activeElement;"
            " return [e.getAttribute('aria-label') || e.textContent, getComputedStyle(e).outlineStyle]; }"
        )
        if shown.evaluate("document.activeElement === document.body"):
            break
        assert outline != "none", where
        met.append(where)
    assert {"closer", "wider", "earlier", "later", "all", "nodes over time", "traceback"} <= set(met)
    assert sum(each.startswith("incident 1:") for each in met) == 1


def test_a_large_run_is_small_opens_soon_and_three_seconds_of_it_can_be_seen(
    browser: Any, tmp_path: Path
) -> None:
    """12,500 nodes over 54 days, with a failure every four hours: those in the table see test_pages.py."""
    story = swapped()
    own = read_status(story.write(tmp_path / "run")).account(ALIVE, story.t)
    begin, timeline, hour = own.timeline[0].start, [], 3_600_000_000
    for number in range(54 * 24):
        at = begin + number * hour
        marks = [("step", 0, 1800), ("checkpoint_stall", 1800, 1803), ("step", 1803, 3500)]
        marks += [("hang", 3500, 3503), ("rework", 3503, 3600)] if number % 4 == 0 else [("step", 3500, 3600)]
        timeline += [Interval(at + a * 10**6, at + b * 10**6, what) for what, a, b in marks]
    end = timeline[-1].end
    stays: dict[str, tuple[Stay, ...]] = {}
    for number in range(12_500):
        gone = begin + (number % 324) * 4 * hour
        whole = (Stay(begin, end, PLACED),)
        stays[f"n{number}"] = (
            (Stay(begin, gone, PLACED), Stay(gone, end, "failed_node")) if number < 324 else whole
        )
    account = replace(own, timeline=tuple(timeline), waits=(), stays=stays, end=end)
    file = written(story, tmp_path / "page", account)
    assert file.stat().st_size < 1_000_000
    began = time.perf_counter()
    shown = opened(browser, file)
    took = time.perf_counter() - began
    assert took < 5.0
    region = shown.get_by_role("region", name="nodes over time")
    region.focus()
    before = shown.locator(".lane rect").count()
    for _ in range(17):
        shown.keyboard.press("+")
    shown.keyboard.press("ArrowRight")
    assert "to" in shown.get_by_role("status").text_content()
    assert 0 < shown.locator(".lane rect").count() < before
    shown.keyboard.press("0")
    assert shown.locator(".lane rect").count() == before


def test_one_looks_closer_with_wheel_and_buttons_and_is_told_what_is_there(
    browser: Any, tmp_path: Path
) -> None:
    shown = opened(browser, written(swapped(), tmp_path))
    width = (
        "Math.max(...[...document.querySelectorAll('rect.c-detection')].map((e) => +e.getAttribute('width')))"
    )
    before = shown.evaluate(width)
    fault = shown.locator(".lane rect.c-detection").first
    fault.hover(force=True)
    assert "detection" in shown.get_by_role("status").text_content()
    shown.keyboard.down("Control")
    for _ in range(3):
        shown.mouse.wheel(0, -100)
    shown.keyboard.up("Control")
    shown.wait_for_function(f"{width} > 3 * {before}")
    moved = "[...document.querySelectorAll('g.at')].map((e) => +e.transform.baseVal[0].matrix.e)"
    assert any(abs(each) > 50 for each in shown.evaluate(moved)), "marks go along"
    shown.get_by_role("button", name="all").click()
    assert shown.evaluate(width) == before
    assert all(abs(each) < 0.1 for each in shown.evaluate(moved))


def test_the_print_has_what_is_folded_and_no_buttons(browser: Any, tmp_path: Path) -> None:
    shown = opened(browser, written(crash_loop(), tmp_path))
    assert shown.pdf().startswith(b"%PDF")
    assert shown.evaluate("[...document.querySelectorAll('details')].every((e) => e.open)")
    shown.emulate_media(media="print")
    shown.set_viewport_size({"width": A4_PX, "height": 1000})
    assert shown.evaluate(BEYOND) == [], "what is beyond the paper is lost"
    assert not shown.get_by_role("button", name="closer").is_visible()
