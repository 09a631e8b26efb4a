"""A training with Hugging Face's Trainer goes on from each restore point as if it had never stopped."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

pytest.importorskip("transformers", minversion="5")

from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import jurymast
import jurymast_transformers
from support.checkpoints import differences
from support.instant import InstantCheckpointer, Kept

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]

EPOCHS, BATCHES = 2, 4


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jurymast, "Checkpointer", InstantCheckpointer, raising=False)
    logging.getLogger("transformers").setLevel(logging.ERROR)


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([index / 8.0, 1.0]), "labels": torch.tensor([index / 4.0])}


class Stream(IterableDataset[Any]):
    """Has no length: the Trainer begins it again until all steps are done."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Points()[index] for index in range(BATCHES * 2))


class Model(torch.nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.rand(1) if self.training else torch.ones(1)
        found = self.layer(x)
        return {"loss": ((found - labels) * noise).square().mean(), "logits": found}


class Ends(TrainerCallback):
    def __init__(self) -> None:
        self.ends = 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends += 1


@dataclass
class Case:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    patience: int = 0
    points: tuple[int, ...] = tuple(range(1, EPOCHS * BATCHES + 1))
    data: Callable[[], Any] = Points
    tried: tuple[int, ...] = ()  # of these points; () for all


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0, "threshold": 9.0},
    "metric_for_best_model": "loss",
    "greater_is_better": False,
}
CASES = [
    Case("logged each third step", {"logging_steps": 3}),
    Case("evaluated in the middle", {"eval_strategy": "steps", "eval_steps": 3, **PLATEAU}),
    Case("evaluated at each step", {"eval_strategy": "steps", "eval_steps": 1, **PLATEAU}),
    Case("evaluated after each epoch", {"eval_strategy": "epoch", "logging_strategy": "epoch", **PLATEAU}),
    Case("evaluated at the start", {"eval_strategy": "epoch", "eval_on_start": True}),
    Case("stops early", {"eval_strategy": "steps", "eval_steps": 2, **PLATEAU}, patience=2,
         points=(1, 2, 3, 4, 5, 6)),
    Case("accumulated", {"gradient_accumulation_steps": 3}, points=(1, 2, 3, 4)),
    Case("limited by steps", {"max_steps": 6}, points=(1, 2, 3, 4, 5, 6)),
    Case("no length", {"max_steps": 7, "eval_strategy": "epoch"}, points=(1, 2, 3, 4, 5, 6, 7), data=Stream),
    Case("no length, accumulated", {"max_steps": 4, "gradient_accumulation_steps": 3}, points=(1, 2, 3, 4),
         data=Stream),
    Case("workers", {"dataloader_num_workers": 1}, tried=(2, BATCHES)),
    Case("workers that stay", {"dataloader_num_workers": 1, "dataloader_persistent_workers": True,
                               "eval_strategy": "steps", "eval_steps": 3}, tried=(2, 3, BATCHES)),
    Case("rate by step", {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
]  # fmt: skip


def train(case: Case, kept: Kept, out: Path, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    random.seed(seed)
    arguments = TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=2, per_device_eval_batch_size=2, report_to=[],
        use_cpu=True, seed=5, disable_tqdm=True, save_strategy="no", learning_rate=0.1,
        **{"num_train_epochs": EPOCHS, "logging_steps": 2, **case.options},
    )  # fmt: skip
    ends = Ends()
    stopping = EarlyStoppingCallback(case.patience, 9.0) if case.patience else None
    trainer = Trainer(
        model=Model(), args=arguments, train_dataset=case.data(), eval_dataset=Points(),
        callbacks=[ends, *([stopping] if stopping else [])],
    )  # fmt: skip
    # As with mixed precision on a GPU.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    result = jurymast_transformers.train(trainer, directory=kept)
    return {
        "weights": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "at": (trainer.state.global_step, trainer.state.epoch),
        "scaler": trainer.accelerator.scaler.state_dict(),
        "best": trainer.state.best_metric,
        "log": [timeless(line) for line in trainer.state.log_history],
        "loss": result.training_loss,
        "stopping": stopping.early_stopping_patience_counter if stopping else None,
        "ends": ends.ends,
        "drawn": float(torch.rand(1)),
    }


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.endswith(("_runtime", "_per_second"))}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_goes_on_from_each_restore_point(case: Case, tmp_path: Path) -> None:
    kept = Kept()
    expected = train(case, kept, tmp_path, 1)
    assert tuple(kept.states) == case.points
    for step in case.tried or case.points:
        found = train(case, kept.at(step), tmp_path, 100 + step)
        wrong = list(differences(expected, found))
        assert not wrong, f"restored at step {step}"


def test_samples_and_tokens_are_counted_where_the_trainer_knows_them(tmp_path: Path) -> None:
    counting = {"include_num_input_tokens_seen": "all", "gradient_accumulation_steps": 2}
    kept = Kept()
    train(Case("counted", counting), kept, tmp_path, 1)
    assert (kept.samples, kept.tokens) == (EPOCHS * BATCHES * 2, EPOCHS * BATCHES * 2 * 2)
    later = kept.at(2)
    train(Case("goes on", counting), later, tmp_path, 2)
    assert (later.samples, later.tokens) == (kept.samples / 2, kept.tokens / 2)
