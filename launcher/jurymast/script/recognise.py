"""Whether a step is a training that our agents can run, and what torchrun's command line says of it: what it
trains, and how many ranks per node.

To get torch's own parser, torch would have to be imported, which takes seconds. This one has the options of
the parsers of torch 2.6 to 2.13.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from jurymast import foreign, programs
from jurymast.cluster.sbatch import CommandLine
from jurymast.errors import UsageError
from jurymast.script import shell

# ---- what a step starts

# Programs that start ranks through torch's elastic agent. Our hook in Python finds that agent however it is
# started.
LAUNCHER = re.compile(
    r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b"
    r"|\baccelerate(\.commands\.launch|\s+launch)\b|\b(fabric|lightning)\s+run\b|\btune\s+run\s+--n"
)
SHELLS = ("bash", "csh", "dash", "fish", "ksh", "sh", "tcsh", "zsh")
# Options that tell a launcher how many nodes there are and which one this is. Words are joined by a space.
NODES = re.compile(r"--(?:nnodes|num[-_]machines)(?:=|\s+)[\"']?([^\s\"';|&]+)")
NODE_NUMBER = re.compile(r"(--(?:node|machine)[-_]rank(?:=|\s+)[\"']?)[^\s\"';|&]+")
PYTHON = re.compile(
    r"\bpython[\d.]*\s+(-[bBdEiIOPqsSuv]+\s+|-[WX]\s*\S+\s+)*(-[bBdEiIOPqsSuv]*m\s+[\w.]+|[^\s;|&-]\S*)"
    r"|\buv\s+run\s[^;|&\n]{0,1000}\.py\b"
)
# Programs whose options are followed by the command that they start.
WRAPPERS = frozenset({
    "chrt", "conda", "env", "ionice", "mamba", "micromamba", "nice", "nsys", "numactl", "pixi", "poetry",
    "setarch", "stdbuf", "taskset", "time", "timeout", "uv",
})  # fmt: skip
# Programs whose options and image are followed by the command that they start in a container.
CONTAINERS = frozenset({"apptainer", "shifter", "singularity"})
# In the first line of an apptainer image file, which can be run like a script.
IMAGE_PROGRAM = "run-singularity"
SCRIPT_BYTES_MAX = 1 << 16
# Shell scripts by their names in a text; lines of a script that say nothing of what it does.
SHELL_SCRIPT = re.compile(r"(?<![\w./$}-])(?:[\w.-]*/)*[\w.-]+\.(?:ba|z|k)?sh\b|(?<![\w./$}-])\./[\w./-]+")
SHELL_ENDINGS = (".sh", ".bash", ".ksh", ".zsh", ".csh")
FOLDER = re.compile(r"\bcd\s+[\"']?([^\s;|&\"')]+)")
COMMENT = re.compile(r"^[ \t]*#(?!!).*$", re.MULTILINE)
SCRIPTS_MAX = 20
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


def texts(
    command: Sequence[str], read: Callable[[str], str], variables: Mapping[str, str] = NO_VARIABLES
) -> list[str]:
    """The command as one line, and the shell scripts that it runs: those among its words, those in the text
    of a shell's -c, and those that these run, also after a `cd`. `variables` are put in, as shells put them
    in. `read` returns the text of a file, "" for any other word."""
    line = shell.spelled_out(" ".join(command), variables)
    found, known, folders = [line], set(), ["", *FOLDER.findall(line)]
    ahead = [*command, *SHELL_SCRIPT.findall(line)]
    while ahead and len(found) <= SCRIPTS_MAX:
        if (word := ahead.pop(0)) in known:
            continue
        known.add(word)
        there = filter(None, (read(os.path.join(folder, word)) for folder in folders[:SCRIPTS_MAX]))
        # A shell that is told which script to run needs no first line that names it.
        named = word.endswith(SHELL_ENDINGS)
        if text := next((text for text in there if named or text.startswith("#!")), ""):
            text = shell.spelled_out(COMMENT.sub("", text), variables)
            found.append(text)
            folders += FOLDER.findall(text)
            ahead += SHELL_SCRIPT.findall(text)
    return found


def starts_launcher(
    command: Sequence[str], read: Callable[[str], str], variables: Mapping[str, str] = NO_VARIABLES
) -> bool:
    """Whether the command contains one of torch's launchers; see `texts`."""
    return any(LAUNCHER.search(text) for text in texts(command, read, variables))


@dataclass(frozen=True)
class PythonCommand:
    """`python -u SCRIPT ARGUMENTS`, or the same with a `module`."""

    script: str
    arguments: tuple[str, ...]
    module: bool = False


def python_command(command: Sequence[str]) -> PythonCommand | None:
    """Parse a Python command; None for any other command, and for one with options of Python that ranks would
    not get."""
    if not command or not re.fullmatch(r"python[\d.]*", _name(command[0])):
        return None
    rest = list(command[1:])
    while rest and rest[0] == "-u":
        rest.pop(0)
    if rest[:1] == ["-m"] and len(rest) > 1:
        return PythonCommand(rest[1], tuple(rest[2:]), module=True)
    if not rest or rest[0].startswith("-"):
        return None
    return PythonCommand(rest[0], tuple(rest[1:]))


def starts_ranks(
    command: Sequence[str], read: Callable[[str], str], variables: Mapping[str, str] = NO_VARIABLES
) -> bool:
    """Whether the command runs a script or module with Python, directly or through a shell (by -c, or by a
    shell script) or a wrapper, in a container or not; see `texts`."""
    command = command[in_container(command, read) :]
    if python_command(command) is not None:
        return True
    program = _name(command[0]) if command else ""
    line, *scripts = texts(command, read, variables)
    direct = program in SHELLS or program in WRAPPERS or program.startswith("python")
    return any(PYTHON.search(text) for text in ([line, *scripts] if direct else scripts))


def in_container(command: Sequence[str], read: Callable[[str], str]) -> int:
    """The index of the word with which a container's own command begins: the first program or shell script
    after the image that may start a training. 0 if there is none."""
    program = _name(command[0]) if command else ""
    if program not in CONTAINERS:
        return 0
    runs = [place for place, word in enumerate(command) if word in ("exec", "run")]
    if program != "shifter" and not runs:
        return 0
    first = 1 if program == "shifter" else runs[0] + 2  # after the image
    return next((place for place in range(first, len(command)) if _may_start(command[place], read)), 0)


def with_its_path(srun: CommandLine) -> CommandLine:
    """The step with its program as srun names it to tasks: by its whole path, which is a script's $0. What a
    container has, only the container knows."""
    path = None if in_image(srun) else _path(srun)
    return replace(srun, command=[path, *srun.command[1:]]) if path else srun


def is_missing(srun: CommandLine) -> bool:
    """Whether the step's program is nowhere to be found, or cannot be run; srun says so."""
    return bool(srun.command) and not in_image(srun) and _path(srun) is None


def _path(srun: CommandLine) -> str | None:
    first = srun.command[0]
    here = os.path.join(os.getcwd(), srun.last("chdir") or "", first)
    return here if os.path.isfile(here) and os.access(here, os.X_OK) else programs.located(first)


def finds_program(srun: CommandLine, environment: Mapping[str, str]) -> bool:
    """Whether tasks find the step's program: srun's --export may take PATH from them."""
    told = srun.last("export") or environment.get("SLURM_EXPORT_ENV", "ALL")
    names = {entry.partition("=")[0] for entry in told.split(",")}
    return not {"ALL", "all", "PATH"}.isdisjoint(names) or "/" in "".join(srun.command[:1]) or in_image(srun)


def in_image(srun: CommandLine) -> bool:
    """Whether the step runs in a container of pyxis'."""
    return srun.last("container-image", "container-name") is not None


def _may_start(word: str, read: Callable[[str], str]) -> bool:
    name, first_line = _name(word), read(word).partition("\n")[0]
    known = name in SHELLS or name in WRAPPERS or name in ("accelerate", "fabric", "lightning", "torchrun")
    script = first_line.startswith("#!") and IMAGE_PROGRAM not in first_line
    return known or script or re.fullmatch(r"python[\d.]*", name) is not None


def _name(word: str) -> str:
    """A program's name without its folder."""
    return word.rpartition("/")[2]


def names_python(command: Sequence[str], variables: Mapping[str, str] = NO_VARIABLES) -> bool:
    """Whether the command contains a Python script or module, whichever program starts it."""
    return PYTHON.search(shell.spelled_out(" ".join(command), variables)) is not None


def part_of(
    srun: CommandLine, environment: Mapping[str, str], nodes: Sequence[str], read: Callable[[str], str]
) -> str | None:
    """A name for the training of which a step on one of these nodes is a part: the same for all parts. None
    if the step is no such part."""
    if len(nodes) < 2 or not on_one_node(srun, environment):
        return None
    line = " ".join(srun.command)
    there = texts(srun.command, read, environment)
    counts = [count for text in there for count in NODES.findall(text)]
    numbered = any(NODE_NUMBER.search(text) for text in there)
    known = {str(len(nodes)), f"{len(nodes)}:{len(nodes)}"}
    if not (counts or numbered) or any(re.match(r"\d", c) and c not in known for c in counts):
        return None
    words = NODE_NUMBER.sub(r"\1-", line).split(" ")
    node = named_node(srun, nodes)
    if len(there) > 1 and node in nodes:  # a shell script's arguments may name its node
        if (number := str(nodes.index(node))) in words:
            words[words.index(number)] = "-"
        words = ["-" if word in nodes else word for word in words]
    return hashlib.sha256(json.dumps([words, os.getcwd()]).encode()).hexdigest()[:16]


def named_node(srun: CommandLine, nodes: Sequence[str]) -> str:
    """The node that a step on one node names; "" if Slurm may choose it."""
    relative = srun.last("relative") or ""
    if relative.isdigit() and int(relative) < len(nodes):
        return nodes[int(relative)]
    if (file := srun.last("nodefile")) is not None:
        return ",".join(COMMENT.sub("", read_shell_script(file)).split())
    return srun.last("nodelist") or ""


def is_part(command: Sequence[str], read: Callable[[str], str], variables: Mapping[str, str]) -> bool:
    """Whether a launcher's command says how many nodes there are, or which one this is."""
    found = texts(command, read, variables)
    return any(NODES.search(text) or NODE_NUMBER.search(text) for text in found)


def on_one_node(srun: CommandLine, environment: Mapping[str, str]) -> bool:
    """Whether srun starts only one task."""
    nodes, tasks = srun.last("nodes"), srun.last("ntasks")
    if nodes is None or tasks is not None:
        return tasks == "1"
    each = srun.last("ntasks-per-node", "tasks-per-node")
    return nodes in ("1", "1-1") and "1" in (each, environment.get("SLURM_NTASKS", "1"))


def tasks_a_node(srun: CommandLine, environment: Mapping[str, str], active: int) -> int:
    """The number of tasks on each of the active nodes; 0 if it is not the same on all."""
    nodes = srun.last("nodes") or environment.get("SLURM_NNODES", "")
    if nodes not in (str(active), f"{active}-{active}"):
        return 0
    each, tasks = srun.last("ntasks-per-node", "tasks-per-node"), srun.last("ntasks")
    if each is None and tasks is None:
        each, tasks = environment.get("SLURM_NTASKS_PER_NODE"), environment.get("SLURM_NTASKS")
    if tasks is not None and tasks.isdigit():
        return 0 if int(tasks) % active else int(tasks) // active
    return int(each) if each is not None and each.isdigit() else int(each is None)


def read_shell_script(word: str) -> str:
    """The beginning of the file with this name; "" if there is none."""
    try:
        with foreign.reading(word) as file:
            return file.read(SCRIPT_BYTES_MAX).decode(errors="replace")
    except (OSError, ValueError):
        return ""


# ---- torchrun's command line

ALONE = ("standalone", "module", "no-python", "run-path", "use-env", "virtual-local-rank", "help")
WITH_VALUE = (
    "nnodes", "nproc-per-node", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "max-restarts",
    "monitor-interval", "start-method", "event-log-handler", "role", "log-dir", "redirects", "tee",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "node-rank", "master-addr",
    "master-port", "local-addr", "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
)  # fmt: skip
SHORT = {"module": "-m", "redirects": "-r", "tee": "-t", "help": "-h"}
# Options for the nodes' rendezvous. They have no effect, because jurymast brings the nodes together itself.
RENDEZVOUS = frozenset({
    "nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "standalone", "node-rank",
    "master-addr", "master-port", "local-addr",
})  # fmt: skip
KEPT = frozenset({"nproc-per-node", "module", "no-python", "use-env"})
# Messages for options that would change the ranks and are not supported yet.
NOT_YET = {
    "run-path": "give the script without --run-path",
    "virtual-local-rank": "leave it out",
}
# Options that torch reads from a variable with this prefix if they are not given.
VARIABLES = "PET_"
VARIABLES_READ = ("nproc-per-node", "nnodes", "max-restarts", "no-python", "run-path", "module")
LOCAL_RANK = "--local-rank=${local_rank}"  # torch fills in the number


@dataclass(frozen=True)
class TorchrunLaunch:
    """What a launcher starts: a script, a `module` or a `program`, with its arguments. `ranks` per node,
    as written: a number, or auto, gpu, cpu. `nodes`: the largest number of nodes, "" if not given.
    `ignored`: options that have no effect here."""

    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    ranks: str = "1"
    nodes: str = ""
    ignored: tuple[str, ...] = ()


SCRIPT = "training_script"  # torch's name


class _Options(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(add_help=False, argument_default=argparse.SUPPRESS)
        for name in (*ALONE, *WITH_VALUE):
            flags = (f"--{name}", f"--{name.replace('-', '_')}", SHORT.get(name, f"--{name}"))
            action = "store_true" if name in ALONE else "store"
            self.add_argument(*dict.fromkeys(flags), dest=name, action=action)
        self.add_argument(SCRIPT)
        self.add_argument("training_script_args", nargs=argparse.REMAINDER)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"torchrun: {'no training script given' if SCRIPT in message else message}")


def parse(words: Sequence[str], environment: Mapping[str, str], *, launch: bool = False) -> TorchrunLaunch:
    """What a torchrun command starts. `words` follow `torchrun`, or with `launch`, `python -m
    torch.distributed.launch`. Raises UsageError."""
    given: dict[str, Any] = vars(_Options().parse_args(words))  # in the order in which they are typed
    script, arguments = given.pop(SCRIPT), given.pop("training_script_args")
    for name in VARIABLES_READ:
        variable = VARIABLES + name.upper().replace("-", "_")
        if variable in environment:
            given.setdefault(name, environment[variable])
    for name, hint in NOT_YET.items():
        if name in given:
            raise UsageError(f"torchrun's --{name} is not supported yet", hint=hint)
    if launch and "use-env" not in given:
        arguments = [LOCAL_RANK, *arguments]
    return TorchrunLaunch(
        script=script,
        arguments=tuple(arguments),
        module="module" in given,
        program="no-python" in given,
        ranks=given.get("nproc-per-node", "1"),
        nodes="1" if "standalone" in given else given.get("nnodes", "").rpartition(":")[2],
        ignored=tuple(name for name in given if name not in RENDEZVOUS | KEPT),
    )


def rank_count(ranks: str, gpus: int, processors: int) -> int:
    """The number of ranks on a node, as torch counts them: a number; `gpu`, its GPUs; `cpu`, its processors;
    `auto`, its GPUs, or its processors if it has none. Raises UsageError."""
    if ranks.isdigit() and int(ranks):
        return int(ranks)
    if ranks == "gpu" and gpus:
        return gpus
    if ranks == "auto":
        return gpus or processors
    if ranks == "cpu":
        return processors
    raise UsageError(
        f"torchrun: --nproc-per-node={ranks}: must be a number, auto, cpu or gpu (if the node has one)"
    )
