"""Whether a step is a training that our agents can run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from jurymast.script.srun_options import Srun

LAUNCHER = re.compile(r"\btorchrun\b|\btorch\.distributed\.(run|launch)\b|\blauncher (torchrun|launch)\b")
SCRIPT_BYTES_MAX = 1 << 16


def starts_launcher(command: Sequence[str], read: Callable[[str], str]) -> bool:
    """Whether a launcher of torch's stands in the command, in a shell's -c, or in a shell script that it
    runs. `read` gives the text of a file, "" for what is none."""
    if LAUNCHER.search(" ".join(command)):
        return True
    return any(LAUNCHER.search(text) for word in command if (text := read(word)).startswith("#!"))


def on_all_nodes(srun: Srun, environment: Mapping[str, str], active: int) -> bool:
    """Whether it starts one task on each of the active nodes."""
    nodes = srun.last("nodes") or environment.get("SLURM_NNODES", "")
    low, _, high = nodes.partition("-")
    each = srun.last("ntasks-per-node", "tasks-per-node")
    tasks = srun.last("ntasks")
    if each is None and tasks is None:
        each, tasks = environment.get("SLURM_NTASKS_PER_NODE"), environment.get("SLURM_NTASKS")
    one_each = tasks == str(active) if tasks is not None else each in (None, "1")
    return nodes.isdigit() and int(low) == active and not high and one_each


def read_shell_script(word: str) -> str:
    """The beginning of a file of this name; "" when there is none."""
    try:
        with open(word, encoding="utf-8", errors="replace") as file:
            return file.read(SCRIPT_BYTES_MAX)
    except (OSError, ValueError):
        return ""
