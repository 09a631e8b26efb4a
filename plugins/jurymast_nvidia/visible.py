"""Which of the GPUs on this machine are the job's."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def of_this_job(
    reachable: Sequence[int], visible: str | None, uuid: Callable[[int], str]
) -> tuple[list[int], int | None]:
    """(indices of the job's GPUs, how many there should be; None: not known).

    `reachable`: NVML's indices, without GPUs that this user may not open. `visible` is CUDA_VISIBLE_DEVICES:
    it counts the reachable ones, or names them by (the beginning of) their uuid. Where it names an instance
    of MIG, which is no whole GPU, all that can be reached are looked at. CUDA counts as NVML does, by PCI
    address, among GPUs of one kind.
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
