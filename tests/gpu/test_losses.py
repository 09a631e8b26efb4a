"""What is noticed of a loss that is on a GPU, without a wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from jurymast.core.state import within
from jurymast.worker.hooks import Losses
from jurymast.worker.link import Link

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.alone]

NAN = float("nan")


@pytest.fixture
def link() -> Link:
    return Link(None, "", 0)


@pytest.fixture
def found(link: Link, monkeypatch: pytest.MonkeyPatch) -> list[within.FromRank]:
    said: list[within.FromRank] = []
    monkeypatch.setattr(link, "emit", said.append)
    return said


def loss(value: Any) -> tuple[torch.Tensor]:
    return (torch.tensor(value, device="cuda", requires_grad=True),)


@pytest.mark.parametrize(
    ("losses", "told"),
    [([1.0, NAN, NAN, NAN, NAN], [3]), ([NAN, NAN, 1.0, NAN, NAN], []), ([(NAN, NAN)] * 5, [])],
)
def test_a_loss_that_stays_nan_is_told_once_it_has_arrived(
    link: Link, found: list[within.FromRank], losses: Sequence[Any], told: list[int]
) -> None:
    seen = Losses(link)
    for step, value in enumerate([*losses, 1.0], 1):  # each is looked at in the step after it
        seen.see(loss(value))
        torch.cuda.synchronize()
        link.beat(step)
    assert found == [within.LossNotFinite(step=step, loss="nan") for step in told]


def test_no_step_waits_for_the_gpu(link: Link, found: list[within.FromRank], busy: Callable[[], Any]) -> None:
    seen, nan = Losses(link), loss(NAN)
    seen.see(nan)
    torch.cuda.synchronize()
    end = busy()
    for step in range(1, 20):
        seen.see(nan)
        link.beat(step)
    assert not end.query(), "a step waited for the GPU"
    assert not found, "of 19 steps that the GPU has not reached nothing can be known"
    end.synchronize()
    for step in range(20, 25):
        seen.see(nan)
        torch.cuda.synchronize()
        link.beat(step)
    assert [type(one) for one in found] == [within.LossNotFinite]
