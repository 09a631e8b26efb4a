"""What is noticed of a loss by the backwards that begin from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from jurymast.core.state import within

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([1.0, NAN, NAN, NAN, NAN], [2]),
        ([NAN, NAN, 1.0, NAN, NAN], []),  # those steps may have been skipped
        ([INF] * 5, []),  # gradients may be scaled
        ([(NAN, NAN)] * 5, []),  # no loss
    ],
)
def test_a_loss_that_stays_nan_is_told_once_with_the_first_step(
    losses: Sequence[Any], told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from jurymast.worker.hooks import Losses
    from jurymast.worker.link import Link

    link = Link(None, "", 0)
    found: list[within.FromRank] = []
    monkeypatch.setattr(link, "emit", found.append)
    seen = Losses(link)
    for step, loss in enumerate(losses, 1):
        seen.see((torch.tensor(loss, requires_grad=True),))
        link.beat(step)
    assert found == [within.LossNotFinite(step=step, loss="nan") for step in told]


def trained(
    monkeypatch: pytest.MonkeyPatch,
    gradient: Callable[[int], float | None],
    *,
    scaled: bool = False,
    sizes: tuple[int, int] = (9, 2),
) -> list[within.FromRank]:
    """What is told of 40 steps of an optimizer with this `gradient` at each, and parameters of these
    `sizes`. `scaled`: by a scaler that has the optimizer leave steps out."""
    torch = pytest.importorskip("torch")
    from jurymast.worker.hooks import Gradients
    from jurymast.worker.link import Link

    link, found = Link(None, "", 0), list[within.FromRank]()
    monkeypatch.setattr(link, "emit", found.append)
    looks = Gradients(link)
    large, small = (torch.zeros(size, requires_grad=True) for size in sizes)
    optimizer = torch.optim.SGD([{"params": [large]}, {"params": [small]}], 0.1)
    if scaled:
        optimizer.found_inf = torch.ones(1)
    for step in range(1, 41):
        value = gradient(step)
        large.grad = None if value is None else torch.ones(9)
        small.grad = None if value is None else torch.tensor([0.0, value])
        looks.see(optimizer)
        link.beat(step)
    return found


def test_gradients_that_stay_nan_are_told_whatever_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """From `torch.autograd.grad`, or from losses of each sample: no backward shows a loss then."""
    told = trained(monkeypatch, lambda step: 1.0 if step < 10 else NAN)
    assert told == [within.LossNotFinite(step=16, loss="nan", of="gradient")]
    assert trained(monkeypatch, lambda step: NAN if 10 < step < 30 else 1.0) == []
    assert trained(monkeypatch, lambda step: INF) == []
    assert trained(monkeypatch, lambda step: NAN, scaled=True) == []


def test_steps_without_any_gradient_are_told_as_training_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody called backward, or the optimizer has the parameters of another model."""
    told = trained(monkeypatch, lambda step: None)
    assert told == [within.LossNotFinite(step=24, loss="none", of="gradient")]
    assert trained(monkeypatch, lambda step: 1.0 if step % 16 else None) == []


def test_a_rank_whose_parameters_are_all_on_other_ranks_has_no_gradients_to_lack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert trained(monkeypatch, lambda step: None, sizes=(0, 0)) == []


class Gpu:
    """Stands in for torch and its CUDA. A copy and an event begun on it are done once it is `idle`; whatever
    would have the host wait for it is counted."""

    float32 = "float32"

    def __init__(self) -> None:
        self.idle, self.capturing, self.broken = True, False, False
        self.copies = self.waits = 0
        gpu = self

        class Tensor:
            def __init__(self, value: float, device: str = "cuda") -> None:
                self.value, self.device = value, SimpleNamespace(type=device)

            def numel(self) -> int:
                return 1

            def is_floating_point(self) -> bool:
                return True

            def detach(self) -> Tensor:
                return self

            def reshape(self, _shape: tuple[int, ...]) -> Tensor:
                return self

            float = detach

            def item(self) -> Any:
                gpu.waits += self.device.type == "cuda" or not gpu.idle
                return self.value

            def copy_(self, other: Tensor, *, non_blocking: bool = False) -> None:
                if gpu.broken:
                    raise OSError("the device is gone")
                gpu.copies += 1
                gpu.waits += not (non_blocking and self.device.type == "cpu")
                self.value = other.value

        class Event:
            def query(self) -> bool:
                return gpu.idle

            def record(self) -> None:
                pass

            def synchronize(self) -> None:
                gpu.waits += 1

        self.Tensor = Tensor
        self.cuda = SimpleNamespace(Event=Event, is_current_stream_capturing=lambda: gpu.capturing)

    def empty(self, _shape: tuple[int, ...], *, dtype: str, device: str, pin_memory: bool) -> Any:
        assert (dtype, pin_memory) == (self.float32, True), "a copy to other memory waits"
        return self.Tensor(0.0, device)


def test_no_step_waits_for_a_gpu_whose_losses_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """When `Losses` looks, and by which of torch's calls; tests/gpu/test_losses.py has a real GPU."""
    pytest.importorskip("torch")
    from jurymast.worker import hooks
    from jurymast.worker.link import Link

    gpu, link, found = Gpu(), Link(None, "", 0), list[within.FromRank]()
    monkeypatch.setattr(hooks, "torch", gpu)
    monkeypatch.setattr(link, "emit", found.append)
    losses = hooks.Losses(link)

    def steps(count: int, value: float = NAN, *, idle: bool = True) -> int:
        """How many of these steps had their loss copied."""
        gpu.idle, before = idle, gpu.copies
        for _ in range(count):
            losses.see(gpu.Tensor(value))
            link.beat(link.next_step)
        return gpu.copies - before

    assert (steps(3, 1.0), steps(5, idle=False), found) == (3, 0, [])  # one at a time
    assert (steps(2), found) == (2, [])
    gpu.capturing = True
    assert (steps(3), found) == (0, [])
    gpu.capturing = False
    assert (steps(2), steps(3)) == (2, 0)  # told once, then left alone
    assert found == [within.LossNotFinite(step=10, loss="nan")]
    losses = hooks.Losses(link)
    gpu.broken = True
    assert steps(1) == 0
    gpu.broken = False
    assert (steps(3), gpu.waits) == (0, 0)


def test_a_backward_within_a_map_has_no_loss_to_look_at() -> None:
    torch = pytest.importorskip("torch")
    from jurymast.worker.hooks import Losses
    from jurymast.worker.link import Link

    losses = Losses(Link(None, "", 0))

    def mapped(value: Any) -> Any:
        losses.see(value)
        return value

    assert torch.equal(torch.func.vmap(mapped)(torch.ones(3)), torch.ones(3))
