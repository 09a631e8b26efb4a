"""A Trainer that resumes from a state restored in place, where it would otherwise resume from files.

The Trainer reads its progress before it has an optimizer; here its model and optimizer are made ready first.
It does the rest of resuming itself, such as skipping batches that it has already seen.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TrainerState

import jurymast
from jurymast.checkpoint import HeldRandomState
from jurymast.errors import CheckpointError

NEEDED = ("_init_training_state", "_prepare_for_training", "_load_rng_state", "_load_from_checkpoint")


def train_on(trainer: Trainer, options: Mapping[str, Any]) -> Any:
    if not all(hasattr(Trainer, name) for name in NEEDED):
        raise CheckpointError("jurymast_transformers needs transformers 5")
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Resuming, kind), {"__module__": kind.__module__})
    trainer.jurymast_options = options
    try:
        with tempfile.TemporaryDirectory() as folder:  # the part of a checkpoint that it reads at once
            TrainerState().save_to_json(str(Path(folder) / TRAINER_STATE_NAME))
            return trainer.train(resume_from_checkpoint=folder)
    finally:
        trainer.__class__ = kind
        trainer.remove_callback(_Saving)


class _Resuming(Trainer):
    """Overrides methods of the Trainer's own class, which may be a user's."""

    state: TrainerState
    jurymast_options: Mapping[str, Any]

    def get_train_dataloader(self) -> Any:
        self._jurymast_loader = super().get_train_dataloader()
        return self._jurymast_loader

    def _init_training_state(
        self, max_steps: int, steps_an_epoch: int, epochs: int, folder: str, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_an_epoch, epochs, None, trial)
        self._jurymast_ready = super()._prepare_for_training(max_steps, self._jurymast_loader, None)
        progress, self._jurymast_random = _Progress(), HeldRandomState()
        progress.state = self.state
        checkpoint = jurymast.Checkpointer(
            {
                "model": self.model,
                "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
                "schedule": self.lr_scheduler,
                "trainer": progress,
                "random": self._jurymast_random,
            },
            **self.jurymast_options,
        )
        if checkpoint.restore():
            self.state = progress.state
            self.state.init_training_references(self, max_steps, epochs, trial)
            self._load_callback_state()
        self.add_callback(_Saving(checkpoint, progress))
        skipped = 0 if self.args.ignore_data_skip else self.state.global_step % steps_an_epoch
        return self.state.global_step // steps_an_epoch, skipped * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, max_steps: int, loader: Any, folder: str) -> Any:
        return self._jurymast_ready

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        """Do nothing: the model was restored in place."""

    def _load_rng_state(self, folder: str) -> None:
        self._jurymast_random.apply()


class _Progress:
    """The Trainer's own state: its progress, its log, its best metric."""

    state: TrainerState

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.state)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = TrainerState(**saved)


class _Saving(TrainerCallback):
    def __init__(self, checkpoint: jurymast.Checkpointer, progress: _Progress) -> None:
        self._checkpoint, self._progress = checkpoint, progress

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._progress.state = state
        self._checkpoint.step(state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._progress.state = state
        self._checkpoint.save(state.global_step)
