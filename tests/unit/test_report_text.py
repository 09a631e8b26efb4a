"""What people and programs are shown of a run, from journals of scripted runs."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.incident import Alert
from jurymast.core.state.messages import Condition
from jurymast.core.state.settings import Settings
from jurymast.journal import VERSION, FileTail
from jurymast.report import follow
from jurymast.report.follow import Narrator, ProgressLine, end_lines, wait
from jurymast.report.goodput import compare, compare_table, page, report_blocks, report_view
from jurymast.report.liveness import Liveness, judge
from jurymast.report.sentences import sentence
from jurymast.report.status import StatusWatcher, read_status, status_blocks
from jurymast.report.text import (
    Block,
    Line,
    Table,
    clean,
    duration,
    node_time,
    render,
    size,
    some,
    squeue_time,
)
from support.stories import START, Story

ALIVE, ENDED = Liveness("alive", "RUNNING", "17"), Liveness("ended")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def swapped() -> Story:
    story = Story(settings=Settings(cadence_steps=20)).running(40).saved(40).stepped(50)
    story.lost("n3")
    story.stopped()
    return story.recovered(40, 60)


def crash_loop() -> Story:
    story = Story().running()
    trace = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\nValueError: bad\n'
    for _ in range(3):
        story.failed(1, trace=trace)
        story.stopped()
        if not story.state.ended:
            story.backed_off().ranks_up().restored(0)
    return story


def watcher(story: Story, tmp_path: Path) -> StatusWatcher:
    return read_status(story.write(tmp_path / "run"))


def text(blocks: Sequence[Block]) -> str:
    return render(blocks, terminal=False)


# Status.


def test_the_status_object_has_the_keys_that_programs_read(tmp_path: Path) -> None:
    story = swapped()
    view = watcher(story, tmp_path).view(ALIVE, story.t)
    assert json.loads(json.dumps(view)) == view
    assert (view["run"], view["state"], view["attempt"]) == (story.plan.run, "running", 2)
    assert (view["step"], view["saved_step"], view["next_save_step"]) == (60, 40, 80)
    assert view["slurm_jobs"] == ["17"]
    assert [(n["name"], n["role"]) for n in view["nodes"]] == [
        ("n1", "active"), ("n2", "active"), ("n3", "failed"),
    ]  # fmt: skip
    assert view["nodes"][2]["reason"] == "silent for 1.6 s"
    assert re.fullmatch(r"2026-\d\d-\d\dT[\d:.]+\+00:00", view["nodes"][2]["since"])
    (incident,) = view["incidents"]
    for key in (
        "id", "cause", "node", "evidence", "action", "reason", "seconds", "step_lost_from", "step_restored",
        "tiers",
    ):  # fmt: skip
        assert key in incident
    assert (incident["cause"], incident["action"], incident["step_restored"]) == ("node_lost", "swap", 40)
    assert set(incident["seconds"]) == {
        "detect", "diagnose", "decide", "replace", "launch", "restore", "rework",
    }  # fmt: skip
    assert incident["tiers"] == {"shared": 4_000_000}
    assert view["exit_code"] is None
    assert view["warnings"] == ["no spare is left: the next lost node costs a requeue"]


def test_the_status_text(tmp_path: Path) -> None:
    story = swapped()
    shown = text(status_blocks(watcher(story, tmp_path).view(ALIVE, story.t), now=story.t))
    assert f"run        {story.plan.run}\n" in shown
    assert "state      running, attempt 2, submitted 52.9 s ago" in shown
    assert "; saves after step 80" in shown
    assert "training   step 60, 500 ms a step, newest checkpoint step 40" in shown
    assert "job        17\n" in shown
    assert re.search(r"^n3    failed  .*silent for 1.6 s$", shown, re.MULTILINE)
    assert re.search(r"^1  .* node_lost  n3    swap    50 -> 40  .* s  n3: silent", shown, re.MULTILINE)


def test_a_failed_run_shows_cause_rank_node_and_traceback(tmp_path: Path) -> None:
    story = crash_loop()
    view = watcher(story, tmp_path).view(ENDED, story.t)
    assert (view["state"], view["exit_code"]) == ("failed", 1)
    shown = text(status_blocks(view, now=story.t))
    assert "cause      worker_exception (rank 1, node n3)" in shown
    assert '    File "train.py", line 7, in <module>' in shown
    assert "exit code 1: crash loop: the same failure 3 times without a new step" in shown


def test_a_report_has_whole_tracebacks_and_each_of_them_once(tmp_path: Path) -> None:
    story = Story().running()
    trace = "\n".join(["Traceback", *(f'  File "train.py", line {number}' for number in range(9)), "E: bad"])
    for _ in range(2):
        story.failed(1, error="E", message="bad", trace=trace)
        story.stopped()
        story.recovered(0, 10)
    shown = text(report_blocks(report_view(watcher(story, tmp_path), ALIVE, story.t)))
    assert [shown.count(line) for line in trace.splitlines()] == [1] * 10 + [shown.count("E: bad")]
    assert "the traceback of #1" in shown


def test_what_is_not_over_has_taken_until_now_while_the_run_lives(tmp_path: Path) -> None:
    story = Story().running(40)
    story.failed(0)
    story.stopped()
    story.backed_off().ranks_up().restored(0).stepped(20)
    view = watcher(story, tmp_path).view(ALIVE, story.t)
    assert view["incidents"][0]["open"]
    at = view["incidents"][0]["at"]
    later = datetime.fromisoformat(at).timestamp() + 300.0
    assert "5 min 00 s so far" in text(status_blocks(view, now=later))
    gone = {**view, "state": "failed"}
    assert "5 min 00 s so far" not in text(status_blocks(gone, now=later))


def test_a_run_that_recovers_says_from_what_and_what_can_be_done(tmp_path: Path) -> None:
    story = Story(spares=0).running(40).saved(40)
    story.lost("n1")
    view = watcher(story, tmp_path / "at-first").view(ALIVE, story.t)
    assert "\ncause      being diagnosed\n" in text(status_blocks(view, now=story.t))
    story.stopped()
    view = watcher(story, tmp_path).view(Liveness("pending", "PENDING (Resources)", "17"), story.t)
    assert view["state"] == "requeued"
    shown = text(status_blocks(view, now=story.t))
    assert "\ncause      node_lost (node n1)\nmeaning    a node went silent" in shown
    assert "\ndecision   requeue: " in shown
    assert "\nnext       squeue --start --jobs 17: when Slurm expects to go on\n" in shown


def test_lines_break_between_words_but_commands_can_be_copied() -> None:
    blocks: list[Block] = [
        Line(f"evidence   {'what happened ' * 8}", indent=11), Line(f"next       {'jurymast logs ' * 8}"),
    ]  # fmt: skip
    first, second, third = render(blocks, terminal=True, width=80).splitlines()
    assert len(first) <= 80
    assert second.startswith((f"{'':11}what ", f"{'':11}happened "))
    assert len(third) > 80


@pytest.mark.parametrize(
    ("life", "state", "exit_code", "words"),
    [
        (Liveness("gone", "NODE_FAIL", "17"), "failed", 79, "Slurm job 17 ended (NODE_FAIL)"),
        (Liveness("gone", "CANCELLED", "17"), "cancelled", 80, "recorded no reason"),
        (Liveness("pending", "PENDING (Resources)", "17"), "requeued", None, "waits for nodes: PENDING"),
        (Liveness("unknown", "squeue failed", "17"), "running", None, "is not known: squeue failed"),
    ],
)
def test_what_slurm_says_when_the_journal_does_not(
    tmp_path: Path, life: Liveness, state: str, exit_code: int | None, words: str
) -> None:
    story = swapped()
    view = watcher(story, tmp_path).view(life, story.t)
    assert (view["state"], view["exit_code"]) == (state, exit_code)
    assert words in text(status_blocks(view, now=story.t))


def test_warnings_name_failed_saves_and_a_journal_that_is_behind(tmp_path: Path) -> None:
    story = Story(spares=0).running(40).saved(40).stepped(50).saved(50, ok=False, error="No space left")
    view = watcher(story, tmp_path).view(ALIVE, story.t + 90.0)
    assert view["warnings"][0] == (
        "1 failed save in a row (the newest is step 40): step 50, shared tier: No space left"
    )
    assert view["warnings"][1].startswith("the journal's newest entry is 90.0 s old")


def test_a_skipped_save_does_not_hide_that_storage_fails(tmp_path: Path) -> None:
    story = Story(spares=0).running(60).saved(40)
    copy = ev.Saved(
        t=story.t, attempt=1, step=40, tier="shared", ok=False, stall_s=0.0, error="it hangs", copied=True
    )
    story.feed(copy)
    busy = "both memory slots are busy"
    story.feed(ev.Saved(t=story.t, attempt=1, step=60, tier="memory", ok=False, stall_s=0.0, error=busy))
    skipped, hanging = watcher(story, tmp_path).view(ALIVE, story.t)["warnings"]
    assert "step 60, memory tier: both memory slots are busy" in skipped
    assert "copying to the shared tier failed, 1 time in a row" in hanging


def test_the_supervisor_is_believed_where_the_journal_is_behind(tmp_path: Path) -> None:
    story = swapped()
    alert = Alert("storage full", story.t, story.t, "storage-full on /runs: 100 % full", {"n1": None})
    nowhere = replace(alert, message="the loss was nan", nodes={})
    told = Condition(
        state="succeeded", step=99, alerts=(alert, nowhere),
        waits="the checkpoint of step 99 is on its way to /runs", journal="No space left on device",
    )  # fmt: skip
    view = watcher(story, tmp_path).view(ALIVE, story.t + 90.0, told)
    assert (view["state"], view["step"], view["exit_code"]) == ("succeeded", 99, None)
    assert "(No space left on device): its newest entry is 90.0 s old" in view["warnings"][0]
    shown = text(status_blocks(view, now=story.t))
    assert "; the checkpoint of step 99 is on its way to /runs (jurymast cancel ends this wait)" in shown
    assert "on n1: storage-full on /runs" in shown
    assert re.search(r"alert +[-0-9:]+( [0-9:]+)?: the loss was nan", shown)


@pytest.mark.parametrize(
    ("waits", "exit_code"), [("the checkpoint of step 60 is on its way to /runs", None), ("", 0)]
)
def test_a_run_that_waits_for_its_last_checkpoint_has_no_exit_code_yet(
    tmp_path: Path, waits: str, exit_code: int | None
) -> None:
    story = Story().running(60).finished()
    told = Condition(state="succeeded", step=60, waits=waits, journal="")
    view = watcher(story, tmp_path).view(ENDED, story.t, told)
    assert (view["state"], view["exit_code"]) == ("succeeded", exit_code)
    lost = any("are in no checkpoint" in text for text in view["warnings"])
    assert lost is not bool(waits), "steps whose checkpoint is on its way are not lost yet"


@pytest.mark.parametrize(
    ("story", "words"),
    [
        (Story().submitted(), "waits for its nodes to start"),
        (Story().allocated(), "ranks start: up on 0 of 2 nodes"),
        (Story().allocated().ranks_up(), "first step of attempt 1"),
    ],
)
def test_what_a_run_waits_for(tmp_path: Path, story: Story, words: str) -> None:
    directory = story.write(tmp_path / "run")
    assert StatusWatcher(directory).view(ALIVE, story.t)["next"] != ""
    watching = read_status(directory)
    assert words in text(status_blocks(watching.view(ALIVE, story.t), now=story.t))


def test_many_healthy_nodes_are_counted_not_listed(tmp_path: Path) -> None:
    story = Story(active=60, spares=4).allocated().ranks_up().restored(0).stepped(1)
    story.lost("n7")
    story.stopped()
    story.recovered(0, 10)
    view = watcher(story, tmp_path).view(ALIVE, story.t)
    shown = text(status_blocks(view, now=story.t))
    assert len(view["nodes"]) == 64
    assert re.search(r"^n7    failed", shown, re.MULTILINE)
    assert "and 60 active, 3 spare (--all lists every node)" in shown
    assert len(text(status_blocks(view, now=story.t, everything=True)).splitlines()) > 64


def test_what_a_script_printed_cannot_drive_the_terminal() -> None:
    blocks: list[Block] = [Line("\x1b[31mred\x07"), Table(("A",), [["\x1b]0;title\x07\nx"]])]
    for terminal in (False, True):
        shown = render(blocks, terminal=terminal)
        assert "\x07" not in shown
        assert "\x1b[31mred" not in shown
        assert "\x1b]0" not in shown
    assert clean("tab\tnew\nline é") == "tab\tnew\nline é"


# Sentences.


def test_every_kind_of_entry_has_a_sentence(tmp_path: Path) -> None:
    story = swapped()
    story.saved(60, ok=False, error="disk full")
    story.asked("drain", "n2")
    story.feed(ev.Signalled(t=story.t, signal="SIGUSR2"))
    story.feed(ev.Noted(t=story.t, message="hello"))
    entries = [dict(entry) for entry in StatusWatcher(story.write(tmp_path / "run")).poll()]
    told = "\n".join(sentence(entry) for entry in entries)
    for words in (
        "run 20261117-100000-gpt-abcd: 2 active + 1 spare nodes, 1 rank each, script train.py",
        "Slurm job 17 started on 3 nodes: n1, n2, n3",
        "node n3 lost: silent for 1.6 s (limit 1.5 s)",
        "=> stop attempt 1 on n2: a failure ends the attempt for every rank",
        "=> launch attempt 2 on n2, n1: swap after incident 1, n3 -> n1",
        "step 40 restored, 4 MB from the shared tier in 500 ms",
        "step 60 was NOT saved (shared tier): disk full",
        "replacement of node n2 requested by ada",
        "Slurm sent SIGUSR2",
        "note: hello",
    ):
        assert words in told
    assert sentence({"event": "FromTheFuture", "t": 1.0}).startswith("(FromTheFuture")


# The report.


def test_the_report_object_has_the_keys_that_programs_read(tmp_path: Path) -> None:
    story = swapped().finished()
    watching = watcher(story, tmp_path)
    report = report_view(watching, ENDED, story.t + 100.0)
    assert json.loads(json.dumps(report)) == report
    assert (
        set(report["ratios"])
        == {"ettr", "runtime_goodput", "allocation_goodput"}
        == set(report["definitions"])
    )
    assert report["provisional"] is False
    assert report["total_node_seconds"] == pytest.approx(sum(report["categories"].values()), abs=1e-6)
    assert report["mtbf"]["failures"] == 1
    assert report["mtbf"]["low_seconds"] < report["mtbf"]["seconds"] < report["mtbf"]["high_seconds"]
    assert report["cadence"] == {
        **report["cadence"], "setting": "20 steps", "saves": 1, "failed": 0, "stall_seconds": 0.4,
    }  # fmt: skip
    assert report["provenance"]["script"] == "train.py"
    assert report["provenance"]["run_version"] == "0.1.0"
    assert report["incidents"][0]["lost_seconds"] > 0


@pytest.mark.parametrize(("story", "nodes"), [("swapped", 1), ("crash loop", 0)])
def test_status_and_report_count_the_same_failures_of_nodes_and_none_of_the_script(
    tmp_path: Path, story: str, nodes: int
) -> None:
    watching = watcher({"swapped": swapped, "crash loop": crash_loop}[story]().finished(), tmp_path)
    report = report_view(watching, ENDED)
    rate = watching.view(ENDED, 9e9)["cadence"]["rate"]
    assert rate["failures"] == report["mtbf"]["failures"] == nodes
    assert report["mtbf"]["by_charge"]["application"] == (3 if story == "crash loop" else 0)
    expected = 1000.0 / rate["mean"] / report["nodes"]["active"] * 86_400.0
    assert report["mtbf"]["predicted_seconds"] == pytest.approx(expected)
    assert (report["mtbf"]["seconds"] is None) == (nodes == 0)


def test_a_report_of_a_running_run_is_provisional(tmp_path: Path) -> None:
    story = swapped()
    report = report_view(watcher(story, tmp_path), ALIVE, story.t + 5.0)
    assert report["provisional"]
    assert "provisional, up to" in text(report_blocks(report))
    died = report_view(watcher(story, tmp_path / "x"), Liveness("gone", "TIMEOUT"), 9e9)
    assert died["wall_seconds"] < 200.0, "time after its death is not counted"


def test_the_report_text(tmp_path: Path) -> None:
    story = swapped().finished()
    shown = text(report_blocks(report_view(watcher(story, tmp_path), ENDED, story.t)))
    lines = shown.splitlines()
    assert lines[0].startswith(f"run {story.plan.run}: succeeded (final, up to 2026-")
    assert lines[1].startswith("warning    the last 20 steps are in no checkpoint (the newest is step 40): ")
    assert re.fullmatch(r"ETTR +\d+\.\d %   time in steps that counted / .*", lines[3])
    assert re.search(r"^step +\d+\.\d node-s +\d+\.\d %  #+ +steps done for the first time$", shown, re.M)
    assert re.search(r"^total +\d+\.\d node-(s|min) +100\.0 %$", shown, re.M)
    assert re.search(r"^1  .* node_lost  n3    swap +1\.60 +0\.30 +-", shown, re.M)
    assert re.search(
        r"^  #1 n3: silent for 1.6 s \(limit 1.5 s\) \(step 50, restored 40: .+ from shared\)$", shown, re.M
    )
    assert "     swap: replaced: n3 out, a spare in\n" in shown, "the line above has the evidence"
    assert "MTBF " in shown
    assert (
        "cadence    policy: 20 steps; 1 save, stall 400 ms, 4 MB each; best at the expected MTBF: every"
        in shown
    )


def test_an_empty_report_is_a_report_too(tmp_path: Path) -> None:
    story = Story().submitted()
    watching = watcher(story, tmp_path)
    report = report_view(watching, Liveness("pending", "PENDING (Priority)", "17"), START + 30.0)
    shown = text(report_blocks(report))
    assert "no incidents" in shown
    assert "ETTR" in shown
    assert page(report, watching.account(ALIVE, START + 30.0), watching.state).startswith("<!doctype html>")


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    first = report_view(watcher(swapped().finished(), tmp_path / "1"), ENDED)
    second = report_view(watcher(Story().running(60).finished(), tmp_path / "2"), ENDED)
    both = compare(first, second)
    assert both["difference"]["ratios"]["runtime_goodput"] > 0
    assert sum(both["difference"]["shares"].values()) == pytest.approx(0.0, abs=1e-9)
    shown = text([compare_table(both)])
    assert re.search(r"^relaunch .* 0\.0 % +-\d+\.\d$", shown, re.M)


# Following.


def test_following_a_run_tells_the_story_and_returns_its_code(tmp_path: Path) -> None:
    story = swapped().finished()
    stream = io.StringIO()
    assert wait(story.write(tmp_path / "run").root, stream) == 0
    told = stream.getvalue()
    assert "incident 1: node_lost: n3: silent for 1.6 s (limit 1.5 s); replaced: n3 out, a spare in" in told
    assert told.index("incident 1: ") < told.index("=> launch attempt 2 on n2, n1")
    assert told.splitlines()[-1].endswith("1 incident")
    assert "\x1b" not in told


def test_following_a_crash_loop_ends_with_the_traceback_and_the_scripts_code(tmp_path: Path) -> None:
    stream = io.StringIO()
    assert wait(crash_loop().write(tmp_path / "run").root, stream) == 1
    assert stream.getvalue().splitlines()[-1].endswith("ValueError: bad")


@pytest.mark.parametrize(("word", "code"), [("NODE_FAIL", 79), ("CANCELLED", 80)])
def test_following_a_run_whose_job_died_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, code: int
) -> None:
    directory = swapped().write(tmp_path / "run")
    for name in ("FIRST_LOOK_S", "LAST_WORDS_S", "POLL_S"):
        monkeypatch.setattr(follow, name, 0.01)
    monkeypatch.setattr(follow, "look", lambda *_: judge("17", word, "None"))
    stream = io.StringIO()
    assert wait(directory.root, stream) == code
    assert f"Slurm job 17 ended ({word}), and its supervisor recorded no reason" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_is_one_line_that_is_drawn_over(tmp_path: Path) -> None:
    stream = Terminal()
    progress = ProgressLine(stream)
    progress.show("step 1")
    progress.show("step 2")
    progress.say("something happened", START)
    progress.close()
    assert (
        stream.getvalue()
        == "step 1\r\x1b[Kstep 2\r\x1b[K"
        + time.strftime("%H:%M:%S", time.localtime(START))
        + " something happened\n"
    )
    follower = Narrator(swapped().write(tmp_path / "run"), ProgressLine(Terminal()))
    follower.tell()
    assert end_lines(follower.state, Liveness("gone", "TIMEOUT", "17"))[0].startswith(
        "the run failed: Slurm job 17"
    )


def test_who_waits_is_not_told_of_steps_and_saves_line_by_line(tmp_path: Path) -> None:
    stream = io.StringIO()
    follower = Narrator(swapped().write(tmp_path / "run"), ProgressLine(stream))
    follower.tell()
    told = stream.getvalue()
    assert "launch attempt 2" in told
    assert "incident 1: node_lost" in told
    for elsewhere in ("step 50 done", "step 40 saved", "node n3 joined"):
        assert elsewhere not in told, told


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = FileTail(path)
    assert tail.lines() == []
    path.write_bytes(b"one\ntw")
    assert tail.lines() == [b"one"]
    assert tail.lines() == []
    with open(path, "ab") as file:
        file.write(b"o\nthree")
    assert tail.lines() == [b"two"]
    assert tail.lines(partial=True) == [b"three"]
    path.write_bytes(b"x" * 100)
    long = FileTail(path)
    assert [len(piece) for _ in range(3) for piece in long.lines(40)] == [40, 40]
    path.write_bytes(b"\r 1%\r 2%\ndone\n")
    assert FileTail(path).lines() == [b"\r 1%\r 2%", b"done"]


def test_a_journal_is_read_only_once(tmp_path: Path) -> None:
    story = Story().running(20)
    directory = story.write(tmp_path / "run")
    watching = StatusWatcher(directory)
    assert len(watching.poll()) == len(story.entries)
    assert watching.poll() == []
    more = {"v": VERSION, "epoch": 1, "n": 99, **ev.to_json(ev.Noted(t=story.t, message="late"))}
    with open(next(directory.journal_files()), "a") as file:
        file.write(json.dumps(more) + "\nnot json\n" + json.dumps({**more, "v": "1"}) + "\n")
    assert [entry["message"] for entry in watching.poll()] == ["late"]
    assert watching.state.notes[-1][1] == "late"


# Words.


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (None, "-"), (0, "0 ms"), (0.0001, "<1 ms"), (0.25, "250 ms"), (12.34, "12.3 s"),
        (99.96, "1 min 40 s"),
        (3599.6, "1 h 00 min"), (7260, "2 h 01 min"), (200_000, "2 d 07 h"),
    ],
)  # fmt: skip
def test_durations(seconds: float | None, told: str) -> None:
    assert duration(seconds) == told


def test_other_words() -> None:
    assert [size(n) for n in (999, 1000, 4_340, 12_000_000_000, 5 * 10**15)] == [
        "999 B", "1 kB", "4.34 kB", "12 GB", "5 PB",
    ]  # fmt: skip
    assert [squeue_time(t) for t in (5, 65, 3665, 90_061)] == ["0:05", "1:05", "1:01:05", "1-01:01:01"]
    assert [node_time(s) for s in (5, 600, 7200)] == ["5.0 node-s", "10.0 node-min", "2.0 node-h"]
    assert some(["a", "b", "c"], 2) == "a, b and 1 more"
