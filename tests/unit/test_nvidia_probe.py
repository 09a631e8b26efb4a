"""The nvidia probe through the real pynvml, in a process of its own, over a library that answers as told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import fake_gpus
from support.fake_gpus import EVENT_RECOVERY_ACTION, FakeGpus
from support.looker import BATCH_S, LIMIT_S, PATHS, Found, Looker

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler (cc)")

# Not there in drivers that are some years old.
NEW_CALLS = (
    "nvmlDeviceGetFieldValues", "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetRepairStatus",
    "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetCurrentClocksEventReasons",
)  # fmt: skip
CALLS = (
    *NEW_CALLS,
    "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetNvLinkState", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetPcieReplayCounter", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents", "nvmlDeviceGetPciInfo_v3",
)  # fmt: skip
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 3, 4, 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    return fake_gpus.build(folder / "new")


@pytest.fixture(scope="module")
def shared(folder: Path, library: Path) -> Iterator[tuple[FakeGpus, Looker]]:
    gpus = FakeGpus(folder, gpus=4, library=library)
    looker = Looker(gpus.environment())
    yield gpus, looker
    looker.end()


@pytest.fixture
def gpus(shared: tuple[FakeGpus, Looker]) -> FakeGpus:
    shared[0].clear()
    return shared[0]


@pytest.fixture
def looker(shared: tuple[FakeGpus, Looker], gpus: FakeGpus) -> Iterator[Looker]:
    yield shared[1]
    shared[1].close()


def opened(looker: Looker, visible: str | None = None, **context: object) -> Looker:
    assert looker.open(visible, **context)
    return looker


def test_healthy_gpus_are_no_finding(looker: Looker) -> None:
    opened(looker, gpus=4)
    assert [looker.look() for _ in range(3)] == [[], [], []]


def test_what_each_gpu_has_used_is_read_with_the_checks(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(energy=5_000_000)  # in millijoules
    opened(looker, gpus=4)
    looker.look()
    first = looker.energy()
    assert list(first.values()) == [5000.0] * 4
    gpus.set(2, energy=6_500_000)
    gpus.fail("nvmlDeviceGetTotalEnergyConsumption", NOT_SUPPORTED, 3)
    looker.look(after_s=1.0)  # only events
    assert looker.energy() == first
    looker.look()
    assert sorted(looker.energy().values()) == [5000.0, 5000.0, 5000.0, 6500.0]


def test_a_gpu_that_tells_no_energy_has_used_none(gpus: FakeGpus, looker: Looker) -> None:
    gpus.fail("nvmlDeviceGetTotalEnergyConsumption", NOT_SUPPORTED)
    opened(looker, gpus=4)
    assert looker.look() == []
    assert looker.energy() == {}


STATES: list[tuple[dict[str, int], str, str]] = [
    ({"recovery_action": 1}, "gpu-recovery-action", "bad"),
    ({"recovery_action": 2}, "gpu-recovery-action", "bad"),
    ({"recovery_action": 5}, "gpu-recovery-action", "suspect"),
    ({"recovery_action": 99}, "gpu-recovery-action", "suspect"),
    ({"sram_threshold_exceeded": 1}, "gpu-sram-threshold", "bad"),
    ({"rows_pending": 1}, "gpu-row-remap-pending", "suspect"),
    ({"rows_failed": 1}, "gpu-row-remap-failed", "bad"),
    ({"retired_pages_pending": 1}, "gpu-page-retirement-pending", "suspect"),
    ({"repair_channel": 1}, "gpu-repair-pending", "suspect"),
    ({"repair_tpc": 1}, "gpu-repair-pending", "suspect"),
    ({"pcie_width": 8}, "gpu-pcie-width", "suspect"),
    ({"fabric_state": 1}, "gpu-fabric", "suspect"),
    ({"fabric_state": 2}, "gpu-fabric", "suspect"),
    ({"fabric_status": 999}, "gpu-fabric", "bad"),
    ({"fabric_health": 0b01}, "gpu-fabric", "suspect"),
    ({"fabric_health": 0b01_00_01}, "gpu-fabric", "bad"),  # the worse of two
    ({"fabric_health": 2 << 8}, "gpu-fabric", "suspect"),
    ({"nvlink_state_17": 0}, "gpu-nvlink-missing", "suspect"),  # up on the other GPUs
    ({"lost": 1}, "gpu-lost", "bad"),
]


@pytest.mark.parametrize(("values", "code", "verdict"), STATES, ids=lambda value: str(value))
def test_a_wrong_state_counts_at_the_first_look(
    gpus: FakeGpus, looker: Looker, values: dict[str, int], code: str, verdict: str
) -> None:
    gpus.set(2, **values)
    opened(looker)
    assert looker.found() == [(code, "gpu2", verdict)]


def test_the_message_says_which_gpu_and_the_finding_since_when(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker)
    looker.look()
    gpus.set(3, recovery_action=4)
    first, second = looker.look(), looker.look()
    assert first[0]["message"] == "the driver recommends: Drain and Reset (PCI 00000000:13:00.0)"
    assert first[0]["kind"] == "hardware"
    assert first == second
    assert first[0]["at"] == looker.now - BATCH_S
    gpus.set(3, recovery_action=0)
    assert looker.look() == []


HARMLESS: list[dict[str, int]] = [
    {"ecc_aggregate": 900, "ecc_uncorrectable": 5, "sram_uncorrectable": 7, "pcie_replays": 100_000},
    {"nvlink_crc_errors": 10**9, "nvlink_recoveries": 1000, "nvlink_failed_recoveries": 3},
    {"rows_correctable": 3, "rows_uncorrectable": 2},
    {"pcie_generation": 1, "utilization": 0},
    {"fabric_state": 0, "fabric_health": 0xFFFF},  # no fabric on this machine
    {"fabric_health": 0b10_10_10_10},  # all asked, nothing wrong
    {"nvlink_state": 0},  # wired to nothing
    {"nvlinks": 0},
    {"clocks_event_reasons": 0x8},  # once
    {"temperature_margin": -1},
]


@pytest.mark.parametrize("values", HARMLESS, ids=lambda value: str(value))
def test_history_of_before_and_passing_states_are_no_finding(
    gpus: FakeGpus, looker: Looker, values: dict[str, int]
) -> None:
    gpus.set(1, **values)
    opened(looker)
    assert looker.found() == []
    assert looker.found() == []


GAINS: list[tuple[str, int, int, str, str]] = [
    ("ecc_uncorrectable", 5, 6, "gpu-ecc-uncorrectable", "bad"),
    ("ecc_aggregate", 5, 6, "gpu-ecc-uncorrectable", "bad"),
    ("sram_uncorrectable", 5, 6, "gpu-sram-uncorrectable", "bad"),
    ("nvlink_failed_recoveries_2", 1, 2, "gpu-nvlink-failed-recoveries", "bad"),
    ("nvlink_state_3", 1, 0, "gpu-nvlink-down", "bad"),
]


@pytest.mark.parametrize(("name", "before", "after", "code", "verdict"), GAINS)
def test_what_changes_after_the_first_look_stays_found(
    gpus: FakeGpus, looker: Looker, name: str, before: int, after: int, code: str, verdict: str
) -> None:
    gpus.set(0, **{name: before})
    opened(looker)
    assert looker.found() == []
    gpus.set(0, **{name: after})
    assert looker.found() == [(code, "gpu0", verdict)]
    assert looker.found() == [(code, "gpu0", verdict)]


def test_a_counter_that_a_reset_took_back_starts_anew(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(0, ecc_uncorrectable=5)
    opened(looker)
    looker.look()
    gpus.set(0, ecc_uncorrectable=0)
    assert looker.found() == []
    gpus.set(0, ecc_uncorrectable=1)
    assert looker.found() == [("gpu-ecc-uncorrectable", "gpu0", "bad")]


RATES = [
    ("pcie_replays", 8, 60, "gpu-pcie-replays"),
    ("nvlink_crc_errors_5", 6000, 60, "gpu-nvlink-errors"),
    ("nvlink_received_errors_5", 6000, 60, "gpu-nvlink-errors"),
    ("nvlink_recoveries_5", 3, 600, "gpu-nvlink-recoveries"),
]


@pytest.mark.parametrize(("name", "limit", "window_s", "code"), RATES)
def test_a_counter_that_rises_too_fast_is_suspect_until_it_is_slow(
    gpus: FakeGpus, looker: Looker, name: str, limit: int, window_s: int, code: str
) -> None:
    gpus.set(0, **{name: 50})
    opened(looker)
    looker.look()
    gpus.set(0, **{name: 50 + limit - 1})
    assert looker.found() == []
    gpus.set(0, **{name: 50 + limit})
    assert looker.found() == [(code, "gpu0", "suspect")]
    looker.look(window_s - 1)
    assert looker.found() == []
    looker.look(3600)
    gpus.set(0, **{name: 50 + 2 * limit})
    assert looker.found() == [(code, "gpu0", "suspect")]
    gpus.set(0, **{name: 0})  # a reset
    assert looker.found() == []
    gpus.set(0, **{name: limit})
    assert looker.found() == [(code, "gpu0", "suspect")]


@pytest.mark.parametrize(
    ("bad", "well", "code"),
    [
        ({"clocks_event_reasons": 0x40}, {"clocks_event_reasons": 0x4}, "gpu-throttled"),
        ({"clocks_event_reasons": 0x80}, {"clocks_event_reasons": 0x1}, "gpu-throttled"),
        ({"temperature_margin": 0}, {"temperature_margin": 1}, "gpu-hot"),
    ],
)
def test_slow_or_hot_for_six_of_ten_minutes(
    gpus: FakeGpus, looker: Looker, bad: dict[str, int], well: dict[str, int], code: str
) -> None:
    gpus.set(1, **bad)
    opened(looker)
    assert [looker.found(60) for _ in range(5)] == [[]] * 5
    assert looker.found(60) == [(code, "gpu1", "suspect")]
    gpus.set(1, **well)
    assert looker.found(4 * 60) == [(code, "gpu1", "suspect")]  # six of the last ten minutes, still
    assert looker.found(60) == []


def test_pcie_generation_counts_under_load_in_two_looks(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(1, pcie_generation=3, utilization=90)
    opened(looker)
    assert looker.found() == []
    assert looker.found() == [("gpu-pcie-generation", "gpu1", "suspect")]
    gpus.set(1, utilization=10)
    assert looker.found() == []


def test_a_policy_has_its_own_limits(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker, thresholds={"gpu-ecc-uncorrectable": 3})
    looker.look()
    gpus.set(0, ecc_uncorrectable=2)
    assert looker.found() == []
    gpus.set(0, ecc_uncorrectable=3)
    assert looker.found() == [("gpu-ecc-uncorrectable", "gpu0", "bad")]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND])
def test_what_cannot_be_seen_is_no_finding_that_acts(gpus: FakeGpus, looker: Looker, code: int) -> None:
    for call in CALLS:
        gpus.fail(call, code)
    opened(looker, gpus=4)
    for _ in range(2):
        assert set(looker.found()) == {("gpu-events-unseen", f"gpu{n}", "unknown") for n in range(4)}


@pytest.mark.parametrize("call", CALLS)
def test_one_call_less_leaves_the_others(gpus: FakeGpus, looker: Looker, call: str) -> None:
    gpus.fail(call, NOT_SUPPORTED)
    values = {"rows_failed": 1} if call != "nvmlDeviceGetRemappedRows" else {"pcie_width": 8}
    gpus.set(1, **values)
    opened(looker)
    codes = {code for code, _, verdict in looker.found() if verdict != "unknown"}
    assert codes == ({"gpu-row-remap-failed"} if "rows_failed" in values else {"gpu-pcie-width"})


@pytest.mark.parametrize(
    ("call", "error", "expected"),
    [
        ("nvmlDeviceGetRemappedRows", 15, ("gpu-lost", "gpu1", "bad")),
        ("nvmlDeviceGetHandleByIndex_v2", 15, ("gpu-lost", "gpu1", "bad")),
        ("field.230", 15, ("gpu-lost", "gpu1", "bad")),
        ("nvmlDeviceGetFieldValues", 16, ("gpu-reset-required", "gpu1", "bad")),
        ("nvmlDeviceGetRemappedRows", 14, ("gpu-inforom", "gpu1", "suspect")),
        ("nvmlDeviceGetHandleByIndex_v2", 8, ("gpu-power", "gpu1", "bad")),
        ("nvmlDeviceGetHandleByIndex_v2", 11, ("gpu-interrupts", "gpu1", "suspect")),
        ("nvmlDeviceGetRemappedRows", 18, ("driver-mismatch", "gpu1", "bad")),
        ("nvmlDeviceGetRemappedRows", 999, ("nvml-error", "gpu1", "unknown")),
        ("nvmlDeviceGetHandleByIndex_v2", 999, ("nvml-error", "gpu1", "unknown")),
    ],
)
def test_errors_that_say_something(
    gpus: FakeGpus, looker: Looker, call: str, error: int, expected: Found
) -> None:
    gpus.fail(call, error, gpu=1)
    opened(looker)
    assert looker.found() == [expected]


def test_a_gpu_that_is_gone_is_asked_nothing_more(gpus: FakeGpus, looker: Looker) -> None:
    gpus.fail("nvmlDeviceGetRemappedRows", 15, gpu=1)
    gpus.set(1, pcie_width=8)
    opened(looker)
    assert looker.found() == [("gpu-lost", "gpu1", "bad")]


def test_a_gpu_that_falls_off_and_one_that_comes_back(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(3, lost=1)
    opened(looker, gpus=4)
    assert looker.found() == [("gpu-lost", "gpu3", "bad")]
    gpus.set(0, lost=1)
    gpus.set(3, lost=0)
    assert looker.found() == [("gpu-lost", "gpu0", "bad")]
    gpus.xid(3, 79)
    assert looker.found(1) == [("xid-79", "gpu3", "bad"), ("gpu-lost", "gpu0", "bad")]


# Events.


def test_a_xid_is_told_once_within_a_second_with_its_gpu(gpus: FakeGpus, looker: Looker) -> None:
    gpus.xid(0, 48)  # before anybody listened
    opened(looker)
    assert looker.found() == []
    gpus.xid(2, 79)
    gpus.xid(1, 31)
    gpus.xid(2, 79)
    found = looker.look(1.0)
    assert [(f["code"], f["device"], f["verdict"], f["kind"]) for f in found] == [
        ("xid-79", "gpu2", "bad", "hardware"),
        ("xid-31", "gpu1", "unknown", "application"),
        ("xid-79", "gpu2", "bad", "hardware"),
    ]
    assert all(f["once"] and f["at"] == looker.now for f in found[::2])
    assert "fallen off the bus" in found[0]["message"]
    assert found[0]["message"].endswith("(PCI 00000000:12:00.0)")
    assert looker.found(1.0) == []


def test_a_recovery_action_is_read_into_xid_154(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker)
    looker.look()
    gpus.set(1, recovery_action=2)
    gpus.xid(1, 154)
    assert looker.found(1.0) == [("xid-154", "gpu1", "bad"), ("gpu-recovery-action", "gpu1", "bad")]
    gpus.set(1, recovery_action=0)
    gpus.xid(1, 154)
    assert looker.found(1.0) == [("xid-154", "gpu1", "unknown")]


def test_other_events_bring_the_checks_forward(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker)
    looker.look()
    gpus.set(1, recovery_action=1)
    assert looker.found(1.0) == []
    gpus.event(1, EVENT_RECOVERY_ACTION)
    assert looker.found(1.0) == [("gpu-recovery-action", "gpu1", "bad")]


def test_a_policy_reads_a_xid_in_its_own_way(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker, xid={"79": "ok", "31": "bad"})
    looker.look()
    gpus.xid(1, 79)
    gpus.xid(1, 31)
    assert looker.found(1.0) == [("xid-31", "gpu1", "bad")]


def test_waiting_for_events_may_fail(gpus: FakeGpus, looker: Looker) -> None:
    opened(looker)
    looker.look()
    gpus.fail("nvmlEventSetWait_v2", 15)
    gpus.set(1, lost=1)
    assert looker.found(1.0) == [("gpu-lost", "gpu1", "bad")]


def test_only_the_types_that_there_are_are_asked_for(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(event_types=0x8)
    opened(looker)
    assert looker.found() == []
    gpus.xid(1, 79)
    assert looker.found(1.0) == [("xid-79", "gpu1", "bad")]


def test_no_event_types_means_unseen(gpus: FakeGpus, looker: Looker) -> None:
    gpus.set(1, event_types=0x1)
    opened(looker)
    assert looker.found() == [("gpu-events-unseen", "gpu1", "unknown")]


# Which GPUs.


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("1,2", [1, 2]),
        ("GPU-fa4e0003,0", [0, 3]),
    ],
)
def test_only_the_gpus_of_the_job(
    gpus: FakeGpus, looker: Looker, visible: str | None, seen: list[int]
) -> None:
    gpus.set(rows_failed=1)
    opened(looker, visible, gpus=None if visible is None else len(visible.split(",")))
    assert looker.found() == [("gpu-row-remap-failed", f"gpu{n}", "bad") for n in seen]
    gpus.xid(0, 79)
    assert [code for code, device, _ in looker.found(1.0) if device == "gpu0"].count("xid-79") == (0 in seen)


@pytest.mark.parametrize("visible", [None, "MIG-0a1b2c3d"])
def test_where_nothing_tells_which_gpus_are_the_job_s_none_is_held_against_the_node(
    gpus: FakeGpus, looker: Looker, visible: str | None
) -> None:
    """One was granted, and without a device cgroup all four can be opened."""
    gpus.set(rows_failed=1)
    opened(looker, visible, gpus=1)
    assert looker.found() == [("gpu-row-remap-failed", f"gpu{n}", "unknown") for n in range(4)]
    gpus.xid(0, 79)
    assert ("xid-79", "gpu0", "unknown") in looker.found(1.0)
    assert all("cannot be told which GPUs" in finding["message"] for finding in looker.look(2.0))


def test_gpus_of_others_do_not_count(gpus: FakeGpus, looker: Looker) -> None:
    gpus.fail("nvmlDeviceGetHandleByIndex_v2", NO_PERMISSION, gpu=0)
    gpus.set(rows_failed=1)
    opened(looker, "0,1", gpus=2)
    assert [device for _, device, _ in looker.found()] == ["gpu1", "gpu2"]


@pytest.mark.parametrize(
    ("visible", "granted", "words"),
    [
        (None, 8, "4 of 8 GPUs granted here are present"),
        ("2,3,4", 3, "2 of 3 GPUs granted here are present"),
        ("GPU-fa4e0003,GPU-00000000", None, "1 of 2 GPUs granted here are present"),
    ],
)
def test_fewer_gpus_than_were_granted(
    looker: Looker, visible: str | None, granted: int | None, words: str
) -> None:
    opened(looker, visible, gpus=granted)
    found = looker.look()
    assert [(f["code"], f["verdict"], f["message"]) for f in found] == [("gpu-missing", "bad", words)]


def test_none_granted_and_none_there_is_nothing_to_look_at(looker: Looker) -> None:
    assert not looker.open("")


def test_the_driver_counts_fewer_than_before(folder: Path, library: Path) -> None:
    gpus = FakeGpus(folder / "shrinking", gpus=2, library=library)
    looker = Looker(gpus.environment())
    try:
        opened(looker)
        assert looker.found() == []
        gpus.fail("nvmlDeviceGetCount_v2", 999)
        assert looker.found() == [("nvml-error", "", "unknown")]
        FakeGpus(folder / "shrinking", gpus=1, library=library)
        assert ("gpu-missing", "", "bad") in looker.found()
    finally:
        looker.end()


def test_a_gpu_of_others_that_the_driver_no_longer_counts_is_none_of_this_job_s(
    folder: Path, library: Path
) -> None:
    gpus = FakeGpus(folder / "others", gpus=2, library=library)
    looker = Looker(gpus.environment())
    try:
        opened(looker, "1", gpus=1)
        assert looker.found() == []
        FakeGpus(folder / "others", gpus=1, library=library)
        assert not [one for one in looker.found() if one[0] == "gpu-missing"]
    finally:
        looker.end()


# Where the library or the driver is another one, or none.


def test_an_older_driver_is_seen_as_far_as_it_goes(folder: Path) -> None:
    gpus = FakeGpus(folder / "old", gpus=2, library=fake_gpus.build(folder / "old", without=NEW_CALLS))
    looker = Looker(gpus.environment())
    try:
        gpus.set(1, recovery_action=1, repair_tpc=1, fabric_state=1, rows_failed=1, retired_pages_pending=1)
        opened(looker, gpus=2)
        assert looker.found() == [
            ("gpu-row-remap-failed", "gpu1", "bad"), ("gpu-page-retirement-pending", "gpu1", "suspect"),
        ]  # fmt: skip
        gpus.clear()
        gpus.set(0, ecc_uncorrectable=1, pcie_replays=8)
        assert looker.found() == [
            ("gpu-ecc-uncorrectable", "gpu0", "bad"), ("gpu-pcie-replays", "gpu0", "suspect"),
        ]  # fmt: skip
    finally:
        looker.end()


def test_links_of_gpus_without_the_field_are_asked_for_one_by_one(gpus: FakeGpus, looker: Looker) -> None:
    gpus.fail("field.165", NOT_SUPPORTED)
    opened(looker)
    assert looker.found() == []
    gpus.set(1, nvlink_state_4=0)
    assert looker.found() == [("gpu-nvlink-down", "gpu1", "bad")]


@pytest.mark.parametrize("case", ["no library", "no driver", "no pynvml"])
def test_granted_gpus_that_cannot_be_seen_are_unknown(tmp_path: Path, library: Path, case: str) -> None:
    environment = {"FAKE_NVML_STATE": str(tmp_path / "none")}
    if case != "no library":
        environment["LD_LIBRARY_PATH"] = str(library)
    looker = Looker(environment, ["-S"] if case == "no pynvml" else [])  # -S: without site-packages
    try:
        assert not looker.open()
        opened(looker, gpus=8)
        found = looker.look()
        assert [(f["code"], f["verdict"], f["kind"]) for f in found] == [("gpus-unseen", "unknown", "host")]
        assert found == looker.look()
        assert "8 GPUs were granted here" in found[0]["message"]
    finally:
        looker.end()


def test_a_driver_of_another_version_is_the_hosts_fault(gpus: FakeGpus, looker: Looker) -> None:
    gpus.fail("nvmlInitWithFlags", 18)
    opened(looker)
    found = looker.look()
    assert [(f["code"], f["verdict"], f["kind"]) for f in found] == [("driver-mismatch", "bad", "host")]
    gpus.clear()


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetMarginTemperature", "nvmlDeviceGetFieldValues", "nvmlEventSetWait_v2"]
)
def test_a_driver_that_hangs_holds_the_process_until_it_is_killed(
    tmp_path: Path, library: Path, call: str
) -> None:
    gpus = FakeGpus(tmp_path, gpus=1, library=library)
    looker = Looker(gpus.environment())
    try:
        opened(looker)
        assert looker.found() == []
        gpus.hang(call)
        looker.tell({"do": "look", "now": looker.now + BATCH_S})
        assert not looker.answers(within_s=0.3)
        assert looker.process.poll() is None
        looker.process.kill()
        assert looker.process.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        looker.end()


def test_a_driver_that_crashes_takes_the_process_along(tmp_path: Path, library: Path) -> None:
    gpus = FakeGpus(tmp_path, gpus=1, library=library)
    looker = Looker(gpus.environment())
    try:
        opened(looker)
        gpus.crash("nvmlDeviceGetRemappedRows")
        looker.tell({"do": "look", "now": looker.now})
        assert looker.process.wait(LIMIT_S) == -signal.SIGABRT
    finally:
        looker.end()


# The self-check.


def self_check(gpus: FakeGpus, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jurymast_nvidia", *arguments],
        env={**os.environ, "PYTHONPATH": PATHS, **gpus.environment()},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_the_self_check_shows_raw_answers_and_what_they_cost(tmp_path: Path, library: Path) -> None:
    gpus = FakeGpus(tmp_path, gpus=2, library=library)
    gpus.set(1, rows_failed=1)
    gpus.fail("nvmlDeviceGetRepairStatus", NOT_SUPPORTED)
    done = self_check(gpus, "--json")
    seen = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    checks = {check["check"]: check for check in seen["gpus"][1]["checks"]}
    assert checks["remapped rows"]["answers"] == ["nvmlDeviceGetRemappedRows = (0, 0, 0, 1)"]
    assert checks["remapped rows"]["problems"] == ["a row of memory cannot be remapped: replace the GPU"]
    assert checks["repairs"]["answers"] == ["nvmlDeviceGetRepairStatus = Not Supported"]
    assert [finding["code"] for finding in seen["findings"]] == ["gpu-row-remap-failed"]
    assert 0 < seen["events_us"] < seen["batch_us"]
    gpus.set(0, lost=1)
    text = self_check(gpus).stdout
    assert "bad: it has fallen off the bus" in text
    assert "gpu1 00000000:11:00.0" in text
    assert "us for all checks of 2 GPUs" in text


def test_each_node_of_a_cluster_has_gpus_of_its_own(tmp_path: Path, library: Path) -> None:
    FakeGpus(tmp_path, gpus=1, library=library, state=tmp_path / "n1")
    gpus = FakeGpus(tmp_path, gpus=1, library=library, state=tmp_path / "n2")
    gpus.set(0, rows_failed=1)
    found = {}
    for node in ("n1", "n2"):
        looker = Looker({**gpus.environment(), "FAKE_NVML_STATE": f"{tmp_path}/%n", "SLURMD_NODENAME": node})
        opened(looker)
        found[node] = looker.found()
        looker.end()
    assert found == {"n1": [], "n2": [("gpu-row-remap-failed", "gpu0", "bad")]}


def test_the_self_check_without_a_gpu(tmp_path: Path, library: Path) -> None:
    gpus = FakeGpus(tmp_path, gpus=0, library=library)
    done = self_check(gpus)
    assert done.returncode == 1
    assert done.stderr.startswith("nothing to see: no NVIDIA GPU")
    assert self_check(gpus, "--jason").returncode == 2
