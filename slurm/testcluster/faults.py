"""Faults: each acts within milliseconds and reports the wall clock just before it did."""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from testcluster import freezer, processes
from testcluster.errors import ClusterError
from testcluster.machines import Machine
from testcluster.processes import Process
from testcluster.settings import CONTROLLER, SCRATCH
from testcluster.state import Running

_SIGNALS = {
    "KILL": signal.SIGKILL,
    "STOP": signal.SIGSTOP,
    "CONT": signal.SIGCONT,
    "TERM": signal.SIGTERM,
    "INT": signal.SIGINT,
    "ABRT": signal.SIGABRT,
    "SEGV": signal.SIGSEGV,
    "BUS": signal.SIGBUS,
    "USR1": signal.SIGUSR1,
    "USR2": signal.SIGUSR2,
}
_FILLER = ".disk-full"
_FILL_ATTEMPTS = 10
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Fault:
    """A fault that was applied; ``time`` is unix seconds just before, ``took_s`` how long applying took."""

    kind: str
    target: str
    time: float
    took_s: float
    pids: tuple[int, ...] = field(default=())  # the signalled processes, as the host numbers them

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the command line."""
        return asdict(self)


class Faults:
    """The faults of one cluster."""

    def __init__(self, cluster: Running) -> None:
        self._cluster = cluster
        self._kinds: Mapping[str, Callable[..., tuple[int, ...]]] = {
            "kill": self._kill,
            "crash": self._crash,
            "power-loss": self._power_loss,
            "partition": self._partition,
            "part": self._part,
            "heal": self._heal,
            "freeze": self._freeze,
            "thaw": self._thaw,
            "slow": self._slow,
            "disk-full": self._disk_full,
            "repaired": self._repaired,
            "slurmctld-restart": self._slurmctld_restart,
        }

    @property
    def kinds(self) -> list[str]:
        """Every kind of fault."""
        return sorted(self._kinds)

    def apply(self, kind: str, target: str | None = None, **options: Any) -> Fault:
        """Apply one fault; the options are those of the kind's method below."""
        if kind not in self._kinds:
            raise ClusterError(f"no fault {kind!r}: choose from {', '.join(self.kinds)}")
        name = CONTROLLER if kind == "slurmctld-restart" else (target or "")
        machine = self._cluster.machine(name)
        act = self._kinds[kind]
        now = time.time()
        started = time.monotonic()
        pids = act(machine, **options)
        return Fault(kind, name, now, time.monotonic() - started, pids)

    def _kill(
        self,
        machine: Machine,
        *,
        pid: int | None = None,
        match: str | None = None,
        signal: str = "KILL",
    ) -> tuple[int, ...]:
        """Signal the process with this pid (the machine's numbering), or all that match a pattern."""
        number = _SIGNALS.get(signal.upper().removeprefix("SIG"))
        if number is None:
            raise ClusterError(f"no signal {signal!r}: choose from {', '.join(_SIGNALS)}")
        found = self._find(machine, pid, match)
        for process in found:
            processes.send(process.pid, processes.start_ticks(process.pid), number)
        return tuple(process.pid for process in found)

    def _find(self, machine: Machine, pid: int | None, match: str | None) -> list[Process]:
        if (pid is None) == (match is None):
            raise ClusterError("kill needs either a pid or a pattern")
        if match is None:
            found = [process for process in machine.processes() if process.node_pid == pid]
        else:
            try:
                pattern = re.compile(match)
            except re.error as error:
                raise ClusterError(f"bad pattern {match!r}: {error}") from None
            found = [item for item in machine.processes() if processes.matches(item, pattern)]
        if not found:
            raise ClusterError(f"no such process on {machine.name}: {match if match is not None else pid}")
        return found

    def _crash(self, machine: Machine) -> tuple[int, ...]:
        """End every process at once; the machine's network stays, so that its peers see resets."""
        self._require_node(machine)
        machine.kill()
        return (machine.init,)

    def _power_loss(self, machine: Machine) -> tuple[int, ...]:
        """Cut the link, then end every process: nothing more is ever heard from the machine."""
        self._require_node(machine)
        self._cluster.network.set_link(machine.name, up=False)
        machine.kill()
        return (machine.init,)

    def _partition(self, machine: Machine) -> tuple[int, ...]:
        """Cut the link; the processes go on."""
        self._cluster.network.set_link(machine.name, up=False)
        return ()

    def _part(self, machine: Machine, *, other: str, one_way: bool = False) -> tuple[int, ...]:
        """Lose all that the machine and another one send to each other, or (``one_way``) what the machine
        sends; all else goes on."""
        far = self._cluster.machine(other)
        self._cluster.network.part(machine.name, far.address)
        if not one_way:
            self._cluster.network.part(far.name, machine.address)
        return ()

    def _heal(self, machine: Machine) -> tuple[int, ...]:
        """Undo ``partition`` and ``slow``, and this machine's side of ``part``."""
        self._cluster.network.set_link(machine.name, up=True)
        self._cluster.network.fast(machine.name)
        self._cluster.network.rejoin(machine.name)
        return ()

    def _freeze(self, machine: Machine) -> tuple[int, ...]:
        """Stop every process; the kernel still acknowledges what arrives for them."""
        self._require_node(machine)
        freezer.freeze(machine.group, machine.pids)
        return ()

    def _thaw(self, machine: Machine) -> tuple[int, ...]:
        """Undo ``freeze``."""
        freezer.thaw(machine.group, machine.pids)
        return ()

    def _slow(
        self, machine: Machine, *, delay_ms: float = 0.0, rate_mbit: float | None = None, off: bool = False
    ) -> tuple[int, ...]:
        """Delay every packet by ``delay_ms`` in each direction and limit the rate; ``off`` undoes it."""
        if off:
            self._cluster.network.fast(machine.name)
        elif delay_ms <= 0 and rate_mbit is None:
            raise ClusterError("slow needs a delay or a rate")
        else:
            self._cluster.network.slow(machine.name, delay_ms, rate_mbit)
        return ()

    def _disk_full(self, machine: Machine, *, path: str = SCRATCH, off: bool = False) -> tuple[int, ...]:
        """Leave no free space on a node-local disk; what is deleted there becomes free again."""
        size = self._cluster.disk_bytes(path)
        disk = machine.path(path)
        filler = disk / _FILLER
        if off:
            self._resize(machine, path, size)
            filler.unlink(missing_ok=True)
            return ()
        # The disk is shrunk to what is used rather than filled: at once, and without using memory. A size of
        # zero would mean no limit, hence the small file.
        filler.write_bytes(b"\0" * _PAGE_BYTES)
        for _ in range(_FILL_ATTEMPTS):
            usage = os.statvfs(disk)
            used = (usage.f_blocks - usage.f_bfree) * usage.f_bsize
            if usage.f_bfree == 0:
                return ()
            try:
                self._resize(machine, path, used)
            except ClusterError:
                continue  # it grew meanwhile
        raise ClusterError(f"{path} on {machine.name} changes too fast to fill")

    def _resize(self, machine: Machine, path: str, size: int) -> None:
        argv = ["mount", "-o", f"remount,size={size}", path]
        done = self._cluster.exec(machine.name, argv, root=True, check=False)
        if done.returncode != 0:
            raise ClusterError(f"{path} on {machine.name}: {done.stderr.strip()}")

    def _repaired(self, machine: Machine) -> tuple[int, ...]:
        """Let the node look as if it had been repaired and booted; its processes go on, Slurm is not told."""
        self._require_node(machine)
        # In place: the file is mounted into the machine.
        self._cluster.layout.boot_id(machine.name).write_text(f"{uuid.uuid4()}\n")
        return ()

    def _slurmctld_restart(self, machine: Machine, *, crash: bool = False) -> tuple[int, ...]:
        """Stop slurmctld (SIGKILL with ``crash``) and start it again; returns when it answers."""
        self._cluster.restart_slurmctld(crash=crash)
        return ()

    def _require_node(self, machine: Machine) -> None:
        if machine.name not in self._cluster.nodes:
            raise ClusterError(f"{machine.name} is not a node: choose from {', '.join(self._cluster.nodes)}")
