"""A Trainer that resumes from a state restored in place, where it would otherwise resume from files.

The Trainer reads its progress before it has an optimizer; here its model and optimizer are made ready first.
It does the rest of resuming itself, such as skipping batches that it has already seen. Its sums and the state
of its callbacks, which it would not restore from files either, are restored here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME, TrainerState
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import has_length

import jurymast
from jurymast.checkpoint import HeldRandomState
from jurymast.errors import CheckpointError
from jurymast.foreign import temporary_place
from jurymast_transformers.sharing import Sharing

NEEDED = (
    "_init_training_state", "_prepare_for_training", "_load_rng_state", "_load_from_checkpoint",
    "_maybe_log_save_evaluate", "_finalize_training",
)  # fmt: skip


def train_on(trainer: Trainer, options: Mapping[str, Any]) -> Any:
    if not all(hasattr(Trainer, name) for name in NEEDED):
        raise CheckpointError("jurymast_transformers needs transformers 5")
    if trainer.is_deepspeed_enabled:
        raise CheckpointError(
            "jurymast_transformers cannot save the state of DeepSpeed's engine",
            hint="use the Trainer's own checkpoints, or FSDP",
        )
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Resuming, kind), {"__module__": kind.__module__})
    trainer.jurymast_options = options
    try:
        with tempfile.TemporaryDirectory(
            dir=temporary_place()
        ) as folder:  # of a checkpoint, what it reads at once
            TrainerState().save_to_json(str(Path(folder) / TRAINER_STATE_NAME))
            return trainer.train(resume_from_checkpoint=folder)
    finally:
        trainer.__class__ = kind
        trainer.remove_callback(_Restoring)


class _Resuming(Sharing):
    """Overrides methods of the Trainer's own class, which may be a user's. It saves after a step's evaluation
    and log line, or, for an epoch's last step, after those of the epoch."""

    state: TrainerState
    control: TrainerControl
    jurymast_options: Mapping[str, Any]

    def get_train_dataloader(self) -> Any:
        self._jurymast_loader = super().get_train_dataloader()
        return self._jurymast_loader

    def get_eval_dataloader(self, *arguments: Any, **named: Any) -> Any:
        loader = super().get_eval_dataloader(*arguments, **named)
        if self._jurymast_progress.evaluated:
            _begin_without_draw(loader)
        return loader

    def _init_training_state(
        self, max_steps: int, steps_an_epoch: int, epochs: int, folder: str, trial: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_an_epoch, epochs, None, trial)
        self._jurymast_ready = super()._prepare_for_training(max_steps, self._jurymast_loader, None)
        self._jurymast_progress, self._jurymast_sums = _Progress(self), _Sums(self)
        self._jurymast_random = HeldRandomState()
        state = {
            "model": self.model,
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "schedule": self.lr_scheduler,
            "trainer": self._jurymast_progress,
            "sums": self._jurymast_sums,
            "random": self._jurymast_random,
        }
        if self.accelerator.scaler is not None:
            state["scaler"] = self.accelerator.scaler
        self._jurymast_checkpoint = jurymast.Checkpointer(state, **self.jurymast_options)
        self._jurymast_checkpoint.batch_is_kept(self._jurymast_batch_differs)
        restored = self._jurymast_checkpoint.restore()
        self._jurymast_steps_an_epoch, self._jurymast_seen = steps_an_epoch, -1
        if restored:
            self._jurymast_progress.apply()
            _begin_without_draw(self._jurymast_loader)
            self.state.init_training_references(self, max_steps, epochs, trial)
        self._jurymast_told = restored, self.state.num_input_tokens_seen
        self.add_callback(_Restoring(self))
        if self._jurymast_progress.is_over:
            return epochs, 0  # what follows the last epoch is still to be done
        epoch, skipped = divmod(self.state.global_step, steps_an_epoch)
        if restored and (self._jurymast_progress.moved or not has_length(self._jurymast_loader)):
            epoch, skipped = self._jurymast_progress.place()  # the Trainer takes all steps for one epoch then
        skipped = 0 if self.args.ignore_data_skip else skipped
        return epoch, skipped * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, max_steps: int, loader: Any, folder: str) -> Any:
        return self._jurymast_ready

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        """Do nothing: the model was restored in place."""

    def _load_rng_state(self, folder: str) -> None:
        self._jurymast_random.apply()

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        if skip_scheduler and self._jurymast_progress.is_restored:
            return {}  # the evaluation before the first step
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=skip_scheduler)

    def _maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        super()._maybe_log_save_evaluate(*arguments, **named)
        step = self.state.global_step
        of_epoch, self._jurymast_seen = step == self._jurymast_seen, step  # called once more at its end
        stops = self.control.should_training_stop or self.control.should_epoch_stop
        self._jurymast_progress.epoch_over = of_epoch
        since = step - self._jurymast_progress.counts_from
        if of_epoch or not (stops or since % self._jurymast_steps_an_epoch == 0):
            self._jurymast_checkpoint.step(step, **self._trained_on())

    def _trained_on(self) -> dict[str, float]:
        """What all ranks trained on since the last step: tokens only if the Trainer counts them."""
        step, tokens = self._jurymast_told
        self._jurymast_told = self.state.global_step, self.state.num_input_tokens_seen
        batch = self.get_total_train_batch_size(self.args)
        steps, more = self.state.global_step - step, self.state.num_input_tokens_seen - tokens
        return {"samples": batch * max(0, steps), "tokens": max(0, more)}

    def _finalize_training(self, *arguments: Any) -> Any:
        if not self._jurymast_progress.is_over:  # else the state of its end is the one that was restored
            self._jurymast_checkpoint.save(self.state.global_step)
        return super()._finalize_training(*arguments)


def _begin_without_draw(loader: Any) -> None:
    """Have a loader that keeps its workers between epochs draw no number for them at its first iteration: it
    did that long ago, in the process whose state was restored. What the workers draw, they draw anew."""
    loader = getattr(loader, "base_dataloader", loader)
    if not getattr(loader, "persistent_workers", False) or loader._iterator is not None:
        return
    begin = loader._get_iterator

    def begins() -> Any:
        given, loader.generator = loader.generator, torch.Generator()
        try:
            return begin()
        finally:
            loader.generator = given

    loader._get_iterator = begins


class _Progress:
    """The Trainer's own state, the same on all ranks: its progress, its log, its best metric, and the state
    of its callbacks and of its control."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: Any = None
        self.is_restored = self.is_over = False
        # Which epoch this is, and the step at which it began. It may go on, or its end is done too.
        self._epoch, self._began, self.epoch_over = -1, 0, False
        self._goes_on = False
        # Whether epochs have had steps of different sizes, as of different numbers of ranks.
        self.moved = False
        self.evaluated = False  # before the restore, with loaders that are kept

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return dict(self._held)
        states = [[type(one).__name__, one.state()] for one in self._exportable()]
        evaluated = self.evaluated or bool(getattr(self._trainer, "_eval_dataloaders", None))
        epoch = {"epoch": self._epoch, "began": self._began, "epoch over": self.epoch_over}
        epoch |= {"evaluated": evaluated, "ranks": self._trainer.jurymast_ranks, "moved": self.moved}
        return {"state": asdict(self._trainer.state), "callbacks": states, **epoch}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._held = saved

    def apply(self) -> None:
        trainer = self._trainer
        trainer.state = TrainerState(**self._held["state"])
        present = self._exportable()
        for name, state in self._held["callbacks"]:
            one = next((one for one in present if type(one).__name__ == name), None)
            if one is None:
                raise CheckpointError(
                    f"the state has the callback {name}, which this Trainer lacks",
                    hint="add the callback again",
                )
            present.remove(one)
            for attribute, value in {**state.get("args", {}), **state.get("attributes", {})}.items():
                setattr(one, attribute, value)
        self.is_restored, self.is_over = True, bool(trainer.control.should_training_stop)
        # A state of an older jurymast has no epoch: it counts as its first.
        self._epoch, self._began = self._held.get("epoch", 0), self._held.get("began", 0)
        self.epoch_over = self._held.get("epoch over", False)
        self._goes_on = not self.epoch_over
        self._move(self._held.get("ranks"), bool(self._held.get("moved")))
        self.evaluated = self._held.get("evaluated", False)
        self._held = None

    def _move(self, before: int | None, moved: bool) -> None:
        """Have the epoch begin where it would have begun with steps of the present size. Where that is within
        a step, that one is done again."""
        now = self._trainer.jurymast_ranks
        self.moved = moved or before not in (None, now)
        if before not in (None, now):
            done = self._trainer.state.global_step
            self._began = done - (done - self._began) * before // now

    @property
    def counts_from(self) -> int:
        """The step at which an epoch began, from which their ends can be told."""
        return self._began if self.moved else 0

    def place(self) -> tuple[int, int]:
        """Return the epoch in which training goes on, and how many steps of it are done."""
        if self.epoch_over:
            return self._epoch + 1, 0
        return self._epoch, self._trainer.state.global_step - self._began

    def epoch_begins(self) -> None:
        if self._goes_on:
            self._goes_on = False
            return
        self._epoch, self._began, self.epoch_over = self._epoch + 1, self._trainer.state.global_step, False

    def _exportable(self) -> list[Any]:
        found = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [one for one in found if isinstance(one, ExportableState)]


# What the Trainer adds up between two lines of its log, and over the whole training.
_SUMS = (
    "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip


class _Sums:
    """Each rank's own sums. They are restored after the Trainer has set them back at its beginning."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: Any = None

    def state_dict(self) -> dict[str, Any]:
        if self._held is not None:
            return dict(self._held)
        return {name: getattr(self._trainer, name) for name in _SUMS if hasattr(self._trainer, name)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._held = saved

    def apply(self) -> None:
        for name, value in (self._held or {}).items():
            same_place = isinstance(value, torch.Tensor)
            setattr(self._trainer, name, value.to(self._trainer.args.device) if same_place else value)
        self._held = None


class _Restoring(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer._jurymast_sums.apply()
        if self._trainer._jurymast_progress.is_over:
            self._trainer._jurymast_random.apply()
            control.should_training_stop = True

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer._jurymast_progress.epoch_begins()
