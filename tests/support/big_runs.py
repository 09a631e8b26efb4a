"""Run directories of thousands of nodes, as a supervisor and its ranks would have left them: a journal of
some hours with a dozen incidents, and the ranks' logs. Nothing runs; the state machine decides as always.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from jurymast.cluster.allocation import Allocation
from jurymast.core.state import events as ev
from jurymast.core.state.effects import StopWorkers, TestNodes
from jurymast.core.state.run import Phase
from jurymast.rundir import RunDirectory, make_folder
from jurymast.wire import endpoint
from support.stories import START, Story

RANKS = 8
NODES_A_SPARE = 64
STEP_S = 2.0
SAVE_EVERY_S = 120.0
SHARED_EVERY = 10  # saves
SETTLE_S = 30.0
IMAGE_BYTES = 10**10
# One after the other, evenly over the hours.
INCIDENTS = (
    "power", "script", "crash", "power", "hang", "gpu", "storm", "power", "asked", "gpu", "crash", "power",
)  # fmt: skip
TRACEBACK = "Traceback (most recent call last):\n" + "".join(
    f'  File "/home/ada/model_{depth}.py", line {70 + depth}, in forward\n    x = self.layer_{depth}(x)\n'
    for depth in range(12)
)
RESET = "[..] Connection closed by peer [10.0.0.1]:41931. This may indicate that a remote process died."
LINE = "step {step:>6}  loss 2.{step:04d}  tokens/s 11873  memory 71.3 GB\n"


class BigRun(Story):
    """`nodes` active ones and a spare for each 64; named node00001 and so on."""

    def __init__(self, nodes: int) -> None:
        super().__init__(
            active=nodes, spares=max(12, nodes // NODES_A_SPARE), ranks_per_node=RANKS, gpus=RANKS,
            checked=False,
        )  # fmt: skip
        self.names = tuple(f"node{number:05d}" for number in range(1, self.plan.nodes + 1))
        self._victim = 5  # index of the next

    def train(self, hours: float) -> BigRun:
        """From the queue through all incidents; still training at the end."""
        self._started()
        each_s = hours * 3600.0 / (len(INCIDENTS) + 1)
        for kind in INCIDENTS:
            self._steps(self.t + each_s)
            getattr(self, f"_{kind}")()
            self.stopped()
            self.backed_off()
            self._launched(self.state.saved_step or 0)
        self._steps(self.t + each_s)
        return self

    # What is usual.

    def _started(self) -> None:
        self.submitted()
        self.t += 60.0
        host = self.names[-1]
        self.feed(ev.SupervisorStarted(t=self.t, epoch=1, node=host))
        self.feed(
            ev.AllocationStarted(
                t=self.t, slurm_job="17", restarts=0, nodes=self.names, host=host, eligible_at=self.t - 50.0
            )
        )
        for number, name in enumerate(self.names):
            self.t += 5.0 / len(self.names)
            self.feed(
                ev.NodeJoined(
                    t=self.t, node=name, address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
                    incarnation=f"{number:016x}", pid=40_000 + number, gpus=RANKS,
                    boot_id=f"7b2a94c0-2f0e-4a3c-9d55-{number:012x}",
                )
            )  # fmt: skip
        for name in self.names:
            self.t += 5.0 / len(self.names)
            self.feed(ev.NodeReady(t=self.t, node=name, store_port=29_000))
        tested = [i for _, i in self.decisions if isinstance(i, TestNodes)]
        for name in tested[-1].nodes if tested else ():
            self.feed(
                ev.NodeTested(
                    t=self.t, node=name, verdict="ok", slowness=1.013, seconds=11.4, partner=self.names[0],
                    message="1.01 times the median of all nodes at worst (all-reduce within the node)",
                )
            )  # fmt: skip
        self._launched(0)

    def _launched(self, at_step: int) -> None:
        state, attempt = self.state, self.state.attempt
        assert state.phase is Phase.LAUNCHING, state.phase
        world = RANKS * len(state.placement)
        self.feed(
            ev.RestorePlanned(
                t=self.t, attempt=attempt, step=at_step, tier="memory" if at_step else "", expected_s=0.4,
                tiers={"memory": world * IMAGE_BYTES, "peer": RANKS * IMAGE_BYTES} if at_step else {},
                reason=f"step {at_step} is the newest that all ranks have",
            )
        )  # fmt: skip
        self.t += 3.0
        for number, name in enumerate(state.placement):
            self.t += 2.0 / len(state.placement)
            pids = tuple(range(50_000 + number, 50_000 + number + RANKS))
            self.feed(ev.WorkersStarted(t=self.t, node=name, attempt=attempt, pids=pids))
        self.t += 10.0
        self.feed(
            ev.Restored(
                t=self.t, attempt=attempt, step=at_step, tier="memory" if at_step else "", seconds=0.4,
                size_bytes=world * IMAGE_BYTES if at_step else 0,
            )
        )  # fmt: skip
        self.feed(
            ev.CadenceSet(
                t=self.t, attempt=attempt, number=1, from_step=at_step, first_step=at_step + 60,
                every_steps=60, reason="failures every 10 min, a save costs 0.3 s", step_s=STEP_S,
                interval_s=SAVE_EVERY_S, stall_s=0.3, copy_s=11.0, slowdown=0.01, mtbf_s=1800.0,
            )
        )  # fmt: skip
        self.stepped(at_step + 1, STEP_S)

    def _steps(self, until: float) -> None:
        saved_at = self.t
        while self.t < until:
            age_s = self.t - self.state.submitted_at
            self.stepped(self.state.step + max(1, round(min(30.0, max(2.0, age_s / 500)) / STEP_S)), STEP_S)
            if self.t >= saved_at + SAVE_EVERY_S:
                saved_at = self.t
                self._saved(self.state.step)

    def _saved(self, step: int) -> None:
        size = RANKS * self.state.active * IMAGE_BYTES
        tiers = ["memory", "peer"]
        if round((self.t - START) / SAVE_EVERY_S) % SHARED_EVERY == 0:
            tiers.append("shared")
        for tier in tiers:
            self.feed(
                ev.Saved(
                    t=self.t, attempt=self.state.attempt, step=step, tier=tier, ok=True, size_bytes=size,
                    stall_s=0.3 if tier == "memory" else 0.0, copied=tier != "memory", seconds=11.0,
                )
            )  # fmt: skip

    # What is not.

    def _next(self) -> str:
        self._victim += 7
        return self.state.placement[self._victim % len(self.state.placement)]

    def _power(self) -> None:
        self.lost(self._next())

    def _crash(self) -> None:
        self.t += 0.3
        self.feed(ev.NodeLost(t=self.t, node=self._next(), how="closed", silent_s=0.25))

    def _script(self) -> None:
        self.failed(RANKS * self._victim, trace=f"{TRACEBACK}ValueError: bad\n")

    def _storm(self) -> None:
        """One rank dies, and one of each other node finds its connection closed."""
        attempt, culprit = self.state.attempt, self._next()
        self.failed(RANKS * self.state.placement.index(culprit), exit_code=-11)
        for place, name in enumerate(self.state.placement):
            self.t += 1.0 / len(self.state.placement)
            self.feed(
                ev.WorkerFailed(
                    t=self.t, node=name, attempt=attempt, rank=RANKS * place + 1, exit_code=1,
                    error="RuntimeError", message=RESET, traceback=f"{TRACEBACK}RuntimeError: {RESET}\n",
                )
            )  # fmt: skip

    def _hang(self) -> None:
        attempt = self.state.attempt
        self.hung()
        folder = f"evidence/attempt-{attempt:04d}"
        for place, name in enumerate(self.state.placement):
            late = place == self._victim
            self.t += 0.5 / len(self.state.placement)
            ranks = tuple(range(RANKS * place, RANKS * (place + 1)))
            self.feed(
                ev.StacksTaken(
                    t=self.t, node=name, attempt=attempt, ranks=ranks, folder=folder,
                    kinds=("code" if late else "collective",) * RANKS,
                    places=("in tokenize at data.py:31" if late else "in all_reduce at train.py:57",) * RANKS,
                )
            )  # fmt: skip

    def _gpu(self) -> None:
        self.t += 1.0
        self.feed(
            ev.HealthFound(
                t=self.t, node=self._next(), probe="nvidia", code="xid-79", verdict="bad", kind="hardware",
                message="GPU has fallen off the bus", device="GPU 3", at=self.t - 0.5,
            )
        )  # fmt: skip

    def _asked(self) -> None:
        self.asked("restart")

    def stopped(self, *, explained_yet: bool = True, spared: Mapping[int, int] | None = None) -> Story:
        """Over half a second; nodes that were lost do not answer."""
        assert spared is None
        self.t += 0.3
        nodes = self.last(StopWorkers).nodes
        for name in nodes:
            self.t += 0.5 / len(nodes)
            if self.state.phase is Phase.STOPPING:
                self.feed(
                    ev.WorkersStopped(t=self.t, node=name, attempt=self.state.attempt, store_port=29_001)
                )
        self.explain(explained_yet)
        return self

    # The directory.

    def write(
        self, root: Path, *, gather_s: float = math.inf, log_attempts: int = 1, log_lines: int = 20
    ) -> RunDirectory:
        """With logs of all ranks of the newest attempts, so many lines each."""
        directory = super().write(root, gather_s=gather_s)
        Allocation("17", 0, self.names, self.names[-1], START).save(directory)
        place = endpoint.Endpoint(1, ("10.0.0.1",), 41_000, self.names[-1], "17.0", 1234)
        endpoint.announce(directory.epochs, place)
        directory.attempt_file.write_text(str(self.state.attempt))
        text = "".join(LINE.format(step=step) for step in range(log_lines)).encode()
        newest = self.state.attempt
        for attempt in range(max(1, newest - log_attempts + 1), newest + 1):
            for rank in range(RANKS * self.state.active):
                _write(directory.rank_log(attempt, rank), text)
        return directory


def _write(path: Path, data: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except FileNotFoundError:
        make_folder(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(descriptor, data)
    os.close(descriptor)
