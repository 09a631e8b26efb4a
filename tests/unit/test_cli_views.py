"""The commands that look at a run, and those that ask something of it, as real processes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jurymast.checkpoint.directory import CheckpointDirectory, CheckpointManifest
from jurymast.core.state import events as ev
from jurymast.core.state.messages import Accepted, Ask, Condition, Declined, Said, read_said
from jurymast.core.state.settings import Settings
from jurymast.errors import AuthenticationError
from jurymast.jobs import process_record
from jurymast.journal import replay
from jurymast.report.follow import wait
from jurymast.report.liveness import Liveness, record_cancel
from jurymast.report.status import read_status
from jurymast.rundir import RunDirectory, make_folder
from jurymast.wire import endpoint
from jurymast.wire.channel import Channel
from jurymast.wire.endpoint import PULSE
from jurymast.wire.handshakes import Proven
from support.commands import RUN, Place, crash_loop, swapped
from support.stories import Story
from support.waiting import LIMIT_S, wait_until
from support.wire import served


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def write_logs(directory: RunDirectory, attempt: int, lines: dict[int, str]) -> None:
    for rank, text in lines.items():
        make_folder(directory.rank_log(attempt, rank).parent)
        directory.rank_log(attempt, rank).write_text(text)
    directory.attempt_file.write_text(str(attempt))


# Looking.


def test_checkpoints_are_those_of_the_directory_that_the_script_chose(place: Place, tmp_path: Path) -> None:
    story = Story().running()
    story.feed(ev.SavesTo(t=story.t, attempt=1, directory=str(tmp_path / "elsewhere")))
    run = place.story(story)
    for root, step in ((tmp_path / "elsewhere", 70), (run.checkpoints, 60)):
        directory = CheckpointDirectory(root, story.state.run)
        temporary = directory.begin(step, 1)
        directory.seal(temporary, CheckpointManifest(step, 1, 1, "2.13.0", (), run=story.state.run))
        directory.publish(temporary, step)
    told = json.loads(place.good("checkpoints", RUN, "--json"))
    assert str(tmp_path / "elsewhere") in json.dumps(told)
    assert [one["step"] for one in told["checkpoints"]] == [70]


def test_doctor_names_directories_to_which_runs_save_and_others_can_write(
    place: Place, tmp_path: Path
) -> None:
    for number, mode in enumerate((0o777, 0o1777, 0o700)):
        saves_to = tmp_path / oct(mode)
        saves_to.mkdir()
        saves_to.chmod(mode)
        story = Story().running()
        story.feed(ev.SavesTo(t=story.t, attempt=1, directory=str(saves_to)))
        place.story(story, f"2026010{number + 1}-000000-train-ffff")
    told = json.loads(place.run("doctor", "--json").stdout)["checks"]
    found = [one["found"] for one in told if one["check"] == "checkpoints"]
    assert found == [f"all users can replace what is in {tmp_path}/0o777, to which your runs save"]


def test_logs_show_a_ranks_stderr_that_is_apart(place: Place) -> None:
    directory = place.story(swapped())
    write_logs(directory, 2, {0: "step 1\n", 1: "step 1\n"})
    directory.rank_errors(2, 1).write_text("a warning\n")
    assert "a warning" not in place.good("logs", RUN)
    directory.save_plan(replace(directory.own_plan(), stderr_apart=True))
    assert place.good("logs", RUN) == "[r0] step 1\n[r1] step 1\n[r1 err] a warning\n"
    assert directory.last_words(2, 0) == directory.rank_log(2, 0)
    assert directory.last_words(2, 1) == directory.rank_errors(2, 1)


def test_status_by_id_by_job_and_by_directory(place: Place) -> None:
    directory = place.story(swapped())
    for name in (RUN, "17", str(directory.root)):
        view = place.json("status", name)
        assert (view["run"], view["state"], view["step"], view["exit_code"]) == (RUN, "succeeded", 60, 0)
    shown = place.good("status", RUN)
    assert "state      succeeded, " in shown
    assert "\x1b" not in shown
    elsewhere = place.run("status", RUN, "--runs", str(place.root))
    assert elsewhere.returncode == 67


def test_status_of_a_failed_run_names_rank_node_and_traceback(place: Place) -> None:
    place.story(crash_loop())
    shown = place.good("status", RUN)
    assert "cause      worker_exception (rank 1, node n3)" in shown
    assert '    File "train.py", line 7' in shown


def test_what_a_script_said_is_cut_and_told_once(place: Place) -> None:
    story = Story().running()
    for _ in range(3):
        story.failed(1, error="ValueError", message="bad\n\x1b[31m" + "x" * 1000)
        story.stopped()
        if not story.state.ended:
            story.backed_off().ranks_up().restored(0)
    place.story(story)
    shown = place.good("status", RUN)
    assert "\x1b" not in shown
    assert ", exit code 1: crash loop: the same failure 3 times without a new step\n" in shown
    assert "decision   stop: crash loop: the same failure 3 times without a new step\n" in shown
    assert shown.count("ValueError: bad \ufffd[31mxxx") == 1 + 3, "the evidence, and a line an incident"
    assert max(map(len, shown.splitlines())) < 700
    assert shown.count("; restarted in place, no node is at fault\n") == 2, "what was decided is never cut"
    told = place.good("events", RUN).splitlines()
    assert all(line.startswith("2026-") for line in told), "one line each"
    whole = place.json("status", RUN)
    assert "x" * 1000 in whole["end_reason"]
    assert "\n" in whole["incidents"][0]["evidence"]


def test_an_endless_command_line_is_cut(place: Place) -> None:
    story = swapped()
    story.plan = replace(story.plan, arguments=("--data", "y" * 100_000))
    place.story(story)
    assert len(place.good("report", RUN)) < 10_000
    assert place.json("report", RUN)["provenance"]["arguments"][1] == "y" * 100_000


def test_status_watch_ends_with_the_run(place: Place) -> None:
    place.story(swapped())
    assert "succeeded" in place.good("status", RUN, "--watch")


def test_status_asks_slurm_when_the_journal_is_silent(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    for path in directory.journal_files():
        os.utime(path, (1.0, 1.0))
    place.program("squeue", 'echo "NODE_FAIL|None"')
    view = place.json("status", RUN)
    assert (view["state"], view["exit_code"]) == ("failed", 79)
    assert view["warnings"][0] == "Slurm job 17 ended (NODE_FAIL), and its supervisor recorded no reason"
    place.program("squeue", 'echo "PENDING|BeginTime"')
    view = place.json("status", RUN)
    assert (view["state"], view["next"]) == ("requeued", "waits for nodes: PENDING (BeginTime)")
    place.program("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert place.json("status", RUN)["job"] == {
        "id": "17", "kind": "gone", "detail": "Slurm no longer knows it",
    }  # fmt: skip
    (directory.epochs / PULSE).write_text("7")
    assert place.json("status", RUN)["state"] == "running", "a pulse is a sign of life"
    os.utime(directory.epochs / PULSE, (1.0, 1.0))
    place.program("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert place.json("status", RUN)["state"] == "running"


def test_a_run_in_the_queue_has_no_journal_yet(place: Place) -> None:
    directory = place.story(Story())
    (directory.submission / "jobs" / "18").touch()
    place.program("squeue", 'echo "PENDING|Priority"')
    view = place.json("status", RUN)
    assert (view["state"], view["slurm_jobs"], view["nodes"]) == ("queued", ["18"], [])
    assert view["next"] == "waits for nodes: PENDING (Priority)"
    assert "no step done yet" in place.good("status", RUN)
    assert place.json("report", RUN)["categories"].keys() <= {"queue_wait"}
    assert place.good("events", RUN) == ""


def test_events_are_sentences_with_times_and_reasons(place: Place) -> None:
    story = swapped()
    place.story(story)
    shown = place.good("events", RUN)
    lines = shown.splitlines()
    assert all(line[:3] == "202" and line[23:25] == "  " for line in lines)
    assert "=> launch attempt 2 on n2, n1: swap after incident 1, n3 -> n1" in shown
    assert "is ready" not in shown
    assert "node n2 is ready" in place.good("events", RUN, "--all")
    entries = [json.loads(line) for line in place.good("events", RUN, "--json").splitlines()]
    assert len(entries) == len(story.entries)
    assert all(entry["at"].endswith("+00:00") and entry["text"] for entry in entries)
    assert sorted(entry["n"] for entry in entries) == [entry["n"] for entry in entries]


def test_events_are_followed_to_the_end(place: Place) -> None:
    story = swapped()
    directory = place.story(story)
    (journal,) = directory.journal_files()
    whole = journal.read_bytes()
    half = len(whole) // 2
    journal.write_bytes(whole[:half])
    with place.following("events", RUN, "--follow", "--json") as following:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["event"] == "RunStarted"
        with open(journal, "ab") as file:
            file.write(whole[half:])
        rest = following.stdout.read()
    assert json.loads(rest.splitlines()[-1])["decision"] == "Finish"
    assert len(rest.splitlines()) == len(story.entries) - 1


def test_logs_are_merged_with_the_rank_in_front(place: Place) -> None:
    directory = place.story(swapped())
    write_logs(directory, 1, {0: "old\n"})
    write_logs(directory, 2, {0: "a\nb\n", 1: "c\nhalf a line", 11: "\x1b[31mred\n"})
    assert place.good("logs", RUN) == "[r0] a\n[r0] b\n[r1] c\n[r1] half a line\n[r11] �[31mred\n"
    assert place.good("logs", RUN, "--rank", "1") == "[r1] c\n[r1] half a line\n"
    assert place.good("logs", RUN, "--attempt", "1") == "[r0] old\n"
    assert place.good("logs", RUN, "-n", "1", "--rank", "0") == "[r0] b\n"
    assert place.good("logs", RUN, "--follow", "--rank", "0") == "[r0] a\n[r0] b\n"
    (directory.submission / "job-17.log").write_text("supervisor: pid 1\n")
    assert place.good("logs", RUN, "--job") == "supervisor: pid 1\n"


def test_logs_are_followed_through_attempts_to_the_end(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    write_logs(directory, 1, {0: "one\n"})
    with place.following("logs", RUN, "--follow") as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "[r0] one\n"
        write_logs(directory, 2, {0: "two\n", 1: "three\n"})
        assert following.stdout.readline() == "[r0] two\n"
        record_cancel(directory, by="ada")
        rest = following.stdout.read()
    assert rest == "[r1] three\n"


def test_a_progress_bar_is_followed_before_its_line_ends(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    write_logs(directory, 2, {0: "begun\n 10%\r 20%"})
    with place.following("logs", RUN, "--follow") as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(2)] == ["[r0] begun\n", "[r0]  20%\n"]
        with directory.rank_log(2, 0).open("a") as file:
            file.write("\r100%\n")
        assert following.stdout.readline() == "[r0] 100%\n"
        record_cancel(directory, by="ada")
        assert following.stdout.read() == ""


def test_ps_has_squeues_columns_first(place: Place) -> None:
    place.story(swapped(finished=False, began_at=time.time() - 120.0))
    place.program(
        "squeue",
        'case "$*" in *--me*) echo "17|gpu|ada|R|1:02:03|3|RUNNING|None|n[1-3]|gpt";; '
        '*) echo "RUNNING|None";; esac',
    )
    place.story(crash_loop(), "20261116-100000-old-aaaa")
    shown = place.good("ps").splitlines()
    assert shown[0].split() == [
        "JOBID", "PARTITION", "NAME", "USER", "ST", "TIME", "NODES", "NODELIST(REASON)", "STEP", "RESTARTS",
        "GOODPUT", "STATE", "RUN",
    ]  # fmt: skip
    first = shown[1].split()
    assert first[:10] == ["17", "gpu", "gpt", "ada", "R", "1:02:03", "3", "n[1-3]", "60", "1"]
    rows = place.json("ps")
    assert [(row["run"], row["state"]) for row in rows] == [
        (RUN, "running"), ("20261117-100000-gpt-abcd", "failed"),
    ]  # fmt: skip
    assert 0.05 < rows[0]["goodput"] <= 1
    assert rows[1]["st"] == "F"


@pytest.mark.parametrize("name", ["a|b", "a b=c|RUNNING|x", r"a\nb|c", r"k\377\376", r"\033]0;x\007", ""])
def test_whatever_a_job_is_called_ps_shows_its_state(place: Place, name: str) -> None:
    place.story(swapped(finished=False, began_at=time.time() - 120.0))
    row = f"17|gpu|ada|CG|1:02:03|3|COMPLETING|None|n[1-3]|{name}"
    place.program("squeue", f"case \"$*\" in *%j) printf '{row}\\n';; *) echo 'COMPLETING|None';; esac")
    shown = place.good("ps")
    assert "\x1b" not in shown
    assert "\x07" not in shown
    (found,) = place.json("ps")
    assert (found["st"], found["nodelist"], found["nodes"]) == ("CG", "n[1-3]", 3)


def test_whatever_reason_a_node_was_drained_for_it_is_shown(place: Place) -> None:
    place.story(swapped(finished=False, began_at=time.time() - 120.0))
    place.program("sinfo", r"printf 'n1|drained|2026-11-20T10:00:00|f\377n \033[31m|=\nsecond line\n\n'")
    shown = place.good("nodes")
    assert "f\ufffdn" in shown
    assert "\x1b" not in shown


def test_ps_leaves_out_what_ended_long_ago_and_shows_what_cannot_be_read(place: Place) -> None:
    directory = place.story(crash_loop())
    (directory.root / "outcome.json").write_text('{"state": "failed", "exit_code": 1}')
    assert len(place.json("ps")) == 1
    os.utime(directory.root / "outcome.json", (1.0, 1.0))
    assert place.json("ps") == []
    assert len(place.json("ps", "--all")) == 1
    (place.runs / "broken").mkdir()
    (place.runs / "broken" / "plan.json").write_text("{")
    assert [row["state"] for row in place.json("ps")] == ["unreadable"]


def test_report_text_json_page_and_comparison(place: Place) -> None:
    place.story(swapped())
    place.story(crash_loop(), "20261116-100000-old-aaaa")
    assert place.good("report", RUN).startswith(f"run {RUN}: succeeded (final")
    report = place.json("report", RUN)
    assert sum(report["categories"].values()) == pytest.approx(report["total_node_seconds"], abs=1e-6)
    file = place.root / "page.html"
    done = place.run("report", RUN, "--html", str(file))
    assert (done.returncode, done.stdout) == (0, "")
    assert file.read_text().startswith("<!doctype html>")
    both = place.json("report", RUN, "--compare", "20261116-100000-old-aaaa")
    assert set(both) == {"schema", "first", "second", "difference"}
    assert "relaunch" in place.good("report", RUN, "--compare", "20261116-100000-old-aaaa")
    assert place.good("report", RUN, "--compare", "20261116-100000-old-aaaa", "--html", str(file)) == ""
    assert f"<h1>{both['first']['run']} and {both['second']['run']}</h1>" in file.read_text()


# Mistakes.

MISTAKES: list[tuple[str, int, str, str]] = [
    ("status nowhere", 67, "there is no run nowhere", "the newest runs are"),
    ("status", 64, "missing argument 'RUN'", "jurymast status --help"),
    ("logs {run}", 67, "there is no log for attempt", ""),
    ("logs {run} --job --rank 1", 64, "leave out --rank, --all and --attempt", ""),
    ("restart {run}", 74, "the run has ended already (succeeded: every rank ended with exit code 0)", ""),
    ("drain {run} n1", 74, "the run has ended already (succeeded", ""),
    ("checkpoints {run} --object nonsense", 64, "--object nonsense: not the URL", "s3://"),
    ("report {run} --html /nowhere/page.html", 73, "cannot write /nowhere/page.html", ""),
    ("report {run} --html /nowhere/page.html --compare {run}", 73, "cannot write /nowhere/page.html", ""),
    ("report {run} --compare nowhere", 67, "there is no run nowhere", ""),
]


@pytest.mark.parametrize(("words", "code", "message", "hint"), MISTAKES, ids=[case[0] for case in MISTAKES])
def test_mistakes_are_one_line(place: Place, words: str, code: int, message: str, hint: str) -> None:
    directory = place.story(swapped())
    directory.attempt_file.write_text("2")
    done = place.run(*words.format(run=RUN).split())
    assert done.returncode == code, done.stderr
    assert message in done.stderr.lower() or message in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pipe_needs_neither_rich_nor_asyncio_nor_templates(place: Place) -> None:
    place.story(swapped())
    program = (
        "import sys, jurymast.cli.main as m\n"
        f"m.main(['status', '{RUN}']); m.main(['events', '{RUN}']); m.main(['report', '{RUN}'])\n"
        "heavy = {'rich', 'asyncio', 'pydantic', 'submitit', 'yaml', 'jinja2'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=place.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "heavy: []"


# Asking.


@contextmanager
def supervisor(
    directory: RunDirectory, answer: Accepted | Declined | Condition, *, replaced: bool = False
) -> Iterator[list[Said]]:
    """Something that speaks the wire protocol as the run's supervisor; yields what it is asked. `replaced`:
    its successor, who listens there as well, has taken over when it is asked first, so it hangs up."""
    heard: list[Said] = []
    ready, over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    ports: list[int] = []

    async def serve(proven: Proven) -> None:
        connection = Channel.of(proven, read_said)
        try:
            heard.append(asked := await connection.receive())
            if isinstance(asked, Ask) and asked.what == "cancel":
                record_cancel(directory, by=asked.by)
            if replaced and len(heard) == 1:
                announce(2)
            else:
                connection.send(answer)
                await connection.drain()
        except (OSError, AuthenticationError):
            pass  # a second address of the same client was the slower one, or it wants another run
        finally:
            connection.close()

    def announce(nth: int) -> None:
        epoch = (endpoint.newest_epoch(directory.epochs) or 1) + nth - 1
        place = endpoint.Endpoint(epoch, ("127.0.0.9", "127.0.0.1"), ports[0], "n1", "17.0", 1)
        endpoint.announce(directory.epochs, place)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        async with served(serve, directory.secret()) as port:
            ports.append(port)
            announce(1)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(120)
    try:
        yield heard
    finally:
        loops[0].call_soon_threadsafe(over.set)
        thread.join(120)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("cancel", RUN), {"what": "cancel", "node": ""}),
        (("restart", RUN), {"what": "restart", "node": ""}),
        (("drain", RUN, "n2"), {"what": "drain", "node": "n2"}),
    ],
)
def test_what_is_asked_reaches_the_supervisor(
    place: Place, words: tuple[str, ...], asked: dict[str, Any]
) -> None:
    directory = place.story(swapped(finished=False))
    with supervisor(directory, Accepted()) as heard:
        assert place.good(*words)
    assert heard == [Ask(**asked, by="ada")]


def test_a_supervisor_that_hangs_up_may_have_a_successor_who_is_asked(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    with supervisor(directory, Accepted(), replaced=True) as heard:
        assert place.good("restart", RUN)
    assert heard == [Ask(what="restart", by="ada")] * 2


def test_a_request_that_the_next_supervisor_would_not_know_of_is_told(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    with supervisor(directory, Accepted(unwritten=True)):
        told = place.good("drain", RUN, "n2")
    assert "if another supervisor takes over, ask again" in " ".join(told.split())


def test_a_refusal_is_told(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    with supervisor(directory, Declined(why="the run is starting and does no steps now")):
        done = place.run("save", RUN)
    assert done.returncode == 74
    assert "the supervisor refused: the run is starting" in done.stderr


def test_a_node_that_the_run_does_not_have_is_not_replaced(place: Place) -> None:
    place.story(swapped(finished=False))
    done = place.run("drain", RUN, "n22")
    assert done.returncode == 64
    assert "no node n22 in this run (did you mean n2?)" in done.stderr


REFILL, FEWER = Settings(refill=True), Settings(nodes_min=1)
BOTH = Settings(refill=True, nodes_min=1, hold_s=60.0)


@pytest.mark.parametrize(
    ("spares", "requeue", "settings", "node", "says", "action"),
    [
        (1, True, None, "n2", "a spare takes its place", "swap"),
        (1, True, None, "n1", "it has no ranks", ""),
        (0, True, None, "n1", "no spare is ready: the job will be requeued without it", "requeue"),
        (0, False, None, "n1", "no spare is ready and the job cannot be requeued: THE RUN WILL END", "stop"),
        (0, True, FEWER, "n1", "no spare is ready: the run goes on with 1 of 2 nodes", "shrink"),
        (0, False, FEWER, "n1", "no spare is ready: the run goes on with 1 of 2 nodes", "shrink"),
        (0, True, REFILL, "n1", "no spare is ready: the run waits for another node, for up to 10 min 00 s; "
         "if none comes, the job will be requeued without it", "swap"),
        (0, True, BOTH, "n1", "no spare is ready: the run waits for another node, for up to 60.0 s; if none "
         "comes, the run goes on with 1 of 2 nodes", "swap"),
    ],
)  # fmt: skip
def test_replace_says_what_will_happen(
    place: Place, spares: int, requeue: bool, settings: Settings | None, node: str, says: str, action: str
) -> None:
    story = Story(spares=spares, requeue=requeue, settings=settings).running(40)
    directory = place.story(story)
    with supervisor(directory, Accepted()):
        assert place.good("drain", RUN, node).endswith(f": {says}\n")
    if action:
        story.asked("drain", node)
        story.stopped()
        assert story.incident.action == action, "what was said is what is decided"


@pytest.mark.parametrize(
    ("requeue", "settings", "says"),
    [
        (True, None, "the next lost node costs a requeue"),
        (False, None, "the next lost node ends the run, as its job cannot be requeued"),
        (True, FEWER, "the next lost node leaves 1 of 2 nodes, with which the run goes on"),
        (True, REFILL, "with the next lost node the run waits for another, for up to 10 min 00 s; if none "
         "comes, that costs a requeue"),
    ],
)  # fmt: skip
def test_status_says_what_the_next_lost_node_leads_to(
    tmp_path: Path, requeue: bool, settings: Settings | None, says: str
) -> None:
    story = Story(spares=1, requeue=requeue, settings=settings).running(40)
    story.lost(story.state.placement[0])
    story.stopped()
    story.backed_off()
    story.ranks_up()
    story.stepped(50)
    shown = story.write(tmp_path / "run")
    told = read_status(shown).view(Liveness("alive"), story.t)["warnings"]
    assert f"no spare is left: {says}" in told
    story.lost(story.state.placement[0])
    story.stopped()
    foretold = "requeue" if requeue else "stop"
    if settings is not None:
        foretold = "shrink" if settings.nodes_min else "swap"
    assert story.incident.action == foretold, "what was said is what is decided"


def test_who_waits_for_a_run_gets_its_last_checkpoint(tmp_path: Path) -> None:
    """A command that follows `submit --wait` in a script found none: it was on its way from memory."""
    directory = swapped().finished().write(tmp_path / "run")
    stream, codes = io.StringIO(), list[int]()
    answer = Condition(state="succeeded", waits="step 80 is on its way to checkpoints", journal="", step=80)
    with supervisor(directory, answer) as heard:
        waiting = threading.Thread(target=lambda: codes.append(wait(directory.root, stream)))
        waiting.start()
        wait_until("third question whether it is there", lambda: len(heard) > 2)
        assert not codes
        assert "step 80 is on its way to checkpoints" in stream.getvalue()
        directory.outcome_file.write_text("{}")
        waiting.join(LIMIT_S)
    assert codes == [0]


def test_nobody_answers(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    done = place.run("restart", RUN)
    assert (done.returncode, done.stdout) == (74, "")
    assert "no supervisor answers" in done.stderr
    endpoint.announce(directory.epochs, endpoint.Endpoint(1, ("127.0.0.1",), 1, "n1", "17.0", 1))
    assert place.run("restart", RUN).returncode == 74


def test_somebody_else_at_the_supervisors_port_is_not_asked(place: Place, tmp_path: Path) -> None:
    """The port may belong to another run by now: it must not be cancelled in the place of this one."""
    directory = place.story(swapped(finished=False))
    other = swapped(finished=False).write(tmp_path / "other")
    with supervisor(other, Accepted()) as heard:
        theirs = endpoint.find(other.epochs)
        assert theirs is not None
        endpoint.announce(directory.epochs, theirs)
        assert place.run("restart", RUN).returncode == 74
    assert heard == []


def test_cancel_of_a_run_that_has_ended_is_no_error(place: Place) -> None:
    place.story(swapped())
    assert place.good("cancel", RUN) == f"{RUN} has ended already: succeeded\n"


def test_cancel_of_a_queued_run_leaves_slurm_and_is_journalled(place: Place) -> None:
    directory = place.story(Story())
    (directory.submission / "jobs" / "18").write_text("east")
    place.program("squeue", 'echo "PENDING|Priority"')
    place.program("scancel", f'echo "$@" > {place.root}/cancelled')
    assert place.good("cancel", RUN) == f"{RUN} is cancelled (scancel 18)\n"
    assert (place.root / "cancelled").read_text() == "--clusters=east 18\n"
    state = replay(directory)
    assert (state.phase.value, state.exit_code, state.end_reason) == (
        "cancelled",
        80,
        "cancel requested by ada",
    )
    assert place.json("status", RUN)["state"] == "cancelled"
    assert "cancel requested by ada" in place.good("events", RUN)


def test_cancel_of_a_requeued_run_goes_on_in_the_same_journal(place: Place) -> None:
    story = Story(active=2, spares=0).running(30)
    story.lost("n2")
    story.stopped()
    directory = place.story(story)
    place.program("squeue", 'echo "PENDING|BeginTime"')
    place.program("scancel", "exit 0")
    assert place.good("cancel", RUN)
    state = replay(directory)
    assert (state.phase.value, state.best_step) == ("cancelled", 30)
    assert [incident.open for incident in state.incidents] == [False]
    assert place.json("report", RUN)["provisional"] is False


def test_slurms_refusal_to_cancel_is_told(place: Place) -> None:
    directory = place.story(swapped(finished=False))
    place.program("squeue", 'echo "RUNNING|None"')
    place.program("scancel", 'echo "scancel: error: Access/permission denied" >&2; exit 1')
    done = place.run("cancel", RUN)
    assert done.returncode == 69
    assert "Access/permission denied" in done.stderr
    assert not replay(directory).ended


def test_cancel_without_slurm_and_without_a_job(place: Place) -> None:
    directory = place.story(Story())
    done = place.run("cancel", RUN)
    assert done.returncode == 69
    assert "no Slurm job is recorded" in done.stderr
    assert not replay(directory).ended


def local_record(directory: RunDirectory, process: subprocess.Popen[bytes], *, lie: int = 0) -> None:
    record = {**process_record(process.pid), "host": os.uname().nodename}
    record["began"] += lie
    (directory.submission / "local.json").write_text(json.dumps(record))


def test_cancel_of_a_local_run_ends_its_own_process_only(place: Place) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        directory = place.story(swapped(finished=False))
        local_record(directory, sleeper, lie=-100)
        assert place.good("cancel", RUN) == f"{RUN} is cancelled\n"
        with pytest.raises(subprocess.TimeoutExpired):  # a stranger's process, with a number used again
            sleeper.wait(0.2)
        second = place.story(swapped(finished=False), "20261117-100001-gpt-bbbb")
        local_record(second, sleeper)
        reaper = threading.Thread(target=sleeper.wait)
        reaper.start()
        shown = place.good("cancel", "20261117-100001-gpt-bbbb")
        reaper.join(120)
        assert f"process {sleeper.pid} ended" in shown
        assert replay(second).end_reason == "cancel requested by ada"
