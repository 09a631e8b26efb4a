"""A node whose agent's machine meets everything at once, by seed: supervisors that come and go, orders that
are lost, come twice or late, and a torchrun host that dies or does not stop. It checks what must always hold.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from jurymast.core.agent import effects as do
from jurymast.core.agent.machine import AgentMachine
from jurymast.core.state import messages as msg
from jurymast.core.state.evidence import NodeTimes
from jurymast.core.state.messages import Endpoint
from jurymast.core.state.settings import RunPlan, Settings


def plan(ranks_per_node: int = 1, cluster: str = "local") -> RunPlan:
    return RunPlan(
        run="r", name="r", directory="/r", cluster=cluster, active=2, spares=1,
        ranks_per_node=ranks_per_node, script="x",
    )  # fmt: skip


def launch(attempt: int, *, rank: int = 1, port: int = 1, cold: bool = False) -> msg.Launch:
    return msg.Launch(attempt=attempt, rank=rank, world=2, master_address="a", master_port=port, cold=cold)


@dataclass
class Host:
    """As `worker.elastic` does it: one attempt at a time, each after a word that it waits."""

    port: int
    running: int = 0
    stuck: bool = False
    waits: bool = False
    stop_up_to: int = 0
    launches: list[int] = field(default_factory=list)
    words: list[msg.ToSupervisor] = field(default_factory=list)  # on their way to the agent

    def works(self, chance: random.Random) -> None:
        """One thing of those that it may do now."""
        if self.running and self.running <= self.stop_up_to:
            if not self.stuck:
                self._wait()
        elif self.running:
            end = chance.random()
            if end < 0.2:
                error = f"{self.running}-{chance.random()}"
                failed = msg.Failed(attempt=self.running, rank=1, exit_code=1, error=error)
                self.words.append(failed)
                self._wait()
            elif end < 0.4:
                self.words.append(msg.Finished(attempt=self.running))
                self._wait()
        elif not self.waits:
            self._wait()
        elif self.launches:
            attempt = self.launches.pop(0)
            if attempt > self.stop_up_to:
                self.running, self.waits = attempt, False
                self.words.append(msg.Started(attempt=attempt, pids=(1000 + attempt,)))
            else:
                self.words.append(msg.Ready(store_port=self.port))

    def _wait(self) -> None:
        self.running, self.waits = 0, True
        self.port += 1
        self.words.append(msg.Ready(store_port=self.port))


class Node:
    """`events` random ones, and then a time in which all goes well."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 100.0
        cluster = self.chance.choice(["local", "slurm"])
        share = self.chance.random()
        wanted = replace(plan(2, cluster), settings=Settings(preflight_s=self.chance.choice([0.0, 5.0])))
        self.machine = AgentMachine(wanted, "n1", "17.0", ("n1",), ("h", 1), share)
        self.host: Host | None = None
        self.reachable = True  # a supervisor
        self.connected = False
        self.attempt = 0  # of the supervisor
        self.orders: list[msg.Order] = []  # on their way
        self.wake_at = do.NEVER
        self.waiting: list[do.Effect] = []  # for their answers
        self.ordered = 0  # the newest attempt whose launch the agent heard
        self.started: list[int] = []
        self.stops: set[int] = set()  # heard, and not answered yet
        self.told_stopped = 0
        self.failed: set[str] = set()
        self.line: list[msg.Kept] = []  # said over this connection
        self.arrived = 0  # so many of them
        self.told: list[str] = []
        self.left = False
        self.epoch = 1  # the newest
        self.pulse = 0
        self.stands_by = self.supervises = False
        self.tests = 0  # the number of the processes that test the node
        self.tests_told = 0
        self.written = 0  # the newest write that was ordered
        self.writes: dict[
            str, msg.WritePhase
        ] = {}  # that go on, and the phase that each is told to go on with
        self.turns = 0

    def live(self, events: int) -> None:
        self.carry_out(self.machine.start(self.now, reachable=True))
        for _ in range(events):
            self.happen()
            if self.left:
                return
        self.settle()

    def happen(self) -> None:
        self.now += self.chance.expovariate(10.0)
        self.tick()
        happens = self.chance.choices(
            [
                self.order, self.deliver, self.host_works, self.answer, self.cut, self.host_dies, self.sleep,
                self.order_to_write, self.write,
            ],
            [2, 6, 9, 9, 0.3, 0.1, 0.3, 0.2, 1],
        )[0]  # fmt: skip
        happens()

    def settle(self) -> None:
        """Nothing goes wrong any more, and nobody wants anything new."""
        self.reachable, self.orders = True, []
        for _ in range(300):
            self.now += 0.1
            self.tick()
            self.answer()
            if self.connected:
                self.arrive(len(self.line))
                self.heard(self.go_on())
            self.host_works(quietly=True)
            if self.left:
                return
        assert self.connected
        assert not self.stops, f"orders to stop {self.stops} were not answered"
        assert self.machine.ranks.state != "starting", "a launch came to nothing, and nobody was told"
        assert set(self.told) == self.failed, "a failure was told to nobody"

    # What happens.

    def order(self) -> None:
        kind = self.chance.random()
        if kind < 0.5:
            self.attempt += self.chance.choice([1, 1, 1, 2])
            port = self.host.port if self.host is not None and self.chance.random() < 0.9 else 7
            new: msg.Order = launch(self.attempt, rank=self.chance.randrange(2), port=port)
        elif kind < 0.8:
            attempt = max(1, self.attempt - self.chance.choice([0, 0, 0, 1]))
            new = msg.Stop(attempt=attempt, stacks=self.chance.random() < 0.5)
        else:
            pair = msg.TestPair(name="1-n1-n2", host="h", port=1, rank=self.chance.randrange(2), limit_s=3.0)
            others: list[msg.Order] = [
                msg.Dismiss(), self.go_on(), msg.TestAlone(limit_s=5.0), msg.TestOver(), pair,
            ]  # fmt: skip
            new = self.chance.choice(others)
        self.orders += [new] * self.chance.choice([0, 1, 1, 1, 2])  # lost, or doubled

    def order_to_write(self) -> None:
        """Phase after phase; some orders are lost, doubled, or late."""
        self.written += self.chance.random() < 0.8
        tier = self.chance.choice(["shared", "shared", "local"])
        id = f"{tier} {self.written}"
        phases = [msg.WritePhase.ANNOUNCE, msg.WritePhase.SHARE_OUT, msg.WritePhase.WRITE]
        begin = msg.Write(id=id, tier=tier, step=1, attempt=1, ranks=(0,), world=2)
        turns = [msg.ContinueWrite(id=id, phase=phase) for phase in phases if tier == "shared"]
        orders: list[msg.Order] = [begin, *turns, msg.CancelWrite(id=id)]
        for order in orders:
            self.orders += [order] * self.chance.choice([0, 1, 1, 1, 2])

    def write(self) -> None:
        """A write reaches the end of what it was told to do."""
        if self.writes:
            id, phase = self.chance.choice(list(self.writes.items()))
            if id.startswith("local") or self.chance.random() < 0.3:
                del self.writes[id]
                self.carry_out(self.machine.on_write_ended(id, self.now))
            else:
                self.carry_out(self.machine.on_write_reached(id, phase, self.now))

    def deliver(self) -> None:
        if self.connected and self.orders:
            late = self.chance.random() < 0.2
            order = self.orders.pop(self.chance.randrange(len(self.orders)) if late else 0)
            self.heard(self.go_on() if isinstance(order, msg.GoOn) else order)

    def go_on(self) -> msg.GoOn:
        heir = self.chance.choice([None, 0, 0, 1])
        return msg.GoOn(time=0.0, patience_s=5.0, heard=self.arrived, epoch=self.epoch, heir=heir)

    def arrive(self, number: int) -> None:
        """So many of what was said over this connection: the supervisor has heard them."""
        for message in self.line[self.arrived : number]:
            if isinstance(message, msg.Failed) and message.error != "TorchrunHostDied":
                self.told.append(message.error)
        self.arrived = max(self.arrived, number)

    def heard(self, order: msg.Order) -> None:
        ranks = self.machine.ranks
        if isinstance(order, msg.Launch) and order.attempt > ranks.attempt:
            self.ordered = order.attempt
            self.stops = {stop for stop in self.stops if stop >= order.attempt}
        if isinstance(order, msg.Stop) and order.attempt >= self.ordered:
            self.stops.add(order.attempt)
        self.carry_out(self.machine.on_order(order, self.now))

    def host_works(self, *, quietly: bool = False) -> None:
        host = self.host
        if host is None:
            return
        if not quietly or host.running <= host.stop_up_to:
            host.works(self.chance)
        if host.words and (quietly or self.chance.random() < 0.7):
            self.hear_host(host.words.pop(0))

    def hear_host(self, word: msg.ToSupervisor) -> None:
        if isinstance(word, msg.Failed):
            self.failed.add(word.error)
            self.carry_out(self.machine.on_rank_failed(word, {}, self.now))
        else:
            assert isinstance(word, msg.Ready | msg.Started | msg.Finished)
            self.carry_out(self.machine.on_host_message(word, self.now))

    def host_dies(self) -> None:
        host = self.host
        if host is None:
            return
        for word in host.words:
            self.hear_host(word)
        self.host = None
        self.carry_out(self.machine.on_host_ended(-9, {}, self.now))

    def answer(self) -> None:
        """To one of the effects that want one."""
        if not self.waiting:
            return
        match self.waiting.pop(self.chance.randrange(len(self.waiting))):
            case do.Connect():
                if self.reachable and not self.connected:
                    self.connected = True
                    self.carry_out(self.machine.on_connected(self.now))
                else:
                    refused = self.chance.random() < 0.5
                    self.carry_out(self.machine.on_supervisor_unreached(self.now, refused=refused))
            case do.FindSupervisor():
                self.epoch += self.chance.random() < 0.2
                newest = Endpoint(self.epoch, ("h",), 1, "n9", "17.0", 1)
                place, attempt = self.chance.choice([None, newest]), self.chance.choice([None, self.attempt])
                self.carry_out(self.machine.on_supervisor_found(place, self.now, attempt=attempt))
            case do.ReadPulse():
                self.pulse += self.chance.random() < 0.5
                value = self.chance.choice([None, *[f"{self.epoch}:{self.pulse}"] * 3])
                self.carry_out(self.machine.on_pulse(value, self.now))
            case do.StartSupervisor():
                self.supervises = False
                self.carry_out(self.machine.on_supervisor_ended(self.now))
            case do.Prepare(order):
                self.carry_out(self.machine.on_node_prepared(order.attempt, self.now))
            case do.TakeStacks(attempt, _):
                self.carry_out(self.machine.on_stacks_taken(attempt, self.now))
            case do.StartTests(number, _):
                self.carry_out(
                    self.machine.on_tests_started(number, 7, self.chance.choice(["", "no"]), self.now)
                )
            case do.TestDevices(number) | do.TestTogether(number):
                answers = [NodeTimes({"x": 1.0}, error=self.chance.choice(["", "", "no"]))] * 2
                self.carry_out(self.machine.on_tests_answered(number, answers, self.now))
            case effect:
                raise AssertionError(f"{effect} has no answer")

    def cut(self) -> None:
        """The connection breaks, or nobody answers any more, or somebody does again."""
        self.reachable = self.chance.random() < 0.7
        if self.connected:
            self.connected = False
            self.arrive(self.chance.randint(0, len(self.line)))
            self.carry_out(self.machine.on_connection_lost(self.now))

    def sleep(self) -> None:
        self.now += self.chance.uniform(0.0, 7.0)
        if self.host is not None:
            self.host.stuck = self.chance.random() < 0.3

    def tick(self) -> None:
        if self.now >= self.wake_at:
            self.wake_at = do.NEVER
            self.carry_out(self.machine.on_time(self.now))

    # What the machine wants, and whether it may.

    def carry_out(self, effects: list[do.Effect]) -> None:
        assert not (self.left and effects), "an agent that has left does something"
        for effect in effects:
            self.one(effect)
        self.machine.check()

    def one(self, effect: do.Effect) -> None:
        match effect:
            case do.WakeAt(at):
                self.wake_at = at
            case do.Send(message):
                self.said(message)
            case do.Greet():
                self.line, self.arrived = [], 0
                self.waiting = [
                    one for one in self.waiting if not isinstance(one, do.Connect | do.FindSupervisor)
                ]
                if self.machine.ranks.state in ("warming", "waiting", "finished"):
                    self.stops.clear()  # the hello tells
            case do.HangUp():
                self.connected = False
            case do.StartHost():
                assert self.host is None, "two hosts"
                self.host = Host(port=self.chance.randrange(1000, 9000))
            case do.StartRanks(order):
                self.start_ranks(order)
            case do.StopRanks(attempt):
                assert self.host is not None
                self.host.stop_up_to = max(self.host.stop_up_to, attempt)
            case do.KillHost():
                self.host_dies()
            case do.Leave():
                self.left = True
            case do.StartTests(number):
                assert not self.tests, "two sets of processes test the node"
                self.tests = number
                self.waiting.append(effect)
            case do.TestDevices(number) | do.TestTogether(number):
                assert number == self.tests, "who is not there is asked"
                self.waiting.append(effect)
            case do.EndTests(number):
                assert number == self.tests, "what is not there is ended"
                self.tests = 0
            case do.Obey(msg.Write() as order):
                tiers = {id.partition(" ")[0] for id in self.writes}
                assert order.tier not in tiers, "two writes to a tier"
                self.writes[order.id] = msg.WritePhase.OPEN
            case do.Obey(msg.ContinueWrite() as turn):
                assert self.writes[turn.id] < turn.phase, "a phase twice, or after a later one"
                self.writes[turn.id] = turn.phase
                self.turns += 1
            case do.Obey(msg.CancelWrite(id=id)):
                del self.writes[id]
                self.carry_out(self.machine.on_write_ended(id, self.now))
            case do.Prepare():
                assert not self.tests, "what tests the node holds what the ranks need"
                assert self.host is None or not self.host.running, "room is made while ranks run"
                self.waiting.append(effect)
            case do.StandBy():
                assert not self.stands_by, "two processes stand by"
                self.stands_by = True
            case do.EndStandby():
                assert self.stands_by, "what does not stand by is ended"
                self.stands_by = False
            case do.StartSupervisor():
                assert not self.supervises, "two supervisors on a node"
                self.stands_by, self.supervises = False, True
                self.waiting.append(effect)
            case do.ReadPulse():
                assert effect not in self.waiting, "two readings at a time"
                self.waiting.append(effect)
            case do.Connect() | do.FindSupervisor() | do.TakeStacks():
                self.waiting.append(effect)
            case _:
                pass

    def start_ranks(self, order: msg.Launch) -> None:
        assert self.host is not None, "ranks without a host"
        assert self.host.waits, "a host that does not wait"
        assert not self.host.running, "ranks beside those of another attempt"
        assert order.attempt > max(self.started, default=0), "an older attempt after a newer one"
        assert order.attempt not in self.stops, "ranks that are to be stopped"
        assert order.attempt > self.told_stopped, "ranks of which was told that they have ended"
        assert order.rank or order.master_port == self.host.port, "rank 0 without its store"
        self.started.append(order.attempt)
        self.host.launches.append(order.attempt)

    def said(self, message: msg.ToSupervisor) -> None:
        assert self.connected, "said to nobody"
        match message:
            case msg.Stopped():
                assert self.host is None or not self.host.running, "stopped, and its ranks run"
                self.stops = {stop for stop in self.stops if stop > message.attempt}
                self.told_stopped = max(self.told_stopped, message.attempt)
            case msg.TestedAlone() | msg.TestedPair():
                self.tests_told += 1
            case msg.WriteReached():
                assert message.phase <= self.writes[message.id], "a phase is reached that was not ordered"
                assert message.id.startswith("shared"), "one that has no phases"
            case msg.Failed() | msg.RankEvent() | msg.Unrestorable() | msg.Written():
                self.line.append(message)
                if self.chance.random() < 0.7:
                    self.arrive(len(self.line))
