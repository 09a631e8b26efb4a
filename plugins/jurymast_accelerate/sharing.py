"""Batches that stay the same, over all ranks together, while a run goes on with fewer ranks.

The loop is the script's and counts its batches, so a rank's are larger then and not more of them.
"""

from __future__ import annotations

import logging
from typing import Any

from jurymast.checkpoint.batch import is_kept, wanted_ranks
from jurymast.checkpoint.loaders import NotShared, Share, share_prepared

log = logging.getLogger("jurymast.checkpoint")


def keep_batch(accelerator: Any, training: Any) -> str:
    """Deal the batches of the training's loader out to the ranks that there are, weigh their losses, and have
    schedules go on as with all ranks. Return why that cannot be; "" if it is done, or need not be."""
    world = accelerator.num_processes
    if not is_kept(world) or accelerator.split_batches:  # the batch that is split is the same anyway
        return ""
    loaders = [training] if training is not None else accelerator._dataloaders
    if len(loaders) != 1:
        return (
            "each rank's batch stays as it is, as it is not known which loader is the training's: "
            "checkpointer(accelerator, training=loader)"
        )
    try:
        share = share_prepared(loaders[0], world=world, rank=accelerator.process_index, in_parts=False)
    except NotShared as why_not:
        return f"each rank's batch stays as it is: {why_not}"
    if accelerator.is_main_process:
        log.warning(
            "with %d of %d ranks a rank's batches have up to %d samples, not %d, so that those of all ranks "
            "together stay the same; this takes more memory",
            world, share.wanted, -(-share.samples // world), share.batch,
        )  # fmt: skip
    _weigh(accelerator, share)
    for schedule in accelerator._schedulers:
        _go_on(schedule, wanted_ranks(world) - world)
    return ""


def _weigh(accelerator: Any, share: Share) -> None:
    """Weigh losses such that the mean of their gradients over ranks is that of the mean over all samples."""
    (scale,), backward = share.scales(), accelerator.backward
    if scale != 1.0:
        accelerator.backward = lambda loss, **options: backward(loss * scale, **options)


def _go_on(schedule: Any, more: int) -> None:
    """Have the schedule make `more` steps at each step: Accelerate makes one for each rank."""
    if schedule.split_batches or not schedule.step_with_optimizer:
        return
    step, inner = schedule.step, schedule.scheduler

    def steps(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        if not schedule.gradient_state.sync_gradients or any(
            one.step_was_skipped for one in schedule.optimizers
        ):
            return
        for _ in range(more):
            if inner._step_count <= getattr(inner, "total_steps", inner._step_count):
                inner.step(*arguments, **named)

    schedule.step = steps
