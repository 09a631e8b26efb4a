"""The probe: all checks of the job's GPUs every 15 s, and the driver's events every second."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pynvml

from jurymast.health.probe import Context, Finding, Verdict, threshold, xid_finding
from jurymast.reference import recovery_action
from jurymast_nvidia import checks, nvml, visible
from jurymast_nvidia.checks import RECOVERY_ACTION, Watched
from jurymast_nvidia.nvml import Gpu, NvmlError, Problem

NAME = "nvidia"
BATCH_S = 15.0
EVENTS_S = 1.0
EVENTS_MAX = 100  # in one look: a GPU can repeat an event forever
XID = pynvml.nvmlEventTypeXidCriticalError
XID_RECOVERY_ACTION = 154
# Xids are reported as they are. The other events only trigger the next batch of checks, which finds their
# cause.
EVENTS = XID | 0x2 | 0x4000 | 0x8000  # double-bit ECC error, GPU unavailable, recovery action


class NvidiaProbe:
    """Looks at the job's GPUs; created after `nvml.start`. `gpus` are the job's; `expected` is how many it
    should have, 0 if that is not known.

    Raises NvmlError if the GPUs cannot be counted.
    """

    name = NAME
    interval_s = EVENTS_S

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: dict[tuple[str, str], float] = {}
        self._standing: list[Finding] = []
        self._due = 0.0
        self._events: Any = None
        self._waiting_failed = False
        indices, named = self._find()
        self.expected = (context.gpus or 0) if named is None else named
        self.gpus = [Watched(Gpu(index), partial(threshold, context)) for index in indices]
        self._by_address: dict[int, Gpu] = {}

    def look(self, now: float) -> Sequence[Finding]:
        events = [*self._new_events(now)]
        if now >= self._due or now < self._due - BATCH_S:  # or the clock was set back
            self._due = now + BATCH_S
            self._standing = self.batch(now)
        return [*(event for event in events if event.verdict is not Verdict.OK), *self._standing]

    def close(self) -> None:
        with suppress(NvmlError):
            if self._events is not None:
                pynvml.nvmlEventSetFree(self._events)
            nvml.stop()

    # Which GPUs.

    def _find(self) -> tuple[list[int], int | None]:
        reachable = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                pynvml.nvmlDeviceGetHandleByIndex(index)
            except NvmlError as error:
                if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
                    continue
            reachable.append(index)
        return visible.of_this_job(reachable, os.environ.get("CUDA_VISIBLE_DEVICES"), _uuid)

    def _reach(self, watched: Watched, at: float) -> Iterator[Problem]:
        """Read the fields for the following checks, which raises NvmlError for a GPU that is gone."""
        gpu = watched.gpu
        if gpu.handle is None:
            gpu.open(checks.FIELDS, checks.LINK_FIELDS)
            self._by_address[nvml.address(gpu.handle)] = gpu
            watched.deaf = self._listen(gpu)
        gpu.read_fields()
        yield from ()

    def _listen(self, gpu: Gpu) -> str:
        """Register for the GPU's events; returns why they cannot be received, or ""."""
        try:
            if self._events is None:
                self._events = pynvml.nvmlEventSetCreate()
            supported = gpu.ask("nvmlDeviceGetSupportedEventTypes")
            gpu.ask("nvmlDeviceRegisterEvents", supported & EVENTS, self._events)
        except NvmlError as error:
            return str(error)
        return "" if supported & XID else "the driver has no such events"

    # Events.

    def _new_events(self, now: float) -> Iterator[Finding]:
        if self._events is None:
            return
        for _ in range(EVENTS_MAX):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except NvmlError as error:
                failed = error.value != pynvml.NVML_ERROR_TIMEOUT  # a lost GPU, for example
                if failed and not self._waiting_failed:
                    self._due = now
                self._waiting_failed = failed
                return
            self._due = now
            if event.eventType & XID:
                gpu = self._by_address.get(nvml.address(event.device))
                code = int(event.eventData)
                if gpu is None:
                    yield xid_finding(code, "", "", now, self._context)
                    continue
                text = f"PCI {gpu.bus}"
                if code == XID_RECOVERY_ACTION:
                    text += f", GPU recovery action changed to {_recommended(gpu)}"
                yield xid_finding(code, gpu.name, text, now, self._context)

    # The batch.

    def batch(self, now: float) -> list[Finding]:
        """The findings of all checks. A finding's `at` is when it was first seen."""
        before, self._since, found = self._since, {}, []
        for device, bus, problem in self._problems(now):
            key = problem.code, device
            if key in self._since:
                continue
            self._since[key] = before.get(key, now)
            where = f" (PCI {bus})" if bus else ""
            found.append(
                Finding(
                    probe=NAME, code=problem.code, verdict=problem.verdict, kind=problem.kind, device=device,
                    message=f"{problem.message}{where}", at=self._since[key],
                )
            )  # fmt: skip
        return found

    def _problems(self, now: float) -> Iterator[tuple[str, str, Problem]]:
        """(device, PCI address, problem), the worst first if a code has several."""
        yield from (("", "", problem) for problem in self._count_gpus())
        for watched in self.gpus:
            found = self._check(watched, now)
            found.sort(key=lambda problem: problem.verdict is not Verdict.BAD)
            yield from ((watched.gpu.name, watched.gpu.bus, problem) for problem in found)
        yield from self._compare_links()

    def _check(self, watched: Watched, now: float) -> list[Problem]:
        """Run all checks of one GPU; if it is gone, the rest is skipped."""
        found: list[Problem] = []
        for name, check in (("GPU", self._reach), *checks.CHECKS):
            problems, gone = checks.attempt(name, check, watched, now)
            found += problems
            if gone or watched.gpu.handle is None:
                break
        return found

    def _count_gpus(self) -> Iterator[Problem]:
        """Compare the number of GPUs with what Slurm granted, and with what was present at the start."""
        try:
            there = pynvml.nvmlDeviceGetCount()
        except NvmlError as error:
            problem = nvml.problem_of(error, "GPU count")
            yield from [problem] if problem else []
            return
        seen = len(self.gpus)
        if seen < self.expected:
            yield Problem(
                "gpu-missing", Verdict.BAD, f"{seen} of {self.expected} GPUs granted here are present"
            )
        elif self.gpus and there <= max(watched.gpu.index for watched in self.gpus):
            yield Problem(
                "gpu-missing", Verdict.BAD, f"only {there} of the GPUs present at the start are left"
            )

    def _compare_links(self) -> Iterator[tuple[str, str, Problem]]:
        """Find GPUs with fewer active NVLinks at the start than the node's other GPUs. A GPU without any may
        have none wired."""
        up = {watched.gpu: len(watched.links_at_first or ()) for watched in self.gpus}
        most = max(up.values(), default=0)
        for gpu, links in up.items():
            if 0 < links < most:
                words = f"{links} NVLinks are up, but {most} on other GPUs of this node"
                yield gpu.name, gpu.bus, Problem("gpu-nvlink-missing", Verdict.SUSPECT, words)


def _recommended(gpu: Gpu) -> str:
    """What the driver recommends now, in the words of Xid 154 in the kernel log."""
    try:
        gpu.read_fields()
        action = int(gpu.field(RECOVERY_ACTION))
    except NvmlError as error:
        return f"one that cannot be read ({error})"
    return f"{action:#x} ({recovery_action(action).words})"


def _uuid(index: int) -> str:
    try:
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
    except NvmlError:
        return ""
