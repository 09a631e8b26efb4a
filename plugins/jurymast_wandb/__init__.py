"""Tracker: a run's own metrics in Weights & Biases, by its own variables (WANDB_PROJECT, WANDB_MODE=offline);
its files are in `wandb/` of the run directory."""

from __future__ import annotations

from collections.abc import Mapping

from jurymast.tracker import TrackedRun

try:
    import wandb
except ImportError as error:
    raise ImportError(f"{error}: pip install wandb") from error

PREFIX = "jurymast/"
STEP, TIME = f"{PREFIX}step", f"{PREFIX}time"


def tracker(run: TrackedRun) -> WeightsAndBiases:
    return WeightsAndBiases(run)


class WeightsAndBiases:
    def __init__(self, run: TrackedRun) -> None:
        own = wandb.Settings(x_disable_stats=True, console="off", silent=True)
        self._run = wandb.init(dir=str(run.directory), name=run.run, group=run.name, settings=own)
        # By the training's step, which goes back after a failure: W&B's own may not.
        self._run.define_metric(f"{PREFIX}*", step_metric=STEP)

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, TIME: at, **{PREFIX + name: value for name, value in values.items()}})

    def event(self, step: int, at: float, text: str) -> None:
        self._run.alert(title=f"{PREFIX}incident", text=f"step {step}: {text}")

    def close(self) -> None:
        self._run.finish()
