"""A Trainer whose steps have the same batch also with fewer ranks than the run has with all its nodes.

Its loader yields, for each batch, this rank's part of what all ranks would train on, in micro-batches where
it is larger. The Trainer counts such a batch as one: its steps, epochs and schedules are what they were.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import Trainer

from jurymast.checkpoint.batch import is_kept
from jurymast.checkpoint.loaders import MicroBatches, NotShared, Share, share_prepared

TOKENS_OF_RANKS = "all tokens of a rank weigh as much as another's: set average_tokens_across_devices"


class Sharing(Trainer):
    """Overrides methods of the Trainer's own class, which may be a user's."""

    _jurymast_share: Share | None = None
    _jurymast_scale: float | None = None  # of the mean loss that is computed now
    _jurymast_batch_differs = ""  # why the batch is not kept
    _jurymast_checkpoint: Any

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        args = self.args
        self._jurymast_share = None
        if is_kept(args.world_size) and not self.accelerator.split_batches:
            try:
                self._jurymast_share = share_prepared(
                    loader, world=args.world_size, rank=args.process_index, in_parts=True
                )
            except NotShared as why_not:
                self._jurymast_batch_differs = f"each rank's batch stays as it is: {why_not}"
        return loader

    @property
    def jurymast_ranks(self) -> int:
        """How many ranks' batches a step has."""
        return self._jurymast_share.wanted if self._jurymast_share is not None else self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        share = self._jurymast_share
        if share is None:
            return super().get_total_train_batch_size(args)
        return share.samples * args.gradient_accumulation_steps

    def _get_num_items_in_batch(self, batches: list[Any], device: Any) -> Any:
        share = self._jurymast_share
        if share is None:
            return super()._get_num_items_in_batch(batches, device)
        parts = [part for batch in batches for part, scale in _parts(batch, share) if scale]
        items = super()._get_num_items_in_batch(parts, device)
        if items is not None and not self.args.average_tokens_across_devices:
            self._jurymast_checkpoint.batch_is_kept(TOKENS_OF_RANKS)
        return items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on each part as on a batch; gradients are averaged over ranks after the last of them only."""
        if self._jurymast_share is None:
            return super().training_step(model, inputs, num_items_in_batch)
        parts = _parts(inputs, self._jurymast_share)
        total: Any = 0.0
        for number, (part, scale) in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else self.accelerator.no_sync(model=model):
                self._jurymast_scale = scale
                try:
                    total = total + super().training_step(model, part, num_items_in_batch)
                finally:
                    self._jurymast_scale = None
        return total

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        found = super().compute_loss(model, inputs, *arguments, **named)
        scale = self._jurymast_scale
        if scale is None:
            return found
        if self._is_of_all_items(named.get("num_items_in_batch")):
            scale = float(bool(scale))  # a part without samples counts for nothing
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale

    def _is_of_all_items(self, items: Any) -> bool:
        """Return whether a loss is a sum, divided by the number of items of the step's whole batch already.
        As the Trainer's `training_step` decides."""
        said: bool | None = getattr(self, "loss_is_scaled_for_ga", None)
        if said is not None:
            return said
        return (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None

    def floating_point_ops(self, inputs: Any) -> Any:
        of_one = super().floating_point_ops
        return sum(of_one(part) for part in inputs) if isinstance(inputs, MicroBatches) else of_one(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in inputs if isinstance(inputs, MicroBatches) else [inputs]:
            super()._track_num_input_tokens(part)


def _parts(batch: Any, share: Share) -> list[tuple[Any, float]]:
    """The parts of a batch, with the factors of their mean losses."""
    parts = batch if isinstance(batch, MicroBatches) else [batch]
    return list(zip(parts, share.scales(), strict=False))
