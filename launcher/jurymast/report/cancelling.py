"""Ends a run for good, even if no supervisor is left to do it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from jurymast import foreign
from jurymast.errors import ClusterUnavailableError, OtherProtocolError
from jurymast.report.status import StatusWatcher, read_status
from jurymast.rundir import RunDirectory

if TYPE_CHECKING:
    import psutil

    from jurymast.wire.channel import Answered

END_LIMIT_S = 10.0
# Slurm waits for the same time after its SIGTERM, in seconds.
KILL_WAIT_S = 30.0
# A supervisor that does not answer may still learn of the end from Slurm, and record it.
LAST_WORD_S = 3.0


def cancel(directory: RunDirectory, by: str) -> str:
    """End the run: its ranks are stopped and its job leaves Slurm. Returns what was done, for people. Raises
    ClusterUnavailableError with Slurm's words."""
    name = directory.root.name
    watcher = read_status(directory)
    if watcher.plan.observed:
        how = _end_slurm(directory, watcher)
        return f"{name} is cancelled ({how})" if how else f"{name} has ended already"
    from jurymast.core.state.messages import Accepted

    # Until there is an outcome, a supervisor may still be there, waiting until the last checkpoint can be
    # written.
    over = watcher.state.ended and foreign.exists(directory.outcome_file)
    answer = None if over else _answer(directory, "cancel", by)
    if isinstance(answer, Accepted) and answer.gives_up:
        return f"{name} had ended already; it no longer waits for {answer.gives_up}"
    if watcher.state.ended:
        return f"{name} has ended already: {watcher.state.phase.value}"
    if isinstance(answer, Accepted):
        ended = _await_end(watcher, END_LIMIT_S)
        return f"{name} is cancelled" if ended else f"{name}: the supervisor is stopping it"
    local = foreign.exists(directory.submission / "local.json")
    how = _end_local(directory, by) if local else _end_slurm(directory, watcher)
    if not _await_end(watcher, LAST_WORD_S if how else 0.0):
        from jurymast.report.liveness import record_cancel

        record_cancel(directory, by=by)
    return f"{name} is cancelled" + (f" ({how})" if how else "")


def _answer(directory: RunDirectory, what: str, by: str) -> Answered | None:
    """The supervisor's answer; None also for one of another version: its job can be ended all the same."""
    from jurymast.wire.channel import ask

    with contextlib.suppress(OtherProtocolError):
        return ask(directory, what, by=by)
    return None


def _await_end(watcher: StatusWatcher, limit_s: float) -> bool:
    """Wait up to `limit_s` for the run's end in the journal; returns whether it has ended."""
    for _ in watcher.new_for(limit_s):
        pass
    return watcher.state.ended


def _end_local(directory: RunDirectory, by: str) -> str:
    """End the recorded batch process, but not another process that has its number now. If it does not end in
    time, and not for its last checkpoint, kill it with its children. Returns what was ended, or "" if nothing
    was left."""
    import psutil

    from jurymast.cluster.allocation import local_process
    from jurymast.jobs import await_ended

    process = local_process(directory)
    if process is None:
        return ""
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        return f"process {process.pid} ended"
    while not await_ended([process.pid], KILL_WAIT_S):
        if not _writes_its_last_checkpoint(directory, by):
            _kill_all(process)
            break
    return f"process {process.pid} ended"


def _kill_all(process: psutil.Process) -> None:
    """Kill a process with its descendants."""
    import psutil

    from jurymast.jobs import await_ended

    left = [process]
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended in the meantime
        left += process.children(recursive=True)
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    await_ended([one.pid for one in left], END_LIMIT_S)


def _writes_its_last_checkpoint(directory: RunDirectory, by: str) -> bool:
    """Whether the run's supervisor says so; it gives up by itself what makes no progress."""
    from jurymast.core.state.messages import Condition

    answer = _answer(directory, "how", by)
    return isinstance(answer, Condition) and bool(answer.waits)


def _end_slurm(directory: RunDirectory, watcher: StatusWatcher) -> str:
    """Run scancel for the newest job. Raises ClusterUnavailableError with Slurm's words."""
    from jurymast.jobs import alone, run_command
    from jurymast.report.liveness import slurm_jobs, slurm_state

    jobs = slurm_jobs(directory, watcher.state)
    if not jobs:
        raise ClusterUnavailableError(
            f"no Slurm job is recorded for {directory.root.name}, and no supervisor answers",
            hint=f"if squeue --me lists its job, end it with scancel; its logs are in {directory.submission}",
        )
    job, cluster = jobs[-1]
    if slurm_state(job, cluster).kind == "gone":
        return ""
    if job in watcher.state.slurm_jobs:  # else it may be an array, which means all its tasks
        job = alone(job, cluster)
    run_command(["scancel", *([f"--clusters={cluster}"] if cluster else []), job])
    return f"scancel {job}"
