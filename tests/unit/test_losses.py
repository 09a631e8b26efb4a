"""What is noticed of a loss by the backwards that begin from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from jurymast.core.state import within

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
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
    losses: Sequence[Any], told: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    from jurymast.worker.hooks import Losses
    from jurymast.worker.link import Link

    link = Link(None, "", 0)
    found: list[within.FromRank] = []
    monkeypatch.setattr(link, "emit", found.append)
    seen = Losses(link)
    for step, loss in enumerate([*losses, 1.0], 1):  # the last one arrives with the next
        seen.see((torch.tensor(loss, device=device, requires_grad=True),))
        if device == "cuda":
            torch.cuda.synchronize()
        link.beat(step)
    late = 1 if device == "cuda" else 0
    assert found == [within.LossNotFinite(step=step + late, loss="nan") for step in told]


def test_a_backward_within_a_map_has_no_loss_to_look_at() -> None:
    torch = pytest.importorskip("torch")
    from jurymast.worker.hooks import Losses
    from jurymast.worker.link import Link

    losses = Losses(Link(None, "", 0))

    def mapped(value: Any) -> Any:
        losses.see(value)
        return value

    assert torch.equal(torch.func.vmap(mapped)(torch.ones(3)), torch.ones(3))
