"""Trains, started as a directory: `app`."""

import os
import sys

import part
import torch.distributed as dist

dist.init_process_group("gloo")
print(__name__, repr(__package__), __spec__.name, __file__, sys.argv, os.path.basename(sys.path[0]), part.NAME)
dist.barrier()
dist.destroy_process_group()
