"""Which parts of the machine are this job's: others on a shared node have theirs, and what happens to those
says nothing about this job's. Each answer is True, False, or None if it cannot be told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jurymast.health.grant import all_are_ours, may_open, named_in
from jurymast.health.readings import number, text


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU. `address`: its PCI address as the driver's directories are named; `minor`: the number
    of its device file, None if it is not known."""

    address: str
    minor: int | None
    uuid: str


class NvidiaGpus:
    """The GPUs by their PCI addresses. `granted`: how many Slurm granted, None if that is not known; `users`:
    the user's variables."""

    def __init__(self, root: Path, granted: int | None, users: Mapping[str, str]) -> None:
        self._root, self._granted = root, granted
        self._all = list(_gpus(root / "proc/driver/nvidia/gpus"))
        allowed = [may_open(self._file(gpu)) for gpu in self._all]
        known = any(one is not None for one in allowed)
        # As NVML numbers them: by PCI address, and only those that may be opened.
        self._openable = [gpu for gpu, one in zip(self._all, allowed, strict=True) if one or not known]
        self._named = self._those_named(named_in(users.get("CUDA_VISIBLE_DEVICES")), granted)

    def at(self, address: str) -> tuple[str, bool | None]:
        """The name ("gpu3", or the address) of the GPU at the address that an Xid names ("0000:3b:00"), and
        whether it is this job's."""
        gpu = next((gpu for gpu in self._all if gpu.address.startswith(address.lower())), None)
        if gpu is None:
            return address, None
        if gpu not in self._openable:
            return address, False
        return f"gpu{self._openable.index(gpu)}", None if self._named is None else gpu in self._named

    def has_instance(self, address: str, instance: int) -> bool | None:
        """Whether this GPU instance (MIG) of the GPU is the job's: each has a file of its own."""
        gpu = next((gpu for gpu in self._all if gpu.address.startswith(address.lower())), None)
        ours = None if gpu is None else self._may_use(gpu, instance)
        return None if ours and self._others_are_usable() else ours

    def is_others(self, addresses: Iterable[str]) -> bool:
        """Whether there are GPUs at these full PCI addresses, and all are other jobs'."""
        asked = {address.lower() for address in addresses}
        found = [self.at(gpu.address)[1] for gpu in self._all if gpu.address in asked]
        return bool(found) and all(ours is False for ours in found)

    @property
    def addresses(self) -> list[str]:
        return [gpu.address for gpu in self._all]

    def _file(self, gpu: Gpu) -> Path:
        return self._root / "dev" / f"nvidia{'-unknown' if gpu.minor is None else gpu.minor}"

    def _those_named(self, words: Sequence[str] | None, granted: int | None) -> list[Gpu] | None:
        """The openable ones that the job was given; None if that cannot be told."""
        if words is None:
            return self._openable if all_are_ours(granted, len(self._openable)) else None
        if any(word.startswith("MIG-") for word in words):
            counts = {gpu.address: self._usable_instances(gpu) for gpu in self._openable}
            known = None not in counts.values() and not self._others_are_usable()
            return [gpu for gpu in self._openable if counts[gpu.address]] if known else None
        found = []
        for word in words:
            if word.isdigit():
                found += self._openable[int(word) : int(word) + 1]
            elif all(gpu.uuid for gpu in self._openable):
                found += [gpu for gpu in self._openable if gpu.uuid.startswith(word)]
            else:
                return None
        return found

    def _capabilities(self, gpu: Gpu) -> Path:
        return self._root / f"proc/driver/nvidia/capabilities/gpu{gpu.minor}/mig"

    def _may_use(self, gpu: Gpu, instance: int) -> bool | None:
        """The driver names the number of the instance's device file: DeviceFileMinor: 12."""
        said = text(self._capabilities(gpu) / f"gi{instance}/access") or ""
        minor = re.search(r"DeviceFileMinor: *(\d+)", said)
        file = self._root / f"dev/nvidia-caps/nvidia-cap{minor[1]}" if minor else None
        return None if file is None else os.access(file, os.R_OK)

    def _usable_instances(self, gpu: Gpu) -> int | None:
        """How many instances of the GPU the job may use; None if it is not known to have any."""
        try:
            numbers = [int(entry.name[2:]) for entry in self._capabilities(gpu).glob("gi*")]
        except ValueError:
            return None
        answers = [self._may_use(gpu, one) for one in numbers]
        return None if not answers or None in answers else sum(map(bool, answers))

    def _others_are_usable(self) -> bool:
        """Whether the job may use more instances than Slurm granted it, so that some are other jobs'."""
        usable = sum(self._usable_instances(gpu) or 0 for gpu in self._openable)
        return self._granted is not None and usable > self._granted


def _gpus(folder: Path) -> Iterator[Gpu]:
    try:
        addresses = sorted(entry.name.lower() for entry in folder.iterdir())
    except OSError:
        return
    for address in addresses:
        said = text(folder / address / "information") or ""
        minor = re.search(r"^Device Minor:\s*(\d+)", said, re.M)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", said, re.M)
        yield Gpu(address, int(minor[1]) if minor else None, uuid[1] if uuid else "")


class Processors:
    """The processors that the job may use, and the other threads of their cores; all, if the kernel does not
    say which."""

    def __init__(self, root: Path) -> None:
        said = re.search(r"^Cpus_allowed_list:\s*(\S+)", text(root / "proc/self/status") or "", re.M)
        allowed = _listed(said[1]) if said else set()
        cores = root / "sys/devices/system/cpu"
        threads = (text(cores / f"cpu{cpu}/topology/thread_siblings_list") or "" for cpu in allowed)
        self._ours = allowed.union(*map(_listed, threads)) if said else None

    def has(self, cpu: int) -> bool:
        return self._ours is None or cpu in self._ours


def _listed(numbers: str) -> set[int]:
    """The numbers in a list of the kernel's: "0-2,17"."""
    found: set[int] = set()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            found.update(range(int(first), int(last or first) + 1))
    return found


class Disks:
    """The block devices below the directories that the job uses, by their names in the kernel: partitions,
    whole disks, what a volume consists of, and the controllers of NVMe disks."""

    def __init__(self, root: Path, directories: Iterable[str]) -> None:
        self._root = root
        self._ours: set[str] = set()
        for source in _sources(text(root / "proc/self/mountinfo") or "", directories):
            self._add(Path(os.path.realpath(root / source.lstrip("/"))).name)

    def has(self, device: str) -> bool:
        """Whether the job uses it. If nothing is known of the job's disks: unless it is a file that somebody
        mounted (loop)."""
        if not self._ours:
            return not device.startswith("loop")
        return device in self._ours

    def _add(self, name: str) -> None:
        if name in self._ours:
            return
        self._ours.add(name)
        if controller := re.match(r"nvme\d+", name):
            self._ours.add(controller[0])
        folder = Path(os.path.realpath(self._root / "sys/class/block" / name))
        if number(folder / "partition") is not None:
            self._add(folder.parent.name)
        for part in folder.glob("slaves/*"):
            self._add(part.name)


def _sources(mountinfo: str, directories: Iterable[str]) -> set[str]:
    """The device files that are mounted where these directories are; see proc(5), mountinfo."""
    mounts = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        if len(before.split()) > 4 and len(after.split()) > 1:
            mounts.append((before.split()[4], after.split()[1]))
    found = set()
    for path in directories:
        inside = [
            (len(mounted), source) for mounted, source in mounts
            if path == mounted or path.startswith(mounted.rstrip("/") + "/")
        ]  # fmt: skip
        if inside:
            found.add(max(inside, key=lambda one: one[0])[1])
    return {source for source in found if source.startswith("/dev/")}
