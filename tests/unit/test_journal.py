"""The journal under real trouble: cut lines, a disk without space, other versions, a second writer."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from jurymast.core.state import events as ev
from jurymast.core.state.effects import Finish
from jurymast.core.state.run import Phase
from jurymast.core.state.settings import RunPlan
from jurymast.errors import RunDirectoryError
from jurymast.journal import VERSION, JournalFollower, JournalWriter, events, read, read_file, replay
from jurymast.report.liveness import JournalTail
from jurymast.rundir import RunDirectory
from support.runs import ROOT
from support.waiting import wait_until


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    made.save_plan(
        RunPlan(
            run="r", name="r", directory=str(made.root), cluster="local", active=2, spares=1,
            ranks_per_node=1, script="train.py", submitted_at=1.0,
        )
    )  # fmt: skip
    return made


@pytest.fixture
def writer(directory: RunDirectory) -> Iterator[JournalWriter]:
    made = JournalWriter(directory.journal, 1)
    yield made
    made.close()


def note(number: int) -> ev.Noted:
    return ev.Noted(t=float(number), message=f"note {number}")


def notes(directory: RunDirectory) -> list[int]:
    return [int(event.t) for event in events(read(directory)) if isinstance(event, ev.Noted)]


def test_entries_are_numbered_versioned_and_read_back(directory: RunDirectory, writer: JournalWriter) -> None:
    writer.event(note(1))
    writer.decision(2.0, Finish(state="succeeded", exit_code=0, reason="all ranks are done"))
    assert writer.flush()
    first, second = read(directory)
    assert (first["v"], first["epoch"], first["n"], first["event"]) == (VERSION, 1, 1, "Noted")
    assert (second["n"], second["decision"], second["reason"]) == (2, "Finish", "all ranks are done")
    assert notes(directory) == [1]
    assert writer.path.stat().st_mode & 0o777 == 0o600


def test_epochs_are_read_in_order(directory: RunDirectory) -> None:
    for epoch in (2, 10, 1):
        writer = JournalWriter(directory.journal, epoch)
        writer.event(note(epoch))
        writer.close()
    assert notes(directory) == [1, 2, 10]


def test_two_writers_of_one_epoch_are_impossible(directory: RunDirectory, writer: JournalWriter) -> None:
    writer.event(note(1))
    with pytest.raises(FileExistsError):
        JournalWriter(directory.journal, 1)
    assert writer.flush()
    assert notes(directory) == [1]


def test_a_line_that_a_crash_cut_short_is_passed_over(directory: RunDirectory) -> None:
    """A writer that is killed at a random moment leaves a readable journal, in order and without a gap."""
    code = """
import itertools, sys
from pathlib import Path
from jurymast.core.state import events as ev
from jurymast.report.liveness import JournalTail
from jurymast.journal import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), 1)
for n in itertools.count():
    writer.event(ev.Noted(t=float(n), message="x" * 2000))
    if n % 10 == 0:
        writer.flush()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(directory.journal)]) as process:
        path = directory.journal / "epoch-000001.jsonl"
        try:
            wait_until("journal of 200 kB", lambda: path.exists() and path.stat().st_size > 200_000)
        finally:
            process.kill()
    whole = notes(directory)
    assert len(whole) >= 90
    assert whole == list(range(len(whole)))
    os.truncate(path, path.stat().st_size - 1500)
    assert notes(directory) in (whole[:-1], whole)
    with open(path, "ab") as file:
        file.write(b'{"v":1,"epoch":1,"n":1,"event":"Noted","t":\xff\xfe')
    assert notes(directory) in (whole[:-1], whole)


def test_a_journal_of_another_version_is_refused_by_name(
    directory: RunDirectory, writer: JournalWriter
) -> None:
    writer.event(note(1))
    assert writer.flush()
    follower, tail = JournalFollower(directory), JournalTail(directory)
    follower.catch_up()
    assert len(tail.poll()) == 1
    with open(writer.path, "a") as file:
        line = {"v": VERSION + 1, "epoch": 1, "n": 2, "event": "Noted", "t": 2.0, "message": "x"}
        file.write(json.dumps(line) + "\n")
    says = f"{writer.path.name} has lines of journal version {VERSION + 1}"
    for reading in (lambda: replay(directory), follower.catch_up, tail.poll):
        with pytest.raises(RunDirectoryError, match=says):
            reading()


def test_damaged_lines_and_unknown_events_are_passed_over(
    directory: RunDirectory, writer: JournalWriter
) -> None:
    writer.event(note(1))
    assert writer.flush()
    newer = [
        {"v": "1", "epoch": 1, "n": 2, "event": "Noted", "t": 2.0, "message": "a version that is none"},
        {"v": VERSION, "epoch": 1, "n": 3, "event": "Teleported", "t": 3.0},
        {"v": VERSION, "epoch": 1, "n": 4, "event": "Noted", "t": 4.0, "message": "m", "mood": "a new field"},
        {"v": VERSION, "epoch": 1, "n": 5, "event": "Noted", "t": 5.0},
        {"event": "Noted", "t": 6.0, "message": "no version"},
        ["no", "object"],
    ]
    with open(writer.path, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in newer)
    assert notes(directory) == [1, 4]
    assert len(list(read_file(writer.path))) == 3


# The file may grow to 4000 bytes, as on a disk that is full then. SIGXFSZ is ignored by Python.
FULL_DISK = """
import json, resource, sys, time
from pathlib import Path
from jurymast.core.state import events as ev
from jurymast.report.liveness import JournalTail
from jurymast.journal import JournalWriter
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
writer = JournalWriter(Path(sys.argv[1]), 1)
flushed = []
def write(*numbers):
    for n in numbers:
        writer.event(ev.Noted(t=float(n), message="x" * 1000))
        flushed.append(writer.flush())
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limit[1]))
write(1, 2, 3, 4, 5)
unwritten = [writer.written < writer.appended]
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
end = time.monotonic() + 20.0
while writer.written < writer.appended and time.monotonic() < end:
    time.sleep(0.01)
unwritten.append(writer.written < writer.appended)
write(6, 7)
print(json.dumps({"flushed": flushed, "error": str(writer.error), "unwritten": unwritten}))
writer.close()
"""


def fill_the_disk(directory: RunDirectory) -> list[bool]:
    """What each flush returned: three entries fit, two do not, then there is space again, for two more."""
    command = [sys.executable, "-c", FULL_DISK, str(directory.journal)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    told = json.loads(done.stdout)
    assert told["error"] == "None"
    assert told["unwritten"] == [True, False], "what does not fit is tried again, also if nothing follows"
    flushed: list[bool] = told["flushed"]
    return flushed


def test_a_full_disk_is_told_and_costs_no_line(directory: RunDirectory) -> None:
    assert fill_the_disk(directory) == [True, True, True, False, False, True, True]
    assert notes(directory) == [1, 2, 3, 4, 5, 6, 7]


def test_what_a_failed_sync_leaves_is_written_again(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops what it could not write, and the next sync succeeds."""
    sync, fails = os.fsync, [False]

    def fsync(descriptor: int) -> None:
        if fails.pop():
            os.ftruncate(descriptor, kept)
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    writer = JournalWriter(directory.journal, 1)
    writer.event(note(1))
    assert writer.flush(limit_s=20.0)
    kept = writer.path.stat().st_size
    fails[:] = [False, False, False, True]
    monkeypatch.setattr(os, "fsync", fsync)
    writer.event(note(2))
    assert not writer.flush(limit_s=20.0)
    writer.event(note(3))
    assert writer.flush(limit_s=20.0)
    writer.close()
    assert (fails, notes(directory)) == ([False, False], [1, 2, 3])


def test_a_file_that_became_stale_is_opened_anew(directory: RunDirectory) -> None:
    writer = JournalWriter(directory.journal, 1)
    writer.event(note(1))
    assert writer.flush(limit_s=20.0)
    with open(os.devnull, "rb") as stale:  # which cannot be written
        os.dup2(stale.fileno(), writer._descriptor)
    writer.event(note(2))
    writer.flush(limit_s=20.0)
    writer.event(note(3))
    assert writer.flush(limit_s=20.0)
    writer.close()
    assert notes(directory) == [1, 2, 3]


@pytest.mark.alone
def test_writing_costs_the_caller_no_wait_for_the_disk(writer: JournalWriter) -> None:
    began = time.monotonic()
    for n in range(1000):
        writer.event(note(n))
    assert time.monotonic() - began < 0.5
    assert writer.flush(limit_s=20.0)


def test_close_leaves_nothing_unwritten(directory: RunDirectory) -> None:
    writer = JournalWriter(directory.journal, 1)
    for n in range(500):
        writer.event(note(n))
    writer.close()
    assert notes(directory) == list(range(500))


def test_replay_rebuilds_the_state(directory: RunDirectory, writer: JournalWriter) -> None:
    assert replay(directory).phase is Phase.QUEUED
    nodes = ("local-1", "local-2", "local-3")
    writer.event(
        ev.AllocationStarted(t=2.0, slurm_job="7", restarts=0, nodes=nodes, host="local-1", eligible_at=2.0)
    )
    writer.event(ev.NodeJoined(t=3.0, node="local-2", address="127.0.0.1", incarnation="a", pid=77))
    assert writer.flush()
    state = replay(directory)
    assert state.phase is Phase.STARTING
    assert tuple(state.nodes) == nodes
    assert state.nodes["local-2"].pid == 77
    assert replay(directory) == state


def test_who_follows_a_journal_has_what_a_replay_says(directory: RunDirectory, writer: JournalWriter) -> None:
    """Also after a new supervisor has begun, while the last one still writes, and between two halves of a
    line."""
    follower = JournalFollower(directory)
    assert follower.catch_up() == replay(directory)

    def write(to: JournalWriter, *events: ev.Event) -> None:
        for event in events:
            to.event(event)
        assert to.flush()
        assert follower.catch_up() == replay(directory)

    joined = [ev.NodeJoined(t=2.0, node=f"n{i}", address="a", incarnation="i") for i in range(20)]
    write(writer, ev.SupervisorStarted(t=1.0, epoch=1, node="n1"), *joined)
    write(writer, ev.Noted(t=9.0, message="too late, as is said below"))
    successor = JournalWriter(directory.journal, 2)
    assert follower.catch_up() == replay(directory), "it has said nothing yet"
    write(successor, ev.SupervisorStarted(t=6.0, epoch=2, node="n2"))
    assert not follower.catch_up().notes
    write(writer, ev.Noted(t=10.0, message="it had been stopped for a while"))
    words = ev.to_json(ev.Noted(t=11.0, message="in two halves"))
    line = json.dumps({"v": VERSION, "epoch": 2, "n": 9, **words}).encode() + b"\n"
    with open(successor.path, "ab", buffering=0) as file:
        file.write(line[:30])
        assert follower.catch_up() == replay(directory)
        file.write(line[30:])
    assert follower.catch_up() == replay(directory)
    assert [message for _, message in follower.catch_up().notes] == ["in two halves"]
    successor.close()


def test_replay_without_a_plan_says_so(directory: RunDirectory) -> None:
    directory.plan_file.write_text('{"run": ')
    with pytest.raises(RunDirectoryError, match=r"plan\.json"):
        replay(directory)


def test_what_a_superseded_supervisor_still_writes_does_not_count(
    directory: RunDirectory, writer: JournalWriter
) -> None:
    """In a replay of the whole journal, and for those who read it as it grows."""
    tail = JournalTail(directory)
    writer.event(ev.SupervisorStarted(t=1.0, epoch=1, node="n1"))
    writer.event(ev.Noted(t=5.0, message="before the takeover"))
    assert writer.flush()
    assert len(tail.poll()) == 2
    successor = JournalWriter(directory.journal, 2)
    successor.event(ev.SupervisorStarted(t=6.0, epoch=2, node="n2"))
    assert successor.flush()
    assert len(tail.poll()) == 1
    writer.event(ev.Noted(t=9.0, message="it had been stopped for a while"))
    assert writer.flush()
    successor.event(ev.Noted(t=10.0, message="after the takeover"))
    successor.close()
    assert len(tail.poll()) == 1
    late = JournalTail(directory)
    late.poll()
    for state in (tail.state, late.state, replay(directory)):
        assert [message for _, message in state.notes] == ["before the takeover", "after the takeover"]


def test_what_a_successor_had_not_read_does_not_count_however_clocks_differ(
    directory: RunDirectory, writer: JournalWriter
) -> None:
    """Its clock is ahead of the one before by more than it took to take over."""
    writer.event(ev.SupervisorStarted(t=1.0, epoch=1, node="n1"))
    writer.event(ev.Noted(t=2.0, message="read"))
    assert writer.flush()
    read = dict(replay(directory).lines_read)
    assert read == {"1": 2}
    writer.event(ev.Noted(t=2.5, message="written too late"))
    assert writer.flush()
    successor = JournalWriter(directory.journal, 2)
    successor.event(ev.SupervisorStarted(t=6.0, epoch=2, node="n2", read=read))
    successor.close()
    tail, follower = JournalTail(directory), JournalFollower(directory)
    tail.poll()
    for state in (tail.state, follower.catch_up(), replay(directory)):
        assert [message for _, message in state.notes] == ["read"]
        assert state.epoch == 2


def test_events_that_change_change_the_journal_s_version() -> None:
    """Adapt `journal.txt` by hand once the rule beside `journal.VERSION` is kept."""
    version, *listed = (ROOT / "tests" / "data" / "golden" / "journal.txt").read_text().splitlines()
    assert version == f"version {VERSION}"
    assert [described(kind) for kind in ev.Event.__subclasses__()] == listed


def described(kind: type[ev.Event]) -> str:
    """Its name and its fields; those that a line may lack have a default."""
    types = {**ev.Event.__annotations__, **kind.__annotations__}
    told = [
        f"{f.name}: {types[f.name]}{'' if f.default is msgspec.NODEFAULT else ' = ' + repr(f.default)}"
        for f in msgspec.structs.fields(kind)
    ]
    return f"{kind.__name__}({', '.join(told)})"
