"""What the scenarios have probes say is what the shipped ones do say, where they see such a thing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jurymast.agent.health import Probing
from jurymast.core.judges.own_health import OFFSETS, WEDGED
from jurymast.core.state import messages as msg
from jurymast.core.state.findings import Finding
from jurymast.health.probe import Context
from jurymast_host import HostProbe
from jurymast_infiniband import InfinibandProbe
from jurymast_nvidia import NAME as NVIDIA
from jurymast_nvidia import _unseen
from jurymast_storage import StorageProbe
from support import fake_gpus
from support.fake_gpus import FakeGpus
from support.findings import FINDINGS, SEEN, Said
from support.looker import Looker
from support.stories import Story
from support.sysfs_trees import Sysfs
from support.waiting import wait_until

GPU_LOOKS = 8  # a minute apart


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> FakeGpus:
    folder = tmp_path_factory.mktemp("nvml")
    return FakeGpus(folder, gpus=2, library=fake_gpus.build(folder / "library"))


@pytest.fixture(scope="module")
def looker(gpus: FakeGpus) -> Iterator[Looker]:
    looker = Looker(gpus.environment())
    yield looker
    looker.end()


@pytest.mark.parametrize(
    ("code", "values"),
    [
        ("gpu-lost", {"lost": 1}),
        ("gpu-sram-uncorrectable", {"sram_uncorrectable": 6}),
        ("gpu-row-remap-pending", {"rows_pending": 1}),
        ("gpu-throttled", {"clocks_event_reasons": 0x40}),
        ("gpu-hot", {"temperature_margin": 0}),
        ("gpu-pcie-width", {"pcie_width": 8}),
        ("gpu-fabric", {"fabric_state": 1}),
    ],
)
def test_of_gpus(gpus: FakeGpus, looker: Looker, code: str, values: dict[str, int]) -> None:
    gpus.clear()
    assert looker.open(None)
    assert looker.look() == []
    gpus.set(1, **values)
    found = [found for _ in range(GPU_LOOKS) for found in looker.look(60.0)]
    looker.close()
    assert {(f["code"], f["probe"], f["verdict"], f["kind"]) for f in found} == {(code, *SEEN[code])}


def said(finding: Finding) -> Said:
    return finding.probe, finding.verdict.value, finding.kind


def of_ports(folder: Path, tree: str, change: Callable[[Sysfs], None]) -> list[Finding]:
    sysfs = Sysfs(folder / "sys", tree)
    probe = InfinibandProbe(Context(), sysfs.root, {})
    probe.look(1e9)
    change(sysfs)
    return [*probe.look(1e9 + 30.0), *probe.look(1e9 + 60.0)]


def one_down(sysfs: Sysfs) -> None:
    sysfs.set("class/infiniband/mlx5_1/ports/1/state", "1: DOWN")


def all_gone(sysfs: Sysfs) -> None:
    for device in (sysfs.root / "class/infiniband").iterdir():
        sysfs.remove(f"class/infiniband/{device.name}")


def all_links_down(sysfs: Sysfs) -> None:
    for device in (sysfs.root / "class/net").iterdir():
        if (device / "operstate").exists():
            sysfs.set(f"class/net/{device.name}/operstate", "down")


@pytest.mark.parametrize(
    ("code", "tree", "change"),
    [
        ("ib-link-down", "infiniband", one_down),
        ("ib-device-gone", "infiniband", all_gone),
        ("net-link-down", "interfaces", all_links_down),
    ],
)
def test_of_networks(tmp_path: Path, code: str, tree: str, change: Callable[[Sysfs], None]) -> None:
    found = of_ports(tmp_path, tree, change)
    assert {said(finding) for finding in found if finding.code == code} == {SEEN[code]}


def of_host(code: str, **limits: float) -> Said:
    """Of a machine on which that gets short while the job runs."""
    probe = HostProbe(Context(thresholds=limits, fresh=False, started_at=time.time()))
    try:
        return next(said(finding) for finding in probe.look(time.time()) if finding.code == code)
    finally:
        probe.close()


def test_of_the_host() -> None:
    assert of_host("memory-low", **{"memory-available": 2.0}) == SEEN["memory-low"]
    assert of_host("shm-full", **{"shm-used": -1.0}) == SEEN["shm-full"]


def test_of_kills_for_want_of_memory(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    events = tmp_path / "sys/fs/cgroup/job/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("oom 0\noom_kill 0\n")
    probe = HostProbe(Context(), tmp_path)
    events.write_text("oom 1\noom_kill 1\n")
    (found,) = [finding for finding in probe.look(time.time()) if finding.once]
    assert (found.code, said(found)) == ("oom-kill", SEEN["oom-kill"])


@pytest.mark.parametrize(
    ("number", "verdict"), [(errno.EIO, "suspect"), (errno.ESTALE, "suspect"), (errno.ENOENT, "unknown")]
)
def test_of_a_disk_beneath_a_directory(monkeypatch: pytest.MonkeyPatch, number: int, verdict: str) -> None:
    """As the kernel tells of it itself, unless the directory is only gone."""
    context = Context(thresholds={"memory-available": 0.0}, fresh=False, started_at=time.time())
    probe = HostProbe(context)

    def fails(path: str) -> os.statvfs_result:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "statvfs", fails)
    found = [finding for finding in probe.look(time.time()) if finding.code == "disk-error"]
    assert {said(finding) for finding in found} == {("host", verdict, "host")}
    assert FINDINGS["disk-error"] == ("host", "suspect", "host")


def test_of_storage(tmp_path: Path) -> None:
    full = StorageProbe(Context(paths=[str(tmp_path)], thresholds={"storage-used": -1.0}))
    assert {(f.code, said(f)) for f in full.look(0.0)} == {("storage-full", SEEN["storage-full"])}
    slow = StorageProbe(Context(paths=[str(tmp_path)], thresholds={"storage-slow-s": 0.0}))
    hangs = wait_until("look too long", lambda: [f for f in slow.look(0.0) if f.code == "storage-hangs"])
    assert said(hangs[0]) == SEEN["storage-hangs"]


def test_of_gpus_that_cannot_be_seen() -> None:
    probe = _unseen(Context(gpus=8), "the test has none")
    assert probe is not None
    (found,) = probe.look(0.0)
    assert (found.code, said(found)) == ("gpus-unseen", SEEN["gpus-unseen"])


def test_of_a_driver_that_hangs() -> None:
    verdict, kind = WEDGED[NVIDIA]
    assert (NVIDIA, verdict.value, kind) == SEEN["driver-wedged"]


def test_of_a_clock(tmp_path: Path) -> None:
    directory = Story().running().write(tmp_path / "run")
    told: list[msg.HealthFound] = []
    probing = Probing(directory, directory.plan(), "n1", told.append)
    for _ in range(OFFSETS):
        probing.clock(time.time() - 3600.0)
    (word,) = told
    found = word.finding
    assert (found.probe, found.verdict.value, found.kind) == SEEN["clock-offset"]


def test_every_code_has_a_look() -> None:
    text = Path(__file__).read_text()
    assert [code for code in SEEN if f'"{code}"' not in text] == []
