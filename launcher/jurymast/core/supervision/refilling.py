"""Has Slurm bring a node in place of each that the run has lost, by a small job of its own: asks for it,
looks whether it starts, and ends it when its node is lost or nobody needs it. What the run leaves behind at
its end the batch process ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jurymast.core.run import refill
from jurymast.core.state import events as ev
from jurymast.core.state.effects import AskForNode, Effect, EndSmallJob, LookAtSmallJobs, Record
from jurymast.core.state.run import Node, Phase, Refill, Role, RunState

# Between two looks at small jobs that have not started, in seconds: while the run waits for one, and else.
LOOK_WAITING_S, LOOK_S = 1.0, 5.0
# A new time at which Slurm expects a small job is told if it differs by more than this, in seconds.
NEWS_S = 5.0


@dataclass(frozen=True)
class SmallJob:
    """What Slurm says of one: `node` is "" until it runs; `starts_at`: when Slurm expects that (Unix time),
    None if it does not say."""

    number: int
    job: str
    node: str = ""
    starts_at: float | None = None


class Refilling:
    """`now` is the supervisor's clock. One question to Slurm of each kind is open at a time."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._asking = 0  # the number of the small job that Slurm is being asked for
        self._looking: frozenset[int] | None = None  # those that Slurm had taken when a look began
        self._look_at = -math.inf
        self._looked = False  # before, an earlier supervisor may have asked for some
        self._ending: set[str] = set()  # jobs that Slurm was told to end, and may not have heard that

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        nodes = [one.node for one in self._state.refills.values() if one.node]
        assert len(set(nodes)) == len(nodes), "two small jobs have the same node"

    @property
    def _goes_on(self) -> bool:
        state = self._state
        over = state.ended or state.phase is Phase.REQUEUED or state.end_order is not None
        return state.may_refill and not over

    # ---- what is due

    def on_time(self, now: float) -> list[Effect]:
        if not self._goes_on:
            return []
        out = [effect for one in [*self._state.refills.values()] for effect in self._end_if_lost(one, now)]
        need = refill.lacking(self._state)
        if need < 0:
            out += self._end_newest(now)
        elif need > 0 and self._looked and not self._asking and refill.may_ask(self._state):
            out += self._ask(now)
        return [*out, *self._look(now)]

    def _ask(self, now: float) -> list[Effect]:
        number = self._asking = self._state.refills_asked + 1
        exclude = tuple(dict.fromkeys((*self._state.nodes, *self._state.excluded)))
        asked = ev.RefillAsked(t=now, number=number)
        return [Record(asked, flush=True), AskForNode(number, exclude)]

    def _end_if_lost(self, one: Refill, now: float) -> list[Effect]:
        node = self._state.nodes.get(one.node)
        if node is None or node.role is not Role.FAILED or node.may_return or not one.job:
            return []
        return self._end(one, f"{node.name}: {node.reason}", now)

    def _end_newest(self, now: float) -> list[Effect]:
        """Nodes that were lost have come back."""
        waiting = [one for one in refill.coming(self._state) if one.job]
        return self._end(waiting[-1], "no node is lacking any more", now, unneeded=True) if waiting else []

    def _end(self, one: Refill, why: str, now: float, *, unneeded: bool = False) -> list[Effect]:
        ended = ev.RefillEnded(t=now, number=one.number, why=why, unneeded=unneeded)
        return [Record(ended), self._end_job(one.job)]

    def _end_job(self, job: str) -> EndSmallJob:
        self._ending.add(job)
        return EndSmallJob(job)

    def _look(self, now: float) -> list[Effect]:
        waiting = not self._looked or self._ending or any(not self._has_joined(o) for o in self._refills())
        if self._looking is not None or not waiting or now < self._look_at:
            return []
        self._look_at = now + (LOOK_WAITING_S if self._state.phase is Phase.WAITING else LOOK_S)
        self._looking = frozenset(one.number for one in self._refills() if one.job)
        return [LookAtSmallJobs()]

    def _refills(self) -> list[Refill]:
        return [*self._state.refills.values()]

    def _has_joined(self, one: Refill) -> bool:
        node = self._node_of(one)
        return bool(one.job) and node is not None and bool(node.incarnation)

    def _node_of(self, one: Refill) -> Node | None:
        return self._state.nodes.get(one.node)

    # ---- answers

    def on_node_asked(self, number: int, told: SmallJob | None, why: str, now: float) -> list[Effect]:
        """Slurm has taken the small job, or not (`why`). One that has its node already comes from a pool."""
        self._asking = 0 if self._asking == number else self._asking
        if told is None:
            return [Record(ev.RefillRefused(t=now, number=number, why=why))]
        if number not in self._state.refills:  # of an allocation that is gone
            return [self._end_job(told.job)]
        self._look_at = min(self._look_at, now + LOOK_WAITING_S)
        out: list[Effect] = [Record(ev.RefillExpected(t=now, number=number, job=told.job))]
        if told.node:
            note = f"small job {number} has waited for the run in a pool"
            out.append(Record(ev.Noted(t=now, node=told.node, message=note)))
        return out + self._started(told, now)

    def _started(self, told: SmallJob, now: float) -> list[Effect]:
        known = self._state.refills.get(told.number)
        if not told.node or (known is not None and known.node):
            return []
        return [Record(ev.RefillStarted(t=now, number=told.number, node=told.node))]

    def on_small_jobs(self, jobs: Sequence[SmallJob] | None, now: float) -> list[Effect]:
        """Take in those of this run that wait or run; None: Slurm did not say."""
        looked, self._looking = self._looking, None
        if jobs is None or looked is None or not self._goes_on:
            return []
        self._looked = True
        self._ending &= {told.job for told in jobs}
        out = [effect for told in jobs for effect in self._found(told, now)]
        there = {told.number for told in jobs}
        for one in self._refills():
            if one.number in there or one.number == self._asking:
                continue
            if not one.job:
                why = "the supervisor that asked for it was lost, and Slurm has no such job"
                out.append(Record(ev.RefillRefused(t=now, number=one.number, why=why)))
            elif one.number in looked and not self._has_joined(one):
                why = f"small job {one.job} ended before its node joined"
                out.append(Record(ev.RefillEnded(t=now, number=one.number, why=why)))
        return out

    def _found(self, told: SmallJob, now: float) -> list[Effect]:
        known = self._state.refills.get(told.number)
        out: list[Effect] = []
        if known is None and told.number <= self._state.refills_asked:
            return [self._end_job(told.job)]  # of an earlier allocation, or not needed any more
        if known is None:  # an earlier supervisor could not write that it had asked for it
            out.append(Record(ev.RefillAsked(t=now, number=told.number, found=True)))
        before = known.starts_at if known is not None else None
        moved = told.starts_at is not None and abs(told.starts_at - (before or 0.0)) > NEWS_S
        if known is None or not known.job or (moved and not told.node):
            news = ev.RefillExpected(t=now, number=told.number, job=told.job, starts_at=told.starts_at)
            out.append(Record(news))
        return out + self._started(told, now)

    def on_agent_joins(self, number: int, node: str, now: float) -> list[Effect]:
        """The agent of small job `number` joins from `node`. It may have been ended meanwhile."""
        known, out = self._state.refills.get(number), list[Effect]()
        if known is None and number > self._state.refills_asked:
            out.append(Record(ev.RefillAsked(t=now, number=number, found=True)))
        elif node in self._state.nodes if known is None else known.node:
            return out
        return [*out, Record(ev.RefillStarted(t=now, number=number, node=node))]
