"""The same training as `train.py`, saved by jurymast's Checkpointer: ranks start anew after a failure."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from train import StepFile, model_of, parser, train_step  # type: ignore[import-not-found]

import jurymast


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = jurymast.Checkpointer(
        {"model": model, "optimizer": optimizer}, every=f"{args.save_every} steps"
    )
    start = checkpoint.restore()
    file = StepFile(args.record)
    for step in range(start + 1, args.steps + 1):
        train_step(args, model, optimizer, step)
        file.done(step)
        checkpoint.step(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
