"""Bugs to plant, to see that the simulated cluster's rules notice them, each by its name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from jurymast.core.agent import link
from jurymast.core.agent.machine import NodeWrites
from jurymast.core.agent.ranks import Ranks
from jurymast.core.checkpoints import checkpoints as restoring
from jurymast.core.checkpoints import copies as cp
from jurymast.core.checkpoints.checkpoints import Checkpoints, FinalWrite
from jurymast.core.checkpoints.copies import Reachability
from jurymast.core.checkpoints.replicas import Replicas
from jurymast.core.checkpoints.writes import OpenWrite, Writes
from jurymast.core.judges import attribution, blame, leaving, loops, silence
from jurymast.core.judges import tests as node_tests
from jurymast.core.judges.attribution import cause_of_end
from jurymast.core.judges.energy import EnergyUsed
from jurymast.core.judges.stragglers import Windows
from jurymast.core.nodes.acknowledgement import Known
from jurymast.core.nodes.hangs import Hangs
from jurymast.core.nodes.watch import Watch
from jurymast.core.run import ends, ladder, machine, recovery, tasks
from jurymast.core.state import events as ev
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Send
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import Node, Phase, RunState
from jurymast.core.supervision import joining
from jurymast.core.supervision import machine as supervision
from jurymast.core.supervision.departure import Departure, Stage
from jurymast.core.supervision.machine import Supervision
from jurymast.sim.cluster import caught
from jurymast.sim.cluster.agent import SimHost
from jurymast.sim.cluster.plans import Fault, Plan, random_plan
from jurymast.sim.cluster.supervisor import SimSupervisor
from jurymast.sim.cluster.world import RunDisk
from jurymast.supervisor.supervisor import Hold
from support.planted_ahead import PLANTED_AHEAD
from support.planted_incidents import PLANTED_INCIDENTS
from support.planted_pool import PLANTED_POOL
from support.planted_refill import PLANTED_REFILL
from support.planted_size import PLANTED_SIZE
from support.planted_sparing import PLANTED_SPARING
from support.planted_told import PLANTED_TOLD

# (object, attribute, value)
Patch = tuple[Any, str, Any]
Plans = Callable[[int], Plan]


def _shared_first(copies: cp.Copies, shared: Any, *rest: Any) -> cp.RestorePlan:
    return _plan_restore(cp.Copies() if shared else copies, shared, *rest)


def _memory_only(copies: cp.Copies, shared: Any, *rest: Any) -> cp.RestorePlan:
    return _plan_restore(copies, {}, *rest)


def _secured_at_once(self: FinalWrite, now: float) -> list[Any]:
    self.secured = True
    return []


def _launch_with_deadline(state: RunState, placement: tuple[str, ...], reason: str) -> Any:
    launch = _launch(state, placement, reason)
    state.deadline = state.now + 10.0
    return launch


def _mixed(self: restoring.RestoreChoice, node: str, ranks: range) -> msg.Restore | None:
    told = _message(self, node, ranks)
    older = [key for key in self._copies.newest_first() if told and key[0] < told.step]
    if told is None or 0 in ranks or not older or not self._copies.restorable(older[0]):
        return told
    sources = {rank: self._copies.sources(older[0], rank, node) for rank in ranks}
    return msg.Restore(step=older[0][0], attempt=older[0][1], ranks=sources)


def _all_time_counts(self: silence.WatcherClock, real_now: float) -> float:
    self.now += max(0.0, real_now - self._real)
    self._real = real_now
    return 0.0


def _leave_nobody(self: SimHost, *, loud: bool) -> None:
    if loud:
        _leave(self, loud=loud)
    self.attempt = 0


def _no_books(self: Replicas, key: im.StateId, nodes: Any) -> list[Any]:
    return [Send(node, msg.Committed(step=key[0], attempt=key[1])) for node in nodes]


def _long_patience(heartbeat_s: float, nodes: int, late_s: float = 0.0) -> float:
    return 3.0 + 4.0 * late_s


_plan_restore, _launch, _message, _leave = (
    cp.plan_restore, recovery._launch, restoring.RestoreChoice.message, SimHost._leave
)  # fmt: skip
_handlers, _passed, _keep = machine._HANDLERS, Writes._passed, Hold._keep


async def _silent_reader(self: Hold) -> None:
    assert isinstance(self._io, SimSupervisor)
    await asyncio.sleep(self._io.cluster.disk.reading_s)
    await _keep(self)


async def _open_fence(self: Hold) -> bool:
    with suppress(OSError):
        return await self._newest() > self.epoch
    return False


def _does_not_wait(self: Departure, unwritten: bool) -> bool:
    """Its journal is as far away as the epochs, and it would wait for that."""
    return False


def _listed_only(self: RunDisk, node: str) -> int:
    seen_at = self.storage.view_at(node)
    return max((e for e, (t, by) in self.claims.items() if t <= seen_at or by == node), default=0)


def _place_listed_only(self: RunDisk, node: str) -> Endpoint | None:
    return {e: place for e, (_, place) in self.endpoints.items()}.get(_listed_only(self, node))


def _seal_with_the_lead(self: Writes, write: OpenWrite, node: str, now: float) -> list[Any]:
    if write.phase is msg.WritePhase.WRITE and node == write.lead:
        write.behind = {node}
    return _passed(self, write, node, now)


def _nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def _ever_more_patient(state: RunState, event: ev.RanksHung) -> Any:
    before = state.hang_patience
    decided = machine._ranks_hung(state, event)
    state.hang_patience = 8.0 * before
    return decided


def _dismissed_has_not_ended(state: RunState, event: ev.WorkersStopped) -> Any:
    had_finished = event.node in state.finished
    decided = machine._workers_stopped(state, event)
    if had_finished:
        state.finished.discard(event.node)
    return decided


def _first_code(state: RunState) -> Any:
    first, *_ = state.findings.failures.values()
    code = first.exit_code if first.exit_code > 0 else 128 - first.exit_code
    return recovery.finish(state, "failed", code, "a task failed")


_tick = Departure.on_time


def _failed_beside_them(state: RunState, event: ev.WorkersStopped) -> bool:
    runs = state.alone and state.phase in (Phase.LAUNCHING, Phase.RUNNING) and event.attempt == state.attempt
    failures = state.findings.failures.values()
    return runs and any((one.node, one.attempt) == (event.node, event.attempt) for one in failures)


def _ever(self: RunState, now: float) -> bool:
    return self.warned == self.attempt > 0


_failed = cp.Reachability.failed


def _each_failure_counts(self: cp.Reachability, pair: cp.Pair, now: float) -> bool:
    if pair in self._failing:
        self._failing[pair].at = -math.inf
    return _failed(self, pair, now)


def of(*kinds: str) -> Plans:
    """Random plans of these kinds of faults, of all if none is named."""
    return partial(random_plan, only=kinds)


def of_tasks(*kinds: str) -> Plans:
    """The same for a run of independent tasks."""
    return lambda seed: replace(random_plan(seed, only=kinds), tasks=True, kill_on_bad_exit=False)


def _exactly_of_tasks(faults: Callable[[Random], tuple[Fault, ...]]) -> Plans:
    return lambda seed: replace(exactly(faults)(seed), tasks=True)


def exactly(faults: Callable[[Random], tuple[Fault, ...]]) -> Plans:
    """On four nodes, of which n2 and n3 get ranks, and n1 and n4 their replicas; n1 is the batch host."""
    return lambda seed: Plan(seed, 2, 2, 1, 5, 8, faults(Random(seed)))


def _no_link_to_the_holder(chance: Random) -> tuple[Fault, ...]:
    return (Fault(chance.uniform(4.0, 12.0), "cut", node=2, other=3, seconds=45.0),)


def _taken_over_while_a_launch_is_due(chance: Random) -> tuple[Fault, ...]:
    """The supervisor dies while a rank that hangs is being stopped. What the other node held is on n1, and n4
    takes its place: the launch may be decided on again before n1 is back."""
    at = chance.uniform(6.0, 12.0)
    dies = Fault(at + chance.uniform(2.2, 3.2), "supervisor")
    return Fault(at, "hang", node=2), Fault(at + 0.1, "power", node=1), dies


def _only_storage_is_left(chance: Random) -> tuple[Fault, ...]:
    """n3 is lost together with n4, and the node of rank 0 does not see storage."""
    at = chance.uniform(7.0, 12.0)
    unseen = Fault(at - 0.1, "unmounted", node=1, seconds=20.0)
    return unseen, Fault(at, "power", node=2), Fault(at, "power", node=3)


def only_storage_that_hangs_is_left(chance: Random) -> tuple[Fault, ...]:
    """The same, but that storage hangs on the node of rank 0, once the attempt is launched."""
    at = chance.uniform(7.0, 12.0)
    hangs = Fault(at + chance.uniform(1.5, 3.0), "storage hangs here", node=1, seconds=15.0)
    return Fault(at, "power", node=2), Fault(at, "power", node=3), hangs


def _storage_not_mounted_while_the_job_ends(chance: Random) -> tuple[Fault, ...]:
    """On the node of rank 0."""
    at = chance.uniform(7.0, 12.0)
    return Fault(at - 3.0, "unmounted", node=1, seconds=40.0), Fault(at, "cancelled")


def _away_for_a_moment(chance: Random) -> tuple[Fault, ...]:
    """Again and again, and then watched for as long as slots may be busy, but never at peace."""
    early = sorted(chance.uniform(4.0, 11.0) for _ in range(4))
    return Fault(1.0, "long journal", seconds=60.0), *(Fault(at, "snap", node=1) for at in [*early, 20.0])


def _alone_while_nodes_come(chance: Random) -> tuple[Fault, ...]:
    at = chance.uniform(0.75, 1.2)
    return Fault(at, "supervisor"), Fault(at + 0.1, "storage hangs", seconds=chance.uniform(30.0, 40.0))


def _dies_before_it_has_written(chance: Random) -> tuple[Fault, ...]:
    """Storage hangs on the supervisor's node when the ranks restore, and then the supervisor dies."""
    at = chance.uniform(6.0, 12.0)
    hangs = Fault(at + chance.uniform(0.2, 1.5), "storage hangs here", node=0, seconds=8.0)
    dies = Fault(hangs.at + chance.uniform(1.5, 3.0), "supervisor")
    return Fault(at, "rank", node=1), hangs, dies, Fault(at + 45.0, "snap", node=2)


def _dies_after_a_request(chance: Random) -> tuple[Fault, ...]:
    """Storage hangs on the supervisor's node, somebody asks for a restart, and the supervisor dies."""
    at = chance.uniform(6.0, 12.0)
    dies = Fault(at + chance.uniform(0.3, 2.5), "supervisor")
    return Fault(at, "storage hangs here", node=0, seconds=8.0), Fault(at + 0.2, "restart"), dies


def taken_over_when_the_journal_is_long(chance: Random) -> tuple[Fault, ...]:
    """The batch host is lost, and to read the journal takes longer than anybody waits for a pulse."""
    at = chance.uniform(6.0, 12.0)
    long = Fault(1.0, "long journal", seconds=6.0)
    return long, Fault(at, "power", node=0), Fault(at + 1.0, "snap", node=1, seconds=60.0)


def ends_while_another_rules(chance: Random) -> tuple[Fault, ...]:
    """The supervisor's node is cut off, another takes over, and then Slurm ends the job."""
    at, ends_at = chance.uniform(6.0, 12.0), chance.uniform(15.0, 30.0)
    return (
        Fault(at, "isolate", node=0, seconds=40.0),
        Fault(at, "stale handles", node=0, seconds=60.0),
        Fault(ends_at, "preempted"),
    )


def stalled_while_views_are_old(chance: Random) -> tuple[Fault, ...]:
    """The supervisor stands still, another takes over, and two nodes do not see it, one of them its own."""
    at = chance.uniform(6.0, 12.0)
    return (
        Fault(at, "old view", node=0, seconds=40.0),
        Fault(at, "old view", node=2, seconds=40.0),
        Fault(at, "stall", seconds=chance.uniform(3.0, 8.0)),
    )


def stalled_and_then_blind(chance: Random) -> tuple[Fault, ...]:
    """The supervisor stands still, and agents are back with it before the next one has read the journal. It
    cannot see that one, because its node's handles of the run directory are stale by then."""
    at = chance.uniform(6.0, 12.0)
    return (
        Fault(1.0, "long journal", seconds=chance.uniform(2.0, 6.0)),
        Fault(at, "stall", seconds=chance.uniform(3.0, 6.0)),
        Fault(at + 2.0, "stale handles", node=0, seconds=60.0),
    )


def damaged_where_it_is_restored(chance: Random) -> tuple[Fault, ...]:
    """An image on n2, just before the ranks are started again; in some plans the supervisor dies while n2
    asks who else has it, or the link to n1 is down, where its replica is."""
    at = chance.uniform(5.0, 12.0)
    faults = [Fault(at, "corrupt", node=1), Fault(at + 0.02, "rank", node=2)]
    if chance.random() < 0.4:
        faults.append(Fault(at + chance.uniform(0.0, 1.5), "supervisor"))
    if chance.random() < 0.3:
        faults.append(Fault(at, "cut", node=0, other=1, seconds=chance.uniform(1.0, 20.0)))
    return tuple(faults)


def rolled_back_at_a_takeover(chance: Random) -> tuple[Fault, ...]:
    """Written to storage while the one supervisor stands still, or dies, and the next looks there. Watched
    for so long that a run that has not gone back is seen to go on."""
    at = chance.uniform(7.0, 12.0)
    kind = chance.choice(("stall", "supervisor"))
    back = Fault(at + chance.uniform(0.0, 2.5 if kind == "stall" else 0.02), "rollback")
    ends = Fault(at, kind, seconds=chance.uniform(2.5, 5.0))
    return (*sorted((ends, back), key=lambda fault: fault.at), Fault(20.0, "snap", node=1))


def _taken_over_while_a_checkpoint_is_written(chance: Random) -> tuple[Fault, ...]:
    """By another node in place of n2, which did not see the storage. The next supervisor, which does not know
    this, has n2 write again, so that nobody orders anything new from the other one. Watched for so long that
    its write is seen to wait."""
    at = chance.uniform(9.0, 14.0)
    return (
        Fault(at - 7.0, "unmounted", node=1, seconds=7.0),
        Fault(at - 1.5, "storage slow", seconds=3.0),
        Fault(at, "supervisor"),
        Fault(40.0, "snap", node=1),
    )


def last_spare_while_clocks_differ(chance: Random) -> tuple[Fault, ...]:
    """The supervisor that takes over is minutes ahead, or behind, and the only node that may yet fill a
    place is warming up."""
    at = chance.uniform(9.0, 14.0)
    lost = Fault(4.0, "power", node=2), Fault(4.0, "power", node=3)
    clocks = Fault(at - 1.0, "clock", node=0), Fault(at - 1.0, "clock", node=1)
    return *lost, *clocks, Fault(at, "host", node=1), Fault(at + chance.uniform(0.1, 1.5), "supervisor")


def away_while_the_others_cannot_start(chance: Random) -> tuple[Fault, ...]:
    """n3 is lost before anybody has what it saved first, and is back while n2 and n4 still try to reach each
    other."""
    at = chance.uniform(2.0, 6.0)
    return Fault(at, "freeze", node=2, seconds=chance.uniform(3.5, 8.0)), Fault(
        at, "cut", node=1, other=3, seconds=45.0
    )


def lost_before_a_takeover(seed: int) -> Plan:
    """n3 does not reach the supervisor, on n1, and is replaced by it; then n1 is lost as well. The next
    supervisor reaches n3."""
    chance = Random(seed)
    cut_at = chance.uniform(4.0, 5.0)
    over_at = cut_at + chance.uniform(3.5, 4.5)
    faults = (
        Fault(1.44, "host", node=3),  # so that n4 is the last to be ready, or nearly so
        Fault(cut_at, "cut", node=2, other=0, seconds=9.9),
        Fault(over_at, "agent", node=0),
        Fault(over_at + 0.3, "power", node=0),
    )
    return Plan(seed, 3, 1, 1, 5, 8, faults)


def host_lost_while_a_launch_waits(seed: int) -> Plan:
    """Storage hangs, so the launch after a hang of ranks waits, and the torchrun host of a node that is to
    get ranks dies. Watched for so long that missing replicas are seen."""
    chance = Random(seed)
    at = chance.uniform(5.0, 7.0)
    faults = (
        Fault(at, "storage hangs", seconds=41.0),
        Fault(at + 0.2, "hang", node=1, seconds=38.0),
        Fault(at + chance.uniform(9.0, 20.0), "host", node=4),
        Fault(at + 60.0, "snap", node=0),
    )
    return Plan(seed, 4, 1, 1, 5, 8, faults)


def still_for_a_moment(seed: int) -> Plan:
    """The agent of one of two nodes stands still while the other fetches several images from it. Watched for
    so long that missing replicas are seen."""
    chance = Random(seed)
    stops = Fault(chance.uniform(6.0, 12.0), "agent stops", node=1, seconds=chance.uniform(0.8, 1.3))
    return Plan(seed, 2, 0, 2, 5, 8, (stops, Fault(32.0, "snap", node=0)))


def cut_off_alone(seed: int) -> Plan:
    """One of three nodes reaches neither of the others, but storage; the only active one, or the
    supervisor's. No collective stops its ranks."""
    chance = Random(seed)
    cut = Fault(chance.uniform(6.0, 12.0), "isolate", node=seed % 3, seconds=chance.uniform(20.0, 40.0))
    return Plan(seed, 1, 2, 1, 5, 8, (cut,))


def _no_spare_and_slow_writes(copy_s: float, *then: Fault) -> Plans:
    """A node is lost, the run is to be requeued, and its last checkpoint takes this long to be written."""
    lost = Fault(8.0, "power", node=1)
    return lambda seed: Plan(seed, 2, 0, 1, 5, 8, (lost, *then), copy_s=copy_s)


def _signalled_while_slurm_is_silent(chance: Random) -> tuple[Fault, ...]:
    at = chance.uniform(6.0, 12.0)
    return Fault(at, "slurm silent", seconds=30.0), Fault(at + 0.5, "signal all")


def _preempted(chance: Random) -> tuple[Fault, ...]:
    return (Fault(chance.uniform(6.0, 12.0), "preempted"),)


def _taken_over_while_storage_hangs(chance: Random) -> tuple[Fault, ...]:
    at = chance.uniform(6.0, 12.0)
    hangs = Fault(at, "storage hangs", seconds=chance.uniform(10.0, 20.0))
    return hangs, Fault(at + chance.uniform(3.0, 8.0), "supervisor")


def _silent_as_all_leave(chance: Random) -> tuple[Fault, ...]:
    """A node, while its ranks have most of a grace time left."""
    at = chance.uniform(6.0, 12.0)
    return Fault(at, "grace", seconds=60.0), Fault(at + chance.random(), "freeze", node=1, seconds=60.0)


def _preempted_while_nodes_come(chance: Random) -> tuple[Fault, ...]:
    return (Fault(chance.uniform(0.6, 1.4), "grace", seconds=60.0),)


def never_beyond_a_step(chance: Random) -> tuple[Fault, ...]:
    return (Fault(chance.uniform(6.0, 12.0), "breaks", seconds=400.0),)


def uneven_by_design(chance: Random) -> tuple[Fault, ...]:
    """For as long as it takes to notice a straggler."""
    return Fault(0.0, "uneven", node=chance.randrange(2)), Fault(45.0, "slurm silent")


_take = EnergyUsed.take


def _all_that_it_shows(self: EnergyUsed, counter: str, shows: float) -> None:
    self._shown.setdefault(counter, 0.0)
    _take(self, counter, shows)


def _all_is_known(self: Known, *_: object) -> None:
    self.until = math.inf


def _unwritten_and_unasked(self: Departure, now: float, *, unwritten: bool) -> list[Effect]:
    """Storage that hangs would not answer who is the newest supervisor, either."""
    effects = _tick(self, now, unwritten=False)
    return effects + self._leave(now) if self._stage is Stage.ASKS else effects


# name: (plans that may show it, and what is replaced)
PLANTED: dict[str, tuple[Plans, list[Patch]]] = {
    "B1: an older checkpoint on storage is preferred": (of(), [(cp, "plan_restore", _shared_first)]),
    "B2: a launch that waits for storage is a hang": (
        of("rank", "storage hangs"),
        [(recovery, "_launch", _launch_with_deadline)],
    ),
    "B3: a pair that cannot copy is asked for ever": (
        exactly(_no_link_to_the_holder),
        [(Reachability, "given_up", lambda *_: frozenset())],
    ),
    "B4: holders that are to come back are not awaited": (
        exactly(_taken_over_while_a_launch_is_due),
        [(Watch, "away", _nothing)],
    ),
    "B5: attempts that the journal lacks are ignored": (
        of("storage full", "storage hangs", "supervisor", "rank"),
        [(machine, "_HANDLERS", {**_handlers, ev.AttemptFound: _nothing})],
    ),
    "B6: ranks start from 0 where storage is not mounted": (
        exactly(_only_storage_is_left),
        [(Checkpoints, "saved_on_shared", 0)],
    ),
    "1: nodes go before the newest checkpoint is on storage": (
        of(),
        [(FinalWrite, "secure", _secured_at_once)],
    ),
    "1: the same node is asked to write for ever": (
        exactly(_storage_not_mounted_while_the_job_ends),
        [(Writes, "unfit", lambda *_: frozenset())],
    ),
    "2: nodes are told different states": (of(), [(restoring.RestoreChoice, "message", _mixed)]),
    "3: ranks go on beside those of the next attempt": (
        of("restart", "isolate", "freeze"),
        [(SimHost, "_leave", _leave_nobody)],
    ),
    "3: a node that is cut off alone does not see that it was replaced": (
        cut_off_alone,
        [(Ranks, "on_newest_attempt", _nothing)],
    ),
    "4: nobody is told what is on storage": (
        exactly(_only_storage_is_left),
        [(cp, "plan_restore", _memory_only), (Checkpoints, "saved_on_shared", 0)],
    ),
    "5: what is safe is told once only": (
        exactly(_away_for_a_moment),
        [(Replicas, "tell_safe", _nothing)],
    ),
    "17: hangs are not noticed": (of("hang"), [(Hangs, "on_time", _nothing)]),
    "7: the supervisor's pauses count": (
        of("stall"),
        [(silence.WatcherClock, "tick", _all_time_counts)],
    ),
    "7: a preemption is a failure of the allocation": (
        of("preempted"),
        [(ends, "cause_of_end", lambda _: cause_of_end(None))],
    ),
    "7: what Slurm's accounts say of a job that just died is not asked": (
        of("killed"),
        [(ends, "unexplained", lambda _: False)],
    ),
    "7: a preemption is no cause where the run had decided to leave": (
        of("power", "preempted", "grace", "killed"),
        [(ends, "_preempted_while_leaving", lambda _: False)],
    ),
    "76: agents cling to a late supervisor": (
        of("power", "stall", "freeze"),
        [(silence, "patience_s", _long_patience), (link, "PEEK_EVERY_S", 60.0)],
    ),
    "7: deadlines run while no supervisor is there": (
        exactly(_alone_while_nodes_come),
        [(recovery, "deadline", lambda *_: 0.0)],
    ),
    "1: who is not back yet has nothing": (
        exactly(damaged_where_it_is_restored),
        [(Checkpoints, "_all_heard", lambda *_: True)],
    ),
    "7: whom the last supervisor did not hear is not awaited by the next": (
        lost_before_a_takeover,
        [(Node, "may_return", False)],
    ),
    "18: what agents say when they are back is not compared": (
        of("stall", "supervisor", "rank", "storage hangs"),
        [(joining, "missed", lambda *_, **__: None)],
    ),
    "6: who joins after all were told to leave is never told": (
        exactly(_preempted_while_nodes_come),
        [(Departure, "on_joined", _nothing)],
    ),
    "6: who would be lost is waited for as all leave": (
        exactly(_silent_as_all_leave),
        [(Departure, "_waits_for", lambda self, _: self._watch.here)],
    ),
    "18: a restart of which only some agents were told is not begun anew": (
        of("half told"),
        [(joining, "is_half_told", lambda *_, **__: False)],
    ),
    "18: who was not told to stop is not told by the next supervisor either": (
        of("half told"),
        [(supervision, "resume", _nothing), (Supervision, "_tell_again", _nothing)],
    ),
    "B8: a supervisor that reads a long journal does not show that it lives": (
        exactly(taken_over_when_the_journal_is_long),
        [(Hold, "_keep", _silent_reader)],
    ),
    "B9: a supervisor that cannot see the epochs takes itself for the newest": (
        exactly(ends_while_another_rules),
        [(Hold, "is_superseded", _open_fence), (Departure, "_waits_for_journal", _does_not_wait)],
    ),
    "S1: epochs are only found in the directory's list": (
        exactly(stalled_while_views_are_old),
        [(RunDisk, "newest_epoch", _listed_only), (RunDisk, "find", _place_listed_only)],
    ),
    "W1: the lead seals before all have written their shares": (
        of(),
        [(Writes, "_passed", _seal_with_the_lead)],
    ),
    "8: agents keep the writes of an earlier supervisor": (
        exactly(_taken_over_while_a_checkpoint_is_written),
        [(NodeWrites, "on_connected", _nothing)],
    ),
    "9: what was given up stays in mind": (of(), [(Replicas, "give_up_older", _no_books)]),
    "1: the last write is given up although it makes progress": (
        _no_spare_and_slow_writes(400.0, Fault(500.0, "snap", node=0)),
        [(Writes, "on_progress", _nothing)],
    ),
    "8: a run that leaves its nodes hears nothing of Slurm": (
        _no_spare_and_slow_writes(90.0, Fault(20.0, "timeout")),
        [(Departure, "on_sigterm", _nothing), (Departure, "on_explained", _nothing)],
    ),
    "8: a signal that Slurm does not explain ends the job": (
        exactly(_signalled_while_slurm_is_silent),
        [(Departure, "unexplained", False)],
    ),
    "11: attempts without a new step have no bound": (
        exactly(never_beyond_a_step),
        [(loops, "endless", lambda _: "")],
    ),
    "6: patience with hangs only grows": (
        exactly(never_beyond_a_step),
        [(machine, "_HANDLERS", {**_handlers, ev.RanksHung: _ever_more_patient})],
    ),
    "7: ranks that are slow by design cost their node its place": (
        exactly(uneven_by_design),
        [(Windows, "_by_design", lambda *_: False)],
    ),
    "12: images that fail together end replication": (
        still_for_a_moment,
        [(cp.Reachability, "failed", _each_failure_counts)],
    ),
    "19: no replica is ever ordered": (of(), [(Replicas, "under_way", False)]),
    "19: a rollback that no supervisor was asked for is only noted": (
        exactly(rolled_back_at_a_takeover),
        [(restoring.RestoreChoice, "missed_rollback", lambda *_: None)],
    ),
    "13: tasks that are done begin again with the others": (
        of_tasks("power", "restart"),
        [(tasks, "ended", lambda _: ())],
    ),
    "13: agents do not tell the next supervisor how tasks ended": (
        _exactly_of_tasks(_taken_over_while_storage_hangs),
        [(joining, "ended_before", _nothing)],
    ),
    "13: agents leave before the journal is written": (
        _exactly_of_tasks(_taken_over_while_storage_hangs),
        [(Departure, "on_time", _unwritten_and_unasked)],
    ),
    "7: tasks that were stopped have ended with those that failed beside them": (
        of_tasks("half told"),
        [(tasks, "ended_alone", _failed_beside_them)],
    ),
    "14: a run of tasks ends with the code of the first that failed": (
        of_tasks("rank", "snap"),
        [(recovery, "tasks_ended", _first_code)],
    ),
    "8: tasks that have ended go on once their node is dismissed": (
        of_tasks("freeze", "cut", "isolate"),
        [(machine, "_HANDLERS", {**_handlers, ev.WorkersStopped: _dismissed_has_not_ended})],
    ),
    "8: ranks that leave as Slurm ends the job have finished their training": (
        lambda seed: replace(exactly(_preempted)(seed), at_term=caught.LEAVES, copy_s=20.0),
        [(Ranks, "on_sigterm", lambda _: None)],
    ),
    "15: a rank that loses those that left ends those that save": (
        of("caught"),
        [(leaving, "may_explain", lambda *_: False)],
    ),
    "6: a signal that ranks caught once explains every silence": (
        of("caught"),
        [(RunState, "may_leave", _ever)],
    ),
    "16: a rank that was killed is taken for a host that died": (
        of("rank"),
        [(attribution, "_own_class", lambda *_: "host_died")],
    ),
    "16: the ranks for which others wait are not looked for": (
        of("hang"),
        [(attribution, "_absent", lambda _: {})],
    ),
    "22: a node whose GPU is lost keeps its ranks": (of("gpu lost"), [(blame, "stays", lambda *_: [])]),
    "23: what tests find is taken for chance": (of("fails tests"), [(node_tests, "_if_few", lambda *_: {})]),
    "24: a budget is never spent": (of("raises"), [(ladder, "spent", lambda *_, **__: "")]),
    "25: a run that fails always ends with 1": (of("raises"), [(ladder, "job_exit_code", lambda _: 1)]),
    "20: what is in memory is hardly ever written to storage": (
        of("snap"),
        [(Writes, "due_at", lambda *_: math.inf)],
    ),
    "21: what GPUs used until a supervisor took over counts again": (
        of("supervisor", "stall"),
        [(EnergyUsed, "take", _all_that_it_shows)],
    ),
    "10: a rollback is forgotten": (
        of("rollback", "rank", "supervisor"),
        [(Checkpoints, "go_back", _nothing), (restoring.RestoreChoice, "is_void", lambda *_: False)],
    ),
    "55: all that was heard is acknowledged, whoever knows of it": (
        exactly(_dies_before_it_has_written),
        [(Known, "on_time", _all_is_known)],
    ),
    "56: requests are accepted before they are written": (
        exactly(_dies_after_a_request),
        [(Known, "on_time", _all_is_known)],
    ),
    **PLANTED_AHEAD,
    **PLANTED_INCIDENTS,
    **PLANTED_POOL,
    **PLANTED_REFILL,
    **PLANTED_SIZE,
    **PLANTED_SPARING,
    **PLANTED_TOLD,
}


def plan_for(name: str, seed: int) -> Plan:
    """One that may show the bug."""
    return PLANTED[name][0](seed)
