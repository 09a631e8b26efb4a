"""Strikes a run on the test cluster as a plan says, undoes what lasts, mends what a requeued job waits for,
and keeps a log of all of it: whom, when, and what the journal said just then."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.chaotic.faultlog import Struck
from benchmarks.chaotic.plans import KINDS, NODE, RANK, SHOWN_BY, SPARE, SUPERVISOR, Fault, Plan
from jurymast.checkpoint.directory import CheckpointDirectory
from jurymast.core.state.images import PEER
from jurymast.core.state.run import Phase, RunState
from support.slurm_runs import SlurmRun, hurried, jurymast
from testcluster import Cluster, ClusterError
from testcluster.processes import Process

POLL_S = 0.1
# Each question takes two processes: not while the run does steps.
ASK_EVERY_S, SILENT_S = 2.0, 5.0
COMMAND_S = 60.0
# So long a fault waits for what it is to strike: a rank that is being started, or a replica.
CHANCE_S = 20.0
FLAP_S = 0.7
SLOW_MS = 60


class NotPossibleError(Exception):
    """What a fault is to strike is not there just now; nothing was done."""


# What is struck, or helped up, is gone, or the run has not got there yet.
_NOT_NOW = (
    NotPossibleError, ClusterError, OSError, psutil.Error, subprocess.SubprocessError, AssertionError,
)  # fmt: skip


@dataclass
class Places:
    """Where a run keeps what, as the host reaches it: the file systems of its checkpoints and its directory,
    which can be made to hang, its `checkpoints`, and `orders` for its script. `inside`: its directory as
    the cluster's machines know it."""

    share: Path
    runs: Path
    checkpoints: Path
    orders: Path
    inside: Path


class Undo:
    """Ends what lasts after so many seconds, or before; by a thread of its own, since commands may hang for
    as long as it is in force."""

    def __init__(self, struck: Struck, seconds: float, act: Callable[[], None]) -> None:
        self._struck, self._act = struck, act
        self._lock = threading.Lock()
        self.over = False
        self._timer = threading.Timer(seconds, self.now)
        self._timer.daemon = True
        self._timer.start()

    def now(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self.over:
                return
            with suppress(*_NOT_NOW):  # the machine has died meanwhile
                self._act()
            self._struck.until = time.time()
            self.over = True


@dataclass
class Nemesis:
    cluster: Cluster
    run: SlurmRun
    plan: Plan
    places: Places
    log: list[Struck] = field(default_factory=list)
    _undo: list[Undo] = field(default_factory=list)
    _waiting: list[tuple[float, Fault]] = field(default_factory=list)
    _asked_at: float = 0.0
    _why_not: dict[Fault, str] = field(default_factory=dict)  # those that wait for their chance
    _stored: dict[Fault, int] = field(default_factory=dict)  # the newest step there, when it was due
    _reached: int = 0  # the newest step that the run ever did

    def play(self, limit_s: float) -> RunState:
        """Until the run has ended, or the time is over; then nothing is left in force."""
        end = time.monotonic() + limit_s
        self._waiting = [(-1.0, fault) for fault in self.plan.faults]
        try:
            while True:
                state = self.run.look()
                self._reached = max(self._reached, state.best_step, state.step)
                if state.ended or time.monotonic() > end:
                    return state
                self._strike_due(state)
                self._look_at_job(state)
                time.sleep(POLL_S)
        finally:
            for undo in self._undo:
                undo.now()
            for _, fault in self._waiting:
                why = self._why_not.get(fault, "not due")
                self.log.append(Struck(fault.kind, why_not=f"the run was over ({why})"))

    # --- when ---

    def _strike_due(self, state: RunState) -> None:
        now = time.monotonic()
        waiting, self._waiting = self._waiting, []
        held = set[tuple[int, str]]()  # what is to show another one, which has not struck yet
        for due, fault in waiting:
            if due < 0.0 and self._reached >= fault.at:
                due = now + fault.wait_s
            wait = due < 0.0 or now < due or (fault.at, fault.kind) in held
            if wait or not self._strike(fault, state, now < due + CHANCE_S):
                self._waiting.append((due, fault))
                held.add((fault.at, SHOWN_BY.get(fault.kind, "")))

    def _strike(self, fault: Fault, state: RunState, patient: bool) -> bool:
        """Strike; False if it has to wait."""
        struck = Struck(
            fault.kind, phase=state.phase.value, attempt=state.attempt, step=state.step, at=time.time()
        )
        try:
            struck.node, struck.rank = self._whom(fault, state)
            if fault.kind == "standby":  # only those that would be the next supervisor's nodes have one
                struck.node = self._with_standby(state)
            struck.placed = struck.node in state.placement
            undo = self._do(fault, struck, state)
        except _NOT_NOW as error:
            if patient and isinstance(error, NotPossibleError):
                self._why_not[fault] = str(error)
                return False
            struck.why_not, undo = f"{type(error).__name__}: {error}"[:300], None
        self.log.append(struck)
        struck.done_at = struck.until = time.time()
        if undo is not None:
            self._undo.append(Undo(struck, fault.seconds, undo))
        return True

    def _look_at_job(self, state: RunState) -> None:
        """A job that was requeued starts soon; nodes that it waits for come back as from a repair."""
        waits = state.phase is not Phase.RUNNING or time.time() > state.stepped_at + SILENT_S
        lasts = not all(undo.over for undo in self._undo)
        if not waits or lasts or time.monotonic() < self._asked_at + ASK_EVERY_S:
            return
        self._asked_at = time.monotonic()
        try:
            record = hurried(self.cluster, self.run.job)
        except (AssertionError, ClusterError):
            return  # it has ended, or slurmctld is away
        if record["JobState"] != "PENDING":
            return
        broken = [name for name in self.cluster.nodes if not self.cluster.machine(name).alive]
        fit = len(self.cluster.nodes) - len(broken)
        if broken and (fit < self.plan.active + self.plan.spares or record.get("Reason") == "Resources"):
            repaired = Struck("repaired", ",".join(broken), at=time.time(), phase=state.phase.value)
            with suppress(ClusterError):
                self.cluster.repair(*broken)
            repaired.done_at = repaired.until = time.time()
            self.log.append(repaired)

    # --- whom ---

    def _whom(self, fault: Fault, state: RunState) -> tuple[str, int | None]:
        strikes = KINDS[fault.kind].strikes
        if strikes == SUPERVISOR:
            return state.supervised_on or state.host, None
        spares = [node.name for node in state.spare_nodes()]
        if strikes == SPARE:
            return _one_of(spares, fault.place, "spare"), None
        if strikes == RANK:
            node = _one_of(list(state.placement), fault.place, "placed node")
            return node, state.placement.index(node)
        if strikes == NODE:
            return _one_of([*state.placement, *spares], fault.place, "node"), None
        return "", None

    def _with_standby(self, state: RunState) -> str:
        for name in state.nodes:
            with suppress(NotPossibleError):
                self._processes(name, " jurymast.supervisor.standby ")
                return name
        raise NotPossibleError("no node has a standby")

    def _processes(self, node: str, words: str) -> list[Process]:
        """Of the user's; not the srun that started them, whose command holds theirs."""
        found = [
            one
            for one in self.cluster.processes(node)
            if words in one.command and one.uid != 0 and not one.command.startswith("srun ")
        ]
        if not found:
            raise NotPossibleError(f"no process of {words} on {node}")
        return found

    def _signal(self, node: str, pids: list[int], signal: str) -> None:
        """Some may end with those that were struck before them."""
        struck = 0
        for pid in pids:
            with suppress(ClusterError):
                self.cluster.fault("kill", node, pid=pid, signal=signal)
                struck += 1
        if not struck:
            raise NotPossibleError(f"processes {pids} of {node} are gone")

    def _agent(self, node: str) -> list[int]:
        """The agent, whose parent is its guard."""
        found = self._processes(node, " jurymast.agent ")
        pids = {one.pid for one in found}
        return [one.node_pid for one in found if one.parent in pids]

    def _guard(self, node: str) -> list[int]:
        found = self._processes(node, " jurymast.agent ")
        pids = {one.pid for one in found}
        return [one.node_pid for one in found if one.parent not in pids]

    def _named(self, node: str, name: str) -> list[int]:
        """Processes that have given themselves a name."""
        found = [one.node_pid for one in self.cluster.processes(node) if _comm(one.pid) == name]
        if not found:
            raise NotPossibleError(f"no {name} on {node}")
        return found

    def _rank_pid(self, node: str) -> int:
        return self._rank(node).node_pid

    def _rank(self, node: str) -> Process:
        with suppress(IndexError):  # none was ever started there
            pid = self.run.pids(node)[0]
            for one in self.cluster.processes(node):
                if one.node_pid == pid:
                    return one
        raise NotPossibleError(f"the rank of {node} is not there")

    # --- what ---

    def _do(self, fault: Fault, struck: Struck, state: RunState) -> Callable[[], None] | None:
        """Strike, and return what undoes it."""
        kind, node, cluster = fault.kind, struck.node, self.cluster
        if kind in ("power", "crash"):
            cluster.fault("power-loss" if kind == "power" else "crash", node)
            return None
        if kind == "freeze":
            cluster.fault("freeze", node)
            return lambda: _ignored(cluster.fault("thaw", node))
        if kind == "isolate":
            cluster.fault("partition", node)
            return lambda: self._heal(node)
        if kind in ("cut", "one way"):
            others = [name for name in state.nodes if name != node and cluster.machine(name).alive]
            struck.other = other = _one_of(others, fault.other, "other node")
            cluster.fault("part", node, other=other, one_way=kind == "one way")
            return lambda: self._heal(node, other)
        if kind == "flaps":
            return self._flap(node)
        if kind == "slow link":
            cluster.fault("slow", node, delay_ms=SLOW_MS)
            return lambda: _ignored(cluster.fault("slow", node, off=True))
        if kind == "disk full":
            cluster.fault("disk-full", node)
            return lambda: _ignored(cluster.fault("disk-full", node, off=True))
        return self._do_to_process(fault, struck, state)

    def _do_to_process(self, fault: Fault, struck: Struck, state: RunState) -> Callable[[], None] | None:
        kind, node = fault.kind, struck.node
        found: dict[str, Callable[[], list[int]]] = {
            "agent": lambda: self._agent(node),
            "guard": lambda: self._guard(node),
            "agent stops": lambda: self._agent(node),
            "host": lambda: self._named(node, "jurymast-host"),
            "server": lambda: self._named(node, "jurymast-server"),
            "storage child": lambda: _pids(self._processes(node, "jurymast.storage")),
            "probes": lambda: _pids(self._processes(node, "jurymast.health")),
            "supervisor": lambda: _pids(self._processes(node, " jurymast.supervisor ")),
            "stall": lambda: _pids(self._processes(node, " jurymast.supervisor ")),
            "standby": lambda: _pids(self._processes(node, " jurymast.supervisor.standby ")),
            "loader": lambda: self._loaders(node),
            **dict.fromkeys(("rank", "stopped", "terminated", "segfault"), lambda: [self._rank_pid(node)]),
        }
        if kind not in found:
            return self._do_to_run(fault, struck)
        pids = found[kind]()
        signals = {"stall": "STOP", "agent stops": "STOP", "stopped": "STOP", "terminated": "TERM"}
        self._signal(node, pids, {**signals, "segfault": "SEGV"}.get(kind, "KILL"))
        return (lambda: self._signal(node, pids, "CONT")) if kind in ("stall", "agent stops") else None

    def _do_to_run(self, fault: Fault, struck: Struck) -> Callable[[], None] | None:
        kind, cluster, job = fault.kind, self.cluster, str(self.run.job)
        if kind in ("hang", "raises"):
            order = self.places.orders / f"rank-{struck.rank}"
            order.with_suffix(".new").write_text(kind)
            order.with_suffix(".new").rename(order)
            order.chmod(0o666)
        elif kind in ("storage hangs", "run directory hangs"):
            place = self.places.share if kind == "storage hangs" else self.places.runs
            _fsfreeze("--freeze", place)
            return lambda: _fsfreeze("--unfreeze", place)
        elif kind == "storage refuses":
            place = self.places.checkpoints
            mode = place.stat().st_mode & 0o777
            place.chmod(0o500)
            return lambda: place.chmod(mode)
        elif kind == "corrupt":
            struck.damaged = (self._damage_newest(fault),)
        elif kind == "corrupt memory":
            peer = self.run.look().saved.get(PEER)
            self._await_newer(fault, 0 if peer is None else peer.step or 0, "no replica comes")
            self._damage_memory(struck.node)
        elif kind in ("slurmctld restart", "slurmctld crash"):
            cluster.fault("slurmctld-restart", crash=kind == "slurmctld crash")
        elif kind == "slurm silent":
            cluster.fault("kill", "ctl", match=r"slurmctld -D", signal="STOP")
            return lambda: _ignored(cluster.fault("kill", "ctl", match=r"slurmctld -D", signal="CONT"))
        else:
            return self._order(kind, struck.node, job)
        return None

    def _order(self, kind: str, node: str, job: str) -> Callable[[], None] | None:
        """What somebody tells Slurm or the run."""
        slurm: dict[str, list[str]] = {
            "requeued": ["scontrol", "requeue", job],
            "suspended": ["scontrol", "suspend", job],
            "signal": ["scancel", "--signal=TERM", "--batch", job],
            "signal all": ["scancel", "--signal=TERM", job],
            "cancelled": ["scancel", job],
            "admin drains": ["scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=new disk, Ada"],
        }
        if kind in slurm:
            self._told_slurm(slurm[kind])
            return (lambda: self._told_slurm(["scontrol", "resume", job])) if kind == "suspended" else None
        if kind == "preempted":
            where = node or self.run.look().placement[0]
            words = ("--partition=high", f"--nodelist={where}", "--nodes=1", "--exclusive")
            urgent = self.cluster.sbatch("#!/bin/sh\nsleep 600\n", *words)
            return lambda: self._told_slurm(["scancel", str(urgent)])
        asked = {"restart": ("restart",), "drained": ("drain",), "save": ("save",)}[kind]
        after = (node,) if kind == "drained" else ()
        code, _, error = jurymast(self.cluster, *asked, str(self.places.inside), *after)
        if code != 0:
            raise ClusterError(error.strip())
        return None

    def _told_slurm(self, words: list[str]) -> None:
        self.cluster.login(words, root=True, cwd="/", timeout_s=COMMAND_S)

    def _heal(self, *nodes: str) -> None:
        for node in nodes:
            self.cluster.fault("heal", node)

    def _flap(self, node: str) -> Callable[[], None]:
        """The link is down and up in turns, until somebody makes it stay up."""
        over = threading.Event()

        def turn() -> None:
            up = False
            while not over.wait(FLAP_S):
                up = not up
                self.cluster.fault("heal" if up else "partition", node)

        self.cluster.fault("partition", node)
        turning = threading.Thread(target=turn, daemon=True)
        turning.start()

        def stay() -> None:
            over.set()
            turning.join()
            self._heal(node)

        return stay

    def _loaders(self, node: str) -> list[int]:
        children = {child.pid for child in psutil.Process(self._rank(node).pid).children()}
        workers = [one.node_pid for one in self.cluster.processes(node) if one.pid in children]
        if not workers:
            raise NotPossibleError(f"the rank of {node} has no loader")
        return workers[-1:]

    # --- damage ---

    def _damage_newest(self, fault: Fault) -> int:
        """A bit of the newest checkpoint on shared storage."""
        directory = self.places.checkpoints
        steps = CheckpointDirectory(directory).complete() or [0]
        self._await_newer(fault, steps[0], "no checkpoint comes to shared storage")
        folder = CheckpointDirectory(directory).path(steps[0])
        largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
        _flip(largest)
        return steps[0]

    def _await_newer(self, fault: Fault, step: int, why_not: str) -> None:
        """Damage what has just come: then no newer one is there right after."""
        if step <= self._stored.setdefault(fault, step):
            raise NotPossibleError(why_not)

    def _damage_memory(self, node: str) -> None:
        """A bit of every replica that a spare holds."""
        pids = self._agent(node)
        agents = [one.pid for one in self.cluster.processes(node) if one.node_pid in pids]
        images = dict[int, Path]()  # by inode: two descriptors may be of one, which is flipped once
        for link in (link for pid in agents for link in Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(OSError):
                if "jurymast-image" in os.readlink(link):
                    images[link.stat().st_ino] = link
        if not sum(_flip_memory(link) for link in images.values()):
            raise NotPossibleError(f"{node} holds no replica")


def _one_of(names: list[str], place: int, what: str) -> str:
    if not names:
        raise NotPossibleError(f"there is no {what}")
    return names[place % len(names)]


def _pids(found: list[Process]) -> list[int]:
    return [one.node_pid for one in found]


def _comm(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _ignored(_: object) -> None:
    return None


def _fsfreeze(what: str, place: Path) -> None:
    subprocess.run(["fsfreeze", what, str(place)], check=True, timeout=COMMAND_S, capture_output=True)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 1]))


def _flip_memory(link: Path) -> int:
    """A bit on each page that is in use: a replica may lack the part that other ranks have as well, and what
    lies there may be an older one's."""
    with link.open("r+b", buffering=0) as file:
        held = file.readall()
        pages = range(0, len(held), mmap.PAGESIZE)
        places = [place for at in pages if (place := at + _zeros(held[at : at + mmap.PAGESIZE])) < len(held)]
        for place in places:
            if held[place]:
                file.seek(place)
                file.write(bytes([held[place] ^ 1]))
    return any(held[place] for place in places)


def _zeros(page: bytes) -> int:
    return len(page) - len(page.lstrip(b"\0"))
