"""The smallest training there is: each rank says what the ranks add up to, and its arguments.

With --slurm it makes its process group of Slurm's variables, as scripts do that srun starts once a GPU. With
--until, or where there is a file `hold`, it goes on until there is a file `stop`, and says so in a file
`started`; with --until-warned until each rank has heard SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

heard: list[int] = []
if "--until-warned" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda number, _frame: heard.append(number))
if "--slurm" in sys.argv:
    names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    hosts = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()
    port = 21000 + int(os.environ["SLURM_JOB_ID"]) % 1000  # nodes have several jobs at once
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = hosts[0], str(port)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
dist.init_process_group("gloo")
if "--until" in sys.argv or Path("hold").exists():
    over = torch.tensor([0])
    while not int(over):
        dist.all_reduce(over)
        Path("started").touch()
        over = torch.tensor([int(Path("stop").exists())])
        dist.all_reduce(over)
        time.sleep(0.05)  # a step takes its time, and leaves the processor to others
if "--until-warned" in sys.argv:
    all_heard = torch.tensor([0])
    while not int(all_heard):
        time.sleep(0.05)
        all_heard = torch.tensor([int(bool(heard))])
        dist.all_reduce(all_heard, op=dist.ReduceOp.MIN)
number = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(number)
told = [f"rank {dist.get_rank()} of {dist.get_world_size()}", f"local {os.environ['LOCAL_RANK']}"]
told += [f"sum {int(number)}", f"word {os.environ.get('WORD', '-')}", *sys.argv[1:]]
print(", ".join(told), flush=True)
dist.destroy_process_group()
sys.exit(int(os.environ.get("END_WITH", "0")))
