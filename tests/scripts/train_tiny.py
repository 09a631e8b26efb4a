"""A small training with a Checkpointer: an MLP under DDP (gloo), 2-5 ms a step, the same bits every time.

Without torchrun it trains in a single process, without torch.distributed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import jurymast

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS does the same bits every time

# Of the demo's options only those that tests need.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--device", default="cpu", help="of all ranks")
parser.add_argument("--backend", default="gloo")
parser.add_argument("--optimizer", choices=("adamw", "sgd", "plain-sgd"), default="adamw")
parser.add_argument(
    "--save-every", default=None, help='"10 steps", "2s", "auto", or "never": no Checkpointer'
)
parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")
parser.add_argument("--samples", type=int, default=0, help="tell of so many a step, with 64 tokens each")
parser.add_argument("--checkpoints", default=None, help="directory of the checkpoints")
parser.add_argument("--keep", type=int, default=None)
parser.add_argument(
    "--raise-once", default="", metavar="STEP:RANK", help="an exception, in the first attempt"
)
parser.add_argument(
    "--hang-once", default="", metavar="STEP:RANK",
    help="waits in a collective in which nobody else is, in the first attempt",
)  # fmt: skip
parser.add_argument(
    "--rest-once", default="", metavar="STEP:RANK:SECONDS", help="waits by itself, in the first attempt"
)
parser.add_argument(
    "--leak-once", default="", metavar="FILE:RANK:WHO,...", help="once FILE.1 is there, in attempt 1 the "
    "first WHO takes all memory, and so on: rank, the rank itself; loader, its loader; child, a child of "
    "the rank in a session of its own",
)  # fmt: skip
parser.add_argument("--loader", action="store_true", help="data comes from a worker process")
parser.add_argument(
    "--orders", type=Path, metavar="DIRECTORY", help="a rank does once what the file rank-N there says"
)
parser.add_argument(
    "--slow", default="", metavar="STEP:NODE:SECONDS", help="that node loads its data so slowly from STEP on"
)
parser.add_argument("--tell-saves", action="store_true", help="every rank prints the steps that it saved")
parser.add_argument("--buffer-mib", type=int, default=0, help="of state, besides the model's, on each rank")
parser.add_argument("--slurm", action="store_true", help="ranks are Slurm's tasks, as where srun starts them")
parser.add_argument("--until", type=Path, help="ends with the next twenty steps once this file is there")
parser.add_argument("--in-process", action="store_true", help="ranks that live go on in their processes")
parser.add_argument("--out", type=Path, default=None, help="JSON with the final weights' sha256")


def batch_of(step: int, rank: int, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, each (rows, width), that depend on the step and the rank only."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(rows, width, generator=generator)
    return inputs, inputs.roll(1, dims=1).tanh()


def sha256_of(state: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.removeprefix("module.").encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Counter:
    """A data loader's stand-in: state of its own, different on every rank; `mebibytes` of it show a state
    that was put together from those of two steps."""

    def __init__(self, rank: int, mebibytes: int, device: str) -> None:
        self.drawn = 0
        self.rank = rank
        self.buffer = torch.zeros(mebibytes << 17, dtype=torch.int64, device=device)

    def draw(self, count: int) -> None:
        self.drawn += count
        self.buffer.fill_(self.drawn)

    def state_dict(self) -> dict[str, object]:
        return {"drawn": self.drawn, "rank": self.rank, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["rank"] != self.rank:
            raise ValueError(f"rank {self.rank} was given the state of rank {state['rank']}")
        if not bool((state["buffer"] == state["drawn"]).all()):
            raise ValueError(f"rank {self.rank} was given a mixed state")
        self.drawn, self.buffer = state["drawn"], state["buffer"]


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if name == "sgd" else 0.0)


def due_once(place: str, step: int, rank: int) -> bool:
    """True in the run's first attempt at the step and rank that `place` names."""
    return place == f"{step}:{rank}" and os.environ.get("JURYMAST_ATTEMPT", "1") == "1"


def misbehave(args: argparse.Namespace, step: int, rank: int) -> None:
    if due_once(args.raise_once, step, rank):
        raise ValueError(f"asked to fail at step {step}")
    if due_once(args.hang_once, step, rank):
        hang(rank)
    place, _, seconds = args.rest_once.rpartition(":")
    if due_once(place, step, rank):
        threading.Event().wait(float(seconds))
    if args.leak_once:
        leak_if_told(args.leak_once, rank)
    if args.slow:
        load_slowly(args.slow, step)
    if args.orders:
        obey(args.orders, step, rank)


def hang(rank: int) -> None:
    print(f"hangs at {time.time()}", flush=True)
    dist.recv(torch.zeros(1), src=(rank + 1) % dist.get_world_size())


def obey(orders: Path, step: int, rank: int) -> None:
    order = orders / f"rank-{rank}"
    if not order.exists():
        return
    what = order.read_text()
    order.unlink()
    if what == "hang":
        hang(rank)
    if what == "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    raise ValueError(f"told to fail at step {step}")


class Batches(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __init__(self, start: int, rank: int, rows: int, width: int) -> None:
        self.of = start, rank, rows, width

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        step, rank, rows, width = self.of
        while True:
            yield batch_of(step, rank, rows, width)
            step += 1


LEAK_BYTES_MAX = 4 << 30  # where nothing limits it


def leak() -> None:
    """Take memory until this process is killed."""
    taken: list[bytearray] = []
    while len(taken) < LEAK_BYTES_MAX >> 20:
        taken.append(bytearray(b"x") * (1 << 20))
    raise SystemExit("nothing limits the memory here")


class LeakingLoader(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> int:
        leak()
        return 0


def leak_if_told(place: str, rank: int) -> None:
    file, of, names = place.rsplit(":", 2)
    attempt, each = int(os.environ.get("JURYMAST_ATTEMPT", "1")), names.split(",")
    if attempt > len(each) or rank != int(of) or not os.path.exists(f"{file}.{attempt}"):
        return
    who = each[attempt - 1]
    if who == "rank":
        leak()
    elif who == "loader":
        next(iter(torch.utils.data.DataLoader(LeakingLoader(), num_workers=1)))
    elif (child := os.fork()) == 0:
        os.setsid()
        leak()
    else:
        os.waitpid(child, 0)
        raise RuntimeError("its helper has ended")


def load_slowly(place: str, step: int) -> None:
    first, node, seconds = place.split(":")
    if step >= int(first) and os.environ.get("JURYMAST_NODE") == node:
        time.sleep(float(seconds))


def told_to_end(file: Path | None, step: int) -> bool:
    """All ranks hear the same."""
    if file is None or step % 20:
        return False
    told = torch.tensor([int(file.exists())])
    if dist.is_initialized():
        dist.broadcast(told, 0)
    return bool(told)


def end_plainly() -> None:
    """Under plain torchrun torch's threads now and then abort the end of the interpreter ("terminate called
    without an active exception"); jurymast's ranks never run into that."""
    for thread in threading.enumerate():  # what the interpreter would wait for
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    sys.stdout.flush()
    os._exit(0)


def parallel(model: nn.Module) -> nn.Module:
    """Looking for unused parameters keeps DDP from rebuilding its buckets after the first step, which sums
    gradients of more than two ranks in another order than the first step after a restart does."""
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    data: Counter
    checkpoint: jurymast.Checkpointer | None


def trained(args: argparse.Namespace, parts: Training, start: int) -> int:
    """Train from the step `start` on, and return how many steps are done then."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, checkpoint, done = parts.model, parts.checkpoint, start
    if dist.is_initialized() and args.in_process:
        model = parallel(model)
    data_set = Batches(start, rank, args.batch, args.width)
    loader = torch.utils.data.DataLoader(data_set, batch_size=None, num_workers=1) if args.loader else None
    batches = iter(data_set if loader is None else loader)
    for step in range(start, args.steps):
        if told_to_end(args.until, step):
            break
        began = time.monotonic()
        misbehave(args, step, rank)
        inputs, targets = (one.to(args.device) for one in next(batches))
        loss = nn.functional.mse_loss(model(inputs), targets)
        parts.optimizer.zero_grad()
        loss.backward()
        parts.optimizer.step()
        parts.schedule.step()
        parts.data.draw(args.batch)
        done = step + 1
        if args.step_time:
            time.sleep(max(0.0, args.step_time - (time.monotonic() - began)))
        if checkpoint:
            checkpoint.step(step + 1, samples=args.samples, tokens=64 * args.samples)
            if args.tell_saves and checkpoint._saved_step == step + 1:
                print(f"saved {step + 1}", flush=True)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1} loss {loss.item():.6f}", flush=True)
    return done


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    # As use_deterministic_algorithms(True), but without its second of importing torch's compiler.
    torch.set_deterministic_debug_mode("error")
    if args.slurm:
        names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
        os.environ.update({name: os.environ[theirs] for name, theirs in names.items()})
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group(args.backend)
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.GELU()) for _ in range(args.layers)]
    model: nn.Module = nn.Sequential(*layers, nn.BatchNorm1d(args.width), nn.Linear(args.width, args.width))
    model.to(args.device)
    if distributed and not args.in_process:
        model = parallel(model)
    optimizer = optimizer_for(args.optimizer, model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[10, 30])
    data = Counter(rank, args.buffer_mib, args.device)
    checkpoint = None
    if args.save_every != "never":
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data}
        checkpoint = jurymast.Checkpointer(
            state, directory=args.checkpoints, every=args.save_every, keep=args.keep
        )

    def train(start: int) -> tuple[int, int]:
        if checkpoint and rank == 0:
            print(f"restored {start}", flush=True)
        return start, trained(args, Training(model, optimizer, schedule, data, checkpoint), start)

    if args.in_process and checkpoint:
        start, done = checkpoint.run(train)
    else:
        start, done = train(checkpoint.restore() if checkpoint else 0)
    if data.drawn != done * args.batch:
        raise SystemExit(f"rank {rank} drew {data.drawn} samples of {done * args.batch}")
    if rank == 0 and args.out:
        result = {"steps": done, "restored": start, "sha256": sha256_of(model.state_dict())}
        partial = args.out.with_name(f".{args.out.name}.partial")
        partial.write_text(json.dumps(result))
        partial.rename(args.out)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()
        if "JURYMAST_RUN" not in os.environ:
            end_plainly()


if __name__ == "__main__":
    main()
