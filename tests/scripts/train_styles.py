"""Trainings in the styles that people write, with a truth beside them: rank 0 adds a line to `--truth` for
each step that it does, with its number. `--die` names steps; in attempt N the training kills itself right
after the Nth of them.

    none       saves nothing
    own        torch.save of model, optimizer and step, every N steps, and a resume of its own
    file       weights in one file, the step in another
    epochs     saves only at the end of an epoch, of 3 N steps
    tensors    weights and the step in a file of safetensors, which Python does not open
    numpy      the same, read as arrays of numpy
    copied     as own, but resumes from a copy that another program makes
    weights    saves weights and the step, so the optimizer begins anew
    told       as own, and calls jurymast.step
    seldom     as own, and calls jurymast.step after each tenth step only
    epoch      as own, and calls jurymast.step with the number of epochs, of ten steps
    older      goes on from the last checkpoint but one, on purpose
    restores   a Checkpointer, of which only restore and save are called
    steps      a Checkpointer, with work between the optimizer's step and the Checkpointer's
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import jurymast

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--style", required=True)
parser.add_argument("--optimizer", choices=("adamw", "sgd", "momentum"), default="adamw")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--die", type=int, nargs="*", default=[])
parser.add_argument("--truth", type=Path, required=True)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--step-time", type=float, default=0.02)


def replace(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(value, partial)
    partial.rename(path)


class OwnSaves:
    """What the script saves and reads itself."""

    def __init__(self, args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.args, self.model, self.optimizer = args, model, optimizer
        self.every = args.every * (3 if args.style == "epochs" else 1)

    def saves(self, step: int) -> bool:
        return step % int(self.every) == 0 and self.args.style != "none"

    def save(self, step: int) -> None:
        state = {"model": self.model.state_dict(), "step": step}
        if self.args.style not in ("weights", "file"):
            state["optimizer"] = self.optimizer.state_dict()
        if self.args.style in ("tensors", "numpy"):
            partial = self.folder / ".partial"
            save_file({"step": torch.tensor(step), **self.model.state_dict()}, partial)
            partial.rename(self.folder / f"{step:06d}.pt")
            return
        if self.args.style == "file":
            del state["step"]
            self.folder.joinpath("step.json").write_text(json.dumps({"step": step}))
        replace(self.folder / f"{step:06d}.pt", state)

    @property
    def folder(self) -> Path:
        found: Path = self.args.folder
        return found

    def load(self) -> int:
        saved = sorted(self.folder.glob("*.pt"))
        if self.args.style == "older":
            saved = saved[:-1]
        if self.args.style == "none" or not saved:
            return 0
        if self.args.style == "tensors":
            tensors = load_file(saved[-1])
            step = int(tensors.pop("step"))
            self.model.load_state_dict(tensors)
            return step
        if self.args.style == "numpy":
            from safetensors.numpy import load_file as load_arrays

            arrays = load_arrays(saved[-1])
            step = int(arrays.pop("step"))
            self.model.load_state_dict({name: torch.from_numpy(one) for name, one in arrays.items()})
            return step
        if self.args.style == "copied":
            copy = self.folder.with_name(f"copy-{dist.get_rank()}")
            subprocess.run(["cp", str(saved[-1]), str(copy)], check=True)
            saved = [copy]
        state = torch.load(saved[-1], weights_only=True)
        self.model.load_state_dict(state["model"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.args.style == "file":
            return int(json.loads(self.folder.joinpath("step.json").read_text())["step"])
        return int(state["step"])


def main() -> None:
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["JURYMAST_ATTEMPT"])
    torch.manual_seed(1)
    model = nn.Linear(16, 16)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.optimizer != "adamw":
        momentum = 0.9 if args.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=momentum)
    own = OwnSaves(args, model, optimizer)
    checkpoint: jurymast.Checkpointer | None = None
    if args.style in ("restores", "steps"):
        checkpoint = jurymast.Checkpointer({"model": model, "optimizer": optimizer}, every=args.every)
        start = checkpoint.restore()
    else:
        start = own.load()
    for step in range(start + 1, args.steps + 1):
        loss = parallel(torch.randn(4, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with args.truth.open("a") as file:
                file.write(f"{attempt} {step}\n")
        time.sleep(args.step_time)  # logging, say
        if checkpoint and args.style == "steps":
            checkpoint.step(step)
        elif checkpoint:
            if step % args.every == 0:
                checkpoint.save(step)
        elif own.saves(step):
            if rank == 0:
                own.save(step)
            dist.barrier()
        if args.style == "told" or (args.style == "seldom" and step % 10 == 0):
            jurymast.step(step)
        if args.style == "epoch" and step % 10 == 0:
            jurymast.step(step // 10)
        if args.die[attempt - 1 : attempt] == [step]:
            dist.barrier()  # every rank has done this step
            time.sleep(args.step_time)
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
