"""The checks of one GPU: a function each, listed in CHECKS.

A wrong state counts at once, a counter only by its growth since the first look: most counters are totals of
the GPU's life. A check raises NvmlError if it cannot see, or if the GPU is broken: see `nvml.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jurymast.health.probe import Verdict
from jurymast.reference import recovery_action
from jurymast_nvidia.history import History
from jurymast_nvidia.nvml import GONE, Gpu, NvmlError, Problem, problem_of

Limit = Callable[[str], float]  # by the name of a threshold

# Fields of nvml.h (NVML_FI_DEV_...); those per NVLink have its number as their scope. They are numbers
# because not every nvidia-ml-py has the names.
ECC_VOLATILE, ECC_AGGREGATE, PAGES_PENDING, PCIE_REPLAYS, RECOVERY_ACTION = 4, 6, 31, 94, 230
LINK_STATE = 165
# CRC errors of NVLink 4, packets with errors received by NVLink 5; recoveries of both
LINK_ERRORS = (163, 208)
LINK_RECOVERIES = (162, 215)
LINK_FAILED_RECOVERIES = (214,)
FIELDS = (ECC_VOLATILE, ECC_AGGREGATE, PAGES_PENDING, PCIE_REPLAYS, RECOVERY_ACTION)
LINK_FIELDS = (LINK_STATE, *LINK_ERRORS, *LINK_RECOVERIES, *LINK_FAILED_RECOVERIES)

# nvmlClocksEventReason...
SLOWDOWNS = {0x08: "hardware", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
UNCORRECTED, VOLATILE, AGGREGATE = 1, 0, 1
# Slowdowns and heat are judged over the last ten minutes.
WINDOW_S = 600.0
# States of nvmlGpuFabricInfo: 0 is "no fabric here".
FABRIC_STATES = {1: "has not begun", 2: "is not finished"}
FABRIC_COMPLETED = 3
# (shift, mask, good values, what is wrong with any other) of NVML_GPU_FABRIC_HEALTH_MASK_...
FABRIC_HEALTH = (
    (0, 0x3, (0, 2), "bandwidth is degraded"),
    (2, 0x3, (0, 2), "routes are being recovered"),
    (4, 0x3, (0, 2), "routes are broken"),
    (6, 0x3, (0, 2), "access timeouts are being recovered"),
    (8, 0xF, (0, 1), "its configuration is wrong"),
)
FABRIC_BAD = (4,)  # shifts with the verdict bad


@dataclass
class Watched:
    """A GPU and what is remembered of it. `links_at_first`: its active NVLinks in the first look; `deaf`: why
    its events cannot be received, "" if they can; `shared`: another job may have a part of it; `found`: the
    problems that each check found when it last could look."""

    gpu: Gpu
    limit: Limit
    history: History = field(default_factory=History)
    links_at_first: frozenset[int] | None = None
    deaf: str = ""
    shared: bool = False
    found: dict[str, list[Problem]] = field(default_factory=dict)

    def remember(self) -> Any:
        """What another process needs to judge this GPU as this one would, as JSON, for `recall`."""
        return {
            "index": self.gpu.index, "name": self.gpu.name, "history": self.history.remember(),
            "links": None if self.links_at_first is None else sorted(self.links_at_first),
            "found": {check: [problem.to_json() for problem in found] for check, found in self.found.items()},
        }  # fmt: skip

    def recall(self, memory: Any) -> None:
        """Go on where another process was. Raises KeyError, TypeError or ValueError for anything else than
        what `remember` returned."""
        self.gpu.name = str(memory["name"])
        self.history.recall(memory["history"])
        self.links_at_first = None if memory["links"] is None else frozenset(memory["links"])
        self.found = {
            check: [Problem.from_json(values) for values in found] for check, found in memory["found"].items()
        }


Check = Callable[[Watched, float], Iterator[Problem]]


def attempt(name: str, check: Check, watched: Watched, at: float) -> tuple[list[Problem], bool]:
    """(problems of the check or of its error; whether the GPU is gone). If the check cannot look, what it
    found before still holds. `at`: seconds since the epoch."""
    try:
        found = watched.found[name] = [*check(watched, at)]
    except NvmlError as error:
        problem = problem_of(error, name)
        before = watched.found.get(name, [])
        return [problem, *before] if problem else [*before], error.value in GONE
    return [*found], False


def events(watched: Watched, at: float) -> Iterator[Problem]:
    if watched.deaf:
        yield Problem(
            "gpu-events-unseen", Verdict.UNKNOWN, f"its Xid events cannot be received: {watched.deaf}"
        )


def recommendation(watched: Watched, at: float) -> Iterator[Problem]:
    action = int(watched.gpu.field(RECOVERY_ACTION))
    if action:
        found = recovery_action(action)
        yield Problem("gpu-recovery-action", found.verdict, f"the driver recommends: {found.words}")


def ecc(watched: Watched, at: float) -> Iterator[Problem]:
    """Uncorrectable errors of all memories, since the driver was loaded and over the GPU's life."""
    gained = 0.0
    for number, counter in ((ECC_VOLATILE, VOLATILE), (ECC_AGGREGATE, AGGREGATE)):
        count = watched.gpu.value(number, "nvmlDeviceGetTotalEccErrors", UNCORRECTED, counter)
        gained = max(gained, watched.history.gained(f"ecc {counter}", count))
    yield from _uncorrectable(watched, gained, "gpu-ecc-uncorrectable", "memory errors")


def ecc_sram(watched: Watched, at: float) -> Iterator[Problem]:
    status = watched.gpu.ask_structure("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")
    if status.bThresholdExceeded:
        yield Problem(
            "gpu-sram-threshold", Verdict.BAD, "SRAM errors beyond the vendor's limit: replace the GPU"
        )
    aggregate = status.aggregateUncParity + status.aggregateUncSecDed
    recent = status.volatileUncParity + status.volatileUncSecDed
    gained = max(
        watched.history.gained("sram aggregate", aggregate), watched.history.gained("sram volatile", recent)
    )
    yield from _uncorrectable(watched, gained, "gpu-sram-uncorrectable", "SRAM errors")


def _uncorrectable(watched: Watched, gained: float, code: str, what: str) -> Iterator[Problem]:
    limit = watched.limit("gpu-ecc-uncorrectable")
    if gained and gained >= limit:
        said = f"{gained:.0f} uncorrectable {what} since the first look (limit {limit:g})"
        if watched.shared:
            said += "; perhaps in a part of the GPU that is another job's"
        yield Problem(code, Verdict.UNKNOWN if watched.shared else Verdict.BAD, said)


def remapped_rows(watched: Watched, at: float) -> Iterator[Problem]:
    _, uncorrectable, pending, failed = watched.gpu.ask("nvmlDeviceGetRemappedRows")
    if failed:
        yield Problem(
            "gpu-row-remap-failed", Verdict.BAD, "a row of memory cannot be remapped: replace the GPU"
        )
    if pending:
        yield Problem(
            "gpu-row-remap-pending", Verdict.SUSPECT,
            f"the GPU needs a reset to remap a row of memory ({uncorrectable} for uncorrectable errors)",
        )  # fmt: skip


def retired_pages(watched: Watched, at: float) -> Iterator[Problem]:
    if watched.gpu.value(PAGES_PENDING, "nvmlDeviceGetRetiredPagesPendingStatus"):
        yield Problem(
            "gpu-page-retirement-pending", Verdict.SUSPECT, "the GPU needs a reset to retire a page of memory"
        )


def repairs(watched: Watched, at: float) -> Iterator[Problem]:
    waiting = zip(("channel", "TPC"), watched.gpu.ask("nvmlDeviceGetRepairStatus"), strict=True)
    if parts := [part for part, pending in waiting if pending]:
        yield Problem(
            "gpu-repair-pending",
            Verdict.SUSPECT,
            f"the GPU needs a reset to repair a {' and a '.join(parts)}",
        )


def nvlinks(watched: Watched, at: float) -> Iterator[Problem]:
    """Report links that were active in the first look and no longer are. Others may not be wired."""
    active = frozenset(link for link in range(watched.gpu.links) if _is_active(watched.gpu, link))
    if watched.links_at_first is None:
        watched.links_at_first = active
    if lost := sorted(watched.links_at_first - active):
        yield Problem(
            "gpu-nvlink-down", Verdict.BAD,
            f"NVLink {', '.join(map(str, lost))} went down; {len(active)} are up",
        )  # fmt: skip


def _is_active(gpu: Gpu, link: int) -> bool:
    try:
        return bool(gpu.field(LINK_STATE, link))
    except NvmlError:  # no such field before NVLink 4
        return bool(gpu.ask("nvmlDeviceGetNvLinkState", link))


def nvlink_errors(watched: Watched, at: float) -> Iterator[Problem]:
    yield from _rate(watched, at, LINK_ERRORS, "gpu-nvlink-errors", 60, "NVLink errors in a minute")


def nvlink_recoveries(watched: Watched, at: float) -> Iterator[Problem]:
    yield from _rate(
        watched, at, LINK_RECOVERIES, "gpu-nvlink-recoveries", 600, "recoveries of NVLinks in 10 minutes"
    )


def nvlink_failed_recoveries(watched: Watched, at: float) -> Iterator[Problem]:
    gained = watched.history.gained("failed recoveries", watched.gpu.total(LINK_FAILED_RECOVERIES))
    limit = watched.limit("gpu-nvlink-failed-recoveries")
    if gained and gained >= limit:
        yield Problem(
            "gpu-nvlink-failed-recoveries", Verdict.BAD,
            f"{gained:.0f} recoveries of NVLinks failed since the first look (limit {limit:g})",
        )  # fmt: skip


def _rate(
    watched: Watched, at: float, fields: tuple[int, ...], code: str, window_s: float, what: str
) -> Iterator[Problem]:
    yield from _too_many(watched, watched.gpu.total(fields), at, code, window_s, what)


def _too_many(
    watched: Watched, count: float, at: float, code: str, window_s: float, what: str
) -> Iterator[Problem]:
    """Suspect if a counter gains at least the threshold `code` within the window."""
    gained, limit = watched.history.gained_within(code, count, at, window_s), watched.limit(code)
    if gained and gained >= limit:
        yield Problem(code, Verdict.SUSPECT, f"{gained:.0f} {what} (limit {limit:g})")


def fabric(watched: Watched, at: float) -> Iterator[Problem]:
    """Registration with the NVSwitch fabric; without it, CUDA does not start on a machine that has one."""
    info = watched.gpu.ask_structure("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t")
    state = info.state & 0xFF  # a char in nvml.h; in nvidia-ml-py the rest is padding
    if state in FABRIC_STATES:
        yield Problem(
            "gpu-fabric", Verdict.SUSPECT,
            f"registration with the NVLink fabric {FABRIC_STATES[state]}: is the fabric manager running?",
        )  # fmt: skip
    if state != FABRIC_COMPLETED:
        return
    if info.status:
        yield Problem(
            "gpu-fabric", Verdict.BAD, f"registration with the NVLink fabric failed (error {info.status})"
        )
    for shift, mask, well, wrong in FABRIC_HEALTH:
        if (info.healthMask >> shift) & mask not in well:
            verdict = Verdict.BAD if shift in FABRIC_BAD else Verdict.SUSPECT
            yield Problem("gpu-fabric", verdict, f"NVLink fabric: {wrong}")


def pcie_width(watched: Watched, at: float) -> Iterator[Problem]:
    width = watched.gpu.ask("nvmlDeviceGetCurrPcieLinkWidth")
    widest = watched.gpu.ask_once("nvmlDeviceGetMaxPcieLinkWidth")
    if 0 < width < widest:
        yield Problem("gpu-pcie-width", Verdict.SUSPECT, f"PCIe runs on {width} lanes of {widest}")


def pcie_generation(watched: Watched, at: float) -> Iterator[Problem]:
    """Counts only under load: idle GPUs lower it."""
    generation = watched.gpu.ask("nvmlDeviceGetCurrPcieLinkGeneration")
    highest = watched.gpu.ask_once("nvmlDeviceGetMaxPcieLinkGeneration")
    slow = 0 < generation < highest and (
        watched.gpu.ask("nvmlDeviceGetUtilizationRates").gpu >= watched.limit("gpu-pcie-load")
    )
    if watched.history.streak("slow PCIe", slow) >= 2:
        yield Problem(
            "gpu-pcie-generation", Verdict.SUSPECT,
            f"PCIe runs at generation {generation} under load, not at {highest}",
        )  # fmt: skip


def pcie_replays(watched: Watched, at: float) -> Iterator[Problem]:
    count = watched.gpu.value(PCIE_REPLAYS, "nvmlDeviceGetPcieReplayCounter")
    yield from _too_many(watched, count, at, "gpu-pcie-replays", 60, "PCIe replays in a minute")


def throttling(watched: Watched, at: float) -> Iterator[Problem]:
    reasons = watched.gpu.ask("nvmlDeviceGetCurrentClocksEventReasons")
    why = [words for bit, words in SLOWDOWNS.items() if reasons & bit]
    share, limit = watched.history.share("slow", bool(why), at, WINDOW_S), watched.limit("gpu-throttled")
    if share and share >= limit:
        now = f"; now by {' and '.join(why)}" if why else ""
        yield Problem(
            "gpu-throttled", Verdict.SUSPECT,
            f"slowed down in {share:.0%} of the last 10 minutes (limit {limit:.0%}){now}",
        )  # fmt: skip


def temperature(watched: Watched, at: float) -> Iterator[Problem]:
    margin = watched.gpu.ask("nvmlDeviceGetMarginTemperature")
    hot = margin <= watched.limit("gpu-temperature-margin")
    share, limit = watched.history.share("hot", hot, at, WINDOW_S), watched.limit("gpu-hot")
    if share and share >= limit:
        yield Problem(
            "gpu-hot", Verdict.SUSPECT,
            f"too hot in {share:.0%} of the last 10 minutes (limit {limit:.0%}); "
            f"now {margin} degrees below throttling",
        )  # fmt: skip


CHECKS: tuple[tuple[str, Check], ...] = (
    ("events", events),
    ("recovery action", recommendation),
    ("ECC errors", ecc),
    ("SRAM errors", ecc_sram),
    ("remapped rows", remapped_rows),
    ("retired pages", retired_pages),
    ("repairs", repairs),
    ("NVLinks", nvlinks),
    ("NVLink errors", nvlink_errors),
    ("NVLink recoveries", nvlink_recoveries),
    ("failed NVLink recoveries", nvlink_failed_recoveries),
    ("NVLink fabric", fabric),
    ("PCIe width", pcie_width),
    ("PCIe generation", pcie_generation),
    ("PCIe replays", pcie_replays),
    ("throttling", throttling),
    ("temperature", temperature),
)
