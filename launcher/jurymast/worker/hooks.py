"""Step heartbeats for scripts that know nothing of jurymast: torch's global optimizer hook."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from jurymast.worker.link import Link


def count_optimizer_steps(link: Link) -> None:
    """Beat after each step of the optimizer that steps first; others (a GAN's second) are the same step."""
    counted: list[int] = []

    def stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not counted:
            counted.append(id(optimizer))
        if counted[0] == id(optimizer):
            link.optimizer_stepped()

    register_optimizer_step_post_hook(stepped)
