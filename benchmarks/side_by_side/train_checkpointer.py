"""The same training as `train.py`, saved by jurymast's Checkpointer: ranks start anew after a failure. With
`--save-every 0` it saves as often as the policy says, and a line `STEP SECONDS` in a file of each rank tells
for how long a step stood still for a save."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from train import StepFile, model_of, parser, train_step  # type: ignore[import-not-found]

import jurymast

# A step that saves nothing takes some microseconds.
SAVES_S = 0.002


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    every = f"{args.save_every} steps" if args.save_every else None
    checkpoint = jurymast.Checkpointer({"model": model, "optimizer": optimizer}, every=every)
    start = checkpoint.restore()
    file = StepFile(args.record)
    for step in range(start + 1, args.steps + 1):
        train_step(args, model, optimizer, step)
        file.done(step)
        began = time.perf_counter()
        checkpoint.step(step)
        if not args.save_every and (stood_s := time.perf_counter() - began) > SAVES_S:
            with (args.record / f"saves-{dist.get_rank()}.txt").open("a") as told:
                told.write(f"{step} {stood_s:.6f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
