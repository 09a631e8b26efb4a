"""A Lightning training goes on from each of its restore points as if it had never stopped."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

pytest.importorskip("lightning")

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanMetric

import jurymast
from jurymast.errors import CheckpointError
from jurymast_lightning import Checkpoints
from support.checkpoints import differences
from support.instant import InstantCheckpointer, Kept

try:
    from lightning.pytorch.callbacks import EMAWeightAveraging
except ImportError:  # Lightning before 2.6
    EMAWeightAveraging = None

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run", "quiet")]

EPOCHS, BATCHES = 2, 4


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jurymast, "Checkpointer", InstantCheckpointer, raising=False)


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        yield


class Noisy(Dataset[torch.Tensor]):
    """Draws from the global generators, as augmentations do."""

    def __len__(self) -> int:
        return BATCHES * 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 8.0, random.random()]) + torch.rand(2) / 10


class Stream(IterableDataset[torch.Tensor]):
    """Has no length, and a position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES * 2:
            self.at += 1
            yield torch.tensor([self.at / 8.0, random.random()])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model(LightningModule):
    """Logs means, torchmetrics, and a validation's value that gets no better."""

    def __init__(self, schedule: str = "plateau", interval: str = "epoch") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(2, 1)
        self.mean = MeanMetric()
        self.schedule, self.interval = schedule, interval
        self.story: list[Any] = []
        self.extra = 0

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = sum(one[0] if isinstance(one, list) else one for one in batch.values())
        if isinstance(batch, list):
            (batch,) = batch
        loss = (self.layer(batch) * torch.rand(1)).square().mean()
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        if index == 1:
            self.log("second", loss, on_epoch=True, on_step=False, reduce_fx="max")
        self.extra += 1
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("checked", self.layer.weight.sum().abs() + 1.0)

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.story.append({name: float(value) for name, value in sorted(found.items())})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        if self.schedule == "plateau":
            schedule: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=9
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": schedule,
                    "monitor": "checked",
                    "interval": self.interval,
                    "strict": False,
                },
            }
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"], checkpoint["story"] = self.extra, list(self.story)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert "layer.weight" in checkpoint["state_dict"]
        self.extra, self.story = checkpoint["extra"], list(checkpoint["story"])


class Counted(Model):
    """Asks for the number of steps, so that Lightning iterates over the loaders before it restores."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            [{"params": [self.layer.weight]}, {"params": [self.layer.bias], "weight_decay": 0.0}]
        )
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Model):
    """Adds gradients up over three batches, across the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        self.manual_backward(loss)
        first = self.extra % 2 == 0  # steps each second batch, but clears each third
        if first:
            optimizer.step()
        if self.extra % 3 == 0:
            optimizer.zero_grad()
        return loss


class Average(Callback):
    """An average of the weights, in a hook's entry of the checkpoint and in a tensor of its own."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(self, "average"):
            self.average = {k: v.clone() for k, v in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, value in pl_module.state_dict().items():
            self.average[name].mul_(0.9).add_(value, alpha=0.1)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["average"] = self.average
        checkpoint["state_dict"].pop("layer.bias")  # as those of a frozen backbone

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.average = {k: v.clone() for k, v in checkpoint["average"].items()}


class Stops(Callback):
    """Asks for the end once, sooner than it may come."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 3


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.asked, self.batch_size = 0, 2

    def train_dataloader(self) -> Any:
        return stateful()

    def val_dataloader(self) -> Any:
        return plain()

    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        self.asked += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def stateful(**more: Any) -> Any:
    return StatefulDataLoader(Noisy(), batch_size=2, shuffle=True, **more)


def seeded() -> Any:
    return stateful(generator=torch.Generator().manual_seed(5))


def stream() -> Any:
    return StatefulDataLoader(Stream(), batch_size=2)


def working(kind: Any = StatefulDataLoader, **more: Any) -> Any:
    return kind(
        TensorDataset(torch.arange(16.0).view(8, 2) / 16), batch_size=2, shuffle=True, num_workers=1, **more
    )


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


def plain(**more: Any) -> Any:
    return DataLoader(Noisy(), batch_size=2, **more)


def shuffled() -> Any:
    return plain(shuffle=True, generator=torch.Generator().manual_seed(5))


def both() -> Any:
    return {"a": stateful(), "b": stateful()}


def unequal() -> Any:
    return {"a": stateful(), "b": StatefulDataLoader(TensorDataset(torch.ones(3, 2)), batch_size=1)}


@dataclass
class Case:
    name: str
    loader: Callable[[], Any] = stateful
    model: Callable[[], Model] = Model
    callbacks: Callable[[], list[Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], list[Any]] = list
    data: bool = False
    points: tuple[int, ...] = tuple(range(1, EPOCHS * BATCHES + 1))
    tried: tuple[int, ...] = ()  # of these points; () for all


ENDS = (BATCHES, 2 * BATCHES)
CASES = [
    Case("validated in the middle and at the end", options={"val_check_interval": 2}),
    Case("plateau by step", model=lambda: Model(interval="step"), options={"val_check_interval": 2}),
    Case("sanity check", options={"num_sanity_val_steps": 1}),
    Case("rate by epoch", model=lambda: Model("step")),
    Case("rate by step", model=lambda: Model("step", "step")),
    Case("rate by the number of steps", model=Counted),
    Case("plain loader", loader=plain, points=ENDS),
    Case("shuffled by its own generator", loader=shuffled, points=ENDS),
    Case("shuffled by its own generator, with a state", loader=seeded),
    Case("no length", loader=stream),
    Case("two loaders", loader=both),
    Case("two loaders of different lengths", loader=unequal, points=ENDS),
    Case("workers", loader=working),
    Case("data module", data=True),
    Case("callbacks", callbacks=lambda: [EarlyStopping("checked", patience=9), Average(),
                                         ModelCheckpoint(monitor="checked", save_top_k=1)],
         options={"val_check_interval": 2}),
    Case("stops early", callbacks=lambda: [EarlyStopping("checked", patience=2, min_delta=9)],
         options={"val_check_interval": 2}, points=(1, 2, 3, 4, 5, 6)),
    Case("stops as soon as it may", callbacks=lambda: [Stops()], options={"min_epochs": 2, "max_epochs": 3}),
    Case("workers that stay", loader=lambda: working(DataLoader, persistent_workers=True), points=ENDS,
         tried=(BATCHES,)),
    Case("workers that stay, with a state", loader=lambda: working(persistent_workers=True), tried=(2,)),
    Case("validated every second epoch", options={"check_val_every_n_epoch": 2}),
    Case("accumulated", options={"accumulate_grad_batches": 3}, points=(1, 2, 3, 4)),
    Case("accumulated from an epoch on",
         callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})], points=(1, 2, 3, 4, 5, 6)),
    Case("mixed precision", plugins=lambda: [MixedPrecision("16-mixed", "cpu", scaler())],
         tried=(2, BATCHES)),
    Case("manual", model=Manual, points=(1, 2, 3, 4)),
    Case("limited by steps", options={"max_steps": 7, "max_epochs": -1}, points=(1, 2, 3, 4, 5, 6, 7)),
    Case("steps of whole epochs", options={"max_steps": 8, "max_epochs": -1}),
    Case("loaders made anew", loader=plain, options={"reload_dataloaders_every_n_epochs": 1}, points=ENDS),
    Case("rate found", callbacks=lambda: [LearningRateFinder(num_training_steps=4, attr_name="rate")],
         model=lambda: Searched("step")),
    Case("averaged at the end", callbacks=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)],
         points=ENDS, tried=(BATCHES,)),
]  # fmt: skip
if EMAWeightAveraging is not None:
    CASES.append(Case("average of the weights", callbacks=lambda: [EMAWeightAveraging(decay=0.5)],
                      options={"val_check_interval": 2}))  # fmt: skip


class Searched(Model):
    rate = 0.1

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["optimizer"].param_groups[0]["lr"] = self.rate
        return found


def fit(case: Case, kept: Kept, out: Path, seed: int) -> dict[str, Any]:
    """Train, and return all that counts at the end."""
    torch.manual_seed(seed)
    random.seed(seed)
    model = case.model()
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **case.options}
    kept_by_lightning = any(isinstance(one, ModelCheckpoint) for one in case.callbacks())
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=kept_by_lightning,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(out),
        callbacks=[*case.callbacks(), Checkpoints(directory=kept)], plugins=case.plugins(), **options,
    )  # fmt: skip
    data = Data() if case.data else None
    if data is not None:
        trainer.fit(model, datamodule=data)
    else:
        trainer.fit(model, case.loader(), plain())
    plateau = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    for state in plateau:
        state.pop("_schedulers", None)
    return {
        "weights": dict(model.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedules": plateau,
        "precision": trainer.precision_plugin.state_dict(),
        "callbacks": {
            c.state_key: without_paths(c.state_dict()) for c in trainer.callbacks if c.state_dict()
        },
        "averages": [c.average for c in trainer.callbacks if isinstance(c, Average)],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "story": model.story,
        "extra": model.extra,
        "data": None if data is None else data.asked,
        "at": (trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop._batches_that_stepped),
        "drawn": float(torch.rand(1)),
    }


def without_paths(state: dict[str, Any]) -> dict[str, Any]:
    """ModelCheckpoint's state has the names of files, which another run gives other numbers, and the score of
    the newest of them, which it does not restore."""
    state.pop("current_score", None)
    if "best_k_models" in state:
        state["best_k_models"] = list(state["best_k_models"].values())
    return {name: value for name, value in state.items() if not name.endswith("_path") and name != "dirpath"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_training_goes_on_from_each_restore_point(case: Case, tmp_path: Path) -> None:
    kept = Kept()
    expected = fit(case, kept, tmp_path, 7)
    assert tuple(kept.states) == case.points
    for step in case.tried or case.points:
        found = fit(case, kept.at(step), tmp_path, 1000 + step)
        wrong = list(differences(expected, found))
        assert not wrong, f"restored at step {step}"


def test_samples_are_counted_by_the_loader_s_batch_size(tmp_path: Path) -> None:
    kept = Kept()
    fit(Case("plain"), kept, tmp_path, 7)
    assert kept.samples == EPOCHS * BATCHES * stateful().batch_size
    several = Kept()
    fit(Case("several", loader=both), several, tmp_path, 7)
    assert several.samples == 0, "whose they are is not known"


class WithBackbone(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(("callback", "model", "why"), [
    (lambda: BatchSizeFinder(max_trials=1), Model, "cannot save the batch size"),
    (lambda: BackboneFinetuning(1), WithBackbone, "cannot save which parameters"),
])  # fmt: skip
def test_what_cannot_be_carried_is_refused(
    callback: Callable[[], Callback], model: Callable[[], Model], why: str, tmp_path: Path
) -> None:
    case = Case("refused", model=model, callbacks=lambda: [callback()], data=True)
    with pytest.raises(CheckpointError, match=why):
        fit(case, Kept(), tmp_path, 1)


def test_a_loader_without_a_state_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jurymast.checkpoint"):
        fit(Case("told", loader=plain), Kept(), tmp_path, 1)
    (told,) = [record.getMessage() for record in caplog.records if "each epoch" in record.getMessage()]
    assert told.startswith("saving only at the end of each epoch: a loader of the training has no state")
