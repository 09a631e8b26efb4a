"""Makes a run's plan from a command line or a batch script and a policy, and reports contradictions between
them."""

from __future__ import annotations

import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from jurymast import foreign
from jurymast.cluster.batch_script import DONE_HERE, BatchScript, merged
from jurymast.cluster.sbatch_options import CommandLine, Given, ranks_per_node, seconds_of
from jurymast.core.planning.forecast import auto_spares
from jurymast.core.settings import RunPlan
from jurymast.errors import ScriptError, UsageError
from jurymast.policy.resolve import Resolved

# sbatch options for what jurymast decides itself. The message says what to use instead.
REFUSED = {
    "array": "one run is one job; a batch script may be an array",
    "ntasks": "use --nodes N and --nproc-per-node K",
    "ntasks-per-node": "use --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    "tasks-per-node": "use --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    "ntasks-per-gpu": "use --nproc-per-node K for the ranks of a node",
    "ntasks-per-tres": "use --nproc-per-node K for the ranks of a node",
    "ntasks-per-core": "use --nproc-per-node K for the ranks of a node",
    "ntasks-per-socket": "use --nproc-per-node K for the ranks of a node",
    "gpus": "a total would include the spare nodes; use --gpus-per-node G",
    "overcommit": "there is one task per node; leave it out",
    "version": "run sbatch --version or jurymast --version instead",
    "usage": "see jurymast submit --help",
}
# The environment variables of such options.
REFUSED_VARIABLES = {"SBATCH_ARRAY_INX": "array", "SBATCH_GPUS": "gpus"}
# Not passed on as typed: the exclusions are merged into one option, and --ntasks-per-node=1 is always set.
CONSUMED = DONE_HERE | {"exclude", "ntasks-per-node", "tasks-per-node"}
# Two minutes before the time limit, to the batch process alone.
WARN_SIGNAL = "B:USR2@120"
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


def make_plan(
    asked: OwnOptions,
    line: CommandLine,
    policy: Resolved,
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    python: str,
    run: str = "",
) -> RunPlan:
    """Make the plan for this command line. `run` is made from the time and the name if it is not given. Reads
    only the script. Raises UsageError and ScriptError."""
    check_options(line, environment)
    script, arguments, module = _script(line.script)
    directory = working_directory / (line.last("chdir") or "")
    if module:
        _check_module(script, directory)
    else:
        script = _script_file(script, directory, working_directory)
    name = run_name(
        asked.name or line.last("job-name") or environment.get("SBATCH_JOB_NAME") or Path(script).stem
    )
    run = run or new_run_id(name, time.localtime())
    active = asked.nodes or 1
    spares = spares_for(policy, active, line.last("time"))
    return RunPlan(
        run=run,
        name=name,
        directory=str(asked.runs / run),
        cluster=asked.cluster,
        active=active,
        spares=spares,
        ranks_per_node=asked.nproc_per_node or ranks_per_node(line, environment),
        script=script,
        arguments=tuple(arguments),
        module=module,
        working_directory=str(directory),
        python=python,
        sbatch_options=passed_on(line, CONSUMED),
        exclude=tuple(
            node for given in line.sbatch if given.name == "exclude" for node in excluded_hosts(given)
        ),
        requeue=line.has("requeue") or not (line.has("no-requeue") or "SBATCH_NO_REQUEUE" in environment),
        submitted_at=time.time(),
        policy_hash=policy.digest,
        settings=policy.settings(),
    )


def spares_for(policy: Resolved, active: int, time_limit: str | None) -> int:
    """The number of spare nodes for `active` active ones."""
    if policy.policy.spares is not None:
        return policy.policy.spares
    return auto_spares(active, policy.settings().rate, run_s=time_limit_s(time_limit))


def check_options(line: CommandLine, environment: Mapping[str, str]) -> None:
    """Raise UsageError for an sbatch option or variable that contradicts what jurymast does."""
    for variable, name in REFUSED_VARIABLES.items():
        if environment.get(variable):
            raise UsageError(f"the environment variable {variable} cannot be used here", hint=REFUSED[name])
    for given in line.sbatch:
        one_task = given.name in ("ntasks-per-node", "tasks-per-node") and given.value == "1"
        if given.name in REFUSED and not one_task:
            raise UsageError(f"sbatch's --{given.name} cannot be used here", hint=REFUSED[given.name])
        if given.name == "no-kill" and given.value == "off":
            raise UsageError(
                "--no-kill=off would end the job with its first lost node",
                hint="leave it out; to end a run at the first failure, use --no-requeue and --spares 0",
            )
    if line.has("requeue") and line.has("no-requeue"):
        raise UsageError("--requeue and --no-requeue contradict each other")


def time_limit_s(text: str | None) -> float | None:
    """The value of sbatch's --time in seconds; None for no limit, and for a value that sbatch itself
    refuses."""
    return float(seconds_of(text or "") or 0) or None  # 0 asks for no limit


def passed_on(line: CommandLine, consumed: frozenset[str]) -> tuple[str, ...]:
    """The sbatch options as typed and in their order, except `consumed` ones, which jurymast sets itself."""
    return tuple(word for given in line.sbatch if given.name not in consumed for word in given.words)


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


def _script(words: list[str]) -> tuple[str, list[str], bool]:
    """Return the script or module, its arguments, and whether it is a module (`-m NAME`)."""
    hint = "jurymast submit [options] [sbatch options] -- SCRIPT.py [args]"
    if not words:
        raise UsageError("no training script given", hint=hint)
    if words[0] in ("-m", "--module"):
        if len(words) < 2:
            raise UsageError(f"{words[0]} needs a module name", hint=hint)
        return words[1], words[2:], True
    if _LAUNCHERS.fullmatch(Path(words[0]).name) and not Path(words[0]).suffix == ".py":
        raise UsageError(
            f"leave {words[0]} out: jurymast starts the script itself, on as many ranks as --nproc-per-node",
            hint=hint,
        )
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} is where the training script should be", hint=hint)
    return words[0], words[1:], False


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


def _check_module(module: str, directory: Path) -> None:
    """Raise ScriptError if the module is missing. Nothing is imported: that could occupy a GPU."""
    search = [str(directory), *sys.path]
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


# Options that decide where a job may run. The helper job of a requeue is submitted with the same ones.
WHERE = ("partition", "account", "qos", "reservation", "clusters", "cluster")
# Totals over all nodes. With spare nodes, totals increase in proportion.
TOTALS = ("ntasks", "gpus")
# Not passed on as typed: the exclusions are merged into one option, and a command has become a script.
SCRIPT_CONSUMED = DONE_HERE | {"exclude", "wrap"}
SCRIPT_REFUSED = {
    "nodefile": "use --nodes N",
    "version": "run sbatch --version or jurymast --version instead",
    "usage": "see jurymast submit --help",
}


@dataclass(frozen=True)
class Size:
    """The number of active nodes, and the options that give totals over them."""

    active: int
    totals: tuple[tuple[str, str], ...] = ()

    def options(self, nodes: int) -> list[str]:
        """The sbatch options for a job of `nodes` nodes."""
        scaled = [f"--{name}={_scaled(value, nodes, self.active)}" for name, value in self.totals]
        return [f"--nodes={nodes}", *scaled]


def make_script_plan(
    asked: OwnOptions,
    script: BatchScript,
    line: CommandLine,
    policy: Resolved,
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    python: str,
    run: str = "",
) -> RunPlan:
    """Make the plan for a batch script. Raises UsageError, which names the script's line if that is wrong."""
    told = merged(script, environment, line)
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
    _check(script, told)
    size = size_of(script, told, asked.nodes)
    name = run_name(asked.name or told.last("job-name") or script.job_name)
    spares = spares_for(policy, size.active, told.last("time"))
    run = run or new_run_id(name, time.localtime())
    requeue = _requeue(told)
    options = [
        *_where(script),
        *passed_on(line, SCRIPT_CONSUMED),
        *size.options(size.active + spares),
        "--no-kill",
    ]
    options.append("--requeue" if requeue else "--no-requeue")
    if not told.has("job-name"):  # sbatch would use the name of its script, which is not the user's
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
    """The size of the job, by --nodes or by the numbers of tasks. `asked`: the number of nodes by our own
    -N."""
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
            hint="give one number: the nodes that train",
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
            "so no spare nodes can be added",
            hint="also give --nodes=N",
        )
    return -(-int(numbers[0]) // int(numbers[1]))


def _scaled(value: str, nodes: int, active: int) -> str:
    """A total for `active` nodes (`16`, `gpu:16` or `h100:16`), scaled to `nodes` nodes."""
    kind, colon, number = value.rpartition(":")
    return f"{kind}{colon}{-(-int(number) * nodes // active)}" if number.isdigit() else value


def _check(script: BatchScript, told: CommandLine) -> None:
    if script.pbs_line and not told.has("ignore-pbs"):
        raise UsageError(
            f"{script.name}, line {script.pbs_line}: sbatch would read this #PBS line, but jurymast does not",
            hint="write it as an #SBATCH line, or ignore all #PBS lines with --ignore-pbs",
        )
    for given in told.sbatch:
        where = script.where(given)
        if given.name in SCRIPT_REFUSED:
            raise UsageError(
                f"{where}sbatch's --{given.name} cannot be used here", hint=SCRIPT_REFUSED[given.name]
            )
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
