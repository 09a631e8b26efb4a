"""Makes a run's plan from a command line or a batch script and a policy, and reports contradictions between
them."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jurymast import foreign
from jurymast.cluster.sbatch import (
    DONE_HERE,
    GPUS_OF_A_NODE,
    LISTS_OF_A_NODE,
    BatchScript,
    CommandLine,
    Given,
    merged,
    ranks_per_node,
    seconds_of,
    where_options,
    words_of,
)
from jurymast.cluster.signals import JobSignal
from jurymast.core.judges.forecast import auto_spares
from jurymast.core.judges.slurm_variables import scaled
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import count
from jurymast.errors import ScriptError, UsageError
from jurymast.interpreter import relative_parts
from jurymast.policy.resolve import Resolved

# sbatch options that make no sense for a run. The message says what to use instead.
REFUSED = {
    "version": "run sbatch --version or jurymast --version instead",
    "usage": "see jurymast submit --help",
}
REFUSED_IN_SCRIPTS = REFUSED | {"nodefile": "use --nodes N"}
# A run without a batch script refuses also what jurymast decides itself.
REFUSED_ALONE = REFUSED | {
    "ntasks": "use --nodes N and --nproc-per-node K",
    "ntasks-per-node": "use --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    "tasks-per-node": "use --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    **{
        f"ntasks-per-{what}": "use --nproc-per-node K for the ranks of a node"
        for what in ("gpu", "tres", "core", "socket")
    },
    "gpus": "a total would include the spare nodes; use --gpus-per-node G",
    "overcommit": "there is one task per node; leave it out",
}
# Not passed on as typed: the exclusions are merged into one option, a command has become a script, and for a
# run without one --ntasks-per-node=1 is always set.
CONSUMED = DONE_HERE | {"exclude", "wrap"}
CONSUMED_ALONE = CONSUMED | {"ntasks-per-node", "tasks-per-node"}
# Totals over all nodes. With spare nodes, totals increase in proportion.
TOTALS = ("ntasks", "gpus")
# Two minutes before the time limit, to the batch process alone.
WARN_SIGNAL = "B:USR2@120"
# The module that ranks run of a function.
FUNCTION = "jurymast.worker.function"
# Commands that people write before their script elsewhere.
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun")


@dataclass(frozen=True)
class OwnOptions:
    """jurymast's own options of `submit`, as given. `spares` is already part of the policy."""

    nodes: int | None = None
    nproc_per_node: int | None = None
    name: str = ""
    cluster: str = "slurm"
    runs: Path = Path("runs")
    train: str = ""


def make_plan(
    asked: OwnOptions,
    line: CommandLine,
    policy: Resolved,
    *,
    script: BatchScript | None = None,
    environment: Mapping[str, str],
    working_directory: Path,
    python: str,
    run: str = "",
) -> RunPlan:
    """Make the plan for this command line, which names a training script or, with `script`, a batch script.
    `run` is made from the time and the name if it is not given. Reads only the training script. Raises
    ScriptError, and UsageError, which names the line of a batch script that is wrong."""
    told = merged(script, environment, line)
    _check_options(told, REFUSED_IN_SCRIPTS if script else REFUSED_ALONE)
    directory = working_directory / (told.last("chdir") or "")
    if script is not None:
        _check_script(script, asked, told)
        active, name = asked.nodes or _active_nodes(told, policy.policy.spares), script.job_name
        what: dict[str, Any] = {"script": script.name, "arguments": tuple(line.command[1:]), "batch": True}
        ranks = 1
    else:
        if line.has("requeue") and line.has("no-requeue"):
            raise UsageError("--requeue and --no-requeue contradict each other")
        what = _training(line.command, directory, working_directory)
        if python == sys.executable:
            need_torch("with which the nodes would run the script", "submit")
        active, name = asked.nodes or 1, Path(what["script"]).stem
        ranks = asked.nproc_per_node or ranks_per_node(told)
    name = run_name(asked.name or told.last("job-name") or name)
    run = run or new_run_id(name, time.localtime())
    spares = policy.policy.spares
    if spares is None:
        spares = auto_spares(active, policy.settings().rate, run_s=time_limit_s(told.last("time")))
    requeue = told.given("requeue", "no-requeue")
    plan = RunPlan(
        **what,
        run=run,
        name=name,
        directory=str(asked.runs / run),
        cluster=asked.cluster,
        active=active,
        spares=spares,
        ranks_per_node=ranks,
        working_directory=str(directory),
        python=python,
        sbatch_options=tuple(words_of(line.options, CONSUMED if script else CONSUMED_ALONE)),
        train=asked.train,
        exclude=tuple(node for one in told.options if one.name == "exclude" for node in excluded_hosts(one)),
        requeue=requeue is None or requeue.name == "requeue",
        signal_s=_signal_s(told, script),
        submitted_at=time.time(),
        policy_hash=policy.digest,
        settings=policy.settings(),
    )
    if plan.settings.nodes_min > plan.active:
        raise UsageError(
            f"nodes.min is {plan.settings.nodes_min}, and the run has {count(plan.active, 'node')}",
            hint="give the run more nodes, or set nodes.min lower, or off",
        )
    if script is not None:
        return _with_options(plan, script, told)
    signal = told.given("signal")
    if signal is None or line.has("signal"):
        return plan
    return replace(plan, sbatch_options=(*plan.sbatch_options, f"--signal={signal.value}"))  # a variable's


def _check_options(told: CommandLine, refused: Mapping[str, str]) -> None:
    """Raise UsageError for an sbatch option or variable that contradicts what jurymast does."""
    for given in told.options:
        typed = given.words[0].startswith("-")
        one_task = given.name in ("ntasks-per-node", "tasks-per-node") and given.value == "1"
        if given.name in refused and not one_task and (typed or given.value):
            what = f"sbatch's --{given.name}" if typed else f"the environment variable {given.words[0]}"
            raise UsageError(f"{given.where}{what} cannot be used here", hint=refused[given.name])
        if given.name == "no-kill" and given.value == "off":
            raise UsageError(
                f"{given.where}--no-kill=off would end the job with its first lost node",
                hint="leave it out; to end a run at the first failure, use --no-requeue and --spares 0",
            )


def _signal_s(told: CommandLine, script: BatchScript | None) -> float:
    asked = JobSignal.read(told.last("signal"))
    return asked.seconds if asked is not None and asked.ends_in(script.text if script else None) else 0.0


def signal_note(told: CommandLine, script: BatchScript | None) -> str:
    """Say what the job's --signal will do, with its line, if not all of that was asked for; else ""."""
    given = told.given("signal")
    asked = JobSignal.read(given.value) if given is not None else None
    if given is None or asked is None:
        return ""
    what = asked.told(script.text if script else None)
    return f"{given.where}--signal={given.value}: {what}" if what else ""


def time_limit_s(text: str | None) -> float | None:
    """The value of sbatch's --time in seconds; None for no limit, and for a value that sbatch itself
    refuses."""
    return float(seconds_of(text or "") or 0) or None  # 0 asks for no limit


def excluded_hosts(given: Given) -> list[str]:
    """The node names and ranges of a host list (`n[1-3],n7`) or of the file that it names, as sbatch reads
    it."""
    text = given.value or ""
    if "/" in text:
        try:
            text = ",".join(Path(text).read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--exclude={text}: cannot read this file: {error}") from error
    return [host for host in re.split(r",(?![^\[]*\])", text) if host]


def _training(words: list[str], directory: Path, submitted_from: Path) -> dict[str, Any]:
    """The plan's `script`, its `arguments`, and whether it is a `module` (`-m NAME`). Raises UsageError,
    ScriptError."""
    hint = "jurymast submit [options] [sbatch options] -- SCRIPT.py [args]"
    if not words:
        raise UsageError("no training script given", hint=hint)
    if words[0] in ("-m", "--module"):
        if len(words) < 2:
            raise UsageError(f"{words[0]} needs a module name", hint=hint)
        _check_module(words[1], directory)
        return {"script": words[1], "arguments": tuple(words[2:]), "module": True}
    if _LAUNCHERS.fullmatch(Path(words[0]).name) and not Path(words[0]).suffix == ".py":
        raise UsageError(
            f"leave {words[0]} out: jurymast starts the script itself, on as many ranks as --nproc-per-node",
            hint=hint,
        )
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} is where the training script should be", hint=hint)
    return {"script": _script_file(words[0], directory, submitted_from), "arguments": tuple(words[1:])}


def _script_file(script: str, directory: Path, submitted_from: Path) -> str:
    """The script's name for ranks that start in `directory`: as typed, if that finds it there. Like Python,
    accepts a directory with a `__main__.py`. Raises ScriptError."""
    tried = [directory / script, submitted_from / script]
    path = next((path for path in tried if os.path.exists(path)), tried[0])
    try:
        foreign.reading(path / "__main__.py" if path.is_dir() else path).close()
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            what = "is a directory without a __main__.py" if path.is_dir() else "does not exist"
        raise ScriptError(
            f"the training script {script} {what}", hint=f"looked for {path}; for a module write -- -m MODULE"
        ) from error
    return script if path == tried[0] else str(path.absolute())


def need_torch(why: str, do: str) -> None:
    """Raise ScriptError if this Python, which is needed for `why`, has no torch, without which no node could
    start a rank. `do`: what one may do with another Python. Nothing is imported, as below."""
    if find_spec("torch") is None:
        python = sys.executable
        raise ScriptError(
            f"No module named 'torch' for {python}, {why}",
            hint=f"install it there ({python} -m pip install torch), or {do} with the Python that has it",
        )


def _check_module(module: str, directory: Path) -> None:
    """Raise ScriptError if the module is missing. Nothing is imported: that could occupy a GPU."""
    relative = (str(directory / part) for part in relative_parts(os.environ))
    search = [str(directory), *relative, *sys.path]
    parent = ""
    for part in module.split("."):
        name = f"{parent}.{part}" if parent else part
        try:
            found = PathFinder.find_spec(name, search) or (None if parent else find_spec(name))
        except (ImportError, ValueError):
            found = None
        if found is None:
            where = (
                f"no {part} in {parent}"
                if parent
                else f"not in {directory}, nor where {sys.executable} looks"
            )
            raise ScriptError(
                f"there is no module {module} ({where})", hint="write -- -m MODULE, or -- SCRIPT.py"
            )
        search, parent = list(found.submodule_search_locations or ()), name


def run_name(text: str) -> str:
    """`text` made fit for a directory name and for squeue: letters, digits, dot, dash, underscore; 40 at
    most."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:40] or "run"


def new_run_id(name: str, now: time.struct_time) -> str:
    """A unique run id that sorts by time and is readable: `20261120-134501-gpt-x7f3`."""
    letters = "0123456789abcdefghjkmnpqrstvwxyz"  # without i, l, o, u, which are easily misread
    suffix = "".join(secrets.choice(letters) for _ in range(4))
    return f"{time.strftime('%Y%m%d-%H%M%S', now)}-{name}-{suffix}"


def _check_script(script: BatchScript, asked: OwnOptions, told: CommandLine) -> None:
    """Raise UsageError if this is no batch script for these options."""
    if asked.cluster == "local":
        raise UsageError(
            f"{script.name} is a batch script, but the local cluster has no srun",
            hint="submit its Python script: jurymast submit --cluster local -- SCRIPT.py [args]",
        )
    if asked.nproc_per_node is not None:
        raise UsageError(
            "--nproc-per-node works only with a Python script",
            hint=f"set it where {script.name} starts torchrun",
        )
    if script.pbs_line and not told.has("ignore-pbs"):
        raise UsageError(
            f"{script.name}, line {script.pbs_line}: sbatch would read this #PBS line, but jurymast does not",
            hint="write it as an #SBATCH line, or ignore all #PBS lines with --ignore-pbs",
        )


def _active_nodes(told: CommandLine, spares: int | None) -> int:
    """The number of nodes that a batch script asks for, by --nodes or by the numbers of tasks or GPUs, to
    which `spares` are to be added (None: as many as they need)."""
    given = told.given("nodes")
    if given is not None:
        low, _, high = (given.value or "").partition("-")
        if not re.fullmatch(r"\d+(-\d+)?", given.value or "") or int(low) < 1 or (high and high != low):
            raise UsageError(
                f"{given.where}--nodes={given.value}: jurymast adds spare nodes to a fixed number",
                hint="give one number: the nodes that train",
            )
        return int(low)
    tasks, each = told.given("ntasks"), told.given("ntasks-per-node", "tasks-per-node")
    if tasks is None or tasks.value == "1":
        gpus = told.given("gpus")
        return 1 if gpus is None else _nodes_of_gpus(gpus, told, one_task=tasks is not None, spares=spares)
    numbers = [given.value or "" for given in (tasks, each) if given]
    if each is None or not all(number.isdigit() and int(number) for number in numbers):
        raise _not_fixed(tasks, "also give --nodes=N")
    return -(-int(numbers[0]) // int(numbers[1]))


def _not_fixed(given: Given, hint: str) -> UsageError:
    what = f"{given.where}--{given.name}={given.value}"
    return UsageError(
        f"{what} lets Slurm choose the number of nodes, so no spare nodes can be added", hint=hint
    )


def _nodes_of_gpus(gpus: Given, told: CommandLine, *, one_task: bool, spares: int | None) -> int:
    """The number of nodes that have this total of GPUs. If the options do not tell, it is one, and sbatch
    refuses that where no node has so many; spares would each add as many again. Raises UsageError."""
    total, each = ((text or "").rpartition(":")[2] for text in (gpus.value, told.last("gpus-per-node")))
    if total.isdigit() and each.isdigit() and int(each) and int(total):
        return -(-int(total) // int(each))
    if spares and total != "1" and not one_task:
        raise _not_fixed(gpus, "also give --nodes=N or --gpus-per-node=N, or --spares=0")
    return 1


def gpus_of_each(told: CommandLine, active: int) -> str:
    """The GPUs of each of a job's `active` nodes if it gives only their total; "" if its options say more, or
    if nodes would differ. Slurm may give one node a single GPU and another one all the rest, and with spare
    nodes the training's need not have as many as they had without."""
    lists = any("gpu" in (told.last(name) or "") for name in LISTS_OF_A_NODE)
    total = told.last("gpus") or ""
    if "," in total or lists or told.has(*GPUS_OF_A_NODE, "gpus-per-socket"):
        return ""
    each = scaled(total, 1, active)
    return each if scaled(each, active, 1) == total else ""


def spreads_gpus(plan: RunPlan) -> bool:
    """Whether the job of a batch script has `gpus_of_each` although the user has not said it."""
    ours = set(plan.sbatch_options) - set(plan.typed_options)
    return any(option.startswith("--gpus-per-node=") for option in ours)


def _with_options(plan: RunPlan, script: BatchScript, told: CommandLine) -> RunPlan:
    """The plan of a batch script, with sbatch options for spare nodes around those that were typed."""
    options = [*where_options(script.sbatch), *plan.sbatch_options, f"--nodes={plan.nodes}"]
    for name in TOTALS:
        if total := told.last(name):
            options.append(f"--{name}={scaled(total, plan.nodes, plan.active)}")
    if plan.nodes > 1 and (each := gpus_of_each(told, plan.active)):
        options.append(f"--gpus-per-node={each}")
    options += ["--no-kill", "--requeue" if plan.requeue else "--no-requeue"]
    if not told.has("job-name"):  # sbatch would use the name of its script, which is not the user's
        options.append(f"--job-name={script.job_name}")
    if not told.has("signal"):
        options.append(f"--signal={WARN_SIGNAL}")
    head = tuple(words_of(script.sbatch, ()))
    return replace(plan, sbatch_options=tuple(options), typed_options=plan.sbatch_options, head_options=head)
