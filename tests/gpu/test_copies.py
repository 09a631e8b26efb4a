"""Copies from a real GPU beside a real training: what waits for what, and that no image is torn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from jurymast.checkpoint.gpu_copies import GpuCopies, WrittenMeanwhileError

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.alone]

LIMIT_S = 120.0
# Their copy takes tens of milliseconds, a small kernel some microseconds.
BYTES = 2 << 30


class Copying:
    """A parameter of `BYTES` and a small buffer; their copies begin when it is made."""

    def __init__(self, copies: GpuCopies, places: Sequence[torch.Tensor]) -> None:
        self.weight = torch.nn.Parameter(torch.full((BYTES // 4,), 1.0, device="cuda"))
        self.weight.grad = torch.ones_like(self.weight)
        self.buffer = torch.full((1000,), 1.0, device="cuda")
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.places = places
        self.buffer.add_(0.0)
        self.published = threading.Event()
        self.error: BaseException | None = None
        torch.cuda.synchronize()
        copies.start(places, [self.buffer, self.weight], [self.optimizer], self.done)

    def done(self, error: BaseException | None) -> None:
        self.error = error
        self.published.set()

    def wait(self) -> BaseException | None:
        assert self.published.wait(LIMIT_S)
        return self.error

    def holds_ones(self) -> bool:
        return all(bool((place == 1.0).all()) for place in self.places)


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(BYTES + 4096, dtype=torch.uint8)


@pytest.fixture
def copies(memory: torch.Tensor) -> Iterator[GpuCopies]:
    made = GpuCopies()
    made.register(memory)
    yield made
    made.unregister(memory)


@pytest.fixture
def places(memory: torch.Tensor) -> Sequence[torch.Tensor]:
    return memory[:4000].view(torch.float32), memory[4096:].view(torch.float32)


def reached() -> torch.cuda.Event:
    """Where the training's stream stands now."""
    event = torch.cuda.Event()
    event.record()
    return event


def test_the_training_goes_on_while_its_state_is_copied(
    copies: GpuCopies, places: Sequence[torch.Tensor]
) -> None:
    state = Copying(copies, places)
    state.buffer.add_(1.0)  # a kernel that is loaded by now
    reached().synchronize()
    assert not state.published.is_set(), "the training waited for all copies"
    assert state.wait() is None
    assert state.holds_ones()


def test_the_next_steps_write_only_what_is_copied(copies: GpuCopies, places: Sequence[torch.Tensor]) -> None:
    state = Copying(copies, places)
    with torch.no_grad():
        state.buffer.fill_(2.0)
    for _ in range(3):
        state.optimizer.step()
    assert state.wait() is None
    torch.cuda.synchronize()
    assert state.holds_ones()
    assert float(state.weight.detach()[-1]) == -2.0, "no step was done"


def test_an_image_is_published_while_the_training_still_computes(
    copies: GpuCopies, places: Sequence[torch.Tensor], busy: Callable[[], Any]
) -> None:
    state = Copying(copies, places)
    end = busy()
    assert state.wait() is None
    assert not end.query(), "it waited for what the training had begun meanwhile"
    end.synchronize()
    assert state.holds_ones()


def test_a_write_elsewhere_while_it_is_copied_drops_the_image(
    copies: GpuCopies, places: Sequence[torch.Tensor]
) -> None:
    state = Copying(copies, places)
    state.weight.data.fill_(3.0)  # which torch does not count
    assert isinstance(state.wait(), WrittenMeanwhileError)
    torch.cuda.synchronize()
    again = Copying(copies, places)
    again.weight.data.fill_(3.0)
    assert again.wait() is None
    assert again.holds_ones(), "the training did not wait for the copies"


def test_memory_that_cuda_does_not_pin_is_no_error_of_the_training(memory: torch.Tensor) -> None:
    first, second = GpuCopies(), GpuCopies()
    first.register(memory)
    second.register(memory)  # refused, as it is registered already
    assert float((torch.ones(10, device="cuda") * 2).sum()) == 20.0
    torch.cuda.synchronize()
    second.close()
    assert memory.is_pinned()
    first.close()
    assert not memory.is_pinned()


def test_memory_is_pinned_until_it_is_given_back(memory: torch.Tensor) -> None:
    copies = GpuCopies()
    copies.register(memory)
    assert memory.is_pinned()
    copies.unregister(memory)
    assert not memory.is_pinned()
    copies.register(memory)  # CUDA refuses what is registered already
    assert memory.is_pinned()
    copies.unregister(memory)
