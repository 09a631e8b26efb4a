"""Scripted runs without a cluster: events as the supervisor would feed them, answered as agents would.

A `Story` drives `core.run.machine.step` with a clock of its own, checks the state's invariants after every
event, and can write the journal that a real supervisor would have written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from jurymast.core.judges import explained
from jurymast.core.run.machine import step
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Dismiss, Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.state.evidence import SparedRank
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.settings import RunPlan, Settings
from jurymast.journal import JournalWriter, initial_state
from jurymast.rundir import RunDirectory

START = 1_795_000_000.0
Kind = TypeVar("Kind", bound=Instruction)


class Story:
    """One run; `t` is the supervisor's clock, in seconds. Nodes are called n1, n2, ... A run that goes on is
    seen at the present by commands: for these it is `began_at` a short time ago."""

    def __init__(
        self, *, active: int = 2, spares: int = 1, ranks_per_node: int = 1, settings: Settings | None = None,
        requeue: bool = True, gpus: int = 0, checked: bool = True, began_at: float = START,
    ) -> None:  # fmt: skip
        self.checked = checked  # not for thousands of nodes: each event would look at all of them
        self.gpus = gpus  # a node's, as its agent tells; with some, nodes are tested unless settings say no
        self.plan = RunPlan(
            run="20261117-100000-gpt-abcd", name="gpt", directory="", cluster="slurm", active=active,
            spares=spares, ranks_per_node=ranks_per_node, script="train.py", arguments=("--lr", "1"),
            requeue=requeue, submitted_at=began_at, policy_hash="5eed" * 8, settings=settings or Settings(),
        )  # fmt: skip
        self.t = began_at
        self.state: RunState = initial_state(self.plan)
        self.events: list[ev.Event] = []
        self.decisions: list[tuple[float, Instruction]] = []
        self.entries: list[ev.Event | tuple[float, Instruction]] = []
        self.listeners: list[Callable[[ev.Event], None]] = []

    # The supervisor's side.

    def feed(self, event: ev.Event) -> list[Instruction]:
        instructions = step(self.state, event)
        if self.checked:
            self.state.check()
        self.events.append(event)
        self.entries += [event, *((self.state.now, i) for i in instructions)]
        self.decisions += [(self.state.now, instruction) for instruction in instructions]
        for listener in self.listeners:
            listener(event)
        return instructions

    def wait(self, seconds: float) -> list[Instruction]:
        """Time passes; then the supervisor ticks."""
        self.t += seconds
        return self.feed(ev.Tick(t=self.t))

    def last(self, kind: type[Kind]) -> Kind:
        """The newest decision of this kind."""
        return next(i for _, i in reversed(self.decisions) if isinstance(i, kind))

    @property
    def incident(self) -> Incident:
        return self.state.incidents[-1]

    # The cluster's and the agents' side.

    def submitted(self) -> Story:
        self.feed(
            ev.RunStarted(
                t=self.t, run=self.plan.run, name=self.plan.name, active=self.plan.active,
                spares=self.plan.spares, ranks_per_node=self.plan.ranks_per_node, script=self.plan.script,
                submitted_at=self.plan.submitted_at, policy_hash=self.plan.policy_hash, version="0.1.0",
            )
        )  # fmt: skip
        return self

    def allocated(
        self, *nodes: str, job: str = "17", restarts: int = 0, queue_s: float = 10.0, before: str = "",
        late_s: float = 0.0,
    ) -> Story:  # fmt: skip
        """The queue lets the job start, whose supervisor begins after `late_s`; its nodes join and are ready,
        all within 3 s."""
        eligible_at = self.t
        self.t += queue_s
        began_at = self.t if late_s else 0.0
        self.t += late_s
        if not self.events:
            self.submitted()
        names = nodes or tuple(f"n{i + 1}" for i in range(self.plan.nodes))
        self.feed(ev.SupervisorStarted(t=self.t, epoch=self.state.epoch + 1, node=names[0]))
        self.feed(
            ev.AllocationStarted(
                t=self.t, slurm_job=job, restarts=restarts, nodes=names, host=names[0],
                eligible_at=eligible_at, before=before, began_at=began_at,
            )
        )  # fmt: skip
        self.join(*names)
        return self

    def join(self, *names: str) -> None:
        for name in names:
            self.t += 1.0 / len(names)
            self.feed(
                ev.NodeJoined(
                    t=self.t, node=name, address=f"10.0.0.{name[1:]}", incarnation=f"{name}@{self.t}",
                    gpus=self.gpus,
                )
            )  # fmt: skip
        for name in names:
            self.t += 2.0 / len(names)
            self.feed(ev.NodeReady(t=self.t, node=name, store_port=29000))

    def told(self) -> Story:
        """The supervisor has told the agents of the newest launch."""
        self.feed(
            ev.RestorePlanned(
                t=self.t, attempt=self.state.attempt, step=0, tier="", expected_s=0.0, tiers={}, reason=""
            )
        )  # fmt: skip
        return self

    def ranks_up(self) -> Story:
        """The agents carry the newest launch out."""
        assert self.state.phase is Phase.LAUNCHING, self.state.phase
        self.t += 0.5
        for name in self.state.placement:
            self.feed(ev.WorkersStarted(t=self.t, node=name, attempt=self.state.attempt, pids=(1,)))
        return self

    def restored(self, at_step: int, seconds: float = 0.5, tier: str = "shared", why: str = "") -> Story:
        self.t += seconds + 0.2
        self.feed(
            ev.Restored(
                t=self.t, attempt=self.state.attempt, step=at_step, tier=tier if at_step else "",
                seconds=seconds, size_bytes=4_000_000 if at_step else 0, why=why,
            )
        )  # fmt: skip
        return self

    def stepped(self, done: int, step_s: float = 0.5, *, absolute: bool = True) -> Story:
        """Ranks reach step `done`; the supervisor hears of it a little later."""
        restored = self.state.incidents[-1].step_restored if self.state.incidents else None
        before = self.state.step or restored or 0
        stepped_at = self.t + max(1, done - before) * step_s
        self.t = stepped_at + 0.05
        self.feed(
            ev.Progress(
                t=self.t, attempt=self.state.attempt, step=done, stepped_at=stepped_at, absolute=absolute,
                step_s=step_s,
            )
        )  # fmt: skip
        return self

    def saved(
        self, at_step: int, *, ok: bool = True, stall_s: float = 0.4, error: str = "", tier: str = "shared"
    ) -> Story:
        self.t += stall_s
        self.feed(
            ev.Saved(
                t=self.t, attempt=self.state.attempt, step=at_step, tier=tier, ok=ok, stall_s=stall_s,
                size_bytes=4_000_000 if ok else 0, error=error,
            )
        )  # fmt: skip
        return self

    def running(self, done: int = 10) -> Story:
        """From the queue to `done` steps."""
        return self.allocated().ranks_up().restored(0).stepped(1).stepped(done)

    def lost(self, node: str, silent_s: float = 1.6) -> list[Instruction]:
        self.t += silent_s
        return self.feed(ev.NodeLost(t=self.t, node=node, how="silent", silent_s=silent_s, limit_s=1.5))

    def failed(
        self, rank: int, exit_code: int = 1, error: str = "ValueError", message: str = "bad", trace: str = ""
    ) -> list[Instruction]:
        self.t += 0.2
        node = self.state.placement[rank // self.plan.ranks_per_node]
        return self.feed(
            ev.WorkerFailed(
                t=self.t, node=node, attempt=self.state.attempt, rank=rank, exit_code=exit_code,
                error=error if exit_code > 0 else "", message=message if exit_code > 0 else "",
                traceback=trace or (f"Traceback\n  {error}: {message}\n" if exit_code > 0 else ""),
            )
        )  # fmt: skip

    def hung(self, ranks: tuple[int, ...] = (), node: str = "", silent_s: float = 12.0) -> list[Instruction]:
        self.t += silent_s
        return self.feed(
            ev.RanksHung(
                t=self.t, attempt=self.state.attempt, ranks=ranks, node=node, silent_s=silent_s, limit_s=8.0,
                evidence="no rank stepped",
            )
        )  # fmt: skip

    def asked(self, what: str, node: str = "") -> list[Instruction]:
        self.t += 0.1
        return self.feed(ev.Asked(t=self.t, what=what, by="ada", node=node))

    def stopped(self, *, explained_yet: bool = True, spared: Mapping[int, int] | None = None) -> Story:
        """Every node that was told to stop its ranks answers. `explained_yet`: if a node was lost, no next
        agent on it tells in time that only its agent was killed. `spared`: these ranks live on, with the
        state after these steps."""
        self.t += 0.3
        count = self.plan.ranks_per_node
        for name in self.last(StopWorkers).nodes:
            if self.state.phase is Phase.STOPPING:
                first = self.state.places[name] * count
                kept = (SparedRank(rank - first, 1, step) for rank, step in (spared or {}).items()
                        if first <= rank < first + count)  # fmt: skip
                self.feed(
                    ev.WorkersStopped(
                        t=self.t, node=name, attempt=self.state.attempt, store_port=29001, spared=tuple(kept)
                    )
                )
        self.explain(explained_yet)
        return self

    def explain(self, explained_yet: bool) -> None:
        """Wait until no next agent of a lost node is awaited any more, if one is."""
        if explained_yet and explained.awaited(self.state):
            self.wait(explained.LIMIT_S)

    def backed_off(self) -> Story:
        """Waits as long as the state machine wants to wait before the next launch."""
        while self.state.phase is Phase.WAITING and self.state.not_before > self.t:
            self.wait(0.5)
        return self

    def recovered(self, at_step: int, done: int) -> Story:
        """From stopped ranks to `done` steps, restored at `at_step`."""
        return self.backed_off().ranks_up().restored(at_step).stepped(at_step + 1).stepped(done)

    def finished(self) -> Story:
        self.t += 0.2
        for name in self.state.placement:
            self.feed(ev.NodeFinished(t=self.t, node=name, attempt=self.state.attempt))
        return self

    # The journal.

    def write(self, root: Path, *, gather_s: float = math.inf) -> RunDirectory:
        """A run directory with this story's journal, one file an epoch. `gather_s`: what may be written
        together happens within so long by the story's clock."""
        directory = RunDirectory(root)
        directory.create()
        values = {**self.plan.to_json(), "directory": str(root)}
        directory.save_plan(RunPlan.from_json(values))
        (directory.submission / "jobs").mkdir()
        for job in self.state.slurm_jobs:
            (directory.submission / "jobs" / job).touch()
        writer: JournalWriter | None = None
        early: list[ev.Event] = []
        since = self.plan.submitted_at
        for entry in self.entries:
            if isinstance(entry, ev.SupervisorStarted):
                if writer is not None:
                    writer.close()
                (directory.epochs / f"{entry.epoch:06d}.claim").touch()
                writer = JournalWriter(directory.journal, entry.epoch)
                for event in early:
                    writer.event(event)
                early = []
            if writer is None:
                assert isinstance(entry, ev.Event)
                early.append(entry)
            elif isinstance(entry, ev.Event):
                if entry.t > since + gather_s:
                    since = entry.t
                    assert writer.flush(10.0)
                writer.event(entry)
            else:
                writer.decision(*entry)
        if writer is not None:
            writer.close()
        return directory


__all__ = ["START", "Dismiss", "Finish", "Launch", "Requeue", "StopWorkers", "Story"]
