"""Heartbeats of scripts that do not use jurymast, and the times of the parts of their steps.

All data-parallel ranks take equally long for a step, because collectives wait for the slowest. The parts of a
step show which rank that is:

    forward    from the optimizer's end to the start of backward: the rank's own data loading and Python
    backward   from there to the optimizer: gradients are reduced here, so the faster ranks wait here
    update     the optimizer itself

In a step with several backwards (gradient accumulation), the time between them counts as forward. DDP's
exchange of buffers before a forward counts as backward, because a rank waits for others there as well. Other
waits in a forward (sharded parameters, tensor parallelism) cannot be distinguished from work; then all ranks
look alike.

These are times of the host. A GPU runs asynchronously, so a slow GPU shows only as far as the host waits for
it; the nvidia probe finds causes on the GPU itself (clocks, throttling).
"""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from jurymast.core.state import within
from jurymast.worker.link import WORLD_SIZE_VARIABLE, Link


class StepParts:
    """Adds up the parts of this process's steps, in seconds, starting at the first optimizer's first step.

    Reentrant checkpointing runs backwards within a backward, on any thread: only the outermost counts.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._steps = 0
        self._forward_s = self._backward_s = self._update_s = 0.0
        self._mark = 0.0  # when the present part began; 0.0: nothing was timed yet
        self._ended = 0.0  # when the newest backward ended; 0.0 once another backward or the update began
        self._depth = 0

    def backward_begins(self) -> None:
        self._depth += 1
        if self._depth > 1 or not self._mark:
            return
        now = time.monotonic()
        if self._ended:
            self._backward_s += self._ended - self._mark
            self._forward_s += now - self._ended
            self._ended = 0.0
        else:
            self._forward_s += now - self._mark
        self._mark = now

    def backward_ends(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._mark:
            self._ended = time.monotonic()

    def update_begins(self) -> None:
        if self._mark:
            now = time.monotonic()
            if self._ended:
                self._backward_s += now - self._mark
            else:
                self._forward_s += now - self._mark
            self._mark, self._ended = now, 0.0

    def update_ends(self, *, step_done: bool) -> None:
        now = time.monotonic()
        if self._mark:
            self._update_s += now - self._mark
            self._steps += step_done
            self._link.timed(self._steps, self._forward_s, self._backward_s, self._update_s)
        self._mark = now


# torch's functions that take the time-out of a process group, and its place among their arguments.
_TIME_OUTS = {"init_process_group": 2, "new_group": 1, "_set_pg_timeout": 0}


def watch_groups(link: Link) -> None:
    """Report that the script makes a process group of all ranks, before it waits for the others, and long
    time-outs of groups."""
    for name in ("", ".distributed_c10d", ".device_mesh"):
        module: Any = sys.modules.get(f"torch.distributed{name}")
        for function, place in _TIME_OUTS.items():
            if hasattr(module, function):
                setattr(module, function, _telling(getattr(module, function), place, link))


def _telling(function: Callable[..., Any], place: int, link: Link) -> Callable[..., Any]:
    makes = function.__name__ == "init_process_group"

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        time_out = args[place] if len(args) > place else kwargs.get("timeout")
        if isinstance(time_out, timedelta) and time_out.total_seconds() > within.TORCH_LIMIT_S:
            link.emit(within.TimeOutSet(seconds=time_out.total_seconds()))
        if makes and _has_all(args[3] if len(args) > 3 else kwargs.get("world_size", -1)):
            link.emit(within.GroupMade())
        return function(*args, **kwargs)

    return told


def _has_all(size: int) -> bool:
    """Whether a group of this size (-1: the environment says) has all tasks of the step, and several. One of
    fewer is a training of these alone, on each node say, and no sign of one of all."""
    said = os.environ.get("WORLD_SIZE", "") if size == -1 else str(size)
    return not said.isdigit() or int(said) >= max(2, int(os.environ.get(WORLD_SIZE_VARIABLE) or 2))


# A scaler of gradients, or the script itself, may skip a step whose loss is nan, but not many in a row.
NAN_IN_A_ROW = 3


class Losses:
    """Notices that a script's loss has become nan by what it starts its backwards from, without waiting for a
    GPU: there each value is looked at once it has arrived, and those between are left out."""

    def __init__(self, link: Link, of: str = "loss") -> None:
        self._link, self._of = link, of
        self._in_a_row, self._since = 0, 0
        self._arriving: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def see(self, begun: Any) -> None:
        loss: Any = next(iter(begun), None) if isinstance(begun, (list, tuple)) else begun
        if self._in_a_row >= NAN_IN_A_ROW or type(loss) is not torch.Tensor:
            return
        if loss.numel() != 1 or not loss.is_floating_point():
            return
        try:
            if loss.device.type == "cpu":
                self._note(loss.item())
            elif loss.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                self._see_later(loss)
        except RuntimeError:  # it has no value, as within torch.func.vmap
            pass
        except Exception:  # whatever else a device says: training goes on, and nothing is looked at any more
            self._in_a_row = NAN_IN_A_ROW

    def _see_later(self, loss: torch.Tensor) -> None:
        if self._arriving is None or self._arrived is None:
            self._arriving, self._arrived = (
                torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True),
                torch.cuda.Event(),
            )
        elif self._arrived.query():
            self._note(self._arriving.item())
        else:
            return
        self._arriving.copy_(loss.detach().reshape(()).float(), non_blocking=True)
        self._arrived.record()

    def _note(self, value: float) -> None:
        if value == value:  # is not nan
            self._in_a_row = 0
            return
        self._since = self._since if self._in_a_row else self._link.next_step
        self._in_a_row += 1
        if self._in_a_row == NAN_IN_A_ROW:
            self._link.lost(self._since, value, self._of)


# Steps from one look at a gradient to the next.
GRADIENT_EVERY = 8


class Gradients:
    """Notices that a training ruins its parameters, or leaves them as they are, however its gradients are
    made: looks at the smallest of them from time to time."""

    def __init__(self, link: Link) -> None:
        self._link, self._values = link, Losses(link, within.GRADIENT)
        self._steps = self._without = 0
        self._place: tuple[int, int] | None = None  # of the parameter, among the optimizer's groups

    def see(self, optimizer: Optimizer) -> None:
        self._steps += 1
        if self._steps % GRADIENT_EVERY:
            return
        try:
            self._look(optimizer)
        except Exception:  # whatever tensors of others say
            self._place = None

    def _look(self, optimizer: Optimizer) -> None:
        if getattr(optimizer, "found_inf", None) is not None:  # it may leave this step out
            return
        groups = [group["params"] for group in optimizer.param_groups]
        if self._place is None or groups[self._place[0]][self._place[1]].grad is None:
            # FSDP and ZeRO may leave a rank without elements of its own, and so without a gradient.
            places = [(g, p) for g, group in enumerate(groups) for p in range(len(group))]
            own = [(g, p) for g, p in places if groups[g][p].numel()]
            if not own:
                return
            there = [(g, p) for g, p in own if groups[g][p].grad is not None]
            self._place = min(there, key=lambda at: groups[at[0]][at[1]].numel(), default=None)
        if self._place is None:
            self._without += 1
            if self._without == NAN_IN_A_ROW and type(optimizer).__module__.startswith("torch.optim."):
                self._link.lost(self._link.next_step, None, within.GRADIENT)
            return
        self._without = 0
        gradient = groups[self._place[0]][self._place[1]].grad
        if type(gradient) is not torch.Tensor:  # one of several ranks, say
            return
        if not (gradient.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._values.see(gradient.detach().abs().amax())


LET_GO_S = 0.02
# After so many steps of other optimizers in a row, one of them replaces the counted one (a second stage).
TAKES_OVER = 20


class Counted:
    """Decides which optimizer's steps count as the training's: those of the first. Steps of others (a GAN's
    second) belong to the same step, unless only they continue. The reference is weak, because a new optimizer
    may get the address of a deleted one."""

    def __init__(self) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._others = 0

    def is_step(self, optimizer: Optimizer) -> bool:
        counted = None if self._optimizer is None else self._optimizer()
        self._others = 0 if counted is optimizer else self._others + 1
        if counted is None or self._others > TAKES_OVER:
            self._optimizer, self._others, counted = weakref.ref(optimizer), 0, optimizer
        return counted is optimizer


def watch_steps(link: Link, told: Callable[[Optimizer], within.BeganAt] | None = None) -> None:
    """Send a heartbeat after each step of the training's optimizer, and time all parts of the step. `told`,
    on rank 0: what is known before the first step about where the script begins."""
    parts = StepParts(link)
    counted, gradients = Counted(), Gradients(link)

    def begins(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        nonlocal told
        if told is not None:
            began, told = told(optimizer), None
            link.began(began)
        parts.update_begins()

    def stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        is_step = counted.is_step(optimizer)
        parts.update_ends(step_done=is_step)
        if is_step:
            gradients.see(optimizer)
            link.optimizer_stepped()
        else:
            link.stirred()

    register_optimizer_step_pre_hook(_not_compiled(begins))
    register_optimizer_step_post_hook(_not_compiled(stepped))
    # torch has no hooks for these. Callers look them up by name at each call.
    torch.autograd.backward = _waiting(_seeing(torch.autograd.backward, Losses(link)), parts)
    if torch.distributed.is_available():
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            module.destroy_process_group = _letting_go(module.destroy_process_group)
    sync = getattr(DistributedDataParallel, "_sync_buffers", None)
    if sync is not None:
        DistributedDataParallel._sync_buffers = _waiting(sync, parts)


def _letting_go(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function, made to wait LET_GO_S first so that other threads can run.

    gloo's thread needs the GIL to release the newest exchange of gradients. A process group that ends before
    that waits for the thread while it holds the GIL: a deadlock. Under torchrun the imports of the first
    optimizer happen to take long enough.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        time.sleep(LET_GO_S)
        function(*args, **kwargs)

    return called


def _seeing(function: Callable[..., None], losses: Losses) -> Callable[..., None]:
    @functools.wraps(function)
    def seen(tensors: Any, *args: Any, **kwargs: Any) -> None:
        losses.see(tensors)
        function(tensors, *args, **kwargs)

    return seen


def _waiting(function: Callable[..., None], parts: StepParts) -> Callable[..., None]:
    """Return the function, with its time counted as backward."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> None:
        parts.backward_begins()
        try:
            function(*args, **kwargs)
        finally:
            parts.backward_ends()

    return _not_compiled(timed)


def _not_compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function, made so that a compiled training does not trace into it; other calls cost no more.
    Like torch's own optimizers, this does not load the compiler, which the script may not have set up yet."""
    disabled: Callable[..., None] = _disable_dynamo(function, recursive=False)
    return disabled
