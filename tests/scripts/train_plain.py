"""An ordinary torchrun script that knows nothing of jurymast: it saves and loads its own checkpoints.

The same bits every time, restarted or not; 2-5 ms a step.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--save-every", type=int, default=10, help="steps")
parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")
parser.add_argument("--checkpoints", type=Path, default=Path("plain-checkpoint"))
parser.add_argument(
    "--each-rank", action="store_true", help="every rank writes a checkpoint, not only rank 0"
)
parser.add_argument("--out", type=Path, default=None, help="JSON with the final weights' sha256")


def write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.rename(path)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir(parents=True, exist_ok=True)
    partial = path / f".last.pt.{os.getpid()}"
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.rename(path / "last.pt")


def save_each(path: Path, step: int, rank: int, model: nn.Module) -> None:
    path.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save({"step": step, "model": model.state_dict()}, buffer)
    write(path / f"rank-{rank}.pt", buffer.getvalue())


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not (path / "last.pt").exists():
        return 0
    saved = torch.load(path / "last.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    # As use_deterministic_algorithms(True), but without its second of importing torch's compiler.
    torch.set_deterministic_debug_mode("error")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(args.width, args.width), nn.GELU(), nn.Linear(args.width, args.width))
    # Keeps DDP from rebuilding its buckets, which would change the order of sums over three and more ranks.
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = load(args.checkpoints, model, optimizer)
    if rank == 0:
        print(f"starting at step {start}", flush=True)
    for step in range(start, args.steps):
        began = time.monotonic()
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        inputs = torch.randn(args.batch, args.width, generator=generator)
        loss = nn.functional.mse_loss(parallel(inputs), inputs.roll(1, dims=1).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.step_time:
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if (step + 1) % args.save_every == 0:
            if args.each_rank:
                save_each(args.checkpoints, step + 1, rank, model)
            if rank == 0:
                save(args.checkpoints, step + 1, model, optimizer)
                print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
            dist.barrier()
    if rank == 0 and args.out:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        result = {"steps": args.steps, "restored": start, "sha256": digest.hexdigest()}
        write(args.out, json.dumps(result).encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
