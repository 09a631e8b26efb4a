"""jurymast's checkpoints for Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

import jurymast
from jurymast.checkpoint import HeldRandomState


class Checkpoints(Callback):
    """Restores a training when it starts, and saves after a step whenever a save is due. `options` are the
    Checkpointer's.

    It saves within an epoch if the training's loader has a state, like torchdata's StatefulDataLoader;
    otherwise only at the end of each epoch.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._checkpoint: jurymast.Checkpointer | None = None
        self._random = HeldRandomState()
        self._last = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = {f"optimizer-{n}": optimizer for n, optimizer in enumerate(trainer.optimizers)}
        state = {"model": pl_module, **optimizers, "trainer": _Progress(trainer), "random": self._random}
        self._checkpoint = jurymast.Checkpointer(state, **self._options)
        self._last = self._checkpoint.restore()

    def on_train_batch_start(self, *_: Any) -> None:
        # Not earlier: creating a loader's iterator draws a random number.
        self._random.apply()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        assert self._checkpoint is not None
        if trainer.global_step == self._last:  # gradients are still being accumulated
            return
        self._last = trainer.global_step
        if _has_state(trainer):
            self._checkpoint.step(trainer.global_step)
        elif trainer.is_last_batch:
            self._checkpoint.save(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._checkpoint is not None
        self._checkpoint.save(trainer.global_step)


class _Progress:
    """The progress of loops, schedules, callbacks and precision."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "loop": trainer.fit_loop.state_dict(),
            "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "callbacks": {c.state_key: state for c in _others(trainer) if (state := c.state_dict())},
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loop"])
        for config, saved in zip(trainer.lr_scheduler_configs, state["schedules"], strict=True):
            config.scheduler.load_state_dict(saved)
        for callback in _others(trainer):
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        trainer.precision_plugin.load_state_dict(state["precision"])


def _others(trainer: Trainer) -> list[Callback]:
    return [callback for callback in trainer.callbacks if not isinstance(callback, Checkpoints)]


def _has_state(trainer: Trainer) -> bool:
    loader = trainer.train_dataloader
    loaders = (
        loader.values() if isinstance(loader, Mapping) else loader if isinstance(loader, list) else [loader]
    )
    return all(hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders)
