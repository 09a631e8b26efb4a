"""The agent's part in working around failing network devices: variables for its ranks at each launch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jurymast.core import messages as msg
from jurymast.core.nodes import devices
from jurymast.core.nodes.devices import WorkAround, work_around
from jurymast.core.nodes.findings import NETWORK, Finding, Verdict

WORKED_AROUND = "worked-around"


class NetworkWorkaround:
    """Makes ranks avoid failing network devices. `findings` returns what holds on this node now. `tell`
    reports to the supervisor which devices were left out, as findings of the agent, which cause no action and
    end with the first attempt that uses the device again."""

    def __init__(
        self,
        enabled: bool,
        findings: Callable[[], Sequence[Finding]],
        tell: Callable[[msg.HealthFound], None],
    ) -> None:
        self._enabled = enabled
        self._findings = findings
        self._tell = tell
        self._out: set[str] = set()

    def environment(self, attempt: int) -> dict[str, str]:
        """Return variables for the ranks of `attempt` on this node."""
        if not self._enabled:
            return {}
        users = {name: os.environ.get(name, "") for name in devices.VARIABLES}
        around = work_around(self._findings(), rdma_ports(), interfaces(), users)
        for device in self._out - set(around.devices):
            self._say(device, Verdict.OK, f"the ranks of attempt {attempt} use {device} again")
        for device in around.devices:
            self._say(device, Verdict.UNKNOWN, _told(attempt, device, around))
        self._out = set(around.devices)
        return around.environment

    def _say(self, device: str, verdict: Verdict, message: str) -> None:
        found = Finding(
            probe="agent", code=WORKED_AROUND, verdict=verdict, kind=NETWORK, device=device, message=message,
            at=time.time(),
        )  # fmt: skip
        self._tell(msg.HealthFound(finding=found))


def _told(attempt: int, device: str, around: WorkAround) -> str:
    values = ", ".join(f"{name}={value}" for name, value in around.environment.items())
    return f"the ranks of attempt {attempt} do not use {device} ({values}): {around.reason}"


def rdma_ports(sys: Path = Path("/sys")) -> list[str]:
    """List every port of every RDMA device here ("mlx5_0:1"). Only names are read: no driver is asked."""
    ports = sorted((sys / "class/infiniband").glob("*/ports/*"))
    return [f"{port.parent.parent.name}:{port.name}" for port in ports]


def interfaces(sys: Path = Path("/sys")) -> list[str]:
    """List the names of this machine's network interfaces."""
    return sorted(interface.name for interface in (sys / "class/net").glob("*"))
