"""What is simulated: a small cluster and its faults, drawn by seed or read from JSON."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

import msgspec

MOST_FAULTS = 5
FIRST_AT_S, LAST_AT_S = 1.0, 20.0
AFTER_S = 18.0
LAST_STEPS = 10, 100

# kind: how often, and how long it lasts at the most, in seconds (0.0: it does not last).
KINDS: dict[str, tuple[float, float]] = {
    "power": (3, 40.0),  # the node vanishes silently; it boots again after this long, or (0) not
    "agent": (1, 20.0),  # its agent is killed; another is started after this long, or not
    "freeze": (2, 9.0),
    "isolate": (1.5, 30.0),  # from all other nodes
    "cut": (2, 45.0),  # two nodes from each other
    "snap": (1.5, 0.0),  # its connection breaks
    "half": (1, 0.0),  # its connection breaks, and one end does not learn it
    "rank": (2, 0.0),
    "hang": (1, 40.0),  # until they are stopped; the cluster is simulated at least this long
    "host": (1, 0.0),  # its torchrun host dies
    "supervisor": (3, 0.0),  # is killed
    "stall": (1.5, 8.0),  # the supervisor's process stands still
    "storage hangs": (1.5, 70.0),
    "storage full": (1, 30.0),
    "storage slow": (1, 30.0),
    "storage hangs here": (1, 20.0),  # on one node
    "old view": (1, 40.0),  # a node's view of storage is old
    "unmounted": (0.5, 40.0),  # a node does not see the checkpoints
    "corrupt": (1.5, 0.0),  # one image
    "clock": (1, 0.0),  # jumps
    "restart": (0.5, 0.0),  # somebody asks for it
    "warning": (0.5, 0.0),  # Slurm says that a time limit is near
    "signal": (0.5, 0.0),  # the supervisor gets a SIGTERM, and the job goes on
    "preempted": (0.5, 0.0),  # Slurm ends the job, all get a SIGTERM; it is requeued
    "cancelled": (0.3, 0.0),  # and it is not
    "timeout": (0.3, 0.0),
    "rollback": (0.7, 0.0),  # somebody goes back to an older checkpoint
    "drained": (0.5, 0.0),  # somebody takes the node out
    "save": (0.3, 0.0),  # somebody asks for a save
    "given up": (0.2, 0.0),  # somebody has the run cancelled
    "flaps": (1, 25.0),  # the node's link, up and down again and again
    "agent stops": (1, 20.0),  # its process stands still while the ranks go on
    "stale handles": (1, 30.0),  # the node's to the run directory: all it asks there fails at once
    "long journal": (0.5, 6.0),  # from now on, reading it takes this long
    "slurm silent": (0.5, 20.0),  # it cannot be asked
}
# Some faults wait for one of these phases of the run.
WHEN = ("stopping", "waiting", "launching")


@dataclass(frozen=True)
class Fault:
    at: float
    kind: str
    node: int = 0
    other: int = 0
    seconds: float = 0.0
    when: str = ""  # the phase that it waits for, from `at` on; in some runs it never comes


@dataclass(frozen=True)
class Plan:
    seed: int
    active: int
    spares: int
    ranks: int
    cadence_steps: int | None
    room: int  # images of others that a node's memory takes
    faults: tuple[Fault, ...]
    parity: int = 0  # nodes in a group of which only the XOR is kept; 0: whole replicas, while there is room
    last_step: int = 0  # after it the ranks end; 0: they never do

    @property
    def nodes(self) -> int:
        return self.active + self.spares

    @property
    def seconds(self) -> float:
        return max((fault.at + fault.seconds for fault in self.faults), default=10.0) + AFTER_S

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError for anything else."""
        return msgspec.json.decode(text, type=cls)


def random_plan(seed: int, only: tuple[str, ...] = ()) -> Plan:
    """Draw a plan. With `only`, faults are of these kinds, and ranks never end."""
    chance = random.Random(seed)
    active = chance.choice((2, 2, 3, 4))
    spares = min(chance.choice((0, 1, 1, 2)), 6 - active)
    nodes = active + spares
    faults = []
    kinds = list(only or KINDS)
    weights = [KINDS[kind][0] for kind in kinds]
    for _ in range(chance.randint(1, MOST_FAULTS)):
        kind = chance.choices(kinds, weights)[0]
        longest_s = KINDS[kind][1]
        seconds = round(0.3 + (longest_s - 0.3) * chance.random() ** 3, 2) if longest_s else 0.0
        if kind in ("power", "agent") and chance.random() < 0.6:
            seconds = 0.0
        node = chance.randrange(nodes)
        other = (node + chance.randrange(1, nodes)) % nodes
        at = round(chance.uniform(FIRST_AT_S, LAST_AT_S), 2)
        when = chance.choice(WHEN) if chance.random() < 0.2 else ""
        faults.append(Fault(at, kind, node, other, seconds, when))
        if chance.random() < 0.35:  # the next one soon after
            kind = chance.choice(only or ("power", "supervisor", "rank", "freeze", "snap", "storage hangs"))
            seconds = 0.0 if kind == "power" or not KINDS[kind][1] else 4.0
            soon = round(at + chance.expovariate(0.5), 2)
            faults.append(Fault(soon, kind, chance.randrange(nodes), other, seconds))
    faults.sort(key=lambda fault: fault.at)
    return Plan(
        seed, active, spares, chance.choice((1, 1, 2)), chance.choice((5, 5, None)),
        chance.choice((1, 8, 8, 8)), tuple(faults[:MOST_FAULTS]),
        parity=chance.choice((0, 0, 0, 2, 3)),
        last_step=0 if only else chance.choice((0, 0, chance.randrange(*LAST_STEPS))),
    )  # fmt: skip


def smaller(plan: Plan) -> list[Plan]:
    return [
        replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
        for number in range(len(plan.faults))
    ]
