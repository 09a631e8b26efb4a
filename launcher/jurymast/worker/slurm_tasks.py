"""What Slurm would have told a process that it had started itself, for ranks of a batch script.

Under `srun torchrun` Slurm starts a torchrun on each node, and ranks have their torchrun's variables. Under
`srun python train.py` Slurm starts each rank, and the script makes its process group of Slurm's variables.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")


def task_variables(rank: Mapping[str, str], *, each_rank: bool) -> dict[str, str]:
    """For the rank that torch gave these variables. `each_rank`: Slurm would have started the rank, not a
    torchrun above it."""
    nodes, node = int(rank["GROUP_WORLD_SIZE"]), int(rank["GROUP_RANK"])
    each = int(rank["LOCAL_WORLD_SIZE"]) if each_rank else 1
    local = int(rank["LOCAL_RANK"]) if each_rank else 0
    per_node = str(each) if nodes == 1 else f"{each}(x{nodes})"
    values = {
        "SLURM_PROCID": str(node * each + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(node * each + i) for i in range(each)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), str(nodes)),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(nodes * each)),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), per_node),
    }
    if each_rank:
        values["SLURM_NTASKS_PER_NODE"] = str(each)
    return values


def as_a_task(rank: dict[str, str], step: Mapping[str, str]) -> None:
    """Take out of a rank's variables what it would not have without torchrun: its script makes its own store,
    at a port of its own. The first host is where rank 0 is."""
    for name in [
        name for name in rank if name.startswith("TORCHELASTIC_") and name != "TORCHELASTIC_ERROR_FILE"
    ]:
        del rank[name]
    rank.pop("MASTER_PORT", None)
    for name in LISTS:
        hosts = expanded(step.get(name, ""))
        if hosts and not _is(hosts[0], rank["MASTER_ADDR"]):
            rank[name] = ",".join([rank["MASTER_ADDR"], *hosts[1:]])


def expanded(text: str) -> list[str]:
    """The hosts of a Slurm list as it is usual: `n[01-03,7],m1`."""
    hosts: list[str] = []
    rest = text
    while rest:
        head, bracket, after = rest.partition("[")
        if not bracket or "," in head:
            host, _, rest = rest.partition(",")
            hosts.append(host)
            continue
        ranges, _, rest = after.partition("]")
        tail, _, rest = rest.partition(",")
        for part in ranges.split(","):
            low, _, high = part.partition("-")
            last = int(high or low)
            hosts += [f"{head}{number:0{len(low)}d}{tail}" for number in range(int(low), last + 1)]
    return hosts


def _is(host: str, address: str) -> bool:
    try:
        return address in (host, socket.gethostbyname(host))
    except OSError:
        return False
