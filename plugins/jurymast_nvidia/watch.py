"""The probe: all checks of the job's GPUs every 15 s, and the driver's events every second."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pynvml

from jurymast.health.grant import UNSURE, Counts
from jurymast.health.probe import Context, Finding, Verdict, doubtful, threshold, xid_finding
from jurymast.reference import recovery_action
from jurymast_nvidia import checks, nvml, visible
from jurymast_nvidia.checks import RECOVERY_ACTION, Watched
from jurymast_nvidia.nvml import LOST, Gpu, NvmlError, Problem

NAME = "nvidia"
BATCH_S = 15.0
EVENTS_S = 1.0
EVENTS_MAX = 100  # in one look: a GPU can repeat an event forever
XID = pynvml.nvmlEventTypeXidCriticalError
XID_RECOVERY_ACTION = 154
# Xids are reported as they are. The other events only trigger the next batch of checks, which finds their
# cause.
WHOLE_GPU = 0xFFFFFFFF  # instead of the number of a GPU instance (MIG)
EVENTS = XID | 0x2 | 0x4000 | 0x8000  # double-bit ECC error, GPU unavailable, recovery action


class NvidiaProbe:
    """Looks at the job's GPUs; created after `nvml.start`. `gpus` are the job's; `expected` is how many it
    should have, 0 if that is not known.

    What is remembered of a GPU belongs to its PCI address: the driver's numbers change when a GPU is gone.
    Raises NvmlError if the GPUs cannot be counted, and KeyError, TypeError or ValueError if the context's
    memory is not what `remember` returned.
    """

    name = NAME
    interval_s = EVENTS_S

    def __init__(self, context: Context) -> None:
        self._context = context
        self._since: dict[tuple[str, str], float] = {}
        self._standing: list[Finding] = []
        self._joules: dict[str, float] = {}  # by PCI address
        self._due = 0.0
        self._events: Any = None
        self._waiting_failed = False
        present, seen = pynvml.nvmlDeviceGetCount(), visible.openable()
        choice = visible.of_this_job(seen, os.environ.get("CUDA_VISIBLE_DEVICES"), context.gpus)
        self._counts = Counts(
            granted=context.gpus, present=present, openable=len(seen), parts=visible.parts(seen),
            named=choice.named, found=choice.found,
        )  # fmt: skip
        self._sure = choice.sure
        self.expected = choice.named or context.gpus or 0
        self._own = {chosen.index: chosen.instances for chosen in choice.gpus}
        limit = partial(threshold, context)
        self.gpus = [Watched(Gpu(chosen.index), limit, shared=not chosen.alone) for chosen in choice.gpus]
        self._by_address: dict[int, Watched] = {}
        self._memory: dict[str, Any] = {}  # by PCI address
        self._gone: dict[str, Watched] = {}  # GPUs of an earlier process that are no longer listed
        if context.memory is not None:
            self._recall(dict(context.memory["gpus"]), {gpu.index: gpu.bus for gpu in seen})

    def _recall(self, memory: dict[str, Any], addresses: Mapping[int, str]) -> None:
        """Go on where an earlier process was. `addresses`: of GPUs, by their number now."""
        numbers = {int(one["index"]): address for address, one in memory.items()}
        for watched in self.gpus:
            # One that does not answer is the one that had its number.
            address = addresses[watched.gpu.index] or numbers.get(watched.gpu.index, "")
            if address in memory:
                watched.recall(memory[address])
                self._memory[address] = memory.pop(address)
        for address, one in memory.items():
            gone = self._gone[address] = Watched(Gpu(int(one["index"])), partial(threshold, self._context))
            gone.recall(one)
            gone.gpu.bus = address
            self._memory[address] = one
        self.expected = max(self.expected, len(self._memory))

    def remember(self) -> Any:
        """The baselines, and what holds, of each GPU by its PCI address."""
        return {"gpus": self._memory}

    def look(self, now: float) -> Sequence[Finding]:
        events = [*self._new_events(now)]
        if now >= self._due or now < self._due - BATCH_S:  # or the clock was set back
            self._due = now + BATCH_S
            self._standing = self.batch(now)
            self._joules.update(self._read_joules())
        found = [*(event for event in events if event.verdict is not Verdict.OK), *self._standing]
        return found if self._sure else [doubtful(one, UNSURE) if one.device else one for one in found]

    def energy(self) -> Mapping[str, float]:
        """What each GPU that is the job's alone has used since its driver was loaded, in joules."""
        return self._joules

    def _read_joules(self) -> Iterator[tuple[str, float]]:
        for watched in self.gpus:
            gpu = watched.gpu
            if gpu.handle is not None and not watched.shared:
                with suppress(NvmlError):
                    yield gpu.bus or gpu.name, gpu.ask("nvmlDeviceGetTotalEnergyConsumption") / 1000.0

    def close(self) -> None:
        with suppress(NvmlError):
            if self._events is not None:
                pynvml.nvmlEventSetFree(self._events)
            nvml.stop()

    # Reaching GPUs.

    def _reach(self, watched: Watched, at: float) -> Iterator[Problem]:
        """Read the fields for the following checks, which raises NvmlError for a GPU that is gone."""
        gpu = watched.gpu
        if gpu.handle is None:
            gpu.open(checks.FIELDS, checks.LINK_FIELDS)
            self._by_address[nvml.address(gpu.handle)] = watched
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
                finding = self._xid(event, now)
                if finding is not None:
                    yield finding

    def _xid(self, event: Any, now: float) -> Finding | None:
        """The finding for one event; None if it concerns another job's part of a GPU."""
        watched = self._by_address.get(nvml.address(event.device))
        code = int(event.eventData)
        if watched is None:
            said = xid_finding(code, "", "", now, self._context)
            return doubtful(said, "the driver does not say which GPU it concerns")
        gpu, own = watched.gpu, self._own.get(watched.gpu.index)
        text = f"PCI {gpu.bus}"
        if code == XID_RECOVERY_ACTION:
            text += f", GPU recovery action changed to {_recommended(gpu)}"
        finding = xid_finding(code, gpu.name, text, now, self._context)
        if event.gpuInstanceId == WHOLE_GPU or own is None:
            return finding
        if own:
            return finding if event.gpuInstanceId in own else None
        return doubtful(finding, "it concerns a part of the GPU that may be another job's")

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
        for watched in (*self.gpus, *self._gone.values()):
            if watched.gpu.bus in self._gone:
                found = [LOST, *(problem for before in watched.found.values() for problem in before)]
            else:
                found = self._check(watched, now)
            found.sort(key=lambda problem: problem.verdict is not Verdict.BAD)
            yield from ((watched.gpu.name, watched.gpu.bus, problem) for problem in found)
        yield from self._compare_links()

    def _check(self, watched: Watched, now: float) -> list[Problem]:
        """Run all checks of one GPU; if it is gone, what the rest found before still holds."""
        found: list[Problem] = []
        gone = False
        for name, check in (("GPU", self._reach), *checks.CHECKS):
            if gone:
                found += watched.found.get(name, [])
                continue
            problems, gone = checks.attempt(name, check, watched, now)
            found += problems
            gone = gone or watched.gpu.handle is None
        if watched.gpu.bus:
            self._memory[watched.gpu.bus] = watched.remember()
        return found

    def _count_gpus(self) -> Iterator[Problem]:
        """Compare the number of GPUs with what Slurm granted, and with what was present at the start."""
        try:
            there = pynvml.nvmlDeviceGetCount()
        except NvmlError as error:
            problem = nvml.problem_of(error, "GPU count")
            yield from [problem] if problem else []
            return
        missing = self._counts.missing()
        if missing is not None:
            yield Problem("gpu-missing", *missing)
        elif there < self._counts.present == len(self.gpus):  # others' GPUs are not this job's
            yield Problem(
                "gpu-missing", Verdict.BAD, f"only {there} of the GPUs present at the start are left"
            )
        elif self._gone:
            there = self.expected - len(self._gone)
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
