"""jurymast's checkpoints for loops with Hugging Face's Accelerate, in one line:

    checkpoint = jurymast_accelerate.checkpointer(accelerator)    # after accelerator.prepare
    for step in range(checkpoint.restore(), total_steps):
        ...
        checkpoint.step(step + 1)

Only the caller imports Accelerate.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

    from jurymast import Checkpointer

__all__ = ["checkpointer"]

log = logging.getLogger("jurymast.checkpoint")


def checkpointer(accelerator: Accelerator, *, training: Any = None, **options: Any) -> Checkpointer:
    """Return a Checkpointer for everything that the accelerator has prepared or that was registered for its
    checkpoints, and for the random generators; `options` are the Checkpointer's. Loaders are included if they
    have a state: with `DataLoaderConfiguration(use_stateful_dataloader=True)`.

    `training`: the prepared loader of the training, if there are several; in a run that goes on with fewer
    nodes, the batches of all ranks together stay the same. Such a rank's batches are larger, as the loop
    counts them.

    It saves only where gradients are synchronised, as gradients that are being accumulated are in no state:
    other calls of `step` only count samples (by default those of the loader, if there is one), and `save`
    returns False there with a warning. Raises CheckpointError if the accelerator works with DeepSpeed or
    Megatron, which keep their states themselves.
    """
    import jurymast
    from jurymast.checkpoint import RandomState
    from jurymast.errors import CheckpointError
    from jurymast_accelerate.sharing import keep_batch

    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise CheckpointError(
            f"jurymast_accelerate cannot save the state of {kind.lower()}",
            hint="use accelerator.save_state, or FSDP",
        )

    differs = keep_batch(accelerator, training)
    sizes = [one.total_batch_size for one in accelerator._dataloaders if hasattr(one, "total_batch_size")]
    batch = sizes[0] if len(sizes) == len(accelerator._dataloaders) == 1 else 0

    class Synchronised(jurymast.Checkpointer):
        _samples = _tokens = 0.0  # since the gradients were last applied

        def step(self, step: int, *, samples: float = 0, tokens: float = 0) -> None:
            self._samples += samples or batch
            self._tokens += tokens
            if accelerator.sync_gradients:
                super().step(step, samples=self._samples, tokens=self._tokens)
                self._samples = self._tokens = 0.0

        def save(self, step: int) -> bool:
            if accelerator.sync_gradients:
                return super().save(step)
            log.warning(
                "step %d is not saved: gradients are being accumulated; save where "
                "accelerator.sync_gradients is true",
                step,
            )
            return False

    found = {
        "model": accelerator._models,
        "optimizer": [optimizer.optimizer for optimizer in accelerator._optimizers],
        "schedule": [schedule.scheduler for schedule in accelerator._schedulers],
        "loader": [_place(loader) for loader in accelerator._dataloaders if _has_state(loader)],
        "custom": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    if accelerator._dataloaders and not found["loader"] and accelerator.is_main_process:
        log.warning(
            "the position of the data loaders is not saved: use "
            "DataLoaderConfiguration(use_stateful_dataloader=True), or skip what was seen"
        )
    state = {f"{kind}-{number}": one for kind, all_ in found.items() for number, one in enumerate(all_)}
    state |= {"accelerator": _Counters(accelerator), "random": RandomState()}
    made = Synchronised(state, **options)
    made.batch_is_kept(differs)
    return made


class _Counters:
    """The batches since gradients were last applied, and the epoch of each loader."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        loaders = self._accelerator._dataloaders
        return {
            "step": self._accelerator.step,
            "epochs": [getattr(one, "iteration", None) for one in loaders],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]
        for loader, epoch in zip(self._accelerator._dataloaders, state["epochs"], strict=True):
            if epoch is not None:
                loader.iteration = epoch


def _place(loader: Any) -> Any:
    """What is saved of a loader: of one whose batches are dealt out by rank 0, only its own state."""
    from jurymast_accelerate.loaders import Place

    return Place(loader) if type(loader).__name__ == "DataLoaderShard" else loader


def _has_state(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))
