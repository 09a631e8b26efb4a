"""One system, measured once: its processes, what they are told, and the figures that come of it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from benchmarks.tiers.child import Child, ChildError, Message
from jurymast.wire.protocol import GCM, GMAC

HOST = "127.0.0.1"
# How bytes between nodes are protected, and what is said of it behind a metric's name: the second is
# what happens where the policy has them hidden.
PROTECTED = {GMAC: "", GCM: ", encrypted"}
STREAMS = 2  # of one replica, as in keeper.transfer
AT_ONCE = 2  # replicas, as in core.keeper.machine
SAMPLE_S = 0.02
GIB = 1 << 30
WINDOW_BYTES = 2 * GIB
SMALL_WINDOW_BYTES = GIB
WARM_UPS = 2
COPIES = 3

Figures = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A state of `gib` on one machine, split among `ranks`."""

    gib: float
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.gib:g} GiB, {self.ranks} rank" + ("s" if self.ranks > 1 else "")

    @property
    def state_bytes(self) -> int:
        """Of one rank."""
        return int(self.gib * GIB) // self.ranks

    @property
    def window_bytes(self) -> int:
        """Of one rank's plain copy. A large state leaves no room for a whole one."""
        whole = self.state_bytes * self.ranks
        return self.state_bytes if whole <= WINDOW_BYTES else SMALL_WINDOW_BYTES // self.ranks


@dataclass(frozen=True)
class Places:
    """Directories of a trial, removed after it: in memory, and on disk."""

    memory: Path
    disk: Path


@contextmanager
def places(disk: Path) -> Iterator[Places]:
    found = Places(
        Path(tempfile.mkdtemp(prefix="jurymast-bench-", dir="/dev/shm")),
        Path(tempfile.mkdtemp(prefix="jurymast-bench-", dir=disk)),
    )
    try:
        yield found
    finally:
        shutil.rmtree(found.memory, ignore_errors=True)
        shutil.rmtree(found.disk, ignore_errors=True)


class Ranks:
    """All ranks of a case, for one system. An order is given to all of them at once."""

    def __init__(self, case: Case, kind: str, place: Path, environment: dict[str, str] | None = None) -> None:
        port = _free_port()
        self.children: list[Child] = []
        try:
            for rank in range(case.ranks):
                self.children.append(_rank(case, kind, place, rank, port, environment or {}))
            for child in self.children:
                child.answer()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()

    def ask(self, do: str, **more: object) -> list[Message]:
        for child in self.children:
            child.tell({"do": do, **more})
        return [child.answer() for child in self.children]

    def longest(self, do: str, **more: object) -> float:
        """Seconds of the rank that took longest."""
        return max(float(answer["seconds"]) for answer in self.ask(do, **more))

    def end(self) -> None:
        for child in self.children:
            child.end()


def _rank(case: Case, kind: str, place: Path, rank: int, port: int, environment: dict[str, str]) -> Child:
    config = {
        "name": f"rank {rank}", "kind": kind, "place": str(place),
        "state_bytes": case.state_bytes, "window_bytes": case.window_bytes,
    }  # fmt: skip
    ours = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks),
        "LOCAL_WORLD_SIZE": str(case.ranks), "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "JURYMAST_ATTEMPT": "1",
    }  # fmt: skip
    return Child("benchmarks.tiers.rank", config, {**ours, **environment})


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


class Memory:
    """How much more memory than at the start is taken at most while this is entered: private memory of some
    processes, and shared memory of the whole machine, files in /dev/shm included."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._start = self._now()
        self._peak = self._start
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def peak_bytes(self) -> int:
        return self._peak - self._start

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        return sum(_status(f"/proc/{pid}/status", "RssAnon:") for pid in self._pids) + _status(
            "/proc/meminfo", "Shmem:"
        )


def _status(path: str, name: str) -> int:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@dataclass
class Trial:
    """What one system's turn in a round gave; `notes`: what could not be measured, and why."""

    case: Case
    saves: int
    disk: Path
    figures: Figures = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def add(self, metric: str, *values: float) -> None:
        self.figures.setdefault(metric, []).extend(values)

    def try_to(self, metrics: Sequence[str], work: Callable[[], None]) -> None:
        """Failing costs these metrics, not the others."""
        try:
            work()
        except ChildError as error:
            for metric in metrics:
                self.notes.setdefault(metric, str(error))

    def save(self, ranks: Ranks, step: int, whole: Callable[[float], float] | None = None) -> None:
        """One copy and one save, right after each other. `whole`: waits until the save counts, and says since
        when, given the end of the stall."""
        copy_s = ranks.longest("copy")
        answers = ranks.ask("save", step=step)
        if not all(answer["ok"] for answer in answers):
            raise ChildError("there was no room for a save")
        stall_s = max(float(answer["seconds"]) for answer in answers)
        stalled_until = max(float(answer["ended"]) for answer in answers)
        complete_at = whole(stalled_until) if whole else 0.0
        finished = ranks.ask("finish", step=step)
        complete_at = complete_at or max(float(answer["ended"]) for answer in finished)
        self.add("copy", copy_s)
        self.add("stall", stall_s)
        self.add("stall over a copy", stall_s / copy_s)
        self.add("from the stall's end until whole", max(0.0, complete_at - stalled_until))
        self.add("fresh pages of a save", sum(int(answer["fresh"]) for answer in finished))

    def restore(self, ranks: Ranks, metric: str, began: Callable[[], float], **order: object) -> None:
        """Into overwritten tensors. `began`: starts what has to come first, and says when that was."""
        ranks.ask("wreck")
        # What a restore leaves to be done, the agent's second buffer for one, may slow a single copy down.
        copy_s = statistics.median([ranks.longest("copy", back=True) for _ in range(COPIES)])
        ranks.ask("wreck")
        started = began()
        ended = max(float(answer["ended"]) for answer in ranks.ask("restore", **order))
        ranks.ask("check")
        self.add(f"restore, {metric}", ended - started)
        self.add(f"restore over a copy, {metric}", (ended - started) / copy_s)


def measure_peer(trial: Trial, kind: str, environment: dict[str, str], loads: Sequence[str]) -> None:
    """Saves to /dev/shm; `loads`: where its restores read from, "memory" or "disk"."""
    with places(trial.disk) as place, Ranks(trial.case, kind, place.memory, environment) as ranks:
        with Memory([child.pid for child in ranks.children]) as memory:
            ranks.ask("begin")
            for step in range(1, WARM_UPS + 1):
                ranks.ask("warm", step=step)
                ranks.ask("finish", step=step)
            for step in range(WARM_UPS + 1, WARM_UPS + 1 + trial.saves):
                trial.save(ranks, step)
        trial.add("memory", memory.peak_bytes / (trial.case.state_bytes * trial.case.ranks))
        step = WARM_UPS + trial.saves
        for load in loads:
            root = place.memory if load == "memory" else place.disk
            if load == "disk":
                ranks.ask("save_to", place=str(root), step=step)
            for _ in range(trial.saves):
                trial.restore(ranks, load, time.monotonic, step=step, place=str(root))


# ---- jurymast


class Node:
    """A keeper, and what the supervisor would tell it."""

    def __init__(self, name: str, case: Case, secret: str, local: Path | None = None) -> None:
        self.name, self.case = name, case
        config = {"name": name, "ranks": case.ranks, "secret": secret, "local": str(local) if local else ""}
        self.child = Child("benchmarks.tiers.node", config)
        try:
            started = self.child.answer()
        except BaseException:
            self.child.end()
            raise
        self.port = int(started["port"])
        self.environment: dict[str, str] = started["environment"]

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.child.end()

    @property
    def _ranks(self) -> list[int]:
        return list(range(self.case.ranks))

    def source(self, rank: int) -> Message:
        return {
            "tier": "memory", "node": self.name, "hosts": [HOST], "port": self.port, "part": "all",
            "rank": rank,
        }  # fmt: skip

    def launch(self, attempt: int, step: int = 0, source: Node | None = None) -> float:
        """The time when it was ordered. With `source` what attempt 1 saved is brought from there."""
        restore = None
        if source is not None:
            found = {str(rank): [source.source(rank)] for rank in self._ranks}
            restore = {"step": step, "attempt": 1, "ranks": found}
        self.child.forget()
        began = time.monotonic()
        self.child.ask({"do": "launch", "attempt": attempt, "ranks": self._ranks, "restore": restore})
        return began

    def held(self, step: int, tier: str) -> float:
        """When it held what all ranks saved. Raises ChildError."""
        latest = 0.0
        for rank in self._ranks:

            def fits(message: Message, rank: int = rank) -> bool:
                if message.get("say") in ("refused", "unreplicated"):
                    return True
                copies = message.get("copies", [])
                return any((one["step"], one["tier"], one["rank"]) == (step, tier, rank) for one in copies)

            word = self.child.wait(fits, f"step {step} of rank {rank}")
            if "why" in word:
                raise ChildError(f"{self.name}: {word['why']}")
            latest = max(latest, float(word["at"]))
        return latest

    def prefetched(self) -> None:
        for _ in self._ranks:
            self.child.wait(lambda word: word.get("say") == "prefetched", "a restore")

    def replicate(self, step: int, source: Node) -> float:
        """Seconds from the order until all is here and verified."""
        began = time.monotonic()
        for rank in self._ranks:
            order = {"step": step, "attempt": 1, "rank": rank, "part": "all"}
            self.child.ask({"do": "replicate", **order, "sources": [source.source(rank)]})
        return self.held(step, "peer") - began

    def forget_replicas(self, step: int) -> None:
        self.about("forget", step)

    def about(self, do: str, step: int, **more: object) -> Message:
        """An order about what is held of a step."""
        return self.child.ask({"do": do, "step": step, "attempt": 1, "ranks": self._ranks, **more})


def measure_jurymast(trial: Trial) -> None:
    """Saves, then the tiers with the ranks gone, then restores in new ranks."""
    secret = secrets.token_hex(16)
    case = trial.case
    with places(trial.disk) as place, ExitStack() as second:
        root = place.disk / "local"
        with Node("a", case, secret) as node, second.enter_context(Node("b", case, secret)) as peer:
            step = _saves(trial, node, peer, place.memory)
            metrics = ("peer transfer over TCP", "restore over a copy, peer")
            trial.try_to(metrics, lambda: _transfers(trial, node, peer, step))
            trial.try_to(("write over a plain one",), lambda: _writes(trial, node, step, root))
            node.child.end()
            for way in PROTECTED:
                restore = partial(_restore_from_peer, trial, peer, secret, step, place.memory, way)
                trial.try_to(metrics[1:], restore)
        trial.try_to(
            ("restore over a copy, local disk", "restore over a copy, own memory"),
            lambda: _restore_here(trial, secret, step, root, place.memory),
        )


def _saves(trial: Trial, node: Node, peer: Node, place: Path) -> int:
    """The last step saved. The first ones with nothing but hashing going on, the others to a peer too."""
    case = trial.case

    def whole(_stalled_until: float) -> float:
        at = node.held(step, "memory")
        node.about("committed", step)
        return at

    node.launch(1)
    peer.launch(1)
    with Ranks(case, "jurymast", place, node.environment) as ranks:
        with Memory([node.child.pid, *(child.pid for child in ranks.children)]) as memory:
            ranks.ask("begin")
            for step in range(1, WARM_UPS + 1):
                ranks.ask("warm", step=step)
                whole(0.0)
            for step in range(WARM_UPS + 1, WARM_UPS + 1 + trial.saves):
                trial.save(ranks, step, whole)
        trial.add("memory", memory.peak_bytes / (case.state_bytes * case.ranks))

        def to_peer() -> None:
            nonlocal step
            for _ in range(trial.saves + 1):
                peer.forget_replicas(step)
                step += 1
                answers = ranks.ask("save", step=step)
                stalled_until = max(float(answer["ended"]) for answer in answers)
                whole(stalled_until)
                peer.replicate(step, node)
                trial.add("until the peer holds it", time.monotonic() - stalled_until)
            trial.figures["until the peer holds it"].pop(0)  # into memory that nobody had touched

        trial.try_to(("until the peer holds it",), to_peer)
        step += 1
        ranks.ask("flatten")
        ranks.ask("warm", step=step)
        whole(0.0)
    return step


def _transfers(trial: Trial, node: Node, peer: Node, step: int) -> None:
    """A replica against plain TCP with as many streams, by turns; the first one, into new memory, apart."""
    case = trial.case
    size = case.state_bytes
    port = node.about("raw serve", step)["port"]
    streams = STREAMS * min(case.ranks, AT_ONCE) // case.ranks or 1
    raw = {
        "do": "raw pull", "port": port, "streams": streams, "sizes": [size] * case.ranks,
        "window_bytes": min(size, SMALL_WINDOW_BYTES),
    }  # fmt: skip
    peer.child.forget()
    for number in range(trial.saves + 1):
        raw_s = float(peer.child.ask(raw)["seconds"])
        for way, named in PROTECTED.items():
            peer.forget_replicas(step)
            peer.child.ask({"do": "protect", "way": way})
            taken_s = peer.replicate(step, node)
            if number:
                trial.add(f"peer transfer{named}", case.state_bytes * case.ranks / taken_s / 1e9)
                trial.add(f"peer transfer over TCP{named}", raw_s / taken_s)
    peer.child.ask({"do": "protect", "way": ""})


def _writes(trial: Trial, node: Node, step: int, root: Path) -> None:
    """To local disk, against a plain write of the same bytes, in alternating order; our last one stays."""
    place = root.parent / "plain"

    def plain() -> float:
        return float(node.about("write plainly", step, path=str(place))["seconds"])

    def ours() -> float:
        return float(node.about("write", step, root=str(root))["seconds"])

    for number in range(trial.saves + 1):  # the first starts the storage process, and does not count
        shutil.rmtree(root, ignore_errors=True)
        if number % 2:
            plain_s, ours_s = plain(), ours()
        else:
            ours_s, plain_s = ours(), plain()
        place.unlink()
        os.sync()
        if number:
            trial.add("write", trial.case.state_bytes * trial.case.ranks / ours_s / 1e9)
            trial.add("write over a plain one", plain_s / ours_s)


def _restore_from_peer(trial: Trial, peer: Node, secret: str, step: int, place: Path, way: str) -> None:
    """As a spare does it: nothing is here, and the memory is new."""
    with (
        Node("c", trial.case, secret) as node,
        Ranks(trial.case, "jurymast-restoring", place, node.environment) as ranks,
    ):
        ranks.ask("begin")
        node.child.ask({"do": "protect", "way": way})
        tier = f"peer{PROTECTED[way]}"
        trial.restore(ranks, tier, lambda: node.launch(2, step, peer), attempt=2, step=step)


def _restore_here(trial: Trial, secret: str, step: int, root: Path, place: Path) -> None:
    """A new agent finds the image on its disk; later attempts find it in the agent's memory."""
    with (
        Node("d", trial.case, secret, root) as node,
        Ranks(trial.case, "jurymast-restoring", place, node.environment) as ranks,
    ):
        ranks.ask("begin")
        trial.restore(ranks, "local disk", lambda: node.launch(2, step, node), attempt=2, step=step)
        for attempt in range(3, 3 + 2 * trial.saves, 2):

            def launched(attempt: int = attempt) -> float:
                return node.launch(attempt, step, node)

            def prepared(attempt: int = attempt + 1) -> float:
                node.launch(attempt, step, node)
                node.prefetched()
                return time.monotonic()

            trial.restore(ranks, "own memory and its check", launched, attempt=attempt, step=step)
            trial.restore(ranks, "own memory", prepared, attempt=attempt + 1, step=step)
