"""Saves of a training on a GPU into memory, and restores from there; what they cost is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import jurymast
from jurymast.checkpoint import RandomState
from jurymast.checkpoint.contents import Contents
from jurymast.checkpoint.memory_tier import MemoryTier
from jurymast.keeper.manifest import Word
from jurymast.worker import link
from support.keeper import Keeper

pytestmark = [pytest.mark.gpu, pytest.mark.torch, pytest.mark.alone]

WIDTH, LAYERS = 2048, 6  # 300 MB with AdamW's moments
GIB = (1, 4, 12)
QUARTER_BYTES = 1 << 28
LIMIT_S = 120.0


class Training:
    """Each step changes every tensor, and draws from the GPU's generator."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers, nn.Dropout(0.1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.average = torch.zeros(WIDTH, device="cuda")  # a tensor of the script's own
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "average": self.average,
            "random": RandomState(),
        }  # fmt: skip

    def step(self) -> None:
        """Nothing here waits for the GPU."""
        inputs = torch.randn(64, WIDTH, device="cuda")
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.average.mul_(0.9).add_(inputs.mean(0))

    def tensors(self) -> list[torch.Tensor]:
        moments = [one for state in self.optimizer.state.values() for one in state.values()]
        return [*self.model.state_dict().values(), *moments, self.average, torch.cuda.get_rng_state()]

    def copy(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.tensors()]


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    with Keeper() as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(link, "_current", None)
        yield made


def memory_of(checkpoint: jurymast.Checkpointer) -> MemoryTier:
    assert checkpoint._memory is not None
    return checkpoint._memory


def assert_equal_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    kinds = [[(one.dtype, one.shape, one.device) for one in each] for each in (found, wanted)]
    assert kinds[0] == kinds[1]
    differ = {}
    for number, pair in enumerate(zip(found, wanted, strict=True)):
        one, other = (each.contiguous().view(-1).view(torch.uint8) for each in pair)
        if count := int((one != other).sum()):
            differ[number, pair[0].dtype, tuple(pair[0].shape)] = count
    assert not differ


def test_what_is_saved_amid_a_training_comes_back_to_the_gpu_bit_by_bit(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(1)
    checkpoint = jurymast.Checkpointer(training.state, directory=tmp_path, every=10**6)
    checkpoint.restore()
    training.step()
    assert checkpoint.save(1)
    memory_of(checkpoint).wait_ready(LIMIT_S)
    memory_of(checkpoint).wait_published()
    for step in range(2, 12):
        for number in (0, 1):
            keeper.free(number)
        training.step()
        then = training.copy()
        assert checkpoint.save(step)
        for _ in range(3):
            training.step()  # while the copies are under way
        memory_of(checkpoint).wait_published()
        slot = next(n for n in (0, 1) if not keeper.slot(0, n).writable)
        manifest, image = keeper.image(slot)
        assert manifest.step == step
        with Keeper() as other:
            for name, value in other.environment.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(link, "_current", None)
            other.offer(manifest, image)
            restored = Training(2)
            restored.step()  # so that there are moments to compare
            assert jurymast.Checkpointer(restored.state, directory=tmp_path).restore() == step
            assert_equal_bits(restored.tensors(), then)
    memory_of(checkpoint).close()


def test_a_save_does_not_wait_for_the_gpu(keeper: Keeper, tmp_path: Path, busy: Callable[[], Any]) -> None:
    training = Training(1)
    del training.state["average"]  # a tensor of the script's own is compared, so that its value is waited for
    checkpoint = jurymast.Checkpointer(training.state, directory=tmp_path, every=10**6)
    checkpoint.restore()
    training.step()
    assert checkpoint.save(1)
    assert memory_of(checkpoint).wait_ready(LIMIT_S)
    memory_of(checkpoint).wait_published()
    for number in (0, 1):
        keeper.free(number)
    training.step()
    end = busy()
    assert checkpoint.save(2)
    assert not end.query(), "the save waited for what the GPU still computes"
    training.step()
    memory_of(checkpoint).wait_published()
    assert end.query()
    memory_of(checkpoint).close()


def test_an_image_after_a_recovery_is_in_the_memory_that_is_there_then(
    keeper: Keeper, tmp_path: Path
) -> None:
    """CUDA copies to the old pages whatever is mapped at the address of memory that is still pinned."""
    count = QUARTER_BYTES // 16
    tensor = torch.zeros(count, device="cuda")
    checkpoint = jurymast.Checkpointer({"tensor": tensor}, directory=tmp_path, every=10**6)
    for step in range(1, 7):
        checkpoint.restore()
        tensor.fill_(step)
        assert checkpoint.save(step)
        memory_of(checkpoint).wait_published()
        images = [keeper.image(number) for number in (0, 1) if not keeper.slot(0, number).writable]
        ((manifest, image),) = images
        assert manifest.step == step
        (item,) = Contents.from_bytes(image[manifest.contents_at :]).items
        held = torch.frombuffer(bytearray(image), dtype=torch.uint8)[item.raw : item.raw + 4 * count]
        assert bool((held.view(torch.float32) == step).all())
        checkpoint.attempt_begins()
        for number in (0, 1):  # as an agent that had to make room
            keeper.give(0, number, keeper.records[0][Word.WANT])


@pytest.mark.parametrize("gib", GIB)
def test_what_a_save_costs(keeper: Keeper, tmp_path: Path, tell: Callable[[str], None], gib: int) -> None:
    """Tells figures; what they should be depends on the machine."""
    count = QUARTER_BYTES // (3 * 4)  # AdamW keeps two moments for each
    parts = [nn.Parameter(torch.ones(count, device="cuda")) for _ in range(4 * gib)]
    optimizer = torch.optim.AdamW(parts)
    for part in parts:
        part.grad = torch.ones_like(part)
    small = torch.zeros(1000, device="cuda")
    state = {"model": nn.ParameterList(parts), "optimizer": optimizer}
    checkpoint = jurymast.Checkpointer(state, directory=tmp_path, every=10**6)
    checkpoint.restore()
    optimizer.step()
    torch.cuda.synchronize()
    began = time.monotonic()
    checkpoint.step(1)  # asks for memory, which is mapped and pinned from then on
    memory = memory_of(checkpoint)
    longest = 0.0
    while not memory._all_there():
        started = time.monotonic()
        small.add_(1)
        torch.cuda.synchronize()
        longest = max(longest, time.monotonic() - started)
        assert time.monotonic() < began + LIMIT_S
    tell(f"{gib} GiB: two slots there after {time.monotonic() - began:.2f} s")
    tell(f"  the longest step of the GPU meanwhile: {1000 * longest:.1f} ms")
    for step in range(2, 7):
        for number in (0, 1):
            keeper.free(number)
        optimizer.step()
        torch.cuda.synchronize()
        started = time.monotonic()
        assert checkpoint.save(step)
        stall = time.monotonic() - started
        memory.wait_published()
        whole = time.monotonic() - started
        rate = gib * (1 << 30) / whole / 1e9
        tell(f"  stall {1000 * stall:.2f} ms, whole after {1000 * whole:.0f} ms: {rate:.1f} GB/s")
    memory.close()
