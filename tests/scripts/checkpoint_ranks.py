"""What the ranks of a test of `Checkpointer` do; run through `support.ranks.run_ranks`."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import jurymast
from jurymast.errors import CheckpointError

WIDTH = 24


class Counter:
    """State of its own on every rank."""

    def __init__(self, rank: int) -> None:
        self.value = 100 * rank

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "nested": {"seen": [self.value, {"deep": str(self.value)}]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["nested"]["seen"] == [state["value"], {"deep": str(state["value"])}]
        self.value = state["value"]


class Training:
    """A little model with batch norm under DDP or FSDP2; `seed` sets its first weights."""

    def __init__(self, seed: int, sharded: bool = False, optimizer: str = "adamw") -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5))
        self.model: nn.Module = net
        if sharded:
            fully_shard(net)
        else:
            self.model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        self.counter = Counter(self.rank)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "counter": self.counter}

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number * 100 + self.rank)
        loss = self.model(torch.randn(8, WIDTH, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.counter.value += 1

    def weights(self) -> str:
        return sha256_of(dict(self.model.named_parameters()))

    def buffers(self) -> str:
        return sha256_of(dict(self.model.named_buffers()))

    def moments(self) -> str:
        return sha256_of(
            {
                f"{number}.{name}": value
                for number, state in enumerate(self.optimizer.state.values())
                for name, value in state.items()
                if value is not None
            }
        )


def sha256_of(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(name.removeprefix("module.").encode())
        digest.update(whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_and_save(directory: str, steps: int, sharded: bool = False, optimizer: str = "adamw") -> Any:
    training = Training(1, sharded, optimizer)
    checkpoint = jurymast.Checkpointer(training.state(), directory=directory, every=10**6)
    assert checkpoint.restore() == 0
    for number in range(steps):
        training.step(number)
        checkpoint.step(number + 1)
    assert checkpoint.save(steps)
    return {
        "weights": training.weights(),
        "moments": training.moments(),
        "buffers": training.buffers(),
        "counter": training.counter.value,
    }


def restore(directory: str, more: int = 0, sharded: bool = False, optimizer: str = "adamw") -> Any:
    training = Training(2, sharded, optimizer)
    checkpoint = jurymast.Checkpointer(training.state(), directory=directory, every=10**6)
    try:
        step = checkpoint.restore()
    except CheckpointError as error:
        return {"error": str(error)}
    result = {
        "step": step,
        "weights": training.weights(),
        "moments": training.moments(),
        "buffers": training.buffers(),
        "counter": training.counter.value,
    }
    for number in range(step, step + more):
        training.step(number)
    return {**result, "trained": training.weights()}


class Stage:
    """One of two pipeline stages: its parameters have names of their own."""

    def __init__(self, seed: int) -> None:
        self.rank = dist.get_rank()
        torch.manual_seed(seed + self.rank)
        self.net = nn.ModuleDict({f"stage{self.rank}": nn.Linear(4, 4 + self.rank)})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.state: dict[str, Any] = {"net": self.net, "optimizer": self.optimizer}
        if self.rank == 1:
            self.state["head"] = {"only here": torch.randn(3)}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net[f"stage{self.rank}"](torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()

    def facts(self) -> Any:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [*self.net.parameters(), *moments, *self.state.get("head", {}).values()]
        return [self.optimizer.param_groups[0]["lr"], *(tensor.tolist() for tensor in tensors)]


def save_stage(directory: str) -> Any:
    stage = Stage(1)
    stage.step()
    assert jurymast.Checkpointer(stage.state, directory=directory).save(1)
    stage.step()
    return stage.facts()


def restore_stage(directory: str) -> Any:
    stage = Stage(5)
    stage.optimizer.param_groups[0]["lr"] = 7.0
    assert jurymast.Checkpointer(stage.state, directory=directory).restore() == 1
    stage.step()
    return stage.facts()


def storage_fails_on_rank_1(directory: str) -> Any:
    """A limit on the size of files stands for any write error: it strikes in the middle of one."""
    training = Training(1)
    training.model.register_parameter("large", nn.Parameter(torch.zeros(200_000)))
    checkpoint = jurymast.Checkpointer({"model": training.model}, directory=directory, every=10)
    start = checkpoint.restore()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    for number in range(start, 10):
        training.step(number)
        checkpoint.step(number + 1)
    during = sorted(name for name in os.listdir(directory) if name != "owner.json")
    weights = training.weights()
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    for number in range(10, 20):
        checkpoint.step(number + 1)
    return {
        "during": during,
        "after": sorted(name for name in os.listdir(directory) if name != "owner.json"),
        "weights": weights,
    }


def save_by_time(directory: str, every: str, seconds: float) -> Any:
    """Save by time, ranks being unequally fast; every step ends with a collective, as training's do."""
    rank = dist.get_rank()
    value = torch.zeros(1)
    checkpoint = jurymast.Checkpointer({"value": value}, directory=directory, every=every, keep=1000)
    step = checkpoint.restore()
    began = time.monotonic()
    going = torch.ones(1)
    while going.item():
        time.sleep(0.002 * (rank + 1))
        going = torch.tensor([float(rank != 0 or time.monotonic() - began < seconds)])
        dist.all_reduce(going, op=dist.ReduceOp.MIN)
        step += 1
        value += 1
        checkpoint.step(step)
    return {"steps": step, "saved": checkpoint._saved_step}


def fails_to_prepare(directory: str) -> Any:
    """One rank's object cannot give its state: that is an error on every rank, not a hang."""

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            if dist.get_rank() == 1:
                raise KeyError("position")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    checkpoint = jurymast.Checkpointer({"broken": Broken()}, directory=directory)
    try:
        checkpoint.save(1)
    except CheckpointError as error:
        return str(error)
    return ""


def _run(call: dict[str, Any]) -> None:
    os.environ.update(call["environment"])
    torch.set_num_threads(1)
    # As use_deterministic_algorithms(True), but without its second of importing torch's compiler.
    torch.set_deterministic_debug_mode("error")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=call["store"], rank=rank, world_size=size)
    result = globals()[call["function"]](**call["arguments"])
    Path(call["output"]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if "CALL" in globals():
    _run(globals()["CALL"])
