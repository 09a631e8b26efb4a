"""Which nodes are there, by their connections and heartbeats, and which of them are lost.

A node is lost if it is silent for longer than its own limit (see `core.judges.silence`), if its connection
closed and it does not return soon, or if it says so. But a late supervisor is no evidence against a node:

- The clock stands still while the supervisor does, and after a pause a node is given up only at the next
  tick, when messages that arrived meanwhile have been read.
- An agent without an answer for too long looks for another supervisor. One that says so, or that hangs up
  after a pause of the supervisor, has as long to return as after a take-over; one that leaves together with
  others has a few seconds.
- The node of a supervisor that was replaced had been silent for long before. It is lost if its agent does not
  return with (nearly) all others, to this supervisor or to one in between.
- Nodes that an earlier supervisor had lost because it did not hear them have as long to return as all others:
  this one may hear them.
- A supervisor that hears nobody is more likely cut off than all others are dead. Another one may then take
  over, and only if none does are the others given up. Once it hears an agent again, the others get their full
  time again, because they return one after the other.

Connections are numbered: events of an older connection no longer count for the node.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import structs

from jurymast.core.agent.succession import HEIRS
from jurymast.core.judges.silence import (
    BEATS,
    LIMIT_MAX_S,
    Arrivals,
    Lateness,
    WatcherClock,
    patience_s,
    rejoin_limit_s,
)
from jurymast.core.nodes.acknowledgement import Disk, Known
from jurymast.core.nodes.hangs import Reports
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Answer, Disconnect, Effect, Pulse, Record
from jurymast.core.state.messages import Beat
from jurymast.core.state.run import Role, RunState
from jurymast.core.state.texts import NODES_TOLD, some

# Between two ticks, at most and at least.
WATCH_INTERVAL_S, SOON_S = 0.05, 0.01
# While a run just runs and everybody is there: nobody waits for a closer look, and the ranks want the
# processors.
STEADY_INTERVAL_S = 0.1
# A tick that comes later than this after the last one may come before messages that should have been read by
# now.
ON_TIME_S = 1.2 * STEADY_INTERVAL_S
# If all others have been silent for this share of the limit, none of them is lost: this node hears nothing.
ISOLATED = 0.6
# A supervisor that hears no other node waits this long for a successor before it believes that they are lost.
ISOLATION_LIMIT_S = 15.0
# An agent whose connection was closed in order, as at the end of its process, but that lives, is back sooner
# than this (up to the second value if ticks of the supervisor are late). After a reset, which the agent
# notices when it sends something, that time begins when its next heartbeat is due.
RECONNECT_GRACE_S, RECONNECT_LIMIT_S = 0.25, 1.0
# If this many connections broke within the first time, their agents have the second time to return (longer in
# a large run), because many return together.
MANY, MANY_WITHIN_S, MANY_LIMIT_S = 3, 1.0, 2.0
# After such a break, or after the supervisor stood still for this share of the agents' patience, nodes have
# more time for this long.
LATE_SHARE, LENIENT_S = 1 / 3, 2.0
# The agent of the last supervisor's node has this long once nearly all others are back (a packet or two of
# its greeting may be lost), and at most the second value.
AFTER_OTHERS_S, ABANDONED_LIMIT_S = 0.8, 3.0
NEARLY_ALL = 0.98
# Agents that look for this supervisor read the run directory. While that has not answered for the first time,
# no time counts for them; after the second, it hangs.
STORAGE_LATE_S, STORAGE_HANGS_S = 0.5, 1.5
# A heartbeat is answered once this share of the interval has passed, because none may come exactly in time.
EARLY = 0.8
# A node that is taken away, or shuts down, is gone this long after its agent's SIGTERM at the latest.
TAKEN_WITHIN_S = 300.0
# How often the nodes that take over first are chosen anew.
LOOK_EVERY_S = 5.0


@dataclass
class Absence:
    """Not connected since `since`, and silent for `before_s` before. It may be away for `limit_s` seconds;
    `how` it counts as lost if it does not return. `many`: others left together with it."""

    since: float
    limit_s: float
    how: str
    before_s: float = 0.0
    many: bool = False


@dataclass
class NodeWatch:
    """One node: the number of its connection, or why there is none, and when its heartbeats arrived. `heard`:
    messages over this connection that its agent keeps until they are acknowledged; `unsure`: when the others
    of them arrived, of which a later supervisor might not know."""

    arrivals: Arrivals
    connection: int = 0
    away: Absence | None = None
    answered_at: float = -math.inf
    heard: int = 0
    unsure: tuple[float, ...] = ()


class Watch:
    """`now` is the supervisor's clock. It must tick about every `STEADY_INTERVAL_S`, or sooner; all other
    seconds are those of the watcher's own clock."""

    def __init__(self, state: RunState, now: float) -> None:
        self._state = state
        self._heartbeat_s, self._fixed_s = state.settings.heartbeat_s, state.settings.node_lost_after_s
        self.clock = WatcherClock(STEADY_INTERVAL_S, now)
        self.reports = Reports(state, self.clock)
        self.known = Known()
        self.nodes: dict[str, NodeWatch] = {}
        self._taken_until: dict[str, float] = {}  # nodes whose agents got a SIGTERM
        self.ending = False  # the job ends, or agents were told to leave: no node counts as lost
        self._lateness = Lateness(self._heartbeat_s)
        self.here: set[str] = set()  # connected
        self._away: dict[str, None] = {}  # all others
        self._quiet_at = -math.inf  # before this, no connected node can have been silent for too long
        self._broken: dict[str, None] = {}  # nodes whose connection closed a moment ago
        self._broke_at: deque[float] = deque(maxlen=MANY)
        self._many_until = self._late_until = -math.inf
        self._abandoned: set[str] = set()  # nodes of the last supervisors, while they are to connect
        self._lost_before: set[str] = set()  # lost under earlier supervisors: they may be dead
        self._heirs: tuple[str, ...] = ()  # the nodes that take over first
        self._look_at = -math.inf
        self._among = 0
        self._doubted: set[str] = set()
        self._isolated_since: float | None = None
        self._unfindable = False  # nodes that are to return cannot find this supervisor

    # Connections.

    def take_over(self, now: float) -> None:
        """Expect all nodes that the journal knows, except the last supervisors' nodes."""
        self.clock.tick(now)
        for name, node in self._state.nodes.items():
            if node.incarnation and (node.role is not Role.FAILED or node.may_return):
                self.expect(name)
            if node.may_return:
                self._lost_before.add(name)
        for name, heard_at in self._state.abandoned.items():
            last = self.nodes.get(name)
            if last is not None and last.away is not None and name not in self._lost_before:
                self._abandoned.add(name)
                last.away.before_s = max(0.0, now - heard_at)

    def expect(self, node: str) -> None:
        """Expect this known node to connect."""
        arrivals = Arrivals(self._heartbeat_s, self.clock.now)
        limit_s = rejoin_limit_s(len(self._state.nodes)) + arrivals.limit_s(self._fixed_s)
        self._put(node, NodeWatch(arrivals, away=Absence(self.clock.now, limit_s, "silent")))
        self.reports.expect(node)

    def on_agent_joined(self, node: str, connection: int) -> None:
        """The node joined over the connection of this number, counted from 1. An older connection no longer
        counts."""
        self._put(node, NodeWatch(Arrivals(self._heartbeat_s, self.clock.now), connection))
        self.reports.expect(node)

    def on_connection_closed(
        self, node: str, connection: int, now: float, *, reset: bool = False
    ) -> list[Effect]:
        """The connection of this number broke. `reset`: not closed in order, so that its agent, if it lives,
        may not know."""
        if not self._is_newest(node, connection):
            return []
        at, effects = self.clock.at(now), list[Effect]()
        grace_s = RECONNECT_GRACE_S + (self._next_beat_s(node, at) if reset else 0.0)
        self._put(node, NodeWatch(self.nodes[node].arrivals, away=Absence(at, grace_s, "closed")))
        self._broken[node] = None
        self._broke_at.append(at)
        if len(self._broke_at) == MANY and at < self._broke_at[0] + MANY_WITHIN_S:
            if at >= max(self._many_until, self._late_until) and not self.ending:
                text = (
                    f"the connections of {MANY} or more nodes broke at once: "
                    f"these nodes have {self._many_limit_s():.0f} s to reconnect"
                )
                effects.append(Record(ev.Noted(t=now, message=text)))
            self._many_until = at + LENIENT_S
        if at < self._late_until:
            self._give_time()
        elif at < self._many_until:
            for name in self._broken:
                if (away := self.nodes[name].away) and not away.many:
                    away.limit_s, away.many = self._many_limit_s(), True
        return effects

    def _next_beat_s(self, node: str, at: float) -> float:
        """Seconds until the node's next heartbeat is due. If it is already late, it may take a whole interval
        from now."""
        due_s = self.nodes[node].arrivals.last + self._heartbeat_s - at
        return due_s if due_s >= 0 else self._heartbeat_s

    def _many_limit_s(self) -> float:
        return rejoin_limit_s(len(self._state.nodes), MANY_LIMIT_S)

    def on_hangs_up(self, node: str, connection: int) -> list[Effect]:
        """Its agent heard nothing from here, and will return after looking for a supervisor."""
        if not self._is_newest(node, connection):
            return []
        self.expect(node)
        return [Disconnect(node)]

    def on_agent_leaving(self, node: str, connection: int, message: msg.Leaving, now: float) -> list[Effect]:
        """Its agent gives up the node."""
        if not self._is_newest(node, connection):
            return []
        how = "environment" if message.environment else "left"
        return self._lose(node, ev.NodeLost(t=now, node=node, how=how, silent_s=0.0, evidence=message.why))

    def may_be_taken(self, nodes: Iterable[str], now: float) -> None:
        """Their agents were told to end while the job goes on. If these nodes are lost soon, that is why."""
        self._taken_until.update(dict.fromkeys(nodes, now + TAKEN_WITHIN_S))

    @property
    def interval_s(self) -> float:
        """Seconds until the next tick. A node whose connection closed a moment ago is lost when its time is
        up, not a tick later."""
        if not self._broken:
            return STEADY_INTERVAL_S
        limits = (away.since + away.limit_s for name in self._broken if (away := self.nodes[name].away))
        return min(WATCH_INTERVAL_S, max(SOON_S, min(limits) - self.clock.now))

    def away(self) -> list[str]:
        """Return known nodes that are to connect and have time left for it."""
        return list(self._away)

    def _is_newest(self, node: str, connection: int) -> bool:
        watch = self.nodes.get(node)
        return watch is not None and watch.connection == connection

    def _put(self, node: str, watch: NodeWatch) -> None:
        self._drop(node)
        self.nodes[node] = watch
        if watch.away is None:
            self.here.add(node)
        else:
            self._away[node] = None

    def _drop(self, node: str) -> None:
        self.nodes.pop(node, None)
        self.here.discard(node)
        self._away.pop(node, None)
        self._broken.pop(node, None)
        self._abandoned.discard(node)
        self._lost_before.discard(node)

    def _give_time(self) -> None:
        """Give broken connections more time: one that broke a moment ago is no evidence against its node."""
        for name in list(self._broken):
            self.expect(name)

    # Heartbeats.

    def on_heartbeat(self, node: str, beat: Beat, now: float) -> list[Effect]:
        """A heartbeat arrived. Some of them are answered, so that the agent knows that the supervisor
        lives."""
        watch = self.nodes.get(node)
        if watch is None:
            return []
        watch.arrivals.beat(self.clock.at(now))
        self.reports.on_heartbeat(node, beat)
        if now < watch.answered_at + EARLY * self._lateness.answer_every_s:
            return []
        watch.answered_at = now
        sure = sum(at < self.known.until for at in watch.unsure)
        watch.heard, watch.unsure = watch.heard + sure, watch.unsure[sure:]
        heir = self._heirs.index(node) if node in self._heirs else None
        return [Answer(node, self._lateness.patience_s, watch.heard, self._state.epoch, heir)]

    def on_message(self, node: str, connection: int, now: float) -> None:
        """A message arrived that the agent keeps until it is acknowledged."""
        if self._is_newest(node, connection):
            self.nodes[node].unsure += (now,)

    def on_disk(self, disk: Disk, now: float) -> list[Effect]:
        self.known.on_time(disk, now)
        self._unfindable = disk.waits_s > STORAGE_LATE_S
        who = ""
        if disk.waits_s > STORAGE_HANGS_S:
            away = (name for name, watch in self.nodes.items() if watch.away and watch.away.how == "silent")
            who = some(list(away), NODES_TOLD)
        return [] if bool(who) is self._state.unfindable else [Record(ev.Unfindable(t=now, who=who))]

    def _wait_for_storage(self, counted_s: float) -> None:
        for watch in self.nodes.values():
            if watch.away is not None and watch.away.how == "silent":
                watch.away.since += counted_s
                watch.away.before_s += counted_s

    def on_time(self, now: float) -> list[Effect]:
        """Return the nodes that are lost by now."""
        before = self.clock.now
        late_s = self.clock.tick(now)
        counted_s = self.clock.now - before
        effects: list[Effect] = []
        if text := self._lateness.overslept(late_s, len(self.here)):
            effects.append(Record(ev.Noted(t=now, message=text)))
        is_late = counted_s > ON_TIME_S
        if is_late:
            self._was_late(late_s, counted_s)
        if self._unfindable:
            self._wait_for_storage(counted_s)
        if self.ending:
            return effects
        self._choose_heirs()
        self._look_for_the_last_supervisors()
        quiet = self._quiet()
        effects += self._listen(quiet)
        lost = {} if self.cut_off else self._beyond_limit(self._quiet() if effects else quiet, now)
        doubted, self._doubted = self._doubted, set(lost)
        for name, event in lost.items():
            if not is_late or name in doubted:
                effects += self._lose(name, event)
        return effects

    def _choose_heirs(self) -> None:
        """Choose again from time to time, because there may be thousands of nodes, and at once if an heir has
        left or there are too few. Spares come first, because their processors are idle."""
        now, here = self.clock.now, self.here
        enough = len(self._heirs) == HEIRS or len(here) == self._among
        if now < self._look_at and enough and all(name in here for name in self._heirs):
            return
        self._look_at, self._among = now + LOOK_EVERY_S, len(here)
        nodes = self._state.nodes
        able = (nodes[name] for name in here if name in nodes and name != self._state.supervised_on)
        chosen = heapq.nsmallest(HEIRS, able, key=lambda node: (node.role is not Role.SPARE, node.order))
        self._heirs = tuple(node.name for node in chosen)

    def silent(self, now: float) -> list[str]:
        """Return the nodes that would be lost if they were not about to leave anyway."""
        return list(self._beyond_limit(self._quiet(), now)) if self.ending else []

    def _was_late(self, seconds: float, counted_s: float) -> None:
        """Extend limits after a pause: no node could return meanwhile, although the clock counts a little of
        it."""
        if seconds >= LATE_SHARE * patience_s(self._heartbeat_s, len(self.here)):
            self._late_until = self.clock.now + LENIENT_S
            self._give_time()
        for name in self._broken:
            if away := self.nodes[name].away:
                most_s = RECONNECT_LIMIT_S + (self._many_limit_s() if away.many else 0.0)
                away.limit_s = max(away.limit_s, min(most_s, away.limit_s + counted_s))

    def _look_for_the_last_supervisors(self) -> None:
        """Set limits for the nodes of the last supervisors. Their agents, if they live, look for this
        supervisor just as the others do. While only this node's own agent is here, all others may still be
        with the last one."""
        if not self._abandoned or not self.here:
            return
        expected = self.nodes.keys() - self._abandoned - self._lost_before
        others = expected - {self._state.supervised_on}
        if others and others.isdisjoint(self.here):
            return
        nearly_all = len(self.here) >= NEARLY_ALL * len(expected)
        for name in self._abandoned:
            if away := self.nodes[name].away:
                soon_s = self.clock.now - away.since + AFTER_OTHERS_S
                limit_s = soon_s if nearly_all else rejoin_limit_s(len(self._state.nodes), ABANDONED_LIMIT_S)
                away.limit_s = min(away.limit_s, limit_s)
        if nearly_all:
            self._abandoned.clear()

    @property
    def cut_off(self) -> bool:
        """No node is heard and another supervisor may be about to take over, so nothing may be decided."""
        since = self._isolated_since
        return since is not None and self.clock.now < since + ISOLATION_LIMIT_S

    def _listen(self, quiet: dict[str, NodeWatch]) -> list[Effect]:
        """Stop the pulse while no agent is heard."""
        before, is_isolated = self._isolated_since, self._is_isolated(quiet)
        if is_isolated is (before is not None):
            return []
        self._isolated_since = self.clock.now if is_isolated else None
        if not is_isolated:
            self._hear_again(quiet)
        return [Pulse(on=not is_isolated)]

    def _hear_again(self, quiet: dict[str, NodeWatch]) -> None:
        for name, watch in quiet.items():
            if watch.away is None:
                watch.arrivals.last = self.clock.now
            else:
                self.expect(name)

    def _beyond_limit(self, quiet: dict[str, NodeWatch], now: float) -> dict[str, ev.NodeLost]:
        lost = {}
        for name, watch in quiet.items():
            away = watch.away or Absence(watch.arrivals.last, 0.0, "silent")
            silent_s, limit_s = self.clock.now - away.since, self._limit_s(name, watch)
            if silent_s > limit_s:
                lost[name] = ev.NodeLost(
                    t=now, node=name, how=away.how, silent_s=away.before_s + silent_s,
                    limit_s=away.before_s + limit_s,
                )  # fmt: skip
        return lost

    def _limit_s(self, name: str, watch: NodeWatch) -> float:
        """The limit for a node. A starting node has nothing to lose yet, and its imports alone may keep a
        busy machine from sending heartbeats for seconds."""
        own_s = watch.arrivals.limit_s(self._fixed_s)
        more_s = max(0.0, LIMIT_MAX_S - own_s) if self._state.only_starts(name) else 0.0
        if watch.away is None:
            return own_s + more_s
        return watch.away.limit_s + (0.0 if watch.away.how == "closed" else more_s)

    @property
    def _least_s(self) -> float:
        """The silence that means nothing for a node, whatever its limit."""
        return ISOLATED * (BEATS * self._heartbeat_s if self._fixed_s is None else self._fixed_s)

    def _quiet(self) -> dict[str, NodeWatch]:
        """Nodes that may have been silent for too long; with thousands of nodes, their own limits are not
        computed at every look."""
        now, least_s, away = self.clock.now, self._least_s, {name: self.nodes[name] for name in self._away}
        if now < self._quiet_at:
            return away
        heard = {name: watch.arrivals.last for name, watch in self.nodes.items() if watch.away is None}
        self._quiet_at = min(heard.values(), default=now) + least_s
        return away | {name: self.nodes[name] for name, last in heard.items() if now - last > least_s}

    def _is_isolated(self, quiet: dict[str, NodeWatch]) -> bool:
        """Whether this node hears none of at least two others: then it is the one that is cut off."""
        expected, own = self.nodes.keys() - self._lost_before, self._state.supervised_on
        others = [watch for name, watch in quiet.items() if name != own and name in expected]
        if len(others) < max(2, len(expected) - (own in expected)):
            return False
        limit_s = max(watch.arrivals.limit_s(self._fixed_s) for watch in others)
        return all(self._is_unheard(watch, ISOLATED * limit_s) for watch in others)

    def _is_unheard(self, watch: NodeWatch, limit_s: float) -> bool:
        """Whether a node has been silent this long. A node that is to connect is not late before its time is
        nearly up, and a closed connection was closed by somebody."""
        if watch.away is None:
            return self.clock.now - watch.arrivals.last > limit_s
        own_s = watch.arrivals.limit_s(self._fixed_s)
        return (
            watch.away.how != "closed" or watch.away.many
        ) and self.clock.now - watch.away.since > watch.away.limit_s - own_s + limit_s

    def _lose(self, node: str, event: ev.NodeLost) -> list[Effect]:
        self._drop(node)
        self.reports.forget(node)
        if event.t <= self._taken_until.pop(node, -math.inf):
            event = structs.replace(event, how="taken")
        return [Disconnect(node), Record(event)]

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        for name, watch in self.nodes.items():
            assert (watch.connection == 0) is (watch.away is not None), f"{name} is connected and away"
        here = {name for name, watch in self.nodes.items() if watch.away is None}
        assert here == self.here, "other nodes are connected than it says"
        assert set(self._away) == self.nodes.keys() - here, "other nodes are away than it says"
        silent = [name for name in here if self.clock.now - self.nodes[name].arrivals.last > self._least_s]
        assert not silent or self.clock.now >= self._quiet_at, f"nobody looks for {silent}, who are silent"
        closed = {name for name, watch in self.nodes.items() if watch.away and watch.away.how == "closed"}
        assert closed == set(self._broken), "other connections broke a moment ago than the nodes say"
        assert self.reports.nodes == set(self.nodes), "nodes that report are not those that are watched"
