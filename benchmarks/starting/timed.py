"""Says when a script has begun and done its first step; its copy imports this as the first thing it does.

A line `TIME RESTART WHAT` for each event goes into `stamps/rank-N.txt` beside this file, TIME in seconds
since the Unix epoch: `line` at the script's first line, `step` once the first optimizer has done its first
step. The last rank then waits until all have come so far, writes `killed` and does that to itself: a restart
is timed from there. Restarted ranks only tell when they got there.

torch is not imported for it: its hook is set once the script has imported torch. All of it costs both
launchers the same.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "stamps")
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PID = os.getpid()
POLL_S = 0.002
WAIT_LIMIT_S = 30.0


def path_of(rank: int) -> str:
    return os.path.join(FOLDER, f"rank-{rank}.txt")


def stamp(what: str) -> None:
    with open(path_of(RANK), "a") as file:
        file.write(f"{time.time():.6f} {RESTART} {what}\n")


class TorchImported:
    """A finder in front of all others that finds nothing by itself; hooks into torch when that has come."""

    def __init__(self) -> None:
        self._looking = self._hooked = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Part of the import system."""
        if name != "torch" or self._looking or self._hooked:
            return None
        self._looking = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec

        theirs = loader.exec_module  # jurymast may have put one of its own there, which goes on from this one

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = theirs
            theirs(module)
            vars(loader).pop("exec_module", None)
            self._hooked = True
            watch_steps()

        loader.exec_module = exec_module
        return spec


def watch_steps() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    seen: list[bool] = []

    def stepped(_optimizer: Any, _arguments: Any, _named: Any) -> None:
        if seen or os.getpid() != PID:
            return
        seen.append(True)
        stamp("step")
        if RESTART == 0 and RANK == RANKS - 1:
            await_all()
            stamp("killed")
            os.kill(PID, signal.SIGKILL)

    register_optimizer_step_post_hook(stepped)


def await_all() -> None:
    end = time.monotonic() + WAIT_LIMIT_S
    while not all(has_stepped(rank) for rank in range(RANKS)) and time.monotonic() < end:
        time.sleep(POLL_S)


def has_stepped(rank: int) -> bool:
    try:
        with open(path_of(rank)) as file:
            return "step" in file.read()
    except FileNotFoundError:
        return False


stamp("line")
finders: list[Any] = sys.meta_path
finders.insert(0, TorchImported())
