"""The agent's view of its ranks, with real processes: memory pages, pipes, stopped and idle children."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast import background
from jurymast.agent import ranks
from jurymast.agent.ranks import RankMemory, RankWatch
from jurymast.core.state import within
from jurymast.core.state.messages import (
    CadenceReport,
    RankReport,
    Trained,
    Unreadable,
    beat_of,
    encode,
    read_said,
)
from jurymast.jobs import await_ended
from jurymast.processes import process_state
from jurymast.worker import epilog, link
from jurymast.worker.link import EVENTS_VARIABLE, PAGE_VARIABLE, Link
from support.storage_faults import failing
from support.waiting import wait_until

LIMIT_S = 90.0
NOBODY = 65534


@contextmanager
def memory_of(ranks: int) -> Iterator[RankMemory]:
    memory = RankMemory(ranks)
    try:
        yield memory
    finally:
        memory.page.close()
        for descriptor in (memory._page_fd, memory.events_fd, memory._events_in):
            os.close(descriptor)


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes; killed and reaped at the end."""
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


COLD = "\ncold = lambda n, why='': within.ColdStart(seconds=n, why=why)\n"


def rank(memory: RankMemory, local_rank: int, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a rank would run it: `link` is its link to the agent."""
    imports = "from jurymast.core.state import within; from jurymast.worker import link as m"
    environment = {PAGE_VARIABLE: memory.page_path, EVENTS_VARIABLE: memory.events_path}
    return subprocess.run(
        [sys.executable, "-c", f"{imports}; link = m.current(){COLD}{code}"],
        env={**os.environ, **environment, "LOCAL_RANK": str(local_rank)},
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip


def test_each_rank_beats_in_a_slot_of_its_own() -> None:
    with memory_of(3) as memory:
        assert [beat.pid for beat in memory.beats()] == [0, 0, 0]
        before = time.monotonic()
        rank(memory, 0, "link.optimizer_stepped(); link.optimizer_stepped()")
        rank(memory, 2, "link.numbering = m.EXPLICIT; link.beat(700); link.enter(m.SAVING)")
        first, second, third = memory.beats()
        assert (first.step, first.beats, first.phase, first.explicit) == (2, 2, "stepping", False)
        assert (second.pid, second.beats) == (0, 0)
        assert (third.step, third.beats, third.phase, third.explicit) == (700, 1, "saving", True)
        assert before < first.beat_at < third.beat_at < time.monotonic()
        assert len({first.pid, third.pid, os.getpid()}) == 3
        memory.clear()
        assert [beat.beats for beat in memory.beats()] == [0, 0, 0]


@pytest.mark.alone
def test_the_longest_gap_between_steps_is_kept_without_saves_and_the_first_steps() -> None:
    code = """
import time
def step(number, seconds):
    time.sleep(seconds)
    link.beat(number)
for number in range(4):
    step(number, 0.3 if number < 3 else 0.0)
step(5, 0.1)
link.enter(m.SAVING)
time.sleep(0.3)
link.resume_at(5)
step(6, 0.01)
"""
    with memory_of(1) as memory:
        rank(memory, 0, code)
        assert 0.1 <= memory.beats()[0].longest_s < 0.25


def test_until_a_normal_step_was_seen_the_first_ones_set_the_scale() -> None:
    """Or a healthy step of a minute would count as a hang, because none is known yet."""
    with memory_of(1) as memory:
        rank(memory, 0, "import time; time.sleep(0.3); link.beat(1); link.beat(2); link.beat(3)")
        assert memory.beats()[0].longest_s >= 0.3


def test_events_of_all_ranks_arrive_whole() -> None:
    with memory_of(4) as memory:
        assert memory.read_events() == []
        for local_rank in range(4):
            rank(memory, local_rank, "for n in range(3): link.emit(cold(n, 'x' * 3000))")
        events: list[within.FromRanks] = []
        while new := memory.read_events():
            events += new
    assert events == [
        within.ColdStart(local_rank=r, seconds=n, why="x" * 3000) for r in range(4) for n in range(3)
    ]


def test_what_is_no_event_is_seen_as_such_and_a_line_may_come_in_parts() -> None:
    with memory_of(1) as memory, open(memory.events_path, "wb", buffering=0) as pipe:
        pipe.write(b'\xff\xfe\n[1]\n{"event": 7}\n{"event": "Sung"}\n{"event": "ColdStart"}\n\n{"event": ')
        strange = memory.read_events()
        assert [isinstance(one, Unreadable) and one.kind for one in strange] == [
            "",
            "",
            "",
            "Sung",
            "ColdStart",
            "",
        ]
        pipe.write(b'"ColdStart", "seconds": 1, "why": ""}\n{"event"')
        assert memory.read_events() == [within.ColdStart(seconds=1, why="")]


def test_a_full_pipe_or_a_long_event_never_blocks_the_rank() -> None:
    with memory_of(1) as memory:
        rank(memory, 0, "for n in range(10_000): link.emit(cold(n))")
        rank(memory, 0, "link.emit(cold(0, 'x' * 5000))")
        events: list[within.FromRanks] = []
        while new := memory.read_events():
            events += new
    assert 0 < len(events) < 10_000
    assert events == [within.ColdStart(seconds=n, why="") for n in range(len(events))]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so it needs root")
def test_another_user_can_open_neither_page_nor_pipe() -> None:
    code = f"""
import os, sys
os.setgid({NOBODY}); os.setuid({NOBODY})
for path in sys.argv[1:]:
    try:
        os.open(path, os.O_RDWR)
    except PermissionError:
        print('refused')
"""
    with memory_of(1) as memory:
        paths = [memory.page_path, memory.events_path]
        done = subprocess.run(
            [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
        )
    assert done.stdout.split() == ["refused", "refused"]


def test_both_are_gone_with_the_agent_and_the_rank_goes_on() -> None:
    code = "from jurymast.agent.ranks import RankMemory; m = RankMemory(1)\n"
    code += "print(m.page_path, m.events_path, flush=True); input()"
    with child(sys.executable, "-c", code) as agent:
        assert agent.stdout
        page, events = agent.stdout.readline().split()
        assert Path(page).exists()
    assert not Path(page).exists()
    environment = {**os.environ, PAGE_VARIABLE: page, EVENTS_VARIABLE: events}
    told = (
        "from jurymast.core.state import within; from jurymast.worker import link; l = link.current(); "
        "l.beat(1); l.emit(within.Cadence(steps=1)); print(l.schedule)"
    )
    done = subprocess.run(
        [sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "None"


def test_without_an_agent_every_call_does_nothing() -> None:
    link = Link(None, "", 0)
    link.beat(5)
    link.optimizer_stepped()
    link.enter(3)
    link.emit(within.Cadence(steps=5))
    assert link.schedule is None


def test_state_of_real_processes(tmp_path: Path) -> None:
    misleading = tmp_path / "x) T 1 (y"  # /proc/PID/stat has the name between the id and the state
    misleading.symlink_to("/bin/sleep")
    with child(str(misleading), "60") as process:
        wait_until("sleep", lambda: process_state(process.pid)[0] == "S")
        process.send_signal(signal.SIGSTOP)
        wait_until("stop", lambda: process_state(process.pid)[0] == "T")
        process.send_signal(signal.SIGCONT)
        wait_until("continuation", lambda: process_state(process.pid)[0] == "S")
        process.kill()
        wait_until("zombie", lambda: process_state(process.pid)[0] == "Z")
        process.wait()
        assert process_state(process.pid) == ("", 0.0)


def test_an_ended_process_is_not_waited_for_although_its_parent_never_asks() -> None:
    """As where the first process of a container adopts it, and looks after none."""
    with child("/bin/sleep", "600") as process:
        assert not await_ended([process.pid], 0.0)
        process.kill()
        assert await_ended([process.pid], LIMIT_S)
        assert process_state(process.pid)[0] == "Z"
        asyncio.run(asyncio.wait_for(ranks.gone([process.pid], 1e9), LIMIT_S))


def test_a_rank_that_cannot_be_looked_at_has_the_time_that_it_was_given() -> None:
    """It may be saving, while its agent has no descriptor left."""

    async def work(pid: int) -> None:
        with failing(f"/proc/{pid}/stat", errno.EMFILE):
            gone = asyncio.ensure_future(ranks.gone([pid], 1e9))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not gone.done()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(gone, LIMIT_S)

    with child("/bin/sleep", "600") as process:
        asyncio.run(work(process.pid))


def test_cpu_time_of_a_busy_process_counts_user_and_system() -> None:
    with child(sys.executable, "-c", "import os\nwhile True: os.getppid()") as process:
        wait_until("use of the processor", lambda: process_state(process.pid)[1] >= 0.2)


def looking(watch: RankWatch, pid: int, key: str) -> float:
    """A look right now, after which the next one sees what happened since."""
    return float(getattr(watch.look([pid])[0], key))


def test_a_stopped_rank_is_seen_and_forgiven_when_it_continues() -> None:
    with memory_of(1) as memory, child("/bin/sleep", "60") as process:
        watch = RankWatch(memory)
        assert looking(watch, process.pid, "stopped_s") == 0.0
        process.send_signal(signal.SIGSTOP)
        wait_until("half a second of stop", lambda: looking(watch, process.pid, "stopped_s") > 0.5)
        process.send_signal(signal.SIGCONT)
        wait_until("continuation", lambda: looking(watch, process.pid, "stopped_s") == 0.0)


def test_an_idle_rank_is_told_from_a_busy_one() -> None:
    busy_code = "import sys\nsys.stdin.readline()\nwhile True: pass"
    with memory_of(1) as memory, child(sys.executable, "-c", busy_code) as process:
        assert process.stdin
        watch = RankWatch(memory)
        wait_until("half a second of idleness", lambda: looking(watch, process.pid, "idle_s") > 0.5)
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until("work", lambda: looking(watch, process.pid, "idle_s") == 0.0)


def test_a_heartbeat_has_what_scripts_have_said_of_their_steps_once_one_has() -> None:
    with memory_of(2) as memory, child("/bin/sleep", "60") as process:
        watch = RankWatch(memory)
        pids = [process.pid, process.pid]
        beat = beat_of(1, watch.look(pids), trained=watch.trained())
        assert beat.trained is None
        rank(memory, 1, "m.step(9, samples=64, tokens=4096)")
        beat = beat_of(1, watch.look(pids), trained=watch.trained())
        assert beat.trained == [Trained(), Trained(samples=64, tokens=4096)]
        assert read_said(encode(beat)) == beat


def test_a_report_has_ages_in_seconds_and_forgets_old_processes() -> None:
    with memory_of(1) as memory, child("/bin/sleep", "60") as process:
        watch = RankWatch(memory)
        fresh = watch.look([process.pid])[0]
        assert (fresh.phase, fresh.quiet_s, fresh.beat_s) == ("starting", None, None)
        rank(memory, 0, "link.beat(9)")
        report = watch.look([process.pid])[0]
        beat = beat_of(1, [report], CadenceReport(2, -2, seconds=1.5), watch.times())
        assert read_said(encode(beat)) == beat
        assert (beat.quiet_s, beat.stopped) == (report.quiet_s, False)
        assert report.quiet_s is not None
        assert report.beat_s is not None
        assert report.step == 9
        assert 0.0 < report.quiet_s <= report.beat_s + 0.001 < LIMIT_S
        watch.look([os.getpid()])
        assert list(watch.watches) == [os.getpid()]


class Clock:
    """Stands in for `time` in the modules under test: there passes only what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        for module in (ranks, link):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now


def look_for(seconds: float, clock: Clock, watch: RankWatch, pid: int) -> RankReport:
    """Looks as often as it should; the last one's report."""
    for _ in range(round(seconds / watch.interval_s)):
        clock.now += watch.interval_s
        (report,) = watch.look([pid])
    return report


def test_what_the_whole_machine_slept_is_held_against_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that was not awake itself cannot tell a hang."""
    with memory_of(1) as memory, child("cat") as process:
        clock = Clock(monkeypatch)
        watch = RankWatch(memory, interval_s=0.5)
        Link(memory.page, "", 0).beat(1)
        watch.look([process.pid])
        clock.now += 60.0
        (report,) = watch.look([process.pid])
        assert report.quiet_s == pytest.approx(ranks.OVERSLEPT * watch.interval_s)
        assert report.idle_s == 0.0
        report = look_for(30.0, clock, watch, process.pid)
        assert report.quiet_s == pytest.approx(30.0 + ranks.OVERSLEPT * watch.interval_s)


def test_the_wait_for_an_attempt_is_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_of(1) as memory, child("cat") as process:
        clock = Clock(monkeypatch)
        watch = RankWatch(memory, interval_s=0.5)
        watch.look([])
        clock.now += 60.0
        Link(memory.page, "", 0).beat(1)
        report = look_for(30.0, clock, watch, process.pid)
        assert report.quiet_s == pytest.approx(30.0)


async def test_a_host_with_something_to_run_at_its_end_comes_to_it_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It learns that nobody is there any more for whom it waits."""
    monkeypatch.setattr(epilog, "LIMIT_S", 20.0)
    ours, theirs = socket.socketpair()
    errors, their_errors = socket.socketpair()
    errors.setblocking(False)
    ran, failed = tmp_path / "ran", background.logged
    code = f"import os, pathlib\nos.read({theirs.fileno()}, 1)\npathlib.Path({str(ran)!r}).touch()"
    with theirs, their_errors:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, pass_fds=[theirs.fileno()])
    reader, writer = await asyncio.open_connection(sock=ours)
    ended = list[int]()
    host = ranks.HostProcess(
        process, writer, lambda _: None, lambda code, _: ended.append(code), reader, errors, failed, True
    )
    await host.end()
    assert (ended, ran.exists()) == ([0], True)
