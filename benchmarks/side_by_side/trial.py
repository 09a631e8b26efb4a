"""One trial: a training is started, hurt in one way, and watched until its first new step, or a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.side_by_side.steps import Recovery, Stamp, StepFiles, done_by_all, measure
from benchmarks.side_by_side.systems import ACTIVE, STEP_S, Place, Started, System, own_story, said
from jurymast.jobs import ENDED_STATES
from testcluster import Cluster, ClusterError
from testcluster.faults import Fault

START_LIMIT_S = 90.0
POLL_S = 0.05
# Asking Slurm costs processor time: not while a quick recovery is under way, and seldom after that.
ASK_AFTER_S = 10.0
ASK_EVERY_S = 5.0
# jurymast's own account follows the step by a heartbeat.
STORY_LIMIT_S = 2.0

Hurt = Callable[[Cluster, Stamp], Fault]


def kill_rank(cluster: Cluster, victim: Stamp) -> Fault:
    return cluster.fault("kill", victim.host, pid=victim.pid, signal="KILL")


def stop_rank(cluster: Cluster, victim: Stamp) -> Fault:
    return cluster.fault("kill", victim.host, pid=victim.pid, signal="STOP")


def crash_node(cluster: Cluster, victim: Stamp) -> Fault:
    return cluster.fault("crash", victim.host)


def cut_power(cluster: Cluster, victim: Stamp) -> Fault:
    return cluster.fault("power-loss", victim.host)


@dataclass(frozen=True)
class Case:
    """A way to hurt a training. `target_s`: within which jurymast is to make a new step."""

    name: str
    hurt: Hurt
    spares: int = 1
    target_s: float | None = None
    deadline_s: float = 180.0


CASES = [
    Case("worker_kill", kill_rank, target_s=1.0),
    Case("node_crash", crash_node, target_s=2.0),
    Case("power_loss", cut_power, target_s=3.0),
    Case("frozen_rank", stop_rank),
    # Slurm's own way takes 150 s here: SlurmdTimeout, the end of the job, 121 s of delay, the start.
    Case("requeue", cut_power, spares=0, target_s=10.0, deadline_s=240.0),
    Case("crash_no_spare", crash_node, spares=0, deadline_s=240.0),
]


@dataclass(frozen=True)
class Plan:
    """One trial to do. `settle_s`: how long the training runs before it is hurt.

    Each repeat waits for a step more, and so meets the checkpoint's cadence at another point.
    """

    case: Case
    system: System
    repeat: int
    settle_s: float
    deadline_s: float

    @property
    def name(self) -> str:
        return f"{self.case.name}-{self.system.key}-{self.repeat}"


def run_trial(cluster: Cluster, plan: Plan) -> dict[str, Any]:
    """The sample of one trial; `seconds` is None when it did not recover, and `note` says what it did."""
    folder = cluster.shared / "bench" / plan.name
    place = Place(folder, plan.case.spares)
    # A benchmark that was interrupted has left its trial's stamps.
    cluster.login(["rm", "-rf", str(folder)])
    cluster.login(["mkdir", "-p", str(place.record)])
    sample: dict[str, Any] = {"repeat": plan.repeat, "seconds": None, "deadline_s": plan.deadline_s}
    try:
        return {**sample, **_measured(cluster, plan, place)}
    except ClusterError as error:
        return {**sample, "note": f"the trial broke: {error}"}
    finally:
        clear(cluster, place)


def _measured(cluster: Cluster, plan: Plan, place: Place) -> dict[str, Any]:
    started = plan.system.submit(cluster, place)
    files = StepFiles(place.record, ACTIVE)
    if not _settle(files, plan):
        return {"note": f"did not start within {START_LIMIT_S:g} s; {_now(cluster, started)}"}
    victim = _victim(files.poll(), _batch_host(cluster, started))
    fault = plan.case.hurt(cluster, victim)
    recovery, note = _watch(cluster, started, files, fault, plan.deadline_s)
    sample = {**_figures(recovery, fault), "victim": victim.host, "rank": victim.rank}
    story = _story(started)
    return {**sample, **({"note": note} if note else {}), **({"story": story} if story else {})}


def _settle(files: StepFiles, plan: Plan) -> bool:
    """Wait until the training has gone on long enough, every spare with it; False when it has not started."""
    end = time.monotonic() + START_LIMIT_S
    wanted = round(plan.settle_s / STEP_S) + plan.repeat
    while time.monotonic() < end:
        done = done_by_all(files.poll(), ACTIVE)
        if done is not None and done[0] >= wanted:
            return True
        time.sleep(POLL_S / 5)
    return False


def _batch_host(cluster: Cluster, started: Started) -> str:
    return cluster.job(started.job).get("BatchHost", "")


def _victim(stamps: list[Stamp], batch_host: str) -> Stamp:
    """The newest stamp of the rank to hurt: the lowest whose loss every launcher here could survive.

    Not rank 0, whose node the ranks meet on; not a rank on the batch host, where torchrun and NVRx keep
    their store: they lose the run with it.
    """
    newest = {stamp.rank: stamp for stamp in sorted(stamps, key=lambda stamp: stamp.time)}
    hosts = {newest[0].host, batch_host}
    return next(newest[rank] for rank in sorted(newest) if newest[rank].host not in hosts)


def _watch(
    cluster: Cluster, started: Started, files: StepFiles, fault: Fault, deadline_s: float
) -> tuple[Recovery | None, str]:
    """Until the first new step, the end of the job, or the deadline; the note says which of the latter."""
    end = fault.time + deadline_s
    ask_at = fault.time + ASK_AFTER_S
    ended = 0
    while True:
        recovery = measure(files.poll(), ACTIVE, fault.time)
        if recovery is not None and recovery.new_at is not None:
            return recovery, ""
        now = time.time()
        if now >= end:
            return recovery, f"no new step within {deadline_s:g} s; {_now(cluster, started)}"
        if now >= ask_at:
            ask_at = now + ASK_EVERY_S
            # Twice: a job that is requeued passes through such a state.
            ended = ended + 1 if cluster.job(started.job)["JobState"] in ENDED_STATES else 0
            if ended == 2:
                return recovery, f"the job ended {now - fault.time:.0f} s later; {_now(cluster, started)}"
        time.sleep(POLL_S)


def _now(cluster: Cluster, started: Started) -> str:
    return f"job {cluster.job(started.job)['JobState']}, last said: {said(started.logs) or 'nothing'}"


def _figures(recovery: Recovery | None, fault: Fault) -> dict[str, Any]:
    """The raw times, so that others can check the sum."""
    if recovery is None:
        return {"fault_at": fault.time}
    return {
        "seconds": None if recovery.seconds is None else round(recovery.seconds, 4),
        "last_step": recovery.last_step,
        "last_at": recovery.last_at,
        "fault_at": fault.time,
        "reached": recovery.reached,
        "resumed_at_step": recovery.resumed_at_step,
        "new_step": recovery.new_step,
        "new_at": recovery.new_at,
    }


def _story(started: Started) -> dict[str, Any] | None:
    end = time.monotonic() + STORY_LIMIT_S
    while True:
        story = own_story(started)
        if story is None or story["recovered"] or time.monotonic() > end:
            return story
        time.sleep(POLL_S)


def clear(cluster: Cluster, place: Place) -> None:
    """End the job and everything it left, mend the nodes, remove the files."""
    cluster.repair_all()
    left = cluster.leftovers()
    if left:
        raise RuntimeError(f"left after the repair: {'; '.join(left)}")
    cluster.login(["rm", "-rf", str(place.folder)], check=False)
