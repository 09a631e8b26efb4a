"""Copies from a GPU that run alongside the training: in which order, and that no write meanwhile goes unseen.

There is no GPU here: streams and events are stand-ins that note what waits for what, and "the GPU" is memory.
"""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jurymast.checkpoint import gpu_copies
from jurymast.checkpoint.gpu_copies import GpuCopies, WatchedTensors, WrittenMeanwhileError

pytestmark = pytest.mark.torch
LIMIT_S = 60.0


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def synchronize(self) -> None:
        assert self.cuda.copied.wait(LIMIT_S)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.order.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> FakeEvent:
        self.cuda.order.append(f"{self.name} event")
        return FakeEvent(self.cuda)

    def wait_event(self, _event: FakeEvent) -> None:
        self.cuda.order.append(f"{self.name} waits for an event")

    def synchronize(self) -> None:
        pass


class FakeCuda:
    """`order`: what streams do; `copied`: whether the copies have ended; `pinned`: addresses;
    `failed`: threads that have an error to be told."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.pinned: set[int] = set()
        self.failed: set[int] = set()
        self.own = threading.local()  # each thread has its current stream
        self.copied = threading.Event()
        self.training = FakeStream(self, "training")

    def current_device(self) -> int:
        return 0

    def Stream(self, _device: int) -> FakeStream:
        return FakeStream(self, "copies")

    def current_stream(self, _device: int) -> FakeStream:
        return self.training

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.own.stream = stream
        yield
        self.own.stream = self.training

    @contextmanager
    def device(self, _number: int) -> Iterator[None]:
        yield

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, _size: int, _flags: int) -> int:
        refused = address in self.pinned
        self.pinned.add(address)
        self.failed |= {threading.get_ident()} if refused else set()
        return 712 * refused

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


class Training:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cuda = FakeCuda()
        for name in ("current_device", "Stream", "current_stream", "stream", "device", "cudart"):
            patch.setattr(torch.cuda, name, getattr(self.cuda, name))
        patch.setattr(GpuCopies, "_is_here", lambda *_: True)
        patch.setattr(gpu_copies, "register_optimizer_step_pre_hook", self.hook)
        self.hooks: list[Any] = []
        self.model = nn.Linear(3, 2)
        self.buffer = torch.ones(4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.copies = GpuCopies()

    def hook(self, before: Any) -> Any:
        self.hooks.append(register_optimizer_step_pre_hook(before))
        return self.hooks[-1]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.buffer, *self.model.parameters()]

    def save(self, meanwhile: Callable[[], Any] = lambda: None) -> BaseException | None:
        """The error of a save, while whose copies this happens."""
        places = [torch.zeros_like(one).detach() for one in self.tensors]
        found: list[BaseException | None] = []
        self.cuda.copied.clear()
        self.cuda.order.clear()
        self.copies.start(places, self.tensors, [self.model, self.optimizer], found.append)
        meanwhile()
        self.cuda.copied.set()
        self.copies.wait()
        (error,) = found
        return error


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    found = Training(monkeypatch)
    yield found
    for hook in found.hooks:  # torch calls it for the optimizers of later tests, too
        hook.remove()


def test_the_next_step_waits_for_the_copies_of_what_it_writes_and_the_training_for_all_others(
    training: Training,
) -> None:
    assert training.save(training.optimizer.step) is None
    assert training.cuda.order == [
        "copies waits for training",
        "copies event",
        "training waits for an event",  # of the buffer
        "copies event",
        "training waits for an event",  # the optimizer, of its parameters
    ]


def test_what_arrived_is_checked_beside_the_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[str] = []
    monkeypatch.setattr(WatchedTensors, "check", lambda _: streams.append(training.cuda.own.stream.name))
    assert training.save() is None
    assert streams == ["copies"], "it waited for what the training had begun meanwhile"


def test_what_is_pinned_stays_mapped_until_it_is_unpinned(training: Training) -> None:
    buffers = [mmap.mmap(-1, 4096) for _ in range(3)]
    mapped = [weakref.ref(one) for one in buffers]
    for one in buffers:
        training.copies.register(torch.frombuffer(one, dtype=torch.uint8))
    del buffers, one
    gc.collect()
    assert all(ref() is not None for ref in mapped)
    assert len(training.cuda.pinned) == 3
    training.copies.close()
    assert not training.cuda.pinned
    gc.collect()
    assert all(ref() is None for ref in mapped)
    training.copies._watched = WatchedTensors([])
    training.optimizer.step()
    assert not training.copies._watched._stepped, "it still follows the optimizers' steps"


def test_memory_that_cuda_does_not_pin_is_no_error_of_the_training(
    training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = torch.zeros(4096, dtype=torch.uint8)
    training.copies.register(buffer)
    GpuCopies().register(buffer)
    assert "cannot pin memory for checkpoints (CUDA error 712)" in caplog.text
    assert training.cuda.failed, "CUDA said no, to somebody"
    assert threading.get_ident() not in training.cuda.failed
    training.copies.close()


def averaged(training: Training) -> None:
    """As an evaluation with averaged weights begins."""
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.copy_(torch.zeros_like(parameter))


def averaged_and_stepped(training: Training) -> None:
    averaged(training)
    training.optimizer.step()


@pytest.mark.parametrize(
    "write",
    [
        averaged,
        lambda training: training.model.load_state_dict(
            {k: v * 2 for k, v in training.model.state_dict().items()}
        ),
        averaged_and_stepped,
    ],
    ids=["average", "load_state_dict", "before the next step"],
)
def test_an_image_whose_parameters_are_written_meanwhile_is_dropped_and_later_ones_wait(
    training: Training, write: Callable[[Training], Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(training.save(lambda: write(training)), WrittenMeanwhileError)
    assert "written outside of the optimizer's step" in caplog.text
    assert training.save(lambda: write(training)) is None
    first = training.cuda.order[:3]
    assert first == ["copies waits for training", "copies event", "training waits for an event"], "of all"


def test_reading_and_a_save_after_a_write_are_no_reason_to_drop(training: Training) -> None:
    averaged(training)
    assert training.save(lambda: training.model(torch.ones(1, 3)).sum().backward()) is None
    assert training.save(training.optimizer.step) is None
    assert training.save(training.optimizer.zero_grad) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("count", [1, 3, 500])
def test_a_write_through_data_is_found_by_what_arrived(dtype: torch.dtype, count: int) -> None:
    def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
        tensors = [torch.zeros(5, 4, dtype=dtype) for _ in range(count)]
        return [(torch.empty_like(one), one) for one in tensors]

    def copy(those: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for place, tensor in those:
            place.copy_(tensor)

    whole = pairs()
    watched = WatchedTensors(whole)
    copy(whole)
    for _, tensor in whole:
        tensor.data.fill_(1)
    watched.check()  # nothing was still being copied
    torn = pairs()
    watched = WatchedTensors(torn)
    copy(torn[: count // 2])
    for _, tensor in torn:
        tensor.data.fill_(1)
    assert all(tensor._version == 0 for _, tensor in torn), "torch does not count these"
    copy(torn[count // 2 :])
    with pytest.raises(WrittenMeanwhileError):
        watched.check()


def test_not_a_number_equals_itself() -> None:
    tensor = torch.full((3,), float("nan"))
    place = torch.empty(3)
    watched = WatchedTensors([(place, tensor)])
    place.copy_(tensor)
    watched.check()
