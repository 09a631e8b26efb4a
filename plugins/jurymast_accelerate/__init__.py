"""jurymast's checkpoints for loops with Hugging Face's Accelerate, in one line:

    checkpoint = jurymast_accelerate.checkpointer(accelerator)    # after accelerator.prepare
    for step in range(checkpoint.restore(), total_steps):
        ...
        checkpoint.step(step + 1)

Only the caller imports Accelerate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

    from jurymast import Checkpointer

__all__ = ["checkpointer"]


def checkpointer(accelerator: Accelerator, **options: Any) -> Checkpointer:
    """Return a Checkpointer for everything that the accelerator has prepared or that was registered for its
    checkpoints, and for the random generators; `options` are the Checkpointer's. Loaders are included if they
    have a state: with `DataLoaderConfiguration(use_stateful_dataloader=True)`."""
    import jurymast
    from jurymast.checkpoint import RandomState

    found = {
        "model": accelerator._models,
        "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedule": [schedule.scheduler for schedule in accelerator._schedulers],
        "loader": [loader for loader in accelerator._dataloaders if _has_state(loader)],
        "custom": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    state = {f"{kind}-{number}": one for kind, all_ in found.items() for number, one in enumerate(all_)}
    return jurymast.Checkpointer({**state, "random": RandomState()}, **options)


def _has_state(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
