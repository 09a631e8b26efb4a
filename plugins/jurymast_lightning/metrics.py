"""What a Trainer has logged so far. Lightning's own checkpoints leave it out: after a restore an epoch's mean
would only have the batches since, and a schedule that monitors an earlier validation would find no value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torchmetrics import Metric

_LATEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_PLACE = ("_first_loop_iter", "_current_fx")


def latest(trainer: Trainer) -> dict[str, Any]:
    """Return the newest value of everything that was logged, as callbacks and schedules see it."""
    connector = trainer._logger_connector
    _ = (
        trainer.callback_metrics,
        trainer.logged_metrics,
        trainer.progress_bar_metrics,
    )  # brings them up to date
    return {name: dict(getattr(connector, name)) for name in _LATEST}


def restore_latest(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    for name in _LATEST:
        setattr(trainer._logger_connector, name, dict(saved[name]))


def running(trainer: Trainer) -> dict[str, Any]:
    """Return what this rank has added up since the epoch began: logged values, and torchmetrics' metrics."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    return {
        "results": [_result(metric) for metric in results.values()],
        "place": {name: getattr(connector, name) for name in _PLACE},
        "metrics": {name: _metric(metric) for name, metric in _metrics(trainer.lightning_module).items()},
    }


def restore_running(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    for name, state in saved["metrics"].items():
        _load_metric(module.get_submodule(name), state)
    for state in saved["results"]:
        meta = _Metadata(**state["meta"])
        sync = state["sync"]
        meta.sync = _Sync(
            fn=trainer.strategy.reduce, _should=sync["_should"], rank_zero_only=sync["rank_zero_only"]
        )
        metric = _ResultMetric(meta, is_tensor="state" in state)
        metric.has_reset = state["has_reset"]
        if "state" in state:
            _load_metric(metric, state["state"])
            metric.to(module.device)
        elif meta.metric_attribute:
            metric.value = module.get_submodule(meta.metric_attribute)
            metric._update_count = 1
        loop._results[state["key"]] = metric
    for name in _PLACE:
        setattr(trainer._logger_connector, name, saved["place"][name])


def _result(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    # As _ResultCollection.log makes it.
    key = f"{meta.fx}.{meta.name}"
    state = {
        "key": key,
        "meta": {field.name: getattr(meta, field.name) for field in fields(meta) if field.name != "_sync"},
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "has_reset": metric.has_reset,
    }
    if metric.is_tensor:
        state["state"] = _metric(metric)
    return state


def _metrics(module: LightningModule) -> dict[str, Metric]:
    return {name: one for name, one in module.named_modules() if isinstance(one, Metric)}


def _metric(metric: Any) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return {name: getattr(metric, name) for name in names}


def _load_metric(metric: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(metric, name, value)
