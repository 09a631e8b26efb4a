"""Makes the request of a submission of what a command line or a program asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jurymast.cluster import slurm
from jurymast.cluster.earlier import with_earlier
from jurymast.cluster.planning import OwnOptions, make_plan, signal_note, time_limit_s
from jurymast.cluster.sbatch import DONE_HERE, BatchScript, CommandLine, merged
from jurymast.core.judges.forecast import auto_spares
from jurymast.errors import UsageError
from jurymast.policy.resolve import Resolved


def make_request(
    asked: OwnOptions,
    line: CommandLine,
    policy: Resolved,
    script: BatchScript | None = None,
    *,
    observe: bool = False,
    shared_runs: bool = False,
    python: str = sys.executable,
    how: Mapping[str, Any] | None = None,
    setup: Sequence[str] = (),
) -> tuple[slurm.Request, list[str]]:
    """Return the request, and notes for its user; finds every mistake that can be found without asking Slurm.
    `how`: further fields of the plan; `setup`: see `build_request`."""
    told = merged(script, os.environ, line)
    if observe:
        _check_observed(script, asked, told)
        asked = replace(asked, nodes=None)
    plan = make_plan(
        asked, line, policy, script=script, environment=os.environ, working_directory=Path.cwd(),
        python=python,
    )  # fmt: skip
    slurm.check_runs_directory(asked.runs, script, shared=shared_runs)
    if observe and script is not None:
        plan = replace(plan, observed=True, sbatch_options=plan.typed_options)
        return slurm.observed_request(plan, policy, script, line), []
    auto = policy.policy.spares is None
    plan, notes = with_earlier(
        replace(plan, **(how or {})), asked.runs, told.last("partition") or "", plan.submitted_at,
        partial(auto_spares, plan.active, run_s=time_limit_s(told.last("time"))) if auto else None,
    )  # fmt: skip
    return slurm.build_request(plan, policy, script, setup), [
        *filter(None, [signal_note(told, script), *notes])
    ]


def check_request(request: slurm.Request, told: CommandLine) -> None:
    """Raise ClusterUnavailableError or UsageError if Slurm does not answer, or has no room for the run."""
    if request.plan.cluster == "slurm" and not request.plan.observed:
        found = slurm.partitions(told.last("clusters", "cluster") or "")
        slurm.check_fits(found, told.last("partition") or "", request.plan.active, request.plan.spares)


def _check_observed(script: BatchScript | None, asked: OwnOptions, told: CommandLine) -> None:
    """Raise UsageError for what cannot be observed: what nobody but jurymast runs, or what returns late."""
    if script is None or asked.cluster == "local":
        raise UsageError(
            "--observe takes a batch script that sbatch could run by itself",
            hint="jurymast submit --observe job.sbatch",
        )
    if told.has("test-only"):
        raise UsageError("--test-only submits nothing to observe", hint="run sbatch --test-only")
    for given in script.sbatch:
        if given.name in DONE_HERE:
            raise UsageError(
                f"{given.where}--{given.name} keeps the job's id from being recorded when it is submitted",
                hint=f"leave it out there, and give --{given.name} to jurymast submit",
            )
