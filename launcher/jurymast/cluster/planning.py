"""A split command line and a resolved policy -> the run's plan; every contradiction is found here."""

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

from jurymast.cluster.gpus import ranks_per_node
from jurymast.cluster.sbatch_options import CommandLine, Given
from jurymast.core.planning.spares import auto_spares
from jurymast.core.settings import RunPlan
from jurymast.errors import ScriptError, UsageError
from jurymast.policy.resolve import Resolved

# sbatch options that say what jurymast decides: the message says what to do instead.
REFUSED = {
    "array": "one run is one job; a batch script may be an array",
    "ntasks": "say --nodes N and --nproc-per-node K",
    "ntasks-per-node": "say --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    "tasks-per-node": "say --nproc-per-node K for the ranks of a node; Slurm starts one agent on each",
    "ntasks-per-gpu": "say --nproc-per-node K for the ranks of a node",
    "ntasks-per-tres": "say --nproc-per-node K for the ranks of a node",
    "ntasks-per-core": "say --nproc-per-node K for the ranks of a node",
    "ntasks-per-socket": "say --nproc-per-node K for the ranks of a node",
    "gpus": "a total would be shared with the spare nodes; say --gpus-per-node G",
    "overcommit": "there is one task a node; leave it out",
    "version": "ask sbatch --version, or jurymast --version",
    "usage": "see jurymast submit --help",
}
# The same by environment variable.
REFUSED_VARIABLES = {"SBATCH_ARRAY_INX": "array", "SBATCH_GPUS": "gpus"}
# Not passed on as typed: the exclusions are merged into one option, and one task a node is said anyway.
CONSUMED = frozenset({"exclude", "ntasks-per-node", "tasks-per-node"})
# Two minutes before the time limit, to the batch process alone.
WARN_SIGNAL = "B:USR2@120"
# What people put before their script elsewhere.
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed|srun|mpirun")


@dataclass(frozen=True)
class Asked:
    """Our own options of `submit`, as given. `spares` is in the policy by now."""

    nodes: int | None = None
    nproc_per_node: int | None = None
    name: str = ""
    cluster: str = "slurm"
    runs: Path = Path("runs")


def make_plan(
    asked: Asked,
    line: CommandLine,
    policy: Resolved,
    *,
    environment: Mapping[str, str],
    working_directory: Path,
    python: str,
    run: str = "",
) -> RunPlan:
    """The plan for this command line. Raises UsageError and ScriptError; touches nothing but the script.

    `run` is made from the clock and the name unless given.
    """
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
    """Spare nodes beside so many active ones."""
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
                hint="leave it out; to end a run at the first failure say --no-requeue and --spares 0",
            )
    if line.has("requeue") and line.has("no-requeue"):
        raise UsageError("--requeue and --no-requeue contradict each other")


def time_limit_s(text: str | None) -> float | None:
    """sbatch's --time in seconds: minutes, minutes:seconds, hours:minutes:seconds, or days-hours with
    minutes and seconds behind it. None for no limit, and for what sbatch itself will refuse."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text or "")
    if match is None:
        return None
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is None and third is None:
        seconds = 60 * (first or 0) + (second or 0)
    else:
        seconds = 86_400 * (days or 0) + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    return float(seconds) or None  # 0 asks for no limit


def passed_on(line: CommandLine, consumed: frozenset[str]) -> tuple[str, ...]:
    """sbatch's options as typed and in their order, but for those that jurymast says itself."""
    return tuple(word for given in line.sbatch if given.name not in consumed for word in given.words)


def excluded_hosts(given: Given) -> list[str]:
    """Node names and ranges of a host list (`n[1-3],n7`), or of the file it names, as sbatch has it."""
    text = given.value or ""
    if "/" in text:
        try:
            text = ",".join(Path(text).read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--exclude={text}: cannot read this file: {error}") from error
    return [host for host in re.split(r",(?![^\[]*\])", text) if host]


def _script(words: list[str]) -> tuple[str, list[str], bool]:
    """Script or module, its arguments, and whether it is a module (`-m NAME`)."""
    hint = "jurymast submit [options] [sbatch options] -- SCRIPT.py [args]"
    if not words:
        raise UsageError("no training script given", hint=hint)
    if words[0] in ("-m", "--module"):
        if len(words) < 2:
            raise UsageError(f"{words[0]} needs a module name", hint=hint)
        return words[1], words[2:], True
    if _LAUNCHERS.fullmatch(Path(words[0]).name) and not Path(words[0]).suffix == ".py":
        raise UsageError(
            f"leave {words[0]} out: jurymast starts the script itself, a rank for each --nproc-per-node",
            hint=hint,
        )
    if words[0].startswith("-"):
        raise UsageError(f"{words[0]} stands where the training script should", hint=hint)
    return words[0], words[1:], False


def _script_file(script: str, directory: Path, submitted_from: Path) -> str:
    """The script as ranks that start in `directory` name it: as it was typed, if that finds it there. Raises
    ScriptError."""
    tried = [directory / script, submitted_from / script]
    path = next((path for path in tried if os.path.isfile(path)), tried[0])
    try:
        path.open("rb").close()
    except OSError as error:
        what = (
            "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        )
        raise ScriptError(
            f"the training script {script} {what}", hint=f"looked for {path}; for a module say -- -m MODULE"
        ) from error
    return script if path == tried[0] else str(path.absolute())


def _check_module(module: str, directory: Path) -> None:
    """Raise ScriptError for a module that is not there. Nothing is imported: that may take a GPU."""
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
            raise ScriptError(f"there is no module {module} ({where})", hint="-- -m MODULE, or -- SCRIPT.py")
        search, parent = list(found.submodule_search_locations or ()), name


def run_name(text: str) -> str:
    """`text` fit for a directory and for squeue: letters, digits, dot, dash, underscore; 40 at most."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:40] or "run"


def new_run_id(name: str, now: time.struct_time) -> str:
    """Sorts by time, reads well and is unique: `20261120-134501-gpt-x7f3`."""
    letters = "0123456789abcdefghjkmnpqrstvwxyz"  # no i, l, o, u: they are misread
    suffix = "".join(secrets.choice(letters) for _ in range(4))
    return f"{time.strftime('%Y%m%d-%H%M%S', now)}-{name}-{suffix}"
