"""Finds the job's GPUs among those of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def of_this_job(
    reachable: Sequence[int], visible: str | None, uuid: Callable[[int], str]
) -> tuple[list[int], int | None]:
    """Return (indices of the job's GPUs, how many there should be; None if not known).

    `reachable`: NVML's indices, without GPUs that this user may not open. `visible`: CUDA_VISIBLE_DEVICES,
    which numbers the reachable GPUs or names them by their uuid or its beginning. If it names a MIG instance,
    which is not a whole GPU, all reachable GPUs are returned. Among GPUs of one kind, CUDA and NVML both
    number by PCI address.
    """
    words = [word.strip() for word in (visible or "").split(",") if word.strip()]
    if visible is None:
        return list(reachable), None
    if any(word.startswith("MIG-") for word in words):
        return list(reachable), 0
    found: set[int] = set()
    for word in words:
        if word.isdigit():
            found.update(reachable[int(word) : int(word) + 1])
        elif word.startswith("GPU-"):
            found.update(index for index in reachable if uuid(index).startswith(word))
    return sorted(found), sum(word.isdigit() or word.startswith("GPU-") for word in words)
