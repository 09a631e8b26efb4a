"""The cluster's network: a bridge in a namespace of its own, and one namespace and veth pair a machine."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from testcluster import kernel
from testcluster.errors import ClusterError
from testcluster.processes import run
from testcluster.settings import BRIDGE, NODE_INTERFACE, PREFIX_LENGTH

_NETNS_DIRECTORY = Path("/run/netns")
_SWITCH = "switch"
# netem drops what exceeds its queue; a fast link with a delay holds many packets.
_QUEUE_PACKETS = 100_000


class Network:
    """Creates, breaks, mends and removes the links; ``prefix`` starts the namespaces' names."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._control: socket.socket | None = None

    def netns(self, machine: str) -> Path:
        """File that stands for the machine's network namespace."""
        return _NETNS_DIRECTORY / f"{self._prefix}{machine}"

    def existing(self) -> list[Path]:
        """Every network namespace of this cluster, the switch's included."""
        return sorted(_NETNS_DIRECTORY.glob(f"{self._prefix}*"))

    def create(self, machines: Sequence[tuple[str, str]]) -> None:
        """Make the switch, and a link for every (machine, address)."""
        run(["ip", "-batch", "-"], stdin=f"netns add {self._prefix}{_SWITCH}\n")
        self._in_switch([f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
        self.add(machines)

    def add(self, machines: Sequence[tuple[str, str]]) -> None:
        """Make a namespace with a link for every (machine, address)."""
        lines = [f"netns add {self._prefix}{name}" for name, _ in machines]
        run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")
        self._in_switch(
            [
                command
                for name, _ in machines
                for command in (
                    f"link add {name} type veth peer name {NODE_INTERFACE} netns {self._prefix}{name}",
                    f"link set {name} master {BRIDGE} up",
                )
            ]
        )
        for name, address in machines:
            lines = [
                "link set lo up",
                f"address add {address}/{PREFIX_LENGTH} dev {NODE_INTERFACE}",
                f"link set {NODE_INTERFACE} up",
            ]
            run(["ip", "-n", f"{self._prefix}{name}", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def remove(self, machines: Sequence[str]) -> None:
        """Remove these machines' links and namespaces; missing ones are fine."""
        present = [name for name in machines if self.netns(name).exists()]
        if not present:
            return
        # The link first: its removal is done when the command returns, that of a namespace is not.
        self._in_switch([f"link del {name}" for name in present], force=True)
        lines = [f"netns del {self._prefix}{name}" for name in present]
        run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def remove_all(self) -> None:
        """Remove every namespace of this cluster, and with them all links."""
        self.close()
        lines = [f"netns del {path.name}" for path in self.existing()]
        if lines:
            run(["ip", "-batch", "-"], stdin="\n".join(lines) + "\n")

    def set_link(self, machine: str, *, up: bool) -> None:
        """Plug or pull the machine's cable (the end at the switch)."""
        try:
            kernel.set_link(self._switch_socket(), machine, up=up)
        except OSError as error:
            raise ClusterError(f"{machine} has no network link ({error.strerror})") from None

    def link_is_up(self, machine: str) -> bool:
        """Whether the machine's cable is plugged in."""
        try:
            return kernel.link_is_up(self._switch_socket(), machine)
        except OSError:
            return False

    def slow(self, machine: str, delay_ms: float, rate_mbit: float | None) -> None:
        """Delay each packet by ``delay_ms`` in each direction, and limit the rate of each direction."""
        options = ["netem", "limit", str(_QUEUE_PACKETS), "delay", f"{delay_ms:g}ms"]
        if rate_mbit is not None:
            options += ["rate", f"{rate_mbit:g}mbit"]
        for namespace, device in self._ends(machine):
            run(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *options])

    def fast(self, machine: str) -> None:
        """Undo ``slow``."""
        if not self.is_slow(machine):
            return
        for namespace, device in self._ends(machine):
            run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"])

    def is_slow(self, machine: str) -> bool:
        """Whether ``slow`` is in force."""
        namespace, device = self._ends(machine)[0]
        return " netem " in run(["tc", "-n", namespace, "qdisc", "show", "dev", device])

    def close(self) -> None:
        """Let go of the switch's namespace."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _ends(self, machine: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return (f"{self._prefix}{_SWITCH}", machine), (f"{self._prefix}{machine}", NODE_INTERFACE)

    def _in_switch(self, lines: Sequence[str], *, force: bool = False) -> None:
        options = ["-force"] if force else []
        argv = ["ip", *options, "-n", f"{self._prefix}{_SWITCH}", "-batch", "-"]
        try:
            run(argv, stdin="\n".join(lines) + "\n")
        except ClusterError:
            if not force:
                raise

    def _switch_socket(self) -> socket.socket:
        if self._control is None:
            try:
                self._control = kernel.socket_in_netns(self.netns(_SWITCH))
            except FileNotFoundError:
                raise ClusterError("the cluster is not up") from None
        return self._control
