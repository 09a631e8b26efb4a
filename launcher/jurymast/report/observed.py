"""How a job is doing that is only observed (`jurymast submit --observe`), by Slurm's word: nothing of
jurymast runs in it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster import accounts
from jurymast.errors import ClusterUnavailableError, RunCancelledError, RunFailedError, RunNotFoundError
from jurymast.jobs import ENDED_STATES
from jurymast.report.liveness import Liveness, look, slurm_jobs
from jurymast.report.status import StatusWatcher, read_status
from jurymast.report.text import Block, Line
from jurymast.rundir import RunDirectory, write_json

INDENT = 11
_WORDS = {"COMPLETED": "succeeded", "CANCELLED": "cancelled"}
_CODES = {"succeeded": 0, "cancelled": RunCancelledError.exit_code, "failed": RunFailedError.exit_code}
ENDED = "ended"  # nobody knows how any more


def observed_state(directory: RunDirectory, life: Liveness) -> str:
    """The state of an observed job as a run's. Slurm's accounts are asked where its controller has forgotten
    the job; its end is noted, so that `ps` need not ask for ever."""
    if life.kind != "gone":
        return "running" if life.kind == "alive" else "queued"
    state = life.detail
    if state not in ENDED_STATES:
        try:
            state = accounts.job(life.job)[0].state
        except (ClusterUnavailableError, RunNotFoundError):
            return ENDED
    word = _WORDS.get(state, "failed")
    if foreign.owns(directory.root) and not foreign.exists(directory.outcome_file):
        with contextlib.suppress(OSError):
            write_json(directory.outcome_file, {"state": word, "exit_code": _CODES[word]})
    return word


def output_files(directory: RunDirectory) -> list[Path]:
    """Where an observed job prints, or each task of an array. Slurm's accounts are asked where its controller
    has forgotten the job. Raises ClusterUnavailableError, RunNotFoundError."""
    from jurymast.report.estimate import output_of

    jobs = slurm_jobs(directory, read_status(directory).state)
    if not jobs:
        raise RunNotFoundError(f"no job is recorded for {directory.root.name}")
    if now := accounts.outputs_now(jobs[-1][0]):
        return [Path(told) for told in now]
    return [path for job in accounts.job(*jobs[-1]) if (path := output_of(job)) is not None]


def observed_view(watcher: StatusWatcher) -> dict[str, Any]:
    """The object of `jurymast status`: all that Slurm does not tell is as of a run that has not begun."""
    life = look(watcher.directory, watcher.state)
    word = observed_state(watcher.directory, life)
    return {
        **watcher.view(life), "observed": True, "state": word, "exit_code": _CODES.get(word), "warnings": [],
        "end_reason": life.detail if life.kind == "gone" else "",
        "next": life.detail if life.kind == "pending" else "",
    }  # fmt: skip


def observed_blocks(view: Mapping[str, Any]) -> list[Block]:
    detail = f": {view['next'] or view['end_reason']}" if view["next"] or view["end_reason"] else ""
    return [
        Line(f"run        {view['run']}", "bold"),
        Line(f"state      {view['state']}{detail}", indent=INDENT),
        Line(f"job        {', '.join(view['slurm_jobs']) or 'none'}"),
        Line(f"directory  {view['directory']}"),
        Line(
            f"observed   nothing of jurymast runs in it; jurymast report {view['run']} estimates where its "
            "time goes, and what jurymast would have saved",
            indent=INDENT,
        ),
    ]
