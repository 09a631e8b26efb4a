"""The host's and the storage probe, over what this machine's kernel really does to them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.core.state.findings import Finding, Verdict
from jurymast.health.probe import Context, Probe
from jurymast.health.readings import waits_for_storage
from jurymast_host import HostProbe, _is_shared
from jurymast_storage import StorageProbe, probe
from support.probes import Acme
from support.waiting import wait_until

ROOT = Path("/")
CGROUPS = Path("/sys/fs/cgroup")
# Nothing is short by these.
EASY = {"memory-available": 0.0, "shm-used": 2.0, "disk-used": 2.0, "inodes-used": 2.0, "load-per-core": 1e6}


def codes(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(finding.code, finding.verdict.value) for finding in found]


def host(root: Path = ROOT, limits: Mapping[str, float] = EASY, *, fresh: bool = True) -> HostProbe:
    """For a job that starts now."""
    return HostProbe(Context(thresholds={**EASY, **limits}, fresh=fresh, started_at=time.time()), root)


def test_they_are_probes(tmp_path: Path) -> None:
    assert isinstance(host(), Probe)
    assert isinstance(probe(Context(paths=[str(tmp_path)])), Probe)
    assert probe(Context()) is None


@pytest.mark.parametrize(
    ("limit", "value", "code"),
    [
        ("memory-available", 1.01, "memory-low"),
        ("shm-used", 0.0, "shm-full"),
        ("disk-used", 0.0, "disk-full"),
        ("inodes-used", -1.0, "inodes-used-up"),
    ],
)
def test_what_is_short_at_the_start_is_the_node_s_and_later_maybe_the_run_s(
    limit: str, value: float, code: str
) -> None:
    now = time.time()
    for fresh, verdict in ((True, "suspect"), (False, "unknown")):
        looking = host(limits={limit: value}, fresh=fresh)
        assert (code, verdict) in codes(looking.look(now))
        assert (code, verdict) in codes(looking.look(now + 10))  # and stays it
        looking.close()


def test_a_machine_with_enough_of_everything_has_no_findings() -> None:
    now = time.time()
    looking = host()
    assert [f for f in looking.look(now) if not f.once and f.code != "not-observable"] == []
    looking.close()


def test_high_load_is_told_and_blames_nobody() -> None:
    assert ("load-high", "unknown") in codes(host(limits={"load-per-core": 0.0}).look(time.time()))


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    group = CGROUPS / "memory" / f"jurymast-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("48M")
    except OSError:
        pytest.skip("needs root and the memory controller of cgroups version 1")
    yield group
    wait_until("empty cgroup", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


EATS = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from jurymast.health.probe import Context
from jurymast_host import HostProbe
probe = HostProbe(Context(started_at=time.time() + 1e6))
before = [f.code for f in probe.look(time.time()) if f.once]
child = os.fork()
if child == 0:
    Path("/proc/self/oom_score_adj").write_text("1000")
    eaten = bytearray(200 * 2**20)
    os._exit(0)
_, status = os.waitpid(child, 0)
found = [[f for f in probe.look(time.time()) if f.once] for _ in range(2)]
print(before, os.WTERMSIG(status), [(f.code, f.verdict.value, f.kind) for f in found[0]], found[1])
print(found[0][0].message)
"""


def test_a_process_that_the_kernel_kills_for_memory_is_an_event(memory_cgroup: Path) -> None:
    """In the job's cgroup, which may be all that a user can see of it."""
    done = subprocess.run(
        [sys.executable, "-c", EATS, str(memory_cgroup)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("[] 9 [('oom-kill', 'unknown', 'application')] []\n"), done
    assert "the kernel killed 1 of its processes" in done.stdout


EATEN = """
import os, sys
open(os.path.join(sys.argv[1], "cgroup.procs"), "w").write(str(os.getpid()))
open("/proc/self/oom_score_adj", "w").write("1000")
bytearray(200 * 2**20)
"""


def test_a_kill_in_another_job_s_cgroup_is_nothing_to_this_job(memory_cgroup: Path) -> None:
    looking = host()
    looking.look(time.time())
    eater = [sys.executable, "-c", EATEN, str(memory_cgroup)]
    assert subprocess.run(eater, check=False, timeout=60).returncode == -9
    assert [f for f in looking.look(time.time()) if f.code == "oom-kill"] == []
    looking.close()


@pytest.fixture
def frozen() -> Iterator[int]:
    """A process of ours in state D: the freezer's, which the kernel shows so."""
    group = CGROUPS / "freezer" / f"jurymast-host-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs root and the freezer of cgroups version 1")
    sleeper = subprocess.Popen(["sleep", "1000"])
    (group / "cgroup.procs").write_text(str(sleeper.pid))
    (group / "freezer.state").write_text("FROZEN")
    wait_until("frozen process", lambda: (group / "freezer.state").read_text() == "FROZEN\n")
    yield sleeper.pid
    (group / "freezer.state").write_text("THAWED")
    sleeper.kill()
    sleeper.wait()
    wait_until("empty cgroup", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_process_that_stands_still_in_the_kernel_is_told_of(frozen: int) -> None:
    looking, now = host(limits={"stuck-process-s": 100.0}), time.time()

    def stuck(at: float) -> list[Finding]:
        return [f for f in looking.look(now + at) if f.device == f"pid {frozen}"]

    assert [stuck(at) for at in (0, 60)] == [[], []]
    (finding,) = stuck(120)
    assert finding.code == "process-stuck"
    assert "sleep" in finding.message
    assert "120 s" in finding.message


def test_disks_that_other_nodes_see_are_left_to_the_storage_probe(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "22 1 0:21 / / rw - ext4 /dev/sda rw\n"
        "30 22 0:30 / /home rw shared:1 - nfs4 server:/home rw\n"
        "31 30 0:31 / /home/local rw - xfs /dev/sdb rw\n"
    )
    shared = {
        path: _is_shared(path, tmp_path)
        for path in ("/tmp", "/home", "/homely", "/home/a/b", "/home/local/x")
    }
    assert shared == {
        "/tmp": False,
        "/home": True,
        "/homely": False,
        "/home/a/b": True,
        "/home/local/x": False,
    }


def test_uncorrectable_memory_errors_count_from_the_first_look(tmp_path: Path) -> None:
    count = tmp_path / "sys/devices/system/edac/mc/mc0/ue_count"
    count.parent.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    count.write_text("5\n")
    looking, now = host(tmp_path), time.time()
    found = []
    for value in ("5\n", "6\n"):
        count.write_text(value)
        found.append([f for f in looking.look(now) if f.code == "memory-uncorrectable"])
    assert found[0] == []
    assert [(f.verdict, f.kind) for f in found[1]] == [(Verdict.BAD, "hardware")]


# Storage.


def test_a_path_that_works_is_written_to_and_nothing_is_left(tmp_path: Path) -> None:
    looking = StorageProbe(Context(node="n1", paths=[str(tmp_path)], data_paths=["/proc"]))
    assert [looking.look(time.time()) for _ in range(3)] == [[], [], []]
    assert list(tmp_path.iterdir()) == []


def test_storage_that_is_missing_full_or_almost_so_is_told_of(tmp_path: Path) -> None:
    looking = StorageProbe(
        Context(paths=[str(tmp_path / "no")], data_paths=[str(tmp_path)], thresholds={"storage-used": 0.0})
    )
    found = {f.code: f for f in looking.look(time.time())}
    assert {(code, f.device, f.kind) for code, f in found.items()} == {
        ("storage-error", str(tmp_path / "no"), "storage"), ("storage-full", str(tmp_path), "storage"),
    }  # fmt: skip


def mount(kind: str, target: Path, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"jurymast-test", str(target).encode(), kind.encode(), 0, options.encode()):
        pytest.skip(f"cannot mount {kind}: {os.strerror(ctypes.get_errno())}")


def unmount(target: Path) -> None:
    detach = 2
    ctypes.CDLL(None, use_errno=True).umount2(str(target).encode(), detach)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page."""
    target = tmp_path / "small"
    target.mkdir()
    mount("tmpfs", target, "size=4k,nr_inodes=10")
    yield target
    unmount(target)


def test_a_full_file_system_cannot_be_written_to(small: Path) -> None:
    looking = StorageProbe(Context(paths=[str(small)], thresholds={"storage-used": 2.0}))
    assert looking.look(time.time()) == []  # writes no more than a page
    (small / "filler").write_bytes(b"x" * 4096)
    full = StorageProbe(Context(paths=[str(small)], thresholds={"storage-used": 2.0}))
    assert [(f.code, f.verdict) for f in full.look(time.time())] == [("storage-full", Verdict.SUSPECT)]


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A file system whose server never answers, and the descriptor that ends it: FUSE."""
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip("needs root and FUSE")
    target = tmp_path / "silent"
    target.mkdir()
    mount("fuse", target, f"fd={server},rootmode=40000,user_id=0,group_id=0")
    yield target, server
    unmount(target)
    os.close(server)


def test_storage_that_hangs_is_told_of_the_rest_is_looked_at_and_it_may_come_back(
    silent: tuple[Path, int], tmp_path: Path
) -> None:
    target, server = silent
    looking = StorageProbe(
        Context(paths=[str(tmp_path)], data_paths=[str(target)], thresholds={"storage-slow-s": 0.2})
    )
    for _ in range(2):
        assert [(f.code, f.device, f.kind) for f in looking.look(time.time())] == [
            ("storage-hangs", str(target), "storage")
        ]
    os.dup2(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), server)  # the server is gone: no more hang
    wait_until("answer", lambda: codes(looking.look(time.time())) == [("storage-error", "suspect")])
    unmount(target)
    wait_until("recovery", lambda: looking.look(time.time()) == [])


def test_a_driver_s_probe_that_waits_for_storage_blames_no_node(
    silent: tuple[Path, int], tmp_path: Path
) -> None:
    """A look may import modules from the storage that hangs: that is not the driver."""
    (tmp_path / "package").mkdir()
    acme = Acme(tmp_path / "package", "nvidia")
    acme.tell("nvidia", f"stat {silent[0]}")
    done = subprocess.run(
        [sys.executable, "-m", "jurymast", "health", "--probe", "nvidia", "--limit", "3", "--json"],
        env={**os.environ, "PYTHONPATH": acme.python_path}, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], finding["verdict"], finding["kind"]) == (
        "driver-wedged",
        "unknown",
        "storage",
    ), finding


@pytest.mark.parametrize(
    ("where", "storage"),
    [
        ("rpc_wait_bit_killable", True),
        ("nfs4_do_close", True),
        ("ptlrpc_set_wait", True),
        ("folio_wait_bit_common", True),
        ("nvidia_unlocked_ioctl", False),
        ("os_acquire_mutex", False),
        ("do_sys_poll", False),
        ("", False),
    ],
)
def test_where_the_kernel_holds_a_process_tells_what_it_waits_for(where: str, storage: bool) -> None:
    assert waits_for_storage(where) is storage


def test_the_baselines_of_the_host_outlive_the_process(tmp_path: Path) -> None:
    """Memory errors, messages that were read already, and what was short at the start."""
    count = tmp_path / "sys/devices/system/edac/mc/mc0/ue_count"
    count.parent.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    line = "watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [python:99]"
    (tmp_path / "dev/kmsg").write_text(f"3,7,{us},-;{line}\n")
    count.write_text("5\n")
    limits = {**EASY, "shm-used": 0.0}
    context, now = Context(thresholds=limits, started_at=time.time() - 60), time.time()
    first = HostProbe(context, tmp_path)
    assert {("shm-full", "suspect"), ("cpu-lockup", "suspect")} <= set(codes(first.look(now)))
    memory = json.loads(json.dumps(first.remember()))
    first.close()
    count.write_text("6\n")
    with (tmp_path / "dev/kmsg").open("a") as log:
        log.write(f"3,8,{us},-;{line.replace('17', '18')}\n")
    second = HostProbe(replace(context, memory=memory, fresh=False), tmp_path)
    found = second.look(now + 10)
    assert {("shm-full", "suspect"), ("memory-uncorrectable", "bad")} <= set(codes(found))
    assert [f.device for f in found if f.code == "cpu-lockup"] == ["CPU#18"]
    count.unlink()
    assert ("memory-uncorrectable", "bad") in codes(second.look(now + 20)), "what cannot be read is not over"
    second.close()
