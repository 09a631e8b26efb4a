"""The ranks of one node: when they start and stop, when they are killed, and what the supervisor is told of
them. Also tests of this node, alone or with another one: which processes run them, what these are asked, and
what the supervisor is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from jurymast.core.agent import effects as do
from jurymast.core.agent.effects import NEVER, Effect
from jurymast.core.judges.tests import LOCAL, limit_s, slowest
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.evidence import NodeTimes, SparedRank
from jurymast.core.state.settings import RunPlan

# ---- ranks

# A host that has not stopped its ranks by then hangs itself: it waits a second for ranks at their end, and
# two for those that it has killed.
STOP_MARGIN_S = 3.5
# Stacks are recorded within 2 s. The ranks are stopped even if the recording does not return.
STACKS_LIMIT_S = 3.0
HOST_RESTARTS_MAX = 5
# Storage may have been late; what is missing stays so.
UNLOADABLE_RESTARTS_MAX = 1

Ended = msg.Failed | msg.Stopped | msg.Finished


class Ranks:
    """Starts and stops ranks as the supervisor orders. `now` is monotonic, in seconds.

    The host runs one attempt at a time. It is told of an attempt only while it waits without ranks, so its
    next message is about that attempt. Invariants:

    - No attempt starts after a newer one, nor after an order to stop it.
    - Ranks of an attempt start once those of earlier ones are gone.
    - Every order to stop is answered by Stopped once the ranks are gone, even if they have been gone for
      long, except an order for an attempt that a newer one has replaced.
    - A launch that fails is reported like one whose ranks have ended.
    """

    def __init__(self, stop_grace_s: float, *, tasks: bool = False) -> None:
        """`stop_grace_s`: seconds between SIGTERM and SIGKILL. `tasks`: each rank may be for itself."""
        self._tasks = tasks
        # By rank, how tasks have ended here, in any attempt, and how ranks have failed in the newest: each
        # supervisor is told, and knows the cause before it hears that they are gone.
        self.ended: dict[int, msg.Failed | msg.Finished] = {}
        self.group_made = False  # by one of them: all are ranks of a training
        self.attempt = 0  # the newest ordered here
        self.store_port = 0  # the host's, while it waits
        self.pids: tuple[int, ...] = ()
        self.spared: tuple[SparedRank, ...] = ()  # while the host waits
        self.host_starts = 0
        self._policys_grace_s, self._grace_s = stop_grace_s, 0.0  # this one is the order's own
        self._launch: msg.Launch | None = None  # the host has not been told of it yet
        self._preparing = self._prepared = 0  # attempts
        self._told = 0  # the newest attempt that the host was told of
        self._alive = False  # its ranks, as far as the host has said
        self._finished = False  # they have ended, all with exit code 0
        self._stopping = 0  # the newest attempt that was ordered to stop
        self._ending = False  # the ranks are being stopped
        self._spares = True  # in that those may be spared that can
        self._stacks_until = NEVER
        self._force_at = NEVER
        self._cold = False  # the script cannot use what was loaded ahead of it
        self._held: list[Ended] | None = None  # since a SIGTERM that nobody has explained yet

    @property
    def state(self) -> msg.RanksState:
        if self._launch is not None or (self._alive and not self.pids):
            return "starting"
        if self._alive:
            return "running"
        if self._finished:
            return "running" if self._end_is_held else "finished"
        return "waiting" if self.store_port else "warming"

    @property
    def _end_is_held(self) -> bool:
        """Whether the supervisor is not to know yet that all ranks have ended. Those that had before a
        SIGTERM have not ended by it: no supervisor may have heard of that."""
        return any(isinstance(one, msg.Finished) and not one.ranks for one in self._held or ())

    @property
    def known(self) -> int:
        """The newest attempt that this agent knows of; with ranks, theirs. The next supervisor may have no
        record of one that was stopped before it was launched here, and must not use its number again."""
        return self.attempt if self.state in ("starting", "running") else max(self.attempt, self._stopping)

    @property
    def wake_at(self) -> float:
        return min(self._stacks_until, self._force_at)

    def beat(self) -> do.Beat:
        return do.Beat(self._told if self.pids else self.attempt, self.pids)

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert self._told <= self.attempt, "the host was told of an attempt that nobody ordered"
        assert not (self._alive and self.store_port), "a host with ranks does not wait"
        assert not (self._alive and self._finished), "ranks that have ended live"
        assert self._alive or not self.pids, "processes without ranks"
        assert self.store_port or not self.spared, "ranks are spared, and no host waits with them"
        assert self._alive or not self._ending, "nothing is there to be stopped"
        assert self._launch is None or self._launch.attempt == self.attempt, (
            "an attempt waits that was replaced"
        )
        assert self._launch is None or self._told < self.attempt, "the host is told twice"
        assert self._ending or self.wake_at == NEVER, "a stop is waited for that nobody asked for"
        assert not (self._launch and self._alive and not self._ending), "ranks are in the way of newer ones"

    # Orders.

    def begin(self, now: float) -> list[Effect]:
        """Start the first host, now that other nodes can reach this one."""
        return [] if self.host_starts else self._start_host()

    def on_launch(self, order: msg.Launch, now: float) -> list[Effect]:
        if order.attempt <= max(self.attempt, self._stopping) or not self.host_starts:
            return []
        self.attempt, self._launch = order.attempt, order
        self._held = None  # the job goes on, and what is held is about an attempt that is over
        self._cold = self._cold or order.cold
        self._finished = False
        if not self._tasks:
            self.ended.clear()
        stop = self._begin_stop(False, now) if self._alive and not self._ending else []
        return stop + self._go_on()

    def on_node_prepared(self, attempt: int, now: float) -> list[Effect]:
        self._prepared = max(self._prepared, attempt)
        return self._go_on()

    def _go_on(self) -> list[Effect]:
        """Take the next step of a launch: the earlier ranks are gone, room is made, the host waits."""
        order = self._launch
        if order is None or self._alive:
            return []
        if self._preparing < order.attempt:
            self._preparing = order.attempt
            return [do.Prepare(order)]
        if self._prepared < order.attempt or not self.store_port:
            return []
        self._launch = None
        if order.rank == 0 and order.master_port != self.store_port:
            return self._cannot_lead(order)
        self._told, self._alive, self.store_port = order.attempt, True, 0
        self.spared, self._spares = (), True
        return [do.StartRanks(order, self._cold)]

    def _cannot_lead(self, order: msg.Launch) -> list[Effect]:
        """Report that all ranks would meet at a store that ended with the previous host."""
        failed = msg.Failed(
            attempt=order.attempt, rank=-1, exit_code=1, error="TorchrunHostDied", oom_kills=None,
            message="the node's torchrun host and its store ended before the ranks started",
        )  # fmt: skip
        return self._tell(failed) + self._tell_stopped()

    def on_stop(
        self, attempt: int, now: float, *, stacks: bool = False, grace_s: float = 0.0, spare: bool = True
    ) -> list[Effect]:
        """Stop the ranks of `attempt`, if requested after recording their `stacks`. They have `grace_s`, if
        that is longer than what the policy gives them, for what they do at a signal; then, and unless
        `spare`, none of them is spared."""
        if (self._alive or self._launch is not None) and attempt < self.attempt:
            return []
        self._stopping = max(self._stopping, attempt)
        self._launch = None
        self._spares = self._spares and spare and not grace_s
        if self._alive:
            if self._ending:
                return []
            self._grace_s = grace_s
            return self._begin_stop(stacks and attempt == self._told, now)
        if attempt >= self.attempt or not self.store_port:
            self._finished = False  # without a port the host is on its way to wait: that will be news
        return [do.Send(self._stopped(attempt))]

    def on_dismissed(self, now: float) -> list[Effect]:
        """The node is out: its ranks end, also those that were spared."""
        spared, self.spared = tuple(rank.pid for rank in self.spared), ()
        return [*([do.KillRanks(spared)] if spared else []), *self.on_stop(self.attempt, now, spare=False)]

    def _stopped(self, attempt: int) -> msg.Stopped:
        return msg.Stopped(attempt=attempt, store_port=self.store_port, spared=self.spared)

    def on_newest_attempt(self, attempt: int | None, now: float) -> list[Effect]:
        """Stop ranks that were replaced without this agent: `attempt` has begun, as the run directory says
        (None: it does not say). None begins before the ranks of earlier ones have ended, but for those on
        nodes that count as lost."""
        if attempt is None or attempt <= self.attempt or self.state not in ("starting", "running"):
            return []
        return self.on_stop(self.attempt, now)

    def on_look(self, order: msg.Look, now: float) -> list[Effect]:
        here = order.attempt == self._told and self.state == "running"
        return [do.LookAtRanks(order.number, self.pids)] if here else []

    @property
    def unexplained(self) -> bool:
        """Whether there was a SIGTERM, and it is not known what for."""
        return self._held is not None

    def on_sigterm(self) -> None:
        """Note that Slurm may end the job or remove the node. Then the end of the ranks is no failure, nor,
        where they exit with 0 once they have saved, the end of the training, so it is told only if the job
        goes on."""
        self._held = self._held or []

    def on_job_goes_on(self) -> list[Effect]:
        held, self._held = self._held or [], None
        return [told for said in held if said.attempt >= self.attempt for told in self._tell(said)]

    def _begin_stop(self, stacks: bool, now: float) -> list[Effect]:
        self._ending = True
        if stacks and self.pids:
            self._stacks_until = now + STACKS_LIMIT_S
            return [do.TakeStacks(self._told, self.pids)]
        return self._stop_host(now)

    def on_stacks_taken(self, attempt: int, now: float) -> list[Effect]:
        taken = self._stacks_until < NEVER and attempt == self._told
        return self._stop_host(now) if taken else []

    def _stop_host(self, now: float) -> list[Effect]:
        limit_s = max(self._policys_grace_s, self._grace_s) + STOP_MARGIN_S
        self._stacks_until, self._force_at = NEVER, now + limit_s
        return [do.StopRanks(self._told, self._grace_s, self._spares)]

    def on_time(self, now: float) -> list[Effect]:
        if now >= self._stacks_until:
            return self._stop_host(now)
        if now >= self._force_at:
            self._force_at = NEVER
            return [do.KillRanks(self.pids), do.KillHost()]
        return []

    # Events on this node.

    def on_host_message(self, message: msg.Ready | msg.Started | msg.Finished, now: float) -> list[Effect]:
        match message:
            case msg.Ready():
                return self._host_waits(message)
            case msg.Started():
                self.pids, self.host_starts = message.pids, 1
                return [do.Send(message), self.beat()]
            case msg.Finished():
                effects: list[Effect] = [self.beat(), *self._tell(message)]
                if not (message.ranks or self._ending):  # who stops them still waits for the host
                    self._gone()
                    self._finished = True
                return effects

    def on_rank_failed(self, failed: msg.Failed, evidence: Mapping[str, Any], now: float) -> list[Effect]:
        """Report a failed rank. `evidence`: what the node knows about it, as fields of `messages.Failed`."""
        return [self.beat(), *self._tell(msgspec.structs.replace(failed, **evidence))]

    def on_rank_event(self, event: within.ForSupervisor, now: float) -> list[Effect]:
        self._cold = self._cold or isinstance(event, within.ColdStart)
        self.group_made = self.group_made or isinstance(event, within.GroupMade)
        said: list[Effect] = [do.Send(msg.RankEvent(attempt=self._told, event=event))]
        # Those that have caught a signal may leave, some before others.
        return [*said, do.PartRanks(self._told)] if isinstance(event, within.Warned) else said

    def _host_waits(self, ready: msg.Ready) -> list[Effect]:
        lived = self._alive
        last: list[Effect] = [self.beat()] if self.pids else []  # how far they came, exactly
        self._gone()
        self.store_port, self.spared = ready.store_port, ready.spared
        if self._launch is not None:
            return last + self._go_on()
        if lived:
            return last + self._tell_stopped()
        return [] if self._finished else [do.Send(msg.Ready(store_port=ready.store_port))]

    def on_host_ended(
        self, code: int, evidence: Mapping[str, Any], now: float, unloadable: str = ""
    ) -> list[Effect]:
        """Handle the end of the host, before it was ready, while it waited, or together with its ranks.
        `evidence` as in `rank_failed`; `unloadable`: why Python cannot load torch here, "" if it can."""
        had_ranks = self.state in ("starting", "running") and not self._finished
        waited = self.state == "waiting"
        effects: list[Effect] = [do.KillRanks(self.pids)] if self.pids else []
        self._gone()
        self._launch, self.store_port, self.spared = None, 0, ()
        if had_ranks and self._stopping < self.attempt:
            failed = msg.Failed(
                attempt=self.attempt, rank=-1, exit_code=code or 1, error="TorchrunHostDied",
                message=f"the node's torchrun host ended (code {code}) and took its ranks along", **evidence,
            )  # fmt: skip
            effects += self._tell(failed)
        if self.host_starts > (UNLOADABLE_RESTARTS_MAX if unloadable else HOST_RESTARTS_MAX):
            why = f"the torchrun host died {self.host_starts} times"
            told = unloadable or evidence.get("log")
            why += f": {told}" if told else ""
            return [*effects, do.Send(msg.Leaving(why=why, environment=bool(unloadable))), do.Leave()]
        if had_ranks or waited:  # one that waited is as little there as one with ranks
            effects += self._tell_stopped()
        return effects + self._start_host()

    def _start_host(self) -> list[Effect]:
        self.host_starts += 1
        return [do.StartHost()]

    def _gone(self) -> None:
        self._alive = self._ending = False
        self.pids = ()
        self._stacks_until = self._force_at = NEVER

    def _tell_stopped(self) -> list[Effect]:
        """Answer whoever waits for the newest attempt to end."""
        attempt = max(self.attempt, self._stopping)
        return self._tell(self._stopped(attempt))

    def _tell(self, message: Ended) -> list[Effect]:
        """Tell the supervisor, unless the end of the job may explain it."""
        asked = isinstance(message, msg.Stopped) and self._stopping >= self.attempt
        if self._held is not None and not asked:
            self._held.append(message)
            return []
        self._note_ended(message)
        return [do.Send(message)]

    def _note_ended(self, message: Ended) -> None:
        match message:
            case msg.Finished(ranks=ranks):
                self.ended.update(dict.fromkeys(ranks, message))
            case msg.Failed(rank=rank) if rank >= 0:
                self.ended[rank] = message


# ---- tests of this node

# A node's processes meet under this name, and in pairs under the pair's.
ITSELF, ITSELF_LIMIT_S = "local", 20.0
# Nodes without GPUs are tested by at most two processes.
CPU_PROCESSES = 2

Asked = do.TestDevices | do.TestTogether


class NodeTests:
    """Runs one test process for each device, or one or two without GPUs. They start with the agent's first
    torchrun host, so that both import torch at the same time. `now` is monotonic, in seconds."""

    def __init__(self, plan: RunPlan, gpus: int, *, driver: bool) -> None:
        """`driver`: Slurm has granted GPUs, and a driver is present."""
        self._wanted = limit_s(plan.settings, gpus) > 0
        self._join_limit_s = plan.settings.join_limit_s
        self._count = gpus if gpus and driver else min(CPU_PROCESSES, plan.ranks_per_node)
        self._number = 0  # number of the processes, from 1 on
        self._port: int | None = None  # where those of two nodes meet; None: they are not ready
        self._asked: Asked | None = None  # the processes do one thing at a time
        self._waiting: deque[Asked] = deque()
        self._alone = NodeTimes()
        self._result: msg.TestedAlone | None = None
        self.wake_at = NEVER  # their end

    @property
    def here(self) -> bool:
        """Whether test processes run."""
        return self.wake_at < NEVER

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert self.here or self._asked is None, "nobody is there to answer"
        assert self._asked is not None or not self._waiting, "nothing is on, and something waits"
        assert self._result is None or self.here, "a result of processes that are gone"

    # Orders.

    def on_host_started(self, now: float) -> list[Effect]:
        """The first host started: new nodes will be tested soon, if the policy wants that."""
        wanted, self._wanted = self._wanted, False
        return self._begin(now + self._join_limit_s) if wanted and not self.here else []

    def on_test_ordered(self, order: msg.TestAlone | msg.TestPair, now: float) -> list[Effect]:
        """Start tests. Tests that were answered before are answered again."""
        if isinstance(order, msg.TestPair):
            return self._pair(order)
        begun = [] if self.here else self._begin(now)
        self.wake_at = now + order.limit_s
        return begun if self._result is None else [do.Send(self._result)]

    def _begin(self, until: float) -> list[Effect]:
        self._number += 1
        self._port, self._result, self.wake_at = None, None, until
        self._asked = do.TestDevices(self._number)
        return [do.StartTests(self._number, self._count)]

    def _pair(self, order: msg.TestPair) -> list[Effect]:
        if not self.here:
            gone = "it has no test processes left"
            return [do.Send(msg.TestedPair(name=order.name, times={}, error=gone))]
        return self._ask(self._together(order.name, order.host, order.port, order.limit_s, 2, order.rank))

    def _together(self, name: str, host: str, port: int, limit_s: float, nodes: int, rank: int) -> Asked:
        world, first = nodes * self._count, rank * self._count
        return do.TestTogether(self._number, name, host, port, limit_s, world, first)

    def _ask(self, asked: Asked) -> list[Effect]:
        if self._asked is not None:
            self._waiting.append(asked)
            return []
        self._asked = asked
        return [asked]

    # Reports of the processes.

    def on_tests_started(self, number: int, port: int, why: str) -> list[Effect]:
        if number != self._number or self._asked is None or self._port is not None:
            return []
        self._port = port
        return self._ended(NodeTimes(error=why)) if why else [self._asked]

    def on_tests_answered(self, number: int, answers: Sequence[NodeTimes]) -> list[Effect]:
        """Take in the answers to the last tests."""
        if number != self._number or self._asked is None or self._port is None:
            return []
        return self._ended(slowest(answers))

    def _ended(self, found: NodeTimes) -> list[Effect]:
        asked, self._asked = self._asked, None
        if isinstance(asked, do.TestDevices):
            if self._count > 1 and not found.error:
                self._alone = found
                return self._ask(self._together(ITSELF, "", self._port or 0, ITSELF_LIMIT_S, 1, 0))
            said = self._said(found)
        elif asked is not None and asked.name == ITSELF:
            local = {LOCAL + measure: seconds for measure, seconds in found.times.items()}
            said = self._said(replace(self._alone, times={**self._alone.times, **local}, error=found.error))
        else:
            assert asked is not None
            said = [do.Send(msg.TestedPair(name=asked.name, times=dict(found.times), error=found.error))]
        return said + (self._ask(self._waiting.popleft()) if self._waiting else [])

    def _said(self, found: NodeTimes) -> list[Effect]:
        self._result = msg.TestedAlone(port=self._port or 0, found=found)
        return [do.Send(self._result)]

    # Their end.

    def on_time(self, now: float) -> list[Effect]:
        return self.on_test_over() if now >= self.wake_at else []

    def on_test_over(self) -> list[Effect]:
        """End the test processes, because others need the devices."""
        if not self.here:
            return []
        self._asked, self._result, self.wake_at = None, None, NEVER
        self._waiting.clear()
        return [do.EndTests(self._number)]
