"""What a rank that lives keeps and gives without a save: its own state, and what is alike on all ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from jurymast.checkpoint import RandomState
from jurymast.checkpoint.live import LiveState
from support.checkpoints import same

pytestmark = pytest.mark.torch


class Masked(nn.Module):  # type: ignore[misc]
    """A constant buffer, one that changes, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.arange(4.0))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x) * self.mask


def state_of(seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), Masked())
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "random": RandomState(), "generator": torch.Generator().manual_seed(seed),
        "progress": {"epoch": 1, "best": [0.5]},
    }  # fmt: skip


def step(state: dict[str, Any]) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.randn(8, 4)).square().sum().backward()
    state["optimizer"].step()
    state["schedule"].step()
    torch.rand(1, generator=state["generator"])


def drawn(state: dict[str, Any]) -> tuple[float, float, float]:
    return (
        random.random(),
        torch.rand(1).item(),
        torch.rand(1, generator=state["generator"]).item(),
    )


def test_what_is_a_ranks_own_comes_back_as_it_was() -> None:
    state = state_of()
    live = LiveState(state)
    live.begin()
    step(state)
    live.first_step_done()
    kept = live.own()
    means = state["model"][1].norm.running_mean.clone()
    schedule, expected = dict(state["schedule"].state_dict()), drawn(state)
    step(state)
    state["progress"]["epoch"] = 7
    live.set_own(kept)
    assert drawn(state) == expected
    assert same(state["model"][1].norm.running_mean, means)
    assert state["schedule"].state_dict() == schedule
    assert state["progress"] == {"epoch": 1, "best": [0.5]}


def test_buffers_that_no_step_changes_are_not_kept_but_watched() -> None:
    state = state_of()
    live = LiveState(state)
    live.begin()
    step(state)
    live.first_step_done()
    assert {name.rpartition(".")[2] for name in live._changing()} == {
        "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert live.constants_hold()
    state["model"][1].mask.add_(1.0)
    assert not live.constants_hold()


def test_weights_and_moments_make_ranks_alike_or_not() -> None:
    one, other = state_of(), state_of()
    torch.manual_seed(5)
    step(one)
    torch.manual_seed(5)
    step(other)
    assert LiveState(one).digest() == LiveState(other).digest() != ""
    with torch.no_grad():
        next(iter(other["optimizer"].state.values()))["exp_avg"].view(-1)[0] += 1e-3
    assert LiveState(one).digest() != LiveState(other).digest()


def test_gradients_of_a_step_that_was_left_are_forgotten() -> None:
    state = state_of()
    state["model"](torch.randn(8, 4)).sum().backward()
    LiveState(state).settle()
    assert all(one.grad is None for one in state["model"].parameters())


def test_what_is_made_anew_is_known_from_what_stays() -> None:
    state = state_of()
    live = LiveState(state)
    live.begin()
    step(state)
    state["progress"] = {"epoch": 2, "best": [0.1]}
    assert live.made() == set(), "a value may be another one"
    other = state_of()
    state["optimizer"] = other["optimizer"]
    state["data"] = RandomState()
    assert live.made() == {"optimizer", "data"}
    live.begin()
    assert live.made() == set()
