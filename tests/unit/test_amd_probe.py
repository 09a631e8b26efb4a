"""The amd probe, over a tree of files as the amdgpu driver shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jurymast.core.state.findings import HARDWARE, Verdict
from jurymast.health.probe import Context, Probe
from jurymast_amd import AmdProbe, gpus
from support.sysfs_trees import Sysfs

CARD = "devices/pci0000:00/0000:00:01.1/0000:c1:00.0"
GPU = f"{CARD}/0000:c2:00.0/0000:c3:00.0"
Said = tuple[str, str, Verdict]


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys", "amd")


def looking(sysfs: Sysfs, context: Context | None = None, **users: str) -> AmdProbe:
    return AmdProbe(context or Context(), sysfs.root, sysfs.root.parent / "dev", users)


def at(probe: AmdProbe, *times: float) -> list[Said]:
    """What the last of these looks said, seconds after the job's start."""
    found = [probe.look(1e9 + t) for t in times][-1]
    assert {finding.kind for finding in found} <= {HARDWARE}
    return sorted((finding.code, finding.device, finding.verdict) for finding in found)


def test_it_is_a_probe(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    assert isinstance(probe, Probe)
    assert [gpu.name for gpu in probe.gpus] == ["gpu0", "gpu1"]


def test_a_machine_without_amd_gpus_has_none(tmp_path: Path) -> None:
    assert gpus(tmp_path) == []


def test_lifetime_counts_are_not_this_job_s(sysfs: Sysfs) -> None:
    """Errors of earlier jobs, retired pages, a page that is about to be retired: all of it stays unsaid."""
    assert at(looking(sysfs), 0, 15, 30, 3600) == []


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("ras/umc_err_count", "ue: 4\nce: 240\nde: 1", ("gpu-ecc-uncorrectable", "gpu0", Verdict.BAD)),
        ("ras/umc_err_count", "ue: 3\nce: 340\nde: 1", ("gpu-ecc-correctable", "gpu0", Verdict.SUSPECT)),
        ("ras/umc_err_count", "ue: 3\nce: 240\nde: 2", ("gpu-ecc-deferred", "gpu0", Verdict.UNKNOWN)),
        ("ras/gfx_err_count", "ue: 1\nce: 2", ("gpu-gfx-uncorrectable", "gpu0", Verdict.BAD)),
        ("ras/xgmi_wafl_err_count", "ue: 1\nce: 0", ("gpu-xgmi-wafl-uncorrectable", "gpu0", Verdict.BAD)),
        (
            "ras/gpu_vram_bad_pages",
            "0x00000001 : 0x00001000 : R\n0x00000009 : 0x00001000 : F",
            ("gpu-page-retirement-failed", "gpu0", Verdict.BAD),
        ),
        ("hwmon/hwmon4/temp2_input", "110000", ("gpu-overheated", "gpu0", Verdict.BAD)),
        ("current_link_width", "8", ("gpu-pcie-width", "gpu0", Verdict.SUSPECT)),
        ("../../current_link_width", "4", ("gpu-pcie-width", "gpu0", Verdict.SUSPECT)),
    ],
)
def test_what_happens_during_the_job(sysfs: Sysfs, file: str, text: str, said: Said) -> None:
    probe = looking(sysfs)
    assert at(probe, 0) == []
    sysfs.set(f"{GPU}/{file}", text)
    assert at(probe, 15) == [said]
    assert at(probe, 30) == [said], "it still holds"


def test_fewer_correctable_errors_than_the_limit(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{GPU}/ras/umc_err_count", "ue: 3\nce: 339\nde: 1")
    assert at(probe, 15) == []
    sysfs.set(f"{GPU}/ras/umc_err_count", "ue: 3\nce: 340\nde: 1")
    assert at(probe, 3610) == [("gpu-ecc-correctable", "gpu0", Verdict.SUSPECT)]
    assert at(probe, 3616) == [], "the first 99 are over an hour old"


def test_newer_drivers_name_their_counts_otherwise(sysfs: Sysfs) -> None:
    sysfs.remove(f"{GPU}/ras/umc_err_count")
    sysfs.set(f"{GPU}/ras/aca_umc", "ue: 3\nce: 0\nde: 0")
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{GPU}/ras/aca_umc", "ue: 4\nce: 0\nde: 0")
    assert at(probe, 15) == [("gpu-ecc-uncorrectable", "gpu0", Verdict.BAD)]


def test_heat_must_last(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{GPU}/hwmon/hwmon4/temp2_input", "105000")
    assert at(probe, 15, 30, 60) == []
    assert at(probe, 75) == [("gpu-hot", "gpu0", Verdict.SUSPECT)]
    sysfs.set(f"{GPU}/hwmon/hwmon4/temp2_input", "104000")
    assert at(probe, 90) == []
    sysfs.set(f"{GPU}/hwmon/hwmon4/temp2_input", "105000")
    assert at(probe, 105, 150) == [], "it begins anew"


def test_a_narrow_slot_is_no_fault_of_the_card(sysfs: Sysfs) -> None:
    sysfs.set("devices/pci0000:00/0000:00:01.1/max_link_width", "8")
    sysfs.set("devices/pci0000:00/0000:00:01.1/current_link_width", "8")
    sysfs.set(f"{CARD}/current_link_width", "8")
    assert at(looking(sysfs), 0) == []
    sysfs.set("devices/pci0000:00/0000:00:01.1/max_link_width", "16")
    assert at(looking(sysfs), 0) == [("gpu-pcie-width", "gpu0", Verdict.SUSPECT)], "known from the start"


def test_a_slow_link_counts_under_load_only(sysfs: Sysfs) -> None:
    sysfs.set(f"{CARD}/current_link_speed", "8.0 GT/s PCIe")
    sysfs.set(f"{GPU}/gpu_busy_percent", "3")
    probe = looking(sysfs)
    assert at(probe, 0, 60, 120) == []
    sysfs.set(f"{GPU}/gpu_busy_percent", "97")
    assert at(probe, 135, 180) == []
    assert at(probe, 195) == [("gpu-pcie-generation", "gpu0", Verdict.SUSPECT)]


def test_a_gpu_that_refuses_to_answer_is_being_reset(sysfs: Sysfs) -> None:
    """The kernel itself refuses here: its file has no right to be read, not even for root."""
    refusing = Path("/proc/sys/vm/compact_memory")
    with pytest.raises(PermissionError):
        refusing.read_bytes()
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.remove(f"{GPU}/gpu_busy_percent")
    (sysfs.root / GPU / "gpu_busy_percent").symlink_to(refusing)
    assert at(probe, 15) == [("gpu-reset", "gpu0", Verdict.SUSPECT)]
    assert at(looking(sysfs), 0) == [], "one that never answered says nothing"


def test_a_gpu_that_is_gone(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.remove(GPU)
    assert at(probe, 15) == [("gpu-lost", "gpu0", Verdict.BAD)]


def test_a_sensor_without_a_limit_says_nothing(sysfs: Sysfs) -> None:
    sysfs.remove(f"{GPU}/hwmon/hwmon4/temp2_crit")
    sysfs.set(f"{GPU}/hwmon/hwmon4/temp2_input", "104000")
    assert at(looking(sysfs), 0, 120) == []


def test_files_that_are_not_there_are_not_known(sysfs: Sysfs) -> None:
    for path in ("ras", "hwmon", "drm"):
        sysfs.remove(f"{GPU}/{path}")
    for path in ("current_link_width", "max_link_width", "current_link_speed", "gpu_busy_percent"):
        sysfs.remove(f"{GPU}/{path}")
    probe = looking(sysfs)
    assert len(probe.gpus) == 2
    assert at(probe, 0, 15) == []


@pytest.mark.parametrize(
    ("users", "names"),
    [
        ({}, ["gpu0", "gpu1"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["gpu1"]),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, ["gpu0", "gpu1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-A1B2C3D4E5F60711"}, ["gpu1"]),
    ],
)
def test_only_the_job_s_gpus_are_looked_at(sysfs: Sysfs, users: dict[str, str], names: list[str]) -> None:
    probe = AmdProbe(Context(), sysfs.root, sysfs.root.parent / "dev", users)
    assert [gpu.name for gpu in probe.gpus] == names
    assert at(probe, 0) == []


def test_fewer_than_were_granted(sysfs: Sysfs) -> None:
    missing = [("gpu-missing", "", Verdict.BAD)]
    assert at(looking(sysfs, Context(gpus=3)), 0) == missing
    assert at(looking(sysfs, ROCR_VISIBLE_DEVICES="0,1,2"), 0) == missing
    assert at(looking(sysfs, Context(gpus=2)), 0) == []


def test_what_the_job_may_not_open_is_somebody_else_s(sysfs: Sysfs) -> None:
    """Numbers count what the job's device cgroup shows: that is how ROCm counts too."""
    nodes = sysfs.root.parent / "dev" / "dri"
    nodes.mkdir(parents=True)
    (nodes / "renderD129").touch()
    probe = looking(sysfs, Context(gpus=1), ROCR_VISIBLE_DEVICES="0")
    assert [gpu.device.name for gpu in probe.gpus] == ["0000:d3:00.0"]
    sysfs.set(f"{GPU}/ras/umc_err_count", "ue: 9\nce: 240\nde: 1")
    assert at(probe, 0, 15) == []


def test_a_user_without_rights_to_any_of_them_still_sees_all(sysfs: Sysfs) -> None:
    """Then the files say nothing about what was granted."""
    (sysfs.root.parent / "dev" / "dri").mkdir(parents=True)
    assert len(looking(sysfs).gpus) == 2


def divide(sysfs: Sysfs, parts: int) -> None:
    """The KFD's topology when each GPU is divided into so many partitions: node 0 is the processor."""
    sysfs_node(sysfs, 0, cpu_cores_count=96, simd_count=0)
    for number in range(2 * parts):
        gpu, part = divmod(number, parts)
        place = (0xC3, 0xD3)[gpu] << 8 | (part << 28 if parts > 1 else 0)
        sysfs_node(
            sysfs, 1 + number, simd_count=304 // parts, location_id=place, domain=0,
            drm_render_minor=128 + number, unique_id=0xA1B2C3D4E5F60710 + gpu + (part << 32),
        )  # fmt: skip


def sysfs_node(sysfs: Sysfs, number: int, **values: int) -> None:
    path = f"class/kfd/kfd/topology/nodes/{number}/properties"
    (sysfs.root / path).parent.mkdir(parents=True)
    sysfs.set(path, "\n".join(f"{name} {value}" for name, value in values.items()))


def device_files(sysfs: Sysfs, *minors: int) -> None:
    folder = sysfs.root.parent / "dev" / "dri"
    folder.mkdir(parents=True)
    for minor in minors:
        (folder / f"renderD{minor}").touch()


MISSING = [("gpu-missing", "", Verdict.BAD)]
UNTOLD = [("gpu-missing", "", Verdict.UNKNOWN)]


@pytest.mark.parametrize(
    ("parts", "granted", "users", "watched", "said"),
    [
        (1, 2, {"HIP_VISIBLE_DEVICES": "0"}, ["gpu0"], []),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "1"}, ["gpu1"], []),
        (1, 2, {"HIP_VISIBLE_DEVICES": "1,0,1", "CUDA_VISIBLE_DEVICES": "0"}, ["gpu0", "gpu1"], []),
        (1, 1, {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gpu1"], []),
        (1, 1, {"ROCR_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, ["gpu1"], []),
        (1, 2, {"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, ["gpu0", "gpu1"], []),
        (1, 2, {"ROCR_VISIBLE_DEVICES": "5"}, ["gpu0", "gpu1"], []),
        (1, 2, {"HIP_VISIBLE_DEVICES": "-1"}, ["gpu0", "gpu1"], []),
        (1, 3, {"HIP_VISIBLE_DEVICES": "0"}, ["gpu0"], MISSING),
        (1, 4, {}, ["gpu0", "gpu1"], MISSING),
        (8, 16, {}, ["gpu0", "gpu1"], []),
        (8, 16, {"ROCR_VISIBLE_DEVICES": ",".join(map(str, range(16)))}, ["gpu0", "gpu1"], []),
        (8, 8, {"ROCR_VISIBLE_DEVICES": "8,9,10,11,12,13,14,15"}, ["gpu1"], []),
        (8, 8, {"ROCR_VISIBLE_DEVICES": "8,9,10", "HIP_VISIBLE_DEVICES": "2"}, ["gpu1"], []),
        (8, 1, {"ROCR_VISIBLE_DEVICES": "GPU-a1b2c3d6e5f60711"}, ["gpu1"], []),
        (8, 24, {}, ["gpu0", "gpu1"], MISSING),
        (0, 16, {}, ["gpu0", "gpu1"], UNTOLD),
    ],
)
def test_like_is_compared_with_like(
    sysfs: Sysfs, parts: int, granted: int, users: dict[str, str], watched: list[str], said: list[Said]
) -> None:
    """Granted by Slurm, named by variables, present, and divided into parts (0: that cannot be seen)."""
    if parts:
        divide(sysfs, parts)
    probe = looking(sysfs, Context(gpus=granted), **users)
    assert [gpu.name for gpu in probe.gpus] == watched
    assert at(probe, 0) == said


def test_partitions_that_the_job_may_not_open_are_somebody_else_s(sysfs: Sysfs) -> None:
    divide(sysfs, 8)
    device_files(sysfs, *range(136, 144))
    probe = looking(sysfs, Context(gpus=8), ROCR_VISIBLE_DEVICES="0,1,2,3,4,5,6,7")
    assert [gpu.device.name for gpu in probe.gpus] == ["0000:d3:00.0"]
    assert at(probe, 0) == []
    assert at(looking(sysfs, Context(gpus=9)), 0) == MISSING


@pytest.mark.parametrize(
    ("users", "granted", "verdict"),
    [
        ({}, 1, Verdict.UNKNOWN), ({}, 2, Verdict.BAD), ({}, None, Verdict.BAD),
        ({"ROCR_VISIBLE_DEVICES": "1"}, 1, None), ({"ROCR_VISIBLE_DEVICES": "0"}, 1, Verdict.BAD),
    ],
)  # fmt: skip
def test_only_what_is_known_to_be_the_job_s_is_held_against_the_node(
    sysfs: Sysfs, users: dict[str, str], granted: int | None, verdict: Verdict | None
) -> None:
    probe = looking(sysfs, Context(gpus=granted), **users)
    at(probe, 0)
    sysfs.set(f"{GPU}/ras/umc_err_count", "ue: 4\nce: 340\nde: 1")
    found = [one[2] for one in at(probe, 15) if one[0] == "gpu-ecc-uncorrectable"]
    assert found == ([] if verdict is None else [verdict])


def test_gpus_that_are_there_but_may_not_be_opened_are_not_missing(sysfs: Sysfs) -> None:
    divide(sysfs, 1)
    device_files(sysfs, 128)
    assert at(looking(sysfs, Context(gpus=2)), 0) == UNTOLD


def next_process(sysfs: Sysfs, probe: AmdProbe) -> AmdProbe:
    return looking(sysfs, Context(memory=json.loads(json.dumps(probe.remember()))))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("ras/umc_err_count", "ue: 4\nce: 340\nde: 1", ["gpu-ecc-correctable", "gpu-ecc-uncorrectable"]),
        ("ras/gpu_vram_bad_pages", "0x00000009 : 0x00001000 : F", ["gpu-page-retirement-failed"]),
        ("hwmon/hwmon4/temp2_input", "105000", ["gpu-hot"]),
        ("current_link_width", "8", ["gpu-pcie-width"]),
    ],
)
def test_what_was_found_survives_the_process_and_files_that_cannot_be_read(
    sysfs: Sysfs, file: str, text: str, said: list[str]
) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{GPU}/{file}", text)
    assert [code for code, _, _ in at(probe, 15, 75)] == said
    probe = next_process(sysfs, probe)
    assert [code for code, _, _ in at(probe, 90)] == said
    for path in (file, "current_link_width", "max_link_width"):
        if (sysfs.root / GPU / path).exists():
            sysfs.remove(f"{GPU}/{path}")
    for above in (CARD, f"{CARD}/0000:c2:00.0", "devices/pci0000:00/0000:00:01.1"):
        sysfs.remove(f"{above}/current_link_width")
    assert [code for code, _, _ in at(next_process(sysfs, probe), 105)] == said
    sysfs.remove(GPU)
    assert [code for code, _, _ in at(next_process(sysfs, probe), 120)] == sorted([*said, "gpu-lost"])


def test_what_happens_while_no_process_looks_is_found_by_the_next(sysfs: Sysfs) -> None:
    probe = looking(sysfs)
    at(probe, 0)
    sysfs.set(f"{GPU}/ras/umc_err_count", "ue: 4\nce: 240\nde: 1")
    assert at(looking(sysfs), 15) == [], "without memory it is the baseline"
    assert at(next_process(sysfs, probe), 15) == [("gpu-ecc-uncorrectable", "gpu0", Verdict.BAD)]
