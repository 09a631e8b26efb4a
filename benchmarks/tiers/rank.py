"""A rank of the benchmark: one thread, a process group over gloo, and the system that it measures."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tiers.child import Message, first_line, keep_answers, say
from benchmarks.tiers.systems import KINDS, Jurymast, System, set_attempt
from benchmarks.tiers.training import Training, Window

READY_LIMIT_S = 120.0


class Rank:
    """Orders and their answers; times are seconds, `at`, `began` and `ended` on CLOCK_MONOTONIC."""

    def __init__(self, config: Message) -> None:
        self._config = config
        self._training = Training(int(config["state_bytes"]), dist.get_rank())
        self._window = Window(self._training, int(config["window_bytes"]))
        self._digests: list[str] = []
        self._system: System | None = None
        self._faults = 0

    @property
    def _has(self) -> System:
        assert self._system is not None
        return self._system

    def obey(self, order: Message) -> Message | None:
        method = getattr(self, f"do_{order['do']}")
        found: Message | None = method(order)
        return found

    def do_begin(self, _order: Message) -> Message:
        self._system = KINDS[self._config["kind"]](self._training, Path(self._config["place"]))
        return {"state_bytes": self._training.size_bytes}

    def do_copy(self, order: Message) -> Message:
        """Every tensor once, plainly."""
        work = self._window.copy_back if order.get("back") else self._window.copy
        dist.barrier()
        began = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - began}

    def do_save(self, order: Message) -> Message:
        dist.barrier()
        self._faults = _faults()
        began = time.monotonic()
        ok = self._has.save(order["step"])
        ended = time.monotonic()
        return {"seconds": ended - began, "ended": ended, "ok": ok}

    def do_warm(self, order: Message) -> Message:
        """A save that does not count; memory for it may still be on its way."""
        end = time.monotonic() + READY_LIMIT_S
        while not self._has.save(order["step"]):
            if time.monotonic() > end:
                raise TimeoutError("no room for a save")
            time.sleep(0.05)
        return {}

    def do_flatten(self, _order: Message) -> None:
        system = self._has
        assert isinstance(system, Jurymast)
        system.flatten()

    def do_finish(self, order: Message) -> Message:
        self._has.finish(order["step"])
        ended = time.monotonic()
        fresh = _faults() - self._faults
        if dist.get_rank() == 0:
            fresh += self._has.file_pages(order["step"])
        return {"fresh": fresh, "ended": ended}

    def do_wreck(self, _order: Message) -> None:
        """Remember what there is, and overwrite it."""
        self._digests = self._digests or self._training.digests()
        self._training.wreck()

    def do_restore(self, order: Message) -> Message:
        set_attempt(int(order.get("attempt", 1)))
        if "place" in order:
            self._has.place = Path(order["place"])
        dist.barrier()
        began = time.monotonic()
        step = self._has.restore(order["step"])
        ended = time.monotonic()
        if step != order["step"]:
            raise ValueError(f"step {step} was restored, not {order['step']}")
        return {"seconds": ended - began, "ended": ended}

    def do_check(self, _order: Message) -> None:
        """Every byte is what it was before it was overwritten. Raises ValueError."""
        bad = sum(a != b for a, b in zip(self._training.digests(), self._digests, strict=True))
        if bad:
            raise ValueError(f"{bad} of {len(self._digests)} tensors are not what was saved")

    def do_save_to(self, order: Message) -> None:
        """A save that a later restore reads; it is not measured."""
        self._has.place = Path(order["place"])
        self._has.save(order["step"])
        self._has.finish(order["step"])


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def _orders() -> Any:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    orders = _orders()
    config = next(orders)
    keep_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(config)
    say({"said": "started"})
    for order in orders:
        try:
            say({"said": "done", **(rank.obey(order) or {})})
        except Exception as error:
            say({"said": "failed", "why": f"{order['do']}: {type(error).__name__}: {first_line(str(error))}"})
    os._exit(0)


if __name__ == "__main__":
    main()
