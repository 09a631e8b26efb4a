"""jurymast's checkpoints for Lightning's Trainer.

A state is taken where nothing of a batch or an epoch is left to do: after a batch's validation and schedules,
or, for an epoch's last batch, after the hooks and schedules of the epoch's end. Lightning has no hook there:
the loops' own methods are wrapped (see `_wrap`). Weights and optimizers are restored in place; Lightning
restores all else itself, from a checkpoint as its `dump_checkpoint` makes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, __version__
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

import jurymast
from jurymast.checkpoint import HeldRandomState
from jurymast.errors import CheckpointError
from jurymast_lightning import live, metrics
from jurymast_lightning.sharing import Sharing

log = logging.getLogger("jurymast.checkpoint")


class Checkpoints(Callback):
    """Restores a training when it starts, and saves between two batches whenever a save is due. `options` are
    the Checkpointer's.

    It saves within an epoch if the training's loaders have a state, like torchdata's StatefulDataLoader;
    otherwise only at the end of each epoch. Raises CheckpointError for a training whose state it cannot save.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._training: _Training | None = None
        self._sharing: Sharing | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The first, so that other callbacks have their state before their own `on_fit_start`.
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
        if stage == "fit":
            self._sharing = Sharing(trainer)
            self._sharing.begin()  # a schedule may iterate over the loaders before `on_fit_start`

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse(trainer)
        assert self._sharing is not None
        self._training = _Training(trainer, self, self._options, self._sharing)
        self._training.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._sharing is not None:
            self._sharing.batch_begins(batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._sharing is not None:
            self._sharing.scale(loss)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        _unwrap(trainer)
        self._training = None
        if self._sharing is not None:
            self._sharing.end()
            self._sharing = None


def _refuse(trainer: Trainer) -> None:
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise CheckpointError(
            "jurymast_lightning cannot save the state of DeepSpeed's engine",
            hint="use Lightning's own ModelCheckpoint, or another strategy such as FSDP",
        )
    if any(isinstance(one, BatchSizeFinder) for one in trainer.callbacks):
        raise CheckpointError(
            "jurymast_lightning cannot save the batch size that BatchSizeFinder finds",
            hint="find it in a run of its own, and set it",
        )
    if any(isinstance(one, BaseFinetuning) for one in trainer.callbacks):
        raise CheckpointError(
            "jurymast_lightning cannot save which parameters a BaseFinetuning callback trains",
            hint="train what is frozen and what is not in a run each, or use Lightning's own ModelCheckpoint",
        )


class _Training:
    """One call of `Trainer.fit`, with its Checkpointer."""

    def __init__(
        self, trainer: Trainer, callback: Checkpoints, options: Mapping[str, Any], sharing: Sharing
    ) -> None:
        self._trainer, self._callback, self._sharing = trainer, callback, sharing
        self._shared, self._own = _Shared(trainer), _Own(trainer)
        self._random = HeldRandomState()
        optimizers = {f"optimizer-{n}": optimizer for n, optimizer in enumerate(trainer.optimizers)}
        state = {"model": trainer.lightning_module, **optimizers, "trainer": self._shared, "rank": self._own}
        if not trainer.lightning_module.automatic_optimization:
            state["gradients"] = _Gradients(trainer)
        self._checkpoint = jurymast.Checkpointer({**state, "random": self._random}, **options)
        self._last = 0
        self._resumable: bool | None = None
        self._iterated = False

    def begin(self) -> None:
        """Restore weights and optimizers, and leave the rest to Lightning, which does it next."""
        trainer = self._trainer
        self._last = self._checkpoint.restore()
        _unwrap(trainer)
        _wrap(trainer.fit_loop, "run", self._run)
        _wrap(trainer.fit_loop, "reset", self._reset)
        _wrap(trainer.fit_loop, "on_advance_start", self._epoch_starts)
        _wrap(trainer.fit_loop, "on_advance_end", self._epoch_ends)
        _wrap(trainer.fit_loop, "on_run_end", self._fit_ends)
        _wrap(trainer.fit_loop.epoch_loop, "advance", self._batch_starts)
        _wrap(trainer.fit_loop.epoch_loop, "on_advance_end", self._batch_ends)
        if self._shared.held is None:
            return
        # What it found before is in the restored state.
        trainer.callbacks[:] = [one for one in trainer.callbacks if not isinstance(one, LearningRateFinder)]
        # `trainer.estimated_stepping_batches`, say, iterates over the loaders before anything is restored.
        self._iterated = trainer.fit_loop._combined_loader is not None
        connector = _Restoring(trainer, self._shared.held, self._own.held)
        connector.restore_early()

    # ---- what wraps the loops' methods

    def _run(self, run: Callable[[], None]) -> None:
        run()
        fit_loop = self._trainer.fit_loop
        if self._shared.held is not None and fit_loop.done:
            # Restored at its very end, it was skipped; what follows the last epoch is still to be done.
            fit_loop.reset()
            fit_loop.on_run_start()
            self._goes_on()
            fit_loop.on_run_end()

    def _reset(self, reset: Callable[[], None]) -> None:
        self._checkpoint.batch_is_kept(self._sharing.differs)
        if self._between_epochs():
            _forget_restart(self._trainer.fit_loop)
        reset()

    def _epoch_starts(self, start: Callable[[], None]) -> None:
        if self._shared.held is not None:
            self._trainer.fit_loop._last_train_dl_reload_epoch = self._shared.held["reloaded"]
        if self._between_epochs():
            # The epoch begins with a new iteration of loaders in the state in which the one before left them.
            self._loaders_again(self._trainer.fit_loop._data_fetcher)
            self._goes_on()
        start()

    def _batch_starts(self, advance: Callable[..., None], fetcher: Any) -> None:
        if self._shared.held is not None:
            _forget_restart(self._trainer.fit_loop)
            if self._own.held["fetched"] or self._iterated:
                self._loaders_again(fetcher)
                fetcher.batches.extend(self._own.held["fetched"])
                fetcher.fetched = self._own.held["count"]
            self._trainer.accumulate_grad_batches = self._shared.held["accumulated"]
            metrics.restore_running(self._trainer, self._own.held["running"])
            self._goes_on()
        advance(fetcher)

    def _batch_ends(self, end: Callable[..., None], fetcher: Any) -> None:
        end(fetcher)
        if self._is_ours() and not self._trainer.fit_loop.epoch_loop.done:
            self._saves(between_epochs=False)

    def _epoch_ends(self, end: Callable[[], None]) -> None:
        end()
        if self._is_ours():
            self._saves(between_epochs=True)

    def _fit_ends(self, end: Callable[[], None]) -> None:
        if self._is_ours():
            self._shared.between_epochs = True
            self._checkpoint.save(self._trainer.global_step)
        end()

    # ----

    def _is_ours(self) -> bool:
        """Return whether this is the training itself, and no trial of Lightning's tuners."""
        return self._callback in self._trainer.callbacks

    def _between_epochs(self) -> bool:
        return self._shared.held is not None and self._shared.held["between epochs"]

    def _goes_on(self) -> None:
        """Set everything that draws numbers, at the last moment: making a loader's iterator draws one."""
        self._own.restore_generators()
        self._random.apply()
        self._shared.held = self._own.held = None

    def _loaders_again(self, fetcher: Any) -> None:
        """Iterate over the loaders from their restored state, without what was fetched ahead just now."""
        ahead = getattr(fetcher, "prefetch_batches", 0)
        self._trainer.fit_loop._combined_loader._load_state_dicts(self._own.held["loaders"])
        if ahead:
            fetcher.prefetch_batches = 0
            fetcher.batches.clear()
        iter(fetcher)
        if ahead:
            fetcher.prefetch_batches = ahead

    def _saves(self, *, between_epochs: bool) -> None:
        step = self._trainer.global_step
        self._shared.between_epochs = between_epochs
        self._shared.begun = True
        if self._resumable is None:
            self._resumable = _is_resumable(self._trainer)
        if not self._resumable:
            if between_epochs:
                self._checkpoint.save(step)
        elif step != self._last:  # otherwise gradients are still being accumulated
            self._checkpoint.step(step, samples=self._batch() * max(0, step - self._last))
        self._last = step

    def _batch(self) -> int:
        """The samples of a step, over all ranks; 0 where a step has no batch size of its own."""
        trainer = self._trainer
        if self._sharing.samples is not None and len(trainer.optimizers) == 1:
            return self._sharing.samples * trainer.accumulate_grad_batches
        sizes = [getattr(one, "batch_size", None) for one in _loaders(trainer.fit_loop)]
        if len(sizes) != 1 or not isinstance(sizes[0], int) or len(trainer.optimizers) != 1:
            return 0
        return sizes[0] * trainer.world_size * trainer.accumulate_grad_batches


class _Restoring(_CheckpointConnector):
    """Lightning's restore, of a checkpoint that lies in memory, and whose weights and optimizers are restored
    already."""

    def __init__(self, trainer: Trainer, shared: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        super().__init__(trainer)
        self._before, self._shared, self._own = trainer._checkpoint_connector, shared, own
        self._ckpt_path = self._before._ckpt_path
        self._user_managed = self._before._user_managed
        # What other callbacks change at the start, as if training began anew.
        self._groups = [
            [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]
        trainer._checkpoint_connector = self

    def restore_early(self) -> None:
        """Restore what Lightning restores before `on_fit_start`."""
        trees = live.tensors(self.trainer)
        checkpoint = {**trees, **live.resolved(self._shared["checkpoint"], trees)}
        if not self._shared["between epochs"] and not self._own["fetched"]:  # else see `_loaders_again`
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = self._own["loaders"]
        self._loaded_checkpoint = checkpoint
        self.restore_datamodule()
        call._call_lightning_module_hook(self.trainer, "on_load_checkpoint", checkpoint)
        self.restore_callbacks()

    def _restore_modules_and_callbacks(self, *_: Any, **__: Any) -> None:
        """Do nothing: `restore_early` did it."""

    def restore_loops(self) -> None:
        super().restore_loops()
        # No sanity check runs, between two epochs either.
        self.trainer.fit_loop.epoch_loop.val_loop._restarting = True

    def restore_optimizers(self) -> None:
        for optimizer, groups in zip(self.trainer.optimizers, self._groups, strict=True):
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                group.update(saved)

    def resume_end(self) -> None:
        super().resume_end()
        trainer = self.trainer
        trainer._checkpoint_connector = self._before
        trainer.should_stop = self._shared["should stop"]
        metrics.restore_latest(trainer, self._own["latest"])


class _Shared:
    """What Lightning's `dump_checkpoint` collects, the same on all ranks, without weights and optimizers.
    What was restored is `held` until training goes on."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.held: Any = None
        self.between_epochs = False
        self.begun = False  # before that, hooks may find nothing yet that they can save

    def state_dict(self) -> dict[str, Any]:
        if self.held is not None:
            return dict(self.held)
        trainer = self._trainer
        return {
            "checkpoint": self._checkpoint(),
            "between epochs": self.between_epochs,
            "should stop": trainer.should_stop,
            "accumulated": trainer.accumulate_grad_batches,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held = state

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        loops = {
            name: getattr(trainer, name).state_dict()
            for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop")
        }
        loops["fit_loop"]["state_dict"].pop("combined_loader", None)  # each rank's own
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": __version__,
            "loops": loops,
            "callbacks": call._call_callbacks_state_dict(trainer),
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        precision = trainer.precision_plugin
        if saved := precision.state_dict():
            checkpoint[type(precision).__qualname__] = saved
        data = trainer.datamodule
        if data is not None and (saved := call._call_lightning_datamodule_hook(trainer, "state_dict")):
            checkpoint[type(data).__qualname__] = saved
        if not self.begun or not _has_save_hooks(trainer):
            return checkpoint
        trees = live.tensors(trainer)
        known = live.Live(trees)
        checkpoint.update(trees)
        precision.on_save_checkpoint(checkpoint)
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        return known.referring(checkpoint)


def _has_save_hooks(trainer: Trainer) -> bool:
    """Return whether somebody may change a checkpoint, who has to be shown the weights then."""
    hooks = [getattr(type(one), "on_save_checkpoint", None) for one in trainer.callbacks]
    hooks += [type(one).on_save_checkpoint for one in (trainer.lightning_module, trainer.precision_plugin)]
    return any(hook not in _NO_HOOKS for hook in hooks)


_NO_HOOKS = [kind.on_save_checkpoint for kind in (Callback, LightningModule, Precision)]


class _Own:
    """What each rank has for itself: its loaders, and what it has logged since the epoch began."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.held: Any = None

    def state_dict(self) -> dict[str, Any]:
        if self.held is not None:
            return dict(self.held)
        fit_loop = self._trainer.fit_loop
        combined, fetcher = fit_loop._combined_loader, fit_loop._data_fetcher
        return {
            "loaders": combined._state_dicts() if combined is not None else [],
            "generators": {name: one.get_state() for name, one in self._generators()},
            "fetched": list(getattr(fetcher, "batches", ())),
            "count": getattr(fetcher, "fetched", 0),
            "latest": metrics.latest(self._trainer),
            "running": metrics.running(self._trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held = state

    def restore_generators(self) -> None:
        for name, generator in self._generators():
            if name in self.held["generators"]:
                generator.set_state(self.held["generators"][name])

    def _generators(self) -> Iterator[tuple[str, torch.Generator]]:
        """Yield the generators that the loaders were given, which do not belong to their state."""
        fit_loop = self._trainer.fit_loop
        for stage, loop in (("train", fit_loop), ("validate", fit_loop.epoch_loop.val_loop)):
            for number, loader in enumerate(_loaders(loop)):
                batches = getattr(loader, "batch_sampler", None)
                owners = (
                    loader,
                    getattr(loader, "sampler", None),
                    batches,
                    getattr(batches, "sampler", None),
                )
                for place, owner in enumerate(owners):
                    generator = getattr(owner, "generator", None)
                    if isinstance(generator, torch.Generator):
                        yield f"{stage}-{number}-{place}", generator


class _Gradients:
    """The gradients, for a module that decides itself when it applies them: it may be adding some up."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: one.grad for name, one in self._parameters() if one.grad is not None}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters():
            gradient = state.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self._trainer.lightning_module.named_parameters()


def _loaders(loop: Any) -> list[Any]:
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def _is_resumable(trainer: Trainer) -> bool:
    """Return whether training can go on within an epoch; say so if it cannot."""
    loaders = _loaders(trainer.fit_loop)
    if not all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders):
        why = "a loader of the training has no state, as torchdata's StatefulDataLoader has"
    elif len(loaders) > 1 and len({_length(one) for one in loaders}) > 1:
        why = "loaders of different lengths are combined, and a state does not tell in which round each is"
    elif any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks):
        why = "StochasticWeightAveraging can only begin again with an epoch"
    else:
        return True
    if trainer.is_global_zero:
        log.warning("saving only at the end of each epoch: %s", why)
    return False


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError:
        return -1


def _forget_restart(loop: Any) -> None:
    """Have the loop, and those within it, go on as if they had never stopped: what Lightning would do after a
    restart to finish a batch or an epoch is done already."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for child in vars(loop).values():
        if hasattr(child, "reset_restart_stage"):
            _forget_restart(child)


_WRAPPED = {
    "fit_loop": ("run", "reset", "on_advance_start", "on_advance_end", "on_run_end"),
    "epoch_loop": ("advance", "on_advance_end"),
}


def _wrap(loop: Any, name: str, around: Callable[..., None]) -> None:
    """Have `around` called with the loop's method of this name and its arguments, in place of the method."""
    original = getattr(loop, name)
    vars(loop)[name] = lambda *arguments: around(original, *arguments)


def _unwrap(trainer: Trainer) -> None:
    for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop):
        for names in _WRAPPED.values():
            for name in names:
                vars(loop).pop(name, None)
