"""Health probe: AMD GPUs, from what the amdgpu driver shows in /sys (kernel: Documentation/gpu/amdgpu, its
amdgpu_ras.c and amdgpu_pm.c). It needs no ROCm library. It looks only at GPUs that this job may use."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jurymast.health.grant import UNSURE, Counts, all_are_ours, may_open, named_in
from jurymast.health.probe import HARDWARE, Context, Finding, Probe, Verdict, doubtful, threshold
from jurymast.health.readings import Gains, number, text

NAME = "amd"
INTERVAL_S = 15.0
VENDOR = "0x1002"
HOUR_S = 3600.0
# ROCr's variable chooses among the devices that the job may open, and HIP's (the first of these that is set)
# among those that ROCr shows.
ROCR = "ROCR_VISIBLE_DEVICES"
HIP = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
KFD_NODES = "class/kfd/kfd/topology/nodes"
BUSY_PERCENT = 50
PCIE = "pcie"


# (code, verdict, text for people)
Found = tuple[str, Verdict, str]
COUNTS = ("uncorrectable", "correctable", "deferred")


class UnseenError(Exception):
    """A file that could be read before cannot be read now."""


@dataclass
class Gpu:
    """One GPU. `name`: as in findings; `device`: its PCI device's directory; the rest is known from earlier
    looks."""

    name: str
    device: Path
    uncorrectable: dict[str, Gains] = field(default_factory=dict)  # by block of the chip
    correctable: dict[str, Gains] = field(default_factory=dict)
    deferred: dict[str, Gains] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)  # conditions that must last -> since when they have
    answered: bool = False
    found: dict[str, list[Found]] = field(default_factory=dict)  # by check, when it last could look

    def held(self, what: str, holds: bool, now: float, limit_s: float) -> bool:
        """Whether the condition `what` has held without interruption for `limit_s` seconds."""
        if not holds:
            self.since.pop(what, None)
            return False
        return now - self.since.setdefault(what, now) >= limit_s

    def remember(self) -> Any:
        """What another process needs to judge this GPU as this one would, as JSON, for `recall`."""
        counts = {
            kind: {block: gains.remember() for block, gains in getattr(self, kind).items()} for kind in COUNTS
        }
        found = {
            check: [[code, verdict.value, said] for code, verdict, said in all_found]
            for check, all_found in self.found.items()
        }
        return {
            "name": self.name, "device": str(self.device), "counts": counts, "since": self.since,
            "answered": self.answered, "found": found,
        }  # fmt: skip

    def recall(self, memory: Any) -> None:
        """Go on where another process was. Raises KeyError, TypeError or ValueError for anything else than
        what `remember` returned."""
        self.name = str(memory["name"])
        for kind in COUNTS:
            for block, values in memory["counts"][kind].items():
                getattr(self, kind).setdefault(block, Gains(HOUR_S)).recall(values)
        self.since = {what: float(at) for what, at in memory["since"].items()}
        self.answered = bool(memory["answered"])
        self.found = {
            check: [(str(code), Verdict(verdict), str(said)) for code, verdict, said in found]
            for check, found in memory["found"].items()
        }


Check = Callable[[Gpu, Context, float], Iterator[Found]]


def errors(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """RAS counts of each block of the chip. ras/umc_err_count has "ue: 0", "ce: 3" and, for memory, "de: 0";
    newer files are ras/aca_umc and so on. The block xgmi_wafl is an xGMI link."""
    limit = threshold(context, "amd-correctable-errors")
    files = {
        file.name.removesuffix("_err_count").removeprefix("aca_"): file
        for file in sorted((gpu.device / "ras").glob("*"))
        if file.name.endswith("_err_count") or file.name.startswith("aca_")
    }
    if gpu.uncorrectable.keys() - files.keys():
        raise UnseenError("counts of errors are no longer there")
    for block, file in files.items():
        said = re.findall(r"^(ue|ce|de): *(\d+)", text(file) or "", re.M)
        counts = {kind: int(count) for kind, count in said}
        code = "gpu-ecc" if block == "umc" else f"gpu-{block.replace('_', '-')}"
        name = "memory" if block == "umc" else block
        gained = gpu.uncorrectable.setdefault(block, Gains(HOUR_S))
        gained.add(now, counts.get("ue"))
        if gained.total:
            what = f"{gained.total} uncorrectable {name} errors in this job"
            yield f"{code}-uncorrectable", Verdict.BAD, what
        recent = gpu.correctable.setdefault(block, Gains(HOUR_S)).add(now, counts.get("ce"))
        if recent >= limit:
            what = f"{recent} correctable {name} errors in an hour (limit {limit:g})"
            yield f"{code}-correctable", Verdict.SUSPECT, what
        if gpu.deferred.setdefault(block, Gains(HOUR_S)).add(now, counts.get("de")):
            # Memory marked as poisoned but not used yet: a process that reads it is killed, and the page is
            # retired.
            what = f"deferred {name} errors: reading that memory kills a process"
            yield f"{code}-deferred", Verdict.UNKNOWN, what


def bad_pages(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """ras/gpu_vram_bad_pages has a line per page, "0x00000001 : 0x00001000 : R": R for retired, P for
    pending, F for failed."""
    said = text(gpu.device / "ras/gpu_vram_bad_pages")
    if said is None and "bad_pages" in gpu.found:
        raise UnseenError("the list of bad pages cannot be read")
    failed = re.findall(r": *F$", said or "", re.M)
    if failed:
        what = f"{len(failed)} bad pages of memory could not be retired"
        yield "gpu-page-retirement-failed", Verdict.BAD, what


def temperature(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """hwmon's sensors (edge, junction, mem) in thousandths of a degree, with the limits at which the GPU
    throttles (crit) and at which it switches off (emergency)."""
    limit_s, read = threshold(context, "amd-held-s"), {PCIE}
    for sensor in sorted(gpu.device.glob("hwmon/hwmon*/temp*_input")):
        stem = str(sensor).removesuffix("_input")
        label = text(Path(f"{stem}_label")) or Path(stem).name
        value, critical = number(sensor), number(Path(f"{stem}_crit"))
        emergency = number(Path(f"{stem}_emergency"))
        if value is None or not critical:
            continue
        read.add(label)
        hot = gpu.held(label, value >= critical, now, limit_s)
        said = f"{label} at {value / 1000:.0f} C"
        if emergency and value >= emergency:
            what = f"{said}, the GPU switches off at {emergency / 1000:.0f} C"
            yield "gpu-overheated", Verdict.BAD, what
        elif hot:
            what = f"{said}, the GPU throttles at {critical / 1000:.0f} C"
            yield "gpu-hot", Verdict.SUSPECT, what
    if unread := gpu.since.keys() - read:
        raise UnseenError(f"cannot be read any more: {', '.join(unread)}")


def pcie(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """Compare the slowest link between GPU and processor with the slowest that the devices there can do: many
    cards contain a switch, so the GPU's own link always looks good. Width is always compared, speed only
    under load, because an idle GPU lowers it."""
    way = [gpu.device, *(above for above in gpu.device.parents if (above / "vendor").exists())]
    for what, code, unit in (("width", "gpu-pcie-width", ""), ("speed", "gpu-pcie-generation", " GT/s")):
        current = [value for device in way if (value := _link(device, f"current_link_{what}"))]
        able = [value for device in way if (value := _link(device, f"max_link_{what}"))]
        if not current or not able:
            if any(found[0] == code for found in gpu.found.get("pcie", ())):
                raise UnseenError(f"the {what} of its PCIe link cannot be read")
            continue
        lower = min(current) < min(able)
        if what == "speed":
            busy = (number(gpu.device / "gpu_busy_percent") or 0) >= BUSY_PERCENT
            lower = gpu.held(PCIE, lower and busy, now, threshold(context, "amd-held-s"))
        if lower:
            said = f"PCIe {what} {min(current):g}{unit} of {min(able):g}{unit}"
            yield code, Verdict.SUSPECT, f"{said}: transfers are slower than on a full link"


def _link(device: Path, name: str) -> float:
    """A width ("16") or a speed ("16.0 GT/s PCIe") as a number; 0 if the driver does not know it."""
    match = re.match(r"\d+(\.\d+)?", text(device / name) or "")
    return float(match[0]) if match else 0.0


def reset(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """While a GPU is being reset, the driver refuses requests that it otherwise answers."""
    try:
        (gpu.device / "gpu_busy_percent").read_bytes()
        gpu.answered = True
    except OSError as error:
        if gpu.answered and error.errno in (errno.EPERM, errno.EACCES, errno.EBUSY):
            yield "gpu-reset", Verdict.SUSPECT, "is being reset; its ranks lose their data on it"


CHECKS: tuple[Check, ...] = (errors, bad_pages, temperature, pcie, reset)


class AmdProbe:
    """Looks at the job's AMD GPUs. `sys` and `dev` are the roots of sysfs and of the device files."""

    name = NAME
    interval_s = INTERVAL_S

    def __init__(
        self,
        context: Context,
        sys: Path = Path("/sys"),
        dev: Path = Path("/dev"),
        users: Mapping[str, str] = os.environ,
    ) -> None:
        self._context = context
        units, known = units_of(sys)
        own = openable(units, dev)
        rocr = named_in(users.get(ROCR))
        shown, found = chosen(own, rocr)
        hip = next((named_in(users[name]) for name in HIP if users.get(name)), None)
        seen, _ = chosen(shown, hip)
        devices = list(dict.fromkeys(unit.device for unit in own))
        self._counts = Counts(
            granted=context.gpus, present=len({unit.device for unit in units}), openable=len(devices),
            parts=len(own) if known else None, named=len(rocr or ()), found=found,
        )  # fmt: skip
        self._sure = rocr is not None or hip is not None or all_are_ours(context.gpus, len(own))
        # Names of which none exists are a mistake of the user's; an empty list means no GPU.
        wanted = {unit.device for unit in seen or shown or (own if rocr else ())}
        self.gpus = [Gpu(f"gpu{number}", device) for number, device in enumerate(devices) if device in wanted]
        if context.memory is not None:
            self._recall(context.memory["gpus"])

    def _recall(self, memory: Sequence[Any]) -> None:
        """Go on where an earlier process was; GPUs that are gone since then are still looked for."""
        there = {str(gpu.device): gpu for gpu in self.gpus}
        for one in memory:
            if one["device"] not in there:
                self.gpus.append(Gpu(one["name"], Path(one["device"])))
                there[one["device"]] = self.gpus[-1]
            there[one["device"]].recall(one)

    def remember(self) -> Any:
        """The baselines, and what holds, of each GPU."""
        return {"gpus": [gpu.remember() for gpu in self.gpus]}

    def look(self, now: float) -> Sequence[Finding]:
        found = [*self._count(now)]
        for gpu in self.gpus:
            lost = not gpu.device.exists()
            if lost:
                found.append(self._finding(gpu.name, "gpu-lost", Verdict.BAD, "is no longer present", now))
            for check in CHECKS:
                if not lost:
                    with suppress(UnseenError):  # what it found before still holds
                        gpu.found[check.__name__] = list(check(gpu, self._context, now))
                for code, verdict, what in gpu.found.get(check.__name__, ()):
                    found.append(self._finding(gpu.name, code, verdict, what, now))
        return found if self._sure else [doubtful(one, UNSURE) if one.device else one for one in found]

    @property
    def missing(self) -> bool:
        """Whether GPUs are there, but not as many as were granted."""
        return self._counts.present > 0 and self._counts.missing() is not None

    def close(self) -> None:
        """Nothing to release."""

    def _count(self, now: float) -> Iterator[Finding]:
        if missing := self._counts.missing():
            verdict, what = missing
            yield self._finding("", "gpu-missing", verdict, what, now)

    def _finding(self, device: str, code: str, verdict: Verdict, what: str, at: float) -> Finding:
        message = f"{device}: {what}" if device else what
        return Finding(
            probe=NAME, code=code, verdict=verdict, kind=HARDWARE, message=message, device=device, at=at
        )


def gpus(sys: Path) -> list[Path]:
    """The directories of all AMD GPUs' PCI devices on this machine, in the order of their PCI addresses."""
    cards = [card for card in (sys / "class/drm").glob("card*") if re.fullmatch(r"card\d+", card.name)]
    found = [card / "device" for card in cards if text(card / "device/vendor") == VENDOR]
    return sorted((device.resolve() for device in found), key=lambda device: device.name)


@dataclass(frozen=True)
class Unit:
    """What ROCr counts as one device: a GPU, or a partition of one. `device`: its GPU's PCI device; `render`:
    the names of its device files; `ids`: how variables may name it."""

    device: Path
    render: tuple[str, ...]
    ids: frozenset[str] = frozenset()


def units_of(sys: Path) -> tuple[list[Unit], bool]:
    """All devices as ROCr numbers them, and whether partitions would be seen. They are the nodes of the KFD's
    topology that have compute units; without a topology, only whole GPUs are seen."""
    whole = gpus(sys)
    at_addresses = {device.name: device for device in whole}
    found = []
    nodes = [node for node in (sys / KFD_NODES).glob("*") if node.name.isdigit()]
    for node in sorted(nodes, key=lambda node: int(node.name)):
        said = dict(re.findall(r"^(\w+) (\d+)$", text(node / "properties") or "", re.M))
        device = at_addresses.get(_address(said))
        if int(said.get("simd_count", 0)) and device is not None:
            unique = int(said.get("unique_id", 0))
            ids = frozenset({f"gpu-{unique:016x}"} if unique else ())
            found.append(Unit(device, (f"renderD{said.get('drm_render_minor', '')}",), ids))
    if found:
        # Nodes that the job's device cgroup forbids cannot be read: their GPUs are there, but not the job's.
        seen = {unit.device for unit in found}
        return [*found, *(_whole(device) for device in whole if device not in seen)], True
    undivided = bool(whole) and all(text(device / "current_compute_partition") == "SPX" for device in whole)
    return [_whole(device) for device in whole], undivided


def _whole(device: Path) -> Unit:
    render = tuple(sorted(node.name for node in (device / "drm").glob("renderD*")))
    unique = text(device / "unique_id")
    return Unit(device, render, frozenset({f"gpu-{unique}".lower()} if unique else ()))


def _address(said: Mapping[str, str]) -> str:
    """The PCI address in a node's properties: location_id is bus, device and function, with the number of
    the partition above (kernel: amdkfd/kfd_topology.c)."""
    where = int(said.get("location_id", 0)) & 0xFFFF
    domain = int(said.get("domain", 0))
    return f"{domain:04x}:{where >> 8:02x}:{where >> 3 & 0x1F:02x}.{where & 7}"


def openable(units: Sequence[Unit], dev: Path) -> list[Unit]:
    """Those that the job's device cgroup and its rights let it open; all if there are no device files."""
    allowed = [may_open(*(dev / "dri" / name for name in unit.render)) for unit in units]
    if all(one is None for one in allowed):
        return list(units)
    return [unit for unit, one in zip(units, allowed, strict=True) if one]


def chosen(units: Sequence[Unit], words: Sequence[str] | None) -> tuple[list[Unit], int]:
    """The units that `words` name, by number or by "GPU-" and the unique id (all if words is None); and how
    many of the words name one."""
    if words is None:
        return list(units), 0
    matching = [_named(units, word) for word in words]
    return [unit for found in matching for unit in found], sum(map(bool, matching))


def _named(units: Sequence[Unit], word: str) -> Sequence[Unit]:
    if word.isdigit():
        return units[int(word) : int(word) + 1]
    return [unit for unit in units if word.lower() in unit.ids]


def probe(context: Context) -> Probe | None:
    """Return the probe; None on a machine without AMD GPUs, and for a job that may open none."""
    made = AmdProbe(context)
    return made if made.gpus or made.missing else None
