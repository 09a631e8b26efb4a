"""Tracker: a run's own metrics in MLflow, where MLFLOW_TRACKING_URI says; without it in `mlflow/` of the run
directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from jurymast.tracker import TrackedRun

try:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, RunTag
except ImportError as error:
    raise ImportError(f"{error}: pip install mlflow-skinny") from error

FOLDER, PREFIX = "mlflow", "jurymast/"
EXPERIMENT = "jurymast"


def tracker(run: TrackedRun) -> MLflow:
    return MLflow(run)


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or _own(run.directory / FOLDER))
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=run.run, tags={"run": run.run}).info.run_id

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        metrics = [Metric(PREFIX + name, value, int(1000 * at), step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def event(self, step: int, at: float, text: str) -> None:
        """A tag for each, since MLflow keeps no texts by step."""
        self._client.log_batch(self._run, tags=[RunTag(f"{PREFIX}incident at step {step}", text)])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _own(folder: Path) -> str:
    # MLflow's later releases ask for this before they write files of their own.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return folder.absolute().as_uri()
