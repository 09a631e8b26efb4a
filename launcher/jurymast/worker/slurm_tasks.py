"""Makes the variables that Slurm would have set if it had started a rank of a batch script itself.

Under `srun torchrun` Slurm starts a torchrun on each node, and ranks have torchrun's variables. Under `srun
python train.py` Slurm starts each rank, and the script makes its process group from Slurm's variables.
"""

from __future__ import annotations

from collections.abc import Mapping

from jurymast.worker import error_file

# Variables whose value is a list with an entry for each GPU.
GPUS = (
    "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
    "SLURM_STEP_GPUS",
)  # fmt: skip


def task_variables(rank: Mapping[str, str], *, each_rank: bool) -> dict[str, str]:
    """Return Slurm's variables for the rank with these variables of torch. `each_rank`: Slurm would have
    started the rank itself, not a torchrun."""
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


def own_gpus(node: Mapping[str, str], local_rank: int, each: int) -> dict[str, str]:
    """Return the variables that show a rank `each` of its node's GPUs; {} if `each` is 0, for all."""
    names = [name for name in GPUS if name in node] if each else []
    parts = {name: node[name].split(",")[local_rank * each :][:each] for name in names}
    return {name: ",".join(devices) for name, devices in parts.items()}


def as_a_task(rank: dict[str, str]) -> None:
    """Remove the variables that a rank would not have without torchrun: its script makes its own store, at a
    port of its own."""
    for name in [name for name in rank if name.startswith("TORCHELASTIC_")]:
        if name != error_file.PATH_VARIABLE:
            del rank[name]
    for name in ("MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        rank.pop(name, None)
