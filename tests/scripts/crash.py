"""Ends badly, in the way asked for, before or after some steps."""

from __future__ import annotations

import argparse
import os
import sys

import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--exit", type=int, default=0)
args = parser.parse_args()

if int(os.environ["RANK"]) == args.rank:
    if args.exit:
        sys.exit(args.exit)
    print(1 // 0)
dist.init_process_group("gloo")
dist.barrier()
