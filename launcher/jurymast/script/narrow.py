"""Slurm's variables as they would be without the spare nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

COUNTS = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
TOTALS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_GPUS")
EACH = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")


def narrowed(environment: Mapping[str, str], asked: int, active: int, hosts: str) -> dict[str, str]:
    """The `environment` of a job that requested `asked` nodes, as it would be in a job with only the first
    `active` of them. `hosts`: Slurm's list of these nodes."""
    values = dict(environment)
    values.update({name: str(active) for name in COUNTS if name in environment})
    values.update({name: hosts for name in LISTS if name in environment})
    values.update({n: _share(values[n], active, asked) for n in TOTALS if n in environment})
    values.update({name: _first(values[name], active) for name in EACH if name in environment})
    return values


def _share(value: str, active: int, asked: int) -> str:
    """The share of a total (`16`, `h100:16`) for `active` of `asked` nodes."""
    kind, colon, number = value.rpartition(":")
    return f"{kind}{colon}{int(number) * active // asked}" if number.isdigit() else value


def _first(value: str, active: int) -> str:
    """The first entries of a list with repetitions that has one entry per node: `8(x2),4`."""
    entries: list[str] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return value
        entries += [match[1]] * int(match[2] or 1)
    return _repeated(entries[:active])


def _repeated(entries: Sequence[str]) -> str:
    parts: list[list[str]] = []
    for entry in entries:
        if parts and parts[-1][0] == entry:
            parts[-1].append(entry)
        else:
            parts.append([entry])
    return ",".join(p[0] if len(p) == 1 else f"{p[0]}(x{len(p)})" for p in parts)
