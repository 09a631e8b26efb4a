"""What people are told of a run by the policy's `notify`: which notices, how many, and that no receiver holds
anything up. Receivers are real programs and real sockets, the notifier a real process."""

from __future__ import annotations

import errno
import gc
import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jurymast import foreign
from jurymast.cluster.allocation import Allocation
from jurymast.core.run.notices import Notice, Quota, due
from jurymast.core.state import events as ev
from jurymast.core.state.incident import CAUSES, Alert
from jurymast.core.state.settings import Exposure, Receiver, Settings
from jurymast.core.supervision.batch import SUPERSEDED
from jurymast.errors import PolicyError
from jurymast.interpreter import run_module
from jurymast.policy.resolve import Layer, resolve
from jurymast.processes import ends_within
from jurymast.report import mailbox, notifier
from jurymast.report.status import StatusWatcher
from jurymast.rundir import RunDirectory, write_json
from jurymast.supervisor import epoch
from support.commands import crash_loop, swapped
from support.stories import Story
from support.waiting import wait_until


def kinds(story: Story, *told: str) -> list[str]:
    return [notice.key for notice in due(story.state, set(told))]


def test_what_is_told_of_a_run() -> None:
    assert kinds(Story().running(20)) == []
    assert kinds(swapped(finished=False)) == ["incident 1", "spare 1"]
    assert kinds(swapped()) == ["incident 1", "spare 1", "finished"]
    assert kinds(swapped(), "incident 1", "spare 1") == ["finished"]
    assert kinds(crash_loop())[-1] == "stopped"


def test_an_alert_is_told_once_though_only_the_newest_are_kept() -> None:
    story = Story().running(20)
    story.state.alerts = [Alert(f"subject {n}", float(n), float(n), "", {}) for n in range(3)]
    told = kinds(story)
    assert len(told) == 3
    del story.state.alerts[0]
    assert kinds(story, *told) == []


def test_an_incident_is_told_when_it_is_known_what_follows() -> None:
    story = Story().running(20)
    story.lost("n3")
    assert kinds(story) == []
    story.stopped()
    assert kinds(story) == ["incident 1", "spare 1"]


def test_after_six_in_an_hour_the_rest_is_counted_and_the_end_is_told() -> None:
    quota = Quota(Receiver())
    notice = Notice("incident 1", "incident", 0.0)
    assert [quota.takes(notice, float(second)) for second in range(9)] == [0] * 6 + [None] * 3
    assert quota.takes(Notice("finished", "finished", 0.0), 10.0) == 3
    assert quota.takes(notice, 20.0) is None
    assert quota.takes(notice, 3700.0) == 1


def test_a_receiver_gets_only_what_it_wants() -> None:
    quota = Quota(Receiver(when=("finished",)))
    assert not quota.wants(Notice("incident 1", "incident", 0.0))
    assert quota.wants(Notice("finished", "finished", 0.0))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({}, "notify[0]: needs either a command or a url"),
        ({"command": ["page"], "url": "json://host"}, "notify[0]: needs either a command or a url"),
        ({"command": ["page"], "when": ["never"]}, "notify[0].when[0]: "),
        ({"command": ["page"], "to": "me"}, "notify[0].to: unknown key"),
    ],
)
def test_a_policy_that_tells_nobody_is_refused(entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(PolicyError) as refused:
        resolve([Layer("policy.yaml", {"notify": [entry]})])
    assert problem in str(refused.value)


def test_a_policy_with_an_address_is_refused_without_what_sends_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jurymast.policy.model.find_spec", lambda name: None)
    resolve([Layer("policy.yaml", {"notify": [{"command": ["page"]}]})])
    with pytest.raises(PolicyError, match="pip install 'jurymast.notify.'"):
        resolve([Layer("policy.yaml", {"notify": [{"url": "ntfy://team"}]})])


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # Apprise's
@pytest.mark.parametrize("url", ["mail", "gopher://x", "slack://x"])
def test_an_address_that_nobody_would_get_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(PolicyError, match="Apprise knows no such url") as refused:
        resolve([Layer("policy.yaml", {"notify": [{"url": url}]})])
    assert url not in str(refused.value).replace("mailto", "").replace("slack://,", "")


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # Apprise's
def test_a_policy_says_who_is_told() -> None:
    written = {"notify": [{"when": ["stopped"], "command": ["page", "oncall"]}, {"url": "ntfy://team"}]}
    told = resolve([Layer("policy.yaml", written)]).settings().notify
    assert told == (Receiver(when=("stopped",), command=("page", "oncall")), Receiver(url="ntfy://team"))


# ---- the process


def telling(story: Story, root: Path, *receivers: Receiver) -> RunDirectory:
    story.plan = replace(story.plan, settings=replace(story.plan.settings, notify=receivers))
    return story.write(root)


def to_file(path: Path) -> Receiver:
    program = f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + chr(10))"
    return Receiver(command=(sys.executable, "-c", program))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def notifying(directory: RunDirectory, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = run_module("jurymast.report.watcher", str(directory.root))
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def test_each_notice_comes_once_also_from_the_next_supervisor_s_process(tmp_path: Path) -> None:
    with Server() as server:
        url = f"json://127.0.0.1:{server.server_address[1]}/secret-token"
        told = tmp_path / "told"
        directory = telling(swapped(), tmp_path / "run", to_file(told), Receiver(when=("finished",), url=url))
        for _ in range(2):
            with notifying(directory, tmp_path / "log") as process:
                wait_until("all notices", lambda: len(server.got) == 1 and len(lines(told)) == 3)
                assert process.stdin is not None
                process.stdin.close()
                assert process.wait(60) == 0
        server.shutdown()
    assert [one["kind"] for one in lines(told)] == ["incident", "spare", "finished"]
    incident, spare, finished = lines(told)
    assert "node_lost" in incident["text"]
    assert "n3" in incident["text"]
    assert incident["next"] == spare["next"] == CAUSES["node_lost"].todo
    assert spare["text"].startswith("a spare is used for n3, 0 left")
    assert finished["text"].startswith("the run succeeded: ")
    (posted,) = server.got
    assert posted["title"].endswith(": finished")
    assert posted["message"] == finished["text"]
    assert "secret-token" not in (tmp_path / "log").read_text()


def test_a_run_that_goes_on_is_left_at_once(tmp_path: Path) -> None:
    told = tmp_path / "told"
    directory = telling(swapped(finished=False), tmp_path / "run", to_file(told))
    with notifying(directory, tmp_path / "log") as process:
        wait_until("both notices", lambda: len(lines(told)) == 2)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
    assert directory.notices_file.stat().st_mode & 0o777 == 0o600


def test_a_loss_that_is_nan_is_told_at_once_and_at_the_end(tmp_path: Path) -> None:
    told, story = tmp_path / "told", Story().running(20)
    for step in (21, 22):
        story.feed(ev.LossNotFinite(t=story.t, attempt=1, rank=2, step=step, loss="nan"))
    story.stepped(40).finished()
    with notifying(telling(story, tmp_path / "run", to_file(told)), tmp_path / "log"):
        wait_until("both notices", lambda: len(lines(told)) == 2)
    alert, finished = lines(told)
    assert (alert["kind"], alert["next"]) == ("alert", f"jurymast status {story.plan.run}")
    assert alert["text"] == "the loss was nan at step 21 (rank 2), and the training goes on"
    assert finished["text"].startswith("the run succeeded: ")
    assert "\nwarning: the loss was nan at step 21 (rank 2): what was trained since is" in finished["text"]


def test_the_next_command_comes_with_a_failure(tmp_path: Path) -> None:
    told = tmp_path / "told"
    directory = telling(crash_loop(), tmp_path / "run", replace(to_file(told), when=("stopped",)))
    with notifying(directory, tmp_path / "log"):
        wait_until("the notice", lambda: lines(told) != [])
    (stopped,) = lines(told)
    assert "jurymast logs" in stopped["next"]


def test_a_receiver_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the other receivers, nor the supervisor's end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told = tmp_path / "told"
        hanging = Receiver(url=f"json://127.0.0.1:{silent.getsockname()[1]}/")
        directory = telling(swapped(), tmp_path / "run", hanging, to_file(told))
        monkeypatch.setattr(epoch, "WATCHER_END_S", 0.5)
        with epoch.watched(directory):
            wait_until("the others' notices", lambda: len(lines(told)) == 3)
            left_at = time.monotonic()
        assert time.monotonic() - left_at < 20.0


def test_its_process_is_started_again_when_it_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out; also if the run ends before that is due."""
    told, began = tmp_path / "told", subprocess.Popen
    directory = telling(swapped(finished=False), tmp_path / "run", to_file(told))
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(began(*words, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(epoch, "WATCHER_PAUSES_S", (0.0, 1000.0))
    monkeypatch.setattr(epoch, "WATCHER_END_S", 200.0)
    with epoch.watched(directory):
        wait_until("both notices", lambda: len(lines(told)) == 2)
        started[0].kill()
        wait_until("another process", lambda: len(started) == 2)
        started[1].kill()
        wait_until("its end", lambda: started[1].poll() is not None)
        ended = next(iter(swapped().write(tmp_path / "ended").journal_files()))
        shutil.copy(ended, next(iter(directory.journal_files())))
    assert len(started) == 3
    assert [one["kind"] for one in lines(told)] == ["incident", "spare", "finished"]


def test_what_was_told_is_not_told_again_because_it_cannot_be_read_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = telling(swapped(), tmp_path / "run")
    write_json(directory.notices_file, {"told": ["finished"]})
    load, failures = foreign.load, [errno.EIO, errno.ESTALE]

    def failing(path: Path, most: int) -> Any:
        if failures:
            raise OSError(failures.pop(), "no luck", str(path))
        return load(path, most)

    monkeypatch.setattr(foreign, "load", failing)
    assert notifier._read_told(directory) == {"finished"}


def test_a_process_that_even_a_kill_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that storage blocks: the end of the run would wait for it, and all nodes with it."""
    with subprocess.Popen(["sleep", "1000"]) as blocked:
        with monkeypatch.context() as patched:
            killed: list[bool] = []
            patched.setattr(blocked, "kill", lambda: killed.append(True))
            began_at = time.monotonic()
            assert not ends_within(blocked, 0.1)
            assert time.monotonic() - began_at < 100.0
        assert killed == [True]
        blocked.kill()
    with subprocess.Popen(["true"]) as ended:
        assert ends_within(ended, 60.0)


def test_a_receiver_that_fails_is_tried_three_times_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mailbox, "TRY_AGAIN_S", 0.0)
    tries = tmp_path / "tries"
    program = f"open({str(tries)!r}, 'a').write('x'); raise SystemExit('no such channel')"
    receiver = Receiver(command=(sys.executable, "-c", program))
    box: mailbox.Mailbox[notifier.Message] = mailbox.Mailbox(
        "pager", partial(notifier.deliver, receiver), logging.getLogger("jurymast.notifier")
    )
    box.start()
    with caplog.at_level(logging.WARNING):
        for name in ("run", "next"):
            box.put({"run": name, "kind": "incident", "text": "", "next": "", "held_back": 0})
        assert box.empty(time.monotonic() + 60.0)
    assert tries.read_text() == "x" * 6
    assert caplog.messages == ["pager: exit code 1: no such channel"]


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # Apprise's
def test_a_program_that_is_not_there_and_a_wrong_address_are_told() -> None:
    message = {"run": "r", "name": "n", "kind": "incident", "text": "", "next": "", "held_back": 0}
    assert "No such file" in notifier.deliver(Receiver(command=("/nowhere/page",)), message)
    assert "does not know" in notifier.deliver(Receiver(url="gopher://x"), message)


MESSAGE = {"run": "r", "name": "n", "kind": "incident", "text": "", "next": "", "held_back": 0}


@pytest.mark.filterwarnings("ignore:'imghdr':DeprecationWarning")  # Apprise's
def test_a_mail_shows_what_was_said_and_is_no_page_of_it() -> None:
    with Server() as server:
        url = f"json://127.0.0.1:{server.server_address[1]}/?format=html"  # as a mail is by default
        notice = {**MESSAGE, "text": "<img src=//evil/x>\nline two"}
        assert notifier.deliver(Receiver(url=url), notice) == ""
        server.shutdown()
    (posted,) = server.got
    assert "<img" not in posted["message"]
    assert "&lt;img" in posted["message"]


def test_a_program_is_not_taken_from_the_directory_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a relative part of PATH leads."""
    page = tmp_path / "page"
    page.write_text("#!/bin/sh\n: > ran\n")
    page.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", ".:")
    assert "No such file" in notifier.deliver(Receiver(command=("page",)), MESSAGE)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", f".:{tmp_path}")
    assert notifier.deliver(Receiver(command=("page",)), MESSAGE) == ""
    assert (tmp_path / "ran").exists()


def test_a_command_that_leaves_something_in_the_background_has_delivered() -> None:
    """It is not delivered again because that goes on."""
    message = {"run": "r", "kind": "incident", "text": "", "next": ""}
    began_at = time.monotonic()
    assert notifier.deliver(Receiver(command=("sh", "-c", "sleep 60 & true")), message) == ""
    assert time.monotonic() - began_at < notifier.TRY_LIMIT_S
    told = notifier.deliver(Receiver(command=("sh", "-c", "sleep 60 & echo no >&2; exit 3")), message)
    assert told == "exit code 3: no"


def test_a_receiver_whose_library_raises_gets_the_next_notice(caplog: pytest.LogCaptureFixture) -> None:
    got: list[str] = []

    def deliver(item: str) -> str:
        if not got and item == "first":
            raise TypeError("not this one")
        got.append(item)
        return ""

    box = mailbox.Mailbox("pager", deliver, logging.getLogger("jurymast.notifier"), tries=1)
    box.start()
    box.put("first")
    box.put("second")
    assert box.empty(time.monotonic() + 60.0)
    assert got == ["second"]
    assert caplog.messages == ["pager: TypeError: not this one"]


def test_setting_the_clock_holds_no_notice_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a machine begins with a clock years ahead: what was told then would count for years."""
    directory = telling(swapped(finished=False), tmp_path / "run", Receiver(command=("true",)))
    watcher = StatusWatcher(directory)
    watcher.poll()
    put: list[notifier.Message] = []
    teller = notifier.Notifier(watcher, watcher.plan.settings.notify)
    for _, box in teller._boxes:
        monkeypatch.setattr(box, "put", put.append)
    began = time.monotonic()
    for wall, passed_s in ((4e9, 0.0), (4e9, 1.0), (4e9, 2.0), (2e9, 4000.0)):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        monkeypatch.setattr(time, "monotonic", lambda passed_s=passed_s: began + passed_s)
        teller._told.clear()
        teller.look()
    assert len(put) == 8


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Settings(), 0),
        (Settings(notify=(Receiver(command=("true",)),)), 1),
        (Settings(metrics=Exposure(port=0)), 1),
    ],
)
def test_a_supervisor_has_others_told_if_the_policy_says_whom_or_where(
    settings: Settings, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(settings=settings).running()
    directory = story.write(tmp_path / "run")
    Allocation("17", 0, ("n1", "n2", "n3"), "n1", 0.0).save(directory)
    begun = list[RunDirectory]()

    @contextmanager
    def watched(directory: RunDirectory) -> Iterator[None]:
        begun.append(directory)
        yield

    monkeypatch.setattr(epoch, "watched", watched)
    monkeypatch.setattr(epoch, "run_alone", lambda work: work.close())  # another has the epoch
    for name in ("log_as", "leave_no_core"):
        monkeypatch.setattr(epoch, name, lambda *_: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert epoch.serve(directory, lambda: story.state, listeners=[listener]) == SUPERSEDED
    assert len(begun) == told
