"""The cluster's network: a bridge in a namespace of its own, and one namespace and veth pair a machine."""

from __future__ import annotations

import ipaddress
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from testcluster import kernel, processes
from testcluster.errors import ClusterError
from testcluster.processes import run
from testcluster.settings import BRIDGE, CONTROLLER, NETNS_START, NODE_INTERFACE, SUBNET, SUBNET_IPV6

_HERE = Path(__file__).resolve().parent
_NETNS_DIRECTORY = Path("/run/netns")
_SWITCH = "switch"
_RELAY_DEADLINE_S = 20.0
# In ms, and counts. slurmctld's ping of a node without power fails when the kernel gives its address up:
# within 2 s instead of after MessageTimeout, during which it would ping nobody else.
_QUICK_TO_DOUBT = "retrans 100 base_reachable 1000 delay_probe 500 ucast_probes 1 mcast_probes 2"
_BITS_PER_BYTE = 8
_NOBODY = "02:4a:ff:ff:ff:ff"


class Network:
    """Creates, breaks, mends and removes the links; ``prefix`` starts the namespaces' names."""

    def __init__(self, prefix: str, records: Path) -> None:
        self._prefix = prefix
        self._records = records
        self._control: socket.socket | None = None

    def netns(self, machine: str) -> Path:
        """File that stands for the machine's network namespace."""
        return _NETNS_DIRECTORY / f"{self._prefix}{machine}"

    def existing(self) -> list[Path]:
        """Every network namespace of this cluster, the switch's included."""
        return sorted(_NETNS_DIRECTORY.glob(f"{self._prefix}*"))

    def create(self, machines: Sequence[tuple[str, str]]) -> None:
        """Make the switch, and a link for every (machine, address)."""
        _ip([f"netns add {self._prefix}{_SWITCH}"])
        self._in_switch([f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
        self.add(machines)

    def add(self, machines: Sequence[tuple[str, str]]) -> None:
        """Make a namespace with a link for every (machine, address)."""
        _ip([f"netns add {self._prefix}{name}" for name, _ in machines])
        for name, address in machines:
            peer = f"peer name {NODE_INTERFACE} address {_mac(address)} netns {self._prefix}{name}"
            self._in_switch([f"link add {name} type veth {peer}", f"link set {name} master {BRIDGE} up"])
            ipv6 = _is_ipv6(address)
            inside = [
                "link set lo up",
                f"address add {_with_prefix(address)} dev {NODE_INTERFACE}{' nodad' if ipv6 else ''}",
                f"link set {NODE_INTERFACE} up",
            ]
            if ipv6:
                inside.append("address del 127.0.0.1/8 dev lo")
            if name == CONTROLLER:
                cache = "ndisc_cache" if ipv6 else "arp_cache"
                inside.append(f"ntable change name {cache} dev {NODE_INTERFACE} {_QUICK_TO_DOUBT}")
            _ip(inside, f"{self._prefix}{name}")

    def remove(self, machines: Sequence[str]) -> None:
        """Remove these machines' links and namespaces; missing ones are fine."""
        present = [name for name in machines if self.netns(name).exists()]
        for name in present:
            self.fast(name)
            self._apart(name).unlink(missing_ok=True)
            # The link first: its removal is done when the command returns, that of a namespace is not.
            if self._has_link(name):
                self._in_switch([f"link del {name}"])
        _ip([f"netns del {self._prefix}{name}" for name in present])

    def remove_all(self) -> None:
        """Remove every namespace of this cluster, and with them all links."""
        self.close()
        _ip([f"netns del {path.name}" for path in self.existing()])

    def set_link(self, machine: str, *, up: bool) -> None:
        """Plug or pull the machine's cable (the end at the switch)."""
        try:
            kernel.set_link(self._switch_socket(), machine, up=up)
        except OSError as error:
            raise ClusterError(f"{machine} has no network link ({error.strerror})") from None

    def link_is_up(self, machine: str) -> bool:
        """Whether the machine's cable is plugged in."""
        return self._has_link(machine) and kernel.link_is_up(self._switch_socket(), machine)

    def slow(self, machine: str, delay_ms: float, rate_mbit: float | None) -> None:
        """Delay each frame by ``delay_ms`` in each direction, and limit the rate of each direction.

        The machine's cable leaves the bridge, and a relay passes frames between it and a new port.
        """
        self.fast(machine)
        port, end = _slow_port(machine), _slow_end(machine)
        self._in_switch(
            [
                f"link add {port} type veth peer name {end}",
                f"link set {end} up",
                f"link set {machine} nomaster",
                f"link set {port} master {BRIDGE} up",
            ]
        )
        rate = (rate_mbit or 0.0) * 1e6 / _BITS_PER_BYTE
        script = [sys.executable, "-I", "-S", str(_HERE / "delay.py"), str(self.netns(_SWITCH))]
        options = [machine, end, str(delay_ms / 1000.0), str(rate)]
        pid = int(run([*script, *options]))
        self._record(machine).write_text(f"{pid} {processes.start_ticks(pid)}\n")

    def fast(self, machine: str) -> None:
        """Undo ``slow``; not being slow is fine."""
        record = self._record(machine)
        if record.exists():
            pid, ticks = (int(word) for word in record.read_text().split())
            processes.send(pid, ticks, signal.SIGKILL)
            ended = f"the relay of {machine} to end"
            processes.wait_until(lambda: processes.start_ticks(pid) != ticks, _RELAY_DEADLINE_S, ended, 0.001)
            record.unlink()
        if self.is_slow(machine):
            self._in_switch([f"link del {_slow_port(machine)}", f"link set {machine} master {BRIDGE}"])

    def is_slow(self, machine: str) -> bool:
        """Whether ``slow`` is in force."""
        return self._has_link(_slow_port(machine))

    def part(self, machine: str, address: str) -> None:
        """Lose all that the machine sends to this address: nobody has the hardware address that it learns."""
        self._neighbour("replace", machine, address, f" lladdr {_NOBODY} nud permanent")
        with self._apart(machine).open("a") as record:
            record.write(f"{address}\n")

    def rejoin(self, machine: str) -> None:
        """Undo ``part``; not being parted from anybody is fine."""
        if self.is_parted(machine):
            for address in set(self._apart(machine).read_text().split()):
                self._neighbour("del", machine, address, "")
            self._apart(machine).unlink()

    def is_parted(self, machine: str) -> bool:
        """Whether ``part`` is in force."""
        return self._apart(machine).exists()

    def _neighbour(self, what: str, machine: str, address: str, more: str) -> None:
        _ip([f"neigh {what} {address} dev {NODE_INTERFACE}{more}"], f"{self._prefix}{machine}")

    def _apart(self, machine: str) -> Path:
        return self._records / f"apart-{machine}"

    def close(self) -> None:
        """Let go of the switch's namespace."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _record(self, machine: str) -> Path:
        return self._records / f"slow-{machine}"

    def _has_link(self, interface: str) -> bool:
        try:
            kernel.link_is_up(self._switch_socket(), interface)
        except OSError:
            return False
        return True

    def _in_switch(self, lines: Sequence[str]) -> None:
        _ip(lines, f"{self._prefix}{_SWITCH}")

    def _switch_socket(self) -> socket.socket:
        if self._control is None:
            try:
                self._control = kernel.socket_in_netns(self.netns(_SWITCH))
            except FileNotFoundError:
                raise ClusterError("the cluster is not up") from None
        return self._control


def any_netns() -> bool:
    """Whether any cluster has a network namespace on this host."""
    return any(_NETNS_DIRECTORY.glob(f"{NETNS_START}*"))


def _ip(lines: Sequence[str], namespace: str | None = None) -> None:
    where = ["-n", namespace] if namespace else []
    if lines:
        run(["ip", *where, "-batch", "-"], stdin="\n".join(lines) + "\n")


def _mac(address: str) -> str:
    # The same after a repair, as a machine's is: its peers go on using what they have learnt.
    return "02:4a:" + ipaddress.ip_address(address).packed[-4:].hex(":")


def _is_ipv6(address: str) -> bool:
    return isinstance(ipaddress.ip_address(address), ipaddress.IPv6Address)


def _with_prefix(address: str) -> str:
    return f"{address}/{ipaddress.ip_network(SUBNET_IPV6 if _is_ipv6(address) else SUBNET).prefixlen}"


def _slow_port(machine: str) -> str:
    return f"{machine}-port"


def _slow_end(machine: str) -> str:
    return f"{machine}-end"
