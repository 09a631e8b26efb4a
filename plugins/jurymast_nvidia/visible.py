"""Finds the job's GPUs among those of this machine: what CUDA_VISIBLE_DEVICES names, and whole GPUs or MIG
instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pynvml

from jurymast.health.grant import all_are_ours, named_in
from jurymast_nvidia.nvml import NvmlError, bus_of


@dataclass
class Seen:
    """One GPU as the driver lists it. `bus`: its PCI address, "" if the driver does not say it; `instances`:
    its MIG instances, {uuid: GPU instance}, empty if it is not divided; None if they cannot be seen."""

    index: int
    uuid: str = ""
    bus: str = ""
    instances: dict[str, int] | None = field(default_factory=dict)


@dataclass
class Chosen:
    """A GPU of the job. `instances`: those GPU instances of it that are the job's, None for the whole GPU;
    `alone`: nobody else can have a part of it."""

    index: int
    instances: set[int] | None = None
    alone: bool = True


@dataclass
class Choice:
    """The job's GPUs, sorted by index. Of whole GPUs, the variable names `named`, of which `found` exist;
    both 0 if it is not set, or names instances. `sure`: whether all of them are known to be the job's."""

    gpus: list[Chosen]
    named: int = 0
    found: int = 0
    sure: bool = True


def openable() -> list[Seen]:
    """The GPUs that this user may open. Raises NvmlError if they cannot be counted."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except NvmlError as error:
            if error.value != pynvml.NVML_ERROR_NO_PERMISSION:
                found.append(Seen(index))
            continue
        found.append(Seen(index, _uuid(handle), _bus(handle), _instances(handle)))
    return found


def parts(seen: Sequence[Seen]) -> int | None:
    """Into how many these GPUs are divided, with one for each whole GPU; None if it cannot be seen."""
    if any(gpu.instances is None for gpu in seen):
        return None
    return sum(max(1, len(gpu.instances or ())) for gpu in seen)


def of_this_job(seen: Sequence[Seen], visible: str | None, granted: int | None) -> Choice:
    """Return the job's GPUs. `seen`: those that this user may open. `visible`: CUDA_VISIBLE_DEVICES, which
    numbers them, or names them or MIG instances by their uuid or its beginning. Among GPUs of one kind, CUDA
    and NVML both number by PCI address. Without the variable, or if it names what cannot be found, these are
    all GPUs. `granted`: how many GPUs or instances Slurm granted, None if that is not known."""
    words = named_in(visible)
    if words is None or any(word.startswith("MIG-") for word in words):
        if ours := _instances_of(seen, words or ()):
            return Choice(ours)
        if granted is not None and granted == parts(seen):
            return Choice([Chosen(gpu.index) for gpu in seen])  # all parts were granted to this job
        sure = all_are_ours(granted, parts(seen)) if words is None else len(seen) == 1
        return Choice([_whole(gpu) for gpu in seen], sure=sure)
    chosen: set[int] = set()
    found = 0
    for word in words:
        if word.isdigit():
            matching = [gpu.index for gpu in seen[int(word) : int(word) + 1]]
        else:
            matching = [gpu.index for gpu in seen if gpu.uuid and gpu.uuid.startswith(word)]
        found += bool(matching)
        chosen.update(matching)
    return Choice([_whole(gpu) for gpu in seen if gpu.index in chosen], len(words), found)


def _whole(gpu: Seen) -> Chosen:
    """A GPU named as such. If it is divided, CUDA uses an instance of it, and nobody says which."""
    return Chosen(gpu.index, None if gpu.instances == {} else set(), alone=gpu.instances == {})


def _instances_of(seen: Sequence[Seen], words: Sequence[str]) -> list[Chosen]:
    """The GPUs with those instances that are named, as far as they can be found."""
    found = []
    for gpu in seen:
        ours = {
            instance
            for uuid, instance in (gpu.instances or {}).items()
            if any(uuid.startswith(word) or _old_name(word, gpu, instance) for word in words)
        }
        if ours:
            found.append(Chosen(gpu.index, ours, alone=ours == set((gpu.instances or {}).values())))
    return found


def _old_name(word: str, gpu: Seen, instance: int) -> bool:
    """Whether the word names the instance as drivers before R470 do: MIG-GPU-UUID/GPU INSTANCE/COMPUTE
    INSTANCE."""
    uuid, _, rest = word.removeprefix("MIG-").partition("/")
    return bool(gpu.uuid) and uuid == gpu.uuid and rest.partition("/")[0] == str(instance)


def _uuid(handle: object) -> str:
    try:
        return str(pynvml.nvmlDeviceGetUUID(handle))
    except NvmlError:
        return ""


def _bus(handle: object) -> str:
    try:
        return bus_of(handle)
    except NvmlError:
        return ""


def _instances(handle: object) -> dict[str, int] | None:
    """{uuid: GPU instance} of the GPU's MIG instances that this user can see; None if that cannot be told."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return {}
    except NvmlError:  # the driver is older than MIG, or the GPU cannot be divided
        return {}
    found = {}
    try:
        for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except NvmlError as error:
                if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                    raise
                continue
            found[str(pynvml.nvmlDeviceGetUUID(instance))] = pynvml.nvmlDeviceGetGpuInstanceId(instance)
    except NvmlError:
        return None
    return found or None
