"""What all examples share: a small model, its data, and the end. The bits are the same every time."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH = 32


def options(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-time", type=float, default=0.0, help="least seconds a step takes")
    parser.add_argument("--out", type=Path, default=None, help="JSON with the final weights' sha256")
    return parser.parse_args()


class Points(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 1 << 14

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.roll(1).tanh()


def small_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH))


def pace(started: float, step_time: float) -> None:
    """Time to break something."""
    time.sleep(max(0.0, started + step_time - time.monotonic()))


def finish(weights: dict[str, torch.Tensor], rank: int, out: Path | None) -> None:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].detach().cpu().contiguous().numpy().tobytes())
    if rank == 0:
        print("weights", digest.hexdigest(), flush=True)
        if out is not None:
            out.write_text(json.dumps({"sha256": digest.hexdigest()}))
