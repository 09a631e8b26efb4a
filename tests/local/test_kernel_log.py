"""What the kernel log comes to: which lines count, and which concern this job's parts of the machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from jurymast.core.state.findings import Finding, Verdict
from jurymast.health.probe import Context
from jurymast_host.kernel_log import KernelLog

ROOT = Path("/")
# (code, verdict, device) of what kernels and drivers really print.
LINES = {
    (
        "xid-79",
        "bad",
        "gpu1",
    ): "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.",
    (
        "xid-31",
        "unknown",
        "0000:aa:00",
    ): "NVRM: Xid (PCI:0000:aa:00): 31, pid=7, name=python, Ch 00000008, MMU Fault",
    (
        "memory-uncorrectable",
        "bad",
        "MC0",
    ): "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0",
    (
        "memory-uncorrectable",
        "bad",
        "",
    ): "Memory failure: 0x3fa2b: recovery action for dirty LRU page: Recovered",
    (
        "machine-check",
        "bad",
        "",
    ): "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 8: be00000000800400",
    ("machine-check-corrected", "unknown", ""): "{1}[Hardware Error]: event severity: corrected",
    ("disk-error", "suspect", "nvme0"): "nvme nvme0: I/O 23 QID 5 timeout, reset controller",
    ("disk-error", "suspect", "sda"): "blk_update_request: I/O error, dev sda, sector 2048 op 0x0:(READ)",
    ("disk-error", "suspect", "dm-3"): "Buffer I/O error on dev dm-3, logical block 0, lost async page write",
    ("disk-error", "suspect", "sda1"): "EXT4-fs error (device sda1): ext4_find_entry:1234: inode #2",
    (
        "disk-error",
        "suspect",
        "nvme1n1",
    ): "XFS (nvme1n1): metadata I/O error in xfs_trans_read_buf_map at daddr 0x8",
    (
        "pcie-fatal",
        "suspect",
        "0000:00:01.0",
    ): "pcieport 0000:00:01.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
    ("cpu-lockup", "suspect", "CPU#17"): "watchdog: BUG: soft lockup - CPU#17 stuck for 23s! [python:99]",
    ("oom-kill", "unknown", ""): "Memory cgroup out of memory: Killed process 99 (python) total-vm:1kB",
    ("oom-kill-host", "unknown", ""): "Out of memory: Killed process 99 (python) total-vm:1kB",
    ("task-blocked", "unknown", ""): "INFO: task python:4242 blocked for more than 122 seconds.",
    ("storage-hangs", "unknown", "filer1"): "nfs: server filer1 not responding, still trying",
    (
        "cpu-throttled",
        "unknown",
        "CPU5",
    ): "mce: CPU5: Package temperature above threshold, cpu clock throttled (total events = 1)",
}
HARMLESS = (
    "n2: left promiscuous mode",
    # A user's process named so that its crash looks like something else.
    "traps: EDAC MC0: 1 UE [4242] trap int3 ip:7f sp:7f error:0",
    "python[7]: segfault at 0 ip 0 sp 0 error 4 in NVRM: Xid (PCI:0000:3b:00): 79",
)
NAME_MAX = 15
# What the kernel says of a process: its name, and maybe a file's or a cgroup's, are any user's choice.
OF_PROCESSES = (
    "{name}[4242]: segfault at 0 ip 000055d0 sp 00007ffd error 4 in {more}[400000+1000]",
    "{name} (4242): Using mlock ulimits for SHM_HUGETLB is deprecated",
    "{name} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "{name}: page allocation failure: order:0, mode:0xcc0, nodemask=(null),cpuset={more},mems_allowed=0",
    "{name}: 4242: potentially unexpected fatal signal 11.",
    "{name}: potentially unexpected fatal signal 11.",
)


KILLED_IN = (
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/slurm/uid_7/job_7,"
    "task_memcg={},task=python,task_memcg=/slurm/uid_7/job_7,task=,pid=99,uid=7"
)
OUR_CGROUP = "/slurm/uid_7/job_7/step_0"


ADDRESSES = ("0000:18:00.0", "0000:3b:00.0", "0000:5d:00.0", "0000:86:00.0")


def kernel_log(
    folder: Path, lines: Sequence[str], *, prefix: str = "3,1,{us},-;", cgroup: str = OUR_CGROUP,
    errors: int = 1, users: Mapping[str, str] | None = None, context: Context | None = None,
    gpus: int = 2, directories: Sequence[str] = ("/",),
) -> list[Finding]:  # fmt: skip
    """What a log with these lines of this moment comes to, for a job that started a minute ago, where the
    kernel has counted so many `errors` of the memory."""
    (folder / "dev").mkdir(parents=True, exist_ok=True)
    count = folder / "sys/devices/system/edac/mc/mc0/ue_count"
    count.parent.mkdir(parents=True)
    count.write_text(f"{errors}\n")
    for address in ADDRESSES[:gpus]:
        (folder / "proc/driver/nvidia/gpus" / address).mkdir(parents=True, exist_ok=True)
    us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    (folder / "dev/kmsg").write_text(
        "".join(f"{prefix.format(us=us)}{line}\n SUBSYSTEM=pci\n" for line in lines)
    )
    context = replace(context or Context(), started_at=time.time() - 60)
    log = KernelLog(folder, context, cgroup, users=users or {}, directories=directories)
    try:
        return list(log.look(time.time()))
    finally:
        log.close()


def test_the_kernel_s_words_come_to_findings(tmp_path: Path) -> None:
    found = kernel_log(tmp_path, [KILLED_IN.format(f"{OUR_CGROUP}/task_0"), *LINES.values()])
    assert [(f.code, f.verdict.value, f.device) for f in found] == list(LINES)
    assert all(f.once and abs(f.at - time.time()) < 60 for f in found)


def test_kills_for_memory_in_other_cgroups_do_not_count(tmp_path: Path) -> None:
    """Those of other jobs, those that the kernel does not place, and those of a cgroup that is unknown."""
    killed = LINES["oom-kill", "unknown", ""]
    ours = KILLED_IN.format(OUR_CGROUP)
    assert [f.code for f in kernel_log(tmp_path / "ours", [ours, killed, killed])] == ["oom-kill"]
    for other in ("/slurm/uid_8/job_8/step_0", f"{OUR_CGROUP}1", "/slurm/uid_7/job_7"):
        assert kernel_log(tmp_path / other[1:], [KILLED_IN.format(other), killed]) == []
    for number, unknown in enumerate(("", "/")):
        assert kernel_log(tmp_path / str(number), [ours, killed], cgroup=unknown) == []


def test_what_users_can_make_the_kernel_say_comes_to_nothing(tmp_path: Path) -> None:
    assert kernel_log(tmp_path, HARMLESS) == []


def test_no_name_of_a_process_makes_the_kernel_say_that_hardware_is_broken(tmp_path: Path) -> None:
    """Not even on a node of which some memory was broken earlier."""
    forged = [
        said.format(name=name, more=line[cut:])
        for line in (*LINES.values(), "EDAC a: 1 UE ")
        for cut in range(NAME_MAX + 1)
        for name in (line[:cut], line[:cut] + r"\x01" * (NAME_MAX - cut))
        for said in OF_PROCESSES
    ]
    assert "EDAC MC0: 1 UE [4242]: segfault at 0" in "\n".join(forged)
    assert kernel_log(tmp_path, forged) == []


def test_a_crash_by_such_a_name_comes_to_nothing() -> None:
    """In earnest, of a name with bytes that the log spells out, which makes it longer than any name."""
    crash = "import ctypes; ctypes.CDLL(None).prctl(15, b'EDAC a: 1 UE \\x01\\x01'); ctypes.string_at(16)"
    log = KernelLog(ROOT, Context(started_at=time.time()))
    with subprocess.Popen([sys.executable, "-c", crash]) as process:
        pass
    if (
        f"UE \\x01\\x01[{process.pid}]: segfault"
        not in subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    ):
        pytest.skip("this kernel's log says nothing of crashes, or is not to be read")
    assert not [finding for finding in log.look(time.time()) if str(process.pid) in finding.message]
    log.close()


def test_broken_memory_that_the_kernel_has_not_counted_is_told_and_blames_nobody(tmp_path: Path) -> None:
    lines = [line for (code, _, _), line in LINES.items() if code == "memory-uncorrectable"]
    assert [f.verdict for f in kernel_log(tmp_path / "text alone", lines, errors=0)] == [Verdict.UNKNOWN] * 2
    (tmp_path / "dropped/proc").mkdir(parents=True)
    (tmp_path / "dropped/proc/meminfo").write_text("MemTotal: 1 kB\nHardwareCorrupted:     4 kB\n")
    assert [f.verdict for f in kernel_log(tmp_path / "dropped", lines, errors=0)] == [Verdict.BAD] * 2


def test_other_processes_words_and_older_ones_do_not_count(tmp_path: Path) -> None:
    assert kernel_log(tmp_path / "daemon", list(LINES.values()), prefix="27,1,{us},-;") == []
    assert kernel_log(tmp_path / "garbled", list(LINES.values()), prefix="x,{us};") == []
    assert kernel_log(tmp_path / "old", list(LINES.values()), prefix="3,1,0,-;") == []


def test_what_comes_after_the_first_look_is_of_this_job_whatever_its_time(tmp_path: Path) -> None:
    """The log's clock is not corrected, so the times of a machine that has run for months are minutes off."""
    (tmp_path / "dev").mkdir()
    messages = tmp_path / "dev/kmsg"
    line = LINES["cpu-lockup", "suspect", "CPU#17"]
    messages.write_text(f"3,7,0,-;{line}\n")
    log = KernelLog(tmp_path, Context(started_at=time.time() - 60))
    first = time.time()
    found = list(log.look(first))
    with messages.open("a") as file:
        file.write(f"3,8,0,-;{line.replace('17', '18')}\n")
    found += log.look(time.time())
    log.close()
    assert [finding.device for finding in found] == ["CPU#18"]
    assert found[0].at >= first


def test_a_log_that_cannot_be_read_is_not_observable(tmp_path: Path) -> None:
    (finding,) = KernelLog(tmp_path, Context()).look(time.time())
    assert (finding.code, finding.verdict) == ("not-observable", Verdict.UNKNOWN)
    assert "/dev/kmsg cannot be read" in finding.message


def test_this_machine_s_log_is_read_to_its_end_without_waiting() -> None:
    log = KernelLog(ROOT, Context(started_at=time.time()))
    assert all(f.code == "not-observable" or f.once for f in log.look(time.time()))
    log.close()


XID_79 = "NVRM: Xid (PCI:0000:{}:00{}): 79, pid=1234, name=python, GPU has fallen off the bus."


def gpu_files(folder: Path, *openable: int, uuids: bool = True) -> None:
    """As the driver describes its four GPUs; device files exist of all, and the job may open these."""
    (folder / "dev").mkdir(parents=True)
    for minor, address in enumerate(ADDRESSES):
        about = folder / "proc/driver/nvidia/gpus" / address
        about.mkdir(parents=True)
        uuid = f"GPU UUID: \t GPU-{minor:08x}-0000\n" if uuids else ""
        (about / "information").write_text(f"Model: \t H100\n{uuid}Device Minor: \t {minor}\n")
        # The kernel refuses this file to everybody, root too.
        file = "/dev/null" if minor in openable else "/proc/sys/vm/compact_memory"
        (folder / f"dev/nvidia{minor}").symlink_to(file)


def xids(folder: Path, users: Mapping[str, str], granted: int | None, instance: str = "") -> list[list[str]]:
    """What an Xid 79 on each of the GPUs comes to: (device, verdict) of the finding, or nothing."""
    lines = [XID_79.format(address[5:7], instance) for address in ADDRESSES]
    context = Context(gpus=granted)
    found = kernel_log(folder, lines, users=users, context=context, gpus=len(ADDRESSES))
    return [[finding.device, finding.verdict.value] for finding in found]


@pytest.mark.parametrize(
    ("openable", "users", "granted", "expected"),
    [
        # A device cgroup shows the job's GPUs, which are numbered from 0.
        ((2, 3), {"CUDA_VISIBLE_DEVICES": "0,1"}, 2, [["gpu0", "bad"], ["gpu1", "bad"]]),
        ((2, 3), {"CUDA_VISIBLE_DEVICES": "1"}, 2, [["gpu1", "bad"]]),
        ((2,), {}, None, [["gpu0", "bad"]]),
        ((), {"CUDA_VISIBLE_DEVICES": "0"}, 1, []),
        # Without one, Slurm's variable says which.
        ((0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "3"}, 1, [["gpu3", "bad"]]),
        ((0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "GPU-00000002-0000"}, 1, [["gpu2", "bad"]]),
        ((0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, []),
        ((0, 1, 2, 3), {}, 4, [[f"gpu{n}", "bad"] for n in range(4)]),
        ((0, 1, 2, 3), {}, None, [[f"gpu{n}", "bad"] for n in range(4)]),
        # Or nothing does.
        ((0, 1, 2, 3), {}, 1, [[f"gpu{n}", "unknown"] for n in range(4)]),
        ((0, 1, 2, 3), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, 1, [[f"gpu{n}", "unknown"] for n in range(4)]),
    ],
)
def test_a_fault_of_another_job_s_gpu_is_not_this_job_s(
    tmp_path: Path, openable: tuple[int, ...], users: dict[str, str], granted: int | None,
    expected: list[list[str]],
) -> None:  # fmt: skip
    gpu_files(tmp_path, *openable)
    assert xids(tmp_path, users, granted) == expected


def test_no_code_of_another_job_s_gpu_is_told(tmp_path: Path) -> None:
    """With nothing but the driver's list of addresses, and the variable that Slurm sets."""
    said = (
        "31, pid=4711, name=python, MMU Fault",
        "79, pid=4711, GPU has fallen off the bus.",
        "94, pid=4711",
    )
    lines = [f"NVRM: Xid (PCI:0000:86:00): {text}" for text in said]
    users = {"CUDA_VISIBLE_DEVICES": "0"}
    assert kernel_log(tmp_path, lines, users=users, context=Context(gpus=1), gpus=4) == []


SWITCHES = (
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 48 sourceport timeout error (First)",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 24007, Severity 1 Engine instance 48 Sub-engine instance 00",
    "NVRM: GPU at PCI:0000:86:00: GPU-00000003-0000",
    "NVRM: GPU Board Serial Number: 1234",
)


@pytest.mark.parametrize("line", SWITCHES)
def test_a_switch_that_several_jobs_share_is_held_against_none(tmp_path: Path, line: str) -> None:
    """What it means for this job's GPUs, their links and their fabric show."""
    assert [f for f in kernel_log(tmp_path, [line], gpus=4) if f.verdict is not Verdict.UNKNOWN] == []


def test_an_xid_of_an_address_that_is_not_known_is_nobody_s(tmp_path: Path) -> None:
    (finding,) = kernel_log(tmp_path, [XID_79.format("aa", "")])
    assert (finding.device, finding.verdict) == ("0000:aa:00", Verdict.UNKNOWN)
    assert "it cannot be told whether this job has the GPU at 0000:aa:00" in finding.message


@pytest.mark.parametrize("instance", [" GPU-I:01", " GPU-I:01 GPU-CI:00"])
@pytest.mark.parametrize(
    ("openable", "expected"), [(True, [["gpu0", "bad"]]), (False, []), (None, [["gpu0", "unknown"]])]
)
def test_a_fault_of_another_job_s_part_of_a_gpu_is_not_this_job_s(
    tmp_path: Path, instance: str, openable: bool | None, expected: list[list[str]]
) -> None:
    gpu_files(tmp_path, 1)
    part = tmp_path / "proc/driver/nvidia/capabilities/gpu1/mig/gi1"
    part.mkdir(parents=True)
    (tmp_path / "dev/nvidia-caps").mkdir()
    if openable is not None:
        (part / "access").write_text("DeviceFileMinor: 12\nDeviceFileMode: 292\n")
        file = "/dev/null" if openable else "/proc/sys/vm/compact_memory"
        (tmp_path / "dev/nvidia-caps/nvidia-cap12").symlink_to(file)
    assert xids(tmp_path, {}, 1, instance) == expected


@pytest.mark.parametrize("users", [{}, {"CUDA_VISIBLE_DEVICES": "MIG-1"}])
@pytest.mark.parametrize("instance", ["", " GPU-I:01"])
@pytest.mark.parametrize(("granted", "verdict"), [(1, "unknown"), (2, "bad")])
def test_of_parts_that_all_jobs_can_open_those_of_this_job_are_not_known(
    tmp_path: Path, users: dict[str, str], instance: str, granted: int, verdict: str
) -> None:
    """Without a device cgroup, a job can open the files of all parts of all GPUs."""
    gpu_files(tmp_path, 1, 2)
    (tmp_path / "dev/nvidia-caps").mkdir()
    for gpu in (1, 2):
        part = tmp_path / f"proc/driver/nvidia/capabilities/gpu{gpu}/mig/gi1"
        part.mkdir(parents=True)
        (part / "access").write_text(f"DeviceFileMinor: {gpu}\n")
        (tmp_path / f"dev/nvidia-caps/nvidia-cap{gpu}").symlink_to("/dev/null")
    assert xids(tmp_path, users, granted, instance) == [["gpu0", verdict], ["gpu1", verdict]]


def test_processors_that_the_job_may_not_use_are_told_and_not_counted(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCpus_allowed_list:\t0-2,17\n")
    lines = [
        LINES["machine-check", "bad", ""], LINES["machine-check", "bad", ""].replace("CPU 3", "CPU 2"),
        LINES["cpu-lockup", "suspect", "CPU#17"],
        LINES["cpu-lockup", "suspect", "CPU#17"].replace("CPU#17", "CPU#3"),
    ]  # fmt: skip
    verdicts = [finding.verdict.value for finding in kernel_log(tmp_path, lines)]
    assert verdicts == ["unknown", "bad", "suspect", "unknown"]
    # A job with one thread of each core has the cores.
    for cpu in (1, 17):
        threads = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        threads.parent.mkdir(parents=True)
        threads.write_text("1,3\n" if cpu == 1 else "17-18\n")
    shutil.rmtree(tmp_path / "sys/devices/system/edac")
    verdicts = [finding.verdict.value for finding in kernel_log(tmp_path, lines)]
    assert verdicts == ["bad", "bad", "suspect", "suspect"]


def test_disks_on_which_the_job_has_nothing_are_told_and_not_counted(tmp_path: Path) -> None:
    """A root on a volume of two partitions, a scratch disk, and others' disks and mounted images."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "22 1 253:0 / / rw - xfs /dev/mapper/root rw\n"
        "23 22 259:1 / /scratch rw - ext4 /dev/nvme1n1p1 rw\n"
        "24 22 8:17 / /other rw - ext4 /dev/sdb1 rw\n"
    )
    (tmp_path / "dev/mapper").mkdir(parents=True)
    (tmp_path / "dev/mapper/root").symlink_to("../dm-0")
    block = tmp_path / "sys/class/block"
    block.mkdir(parents=True)
    for name, place in (
        ("dm-0", "dm-0"), ("sda", "sda"), ("sda2", "sda/sda2"), ("nvme1n1", "nvme1n1"),
        ("nvme1n1p1", "nvme1n1/nvme1n1p1"),
    ):  # fmt: skip
        folder = tmp_path / "sys/devices/block" / place
        folder.mkdir(parents=True)
        (block / name).symlink_to(folder)
        if "/" in place:
            (folder / "partition").write_text("1\n")
    (tmp_path / "sys/devices/block/dm-0/slaves").mkdir()
    (tmp_path / "sys/devices/block/dm-0/slaves/sda2").symlink_to(tmp_path / "sys/devices/block/sda/sda2")
    line = "blk_update_request: I/O error, dev {}, sector 2048 op 0x0:(READ)"
    names = ["dm-0", "sda2", "sda", "nvme1n1p1", "nvme1n1", "sdb1", "sdb", "loop3", "nvme0n1"]
    lines = [
        *(line.format(name) for name in names),
        "nvme nvme1: controller is down",
        "nvme nvme0: controller is down",
    ]
    found = kernel_log(tmp_path, lines, directories=("/", "/scratch/tmp"))
    suspect = [finding.device for finding in found if finding.verdict is Verdict.SUSPECT]
    assert suspect == ["dm-0", "sda2", "sda", "nvme1n1p1", "nvme1n1", "nvme1"]
    assert {finding.verdict for finding in found} == {Verdict.SUSPECT, Verdict.UNKNOWN}
    assert all("not counted" in f.message for f in found if f.verdict is Verdict.UNKNOWN)


def test_an_image_that_a_user_mounted_blames_no_disk(tmp_path: Path) -> None:
    (finding,) = kernel_log(tmp_path, ["EXT4-fs error (device loop0): ext4_find_entry:1234: inode #2"])
    assert finding.verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("address", ["0000:3b:00.0", "0000:3a:01.0"])
def test_a_bus_that_leads_to_another_job_s_gpu_only_is_told_and_not_counted(
    tmp_path: Path, address: str
) -> None:
    line = f"pcieport {address}: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer"
    for number, (mine, verdict) in enumerate((((0,), Verdict.UNKNOWN), ((1,), Verdict.SUSPECT))):
        folder = tmp_path / str(number)
        gpu_files(folder, *mine)
        place = folder / "sys/devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0"
        place.mkdir(parents=True)
        (folder / "sys/bus/pci/devices").mkdir(parents=True)
        (folder / "sys/bus/pci/devices/0000:3b:00.0").symlink_to(place)
        assert [finding.verdict for finding in kernel_log(folder, [line], gpus=4)] == [verdict]
