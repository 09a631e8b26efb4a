"""Everything that a supervisor decides, as one machine: what agents, users, Slurm and the clock report goes
in; effects come out, in order.

Inside, the machines of the other packages return `Record`: the event is journalled, and `core.run.machine`
decides what follows from it, before anything else happens.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs, to_builtins
from msgspec.structs import asdict

from jurymast.core.checkpoints.agreement import Agreement
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.checkpoints.commit import Rollback
from jurymast.core.judges.repeats import Repeats
from jurymast.core.judges.stragglers import Stragglers
from jurymast.core.nodes.acknowledgement import UNASKED, Disk
from jurymast.core.nodes.hangs import Hangs
from jurymast.core.nodes.health import NodeHealth, SickNodes
from jurymast.core.nodes.preflight import Preflight
from jurymast.core.nodes.watch import WATCH_INTERVAL_S, Watch
from jurymast.core.run.machine import resume, step
from jurymast.core.run.recording import Teller
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.effects import (
    Dismiss,
    Effect,
    Fence,
    Finish,
    GiveWay,
    Instruction,
    Journal,
    Launch,
    LookAtStorage,
    Record,
    Requeue,
    SaveFirst,
    Send,
    StopWorkers,
    TestNodes,
    WhyEnding,
)
from jurymast.core.state.images import SHARED, StateId
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.run import Phase, RunState
from jurymast.core.supervision import joining, renewal
from jurymast.core.supervision.ahead import Reservation
from jurymast.core.supervision.departure import Departure
from jurymast.core.supervision.foreseen_ends import LAST, WARNING, ForeseenEnds
from jurymast.core.supervision.growing import Growing
from jurymast.core.supervision.launching import Launching
from jurymast.core.supervision.pooling import Pooling
from jurymast.core.supervision.refilling import Refilling, SmallJob
from jurymast.core.supervision.withdrawals import Withdrawals
from jurymast.errors import never

REPORTS_KEPT = 1000  # repeated reports of what all ranks did: as many as an agent may keep
# While a run has no trouble, each tick only looks for silence; the rest is done once in this many ticks.
STEADY_LOOKS = 3
REQUESTS = {"cancel", "restart", "drain", "rollback", "save", ev.STEP_ENDED, *renewal.REQUESTS}
LOCAL_JOB = "local-"  # how the allocation of a run without Slurm begins
ON_STORAGE = "a user while no supervisor was reachable"
STILL_RUNNING = "running"  # Slurm's answer when a job does not end at all
# Why Slurm ends a job. Of any other answer it is not known whether the job ends.
ENDINGS = frozenset({
    "cancelled", "timeout", "preempted", "requeued", "special_exit", "boot_fail", "deadline", "failed",
    "launch_failed", "node_fail", "out_of_memory", "revoked", "completed",
})  # fmt: skip
ASK_AGAIN_S = 2.0
# The requester of a restart after a take-over, and the reason.
HALF_TOLD = "the new supervisor, because not all nodes received the launch"

Heard = (
    msg.Beat | msg.Ready | msg.Started | msg.Failed | msg.Stacks | msg.Stopped | msg.Finished | msg.RankEvent
    | msg.HealthFound | msg.Looked | msg.VerdictLeft | msg.Terminated | msg.HangsUp | msg.Leaving
    | msg.TestedAlone | msg.TestedPair | msg.AboutCheckpoints
)  # fmt: skip


class Supervision:
    """The caller ticks it every `interval_s`. While it `has_work`, the caller calls `work` again and again,
    with other work in between. `now` is the supervisor's clock: Unix time in seconds that never goes back.
    `directory` is the run directory's name, for people."""

    def __init__(self, state: RunState, directory: str, now: float) -> None:
        self.state = state
        self.watch = Watch(state, now)
        self.agreement = Agreement(state)
        self.checkpoints = Checkpoints(state, self.agreement.next_save)
        self.launching = Launching(state, self.watch, self.checkpoints, directory)
        self.departure = Departure(state, self.watch, self.checkpoints)
        self.foreseen = ForeseenEnds(state, self.agreement, self.checkpoints)
        self._directory = directory
        self._teller = Teller(state, self.watch.reports)
        self._hangs = Hangs(state, self.watch.reports)
        self._of_all: deque[msg.RankEvent] = deque(maxlen=REPORTS_KEPT)
        self._health = NodeHealth()
        self._preflight = Preflight(state)
        self._stragglers = Stragglers(state)
        self._sick = SickNodes(state)
        self._refilling = Refilling(state)
        self._pooling = Pooling(state)
        self._withdrawals = Withdrawals(state, self._sick)
        self._growing = Growing(state)
        self._repeats = Repeats()
        self._after_saves: dict[str, ev.Event] = {}  # what follows them, by what they are requested for
        self._ticks = itertools.count()
        self._asking = False  # Slurm, why the job ends, after a signal
        self._ask_at = math.inf  # once more
        self._signalled: set[str] = set()  # nodes whose agents got a SIGTERM that is not explained yet
        self._told_by_another = 0  # the attempt whose nodes an earlier supervisor told to launch

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        self.state.check()
        for part in (
            self.watch, self.checkpoints, self.launching, self.departure, self._preflight, self._sick,
            self._refilling,
        ):  # fmt: skip
            part.check()

    # ---- what follows from what

    def record(self, event: ev.Event, *, flush: bool = False) -> list[Effect]:
        """Journal this event, and carry out what `core.run.machine` decides."""
        if (told := self._repeats.as_told(event) if isinstance(event, ev.Noted) else event) is None:
            return []
        event = told
        out = self._ahead_of(event)
        before = (self.state.phase, self.state.deadline)
        decided = step(self.state, event)
        if isinstance(event, ev.Tick) and not decided and before == (self.state.phase, self.state.deadline):
            return out
        flush = flush or any(isinstance(one, Launch | Requeue | Finish) for one in decided)
        journal = Journal(event, tuple(decided), flush)
        self.agreement.on_event(event)
        done = [effect for instruction in decided for effect in self._carry_out(instruction, event.t)]
        # Written at the same time as the journal: an attempt that no journal knows of is found by its fence.
        fences = [effect for effect in done if isinstance(effect, Fence)]
        return [*out, *fences, journal, *(effect for effect in done if not isinstance(effect, Fence))]

    def _ahead_of(self, event: ev.Event) -> list[Effect]:
        """What to record before the first event that ends an attempt, and before the last one: how far its
        ranks came. To examine all ranks for each node's event would take too long with many nodes."""
        out: list[Effect] = []
        ends = isinstance(event, ev.NodeLost | ev.WorkerFailed | ev.WorkersStopped) and (
            self.state.phase is Phase.RUNNING or self._is_last(self.state.stopped)
        )
        if (
            ends
            or isinstance(event, ev.RanksHung)
            or (isinstance(event, ev.NodeFinished) and self._is_last(self.state.finished))
        ):
            out = self._tell_progress(event.t, forced=True)
        # A node may say it twice: of its own, and as an answer.
        news = isinstance(event, ev.WorkersStopped) and event.node not in self.state.stopped
        if news and self._is_last(self.state.stopped):
            out += self._tell_ended(event.t)
        if isinstance(event, ev.NodeLost):
            out += self._do(self.checkpoints.on_node_lost(event.node, event.t), event.t)
        return out

    def _tell_ended(self, now: float) -> list[Effect]:
        """Record which ranks ended before the incident, which explains what the others met."""
        state = self.state
        if state.incident is None or state.phase is not Phase.STOPPING or state.alone:
            return []
        failed = {rank for _, rank, _ in state.findings.failures}
        found = self.watch.reports.ended(state.incident.detected_at)
        # The second were heard of, or an earlier supervisor knew of them.
        ended = tuple(sorted({*found} - failed or {*state.findings.ended, *state.done} - failed))
        unknown = tuple(rank for rank in ended if not found.get(rank, True))
        told = ev.RanksEnded(t=now, attempt=state.attempt, ranks=ended, unknown=unknown)
        return self.record(told) if ended else []

    def _is_last(self, said: set[str]) -> bool:
        """Whether the report of one more node completes those of all."""
        return len(said) + 1 >= len(self.state.placement) - len(self.state.findings.lost)

    def _tell_progress(self, now: float, *, forced: bool = False) -> list[Effect]:
        told = self._teller.on_time(now, forced=forced)
        return [effect for event in told for effect in self.record(event)]

    def _do(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        """Carry out effects for the machines here, and return the others."""
        out: list[Effect] = []
        for effect in effects:
            match effect:
                case Record(event=ev.Saved() as save):
                    out += self._saved(save, now)
                case Record():
                    out += self.record(effect.event, flush=effect.flush)
                case SaveFirst():
                    is_new = effect.why not in self._after_saves
                    self._after_saves[effect.why] = effect.then
                    limit_s = self.foreseen.save_limit_s
                    if is_new and not self.agreement.save_to_move(effect.why, limit_s, now):
                        out += self._saved_first(effect.why, False, now)
                case _:
                    out.append(effect)
        return out

    def _saved(self, save: ev.Saved, now: float) -> list[Effect]:
        """Journal saves; regular ones from time to time, together."""
        if self._teller.on_saved(save, now):
            return self.record(save) + self._after_saves_done(now)
        self.agreement.on_event(save)
        return self._after_saves_done(now)

    def _after_saves_done(self, now: float) -> list[Effect]:
        """What waited for saves that are done, or were not possible in time. Ranks may stand still for it."""
        over = self.agreement.saved_first(now)
        return [effect for by, in_time in over for effect in self._saved_first(by, in_time, now)]

    def _saved_first(self, why: str, in_time: bool, now: float) -> list[Effect]:
        """The requested save is complete, or was not possible in time."""
        if why in LAST:
            return self._do(self.foreseen.hasten(now), now)
        event, out = self._after_saves.pop(why), list[Effect]()
        if isinstance(event, ev.Asked) and event.what == ev.GROW and not in_time:
            return out  # steps would be lost; it is tried again
        if isinstance(event, ev.Asked) and not in_time and self.state.phase is Phase.RUNNING:
            out = self.note("", f"the save requested by {why}, did not finish in time", now)
        return out + self.record(structs.replace(event, t=now))

    def _carry_out(self, instruction: Instruction, now: float) -> list[Effect]:
        match instruction:
            case Launch():
                return self._do(self.launching.begin(instruction, now), now)
            case StopWorkers():
                self.watch.reports.attempt_over()
                stop = msg.Stop(
                    attempt=instruction.attempt, stacks=instruction.stacks, grace_s=instruction.grace_s
                )  # fmt: skip
                return [Send(node, stop) for node in instruction.nodes]
            case Dismiss():
                out = self._do(self._sick.on_node_dismissed(instruction.node, now), now)
                return [Send(instruction.node, msg.Dismiss()), *out]
            case TestNodes():
                return self._do(self._preflight.begin(instruction, now), now)
            case Requeue() | Finish():
                return self._do(self.departure.on_run_decision(now), now)
            case _:  # an alert, say: the journal has it
                return []

    # ---- the clock

    def start(self, now: float) -> list[Effect]:
        """Start. After a take-over, repeat what may not have arrived."""
        self.watch.take_over(now)
        out = [effect for one in resume(self.state) for effect in self._carry_out(one, now)]
        if self.state.phase is Phase.LAUNCHING:
            self._told_by_another = self.state.attempt
        if self.state.ended:  # the last supervisor died between the decision and its outcome
            out += self._do(self.departure.on_run_decision(now), now)
        if not self.state.allocation.startswith(LOCAL_JOB):  # it may have been said to the last supervisor
            out.append(WhyEnding())
        return out

    def on_attempt_read(self, newest: int | None, why: str, now: float) -> list[Effect]:
        """The run directory names `newest` as its newest attempt; None if that cannot be known (`why`): then
        one that is missing in the journal may have been started, but only one, as each launch is journaled
        before the next. A number that is damaged or older than the journal's is written anew: ranks that are
        cut off take it for the newest."""
        known = self.state.attempt
        if newest is None:
            out = self.note("", f"{why}; attempt {known + 1} counts as started, and is not used", now)
            return [*out, *self.record(ev.AttemptFound(t=now, node="", attempt=known + 1)), Fence(known + 1)]
        if newest > known:
            return self.record(ev.AttemptFound(t=now, node="", attempt=newest))
        return [Fence(known)] if newest < known else []

    @property
    def steady(self) -> bool:
        return self.state.phase is Phase.RUNNING and self.state.incident is None

    @property
    def interval_s(self) -> float:
        """Seconds until the next tick."""
        return self.watch.interval_s if self.steady else min(WATCH_INTERVAL_S, self.watch.interval_s)

    def on_time(self, now: float, disk: Disk = UNASKED) -> list[Effect]:
        """Do what is due."""
        out = self._do(self.watch.on_disk(disk, now), now)
        ran = self.state.phase is Phase.RUNNING
        out += self._do(self.watch.on_time(now), now)
        if ran and self.state.phase is Phase.STOPPING:
            return out  # thousands are to be told: all else waits for the next tick
        if self.departure.begun:  # others may have what they do not write any more
            out += self._do(self.checkpoints.without(self.watch.silent(now), now), now)
        out += self._do(self.departure.on_time(now, unwritten=disk.unwritten), now)
        if now >= self._ask_at:
            out += self._ask()
        if self.departure.spared(now):
            text = (
                "Slurm has neither ended the job after a SIGTERM nor said why it would: the training goes on"
            )
            out += [*self.note("", text, now), *self._revoke(now)]
        ends = self.departure.ordered or self.state.ended or self.state.phase is Phase.REQUEUED
        if self.departure.unexplained and self.state.phase is Phase.RUNNING:
            out += self._do(self.checkpoints.on_time(now), now)  # the ranks may go on, and save till then
        if ends or self.watch.cut_off:
            return out
        out += self._do([*self._preflight.on_time(now), *self.launching.on_time(now)], now)
        out += self._do(self._refilling.on_time(now), now)
        if next(self._ticks) % STEADY_LOOKS and self.steady:
            return out
        out += self._tell_progress(now)
        out += self._look_ahead(now)
        out += self._do(self._pooling.on_time(now), now)
        out += self._do(self.checkpoints.on_time(now), now)
        out += self._do(self.agreement.on_time(now, copying=self.checkpoints.writes.any_under_way), now)
        out += self._after_saves_done(now)
        out += self._do(self._hangs.on_time(now), now)
        out += self._do([*self._sick.on_time(now), *self._growing.on_time(now)], now)
        out += self._move_off(now)
        return out + self.record(ev.Tick(t=now))

    def _move_off(self, now: float) -> list[Effect]:
        """See to nodes that are to leave although nothing failed."""
        by_slurm = not self.state.allocation.startswith(LOCAL_JOB)
        out = self._do(self._withdrawals.on_time(now), now) if by_slurm else []
        return out + [effect for ask in self._withdrawals.moves(now) for effect in self._obey(ask, now)]

    @property
    def has_work(self) -> bool:
        """Whether work for thousands of nodes is left, which is done in parts."""
        return self.checkpoints.replicas.under_way

    def work(self, now: float) -> list[Effect]:
        return self._do(self.checkpoints.replicas.slice(now), now)

    def on_work_done(self, seconds: float, now: float) -> None:
        """The last `work` took this long, in seconds."""
        self.checkpoints.replicas.took(seconds, now)

    # ---- agents

    def on_agent_joined(self, node: str, connection: int, hello: msg.Hello, now: float) -> list[Effect]:
        """A node joined over the connection of this number, counted from 1."""
        self.watch.on_agent_joined(node, connection)
        out = self._do(self.checkpoints.on_agent_joined(node, hello, now), now)
        if hello.refill:
            out += self._do(self._refilling.on_agent_joins(hello.refill, node, now), now)
        joined = ev.NodeJoined(
            t=now, node=node, address=hello.address, incarnation=hello.incarnation, pid=hello.pid,
            boot_id=hello.boot_id, gpus=hello.gpus, oom_kills=hello.oom_kills,
        )  # fmt: skip
        out += self.record(joined)
        out += self._do(self._health.on_agent_joined(node, hello.health, hello.clock, now), now)
        out += self._if_unknown(node, hello.attempt, now)
        ours = hello.attempt == self.state.attempt and node in self.state.places
        for event in joining.ended_before(self.state, node, hello, now):
            out += self.record(event)
        if joining.is_half_told(self.state, node, hello, self._told_by_another, ours=ours):
            out += self.record(ev.Asked(t=now, what=ev.RELAUNCH, by=HALF_TOLD))
        if (missed := joining.missed(self.state, node, hello, now, ours=ours)) is not None:
            out += self.record(missed)
        elif hello.ranks in ("running", "starting") and not ours:
            out.append(Send(node, msg.Dismiss()))
        if node in self.state.places:
            out += self._tell_again(node, hello.attempt)
        self.departure.on_joined(node)
        return out + self._do(self.launching.look(now), now)

    def _if_unknown(self, node: str, attempt: int, now: float) -> list[Effect]:
        """Take in an attempt that the journal lacks, as storage did not answer, and that this node knows."""
        if attempt <= self.state.attempt:
            return []
        return self.record(ev.AttemptFound(t=now, node=node, attempt=attempt))

    def _tell_again(self, node: str, attempt: int) -> list[Effect]:
        """Orders that the agent, whose newest attempt is this one, may have missed."""
        stops = self.state.phase is Phase.STOPPING and node not in self.state.stopped
        stop: list[Effect] = [Send(node, msg.Stop(attempt=self.state.attempt))] if stops else []
        return stop + self.launching.tell_again(node, attempt)

    def on_connection_closed(
        self, node: str, connection: int, now: float, *, reset: bool = False
    ) -> list[Effect]:
        """The connection of this number broke. `reset`: it was not closed in order."""
        return self._do(self.watch.on_connection_closed(node, connection, now, reset=reset), now)

    def on_message(self, node: str, connection: int, message: Heard, now: float) -> list[Effect]:
        if isinstance(message, msg.Beat):  # nearly all that thousands of nodes say: first, and by itself
            return self._beat(node, message, now)
        if isinstance(message, msg.Kept):
            self.watch.on_message(node, connection, now)
        match message:
            case msg.Ready():
                return self.record(ev.NodeReady(t=now, node=node, store_port=message.store_port))
            case msg.Started():
                return self.record(ev.WorkersStarted(t=now, node=node, **asdict(message)))
            case msg.Failed():
                effects = self.record(ev.WorkerFailed(t=now, node=node, **asdict(message)))
                return effects + self._do(self._hangs.seen(now), now)
            case msg.Stacks():
                fields = asdict(message) | {"flights": tuple(to_builtins(message.flights))}
                return self.record(ev.StacksTaken(t=now, node=node, **fields))
            case msg.Stopped():
                stopped = ev.WorkersStopped(t=now, node=node, **asdict(message))
                return self._if_unknown(node, message.attempt, now) + self.record(stopped)
            case msg.Finished() if message.ranks:
                done = joining.tasks_done(self.state, message.attempt, message.ranks, now)
                return [effect for event in done for effect in self.record(event)]
            case msg.Finished():
                return self.record(ev.NodeFinished(t=now, node=node, attempt=message.attempt))
            case msg.RankEvent():
                return self._of_rank(node, message, now)
            case msg.HealthFound():
                effects = self._health.on_finding(node, message.finding, message.clock, now)
            case msg.Looked():
                self._hangs.on_looked(message)
                effects = []
            case msg.VerdictLeft():
                effects = self._sick.on_verdict_left(node, message, now)
            case msg.Terminated():
                effects = self._agent_terminated(node, connection)
            case msg.HangsUp():
                effects = self.watch.on_hangs_up(node, connection) + self._hand_over(message.newer)
            case msg.Leaving():
                effects = self.watch.on_agent_leaving(node, connection, message, now)
            case msg.TestedAlone() | msg.TestedPair():
                effects = self._preflight.on_test_result(node, message, now)
            case _:
                effects = self.checkpoints.on_message(node, message, now)
        return self._do(effects, now)

    def _beat(self, node: str, beat: msg.Beat, now: float) -> list[Effect]:
        effects = self.watch.on_heartbeat(node, beat, now)
        effects += self._stragglers.beat(node, beat, now)
        effects += self.agreement.on_heartbeat(node, beat, now)
        if beat.joules is not None:
            self._teller.on_energy(node, beat.joules)
        if self.state.may_leave(now) and not self.state.alone:
            effects += self._ranks_left(node, beat, now)
        return self._do(effects, now) if effects else effects

    def _ranks_left(self, node: str, beat: msg.Beat, now: float) -> list[Effect]:
        """Record at once which ranks have left after a signal, as others lose them."""
        first = self.state.places.get(node, 0) * len(beat.ranks)
        done = {first + local for local, rank in enumerate(beat.ranks) if rank.phase == within.DONE}
        done.difference_update(self.state.done)
        if not done or beat.attempt != self.state.attempt or node not in self.state.places:
            return []
        return [Record(ev.RanksEnded(t=now, attempt=beat.attempt, ranks=tuple(sorted(done))))]

    def _of_rank(self, node: str, message: msg.RankEvent, now: float) -> list[Effect]:
        said, attempt, fields = message.event, message.attempt, asdict(message.event)
        rank = self.state.places.get(node, 0) * self.state.ranks_per_node + fields.pop("local_rank")
        match said:
            case within.Saved() | within.Restored() if message in self._of_all:  # said over two connections
                return []
            case within.Saved():
                self._of_all.append(message)
                if said.ok and said.tier == SHARED:
                    self.checkpoints.on_saved_together(StateId(said.step, attempt), said.size_bytes)
                return self._saved(ev.Saved(t=now, attempt=attempt, **fields), now)
            case within.Restored():
                self._of_all.append(message)
                self.checkpoints.on_restored(attempt, said.step, said.tier)
                return self.record(ev.Restored(t=now, attempt=attempt, **fields))
            case within.BeganAt():
                return self.record(ev.BeganAt(t=now, attempt=attempt, **fields))
            case within.GroupMade():
                made = ev.GroupMade(t=now, attempt=attempt, node=node, rank=rank)
                return self.record(made) if self.state.alone else []
            case within.Warned():
                again = attempt != self.state.attempt or self.state.warned_at > now - 1.0
                return [] if again else self.record(ev.Signalled(t=now, signal=ev.CAUGHT))
            case within.TimeOutSet():
                set_to = ev.TimeOutSet(t=now, attempt=attempt, rank=rank, **fields)
                return self.record(set_to) if said.seconds > self.state.time_out_s else []
            case within.LossNotFinite():
                loss = ev.LossNotFinite(t=now, attempt=attempt, rank=rank, **fields)
                return [] if self.state.loss else self.record(loss)
            case within.BatchDiffers():
                return self.record(ev.BatchDiffers(t=now, attempt=attempt, **fields))
            case within.RestoreWaits():
                return self.record(ev.RestoreWaits(t=now, attempt=attempt, node=node, rank=rank, **fields))
            case within.Unrestored():
                failed = ev.RestoreFailed(t=now, attempt=attempt, node=node, rank=rank, **fields)
                return self.record(failed)
            case within.SavesTo():
                if said.directory == self.state.checkpoints or attempt != self.state.attempt:
                    return []
                return [*self.record(ev.SavesTo(t=now, attempt=attempt, **fields)), LookAtStorage()]
            case within.ColdStart():
                cold = ev.ColdStart(t=now, attempt=attempt, node=node, rank=rank, **fields)
                return [] if self.state.cold else self.record(cold)
            case within.Skipped():
                return self._do(
                    self.checkpoints.on_save_skipped(attempt, said.step, rank, said.why, now), now
                )
            case _:
                return never(said)

    def _hand_over(self, newer: Endpoint | None) -> list[Effect]:
        """Give way to the supervisor that has taken over, if this one does not know of it because its storage
        hangs. Other agents may not see the newer one for the same reason, and two supervisors get no complete
        checkpoint."""
        if newer is None or newer.epoch <= self.state.epoch:
            return []
        return [*(Send(node, msg.Moved(place=newer)) for node in sorted(self.watch.here)), GiveWay()]

    # ---- others' answers

    def on_fenced(self, attempt: int, why: str, now: float) -> list[Effect]:
        return self._do(self.launching.on_fenced(attempt, why, now), now)

    def on_node_given_back(self, node: str, gone: bool, why: str, now: float) -> list[Effect]:
        return self._do(self._sick.on_node_given_back(node, gone, why, now), now)

    def on_node_asked(self, number: int, told: SmallJob | None, why: str, now: float) -> list[Effect]:
        if told is not None and told.node:
            self._pooling.on_claimed()
        return self._do(self._refilling.on_node_asked(number, told, why, now), now)

    def on_pool_topped_up(self, jobs: Sequence[str], why: str, now: float) -> list[Effect]:
        return self._do(self._pooling.on_topped_up(jobs, why, now), now)

    def on_small_jobs(self, jobs: Sequence[SmallJob] | None, now: float) -> list[Effect]:
        return self._do(self._refilling.on_small_jobs(jobs, now), now)

    def on_nodes_seen(self, draining: Mapping[str, str] | None, now: float) -> list[Effect]:
        return self._do(self._withdrawals.on_nodes_seen(draining, now), now)

    def on_reservations_seen(self, found: Sequence[Reservation] | None, now: float) -> list[Effect]:
        return self._do(self.foreseen.ahead.on_reservations_seen(found, now), now)

    def on_superseded(self, by_another: bool, now: float, disk: Disk = UNASKED) -> list[Effect]:
        return self._do(self.departure.on_superseded(by_another, now, unwritten=disk.unwritten), now)

    def on_storage_read(
        self, shared: Mapping[StateId, int], rollbacks: Iterable[Rollback], now: float
    ) -> list[Effect]:
        """Take in what earlier supervisors, attempts and runs left on storage: states and their sizes in
        bytes."""
        out = self._do(self.checkpoints.on_storage_read(shared, rollbacks, now), now)
        step = self.checkpoints.restore.missed_rollback()
        if step is None or self.state.phase not in (Phase.LAUNCHING, Phase.RUNNING):
            return out
        # It was written while no supervisor answered. What the ranks save in this attempt is void, so
        # continuing would be worse than going back.
        return out + self._obey(msg.Ask(what="rollback", by=ON_STORAGE, step=step), now)

    def note(self, node: str, text: str, now: float) -> list[Effect]:
        return self.record(ev.Noted(t=now, node=node, message=text))

    # ---- people and Slurm

    def on_request(self, ask: msg.Ask, now: float) -> tuple[msg.Accepted | msg.Declined, list[Effect]]:
        """Return the answer to a request, and its effects."""
        if why := self._refusal(ask):
            return msg.Declined(why=why), []
        accepted = msg.Accepted()
        if ask.what == "cancel" and self.state.ended:
            self.departure.give_up(ask.by, now)
            accepted = msg.Accepted(gives_up=self.checkpoints.unsaved())
        return accepted, self._obey(ask, now)

    def _refusal(self, ask: msg.Ask) -> str:
        what, nodes = ask.what, self.state.nodes
        if what not in REQUESTS:
            return f"unknown request {what!r}"
        if what == "drain" and ask.node not in nodes:
            return f"no node {ask.node!r} in this run; it has {', '.join(nodes)}"
        if what == "rollback" and ask.step is None:
            return "a rollback needs the step to go back to"
        if what == "save" and self.state.phase is not Phase.RUNNING:
            return f"the run is {self.state.public_state} and does no steps now"
        if what == "save" and not self.agreement.ask(ask.by):
            return "its ranks have no Checkpointer, or have not finished a step with it yet"
        return self.foreseen.renewal.refusal() if what in renewal.REQUESTS else self.departure.refusal(what)

    def _obey(self, ask: msg.Ask, now: float) -> list[Effect]:
        if ask.what in renewal.REQUESTS:
            return self.record(self.foreseen.renewal.requested(ask.what, ask.by, now))
        if ask.what == "drain" and ask.node in self.state.places:
            return self._do(self._withdrawals.save_first(ask, now), now)
        event = ev.Asked(t=now, what=ask.what, by=ask.by, node=ask.node)
        back = []
        if ask.what == "rollback" and ask.step is not None:
            back = self._do(self.checkpoints.go_back(ask.step, now), now)
        return back + self.record(event)

    def on_warning(self, now: float) -> list[Effect]:
        """Slurm warned (SIGUSR2) that a time limit or a preemption is near: what is done is saved, and
        written to storage at once."""
        self.foreseen.limit.warned(now)
        warned = self.record(ev.Signalled(t=now, signal="SIGUSR2"))
        return warned + self._do(self.foreseen.save(WARNING, now), now)

    def on_time_limit(self, ends_in_s: float | None, now: float) -> list[Effect]:
        """Slurm ends the job in so many seconds; infinity: never; None: it did not say."""
        self.foreseen.limit.answered(ends_in_s, now)
        return []

    def _look_ahead(self, now: float) -> list[Effect]:
        """See to the job's time limit, and to reservations that are about to begin."""
        if self.state.allocation.startswith(LOCAL_JOB):
            return []
        out = self._do(self.foreseen.ask(now), now)
        if (order := self.foreseen.anew(now)) is not None:
            return out + self._begin_anew(order, now)
        return out + self._do(self.foreseen.last_saves(now), now)

    def _begin_anew(self, order: ev.Asked, now: float) -> list[Effect]:
        """Requeue the job after a save, if the ranks are quick to agree on one."""
        by = f"{order.by}, before the job is requeued"
        if by in self._after_saves:
            return []
        if not self.agreement.save_to_move(by, self.foreseen.anew_within_s(order), now):
            return self.record(order)
        self._after_saves[by] = order
        return self.record(ev.Asked(t=now, what="save", by=by))

    def on_sigterm(self, now: float) -> list[Effect]:
        """Slurm ends the job, or hurries that, or somebody else has sent the SIGTERM. Slurm is asked, as the
        run's final state depends on it, and meanwhile the newest checkpoint is written. Nobody can hurry a
        departure whose nodes are left already, but for what their agents need."""
        out: list[Effect] = []
        if not self.departure.ordered:
            out = self._tell_progress(now, forced=True)
            out += self.record(ev.Signalled(t=now, signal="SIGTERM"))
        self.watch.ending = True
        return [*out, *self._do(self.departure.on_sigterm(now), now), *self._ask()]

    def _ask(self) -> list[Effect]:
        self._ask_at, self._asking = math.inf, True
        return [WhyEnding()]

    def _agent_terminated(self, node: str, connection: int) -> list[Effect]:
        """An agent got a SIGTERM: the job ends, or this node is taken away, or somebody has sent it to the
        step. Slurm is asked once, not for each of thousands of nodes."""
        self._signalled.add(node)
        if self._asking or self.departure.ordered:
            return []
        self._asking = True
        return [WhyEnding(node, connection)]

    def on_end_explained(
        self, asked: WhyEnding, why: str, by: str, now: float, kill_in_s: float | None = None
    ) -> list[Effect]:
        """Take Slurm's answer. `by`: who cancelled the job, if anybody; `kill_in_s`: the seconds until Slurm
        kills it, if that is known. While there is no answer Slurm is asked again."""
        self._asking = False
        if why == STILL_RUNNING:
            return self._revoke(now)
        if why in ENDINGS:
            self.watch.ending, self._ask_at = True, math.inf
            event = ev.Asked(t=now, what="cancel", by=by) if by else ev.Signalled(t=now, signal=why)
            out = self.record(event, flush=True) if why != self.departure.why else []
            return out + self._do(self.departure.on_explained(why, kill_in_s, now), now)
        if self.departure.ordered:
            self._ask_at = now + ASK_AGAIN_S
        elif asked.node or self._signalled:
            return self.on_sigterm(now)
        return []

    def _revoke(self, now: float) -> list[Effect]:
        """The job goes on: it was a stray signal, or one for nodes that are taken away. Those are used until
        they are gone, as nobody knows which it was, and their ranks' failures count. A run that wants to
        leave by itself still does."""
        ordered, self._ask_at = self.departure.ordered, math.inf
        nodes, self._signalled = self._signalled, set()
        self.watch.may_be_taken(nodes, now)
        self.departure.on_revoked()
        self.watch.ending = self.departure.leaving
        out = self.record(ev.Signalled(t=now, signal=STILL_RUNNING)) if ordered else []
        return [*out, *(Send(node, msg.JobGoesOn()) for node in sorted(nodes & self.watch.here))]

    def condition(self, journal: str) -> msg.Condition:
        """Return what the journal does not show yet. `journal`: why it cannot be written, or ""."""
        waits = ""
        if self.departure.begun and (unsaved := self.checkpoints.unsaved()):
            known = self.state.saved.get(SHARED)
            why = f": {known.error}" if known is not None and known.error else ""
            waits = f"{unsaved} is on its way to {self._directory}/checkpoints{why}"
        return msg.Condition(
            state=self.state.public_state, waits=waits, journal=journal, step=self._teller.step,
            alerts=tuple(self.state.alerts), silent=self._hangs.silent or self._hangs.quiet(),
            restart_at=self._hangs.restart_at, late=self._hangs.late,
        )  # fmt: skip
