"""Trains with persistent loader workers; one rank stops, once, and all go on from their own checkpoint."""

import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS, STOP_AT = 12, 8


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    first = 0
    if os.path.exists("checkpoint.pt"):
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"]
    data = torch.arange(16.0).reshape(16, 1)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, persistent_workers=True)
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        if epoch == first:
            with open(f"workers-{rank}.part", "w") as file:
                file.write(" ".join(str(worker.pid) for worker in batches._workers))
            os.rename(f"workers-{rank}.part", f"workers-{rank}-{first}.txt")
        if epoch == STOP_AT and rank == 1 and "--stop" in sys.argv and not os.path.exists("stopped"):
            open("stopped", "w").close()
            threading.Event().wait()
        for batch in batches:
            loss = (model(batch) - 2 * batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(state, "checkpoint.tmp")
            os.rename("checkpoint.tmp", "checkpoint.pt")
        dist.barrier()
    if rank == 0:
        with open("weights.txt", "w") as file:
            file.write(f"{epoch + 1} {[p.item() for p in model.parameters()]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
