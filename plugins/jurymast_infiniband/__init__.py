"""Health probe: ports of InfiniBand and RoCE devices, and the ordinary network interfaces that a run uses.

Everything comes from /sys/class/infiniband and /sys/class/net (kernel: Documentation/ABI/stable/
sysfs-class-infiniband, testing/sysfs-class-net). Codes begin with "ib-" for ports and with "net-" for
interfaces, which `core.judges.devices` uses. A device that was down when the job started is not the run's,
unless the user names it. A device that goes down is `suspect` while another one of its kind is up, so that
the ranks can do without it, and otherwise `bad`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jurymast.core.judges import devices
from jurymast.health.grant import may_open
from jurymast.health.probe import NETWORK, NOT_OBSERVABLE, Context, Finding, Probe, Verdict, threshold
from jurymast.health.readings import Gains, number, text

NAME = "infiniband"
INTERVAL_S = 10.0
INTERFACE = "interface"
CARRIER = "carrier_changes"


@dataclass(frozen=True)
class Counter:
    """A counter that must gain less than `limit` (a threshold's name) within `window_s` seconds. It stands
    still at `largest`, None for one that does not."""

    code: str
    limit: str
    window_s: float
    meaning: str
    largest: int | None = None


FLAPS = Counter(
    "flapping", "ib-link-flaps", 3600.0, "times down: check the cable, the module and the other end"
)
SYMBOLS = Counter(
    "symbol-errors", "ib-symbol-errors", 3600.0, "symbol errors: too many for a link of this speed", 0xFFFF
)
# File below a port's counters/ -> how it is judged. IBTA volume 1, PortCounters, explains the counters and
# how many bits they have.
COUNTERS = {
    "link_downed": replace(FLAPS, largest=0xFF),
    "symbol_error": SYMBOLS,
    "link_error_recovery": Counter(
        "retraining", "ib-link-recoveries", 60.0, "retrainings: the link is unstable", 0xFF
    ),
    "local_link_integrity_errors": Counter(
        "integrity-errors", "ib-integrity-errors", 3600.0,
        "bursts of errors that the hardware cannot correct", 0xF,
    ),
    "port_rcv_errors": Counter(
        "receive-errors", "ib-receive-errors", 60.0, "damaged packets received", 0xFFFF
    ),
    # Not below counters/: the network interface's, which counts up and down.
    CARRIER: FLAPS,
}  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """One look at a port ("mlx5_1:1") or an interface ("eth1"). `kind`: its link layer, or INTERFACE. `up` is
    None if the driver does not say; `state` is for people; `rate` is in Gb/s, 0 if it is not known."""

    name: str
    kind: str
    up: bool | None
    state: str
    rate: float = 0.0
    counters: Mapping[str, int | None] = field(default_factory=dict)


def read_ports(sys: Path, dev: Path) -> Iterator[Reading]:
    """Read all ports of all RDMA devices except virtual functions, which belong to other machines, and except
    devices that this job may not open."""
    for device in sorted(_entries(sys / "class/infiniband")):
        if (device / "device/physfn").exists():
            continue
        verbs = [dev / "infiniband" / entry.name for entry in _entries(device / "device/infiniband_verbs")]
        if may_open(*verbs) is False:
            continue
        for port in sorted(_entries(device / "ports")):
            yield _port(device, port)


def _port(device: Path, port: Path) -> Reading:
    said = text(port / "state")  # "4: ACTIVE"
    physical = (text(port / "phys_state") or "").partition(":")[2].strip()
    kind = text(port / "link_layer") or "InfiniBand"
    state = f"{(said or '').partition(':')[2].strip()} ({physical})"
    up = None if said is None else "ACTIVE" in said
    counters = {name: number(port / "counters" / name) for name in COUNTERS if name != CARRIER}
    if kind != "InfiniBand" and (interface := _interface_below(device, port)) is not None:
        link = _interface(interface)
        # Some drivers (Amazon's EFA) report every port as active; the interface shows the true state.
        up, state = up and link.up is not False, f"{state}, {interface.name} is {link.state}"
        counters.update(link.counters)
    return Reading(f"{device.name}:{port.name}", kind, up, state, _rate(port), counters)


def _rate(port: Path) -> float:
    """The Gb/s in "400 Gb/sec (4X NDR)"."""
    said = (text(port / "rate") or "").partition(" ")[0]
    return float(said) if said.replace(".", "", 1).isdigit() else 0.0


def _interface_below(device: Path, port: Path) -> Path | None:
    """The network interface of a RoCE port; None if there is none."""
    found = sorted(_entries(device / "device/net"))
    same = [each for each in found if str((number(each / "dev_port") or 0) + 1) == port.name]
    return next(iter(same or found), None)


def read_interfaces(sys: Path, filters: Sequence[str], alone: bool) -> Iterator[Reading]:
    """Read the interfaces on PCI that the user names in one of `filters` (in NCCL's syntax). If the user
    names none and the interfaces are `alone`, on a node without RDMA, reads all. Virtual functions and
    interfaces that are part of a bond are left out: they are not used by themselves."""
    named = any(part and not part.startswith("^") for part in filters)
    for interface in sorted(_entries(sys / "class/net")):
        pci = (interface / "device/vendor").exists() and not (interface / "device/physfn").exists()
        asked = any(devices.names(part, interface.name) for part in filters)
        allowed = all(devices.lets_through(part, interface.name) for part in filters)
        wanted = asked or (alone and not named and allowed)
        if pci and wanted and not (interface / "master").exists():
            yield _interface(interface)


def _interface(interface: Path) -> Reading:
    state = text(interface / "operstate") or ""
    up = {"up": True, "unknown": True, "": None}.get(state, False)
    changes = number(interface / CARRIER)
    counters = {CARRIER: None if changes is None else changes // 2}
    return Reading(interface.name, INTERFACE, up, state, counters=counters)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


class Watched:
    """What is known of one port or interface since the first look."""

    def __init__(self, first: Reading, named: bool) -> None:
        self.last = first
        self.ours = named or first.up is True
        self.rate = first.rate
        self.down_since: float | None = None
        self.gains = {name: Gains(COUNTERS[name].window_s, COUNTERS[name].largest) for name in first.counters}

    def remember(self) -> Any:
        """What another process needs to judge this device as this one would, as JSON, for `recalled`."""
        return {
            "last": asdict(replace(self.last, counters=dict.fromkeys(self.gains))), "ours": self.ours,
            "rate": self.rate, "down_since": self.down_since,
            "gains": {name: gains.remember() for name, gains in self.gains.items()},
        }  # fmt: skip

    @classmethod
    def recalled(cls, memory: Any) -> Watched:
        """Go on where another process was. Raises KeyError, TypeError or ValueError for anything else than
        what `remember` returned."""
        made = cls(Reading(**memory["last"]), named=bool(memory["ours"]))
        made.ours, made.rate = bool(memory["ours"]), float(memory["rate"])
        made.down_since = None if memory["down_since"] is None else float(memory["down_since"])
        for name, values in memory["gains"].items():
            made.gains[name].recall(values)
        return made

    @property
    def prefix(self) -> str:
        return "net" if self.last.kind == INTERFACE else "ib"


class InfinibandProbe:
    """Looks at ports and interfaces. `sys` and `dev` are the roots of sysfs and of the device files, `users`
    the user's variables."""

    name = NAME
    interval_s = INTERVAL_S

    def __init__(
        self, context: Context, sys: Path = Path("/sys"), users: Mapping[str, str] = os.environ,
        dev: Path = Path("/dev"),
    ) -> None:  # fmt: skip
        self._context = context
        self._sys, self._dev = sys, dev
        self._users = {variable: users.get(variable, "") for variable in devices.VARIABLES}
        self._watched: dict[str, Watched] = {}
        if context.memory is not None:
            self._watched = {name: Watched.recalled(one) for name, one in context.memory.items()}

    def remember(self) -> Any:
        """The baseline of each port and interface."""
        return {name: watched.remember() for name, watched in self._watched.items()}

    def look(self, now: float) -> Sequence[Finding]:
        seen = {reading.name: reading for reading in self._read()}
        for name, reading in seen.items():
            if name not in self._watched:
                self._watched[name] = Watched(reading, self._named(name, seen))
        found: list[Finding] = []
        for name, watched in self._watched.items():
            reading = seen.get(name) or replace(watched.last, up=False, state="gone", counters={})
            found += self._judge(watched, reading, seen.values(), now)
            watched.last = reading
        return found

    def close(self) -> None:
        """Nothing to release."""

    def _read(self) -> list[Reading]:
        allowed = self._users[devices.PORTS]
        ports = [
            port for port in read_ports(self._sys, self._dev) if devices.lets_through(allowed, port.name)
        ]
        return [*ports, *self._interfaces()]

    def _interfaces(self) -> Iterator[Reading]:
        filters = [self._users[devices.INTERFACES], *_exact(self._users[devices.GLOO])]
        return read_interfaces(self._sys, filters, alone=not _entries(self._sys / "class/infiniband"))

    def anything_to_see(self) -> bool:
        return bool(_entries(self._sys / "class/infiniband")) or any(self._interfaces())

    def _named(self, name: str, seen: Mapping[str, Reading]) -> bool:
        """Whether the user names this very device for the run, not just all devices with a prefix. A device
        of several ports is named for those that are cabled."""
        wanted = [
            self._users[devices.PORTS],
            self._users[devices.INTERFACES],
            *_exact(self._users[devices.GLOO]),
        ]
        naming = [value for value in wanted if value.startswith("=") and devices.names(value, name)]
        device, _, port = name.partition(":")
        if not port or any(name in value.removeprefix("=").split(",") for value in naming):
            return bool(naming)
        others = [one for one in seen.values() if one.name.startswith(f"{device}:") and one.name != name]
        return bool(naming) and not any(one.up for one in others)

    def _judge(
        self, watched: Watched, reading: Reading, all_seen: Collection[Reading], now: float
    ) -> Iterator[Finding]:
        if reading.up is None:
            found = self._finding(watched, "", Verdict.UNKNOWN, "its state cannot be read", now)
            yield replace(found, code=NOT_OBSERVABLE)
            return
        if not reading.up:
            yield from self._down(watched, reading, all_seen, now)
        else:
            watched.down_since, watched.ours = None, True
            if 0 < reading.rate < watched.rate:
                yield self._finding(
                    watched, "slow", Verdict.SUSPECT,
                    f"runs at {reading.rate:g} Gb/s, down from {watched.rate:g}: it lost lanes or speed", now,
                )  # fmt: skip
            watched.rate = max(watched.rate, reading.rate)
        yield from self._counted(watched, reading, now)

    def _counted(self, watched: Watched, reading: Reading, now: float) -> Iterator[Finding]:
        """Judge what the counters gained."""
        full = []
        for name, gains in watched.gains.items():
            gained, counter = gains.add(now, reading.counters.get(name)), COUNTERS[name]
            limit = threshold(self._context, counter.limit)
            if counter is SYMBOLS:
                limit *= watched.rate * counter.window_s / 1000.0  # of each 10^12 bits; the rate is in Gb/s
                if not limit:
                    continue  # the link's speed is not known, and so neither is its error rate
            if gains.full:
                full.append(f"{name} ({counter.largest})")
            if gained and gained >= limit and watched.ours:
                least, until = ("at least ", ", when it stopped counting") if gains.full else ("", "")
                yield self._finding(
                    watched, counter.code, Verdict.SUSPECT,
                    f"{least}{gained} (limit {limit:g} in {counter.window_s / 60:g} min{until}) "
                    f"{counter.meaning}", now,
                )  # fmt: skip
        if full and watched.ours:
            what = f"counters stand at their largest value, so more errors are not counted: {', '.join(full)}"
            yield self._finding(watched, "counters-full", Verdict.UNKNOWN, what, now)

    def _down(
        self, watched: Watched, reading: Reading, all_seen: Collection[Reading], now: float
    ) -> Iterator[Finding]:
        if not watched.ours:
            what = f"is {reading.state}, as it was when the job started: not used"
            yield self._finding(watched, "unused", Verdict.UNKNOWN, what, now)
            return
        watched.down_since = now if watched.down_since is None else watched.down_since
        # NCCL's own retries survive shorter interruptions; how often they happen is counted separately.
        if now - watched.down_since < threshold(self._context, "ib-down-s"):
            return
        others = sorted(each.name for each in all_seen if each.up and each.kind == reading.kind)
        rest = f"the ranks can use {', '.join(others)}" if others else "no other device of its kind is up"
        code = "device-gone" if reading.state == "gone" else "link-down"
        verdict = Verdict.SUSPECT if others else Verdict.BAD
        yield self._finding(watched, code, verdict, f"is {reading.state}; {rest}", watched.down_since)

    def _finding(self, watched: Watched, code: str, verdict: Verdict, what: str, at: float) -> Finding:
        name = watched.last.name
        return Finding(
            probe=NAME, code=f"{watched.prefix}-{code}", verdict=verdict, kind=NETWORK, device=name, at=at,
            message=f"{name}: {what}",
        )  # fmt: skip


def _exact(names: str) -> list[str]:
    """gloo's list of exact names, as filters in NCCL's syntax."""
    return [f"={names}"] if names else []


def probe(context: Context) -> Probe | None:
    """Return the probe; None on a machine without an RDMA device and without an interface on PCI."""
    made = InfinibandProbe(context)
    return made if made.anything_to_see() else None
