"""Plans of faults for a real cluster, drawn by seed or read from JSON, and what is known of a plan before it
is played. Kinds that the simulated cluster has as well have its names (`jurymast.sim.cluster.plans`)."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import msgspec

NODES = 6  # of the cluster
STEPS = 180
STEP_S = 0.05
SAVE_EVERY = 10
FIRST_STEP, LAST_STEP = 15, 140
MOST_FAULTS = 5
SOON_SHARE = 0.4  # of the faults: those that strike soon after another, or at the same moment
SOON_S = 1.5
# Within so many steps of each other two losses may strike both nodes that have a rank's image.
TOGETHER_STEPS = 40

# Whom a fault strikes: a rank on a placed node, a node of the job, a spare, the supervisor's node, the run.
RANK, NODE, SPARE, SUPERVISOR, RUN = "rank", "node", "spare", "supervisor", "run"


@dataclass(frozen=True)
class Kind:
    """`often`: how often it is drawn. `longest_s`: how long it lasts at the most (0.0: it does not last).
    `causes`: what an incident that it led to may be called. `shows`: it leads to one, if ranks run.
    `outs`: the node that it strikes may be taken out. `images`: those on the node are lost."""

    often: float
    strikes: str
    causes: tuple[str, ...] = ()
    longest_s: float = 0.0
    shows: bool = False
    outs: bool = False
    images: bool = False


_LINK = (
    "node_lost", "node_crash", "fabric_fault", "hang", "communication", "collective_timeout",
    "restore_failed", "host_died", "allocation_lost",
)  # fmt: skip
_ENDS = ("preempted", "job_ended", "node_taken", "requeue_asked", "allocation_lost", "worker_terminated")
_STORAGE = ("restore_failed", "storage_failed", "storage_full", "worker_exception", "hang")

KINDS: dict[str, Kind] = {
    # A node, or what is heard of it.
    "power": Kind(3, NODE, _LINK, shows=True, outs=True, images=True),
    "crash": Kind(2, NODE, _LINK, shows=True, outs=True, images=True),
    "freeze": Kind(2, NODE, _LINK, 8.0, outs=True, images=True),
    "isolate": Kind(2, NODE, _LINK, 8.0, outs=True, images=True),
    "cut": Kind(1, NODE, _LINK, 8.0, outs=True),
    "one way": Kind(1.5, NODE, _LINK, 8.0, outs=True),
    "flaps": Kind(1, NODE, _LINK, 5.0, outs=True, images=True),
    "slow link": Kind(1, NODE, (), 8.0),
    # A process of ours.
    "agent": Kind(2, NODE, _LINK, shows=True, outs=True, images=True),
    "guard": Kind(1, NODE, _LINK, outs=True, images=True),
    "agent stops": Kind(1.5, NODE, _LINK, 6.0, outs=True, images=True),
    "host": Kind(2, RANK, ("host_died",), shows=True),
    "server": Kind(1, RANK, ("host_died",)),
    "storage child": Kind(1.5, NODE),
    "probes": Kind(1, NODE),
    "supervisor": Kind(2, SUPERVISOR, ("relaunch_asked", "host_died")),
    "stall": Kind(1.5, SUPERVISOR, _LINK, 5.0),
    "standby": Kind(1, NODE),
    # A rank.
    "rank": Kind(3, RANK, ("worker_killed",), shows=True),
    "stopped": Kind(2, RANK, ("rank_frozen",), shows=True),
    "terminated": Kind(1, RANK, ("worker_terminated", "worker_killed"), shows=True),
    "segfault": Kind(1, RANK, ("worker_crash",), shows=True),
    "raises": Kind(1, RANK, ("worker_exception",), shows=True),
    "hang": Kind(1.5, RANK, ("hang",), shows=True),
    "loader": Kind(2, RANK, ("worker_killed", "worker_exception"), shows=True),
    # Storage.
    "disk full": Kind(1, NODE, ("disk_full", "host_suspect", *_STORAGE), 8.0, outs=True),
    "storage hangs": Kind(1.5, RUN, (*_STORAGE, *_LINK), 8.0),
    "storage refuses": Kind(1, RUN, _STORAGE, 8.0),
    "run directory hangs": Kind(1, RUN, (*_STORAGE, *_LINK, "relaunch_asked"), 6.0),
    "corrupt": Kind(1.5, RUN, ("restore_failed", "worker_exception")),
    "corrupt memory": Kind(1.5, SPARE, ("restore_failed",), images=True),
    # Slurm, and who gives it orders.
    "slurmctld restart": Kind(1, RUN),
    "slurmctld crash": Kind(1, RUN),
    "slurm silent": Kind(1, RUN, (), 4.0),
    "preempted": Kind(1.5, RUN, _ENDS, 3.0),
    "requeued": Kind(1.5, RUN, _ENDS),
    "suspended": Kind(1, RUN, (*_LINK, "rank_frozen"), 4.0),
    "signal": Kind(1, RUN, _ENDS),
    "signal all": Kind(1, RUN, (*_ENDS, "worker_killed", "worker_exit")),
    "admin drains": Kind(1, NODE, ("drain_asked", "straggler"), outs=True),
    # Who asks the run.
    "restart": Kind(1, RUN, ("restart_asked",), shows=True),
    "drained": Kind(1, RANK, ("drain_asked",), shows=True, outs=True),
    "save": Kind(0.5, RUN),
    "cancelled": Kind(0.3, RUN, _ENDS),
}
# One of these ends the allocation, so that no node keeps its images.
ENDS_JOB = frozenset({"preempted", "requeued", "cancelled"})
# They need what only some plans have.
NEEDS_LOADER, NEEDS_SPARE = frozenset({"loader"}), frozenset({"corrupt memory"})
# The script's own faults: a third of one kind without a step between them would rightly end the run.
SCRIPTS_OWN = frozenset({"raises", "segfault", "loader"})
MOST_OF_SCRIPT = 2
MOST_OF_ALL_SCRIPTS = 3  # jurymast's budget for a script's own failures
# What these did shows only when something else strikes, before anything newer is saved there.
SHOWN_BY = {"corrupt": "crash", "corrupt memory": "crash", "standby": "supervisor"}
EACH_AT = 60
# So far that what led to an incident is known.
APART_STEPS = 320


@dataclass(frozen=True)
class Fault:
    """Strikes `wait_s` after the run has reached the step `at`: the node at `place` (of the placed nodes,
    then of the spares), for `seconds`; `other` is the second node of a cut."""

    at: int
    kind: str
    place: int = 0
    other: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    active: int
    spares: int
    faults: tuple[Fault, ...]
    loader: bool = False  # the script loads its data by a worker process
    local: bool = False  # checkpoints are also written to the nodes' own disks
    peer: bool = True  # and replicated to other nodes
    shared_s: float = 0.0  # from one checkpoint on shared storage to the next; 0.0: as jurymast likes
    silent_s: float = 0.0  # after so much silence a node counts as lost; 0.0: as jurymast likes
    steps: int = STEPS
    in_process: bool = False  # ranks that live go on in their processes

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError for anything else."""
        plan = msgspec.json.decode(text, type=cls)
        unknown = sorted({fault.kind for fault in plan.faults} - set(KINDS))
        if unknown:
            raise ValueError(f"no such kinds of faults: {', '.join(unknown)}")
        if not 1 <= plan.active <= plan.active + plan.spares <= NODES:
            raise ValueError(f"a plan has 1 to {NODES} nodes")
        return plan


def random_plan(seed: int, only: tuple[str, ...] = (), most: int = MOST_FAULTS) -> Plan:
    """Draw a plan, with `only` of faults of these kinds. One of more than usual has at least
    half of them, and as many more steps."""
    chance = random.Random(seed)
    active = chance.choice((2, 2, 3))
    spares = chance.choice((0, 1, 1, 2))
    loader = "loader" in only or chance.random() < 0.3
    kinds = {name: kind for name, kind in KINDS.items() if not only or name in only}
    if not loader:
        kinds = {name: kind for name, kind in kinds.items() if name not in NEEDS_LOADER}
    if not spares:
        kinds = {name: kind for name, kind in kinds.items() if name not in NEEDS_SPARE} or kinds
    faults: list[Fault] = []
    at = 0
    steps = STEPS * max(most, MOST_FAULTS) // MOST_FAULTS
    wanted = chance.randint(1 if most <= MOST_FAULTS else most // 2, most)
    while len(faults) < wanted:
        soon = bool(faults) and chance.random() < SOON_SHARE
        at = at if soon else chance.randint(FIRST_STEP, steps - STEPS + LAST_STEP)
        fault = _fault(chance, at, _drawn(chance, kinds, faults), active + spares, soon)
        faults.append(fault)
        if (shown_by := SHOWN_BY.get(fault.kind)) and len(faults) < most:
            faults.append(replace(fault, kind=shown_by, place=chance.randrange(active)))
    # Only where nothing newer than what is damaged is left anywhere else, and something is stored at all.
    corrupt = any(fault.kind == "corrupt" for fault in faults)
    return Plan(
        seed, active, spares, tuple(sorted(faults, key=lambda fault: (fault.at, fault.wait_s))), loader,
        local=chance.random() < 0.3, peer=chance.random() < 0.9 and not corrupt,
        shared_s=2.0 if corrupt else chance.choice((0.0, 0.0, 2.0)), steps=steps,
    )  # fmt: skip


def each_kind(only: tuple[str, ...] = (), a_run: int = 1) -> list[Plan]:
    """Plans in which each kind strikes once, `a_run` of them far from each other, and what makes it show."""
    kinds = [name for name in KINDS if not only or name in only]
    count = -(-len(kinds) // a_run)
    plans = []
    for number in range(count):
        faults: list[Fault] = []
        for at, name in enumerate(kinds[number::count]):
            at = EACH_AT + at * APART_STEPS
            faults.append(Fault(at, name, other=1, seconds=KINDS[name].longest_s))
            if shown_by := SHOWN_BY.get(name):
                faults.append(Fault(at, shown_by))
        struck = {fault.kind for fault in faults}
        plans.append(
            Plan(number + 1, 2, min(a_run, 2), tuple(faults), loader=bool(struck & NEEDS_LOADER),
                 local="disk full" in struck, peer="corrupt" not in struck, shared_s=1.0,
                 steps=STEPS + (a_run - 1) * APART_STEPS)
        )  # fmt: skip
    return plans


def _drawn(chance: random.Random, kinds: dict[str, Kind], faults: list[Fault]) -> str:
    """A kind of which there are not too many yet."""
    drawn = [fault.kind for fault in faults]
    full = {kind for kind in SCRIPTS_OWN if drawn.count(kind) >= MOST_OF_SCRIPT}
    if sum(kind in SCRIPTS_OWN for kind in drawn) >= MOST_OF_ALL_SCRIPTS:
        full |= SCRIPTS_OWN
    full |= ENDS_JOB & set(drawn)
    left = [name for name in kinds if name not in full] or list(kinds)
    return chance.choices(left, [kinds[name].often for name in left])[0]


def _fault(chance: random.Random, at: int, kind: str, nodes: int, soon: bool) -> Fault:
    place = chance.randrange(nodes)
    longest_s = KINDS[kind].longest_s
    return Fault(
        at, kind, place, (place + chance.randrange(1, max(2, nodes))) % nodes,
        round(0.5 + (longest_s - 0.5) * chance.random() ** 2, 2) if longest_s else 0.0,
        round(chance.choice((0.0, chance.uniform(0.0, SOON_S))), 2) if soon else 0.0,
    )  # fmt: skip


def cancels(plan: Plan) -> bool:
    """Whether somebody cancels the job: unless the run is over by then, that is its right end."""
    return any(fault.kind == "cancelled" for fault in plan.faults)


def destroys(plan: Plan) -> bool:
    """Whether the plan may destroy every copy of what was saved: the newest on shared storage is damaged, and
    soon those in memory are lost as well. An older step, or the beginning, is then right."""
    damaged = [fault.at for fault in plan.faults if fault.kind == "corrupt"]
    losses = sum(KINDS[fault.kind].images for fault in plan.faults)
    losses += 2 * any(fault.kind in ENDS_JOB for fault in plan.faults)
    return bool(damaged) and losses > (1 if plan.peer else 0)


def loses_replicas(plan: Plan) -> bool:
    """Whether both nodes that have a rank's image may be lost before another has it."""
    if not plan.peer or any(fault.kind in ENDS_JOB for fault in plan.faults):
        return True
    # Without a spare the first loss already ends the allocation, and with it all that is in memory.
    losses = sorted(fault.at for fault in plan.faults if KINDS[fault.kind].images)
    if losses and not plan.spares:
        return True
    return any(later - first <= TOGETHER_STEPS for first, later in pairwise(losses))


def seeds(first: int, count: int) -> list[int]:
    """A campaign's plans have seeds of their own, so that each can be drawn by itself."""
    chance = random.Random(first)
    return [chance.randrange(1 << 31) for _ in range(count)]
