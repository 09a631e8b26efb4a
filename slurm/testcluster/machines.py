"""Starts machines and keeps their records: what a machine is made of, which processes are its own."""

from __future__ import annotations

import json
import pwd
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testcluster import freezer, processes
from testcluster.errors import ClusterError
from testcluster.network import Network
from testcluster.processes import Process
from testcluster.rootfs import RootPlan, Tmpfs
from testcluster.settings import (
    CONTROLLER,
    DATABASE_SOCKET,
    LOGIN,
    MUNGE_SOCKET,
    SCRATCH,
    SLURM_SYSTEM,
    SLURMDBD_PORT,
    Layout,
    Options,
)
from testcluster.software import DATABASE_USER
from testcluster.visibility import masks_for, needed_for, outermost, require_open

_HERE = Path(__file__).resolve().parent
_START_DEADLINE_S = 60.0
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_DAEMON_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Machine:
    """A running machine: its first process (with its start time) and its namespaces."""

    name: str
    address: str
    init: int
    ticks: int
    pid_namespace: tuple[int, int]
    net_namespace: tuple[int, int]
    own_pids: bool
    cgroup: str

    @property
    def group(self) -> Path | None:
        """The machine's cgroup, where the host has them."""
        return Path(self.cgroup) if self.cgroup else None

    @property
    def alive(self) -> bool:
        """Whether the machine's first process lives."""
        return processes.start_ticks(self.init) == self.ticks

    def pids(self) -> list[int]:
        """Every process of the machine, as the host numbers them."""
        if self.own_pids:
            # Its first process is the last to go, and the number of its namespace is another machine's then.
            return processes.in_namespaces("pid", [self.pid_namespace]) if self.alive else []
        return processes.in_namespaces("net", [self.net_namespace])

    def processes(self) -> list[Process]:
        """Every process of the machine except its first."""
        found = (processes.describe(pid) for pid in self.pids() if pid != self.init)
        return [process for process in found if process is not None]

    def path(self, inside: str) -> Path:
        """A path of the machine's file system, as the host reaches it."""
        return Path(f"/proc/{self.init}/root{inside}")

    def kill(self) -> None:
        """End the machine: the kernel kills every process of a PID namespace whose first process dies."""
        processes.send(self.init, self.ticks, signal.SIGKILL)
        # A SIGKILL waits in a frozen (or, without the freezer, stopped) process of older kernels.
        if self.group is not None and freezer.is_frozen(self.group):
            freezer.thaw(self.group, self.pids)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the state file."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Machine:
        """Inverse of ``to_json``."""
        fields = dict(data)
        fields["pid_namespace"] = tuple(fields["pid_namespace"])
        fields["net_namespace"] = tuple(fields["net_namespace"])
        return cls(**fields)


class Builder:
    """Makes the machines of one cluster."""

    def __init__(self, layout: Layout, options: Options, base: Path, network: Network, prefix: str) -> None:
        self._layout = layout
        self._options = options
        self._base = base
        self._network = network
        self._prefix = prefix
        self._munge = pwd.getpwnam("munge")
        python = needed_for(Path(options.python))
        for path in [*python, layout.directory]:
            require_open(path)
        self._keeps = outermost([*python, layout.directory])
        self._masks = masks_for(self._keeps)
        if base != Path("/") and Path(options.python).resolve().is_relative_to("/usr/bin"):
            raise ClusterError(f"{options.python} belongs to this system's /usr: give another with --python")

    def start(self, names: Sequence[str]) -> list[Machine]:
        """Start these machines (their networks exist already), all at once."""
        groups = {name: freezer.create(f"{self._prefix}{name}") for name in names}
        started: list[tuple[str, subprocess.Popen[str]]] = []
        script = [sys.executable, "-I", "-S", str(_HERE / "machine.py")]
        for name in names:
            self._layout.boot_id(name).write_text(f"{uuid.uuid4()}\n")
            specification = self._layout.spool / f"{name}.json"
            specification.write_text(json.dumps(self._specification(name, groups[name])))
            child = subprocess.Popen(
                [*script, str(specification)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append((name, child))
        known = self._options.addresses
        return [self._record(name, known[name], child, groups[name]) for name, child in started]

    def _record(self, name: str, address: str, child: subprocess.Popen[str], group: Path | None) -> Machine:
        try:
            output, errors = child.communicate(timeout=_START_DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise ClusterError(f"machine {name} did not start in {_START_DEADLINE_S:g} s") from None
        if child.returncode != 0:
            message = errors.strip().splitlines()
            raise ClusterError(f"machine {name}: {message[-1] if message else 'did not start'}")
        init = int(json.loads(output)["pid"])
        pids = processes.namespace_of(Path(f"/proc/{init}/ns/pid"))
        net = processes.namespace_of(Path(f"/proc/{init}/ns/net"))
        if pids is None or net is None:
            raise ClusterError(f"machine {name} ended at once: see {self._layout.log / name}.log")
        return Machine(
            name=name,
            address=address,
            init=init,
            ticks=processes.start_ticks(init),
            pid_namespace=pids,
            net_namespace=net,
            # A command on the login host keeps its process id: only the daemons there have their own.
            own_pids=name != LOGIN,
            cgroup=str(group or ""),
        )

    def _specification(self, name: str, group: Path | None) -> dict[str, Any]:
        return {
            "name": name,
            "netns": str(self._network.netns(name)),
            "cgroup": str(group or ""),
            "log": str(self._layout.log / f"{name}.log"),
            "root": self._root_plan(name).to_json(),
            "daemons": self._daemons(name),
        }

    def _root_plan(self, name: str) -> RootPlan:
        options = self._options
        own = [
            Tmpfs("/run", "0755", 64),
            Tmpfs("/tmp", "1777", options.tmp_mib),
            Tmpfs("/dev/shm", "1777", options.shm_mib),
        ]
        if name not in (CONTROLLER, LOGIN):
            own.append(Tmpfs(SCRATCH, "1777", options.scratch_mib))
        files = [(str(self._layout.etc / item), f"/etc/{item}") for item in ("hosts", "passwd", "shadow")]
        if options.slurm != SLURM_SYSTEM:
            files.append(("/etc/group", "/etc/group"))
        if name != LOGIN:  # there, /proc is the host's
            files.append((str(self._layout.boot_id(name)), BOOT_ID))
        return RootPlan(
            mount_point=str(self._layout.new_root),
            base=str(self._base),
            tmpfs=tuple(own),
            masks=tuple(str(mask) for mask in self._masks),
            keeps=tuple(str(keep) for keep in self._keeps),
            files=tuple(files),
            host_proc=name == LOGIN,
        )

    def _daemons(self, name: str) -> list[dict[str, Any]]:
        user, group = self._munge.pw_uid, self._munge.pw_gid
        key = f"--key-file={self._layout.munge_key}"
        files = ["--seed-file=/run/munge/munged.seed", "--pid-file=/run/munge/munged.pid"]
        found = [self._daemon(name, ["munged", "--foreground", key, *files], user, group)]
        found[0]["directories"] = [["/run/munge", user, group]]
        conf = str(self._layout.slurm_conf)
        if name == CONTROLLER:
            found += self._accounting() if self._options.accounting else []
            found.append(self._daemon(name, ["slurmctld", "-D", "-f", conf], 0, 0))
        elif name != LOGIN:
            found.append(self._daemon(name, ["slurmd", "-D", "-f", conf, "-N", name], 0, 0))
        for daemon in found[1:]:
            daemon["after"] = daemon["after"] or MUNGE_SOCKET
        if name == CONTROLLER and self._options.accounting:
            # Without its first answer, a slurmctld that has saved nothing yet ends.
            found[-1]["port"] = SLURMDBD_PORT
        return found

    def _accounting(self) -> list[dict[str, Any]]:
        """slurmdbd, and the database that it keeps its accounts in."""
        owner = pwd.getpwnam(DATABASE_USER)
        small = ["--skip-networking", "--innodb-buffer-pool-size=32M", "--performance-schema=OFF"]
        server = ["mariadbd", "--no-defaults", f"--datadir={self._layout.database}"]
        server += [f"--socket={DATABASE_SOCKET}", *small]
        database = self._daemon(CONTROLLER, server, owner.pw_uid, owner.pw_gid)
        database["directories"] = [[str(Path(DATABASE_SOCKET).parent), owner.pw_uid, owner.pw_gid]]
        slurmdbd = self._daemon(CONTROLLER, ["slurmdbd", "-D"], 0, 0)
        slurmdbd["after"] = DATABASE_SOCKET
        return [database, slurmdbd]

    def _daemon(self, name: str, argv: list[str], uid: int, gid: int) -> dict[str, Any]:
        return {
            "argv": argv,
            "uid": uid,
            "gid": gid,
            "log": str(self._layout.log / f"{name}.{argv[0]}.log"),
            "env": {"PATH": _DAEMON_PATH, "LANG": "C.UTF-8", "SLURM_CONF": str(self._layout.slurm_conf)},
            "directories": [],
            "after": None,
            "port": None,
        }
