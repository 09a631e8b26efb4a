"""What the supervisor asks of the cluster: requeue without the bad nodes, say why the job ends."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from jurymast.cluster.allocation import Allocation, run_command
from jurymast.core.settings import RunPlan
from jurymast.errors import ClusterUnavailableError
from jurymast.ports import Cluster

# After this many seconds of still being alive the requeue has not taken hold.
REQUEUE_LIMIT_S = 60.0


class SlurmCluster:
    """Node control with the owner's own rights; see `cluster.lift` for the second half of a requeue."""

    def __init__(self, plan: RunPlan, allocation: Allocation) -> None:
        self._plan = plan
        self._job = allocation.job

    async def requeue(self, exclude: Sequence[str]) -> None:
        """Requeue this job. The delay that Slurm then imposes is lifted by a small job outside of this one,
        because whoever runs inside is ended before the job is pending again."""
        banned = ",".join(sorted({*self._plan.exclude, *exclude}))
        with contextlib.suppress(ClusterUnavailableError):
            # Without the helper the job waits Slurm's two minutes, which beats not requeueing.
            await self._run(self._lift_command(banned))
        await self._run(["scontrol", "requeue", self._job])
        if banned:
            with contextlib.suppress(ClusterUnavailableError):
                await self._run(["scontrol", "update", f"JobId={self._job}", f"ExcNodeList={banned}"])
        await asyncio.sleep(REQUEUE_LIMIT_S)  # Slurm ends this process long before

    def _lift_command(self, banned: str) -> list[str]:
        script = f"{self._plan.directory}/slurm/lift.sh"
        command = ["sbatch", "--parsable", "--nodes=1", "--ntasks=1", "--time=5", "--job-name=jurymast-lift"]
        command += [
            f"--output={self._plan.directory}/slurm/lift-%j.log",
            "--open-mode=append",
            "--no-requeue",
        ]
        for option in inherited(self._plan.sbatch_options):
            command.append(option)
        if banned:
            command.append(f"--exclude={banned}")
        sizes = f"{self._plan.active}-{self._plan.nodes}"
        return [*command, script, self._job, sizes, banned]

    async def why_ending(self) -> str:
        try:
            told = await self._run(["scontrol", "show", "job", self._job, "--oneliner"])
        except ClusterUnavailableError:
            return "unknown"
        state = dict(part.split("=", 1) for part in told.split() if "=" in part).get("JobState", "")
        words = {"CANCELLED": "cancelled", "TIMEOUT": "timeout", "PREEMPTED": "preempted"}
        return words.get(state, f"unknown ({state})")

    async def release(self) -> None:
        await self._run(["scancel", self._job])

    async def _run(self, arguments: list[str]) -> str:
        return await asyncio.to_thread(run_command, arguments)


class LocalCluster:
    """Nodes are process groups of the batch process, which starts new ones by itself after a requeue."""

    async def requeue(self, exclude: Sequence[str]) -> None:
        del exclude  # the batch process reads the exclusions from the journal

    async def why_ending(self) -> str:
        return "cancelled"

    async def release(self) -> None:
        return


def inherited(options: Sequence[str]) -> list[str]:
    """The sbatch options that decide where a job may run at all: partition, account, QOS, reservation."""
    keep = ("--partition", "--account", "--qos", "--reservation", "--clusters")
    short = {"-p": "--partition", "-A": "--account", "-q": "--qos", "-M": "--clusters"}
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if name in keep:
            kept.append(option if equals else f"{name}={next(rest, '')}")
        elif option[:2] in short and not option.startswith("--"):
            kept.append(f"{short[option[:2]]}={option[2:] or next(rest, '')}")
        del value
    return kept


LIFT_SCRIPT = """\
#!/bin/bash
exec {python} -m jurymast.cluster.lift "$@"
"""


def cluster_for(plan: RunPlan, allocation: Allocation) -> Cluster:
    if plan.cluster == "local":
        return LocalCluster()
    return SlurmCluster(plan, allocation)


def lift_script() -> str:
    """The script of the helper job; its arguments come from sbatch's argv, never from text."""
    import shlex

    return LIFT_SCRIPT.format(python=shlex.quote(sys.executable))
