"""What the site's sweep finds after jobs, as root, on this machine: what it spares, and when it ends."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from jurymast_site import sweep as sweeping
from jurymast_site.config import Config
from jurymast_site.sweep import Process, end, orphans, processes, stale_files, sweep, users_with_jobs
from jurymast_site.system import Log
from support.waiting import wait_until

# Above every user of a machine that runs tests: nothing of theirs is touched.
STRAY, BUSY, MIN_UID = 2_000_001, 2_000_002, 2_000_000

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the site's pieces run as root")

# Its first thread ends, and another one goes on.
LEAVES_A_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes to be ended at the latest with the test, with what they started."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for child in children:
            child.kill()
        process.kill()
        process.wait()
        wait_until("the ends of those it started", lambda: not any(_lives(child) for child in children))  # noqa: B023


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def as_user(uid: int, *command: str) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]


def of(uid: int) -> list[Process]:
    """The processes of `uid` once they run what they are for; long past their beginning."""
    found = [p for p in processes() if p.uid == uid and p.name in ("sleep", "python")]
    return [replace(process, age_s=1000.0) for process in found]


def test_users_with_a_job_are_left_alone(tmp_path: Path, started: list[subprocess.Popen[bytes]]) -> None:
    stepd, fake = tmp_path / "slurmstepd", tmp_path / "fake" / "slurmstepd"
    fake.parent.mkdir()
    for path in (stepd, fake):
        shutil.copy("/bin/sh", path)
        path.chmod(0o755)
    for directory in (fake.parent, *fake.parents):
        if directory.is_relative_to(tmp_path.parents[1]):
            directory.chmod(0o755)
    job = as_user(BUSY, "sleep", "1000")
    started.append(subprocess.Popen([stepd, "-c", f"{' '.join(job)} & wait"]))
    started.append(subprocess.Popen(as_user(BUSY, "sleep", "1000")))  # also of that user: an ssh into the job
    started.append(subprocess.Popen(as_user(STRAY, str(fake), "-c", "sleep 1000 & wait")))
    wait_until("all three", lambda: len(of(BUSY)) == 2 and len(of(STRAY)) == 1)
    found = [replace(process, age_s=1000.0) for process in processes()]
    busy = users_with_jobs(found)
    assert BUSY in busy
    assert STRAY not in busy, "anybody can call a process slurmstepd"
    strays = list(orphans(found, busy, MIN_UID))
    assert {process.uid for process in strays} == {STRAY}
    assert {process.name for process in strays} == {"sleep", "slurmstepd"}
    assert not list(orphans(found, busy, STRAY + 1))
    young = [replace(process, age_s=1.0) for process in found]
    assert not list(orphans(young, busy, MIN_UID))
    inside = [replace(process, cgroup="0::/user.slice/user-7.slice/session-3.scope\n") for process in found]
    assert not list(orphans(inside, busy, MIN_UID))
    held = [replace(process, cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0\n") for process in found]
    assert users_with_jobs(held) >= {STRAY, BUSY}


def test_what_runs_as_root_for_everybody_is_no_slurmstepd_by_its_name(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    """A user's link of this name to su, say, which waits as root for what it has started."""
    link = tmp_path / "slurmstepd"
    link.symlink_to("/bin/sh")  # run by root, as a program with the set-user-ID bit is
    job = as_user(STRAY, "sleep", "1000")
    started.append(subprocess.Popen([link, "-c", f"{' '.join(job)} & wait"]))
    wait_until("the process", lambda: len(of(STRAY)) == 1)
    found = [replace(process, age_s=1000.0) for process in processes()]
    assert "slurmstepd" in {process.name for process in found if process.uid == 0}
    assert {process.uid for process in orphans(found, users_with_jobs(found), MIN_UID)} == {STRAY}


def test_no_process_hides_by_the_name_of_its_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may make cgroups may give them any bytes for a name."""
    monkeypatch.setattr(sweeping, "PROC", tmp_path)
    (tmp_path / "uptime").write_text("1000.0 1.0\n")
    (tmp_path / "4711").mkdir()
    (tmp_path / "4711" / "stat").write_text("4711 (hidden) S 1 " + "1 " * 40)
    (tmp_path / "4711" / "cgroup").write_bytes(b"0::/mine/\xff\n")
    assert [(process.pid, process.name) for process in processes()] == [(4711, "hidden")]


def test_what_has_ended_is_no_stray_while_its_parent_does_not_hear_of_it(
    started: list[subprocess.Popen[bytes]],
) -> None:
    """It holds nothing, and no signal reaches it; its parent may be one that never asks."""
    ended = subprocess.Popen(as_user(STRAY, "sleep", "0"))
    started.append(ended)
    left = subprocess.Popen(as_user(STRAY, "/usr/bin/python3", "-c", LEAVES_A_THREAD))
    started.append(left)
    for process in started:
        wait_until("its end", lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)  # noqa: B023
    found = {process.pid: process for process in processes()}
    assert ended.pid not in found
    assert end([found[left.pid]]) == [], "a thread of it lives"
    assert left.wait(60) == -signal.SIGTERM


def nested(pid: int, parent: int, uid: int = STRAY, name: str = "sh") -> Process:
    slurms = uid == 0 and name == "slurmstepd"
    return Process(pid, uid, parent, name, cgroup="0::/", started=1, age_s=100.0, slurms=slurms)


def test_processes_nested_very_deeply_are_looked_at_once() -> None:
    """One step for each above it would be 2e10 of them, and the sweep would hold the next job up."""
    deep = 200_000
    chain = [nested(pid, pid - 1) for pid in range(2, deep)]
    for found in (chain, chain[::-1]):
        assert users_with_jobs(found) == set()
        assert users_with_jobs([*found, nested(1, 0, 0, "slurmstepd")]) == {0, STRAY}


def test_descent_is_found_whatever_the_order_and_ends_in_a_circle() -> None:
    step = nested(10, 1, 0, "slurmstepd")
    jobs = [nested(11, 10, BUSY), nested(12, 11, BUSY)]
    circle = [nested(20, 21), nested(21, 20), nested(30, 30), nested(31, 10, STRAY + 5, "slurmstepd")]
    for found in ([step, *jobs, *circle], [*circle, *jobs[::-1], step]):
        assert users_with_jobs(found) == {0, BUSY, STRAY + 5}
    assert users_with_jobs([nested(5, 4, STRAY, "slurmstepd"), nested(6, 5)]) == set(), "not root's"


def test_strays_end_also_those_that_will_not(started: list[subprocess.Popen[bytes]]) -> None:
    deaf = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print(flush=True); s.pause()"
    started.append(subprocess.Popen(as_user(STRAY, "sleep", "1000")))
    stubborn = subprocess.Popen(as_user(STRAY, "/usr/bin/python3", "-c", deaf), stdout=subprocess.PIPE)
    started.append(stubborn)
    assert stubborn.stdout is not None
    assert stubborn.stdout.readline()
    other = subprocess.Popen(as_user(BUSY, "sleep", "1000"))
    started.append(other)
    mine = {process.pid for process in started}
    wait_until("both", lambda: len([p for p in processes() if p.uid == STRAY and p.pid in mine]) == 2)
    strays = [process for process in processes() if process.uid == STRAY and process.pid in mine]
    gone = replace(strays[0], started=strays[0].started - 1)  # a pid that another process has by now
    assert end([gone]) == []
    assert all(process.poll() is None for process in started)
    assert end(strays) == []
    assert [process.wait(60) for process in started[:2]] == [-signal.SIGTERM, -signal.SIGKILL]
    assert other.poll() is None
    stubborn.stdout.close()


def test_stale_shared_memory(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(name: str, uid: int) -> Path:
        path = tmp_path / name
        path.write_bytes(b"x" * 10)
        os.utime(path, (4e9, 4e9))  # whoever owns it may say so
        os.chown(path, uid, uid)
        return path

    stale, young = file("stale", STRAY), tmp_path / "young"
    file("busy", BUSY)
    file("root", 0)
    wait_until("a later time", lambda: file("young", STRAY).stat().st_ctime > stale.stat().st_ctime)
    now = young.stat().st_ctime + sweeping.YOUNG_S

    class Clock:
        time, monotonic = staticmethod(lambda: now), staticmethod(time.monotonic)

    monkeypatch.setattr(sweeping, "time", Clock)
    (tmp_path / "link").symlink_to(stale)
    assert list(stale_files(tmp_path, {0, BUSY}, MIN_UID)) == [(stale, STRAY, 10)]
    started.append(subprocess.Popen(as_user(BUSY, "sleep", "1000")))
    wait_until("a process", lambda: of(BUSY))
    monkeypatch.setattr(sweeping, "SHARED_MEMORY", tmp_path)
    log = tmp_path.parent / "log"
    config = Config(sweep_processes="off", min_uid=MIN_UID, log=str(log))
    sweep(config, Log("test", config.log))
    assert f"stale shared memory of uid {STRAY}: 1 file, 10 bytes" in log.read_text()
    assert stale.exists()
    sweep(replace(config, sweep_shared_memory="remove"), Log("test", config.log))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "link", "root", "young"]


def test_a_heap_of_files_holds_no_job_up_and_fills_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can leave a million: one line a user, and an end to it by number and by time."""
    log, place = tmp_path / "log", tmp_path / "shm"
    place.mkdir()
    for number in range(300):
        path = place / f"{number}\nforged line"
        path.touch()
        os.chown(path, STRAY, STRAY)
    monkeypatch.setattr(sweeping, "YOUNG_S", -60.0)
    monkeypatch.setattr(sweeping, "SHARED_MEMORY", place)
    config = Config(sweep_processes="off", sweep_shared_memory="remove", min_uid=MIN_UID, log=str(log))
    for name, value, left, told in (
        ("LIMIT_S", -1.0, 300, ["nothing is swept"]),
        ("ENTRIES_MAX", 100, 200, ["the rest is left", f"of uid {STRAY}: 100 files, 0 bytes"]),
        ("ENTRIES_MAX", 1000, 0, [f"of uid {STRAY}: 200 files, 0 bytes"]),
    ):
        log.unlink(missing_ok=True)
        with monkeypatch.context() as bound:
            bound.setattr(sweeping, name, value)
            sweep(config, Log("test", config.log))
        assert len(list(place.iterdir())) == left
        lines = log.read_text().splitlines()
        assert len(lines) == len(told)
        assert all(words in line for words, line in zip(told, lines, strict=True))


@pytest.mark.parametrize("after", ["processes", "strays", "signals"])
def test_a_sweep_has_one_deadline_whatever_takes_its_time(
    after: str, tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job waits for it. Nobody is ended, and no file removed, as long as not every process is known."""
    log, place = tmp_path / "log", tmp_path / "shm"
    place.mkdir()
    (place / "file").touch()
    os.chown(place / "file", STRAY, STRAY)
    os.utime(place / "file", (1, 1))
    started.append(subprocess.Popen(as_user(STRAY, "sleep", "1000")))
    wait_until("stray", lambda: of(STRAY))
    now = [0.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])
        time, sleep = staticmethod(time.time), staticmethod(lambda _: None)

    def late(function: str, call: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **named: object) -> object:
            found = call(*arguments, **named)
            now[0] += 2 * sweeping.LIMIT_S * (after == function)
            return found

        return called

    monkeypatch.setattr(sweeping, "time", Clock)
    monkeypatch.setattr(sweeping, "YOUNG_S", 0.0)
    monkeypatch.setattr(sweeping, "SHARED_MEMORY", place)
    monkeypatch.setattr(sweeping, "users_with_jobs", late("processes", sweeping.users_with_jobs))
    monkeypatch.setattr(sweeping, "_report_strays", late("strays", sweeping._report_strays))
    monkeypatch.setattr(sweeping, "_signal", late("signals", lambda process, number: None))
    sweep(Config(sweep_processes="kill", sweep_shared_memory="remove", min_uid=MIN_UID, log=str(log)),
          Log("test", str(log)))  # fmt: skip
    assert now[0] == 2 * sweeping.LIMIT_S, "nothing more is done once the time is over"
    assert of(STRAY)
    assert (place / "file").exists()
    assert "left for the next sweep" in log.read_text() or "nothing is swept" in log.read_text()


@pytest.mark.parametrize("what", ["files of a user who is here", "open files of a stray"])
def test_the_deadline_holds_while_nothing_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can have a million of either."""
    asked = itertools.count()

    class Clock:
        monotonic = staticmethod(lambda: float(next(asked)))
        time = staticmethod(time.time)

    monkeypatch.setattr(sweeping, "time", Clock)
    monkeypatch.setattr(sweeping, "SHARED_MEMORY", tmp_path)
    log = tmp_path.parent / "log"
    with ExitStack() as opened:
        for number in range(100):
            file = opened.enter_context((tmp_path / f"{number}").open("w"))
            os.chown(file.name, BUSY, BUSY)
            os.utime(file.name, (1, 1))
        if what == "open files of a stray":
            assert sweeping.gpus_held(os.getpid(), 10.0) == set()
        else:
            stale = stale_files(tmp_path, {BUSY}, MIN_UID, 10.0)
            sweeping._sweep_files(stale, Log("test", str(log)), remove=True, end_s=10.0)
            assert "the rest is left" in log.read_text()
    assert next(asked) < 20


def test_processes_that_are_not_all_known_end_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(processes(time.monotonic() - 1.0)) == []
    assert len(list(processes())) > 1


def test_the_sweep_reports_and_kills_only_when_told(
    tmp_path: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "YOUNG_S", 0.0)
    log = tmp_path / "log"
    config = Config(sweep_shared_memory="off", min_uid=MIN_UID, log=str(log))
    gpu = tmp_path / "nvidia0"
    gpu.touch()
    stray = subprocess.Popen(as_user(STRAY, "sleep", "1000"))
    started.append(stray)
    wait_until("a process", lambda: of(STRAY))
    sweep(config, Log("test", config.log))
    assert f"stray process {stray.pid} (sleep) of uid {STRAY}" in log.read_text()
    assert stray.poll() is None
    monkeypatch.setenv("SLURM_JOB_UID", str(STRAY))  # a Prolog of theirs: their job is about to start
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "prolog_slurmd")
    sweep(replace(config, sweep_processes="kill"), Log("test", config.log))
    assert stray.poll() is None
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "epilog_slurmd")
    sweep(replace(config, sweep_processes="kill"), Log("test", config.log))
    assert stray.wait(60) == -signal.SIGTERM


def test_a_sweep_that_breaks_drains_no_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of memory, or on a Python that lacks something."""
    (tmp_path / "site.ini").write_text(f"[files]\nlog = {tmp_path}/log\n")

    def breaks(*_: object) -> None:
        raise AttributeError("module 'os' has no attribute 'pidfd_open'")

    monkeypatch.setattr(sweeping, "sweep", breaks)
    assert sweeping.main(["--config", str(tmp_path / "site.ini")]) == 0
    assert "failed: AttributeError" in (tmp_path / "log").read_text()
