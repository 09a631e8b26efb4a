"""Slurm's variables as scripts and ranks see them: in a job of the active nodes alone, whatever the number of
spare ones, and whoever started the ranks.

`KINDS` is the only table of the variables that depend on a job's nodes. Plain runs and batch scripts use the
same functions, so neither knows a variable that the other does not. Slurm repeats some variables with an
ending for the first component of a heterogeneous job, which every job has; these change alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby

# What a variable says: how many nodes there are, which, how many tasks, a total that grows with the nodes, or
# an entry for each node (`8(x2),4`).
NODES, HOSTS, TASKS, TOTAL, EACH, TASKS_EACH = "nodes", "hosts", "tasks", "total", "each", "tasks each"
KINDS = {
    "SLURM_NNODES": NODES, "SLURM_JOB_NUM_NODES": NODES, "SLURM_STEP_NUM_NODES": NODES,
    "SLURM_JOB_NODELIST": HOSTS, "SLURM_NODELIST": HOSTS, "SLURM_STEP_NODELIST": HOSTS,
    "SLURM_NTASKS": TASKS, "SLURM_NPROCS": TASKS, "SLURM_STEP_NUM_TASKS": TASKS,
    "SLURM_GPUS": TOTAL, "SLURM_JOB_CPUS_PER_NODE": EACH,
    "SLURM_TASKS_PER_NODE": TASKS_EACH, "SLURM_STEP_TASKS_PER_NODE": TASKS_EACH,
}  # fmt: skip
# The number of a task, and how many there are, as PMI and PMIx tell it where srun starts tasks for an MPI.
NUMBERS_OF_MPI, TASKS_OF_MPI = ("PMI_RANK", "PMIX_RANK"), ("PMI_SIZE",)
OF_A_COMPONENT = re.compile(r"_(?:HET|PACK)_GROUP_0$")
# How srun was told to bind tasks; ours binds none.
BINDING = re.compile(r"SLURM_(CPU|MEM|GPU|TRES)_BIND(_|$)")
# What Slurm, its plugins for GPUs and PMI, and jurymast set for the processes of one job. A job submitted
# from inside another one must not have it: srun reads its options from such variables.
OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|SRUN|PMI|PMIX|PMI2)_|SBATCH_(CPU|MEM)_BIND|TORCHELASTIC_|JURYMAST_|"
    r"(CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK)$"
)
# Of these, what people and sites set themselves, for all jobs and commands.
OF_THE_USER = re.compile(
    r"SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT|TIME_FORMAT|MPI_TYPE|BITSTR_LEN|EXIT_ERROR|DEBUG_FLAGS|UMASK)$|"
    r"JURYMAST_(RUNS|SCRIPT_RUN|SCRIPT_JOB|STEP)$"  # the last three lead out of a batch script's own PATH
)

# Slurm counts a job's script, and the shell of an allocation, among the steps of the job: by numbers that it
# never prints, with a sign from 26.05 on. Releases before that tell a script no number.
NAMES_OF_STEPS = {
    "": "batch", "-5": "batch", "4294967291": "batch", "-6": "interactive", "4294967290": "interactive",
}  # fmt: skip


def kind_of(name: str) -> str | None:
    """What the variable says of the nodes; None if nothing."""
    return KINDS.get(OF_A_COMPONENT.sub("", name))


def step_in(variables: Mapping[str, str]) -> str:
    """The step with these variables as Slurm prints it: the number of one that srun has started, or a
    name."""
    number = variables.get("SLURM_STEP_ID", "")
    return NAMES_OF_STEPS.get(number, number)


def of_active_nodes(variables: Mapping[str, str], asked: int, active: int, hosts: str) -> dict[str, str]:
    """The `variables` of a job that requested `asked` nodes, as they would be in a job with only the first
    `active` of them. `hosts`: Slurm's list of these nodes."""
    found = {}
    for name, value in variables.items():
        match kind_of(name):
            case "nodes":
                found[name] = str(active)
            case "hosts":
                found[name] = hosts
            case "tasks" | "total":
                found[name] = _share(value, active, asked)
            case "each" | "tasks each":
                found[name] = _first(value, active)
            case _:
                found[name] = value
    return found


def of_a_task(
    variables: Mapping[str, str], hosts: str, *, nodes: int, each: int = 1, node: int = 0, local: int = 0
) -> dict[str, str]:
    """The variables that Slurm would set for a task: the one with number `local` of the `each` tasks of the
    node with number `node` of `nodes`, whose list is `hosts`. `variables`: those of its step as it is."""
    values = {
        NODES: str(nodes),
        HOSTS: hosts,
        TASKS: str(nodes * each),
        TASKS_EACH: str(each) if nodes == 1 else f"{each}(x{nodes})",
    }
    names = [*(name for name in variables if kind_of(name)), *KINDS]
    told = {name: values[kind] for name in names if (kind := KINDS[OF_A_COMPONENT.sub("", name)]) in values}
    first = node * each
    of_mpi = {name: str(first + local) for name in NUMBERS_OF_MPI if name in variables}
    of_mpi |= {name: values[TASKS] for name in TASKS_OF_MPI if name in variables}
    return {
        **of_mpi,
        **{name: _first(value, nodes) for name, value in variables.items() if kind_of(name) == EACH},
        **told,
        "SLURM_PROCID": str(first + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(first + number) for number in range(each)),
    }


def without_a_job(variables: Mapping[str, str]) -> dict[str, str]:
    """The `variables` without what a job that they come from has set. They are as they were if they come from
    no job."""
    if not {"SLURM_JOB_ID", "SLURM_JOBID", "JURYMAST_RUN_DIR"} & variables.keys():
        return dict(variables)
    return {
        name: value
        for name, value in variables.items()
        if not OF_A_JOB.match(name) or OF_THE_USER.match(name)
    }


def scaled(value: str, nodes: int, active: int) -> str:
    """A total for `active` nodes (`16`, `gpu:16` or `h100:16,a100:8`), scaled to `nodes` nodes."""
    return re.sub(r"(?<![^:,])\d+(?=,|$)", lambda found: str(-(-int(found[0]) * nodes // active)), value)


def _share(value: str, active: int, asked: int) -> str:
    """The share of a total (`16`, `h100:16`) for `active` of `asked` nodes."""
    kind, colon, number = value.rpartition(":")
    return f"{kind}{colon}{int(number) * active // asked}" if number.isdigit() else value


def _first(value: str, active: int) -> str:
    """The first entries of a list with one entry per node, equal ones together: `8(x2),4`."""
    entries: list[str] = []
    for part in value.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return value
        entries += [match[1]] * int(match[2] or 1)
    runs = [(entry, len(list(same))) for entry, same in groupby(entries[:active])]
    return ",".join(entry if count == 1 else f"{entry}(x{count})" for entry, count in runs)
