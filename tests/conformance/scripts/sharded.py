"""Fully sharded (FSDP2), with a loader that can be saved, a checkpoint of all ranks and its return."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, loader, steps):
    batches = iter(loader)
    for _step in range(steps):
        batch = torch.stack([torch.full((4,), float(value)) for value in next(batches)])
        loss = model(batch / 16).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.6f}")


def full(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loader = StatefulDataLoader(list(range(rank, 32, 2)), batch_size=2, num_workers=2, collate_fn=list)
    model, optimizer = build()
    train(model, optimizer, loader, 3)
    weights, moments = get_state_dict(model, optimizer)
    state = {"weights": weights, "moments": moments, f"loader-{rank}": loader.state_dict()}
    dcp.async_save(state, checkpoint_id="checkpoint").result()
    print(sorted(os.listdir("checkpoint")))

    again, optimizer_again = build()
    weights, moments = get_state_dict(again, optimizer_again)
    state = {"weights": weights, "moments": moments, f"loader-{rank}": loader.state_dict()}
    dcp.load(state, checkpoint_id="checkpoint")
    set_state_dict(again, optimizer_again, model_state_dict=state["weights"], optim_state_dict=state["moments"])
    loader.load_state_dict(state[f"loader-{rank}"])
    train(again, optimizer_again, loader, 3)
    whole = full(again)
    print({name: value.sum().item() for name, value in whole.items()})
    if rank == 0:
        torch.save(whole, "model.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
