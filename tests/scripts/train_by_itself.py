"""A training that saves and resumes by itself, with files of its own: DIRECTORY STEPS. It prints a line every
other step, saves each tenth, and notes where each rank is, and each step that was done. No rank goes on while
another one shows no sign of life."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path

import jurymast

STEP_S, ALIVE_S = 0.2, 0.5
work, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["SLURM_PROCID"])
kept, notes = work / "kept", work / "steps"

ranks = [work / f"rank-{each}" for each in range(int(os.environ["SLURM_NTASKS"]))]
ranks[rank].write_text(f"{os.environ['SLURMD_NODENAME']} {os.getpid()}")


def wait_for_all() -> None:
    while True:
        os.utime(ranks[rank])
        if all(each.exists() and each.stat().st_mtime > time.time() - ALIVE_S for each in ranks):
            return
        time.sleep(0.05)


first = int(kept.read_text()) if kept.exists() else 0
for step in range(first + 1, steps + 1):
    wait_for_all()
    time.sleep(STEP_S)
    jurymast.step(step)
    if rank == 0:
        with notes.open("a") as file:
            file.write(f"{step}\n")
        if step % 2 == 0:
            print(f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} step {step}", flush=True)
        if step % 10 == 0:
            (work / "kept.new").write_text(str(step))
            os.replace(work / "kept.new", kept)
