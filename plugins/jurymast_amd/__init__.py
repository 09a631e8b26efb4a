"""Health probe: AMD GPUs, from what the amdgpu driver shows in /sys (kernel: Documentation/gpu/amdgpu, its
amdgpu_ras.c and amdgpu_pm.c). It needs no ROCm library. It looks only at GPUs that this job may use."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jurymast.health.probe import HARDWARE, Context, Finding, Probe, Verdict, threshold
from jurymast.health.readings import Gains, number, text

NAME = "amd"
INTERVAL_S = 15.0
VENDOR = "0x1002"
HOUR_S = 3600.0
# The first variable that is set counts: ROCm's own order of precedence.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
BUSY_PERCENT = 50


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

    def held(self, what: str, holds: bool, now: float, limit_s: float) -> bool:
        """Whether the condition `what` has held without interruption for `limit_s` seconds."""
        if not holds:
            self.since.pop(what, None)
            return False
        return now - self.since.setdefault(what, now) >= limit_s


# (code, verdict, text for people)
Found = tuple[str, Verdict, str]
Check = Callable[[Gpu, Context, float], Iterator[Found]]


def errors(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """RAS counts of each block of the chip. ras/umc_err_count has "ue: 0", "ce: 3" and, for memory, "de: 0";
    newer files are ras/aca_umc and so on. The block xgmi_wafl is an xGMI link."""
    limit = threshold(context, "amd-correctable-errors")
    for file in sorted((gpu.device / "ras").glob("*")):
        block = file.name.removesuffix("_err_count").removeprefix("aca_")
        if block == file.name:
            continue
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
    failed = re.findall(r": *F$", text(gpu.device / "ras/gpu_vram_bad_pages") or "", re.M)
    if failed:
        what = f"{len(failed)} bad pages of memory could not be retired"
        yield "gpu-page-retirement-failed", Verdict.BAD, what


def temperature(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """hwmon's sensors (edge, junction, mem) in thousandths of a degree, with the limits at which the GPU
    throttles (crit) and at which it switches off (emergency)."""
    limit_s = threshold(context, "amd-held-s")
    for sensor in sorted(gpu.device.glob("hwmon/hwmon*/temp*_input")):
        stem = str(sensor).removesuffix("_input")
        label = text(Path(f"{stem}_label")) or Path(stem).name
        value, critical = number(sensor), number(Path(f"{stem}_crit"))
        emergency = number(Path(f"{stem}_emergency"))
        if value is None or not critical:
            continue
        hot = gpu.held(label, value >= critical, now, limit_s)
        said = f"{label} at {value / 1000:.0f} C"
        if emergency and value >= emergency:
            what = f"{said}, the GPU switches off at {emergency / 1000:.0f} C"
            yield "gpu-overheated", Verdict.BAD, what
        elif hot:
            what = f"{said}, the GPU throttles at {critical / 1000:.0f} C"
            yield "gpu-hot", Verdict.SUSPECT, what


def pcie(gpu: Gpu, context: Context, now: float) -> Iterator[Found]:
    """Compare the slowest link between GPU and processor with the slowest that the devices there can do: many
    cards contain a switch, so the GPU's own link always looks good. Width is always compared, speed only
    under load, because an idle GPU lowers it."""
    way = [gpu.device, *(above for above in gpu.device.parents if (above / "vendor").exists())]
    for what, code, unit in (("width", "gpu-pcie-width", ""), ("speed", "gpu-pcie-generation", " GT/s")):
        current = [value for device in way if (value := _link(device, f"current_link_{what}"))]
        able = [value for device in way if (value := _link(device, f"max_link_{what}"))]
        if not current or not able:
            continue
        lower = min(current) < min(able)
        if what == "speed":
            busy = (number(gpu.device / "gpu_busy_percent") or 0) >= BUSY_PERCENT
            lower = gpu.held("pcie", lower and busy, now, threshold(context, "amd-held-s"))
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
        self._visible = next((users[name] for name in VISIBLE if users.get(name)), "")
        self.gpus = granted(gpus(sys), self._visible, dev)

    def look(self, now: float) -> Sequence[Finding]:
        found = [*self._count(now)]
        for gpu in self.gpus:
            if not gpu.device.exists():
                found.append(self._finding(gpu.name, "gpu-lost", Verdict.BAD, "is no longer present", now))
                continue
            for check in CHECKS:
                for code, verdict, what in check(gpu, self._context, now):
                    found.append(self._finding(gpu.name, code, verdict, what, now))
        return found

    def close(self) -> None:
        """Nothing to release."""

    def _count(self, now: float) -> Iterator[Finding]:
        asked = len([part for part in self._visible.split(",") if part.strip()])
        wanted = self._context.gpus if self._context.gpus is not None else asked
        if len(self.gpus) < wanted:
            what = f"{wanted} GPUs were granted, {len(self.gpus)} are present"
            yield self._finding("", "gpu-missing", Verdict.BAD, what, now)

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


def granted(found: Sequence[Path], visible: str, dev: Path) -> list[Gpu]:
    """The job's GPUs, named gpu0, gpu1, ... as ROCm numbers them: those that the job's device cgroup lets it
    open (all if there are no device files), and of these the ones in `visible`, given by number or by "GPU-"
    and the unique id."""
    own = [device for device in found if _may_open(device, dev)] or list(found)
    wanted = [part.strip() for part in visible.split(",") if part.strip()]
    numbered = [Gpu(f"gpu{number}", device) for number, device in enumerate(own)]
    ids = {f"gpu-{text(gpu.device / 'unique_id') or ''}".lower(): gpu for gpu in numbered}
    if not wanted:
        return numbered
    chosen = [ids.get(part.lower()) or _at(numbered, part) for part in wanted]
    return [gpu for gpu in chosen if gpu is not None]


def _at(numbered: Sequence[Gpu], part: str) -> Gpu | None:
    return numbered[int(part)] if part.isdigit() and int(part) < len(numbered) else None


def _may_open(device: Path, dev: Path) -> bool:
    nodes = [dev / "dri" / node.name for node in (device / "drm").glob("renderD*")]
    return any(os.access(node, os.R_OK | os.W_OK) for node in nodes)


def probe(context: Context) -> Probe | None:
    """Return the probe; None on a machine without AMD GPUs."""
    made = AmdProbe(context)
    return made if made.gpus else None
