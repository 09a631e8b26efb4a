"""Plans of faults for the simulated cluster: drawn by seed, or read from JSON."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

import msgspec

from jurymast.core.state.run import LEAVE_S
from jurymast.sim.cluster import caught, health
from jurymast.sim.cluster.oracle import STANDSTILL_S
from jurymast.sim.cluster.rejoining import SPREADS
from jurymast.sim.cluster.tasks import ALL_S

MOST_FAULTS = 5
FIRST_AT_S, LAST_AT_S = 1.0, 20.0
AFTER_S = 18.0
GROWS_S = 60.0  # by then a run has taken in nodes that it lacked
LONGEST_S = 3600.0
LAST_STEPS = 10, 100
TASKS_SHARE, TESTS_SHARE, LIVES_SHARE = 0.15, 0.15, 0.4
ASKED_FOR_SHARE = 0.2  # of mixed plans have a fault that occurs only where a plan asks for it
KILLS_SHARE = 0.3  # of runs of tasks
RENEWS_SHARE = 0.5  # of the plans with a time limit
# Of this, twice as much is less than Slurm leaves a job that it ends.
SLOW_COPY_S = 1.0, 10.0

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
    "half told": (0.7, 0.0),  # after it has told only some agents of a restart: to stop, or to launch
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
    "killed": (0.3, 0.0),  # the same, without a signal: all processes die
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
    "grace": (0.5, 40.0),  # as "preempted", but the job has this long before Slurm signals once more
    "signal all": (0.4, 0.0),  # the supervisor and all agents get a SIGTERM, and the job goes on
    "raises": (1, 0.0),  # a rank, an exception of the script's
    "stopped": (0.7, 20.0),  # a rank, by a signal, until it is killed
    "gpu lost": (0.7, 0.0),  # its probe says so, and the node leaves; but not for what is only like that
    "gpu doubtful": (0.5, 0.0),
    "stray finding": (0.7, 0.0),
    "fails tests": (0.5, 0.0),  # before use, from the beginning; until it boots
    "slow node": (0.25, 0.0),  # its ranks do more than the others, until others have their places
    "breaks": (0.2, 60.0),  # no rank gets beyond the step that it is at: killed, hung and failed in turns
    "caught": (1, 20.0),  # the ranks catch a signal, save, and go on or leave: see `sim.cluster.caught`
    "admin drains": (0.0, 90.0),  # the node, by Slurm; only where a plan asks for it
    "uneven": (
        0.2,
        0.0,
    ),  # the first node's ranks, or the last one's, do more than the others in all attempts
    "step ends": (0.0, 0.0),  # of all agents, by Slurm; the job goes on. Only where a plan asks for it
    "reserved": (0.0, 90.0),  # the node, or if it is the `other` one all, after so long; only where asked for
}
# Kinds by which nodes are lost, some of which come back, and what may happen at the same time.
LOSING = (
    "power", "agent", "isolate", "flaps", "supervisor", "rank", "restart", "storage hangs", "storage full",
)  # fmt: skip
# Some faults wait for one of these phases of the run.
WHEN = ("stopping", "waiting", "launching", "requeued")


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
    last_step: int = 0  # after it the ranks end; 0: they never do
    copy_s: float = 0.0  # how long a node writes its share of a checkpoint; 0.0: for a moment
    at_term: str = ""  # how ranks take a SIGTERM: see `sim.cluster.caught`; "": they go on without a word
    tasks: bool = False  # its ranks are independent tasks
    kill_on_bad_exit: bool = False  # of which one that fails ends the others
    tests: bool = False  # nodes are tested before use
    renews: bool = False  # the job is requeued shortly before its time limit
    lives: bool = False  # ranks go on in their processes: `Checkpointer.run`
    spread: str = ""  # how the model is spread over ranks: see `sim.cluster.rejoining`
    least: int = 0  # with so many nodes it goes on; 0: with all that it wants
    pool: int | None = None  # nodes besides the job's that small jobs may get; None: the policy wants none
    members: int = 0  # of these so many are to wait in a pool that other runs share

    @property
    def nodes(self) -> int:
        return self.active + self.spares

    @property
    def seconds(self) -> float:
        last = max((fault.at + fault.seconds for fault in self.faults), default=10.0) + AFTER_S
        for fault in self.faults:
            if fault.kind == "caught" and how_caught(fault) == caught.STAYS:
                last = max(last, fault.at + LEAVE_S + STANDSTILL_S + AFTER_S)
            if fault.kind == health.SLOW:
                last = max(last, fault.at + health.LEAVES_S[health.SLOW] + AFTER_S)
        return last + ALL_S * self.tasks + GROWS_S * bool(self.least)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan. Raises ValueError for anything else, and for one that lasts too long."""
        plan = msgspec.json.decode(text, type=cls)
        if not all(
            0.0 <= fault.at <= LONGEST_S and 0.0 <= fault.seconds <= LONGEST_S for fault in plan.faults
        ):
            raise ValueError(f"a fault begins, and lasts, at most {LONGEST_S:.0f} s")
        return plan


def how_caught(fault: Fault) -> str:
    return caught.HOW[(fault.node + fault.other) % len(caught.HOW)]


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
    ends = any(fault.kind == "timeout" for fault in faults)
    fails_tests = any(fault.kind == "fails tests" for fault in faults)
    return Plan(
        seed, active, spares, chance.choice((1, 1, 2)), chance.choice((5, 5, None)),
        chance.choice((1, 8, 8, 8)), tuple(faults[:MOST_FAULTS]),
        last_step=0 if only else chance.choice((0, 0, chance.randrange(*LAST_STEPS))),
        copy_s=chance.choice((0.0, 0.0, 0.0, 0.0, 0.0, round(chance.uniform(*SLOW_COPY_S), 1))),
        at_term=chance.choice(("", "", *caught.HOW)), tasks=not only and chance.random() < TASKS_SHARE,
        tests=fails_tests or chance.random() < TESTS_SHARE,
        lives=(of_lives := random.Random(-seed)).random() < LIVES_SHARE, spread=of_lives.choice(SPREADS),
        renews=ends and of_lives.random() < RENEWS_SHARE,
        kill_on_bad_exit=of_lives.random() < KILLS_SHARE,
    )  # fmt: skip


def refilled_plan(seed: int) -> Plan:
    """Draw a plan of a run whose small jobs may get other nodes, or find none free."""
    return replace(random_plan(seed), pool=random.Random(seed).choice((0, 1, 1, 2, 3)), tasks=False)


def shrinking_plan(seed: int) -> Plan:
    """Draw a plan of a run that may go on with fewer nodes, and that may get other ones now and then."""
    chance = random.Random(seed)
    plan = random_plan(seed, LOSING if chance.random() < 0.8 else ())
    spares = min(plan.spares, chance.choice((0, 0, 1)))
    active = plan.nodes - spares
    return replace(
        plan, active=active, spares=spares, least=chance.randint(1, active - 1),
        pool=chance.choice((None, None, 0, 1, 2)), tasks=False,
    )  # fmt: skip


def pooled_plan(seed: int) -> Plan:
    """Draw a plan of a run that shares a pool of waiting nodes."""
    chance = random.Random(seed)
    plan = random_plan(seed, LOSING if chance.random() < 0.5 else ())
    members = chance.choice((1, 1, 2))
    return replace(plan, pool=members + chance.choice((0, 1, 2, 3)), members=members, tasks=False)


def mixed_plan(seed: int) -> Plan:
    """Draw a plan of one of these kinds, in some of them with a fault that none of them has."""
    plans = (random_plan, random_plan, refilled_plan, shrinking_plan, pooled_plan)
    plan, chance = plans[seed % len(plans)](seed), random.Random(~seed)
    if chance.random() >= ASKED_FOR_SHARE:
        return plan
    kind = chance.choice([kind for kind, (often, _) in KINDS.items() if not often])
    at, seconds = chance.uniform(FIRST_AT_S, LAST_AT_S), chance.uniform(1.0, KINDS[kind][1] or 1.0)
    node, other = chance.randrange(plan.nodes), chance.randrange(plan.nodes)
    asked = Fault(round(at, 2), kind, node, other, round(seconds, 2))
    faults = (*plan.faults[: chance.choice((0, 0, 1, 2, MOST_FAULTS))], asked)
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def smaller(plan: Plan) -> list[Plan]:
    return [
        replace(plan, faults=plan.faults[:number] + plan.faults[number + 1 :])
        for number in range(len(plan.faults))
    ]
