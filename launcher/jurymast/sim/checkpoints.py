"""Checkpoints of a simulated run: when its ranks save, which saves are held where, how long they take to get
there, and what a failure destroys. Also how long everything else takes: durations that were measured, scaled
to the size of the run. What is assumed instead is listed as such.

All ranks step together, and all agents receive messages at once, so one page stands for all. Ranks are looked
at about once per save, so the measured step time includes a save's share; a real run looks every two seconds.

The decisions are made as in a run. `core.checkpoints.commit` and `writes` decide when storage gets a save,
and `core.checkpoints.checkpoints` what is written before the nodes are released; one image stands for those
of all ranks, because all are saved and written alike. `core.checkpoints.replicas` decides for all nodes who
copies whose images. `core.checkpoints.checkpoints` decides what an attempt restores, from the copies of only
those nodes that matter: the lost ones, and one that stands for the rest.

Only durations are modelled here. The copy in a node's own memory exists once its stall is over, and
survives its ranks. Copies ordered from other nodes are complete `Durations.copy_s` later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from jurymast import foreign
from jurymast.core.checkpoints.agreement import SAMPLE_S, Agreement
from jurymast.core.checkpoints.checkpoints import FinalWrite, RestoreChoice
from jurymast.core.checkpoints.commit import Commit
from jurymast.core.checkpoints.copies import Copies, Holder
from jurymast.core.checkpoints.replicas import Replicas, holders
from jurymast.core.checkpoints.writes import Writes
from jurymast.core.judges.cadence import Cadence, next_save_step, parse_cadence
from jurymast.core.judges.forecast import SLOWDOWN, Saving, optimal_s, young_s
from jurymast.core.judges.silence import steady_limit_s
from jurymast.core.run.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Launch, Record, Send
from jurymast.core.state.failure_rate import mtbf_s
from jurymast.core.state.images import ALL, MEMORY, PEER, SHARED, Copy, StateId
from jurymast.core.state.run import RunState
from jurymast.core.state.schedule import NEVER
from jurymast.core.state.settings import Settings
from jurymast.core.state.texts import did_you_mean
from jurymast.core.supervision.departure import KEPT_STILL_S
from jurymast.errors import UsageError
from jurymast.sim.bounds import Bounds
from jurymast.worker.link import SCHEDULE_BYTES, ScheduleFollower, ScheduleRecord

# Maximum size of a file of figures, which is about a page.
BYTES_MAX = 64 << 10

# Shorter steps would vanish when they are added to a time.
STEP_MIN_S = 1e-6
# A run begins here: a time of 0 would read as "not known".
START = 86_400.0

# Kinds of failure. A power loss is noticed by silence, a crash by a connection that is reset, a killed rank
# and a failure of the script by the node's agent, a hang by steps that do not come, a stopped rank by its
# state.
POWER_LOSS, NODE_CRASH, WORKER_KILL, SCRIPT, HANG, RANK_STOP = KINDS = (
    "power_loss", "node_crash", "worker_kill", "script", "hang", "rank_stop",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds from a failure until it is detected, then until all ranks are stopped, and from the order to
    launch until the new ranks have started."""

    detect_s: float = 0.0
    stop_s: float = 0.0
    launch_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of a simulated run, in seconds.

    A failure costs `restart_s` and the steps since the newest complete save. A save becomes complete `copy_s`
    after its stall; meanwhile training continues, and steps take longer by the share `slowdown` (0.1: a
    tenth). `repair_s` is the time until a lost node, or its replacement, joins as a spare again.

    `detection_s`, `stop_s` and `launch_s` apply to a node that becomes silent. `kinds` has the parts of other
    failures; a kind without an entry is detected at once and otherwise takes the same. The hang detector
    itself decides how long a hang stays undetected.

    With `write_s`, saves use two tiers: complete means two copies in memory, and some saves are also written
    to durable storage, which takes `write_s` and costs the training nothing; `read_s` is a restore from
    there. None: a complete save survives everything.
    """

    detection_s: float = 2.0
    stop_s: float = 1.0
    launch_s: float = 5.0
    restore_s: float = 30.0
    warm_up_s: float = 0.0  # extra time of the first step
    step_s: float = 5.0
    stall_s: float = 1.0
    copy_s: float = 0.0
    slowdown: float = 0.0
    repair_s: float = 6 * 3600.0
    requeue_s: float = 600.0
    write_s: float | None = None
    read_s: float = 0.0
    kinds: Mapping[str, Parts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for impossible times, or times that the run's own limits would cut short."""
        if not self.step_s >= STEP_MIN_S:
            raise ValueError(f"a step takes at least {STEP_MIN_S:g} s, with which time is accounted for")
        parts = [self.parts(kind) for kind in KINDS]
        times = [value for value in self.__dict__.values() if isinstance(value, int | float)]
        times += [value for each in parts for value in vars(each).values()]
        if not all(0.0 <= seconds < math.inf for seconds in times):
            raise ValueError("no duration is negative, or without end")
        if any(each.stop_s >= STOP_LIMIT_S or each.launch_s >= LAUNCH_LIMIT_S for each in parts):
            raise ValueError(
                f"ranks stop within {STOP_LIMIT_S:.0f} s and start within {LAUNCH_LIMIT_S:.0f} s"
            )

    def parts(self, kind: str) -> Parts:
        if kind in self.kinds and kind != POWER_LOSS:
            return self.kinds[kind]
        noticed_s = self.detection_s if kind == POWER_LOSS else 0.0
        return Parts(detect_s=noticed_s, stop_s=self.stop_s, launch_s=self.launch_s)

    @property
    def restart_s(self) -> float:
        """Seconds from the loss of a node to the first step after it, if no node has to be waited for."""
        return self.detection_s + self.stop_s + self.launch_s + self.restore_s + self.warm_up_s

    def time_of(self, steps: float, *, copying: bool) -> float:
        """Return the seconds that `steps` take. `copying`: a save was made just before them."""
        slow = self._slow_steps() if copying else 0.0
        return self.step_s * (steps + self.slowdown * min(steps, slow))

    def steps_in(self, seconds: float, *, copying: bool) -> int:
        """Return the number of whole steps done in `seconds`. Inverse of `time_of`."""
        slow = self._slow_steps() if copying else 0.0
        slow_s = slow * self.step_s * (1.0 + self.slowdown)
        if seconds < slow_s:
            return int(seconds / (self.step_s * (1.0 + self.slowdown)) + 1e-9)
        return int(slow + (seconds - slow_s) / self.step_s + 1e-9)

    def _slow_steps(self) -> float:
        return self.copy_s / (self.step_s * (1.0 + self.slowdown)) if self.slowdown else 0.0


# An assumption, because no benchmark here can measure it: from new ranks to their first step a large training
# sets up its communicators, loads compiled code and fills its data loader.
TRAINING_START_S = 30.0
# A checkpoint of unknown size is taken for one of this many bytes a node (5.3 TB on 2,048 nodes).
NODE_BYTES = 2.6e9
# Storage of unknown speed takes a whole checkpoint in this time.
WRITE_S = 60.0
# A requeued run waits this long until enough nodes are free.
QUEUE_S = 600.0

_RATES = ("copy", "replicate", "restore")
_USUAL = Settings()


@dataclass(frozen=True)
class Measured:
    """Measured durations. `kinds`: the parts of each kind of failure (where a detector has a limit, its
    detection is the time beyond that limit). `requeue_s`: from a requeue to the next allocation while nodes
    are free. Rates are bytes per second of one node. `source` states where the figures come from."""

    source: str
    kinds: Mapping[str, Parts]
    requeue_s: float
    copy: float
    replicate: float
    restore: float

    def durations(
        self,
        nodes: int,
        checkpoint_bytes: float | None = None,
        storage_bytes_per_s: float | None = None,
        settings: Settings = _USUAL,
    ) -> Durations:
        """Return the durations for a run on `nodes` nodes whose checkpoint has this many bytes in total. The
        heartbeat detector with the policy's `settings` decides when a silent node is detected. Raises
        ValueError for parts that the run's own limits would cut short."""
        node_bytes = NODE_BYTES if checkpoint_bytes is None else checkpoint_bytes / nodes
        write_s = WRITE_S
        if storage_bytes_per_s is not None:
            write_s = node_bytes * nodes / storage_bytes_per_s
        worst = self.kinds[POWER_LOSS]
        silence_s = steady_limit_s(settings.heartbeat_s, settings.node_lost_after_s)
        return Durations(
            detection_s=silence_s + worst.detect_s, stop_s=worst.stop_s, launch_s=worst.launch_s,
            kinds=self.kinds, restore_s=node_bytes / self.restore, warm_up_s=TRAINING_START_S,
            requeue_s=self.requeue_s + QUEUE_S, stall_s=node_bytes / self.copy,
            copy_s=node_bytes / self.replicate, slowdown=SLOWDOWN, write_s=write_s, read_s=write_s,
        )  # fmt: skip


def read_measured(path: Path | None = None) -> Measured:
    """Return the packaged figures, overridden by those in a file of the same form.

    Raises UsageError for a file that cannot be read, and for unknown or non-numeric entries.
    """
    import yaml  # not needed by a report

    text = (resources.files("jurymast.sim") / "data" / "durations.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    if path is not None:
        found = _replaced(path, "", found, {"source": str(path), **_read(path)})
    kinds = {name: Parts(**{f"{part}_s": seconds for part, seconds in parts.items()})
             for name, parts in found["kinds"].items()}  # fmt: skip
    return Measured(found["source"], kinds, found["requeue"], *(found[name] for name in _RATES))


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        own = yaml.safe_load(foreign.read(path, BYTES_MAX).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        told = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {told}", hint="YAML like sim/data/durations.yaml") from error
    if not isinstance(own, dict):
        raise UsageError(f"{path}: not a mapping of keys to values", hint="YAML like sim/data/durations.yaml")
    return own


def _replaced(path: Path, key: str, usual: Any, own: Any) -> Any:
    """Return the `usual` figures with those of one's `own`, which have the same form, in their place."""
    if isinstance(usual, dict):
        if not isinstance(own, dict):
            raise UsageError(f"{path}: {key}: needs keys below it: {', '.join(usual)}")
        for name in own:
            if name not in usual:
                where = f"{path}: {key}" if key else f"{path}"
                raise UsageError(f"{where}: unknown key {name}{did_you_mean(str(name), usual)}")
        own = {name: _replaced(path, f"{key}.{name}".lstrip("."), usual[name], own[name]) for name in own}
        return usual | own
    if isinstance(usual, str):
        return own if isinstance(own, str) else str(path)
    return _number(path, key, own, least=1.0 if key in _RATES else 0.0)


def _number(path: Path, name: str, value: object, least: float) -> float:
    if isinstance(value, str):  # YAML takes 100e9 for a text
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        # A list may repeat itself through aliases until no memory holds it as text.
        told = "a list or mapping" if isinstance(value, list | dict) else repr(value)
        raise UsageError(f"{path}: {name}: {told} is not a number of at least {least:g}")
    return float(value)


# ---- when ranks save


class SimRanks:
    """All ranks of a simulated run. `asked` is the cadence that the script requests; `slowdown`: by how much
    copies slow steps, which the run knows. Times are the simulation's; steps count from the start of the
    run."""

    def __init__(self, state: RunState, asked: Cadence, slowdown: float) -> None:
        self._state, self._asked = state, asked
        self.agreement = Agreement(state, slowdown)
        self._begin()

    def _begin(self) -> None:
        """Start a new attempt, whose page is blank."""
        self._attempt = self._state.attempt
        self._record = ScheduleRecord(memoryview(bytearray(SCHEDULE_BYTES)))
        self._settled = 0
        self._follower = ScheduleFollower(self._record, self._settle)

    def _settle(self, number: int) -> None:
        self._settled = number

    def look(self, step: int, now: float) -> tuple[list[ev.Event], float | None]:
        """Process heartbeats that report `step`, and make the decisions that are due. Returns the events to
        record, and the seconds until the next look (None: not before the next save)."""
        if self._attempt != self._state.attempt:
            self._begin()
        if self._is_decided:
            self._follower.due(step)
        beat = self._beat(step)
        events: list[ev.Event] = []
        for node in self._state.placement:
            events += self._do(self.agreement.on_heartbeat(node, beat, now))
        events += self._do(self.agreement.on_time(now))
        if not self._is_decided:
            return events, self._state.settings.heartbeat_s
        nothing = not self._record.number and self._asked.steps is None
        return events, SAMPLE_S if nothing else None

    def next_save(self, step: int) -> int:
        """Return the first step after `step` that is to be saved; NEVER if there is none."""
        if self._asked.steps is not None:
            return min(NEVER, next_save_step(step, self._asked.steps))
        return self._follower.next_due(step)

    @property
    def steady(self) -> bool:
        """Return whether the schedule of saves will not change."""
        return self._settled == self._record.number

    @property
    def _is_decided(self) -> bool:
        """Whether the schedule is decided; otherwise ranks that get this far would have to wait."""
        return self._record.number == abs(self._record.decided)

    def _beat(self, step: int) -> msg.Beat:
        rank = msg.RankReport(
            step=step, beats=1, explicit=True, phase="stepping", quiet_s=0.0, beat_s=0.0, longest_s=0.0,
            settled=self._settled, idle_s=0.0, stopped_s=0.0,
        )  # fmt: skip
        record, asked = self._record, self._asked
        page = msg.CadenceReport(record.number, record.decided, asked.steps, asked.seconds)
        return msg.Beat(self._attempt, [rank], page)

    def _do(self, effects: list[Effect]) -> list[ev.Event]:
        events: list[ev.Event] = []
        for effect in effects:
            if isinstance(effect, Record):
                events.append(effect.event)
            elif isinstance(effect, Send) and isinstance(effect.message, msg.CadenceSet):
                self._record.take(effect.message.schedule, effect.message.decided)
        return events


def asked_cadence(text: str, nodes: int, rate: float, durations: Durations) -> Cadence:
    """Return the cadence that `--cadence` requests: `fixed:60m` (or `60m`), `young` (Young's formula at the
    true `rate` per 1,000 node-days), `optimum` (the same with the exact formula) or `adaptive`, which a run
    decides by itself.

    Raises ValueError.
    """
    word = text.strip().lower()
    if word in ("adaptive", "auto"):
        return Cadence()
    if word in ("young", "optimum"):
        if rate <= 0.0:
            return Cadence(steps=NEVER)
        cost_s = Saving(durations.stall_s, durations.copy_s, durations.slowdown).cost_s
        best_s = (young_s if word == "young" else optimal_s)(cost_s, mtbf_s(nodes, rate))
        return Cadence(steps=max(1, round(best_s / durations.step_s)))
    asked = parse_cadence(word.removeprefix("fixed:"))
    if asked.automatic:
        raise ValueError(f"{text!r} is not a cadence; write 'fixed:60m', 'young' or 'adaptive'")
    return asked


# ---- where saves are

ALL_NODES = "all"


@dataclass(frozen=True)
class Restoring:
    """What an attempt restores, and the seconds that this takes. `record` goes into the journal. `live`: the
    step from which ranks go on in their processes instead."""

    key: StateId
    tier: str
    seconds: float
    record: Record
    live: int | None = None


class SimTiers:
    """The tiers of a simulated run. Times are the simulation's. Replicas are assigned by place: 0 .. nodes -
    1 are the active nodes, higher places the spares. A node that replaces another takes its place, and the
    replicas that belong there."""

    def __init__(
        self, state: RunState, durations: Durations, nodes: int, spares: int, seed: int | None = None
    ) -> None:
        self._state, self._d, self._nodes = state, durations, nodes
        wanted = state.settings
        preferred = spares if wanted.prefer_spares else 0
        self._holders = _holders(nodes, preferred, wanted.replicas)
        self._storage = None if durations.write_s is None else _Storage(state, durations.write_s, seed)
        self._direct: dict[StateId, int] = {}  # in storage, where ranks save to that
        # The two newest, as the newest may not be complete: which, and when that is or was.
        self._recent: list[tuple[StateId, float]] = []
        self._places: dict[int, int] = {}  # by number, for nodes that have left their first place
        self._losses: list[tuple[float, int]] = []
        self._halted_at = 0.0

    def swapped(self, out: int, into: int) -> None:
        """Let the node `into` take the place of the node `out`."""
        places = self._places
        places[into], places[out] = places.get(out, out), places.get(into, into)

    def allocated(self) -> None:
        """Note that all nodes have been replaced."""
        self._places.clear()

    def saved(self, key: StateId, at: float, next_at: float) -> None:
        """Note that the stall of a save has ended. The stall of the next one ends at `next_at`, if that is
        certain."""
        self._recent = [*self._recent[-1:], (key, at + self._d.copy_s)]
        if self._storage is not None and self._storage.wants(at, next_at):
            self._storage.saved(key, at)

    def lost(self, node: int, now: float) -> None:
        """Note that a node is lost, with its own images and its copies of others'."""
        place = self._places.get(node, node)
        self._losses.append((now, place))
        if self._storage is not None and place < self._nodes:
            self._storage.lost(now)

    def halted(self, now: float) -> None:
        """Note that the ranks have stopped: a save that is incomplete now stays incomplete."""
        self._halted_at = now
        if self._storage is None:
            whole = [key for key, complete_at in self._recent if complete_at <= now]
            self._direct = dict.fromkeys(whole[-1:] or self._direct, 1)

    def given_back(self, now: float) -> float:
        """Release the nodes. Returns the seconds for which writing a save delays this."""
        took_s = 0.0
        if self._storage is not None:
            copies = self._world().copies
            left = next((key for key in copies.newest_first() if copies.restorable(key)), None)
            took_s = self._storage.secure(left, now)
        self._recent = []
        return took_s

    def choose(self, launch: Launch, now: float) -> Restoring:
        """Return what an attempt restores whose nodes are about to be told."""
        shared: Mapping[StateId, int] = self._direct
        if self._storage is not None:
            self._storage.pass_until(now)
            shared = self._storage.shared
        world = self._world()
        restore = RestoreChoice(self._state, world.copies)
        (record,) = restore.choose(msgspec.structs.replace(launch, placement=world.placement), shared, now)
        chosen = restore.chosen
        assert chosen is not None
        assert isinstance(record, Record)
        from_storage = chosen.tier == SHARED and self._storage is not None
        seconds = self._d.read_s if from_storage else self._d.restore_s
        return Restoring(StateId(chosen.step, chosen.attempt), chosen.tier, seconds, record)

    def restored(self, what: Restoring, now: float) -> None:
        """Note that the ranks continue from this. All nodes have copies again of what is in memory."""
        self._losses.clear()
        in_memory = what.tier == MEMORY
        self._recent = [(what.key, 0.0)] if in_memory else []
        if self._storage is not None:
            self._storage.pass_until(now)
            self._storage.restored(what.key, self._state.attempt, in_memory=in_memory)

    def _world(self) -> _World:
        # By this time the others have made new copies of those that were lost.
        lost = {place for at, place in self._losses if at >= self._halted_at - self._d.copy_s}
        world = _World(self._holders, self._nodes, lost)
        if self._storage is not None:
            for key, complete_at in self._recent:
                world.hold(key, replicated=complete_at <= self._halted_at)
        return world


class _Storage:
    """Saves on shared storage and on their way there. A write takes `write_s` seconds. This is updated
    whenever something is about to happen; nothing here depends on what would go into the journal."""

    def __init__(self, state: RunState, write_s: float, seed: int | None) -> None:
        self._state, self._write_s, self._seed = state, write_s, seed
        self._copies = Copies()
        self._commit = Commit(state, self._copies)
        self._copies.holders[ALL_NODES] = Holder("", 0, "")
        self._writes = Writes(state, self._copies)
        replicas = Replicas(state, self._copies, self._commit)
        self._securing = FinalWrite(self._copies, self._commit, replicas, self._writes)
        self._order: msg.Write | None = None
        self._now = self._ends_at = 0.0

    @property
    def shared(self) -> Mapping[StateId, int]:
        return self._writes.shared

    def wants(self, at: float, next_at: float) -> bool:
        """Whether storage gets the save at `at` instead of waiting for the next save, at `next_at` (infinity:
        no next save is certain)."""
        self.pass_until(at)
        if self._order is not None and self._ends_at < next_at < math.inf:
            self._now = self._ends_at
            self._end(self._order)
        return next_at > self._next_at

    @property
    def _next_at(self) -> float:
        """When a write ends, or another may begin."""
        return self._ends_at if self._order is not None else self._writes.due_at(SHARED)

    def saved(self, key: StateId, at: float) -> None:
        self.pass_until(at)
        self._hold(key)
        self._commit.on_time(at)
        for older in self._copies.newest_first()[1:]:
            self._copies.drop_where(older)
        self._look()

    def lost(self, now: float) -> None:
        """Note that an active node's part of the images is lost, also of those being written."""
        self.pass_until(now)
        self._copies.drop_where()
        self._carry_out(self._writes.on_node_lost(ALL_NODES, "a node was lost", now))
        self._order = None

    def restored(self, key: StateId, attempt: int, *, in_memory: bool) -> None:
        self._copies.drop_where()
        if in_memory:
            self._hold(key)
            self._commit.go_on_from(key)
        else:
            self._commit.go_on_from(None)
            self._writes.on_restored(attempt, key.step)

    def secure(self, key: StateId | None, now: float) -> float:
        """Write the state `key`, which all nodes together still have, before they are released. Returns the
        seconds this took."""
        self.pass_until(now)
        self._copies.drop_where()
        if key is not None:
            self._hold(key)
        until = now + KEPT_STILL_S["requeued"]
        self._carry_out(self._securing.secure(self._now))
        bounds = Bounds(self._seed)
        while not self._securing.secured and self._now < until:
            # A supervisor looks at this all the time; here only when a write ends or may be tried again.
            retry_at = self._writes.retries.due_at(SHARED, hurry=True)
            next_at = self._ends_at if self._order is not None else retry_at
            self.pass_until(min(next_at, until) if next_at > self._now else until)
            bounds.event(self._now, "the newest save to be written before the nodes are released")
            self._carry_out(self._securing.secure(self._now))
        took_s = self._now - now
        self.lost(self._now)
        self._commit.go_on_from(None)
        return took_s

    def pass_until(self, now: float) -> None:
        """Carry out what happens to storage until this time."""
        bounds = Bounds(self._seed)
        while (at := max(self._now, self._next_at)) <= now:
            self._now = at
            bounds.event(at, "a write to storage")
            if self._order is not None:
                self._end(self._order)
            elif not self._look():
                break
        self._now = max(self._now, now)

    def _hold(self, key: StateId) -> None:
        self._copies.hold(Copy(ALL_NODES, MEMORY, *key, 0, 1, ALL, size_bytes=1))

    def _look(self) -> bool:
        """Start another write now if one is due."""
        key = self._commit.key
        if key is not None:
            self._carry_out(self._writes.look(key, self._now))
        return self._order is not None

    def _end(self, order: msg.Write) -> None:
        self._order = None
        done = msg.Written(id=order.id, tier=order.tier, ok=True, size_bytes=1)
        self._carry_out(self._writes.on_written(ALL_NODES, done, self._now))
        for key in list(self._writes.shared)[: -self._state.settings.keep]:
            del self._writes.shared[key]

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, msg.Write):
                self._order, self._ends_at = effect.message, self._now + self._write_s


class _World:
    """The copies on the nodes at the places `lost`, and on one node that stands for the rest of all
    `nodes`."""

    def __init__(self, holders: Mapping[str, tuple[str, ...]], nodes: int, lost: set[int]) -> None:
        self._holders = holders
        self._lost = {f"n{place}" for place in lost}
        concerned = {place for place in lost if place < nodes}
        if len(concerned) < nodes:
            concerned.add(next(place for place in range(nodes) if place not in concerned))
        self._ranks = {place: rank for rank, place in enumerate(sorted(concerned))}
        self.placement = tuple(f"n{place}" for place in self._ranks)
        self.copies = Copies()

    def hold(self, key: StateId, *, replicated: bool) -> None:
        """Let all nodes hold this save in memory and, if `replicated`, the copies of others' that they were
        to make."""
        for place, rank in self._ranks.items():
            image = Copy(f"n{place}", MEMORY, *key, rank, len(self._ranks), ALL, size_bytes=1)
            self._hold(image)
            if not replicated:
                continue
            for holder in self._holders.get(image.node, ()):
                self._hold(msgspec.structs.replace(image, node=holder, tier=PEER))

    def _hold(self, copy: Copy) -> None:
        if copy.node not in self._lost:
            self.copies.hold(copy)


@lru_cache(maxsize=4)
def _holders(nodes: int, spares: int, replicas: int) -> dict[str, tuple[str, ...]]:
    """Return who holds what once all nodes, with one rank each, have saved. `spares` count if they are
    preferred."""
    names = [f"n{place}" for place in range(nodes + spares)]
    return holders(names[:nodes], names[nodes:], {}, replicas, ())
