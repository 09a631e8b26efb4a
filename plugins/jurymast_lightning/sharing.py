"""A Lightning training whose steps have the same batch also with fewer ranks than the run has with all its
nodes.

Its loader yields, for each batch, this rank's part of what all ranks would train on, in micro-batches where
it is larger. Lightning sees the last of them; those before it are done ahead of it, without averaging their
gradients over ranks. So Lightning counts batches, steps and epochs as it did.
"""

from __future__ import annotations

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DistributedSampler

from jurymast.checkpoint.batch import is_kept
from jurymast.checkpoint.loaders import MicroBatches, NotShared, Share, as_it_was, share_distributed

AS_IT_IS = "each rank's batch stays as it is"


class Sharing:
    """What is changed in a trainer from before its loaders are made until `end`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._share: Share | None = None
        self.differs = ""  # why the batch is not kept
        self._loaders: list[Any] = []
        self._earlier: list[Any] = []
        self._scales: tuple[float, ...] = ()
        self._scale = 1.0
        self._changed: list[tuple[Any, str]] = []

    def begin(self) -> None:
        trainer = self._trainer
        self._wrap(trainer._data_connector, "_resolve_sampler", self._resolved)
        if not is_kept(trainer.world_size):
            return
        self.differs = f"{AS_IT_IS}: nothing is known of its loader"
        loop = trainer.fit_loop
        self._wrap(loop, "setup_data", self._setup_data)
        self._wrap(trainer._data_connector, "_prepare_dataloader", self._prepared)
        self._wrap(trainer.precision_plugin, "convert_input", self._last_part)
        self._wrap(loop.epoch_loop.automatic_optimization, "_make_closure", self._closure)

    def end(self) -> None:
        for owner, name in self._changed:
            vars(owner).pop(name, None)
        self._changed = []

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        vars(owner)[name] = lambda *arguments, **named: around(original, *arguments, **named)
        self._changed.append((owner, name))

    # ---- loaders

    def _resolved(self, resolve: Callable[..., Any], loader: Any, **named: Any) -> Any:
        """The sampler of a loader for several ranks. Lightning wraps a shuffling one of torchdata's, of which
        no rank could say later where in which order it was; here it has torch's, as a DataLoader that
        shuffles."""
        found, shuffles = resolve(loader, **named), loader.sampler
        kind = type(shuffles)  # of a package that need not be there
        is_torchdata = (kind.__module__.partition(".")[0], kind.__name__) == ("torchdata", "RandomSampler")
        if not is_torchdata or not isinstance(found, DistributedSamplerWrapper):
            return found
        if shuffles.replacement or shuffles.num_samples != len(loader.dataset):
            return found
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        given = self._trainer.distributed_sampler_kwargs or {}
        return DistributedSampler(loader.dataset, **{"shuffle": True, "seed": seed, **given})

    @property
    def samples(self) -> int | None:
        """Of a batch, over all ranks; None if each rank's is what it is."""
        return self._share.samples if self._share is not None else None

    def _setup_data(self, setup: Callable[[], None]) -> None:
        self._loaders = []
        setup()

    def _prepared(self, prepare: Callable[..., Any], loader: Any, shuffle: bool, mode: RunningStage) -> Any:
        loader = prepare(loader, shuffle=shuffle, mode=mode)
        if mode is not RunningStage.TRAINING:
            return loader
        self._loaders.append(loader)
        if len(self._loaders) > 1:
            if self._share is not None:
                as_it_was(self._loaders[0])
            self._share, self.differs = None, f"{AS_IT_IS}: several loaders are combined"
            return loader
        try:
            self._share, self.differs = self._shared(loader), ""
        except NotShared as why_not:
            self._share, self.differs = None, f"{AS_IT_IS}: {why_not}"
        return loader

    def _shared(self, loader: Any) -> Share:
        module = self._trainer.lightning_module
        # Who steps the optimizer or fetches batches by itself gets them whole.
        by_itself = "dataloader_iter" in inspect.signature(module.training_step).parameters
        in_parts = module.automatic_optimization and not by_itself
        return share_distributed(loader, world=self._trainer.world_size, in_parts=in_parts)

    # ---- batches

    def batch_begins(self, number: int) -> None:
        if self._share is not None:
            self._scales = self._share.scales(number)
            self._scale = self._scales[-1]

    def scale(self, loss: torch.Tensor) -> None:
        """Weigh the gradients of a loss whose backward is about to begin."""
        if self._share is not None and self._scale != 1.0 and loss.requires_grad:
            factor = self._scale
            loss.register_hook(lambda gradient: gradient * factor)

    def _last_part(self, convert: Callable[[Any], Any], batch: Any) -> Any:
        if isinstance(batch, MicroBatches):
            self._earlier, batch = batch[:-1], batch[-1]
        return convert(batch)

    def _closure(
        self, make: Callable[..., Any], arguments: OrderedDict[str, Any], optimizer: Any, number: int
    ) -> Any:
        """What trains on a batch, with the parts before its last done first."""
        closure = make(arguments, optimizer, number)
        earlier, self._earlier = self._earlier, []
        if not earlier:
            return closure
        step, zero_grad, backward = closure._step_fn, closure._zero_grad_fn, closure._backward_fn
        optimization = self._trainer.fit_loop.epoch_loop.automatic_optimization

        def steps() -> Any:
            if zero_grad is not None:
                zero_grad()
            with _block_parallel_sync_behavior(self._trainer.strategy, block=True):
                for part, scale in zip(earlier, self._scales, strict=False):
                    self._scale = scale
                    given = OrderedDict(arguments, batch=self._moved(part))
                    loss = optimization._training_step(given).closure_loss
                    if backward is not None and loss is not None:
                        backward(loss)
            self._scale = self._scales[-1]
            return step()

        closure._step_fn, closure._zero_grad_fn = steps, None
        return closure

    def _moved(self, part: Any) -> Any:
        """The part on the device, through the hooks through which batches go."""
        trainer = self._trainer
        part = trainer.precision_plugin.convert_input(part)
        part = trainer.lightning_module._on_before_batch_transfer(part, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", part, dataloader_idx=0)
