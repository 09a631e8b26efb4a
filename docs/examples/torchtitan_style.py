"""A trainer in the style of torchtitan's, which is part of its own state."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast_torchtitan
from small import Points, finish, options, pace, small_model


class Trainer:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.step, self.tokens_seen = asked, 0, 0
        self.model = fully_shard(small_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, 1.0, asked.steps)
        sampler, generator = DistributedSampler(Points(), shuffle=False), torch.Generator()
        self.loader = StatefulDataLoader(Points(), batch_size=8, sampler=sampler, generator=generator)
        self.checkpointer = jurymast_torchtitan.CheckpointManager(
            {
                "model": self.model,
                "optimizer": self.optimizer,
                "lr_scheduler": self.schedule,
                "dataloader": self.loader,
                "train_state": self,
            }
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "tokens_seen": self.tokens_seen, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens_seen = state["step"], state["tokens_seen"]
        torch.set_rng_state(state["random"])

    def train(self) -> None:
        self.checkpointer.load()
        batches = iter(self.loader)
        while self.step < self.asked.steps:
            started = time.monotonic()
            self.step += 1
            self.train_step(*next(batches))
            self.checkpointer.save(self.step, last_step=self.step == self.asked.steps)
            pace(started, self.asked.step_time)
        self.checkpointer.close()

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.tokens_seen += inputs.numel()
        loss = (self.model(inputs) - targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    trainer = Trainer(options(__doc__))
    trainer.train()
    whole = {name: value.full_tensor() for name, value in trainer.model.state_dict().items()}
    finish(whole, dist.get_rank(), trainer.asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
