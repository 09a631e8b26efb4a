"""Looks at the machines: what is broken, what jobs left behind, what ``down`` did not remove."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testcluster import freezer, processes
from testcluster.machines import Machine
from testcluster.settings import LOGIN, SCRATCH, USER
from testcluster.state import Running

_DISKS = ("/dev/shm", "/tmp", SCRATCH)
_END_DEADLINE_S = 30.0


class Inspector:
    """Everything that looks at a cluster from the host."""

    def __init__(self, cluster: Running) -> None:
        self._cluster = cluster

    def status(self) -> list[dict[str, Any]]:
        """One record a machine; ``slurm`` is Slurm's word for a node's state."""
        states = self._cluster.node_states() if self._cluster.machine(LOGIN).alive else {}
        return [
            {
                "name": name,
                "address": machine.address,
                "slurm": states.get(name, ""),
                "init_pid": machine.init,
                "slurmd_pid": self._slurmd(machine),
                "alive": machine.alive,
                "link": "up" if self._cluster.network.link_is_up(name) else "down",
                "frozen": machine.group is not None and freezer.is_frozen(machine.group),
                "slow": self._cluster.network.is_slow(name),
                "full_disks": self._full_disks(machine),
            }
            for name, machine in self._cluster.saved.machines.items()
        ]

    def broken(self) -> list[str]:
        """Nodes that need a repair; a node that is only drained or down in Slurm needs none."""
        nodes = [self._cluster.machine(name) for name in self._cluster.nodes]
        return [machine.name for machine in nodes if not self._healthy(machine)]

    def leftovers(self) -> list[str]:
        """The user's processes, files in /dev/shm, added mounts, and jobs; one line each."""
        found = [f"job {job.id} {job.name}: {job.state} on {job.nodes}" for job in self._cluster.squeue()]
        found += [f"{place}: {process.line()}" for place, process in self._user_processes()]
        for machine in self._alive():
            shared_memory = machine.path("/dev/shm")
            with contextlib.suppress(OSError):
                found += [f"{machine.name}: /dev/shm/{entry.name}" for entry in shared_memory.iterdir()]
        return found

    def clean(self) -> None:
        """End the user's processes."""
        processes.kill_all(lambda: [process.pid for _, process in self._user_processes()], _END_DEADLINE_S)

    def empty_disks(self) -> None:
        """Remove every file on the node-local disks, and nothing that is mounted into them."""
        for machine in self._alive():
            for disk in _DISKS:
                place = machine.path(disk)
                with contextlib.suppress(OSError):
                    for entry in place.iterdir():
                        _remove(entry, place.stat().st_dev)

    def remains(self, spaces: Sequence[tuple[int, int] | None]) -> list[str]:
        """What is still there after ``down``; ``spaces`` are the network namespaces it removed."""
        found = [f"process {pid}" for pid in processes.in_namespaces("net", spaces)]
        found += [f"network namespace {path.name}" for path in self._cluster.network.existing()]
        found += [f"cgroup {path}" for path in freezer.remaining(self._cluster.prefix)]
        inside = f"{self._cluster.layout.directory}/"
        mounts = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
        return found + [f"mount {target}" for target in mounts if target.startswith(inside)]

    def _alive(self) -> list[Machine]:
        return [machine for machine in self._cluster.saved.machines.values() if machine.alive]

    def _user_processes(self) -> list[tuple[str, processes.Process]]:
        """Processes of the unprivileged user: in each machine, and on the host outside any machine."""
        try:
            uid = pwd.getpwnam(USER).pw_uid
        except KeyError:
            return []
        places = {machine.net_namespace: machine.name for machine in self._alive()}
        host = processes.namespace_of(Path("/proc/self/ns/net"))
        if host is not None:
            places[host] = "host"
        found: list[tuple[str, processes.Process]] = []
        for pid in processes.all_pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}").stat().st_uid != uid:
                    continue
                space = processes.namespace_of(Path(f"/proc/{pid}/ns/net"))
                process = processes.describe(pid)
                # Another cluster on this host has the same user and other namespaces.
                if process is not None and space in places:
                    found.append((places[space], process))
        return found

    def _slurmd(self, machine: Machine) -> int | None:
        children = (item for item in machine.processes() if item.parent == machine.init)
        return next((item.pid for item in children if item.command.startswith("slurmd -D")), None)

    def _healthy(self, machine: Machine) -> bool:
        if not machine.alive or not self._cluster.network.link_is_up(machine.name):
            return False
        if machine.group is not None and freezer.is_frozen(machine.group):
            return False
        network = self._cluster.network
        if network.is_slow(machine.name) or network.is_parted(machine.name) or self._full_disks(machine):
            return False
        return self._slurmd(machine) is not None and not any(map(_stopped, machine.pids()))

    def _full_disks(self, machine: Machine) -> list[str]:
        if not machine.alive:
            return []
        full: list[str] = []
        for disk in _DISKS:
            with contextlib.suppress(OSError):
                usage = os.statvfs(machine.path(disk))
                if usage.f_blocks * usage.f_frsize < self._cluster.disk_bytes(disk):
                    full.append(disk)
        return full


def _stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _remove(entry: Path, device: int) -> None:
    """Remove a file or a tree as far as it lies on `device`.

    A checkout or a Python below the host's /tmp is mounted at the same path in every machine, with all its
    files: these must stay.
    """
    with contextlib.suppress(OSError):
        status = entry.lstat()
        if status.st_dev != device:
            return
        if not stat.S_ISDIR(status.st_mode):
            entry.unlink()
            return
        for below in list(entry.iterdir()):
            _remove(below, device)
        entry.rmdir()  # refused when something is mounted below it
