"""What a node shows when a rank ends badly: real kills in a real cgroup, real logs, a log that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jurymast import foreign
from jurymast.agent import ranks
from jurymast.agent.ranks import LOG_BYTES, Evidence, end_of
from jurymast.agent.real_io import NodeIo, NodeRanks
from jurymast.core.state import messages as msg
from jurymast.health.readings import memory_cgroups, oom_kills, where_kills_count
from jurymast.rundir import RunDirectory
from jurymast.supervisor.real_io import RealIo

LIMIT_BYTES = 24 * 1024 * 1024


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup below this process's with little memory; returns its directory, and removes it."""
    _, own = where_kills_count(memory_cgroups())
    if own is None:
        pytest.skip("no cgroup here counts kills for want of memory")
    child = own.parent / f"jurymast-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if own.name == "memory.oom_control" else "memory.max"
    try:
        child.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    try:
        (child / limit).write_text(str(LIMIT_BYTES))
        yield child
    except OSError as error:
        pytest.skip(f"memory cannot be limited here: {error}")
    finally:
        child.rmdir()


def test_a_kill_for_want_of_memory_is_seen_and_belongs_to_its_attempt(small_cgroup: Path) -> None:
    names = ("memory.oom_control", "memory.events")
    kills_file = next(path for name in names if (path := small_cgroup / name).is_file())
    evidence = Evidence(kills_file)
    assert evidence.look(-9)["oom_kills"] == 0
    words = [sys.executable, "-c", f"input(); bytearray({2 * LIMIT_BYTES})"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as rank:
        assert rank.stdin is not None
        (small_cgroup / "cgroup.procs").write_text(str(rank.pid))
        rank.stdin.write(b"\n")
        rank.stdin.close()
        assert rank.wait(120) == -signal.SIGKILL
    assert evidence.look(-9)["oom_kills"] == 1
    evidence.attempt_begins()
    assert evidence.look(-9)["oom_kills"] == 0


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
         "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.events"),
        ("5:devices:/a\n4:memory:/slurm/uid_1000/job_7/step_0\n0::/\n",
         "memory/slurm/uid_1000/job_7/step_0/memory.oom_control"),
        ("4:memory,hugetlb:/docker/abc\n", "memory/memory.oom_control"),
        ("0::/user.slice\n", "unified/user.slice/memory.events"),
    ],
)  # fmt: skip
def test_where_cgroups_count(tmp_path: Path, own: str, file: str) -> None:
    """Lines as /proc/PID/cgroup gives them under version 2, version 1, in a container, and with both."""
    (tmp_path / "cgroup").write_text(own)
    root = tmp_path / "fs"
    (root / file).parent.mkdir(parents=True)
    path = next(line for line in own.splitlines() if ":devices:" not in line).rpartition(":")[2]
    assert where_kills_count(memory_cgroups(tmp_path / "cgroup", root)) == (path, None)
    (root / file).write_text("low 0\noom 2\noom_kill 3\n")
    counted, found = where_kills_count(memory_cgroups(tmp_path / "cgroup", root))
    assert (counted, found) == (path, root / file)
    assert oom_kills(found) == 3


def test_no_counter_is_no_count(tmp_path: Path) -> None:
    assert where_kills_count(memory_cgroups(tmp_path / "none", tmp_path)) == ("", None)
    assert oom_kills(None) is None
    assert oom_kills(tmp_path / "gone") is None


def test_what_of_the_log_goes_with_an_end(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    log.write_text("x" * 3 * LOG_BYTES + "\nstep 7\n\nstep 8\nno data at /d\n")
    told = {code: Evidence().look(code, lambda: log).get("log") for code in (-11, -9, -15, 1, 0)}
    assert told == {-11: "step 7 | step 8 | no data at /d", -9: "", -15: "", 1: "no data at /d", 0: None}
    assert "log" not in Evidence().look(1), "an exception has its own words"
    assert 0.0 <= Evidence().look(-7, lambda: log)["shm_used"] <= 1.0


def test_a_log_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    pipe = tmp_path / "rank.log"
    os.mkfifo(pipe)
    assert end_of(lambda: pipe) == ""  # though nothing is ever written to it
    os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))  # lets the reader go


def test_logs_of_all_ranks_on_storage_that_hangs_hold_the_loop_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight waits would make the node look lost."""
    answers, asked = threading.Event(), list[Path]()
    reading = foreign.reading
    log = tmp_path / "rank.log"
    log.write_text("no data\n")

    def hang(path: Path) -> Any:
        asked.append(path)
        assert answers.wait(60)
        return reading(path)

    monkeypatch.setattr(foreign, "reading", hang)
    told = [end_of(lambda: log) for _ in range(8)]
    assert told == [""] * 8
    assert len(asked) == 1
    answers.set()
    assert ranks._reader is not None
    ranks._reader.join(60)
    assert end_of(lambda: log) == "no data", "once storage answers again"


def test_looking_for_a_log_on_storage_that_hangs_holds_the_loop_up_no_longer() -> None:
    """Which of a rank's two logs tells more is seen there as well."""
    answers = threading.Event()

    def find() -> Path:
        assert answers.wait(60)
        return Path("/nowhere")

    began_at = time.monotonic()
    assert Evidence().look(1, find)["log"] == ""
    answers.set()
    assert time.monotonic() - began_at < 30.0


def test_a_node_on_which_no_thread_can_be_started_is_not_lost_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have used all that the job may have, and fail for it."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> None:
        node, of_supervisor = NodeIo.__new__(NodeIo), RealIo.__new__(RealIo)
        node._directory = RunDirectory(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            assert Evidence().look(1, lambda: tmp_path / "log")["log"] == ""
            assert await node.find() == (None, None)
            assert await node.read_pulse() is None
            with pytest.raises(OSError, match="can't start new thread"):
                await of_supervisor.on_disk(tmp_path.stat)

    asyncio.run(ask())
    (tmp_path / "log").write_text("no data\n")
    assert Evidence().look(1, lambda: tmp_path / "log")["log"] == "no data"


def test_ranks_are_told_of_though_their_storage_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's own way to a rank's log."""
    answers = threading.Event()

    def hang(path: Path) -> os.stat_result:
        assert answers.wait(60)
        return tmp_path.stat()

    monkeypatch.setattr(foreign, "status", hang)
    failed = msg.Failed(attempt=1, rank=0, exit_code=1)
    node_ranks = NodeRanks.__new__(NodeRanks)
    node_ranks._directory, node_ranks.oom_evidence = RunDirectory(tmp_path), Evidence()
    began_at = time.monotonic()
    assert node_ranks.evidence(1, failed)["log"] == ""
    answers.set()
    assert time.monotonic() - began_at < 30.0


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_of_a_crash_the_fault_handlers_first_words_are_told(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "rank.log"
    program = f"import numpy, os; print('step 7', flush=True); os.kill(os.getpid(), {int(number)})"
    with log.open("w") as output:
        done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], stdout=output,
                              stderr=output, check=False, timeout=60)  # fmt: skip
    assert done.returncode == -number
    told = end_of(lambda: log)
    name = {signal.SIGSEGV: "Segmentation fault", signal.SIGABRT: "Aborted"}[number]
    assert told.startswith(f"Fatal Python error: {name} | ")
    assert 'File "<string>", line 1 in <module>' in told
