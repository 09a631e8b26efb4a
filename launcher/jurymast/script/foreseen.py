"""What will happen to the lines of a batch script that start something, as far as their text shows it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jurymast.cluster.sbatch import CommandLine
from jurymast.script import evidence, recognise, srun

# Words before a command that do not change which one it is.
BEFORE = frozenset({"!", "command", "do", "else", "exec", "if", "nohup", "then", "time", "while"})
# Launchers whose ranks jurymast does not see.
UNSEEN = {
    "deepspeed": "starts its ranks by itself (ssh, pdsh)", "horovodrun": "starts its ranks by itself",
    "mpiexec": "MPI starts the ranks", "mpirun": "MPI starts the ranks",
}  # fmt: skip
INSTEAD = "put `srun torchrun --nproc-per-node=N` in its place"
NODES = re.compile(r"\$\{?SLURM_(JOB_NUM_NODES|NNODES)\}?")


@dataclass(frozen=True)
class Foreseen:
    """What happens to the command on this `line` of the script, and `why`. `protected`: failures are
    handled."""

    line: int
    command: str
    protected: bool
    why: str


def foreseen(text: str, told: CommandLine, active: int, train: str = "") -> list[Foreseen]:
    """Return the lines of a batch script that start trainings, steps or Python. `told`: sbatch's options;
    `active`: nodes of the run; `train`: see `RunPlan`."""
    variables = {"SLURM_NNODES": str(active)}
    for name, option in (("SLURM_NTASKS_PER_NODE", "ntasks-per-node"), ("SLURM_NTASKS", "ntasks")):
        if (value := told.last(option)) is not None:
            variables[name] = value
    found = []
    for number, line in _lines(NODES.sub(str(active), text)):
        if (fate := _fate(line, variables, active, train)) is not None:
            found.append(Foreseen(number, line, *fate))
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines with the numbers of their first; those that end in a backslash are joined."""
    whole, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        first = first if whole else number
        whole += line.strip()
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip() + " "
            continue
        if whole and not whole.startswith("#"):
            yield first, whole
        whole = ""


def _fate(line: str, variables: Mapping[str, str], active: int, train: str) -> tuple[bool, str] | None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quote that another line closes
        words = line.split()
    while words and (words[0] in BEFORE or re.match(r"\w+=", words[0])):
        words.pop(0)
    program = words[0].rpartition("/")[2] if words else ""
    if program == "srun":
        return _step(words, variables, active, train)
    if program in UNSEEN:
        return False, f"{program}: {UNSEEN[program]}, so nothing is handled; {INSTEAD}"
    if recognise.starts_launcher(words, recognise.read_shell_script):
        return True, "a launcher: runs on all nodes, as if srun preceded it"
    if recognise.names_python(words):
        return False, "runs once, on the first node, as under sbatch; `srun` or `torchrun` before it trains"
    return None


def _step(words: list[str], variables: Mapping[str, str], active: int, train: str) -> tuple[bool, str]:
    if "/" in words[0]:
        return False, "srun by its full path is not jurymast's: the step runs as under sbatch"
    read, step = recognise.read_shell_script, srun.parse(words[1:])
    if step is None:
        return False, "its options are not known here, or it has several parts: runs as under sbatch"
    program = step.command[0].rpartition("/")[2] if step.command else ""
    tasks = recognise.tasks_a_node(step, variables, active)
    if recognise.starts_launcher(step.command, read):
        alone = recognise.NODES.search(" ".join(step.command))
        if "--standalone" in step.command or (alone is not None and alone[1] == "1"):
            return active == 1, "one training on each node" + (", without failure handling" * (active > 1))
        return True, "a launcher: runs under the agents on all nodes, spares in reserve"
    if program in UNSEEN:
        return False, f"{program}: {UNSEEN[program]}, so nothing is handled; {INSTEAD}"
    if tasks * active <= 1 or not recognise.starts_ranks(step.command, read):
        return False, "not a training: runs as under sbatch"
    if train:
        return (
            train == "yes",
            f"each task {'is a rank' if train == 'yes' else 'is for itself'}, by `train: {train}`",
        )
    shown = evidence.shows(step.command, read, variables)
    if shown.independent:
        return False, "independent tasks, as nothing in it makes a process group (`#JURYMAST train: yes`)"
    why = f"`{shown.training}` in it shows a training" if shown.training else "its text does not show which"
    return True, f"each task is a rank: {why}; srun's rules hold until the tasks make a process group"
