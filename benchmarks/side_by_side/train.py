"""The training that every launcher is measured with: a plain torchrun script that knows none of them.

It saves and loads its own checkpoint, and each rank appends a line a step to a file of its own:
`TIME STEP ATTEMPT HOST PID PROCESSOR`, TIME being time.time() just after the step and PROCESSOR the seconds
of processor time that the rank has used so far.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--record", type=Path, required=True, help="directory of the ranks' step files")
parser.add_argument("--checkpoint", type=Path, default=None, help="file; without it nothing is saved")
parser.add_argument("--save-every", type=int, default=3, help="steps")
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--batch", type=int, default=16)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.rename(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def agreed(start: int) -> int:
    """The step that every rank starts at; ends the rank when they loaded different checkpoints."""
    ends = torch.tensor([start, -start])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if int(ends[0]) != -int(ends[1]):
        sys.exit(f"ranks loaded different checkpoints: steps {-int(ends[1])} to {int(ends[0])}")
    return start


def model_of(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width)
    )  # fmt: skip


def train_step(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    began = time.monotonic()
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    inputs = torch.randn(args.batch, args.width, generator=generator)
    loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    if args.step_time:  # before the update, which a rank that goes on in its process would finish first
        time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
    optimizer.step()


class StepFile:
    """This rank's lines, of the attempt in which it is made."""

    def __init__(self, folder: Path) -> None:
        file = folder / f"rank-{dist.get_rank()}.txt"
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        attempt = f"{os.environ.get('SLURM_RESTART_COUNT', 0)}.{restarts}"
        self._name = f"{attempt} {socket.gethostname()} {os.getpid()}"

    def done(self, step: int) -> None:
        line = f"{time.time():.6f} {step} {self._name} {time.process_time():.6f}\n"
        os.write(self._descriptor, line.encode())


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = agreed(load(args.checkpoint, model, optimizer) if args.checkpoint else 0)
    file = StepFile(args.record)
    for step in range(start + 1, args.steps + 1):
        train_step(args, model, optimizer, step)
        file.done(step)
        if dist.get_rank() == 0 and args.checkpoint and step % args.save_every == 0:
            save(args.checkpoint, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
