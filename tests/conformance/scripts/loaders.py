"""Trains on what all kinds of loader processes bring: none, forked, persistent, spawned, from a fork server."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.tensor([float(index), index**2 / 32])


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, 8, info.num_workers)


class Augmented(Dataset):
    """With random numbers, which each worker of each rank draws from its own seed."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(1).item(), get_worker_info().seed, get_worker_info().id


def together(batch):
    return torch.stack(batch)


def seed_worker(worker):
    print("worker", worker, "has", torch.get_num_threads(), "thread, seed", torch.initial_seed() % 1000)


def weights(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Squares()
    kinds = {
        "none": {},
        "two": {"num_workers": 2},
        "persistent": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3},
        "lambda": {"num_workers": 1, "collate_fn": lambda batch: torch.stack(batch).flip(0)},
        "fork": {"num_workers": 1, "multiprocessing_context": "fork"},
        "spawn": {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": together},
        "forkserver": {"num_workers": 1, "multiprocessing_context": "forkserver", "collate_fn": together},
    }
    for name, options in kinds.items():
        sampler = DistributedSampler(data, seed=5)
        loader = DataLoader(data, batch_size=4, sampler=sampler, **options)
        for epoch in range(2 if "persistent_workers" in options else 1):
            sampler.set_epoch(epoch)
            for batch in loader:
                loss = (model(batch[:, :1]) - batch[:, 1:]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(name, f"{loss.item():.6f}")
    print("stream", sorted(DataLoader(Stream(), batch_size=None, num_workers=2)))
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(rank)
    drawn = DataLoader(Augmented(), batch_size=None, num_workers=2, worker_init_fn=seed_worker, generator=generator)
    print("drawn", list(drawn))
    digest = weights(model)
    print("weights", digest)
    if rank == 0:
        with open("weights.txt", "w") as file:
            file.write(digest)
    dist.barrier()
    dist.destroy_process_group()
    print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])


if __name__ == "__main__":
    main()
