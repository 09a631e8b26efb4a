"""How many ranks a node gets when nobody said: one for each GPU that sbatch's options ask for on a node."""

from __future__ import annotations

from collections.abc import Mapping

from jurymast.cluster.sbatch_options import CommandLine
from jurymast.errors import UsageError


def ranks_per_node(line: CommandLine, environment: Mapping[str, str]) -> int:
    """GPUs a node from --gpus-per-node, --gpus-per-task (one task a node) or --gres=gpu, else 1.

    The command line wins over sbatch's own environment variables. Raises UsageError for a bad count.
    """
    for option, variable in (
        ("gpus-per-node", "SBATCH_GPUS_PER_NODE"),
        ("gpus-per-task", "SBATCH_GPUS_PER_TASK"),
        ("gres", "SBATCH_GRES"),
    ):
        text = line.last(option) or environment.get(variable, "")
        count = _gres_gpus(text) if option == "gres" else _typed_counts(text, option)
        if count:
            return count
    return 1


def _gres_gpus(text: str) -> int:
    """GPUs in a list like `gpu:h100:8,shard:4`; a name without a count means one."""
    total = 0
    for entry in filter(None, text.split(",")):
        name, _, rest = entry.removeprefix("gres/").replace("=", ":").partition(":")
        if name == "gpu":
            total += _typed_counts(rest, "gres") if rest else 1
    return total


def _typed_counts(text: str, option: str) -> int:
    """The sum of `[type:]count[,…]`; a type without a count means one."""
    total = 0
    for entry in filter(None, text.split(",")):
        last = entry.rpartition(":")[2]
        if last.isdigit():
            total += int(last)
        elif ":" not in entry and option == "gres":
            total += 1
        else:
            raise UsageError(f"--{option}={text}: {entry} has no count", hint=f"for example --{option}=8")
    return total


def visible_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that a process with these variables may use."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    return len([part for part in visible.split(",") if part.strip()])
