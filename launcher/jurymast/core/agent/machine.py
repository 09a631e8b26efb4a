"""Everything that an agent decides, as one machine. Also which of its images a node writes: which order to
write replaces which, and what has to be ready for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect
from jurymast.core.agent.link import SupervisorLink, SupervisorSilence
from jurymast.core.agent.ranks import NodeTests, Ranks
from jurymast.core.agent.succession import Succession, epoch_of
from jurymast.core.judges.silence import answer_every_s, patience_s
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.images import SHARED
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.settings import RunPlan

# ---- what the node writes


@dataclass
class NodeWrite:
    """A write until it has ended. `ordered`: the phase that it is to go on with, `reached`: whose end it has
    reached."""

    tier: str
    cancelled: bool = False
    ordered: WritePhase = WritePhase.OPEN
    reached: WritePhase = WritePhase.HOLD


class NodeWrites:
    """Decides about the node's writes, at most one to each tier. Those to shared storage go on in phases, as
    the supervisor orders. Each supervisor is told of them, and cancels those that it does not know: they
    would wait for ever, and keep their images in memory."""

    def __init__(self, ranks_per_node: int) -> None:
        self._ranks_per_node = ranks_per_node
        self._running: dict[str, NodeWrite] = {}  # by id
        self._newest: dict[str, str] = {}  # by tier, its id
        self._foreseen: dict[int, within.Foreseen] = {}  # by local rank
        self._leads = False  # rank 0 is here: this node brings shared checkpoints together
        self._warm = False

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        going = [write.tier for write in self._running.values() if not write.cancelled]
        assert len(going) == len(set(going)), "two writes to a tier"
        ahead = any(write.reached > write.ordered for write in self._running.values())
        assert not ahead, "a write went on by itself"

    def on_launch(self, order: msg.Launch) -> None:
        """Prepare for the ranks of this attempt, which are about to start."""
        self._leads = order.rank == 0
        self._foreseen.clear()

    def on_write(self, order: msg.Write) -> list[Effect]:
        """Start a write. A supervisor orders one write to a tier at a time, so an earlier order is void: its
        supervisor may be dead, and it may wait for a lost node. Orders that were lost with a connection are
        repeated."""
        if self._newest.get(order.tier) == order.id:
            return []
        self._newest[order.tier] = order.id
        void = [id for id, write in self._running.items() if write.tier == order.tier]
        effects = [effect for id in void for effect in self.on_cancel_write(id)]
        self._running[order.id] = NodeWrite(order.tier)
        return [*effects, do.Obey(order)]

    def on_continue_write(self, order: msg.ContinueWrite) -> list[Effect]:
        """Go on with a write. The order may have come before: those that may be lost are repeated."""
        write = self._going(order.id)
        if write is None or order.phase <= write.ordered:
            return []
        write.ordered = order.phase
        return [do.Obey(order)]

    def on_write_reached(self, id: str, phase: WritePhase) -> list[Effect]:
        """A write has reached the end of a phase, and waits. All nodes hold their images at once, and nobody
        waits for that."""
        write = self._going(id)
        if write is None or phase is WritePhase.HOLD:
            return []
        write.reached = phase
        return [do.Send(msg.WriteReached(id=id, phase=phase))]

    def on_connected(self) -> list[Effect]:
        """Tell a supervisor, which may be another one, how far the writes are."""
        return [do.Send(msg.WriteReached(id=id, phase=phase)) for id, phase in self.phased().items()]

    def phased(self) -> dict[str, WritePhase]:
        """Return the writes that go on in phases, by id, and the phase whose end each has reached."""
        going = {id: one for id, one in self._running.items() if one.tier == SHARED and not one.cancelled}
        return {id: write.reached for id, write in going.items()}

    def on_cancel_write(self, id: str) -> list[Effect]:
        write = self._going(id)
        if write is None:
            return []
        write.cancelled = True
        return [do.Obey(msg.CancelWrite(id=id))]

    def _going(self, id: str) -> NodeWrite | None:
        write = self._running.get(id)
        return None if write is None or write.cancelled else write

    def on_write_ended(self, id: str) -> None:
        self._running.pop(id, None)

    def on_rank_event(self, event: within.CheckpointsKept | within.Foreseen) -> list[Effect]:
        if isinstance(event, within.CheckpointsKept):
            warm, self._warm = self._leads and not self._warm, self._leads or self._warm
            return [do.WarmWriter()] if warm else []
        self._foreseen[event.local_rank] = event
        if len(self._foreseen) < self._ranks_per_node:
            return []
        known = self._foreseen.values()
        return [do.SayForeseen(sum(one.image_bytes for one in known), sum(one.own_bytes for one in known))]


# ---- the agent

# Probes wait for the torchrun host. If that does not get warm, the probes may find the reason.
PROBE_ANYWAY_S = 60.0


class AgentMachine:
    """Decides everything for an agent. The caller reports events, one method each, and carries out the
    returned effects in order. `now` is monotonic, in seconds. After a Leave no event has effects."""

    def __init__(
        self,
        plan: RunPlan,
        node: str,
        allocation: str,
        nodes: Sequence[str],
        hint: tuple[str, int] | None,
        share: float,
        *,
        gpus: int = 0,
        driver: bool = False,
    ) -> None:
        """`nodes`: the allocation's, in its order. `hint`, `share`: see SupervisorLink; `gpus`, `driver`: see
        NodeTests."""
        patience = patience_s(plan.settings.heartbeat_s, plan.nodes)
        silence = SupervisorSilence(answer_every_s(plan.settings.heartbeat_s, plan.nodes))
        self.ranks = Ranks(plan.settings.stop_grace_s, tasks=plan.guessed)
        self.link = SupervisorLink(node, allocation, hint, patience, plan.nodes, share, self.ranks, silence)
        self.succession = Succession(node, nodes, silence, enabled=plan.cluster == "slurm")
        self.writes = NodeWrites(plan.ranks_per_node)
        self.tests = NodeTests(plan, gpus, driver=driver)
        self.left = False
        self._wake_at = self._probe_at = NEVER
        self._was_connected = False

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        for part in (self.ranks, self.link, self.succession, self.writes, self.tests):
            part.check()

    def _out(self, effects: list[Effect], now: float) -> list[Effect]:
        """Return the effects of an event, with what the other parts add, and when to wake next."""
        if self.left:
            return []
        effects = [one for effect in effects for one in self._with_others(effect, now)]
        if self.link.connected != self._was_connected:
            self._was_connected = self.link.connected
            news = (
                self.succession.on_supervisor_answered
                if self.link.connected
                else self.succession.on_no_answer
            )
            effects = effects + news(now)
        waits = self.ranks, self.link, self.succession, self.tests
        wake_at = min(self._probe_at, *(part.wake_at for part in waits))
        if wake_at != self._wake_at:
            self._wake_at = wake_at
            effects = [*effects, do.WakeAt(wake_at)]
        return effects

    def _with_others(self, effect: Effect, now: float) -> list[Effect]:
        """The effect, with what it means to other parts."""
        match effect:
            case do.StartHost() if self.ranks.attempt == 0:
                return [effect, *self.tests.on_host_started(now)]
            case do.Prepare(order):
                self.writes.on_launch(order)
                return [*self.tests.on_test_over(), effect]
            case do.Leave():
                self.left = True
        return [effect]

    def _said(self, effects: list[Effect]) -> list[Effect]:
        """While no supervisor is connected, keep messages for the next one and drop heartbeats."""
        out: list[Effect] = []
        for effect in effects:
            if isinstance(effect, do.Send):
                out += self.link.say(effect.message)
            elif self.link.connected or not isinstance(effect, do.Beat):
                out.append(effect)
        return out

    # The agent's own life.

    def start(self, now: float, *, reachable: bool) -> list[Effect]:
        """Start the agent. `reachable`: this node's address is known, so its first host can start. (Importing
        torch takes longer than finding the supervisor.)"""
        self._probe_at = now + PROBE_ANYWAY_S
        begun = self.ranks.begin(now) if reachable else []
        return self._out(begun + self.link.start(now), now)

    def on_time(self, now: float) -> list[Effect]:
        self._wake_at = NEVER  # this call was the wake-up
        ranks = self._said(self.ranks.on_time(now)) + (self._probe() if now >= self._probe_at else [])
        others = self.link.on_time(now) + self.succession.on_time(now) + self.tests.on_time(now)
        return self._out(ranks + others, now)

    def _probe(self) -> list[Effect]:
        """Start the probes, once."""
        wanted, self._probe_at = self._probe_at < NEVER, NEVER
        return [do.StartProbes()] if wanted else []

    def on_sigterm(self, now: float) -> list[Effect]:
        self.ranks.on_sigterm()
        return self._out(self.link.on_sigterm(now), now)

    def say(self, message: msg.ToSupervisor, now: float) -> list[Effect]:
        return self._out(self.link.say(message), now)

    # The supervisor.

    def on_supervisor_found(
        self, place: msg.Endpoint | None, now: float, *, attempt: int | None = None
    ) -> list[Effect]:
        """What the run directory says: the newest supervisor's address, and which attempt is the newest that
        has begun. None: it does not say, or does not answer."""
        return self._out(
            self._said(self.ranks.on_newest_attempt(attempt, now))
            + self.link.on_supervisor_found(place, now),
            now,
        )

    def on_supervisor_unreached(self, now: float, *, refused: bool = False) -> list[Effect]:
        """No supervisor was reached. `refused`: nothing listens at that address."""
        if refused:
            self.succession.on_connection_refused(now)
        return self._out(self.link.on_supervisor_unreached(now), now)

    def on_connected(self, now: float) -> list[Effect]:
        begun = self.ranks.begin(now)
        greeted = [*self.link.on_connected(now), self.ranks.beat()]
        return self._out([*greeted, *self._said(self.writes.on_connected()), *begun], now)

    def on_connection_lost(self, now: float) -> list[Effect]:
        """The connection was closed."""
        if self.link.connected:
            self.succession.on_connection_closed(now)
        return self._out(self.link.on_connection_lost(now), now)

    def on_order(self, order: msg.Order, now: float) -> list[Effect]:
        heard = self.link.on_order(order, now)
        return self._out(
            [*heard, *self.succession.on_order(now), *self._said(self._ordered(order, now))], now
        )

    def _ordered(self, order: msg.Order, now: float) -> list[Effect]:
        match order:
            case msg.Launch():
                return self.ranks.on_launch(order, now)
            case msg.Stop():
                return self.ranks.on_stop(order.attempt, now, stacks=order.stacks, grace_s=order.grace_s)
            case msg.Dismiss():
                return self.ranks.on_dismissed(now)
            case msg.Look():
                return self.ranks.on_look(order, now)
            case msg.JobGoesOn():
                return self.ranks.on_job_goes_on()
            case msg.CadenceSet():
                if order.attempt != self.ranks.attempt:
                    return []
                # The supervisor waits for a heartbeat that shows it.
                return [do.Obey(order), do.Beat(order.attempt, self.ranks.pids)]
            case msg.TestOver():
                return self.tests.on_test_over()
            case msg.TestAlone() | msg.TestPair():
                idle = self.ranks.state in ("warming", "waiting")  # nothing is tested beside ranks
                return self.tests.on_test_ordered(order, now) if idle else self.tests.on_test_over()
            case msg.Write():
                return self.writes.on_write(order)
            case msg.ContinueWrite():
                return self.writes.on_continue_write(order)
            case msg.CancelWrite():
                return self.writes.on_cancel_write(order.id)
            case msg.Leave() | msg.Moved() | msg.Unreadable():
                return []  # the link's, and nobody's
            case _:
                return [do.Obey(order)]

    # The ranks and their host.

    def on_node_prepared(self, attempt: int, now: float) -> list[Effect]:
        return self._out(self._said(self.ranks.on_node_prepared(attempt, now)), now)

    def on_stacks_taken(self, attempt: int, now: float) -> list[Effect]:
        return self._out(self._said(self.ranks.on_stacks_taken(attempt, now)), now)

    def on_host_message(self, message: msg.Ready | msg.Started | msg.Finished, now: float) -> list[Effect]:
        warm = self._probe() if isinstance(message, msg.Ready) else []
        return self._out(warm + self._said(self.ranks.on_host_message(message, now)), now)

    def on_rank_failed(self, failed: msg.Failed, evidence: Mapping[str, Any], now: float) -> list[Effect]:
        """A rank failed. `evidence`: what the node knows about it, as fields of `messages.Failed`."""
        return self._out(self._said(self.ranks.on_rank_failed(failed, evidence, now)), now)

    def on_host_ended(
        self, code: int, evidence: Mapping[str, Any], now: float, unloadable: str = ""
    ) -> list[Effect]:
        return self._out(self._said(self.ranks.on_host_ended(code, evidence, now, unloadable)), now)

    def on_rank_event(
        self, event: within.ForSupervisor | within.CheckpointsKept | within.Foreseen, now: float
    ) -> list[Effect]:
        if isinstance(event, within.CheckpointsKept | within.Foreseen):
            return self._out(self.writes.on_rank_event(event), now)
        return self._out(self._said(self.ranks.on_rank_event(event, now)), now)

    # Tests, succession, and writes.

    def on_tests_started(self, number: int, port: int, why: str, now: float) -> list[Effect]:
        """The test processes have started, or (`why`) cannot. `port`: of the store for tests that meet here;
        0 for none."""
        return self._out(self._said(self.tests.on_tests_started(number, port, why)), now)

    def on_tests_answered(self, number: int, answers: Sequence[NodeTimes], now: float) -> list[Effect]:
        """The answers of all processes to the last tests."""
        return self._out(self._said(self.tests.on_tests_answered(number, answers)), now)

    def on_pulse(self, value: str | None, now: float) -> list[Effect]:
        looked = self.link.on_pulse(epoch_of(value), now) if value is not None else []
        return self._out(looked + self.succession.on_pulse(value, now), now)

    def on_supervisor_ended(self, now: float) -> list[Effect]:
        return self._out(self.succession.on_supervisor_ended(now), now)

    def on_write_reached(self, id: str, phase: WritePhase, now: float) -> list[Effect]:
        return self._out(self._said(self.writes.on_write_reached(id, phase)), now)

    def on_write_ended(self, id: str, now: float) -> list[Effect]:
        self.writes.on_write_ended(id)
        return self._out([], now)
