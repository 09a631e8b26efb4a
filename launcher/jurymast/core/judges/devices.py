"""Works around a failing network device: the ranks' next attempt on that node leaves it out, and the node
stays.

A probe's verdict says whether that is possible: `suspect` while another device of the kind is up, `bad` if
none is. Its codes begin with "ib-" for a port of an RDMA device ("mlx5_1:1") and with "net-" for an ordinary
interface ("eth1").

NCCL's filters (RCCL reads the same variables) are lists of name prefixes; `^` before the list excludes, `=`
after that makes the names exact, and NAME:PORT is one port of an RDMA device: NCCL user guide, "Environment
Variables", NCCL_SOCKET_IFNAME and NCCL_IB_HCA. gloo's GLOO_SOCKET_IFNAME is a list of exact names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jurymast.core.state.findings import NETWORK, Finding, Verdict

PORTS, INTERFACES, GLOO = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
VARIABLES = (PORTS, INTERFACES, GLOO)
# The interfaces that NCCL itself leaves out if NCCL_SOCKET_IFNAME is not set.
NEVER_BY_DEFAULT = ("lo", "docker")


@dataclass(frozen=True)
class WorkAround:
    """Variables for the ranks of a node, and the reason; both empty if nothing is left out. `devices` are
    those left out, as the probe names them."""

    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    reason: str = ""


def work_around(
    findings: Iterable[Finding], ports: Sequence[str], interfaces: Sequence[str], users: Mapping[str, str]
) -> WorkAround:
    """Return the variables by which a node's ranks leave out the devices that `findings` on it name.

    `ports` ("mlx5_0:1") and `interfaces` are all that the node has; `users` are the variables of the user,
    which stay as they are except for the failing device. If nothing would be left over, nothing is left out.
    """
    failing = {
        found.device: found
        for found in findings
        if found.kind == NETWORK and found.verdict is Verdict.SUSPECT and found.device
    }
    bad_ports = [name for name, found in failing.items() if found.code.startswith("ib-")]
    bad_interfaces = [name for name, found in failing.items() if found.code.startswith("net-")]
    default = [name for name in interfaces if name.startswith(NEVER_BY_DEFAULT)]
    environment = {
        PORTS: leave_out(users.get(PORTS, ""), bad_ports, ports),
        INTERFACES: leave_out(
            users.get(INTERFACES, ""), bad_interfaces, interfaces, () if users.get(INTERFACES) else default
        ),
        GLOO: _without(users.get(GLOO, ""), bad_interfaces),
    }
    environment = {variable: value for variable, value in environment.items() if value}
    out = [*bad_ports] if PORTS in environment else []
    out += bad_interfaces if environment.keys() & {INTERFACES, GLOO} else []
    return WorkAround(environment, tuple(out), "; ".join(failing[name].message for name in out))


def leave_out(users: str, failing: Sequence[str], known: Sequence[str], besides: Sequence[str] = ()) -> str:
    """Return a filter in NCCL's syntax like `users` ("" for none) without the `failing` devices, and without
    what is left out `besides`; "" if it would be the same, or would leave nothing of the `known` names."""
    failing = [name for name in failing if lets_through(users, name)]
    left = [name for name in known if lets_through(users, name) and name not in (*failing, *besides)]
    if not failing or (known and not left):
        return ""
    if not users or users.startswith("^="):
        before = [name for name in users.removeprefix("^=").split(",") if name]
        return "^=" + ",".join([*before, *(_short(name, known) for name in failing), *besides])
    # Prefixes cannot be mixed with exact names, nor names to use with names to exclude: list those to use.
    return "=" + ",".join(_short(name, known) for name in left) if left else ""


def _without(users: str, failing: Sequence[str]) -> str:
    """Return a list of exact names without the failing ones; "" if that is the same, or nothing."""
    named = [name.strip() for name in users.split(",") if name.strip()]
    kept = [name for name in named if name not in failing]
    return ",".join(kept) if kept != named else ""


def lets_through(users: str, name: str) -> bool:
    """Return whether the filter `users` lets NCCL use `name` ("mlx5_1:1", "eth1"). An empty one allows
    everything."""
    excluding = users.startswith("^")
    entries = [entry for entry in users.removeprefix("^").removeprefix("=").split(",") if entry]
    exact = users.removeprefix("^").startswith("=")
    hit = any(_matches(entry, name, exact) for entry in entries)
    return not entries or hit is not excluding


def names(users: str, name: str) -> bool:
    """Return whether the user requested `name`, rather than merely not excluding it."""
    return bool(users) and not users.startswith("^") and lets_through(users, name)


def _matches(entry: str, name: str, exact: bool) -> bool:
    device, _, port = name.partition(":")
    wanted, _, wanted_port = entry.partition(":")
    if wanted_port and port and wanted_port != port:
        return False
    return device == wanted if exact else device.startswith(wanted)


def _short(name: str, known: Sequence[str]) -> str:
    """Return the device's own name if it has only one port."""
    device, _, port = name.partition(":")
    ports = [each for each in known if each.partition(":")[0] == device]
    return name if port and len(ports) > 1 else device
