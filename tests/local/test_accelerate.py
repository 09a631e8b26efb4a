"""A loop with Accelerate goes on from each of its restore points as if it had never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torchdata.stateful_dataloader import StatefulDataLoader

import jurymast
import jurymast_accelerate
from jurymast.errors import CheckpointError
from support.checkpoints import differences
from support.instant import InstantCheckpointer, Kept

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("no_run")]

BATCHES = 7  # an epoch's


@pytest.fixture(autouse=True)
def _instant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jurymast, "Checkpointer", InstantCheckpointer, raising=False)


class Points(Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES * 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 8.0, 1.0])


class Augmented(Points):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * (1 + random.random()) + torch.rand(1)


def own() -> torch.Generator:
    """A script's own, with another seed in each process."""
    return torch.Generator().manual_seed(torch.initial_seed())


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: StatefulDataLoader(Points(), batch_size=2, generator=torch.Generator()),
    "shuffled": lambda: StatefulDataLoader(Augmented(), batch_size=2, shuffle=True),
    "shuffled by its own": lambda: StatefulDataLoader(Points(), batch_size=2, shuffle=True, generator=own()),
    "sampler": lambda: StatefulDataLoader(
        Augmented(), batch_size=2, sampler=RandomSampler(Points(), generator=own())
    ),
    "batch sampler": lambda: StatefulDataLoader(
        Points(), batch_sampler=BatchSampler(RandomSampler(Points(), generator=own()), 2, drop_last=False)
    ),
    "torch's": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True),
    "workers": lambda: StatefulDataLoader(Points(), batch_size=2, shuffle=True, num_workers=1),
    "lasting workers": lambda: DataLoader(
        Points(), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
}


class Average:
    """An average of the weights, registered for Accelerate's checkpoints."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.of, self.weights = model, [one.detach().clone() for one in model.parameters()]

    def update(self) -> None:
        for mean, one in zip(self.weights, self.of.parameters(), strict=True):
            mean.mul_(0.9).add_(one.detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = [one.clone() for one in state["weights"]]


def train(
    kept: Kept,
    seed: int,
    *,
    accumulate: int,
    batches: int,
    updates: list[int] | None = None,
    loader: str = "in order",
) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    torch.manual_seed(seed)
    random.seed(seed)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate, cpu=True,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    )  # fmt: skip
    # As with mixed precision on a GPU.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    torch.manual_seed(3)
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    torch.manual_seed(seed)
    model, optimizer, loaded, schedule = accelerator.prepare(model, optimizer, LOADERS[loader](), schedule)
    average = Average(model)
    accelerator.register_for_checkpointing(average)
    checkpoint = jurymast_accelerate.checkpointer(accelerator, directory=kept)
    done = checkpoint.restore()
    while done < batches:
        for batch in loaded:
            with accelerator.accumulate(model):
                loss = (model(batch) * torch.rand(1)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.update()
            done += 1
            if accelerator.sync_gradients and updates is not None:
                updates.append(done)
            checkpoint.step(done)
            if done == batches:
                break
    return {
        "weights": dict(model.state_dict()),
        "optimizer": optimizer.optimizer.state_dict(),
        "schedule": schedule.scheduler.state_dict(),
        "average": average.weights,
        "scaler": accelerator.scaler.state_dict(),
        "step": accelerator.step,
        "drawn": float(torch.rand(1)),
    }


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 14), (3, 14), (3, 13)])
def test_a_loop_goes_on_from_each_restore_point(accumulate: int, batches: int) -> None:
    """Also where training ends within an epoch: what is counted there is no multiple of the epoch's."""
    kept, updates = Kept(), list[int]()
    expected = train(kept, 1, accumulate=accumulate, batches=batches, updates=updates)
    assert [*kept.states] == updates, "it saves where gradients are synchronised, and only there"
    assert kept.samples == 2 * updates[-1], "those of batches between count as well"
    for step in updates:
        found = train(kept.at(step), 100 + step, accumulate=accumulate, batches=batches)
        assert not list(differences(expected, found)), f"restored at step {step}"


@pytest.mark.parametrize("loader", list(LOADERS)[1:])
def test_a_loop_goes_on_in_the_order_of_its_samples_and_with_their_random_numbers(loader: str) -> None:
    kept, batches = Kept(), 2 * BATCHES + 2
    expected = train(kept, 1, accumulate=1, batches=batches, loader=loader)
    # Workers take long to start: an epoch's first, and one before and at its end.
    steps = [1, BATCHES - 1, BATCHES, BATCHES + 1] if "workers" in loader else [*kept.states]
    for step in steps:
        found = train(kept.at(step), 100 + step, accumulate=1, batches=batches, loader=loader)
        assert not list(differences(expected, found)), f"restored at step {step}"


def test_nothing_is_saved_among_gradients_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    kept = Kept()
    checkpoint = jurymast_accelerate.checkpointer(accelerator, directory=kept)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with accelerator.accumulate(model):
        assert checkpoint.save(1) is False
    assert kept.states == {}
    assert "step 1 is not saved: gradients are being accumulated" in caplog.text
    with accelerator.accumulate(model):
        assert checkpoint.save(2) is True


def test_a_state_that_is_kept_elsewhere_is_refused(tmp_path: Path) -> None:
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = "DEEPSPEED"
    with pytest.raises(CheckpointError, match="cannot save the state of deepspeed"):
        jurymast_accelerate.checkpointer(accelerator, directory=tmp_path)
    AcceleratorState._reset_state(True)
