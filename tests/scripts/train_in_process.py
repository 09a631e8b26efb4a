"""A small training within `Checkpointer.run`: an MLP with dropout and a batch norm under DDP, FSDP2 or HSDP
(gloo), with its own random generators and a loader's position on each rank. It does the same bits every time.

`--trace`: each rank writes there after each step: attempt, its process id, step, a hash of the parameters,
how many graphs it has compiled so far, and with `--inside` what it holds after each first step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from train_tiny import sha256_of  # type: ignore[import-not-found]

import jurymast
from jurymast.checkpoint import RandomState

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--device", default="cpu", help="of all ranks")
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--step-time", type=float, default=0.0, help="seconds that a step takes besides")
parser.add_argument("--save-every", default=None)
parser.add_argument("--checkpoints", default=None)
parser.add_argument(
    "--norm", choices=("batch", "layer"), default="batch", help="only a batch norm has buffers"
)
parser.add_argument("--workers", type=int, default=0, help="of each rank's loader")
parser.add_argument("--compile", action="store_true", help="the model, before `run`")
parser.add_argument("--before", action="store_true", help="make DDP before `run`, which rules recovery out")
parser.add_argument("--inside", action="store_true", help="make model and optimizer in the function of `run`")
parser.add_argument(
    "--shards", choices=("", "all", "node"), default="", help="FSDP2 over all ranks, or HSDP: over the ranks "
    "of a node",
)  # fmt: skip
parser.add_argument("--own-bytes", type=int, default=0, help="of state of each rank's own")
parser.add_argument(
    "--fault", default="", metavar="SIGNAL:STEP:RANK:WHERE", help="the rank's process gets the signal in "
    "attempt 1, at the beginning of the step after STEP, amid its backward pass, or after the update of STEP",
)  # fmt: skip
parser.add_argument(
    "--stand", type=int, default=-1, metavar="STEP", help="in attempt 1 all ranks meet after this step, and "
    "those of the second node stand still then, which a file beside the trace tells",
)  # fmt: skip
parser.add_argument("--again", type=int, default=-1, help="this rank is killed at the start of attempt 2")
parser.add_argument("--trace", type=Path, default=None)
parser.add_argument("--out", type=Path, default=None, help="JSON with the final weights' sha256")


def strike(fault: str, step: int, rank: int, where: str) -> None:
    if fault.endswith(f":{step}:{rank}:{where}") and os.environ.get("JURYMAST_ATTEMPT") == "1":
        os.kill(os.getpid(), getattr(signal, fault.partition(":")[0]))


def stand(trace: Path, rank: int) -> None:
    """What ranks had sent to each other before they meet is on its way."""
    dist.barrier()
    if os.environ["GROUP_RANK"] == "1":
        trace.with_name(f"stands.{rank}").touch()
        while True:
            signal.pause()


class Numbers(Dataset):  # type: ignore[misc]
    """Inputs that depend on their index only."""

    def __init__(self, rank: int, width: int, count: int) -> None:
        self.rank, self.width, self.count = rank, width, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index * 1000 + self.rank)
        return torch.randn(8, self.width, generator=generator)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alike_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of what is alike on all ranks, as the statistics of a batch norm are not."""
    moments = (one for each in optimizer.state.values() for one in each.values())
    data = (whole(one).detach().cpu().numpy().tobytes() for one in (*model.parameters(), *moments))
    return hashlib.sha256(b"".join(data)).hexdigest()


def compiled_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0


class Position:
    """How far the loader is; different on each rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.drawn, self.ballast = rank, 0, os.urandom(size)

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "drawn": self.drawn, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rank"] != self.rank:
            raise ValueError(f"rank {self.rank} was given the state of rank {state['rank']}")
        self.drawn = state["drawn"]


def parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """All that holds memory of a model and its optimizer."""
    moments = [one for each in optimizer.state.values() for one in each.values()]
    own = [tensor for one in model.parameters() for tensor in (one, one.grad)]
    return [*model.modules(), optimizer, *own, *model.buffers(), *moments]


def held(before: list[Any]) -> dict[str, int]:
    """What is left of the call before, and how many process groups torch knows."""
    left = sum(one() is not None for one in before)
    return {"left": left, "groups": len(dist.distributed_c10d._world.pg_map)}


def trace(path: Path, rank: int, step: int, sha256: str, held: dict[str, int]) -> None:
    told = {
        "attempt": int(os.environ.get("JURYMAST_ATTEMPT", "0")), "rank": rank, "pid": os.getpid(),
        "step": step + 1, "sha256": sha256,
        "t": time.time(), "compiled": compiled_graphs(), "held": held,
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(told) + "\n")


def sharded(model: nn.Sequential, over: str) -> None:
    """The last layer is the root's: its gradients are there first, and reduced last."""
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    size = dist.get_world_size()
    if over == "all":
        mesh = init_device_mesh("cpu", (size,))
    else:
        mesh = init_device_mesh("cpu", (size // each, each), mesh_dim_names=("copy", "shard"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)


def made(args: argparse.Namespace, rank: int, position: Position) -> dict[str, Any]:
    torch.manual_seed(1)
    width = args.width
    norm = nn.BatchNorm1d(width) if args.norm == "batch" else nn.LayerNorm(width)
    model = nn.Sequential(
        nn.Linear(width, width), norm, nn.GELU(), nn.Dropout(0.2), nn.Linear(width, width)
    ).to(args.device)
    if args.shards:
        sharded(model, args.shards)

    def amid_backward(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda _: strike(args.fault, position.drawn, rank, "backward"))

    if args.fault.endswith(":backward"):  # a compiled model would be compiled again as the position changes
        model[2].register_forward_hook(amid_backward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 30])
    torch.manual_seed(7 + rank)  # dropout differs on each rank
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def parallel(model: nn.Module) -> nn.Module:
    """Looking for unused parameters keeps DDP from rebuilding its buckets after its first step."""
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")
    if os.environ.get("RANK") == str(args.again) and os.environ.get("JURYMAST_ATTEMPT") == "2":
        os.kill(os.getpid(), signal.SIGKILL)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    position = Position(rank, args.own_bytes)
    state: dict[str, Any] = {"position": position, "random": RandomState()}
    fast = wrapped = None
    if not args.inside:
        state.update(made(args, rank, position))
        fast = torch.compile(state["model"]) if args.compile else state["model"]
        wrapped = parallel(fast) if args.before else None
    checkpoint = jurymast.Checkpointer(state, directory=args.checkpoints, every=args.save_every)

    before: list[weakref.ref[Any]] = []  # of the call of `train` before

    def train(start: int) -> None:
        nonlocal before
        if args.inside:
            state.update(made(args, rank, position))
            start = checkpoint.restore()
        model, optimizer, schedule = state["model"], state["optimizer"], state["schedule"]
        ddp = wrapped or (fast or model if args.shards else parallel(fast or model))
        numbers = Numbers(rank, args.width, args.steps)
        order = list(range(start, args.steps))
        # A generator of its own: by default each new iterator draws a number from torch's.
        loader = DataLoader(
            numbers, batch_size=None, sampler=order, num_workers=args.workers, generator=torch.Generator()
        )
        for step, inputs in zip(order, loader, strict=True):
            time.sleep(args.step_time)
            if step == args.stand and os.environ.get("JURYMAST_ATTEMPT") == "1":
                stand(args.trace, rank)
            strike(args.fault, step, rank, "begin")
            assert position.drawn == step, f"rank {rank} has drawn {position.drawn}, not {step}"
            inputs = inputs.to(args.device)
            loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1).tanh())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            strike(args.fault, step, rank, "update")
            schedule.step()
            position.drawn += 1
            checkpoint.step(step + 1)
            holds = {}
            if args.inside and step == start:
                holds = held(before)
                before = [weakref.ref(one) for one in parts(model, optimizer) if one is not None]
            if args.trace:
                sha256 = alike_of(model, optimizer) if step % 5 == 0 else ""
                trace(args.trace.with_name(f"{args.trace.name}.{rank}"), rank, step, sha256, holds)

    checkpoint.run(train)
    if args.out:
        # A batch norm's statistics are each rank's own, and rank 0's count.
        found = sha256_of({name: whole(one) for name, one in state["model"].state_dict().items()})
        if rank == 0:
            args.out.write_text(json.dumps({"sha256": found}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
