"""A batch script and a command line -> the run's plan: sbatch's sizes, with the spare nodes added."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jurymast.cluster.batch_script import BatchScript, merged
from jurymast.cluster.planning import (
    WARN_SIGNAL,
    Asked,
    excluded_hosts,
    new_run_id,
    passed_on,
    run_name,
    spares_for,
)
from jurymast.cluster.sbatch_options import CommandLine, Given
from jurymast.core.settings import RunPlan
from jurymast.errors import UsageError
from jurymast.policy.resolve import Resolved

# What says where a job may run: the small job that helps a requeue is submitted with the same.
WHERE = ("partition", "account", "qos", "reservation", "clusters", "cluster")
# Totals over all nodes. With spares they are asked for in proportion.
TOTALS = ("ntasks", "gpus")
# Not passed on as typed: the exclusions are merged into one option, and a command is a script by now.
CONSUMED = frozenset({"exclude", "wrap"})
REFUSED = {
    "nodefile": "say --nodes N",
    "version": "ask sbatch --version, or jurymast --version",
    "usage": "see jurymast submit --help",
}


@dataclass(frozen=True)
class Size:
    """Active nodes, and what was said of totals over them."""

    active: int
    totals: tuple[tuple[str, str], ...] = ()

    def options(self, nodes: int) -> list[str]:
        """For sbatch, when it is to give this many nodes."""
        scaled = [f"--{name}={_scaled(value, nodes, self.active)}" for name, value in self.totals]
        return [f"--nodes={nodes}", *scaled]


def make_script_plan(
    asked: Asked,
    script: BatchScript,
    line: CommandLine,
    policy: Resolved,
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    python: str,
    run: str = "",
) -> RunPlan:
    """Raises UsageError, which names the script's line where that is at fault."""
    told = merged(script, environment, line)
    if asked.cluster == "local":
        raise UsageError(
            f"{script.name} is a batch script, and there is no srun on the local cluster",
            hint="give the Python script that it starts: jurymast submit --cluster local -- SCRIPT.py [args]",
        )
    if asked.nproc_per_node is not None:
        raise UsageError(
            "--nproc-per-node is for a Python script", hint=f"say it where {script.name} starts torchrun"
        )
    _check(script, told)
    size = size_of(script, told, asked.nodes)
    name = run_name(asked.name or told.last("job-name") or script.job_name)
    spares = spares_for(policy, size.active, told.last("time"))
    run = run or new_run_id(name, time.localtime())
    requeue = _requeue(told)
    options = [*_where(script), *passed_on(line, CONSUMED), *size.options(size.active + spares), "--no-kill"]
    options.append("--requeue" if requeue else "--no-requeue")
    if not told.has("job-name"):  # sbatch takes the script's, and it gets another file
        options.append(f"--job-name={script.job_name}")
    if not told.has("signal"):
        options.append(f"--signal={WARN_SIGNAL}")
    return RunPlan(
        run=run,
        name=name,
        directory=str(asked.runs / run),
        cluster=asked.cluster,
        active=size.active,
        spares=spares,
        ranks_per_node=1,
        batch=True,
        script=script.name,
        arguments=tuple(line.script[1:]),
        working_directory=str(working_directory / (told.last("chdir") or "")),
        python=python,
        sbatch_options=tuple(options),
        exclude=tuple(n for given in told.sbatch if given.name == "exclude" for n in excluded_hosts(given)),
        requeue=requeue,
        submitted_at=time.time(),
        policy_hash=policy.digest,
        settings=policy.settings(),
    )


def size_of(script: BatchScript, told: CommandLine, asked: int | None = None) -> Size:
    """How many nodes the job is to have, by --nodes or by the numbers of tasks. `asked`: by our own -N."""
    nodes = _last(told, "nodes")
    totals = tuple((name, given.value or "") for name in TOTALS if (given := _last(told, name)))
    active = asked or (None if nodes is None else _node_count(script, nodes))
    if active is None:
        active = _nodes_by_tasks(script, told)
    return Size(active, totals)


def _node_count(script: BatchScript, given: Given) -> int:
    low, _, high = (given.value or "").partition("-")
    if not re.fullmatch(r"\d+(-\d+)?", given.value or "") or int(low) < 1 or (high and high != low):
        raise UsageError(
            f"{script.where(given)}--nodes={given.value}: jurymast adds spare nodes to a fixed number",
            hint="say one number: the nodes that train",
        )
    return int(low)


def _nodes_by_tasks(script: BatchScript, told: CommandLine) -> int:
    tasks, each = _last(told, "ntasks"), _last(told, "ntasks-per-node", "tasks-per-node")
    if tasks is None or tasks.value == "1":
        return 1
    numbers = [given.value or "" for given in (tasks, each) if given]
    if each is None or not all(number.isdigit() and int(number) for number in numbers):
        raise UsageError(
            f"{script.where(tasks)}--ntasks={tasks.value} lets Slurm choose the number of nodes, "
            "to which no spare ones can be added",
            hint="say --nodes=N as well",
        )
    return -(-int(numbers[0]) // int(numbers[1]))


def _scaled(value: str, nodes: int, active: int) -> str:
    """A total for more nodes: `16`, `gpu:16` or `h100:16`."""
    kind, colon, number = value.rpartition(":")
    return f"{kind}{colon}{-(-int(number) * nodes // active)}" if number.isdigit() else value


def _check(script: BatchScript, told: CommandLine) -> None:
    for given in told.sbatch:
        where = script.where(given)
        if given.name in REFUSED:
            raise UsageError(f"{where}sbatch's --{given.name} cannot be used here", hint=REFUSED[given.name])
        if given.name == "no-kill" and given.value == "off":
            raise UsageError(
                f"{where}--no-kill=off would end the job with its first lost node", hint="leave it out"
            )


def _requeue(told: CommandLine) -> bool:
    said = _last(told, "requeue", "no-requeue")
    return said is None or said.name == "requeue"


def _last(told: CommandLine, *names: str) -> Given | None:
    found = [given for given in told.sbatch if given.name in names]
    return found[-1] if found else None


def _where(script: BatchScript) -> list[str]:
    return [f"--{given.name}={given.value}" for given in script.sbatch if given.name in WHERE]
