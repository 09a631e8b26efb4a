"""Names, addresses and sizes of the test cluster, in one place."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_DIR = Path("/var/lib/jurymast-testcluster")
DIR_VARIABLE = "JURYMAST_TESTCLUSTER_DIR"
SLURM_VARIABLE = "JURYMAST_TESTCLUSTER_SLURM"
HOST_LOCK = Path("/run/jurymast-testcluster.lock")
BASES = Path("/var/cache/jurymast-testcluster")
USER = "jurymast-test"

# The switch lives in a network namespace of its own: the host sees no bridge and no route, its firewall
# does not filter the cluster's traffic, and several clusters may run side by side.
SUBNET = "10.77.0.0/24"
SUBNET_IPV6 = "fd77::/64"  # of a cluster without IPv4
BRIDGE = "switch0"
NODE_INTERFACE = "eth0"
NETNS_START = "jmtc-"
CONTROLLER = "ctl"
LOGIN = "login"
CONTROLLER_HOST_NUMBER = 1
LOGIN_HOST_NUMBER = 2
FIRST_NODE_HOST_NUMBER = 11
MAX_NODES = 200

DEFAULT_SLURMD_TIMEOUT_S = 15
SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SLURMDBD_PORT = 6819
PARTITION = "main"
DEBUG_PARTITION = "debug"
DEBUG_NODES = 2
CLUSTER_NAME = "jurymast-testcluster"

MUNGE_SOCKET = "/run/munge/munge.socket.2"
DATABASE_SOCKET = "/run/mysqld/mysqld.sock"  # where its clients look for it
SCRATCH = "/scratch"
SITE_LOG = "/run/site.log"  # each node's own
MIB = 1024 * 1024

SLURM_SYSTEM = "system"
# Newer releases, and the Debian that has each.
SUITE_OF = {"24.11": "trixie", "26.05": "forky"}
SLURM_CHOICES = (SLURM_SYSTEM, *SUITE_OF)


def node_name(index: int) -> str:
    """Name of the node with this zero-based index."""
    return f"n{index + 1}"


def netns_prefix(directory: Path) -> str:
    """Start of the network namespace names of the cluster whose state is in this directory."""
    return f"{NETNS_START}{hashlib.sha256(str(directory).encode()).hexdigest()[:6]}-"


@dataclass(frozen=True)
class Options:
    """What ``up`` was asked for; kept in the state file so that ``repair`` can rebuild a node."""

    nodes: int = 6
    cpus: int = 8
    gpus: int = 8
    slurm: str = SLURM_SYSTEM
    slurmd_timeout_s: int = DEFAULT_SLURMD_TIMEOUT_S
    python: str = ""
    shm_mib: int = 4096
    scratch_mib: int = 2048
    tmp_mib: int = 1024
    site: bool = False
    ipv6: bool = False
    accounting: bool = False
    conf: tuple[str, ...] = field(default=())

    @property
    def addresses(self) -> dict[str, str]:
        """Address of every machine, by name: controller and login host first."""
        subnet = ipaddress.ip_network(SUBNET_IPV6 if self.ipv6 else SUBNET)
        numbers = {CONTROLLER: CONTROLLER_HOST_NUMBER, LOGIN: LOGIN_HOST_NUMBER}
        numbers.update({node_name(index): FIRST_NODE_HOST_NUMBER + index for index in range(self.nodes)})
        return {name: str(subnet[number]) for name, number in numbers.items()}

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Options:
        """Inverse of ``to_json``."""
        return cls(**{**data, "conf": tuple(data["conf"])})


@dataclass(frozen=True)
class Layout:
    """Where the cluster keeps its files."""

    directory: Path

    @property
    def shared(self) -> Path:
        """Shared storage: the same files on every node and on the login host, mode 1777."""
        return self.directory / "shared"

    @property
    def home(self) -> Path:
        """Home of the unprivileged user, shared too."""
        return self.directory / "home" / USER

    @property
    def etc(self) -> Path:
        """slurm.conf and the machines' own /etc files."""
        return self.directory / "etc"

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF points at."""
        return self.etc / "slurm.conf"

    @property
    def library(self) -> Path:
        """Where the site's health check looks for libraries first: a test's NVML."""
        return self.etc / "lib"

    @property
    def health_check(self) -> Path:
        """Slurm's HealthCheckProgram, when the cluster has the site's pieces."""
        return self.etc / "healthcheck"

    @property
    def verdicts(self) -> Path:
        """The site's spool for verdicts, the same on every node, mode 1733."""
        return self.directory / "verdicts"

    def boot_id(self, name: str) -> Path:
        """What a machine reads as its kernel's boot id."""
        return self.etc / f"boot-id.{name}"

    @property
    def log(self) -> Path:
        """Logs of every daemon and machine."""
        return self.directory / "log"

    @property
    def spool(self) -> Path:
        """State of slurmctld and spool directories of the slurmds."""
        return self.directory / "spool"

    @property
    def database(self) -> Path:
        """Files of slurmdbd's MariaDB."""
        return self.spool / "database"

    @property
    def munge_key(self) -> Path:
        """The cluster's own munge key; the host's is not touched."""
        return self.directory / "munge" / "munge.key"

    @property
    def new_root(self) -> Path:
        """Mount point on which each machine builds its root, in its own mount namespace."""
        return self.directory / "root"

    @property
    def state_file(self) -> Path:
        """Process ids and options of the running cluster."""
        return self.directory / "cluster.json"

    @property
    def lock_file(self) -> Path:
        """Held by whoever brings the cluster up or down, or uses it through the Python API."""
        return self.directory / "lock"
