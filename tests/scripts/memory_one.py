"""A rank that saves to memory over and over, until somebody kills it: memory_one.py MEGABYTES."""

from __future__ import annotations

import sys

import torch

import jurymast


def main() -> None:
    tensor = torch.zeros(int(sys.argv[1]) << 18)
    checkpoint = jurymast.Checkpointer({"tensor": tensor}, directory="/nonexistent")
    step = checkpoint.restore()
    while True:
        step += 1
        tensor.fill_(step)
        checkpoint.save(step)


if __name__ == "__main__":
    main()
