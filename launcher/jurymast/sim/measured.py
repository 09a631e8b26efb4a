"""Durations that were measured, and what a run's size makes of them; the rest is assumed, and said so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from jurymast.core.nearest import did_you_mean
from jurymast.core.nodes.heartbeat import steady_limit_s
from jurymast.core.planning.forecast import SLOWDOWN
from jurymast.core.settings import Settings
from jurymast.errors import UsageError
from jurymast.sim.durations import KINDS, POWER_LOSS, Durations, Parts

# What no benchmark of ours can measure. From new ranks to their first step a large training sets up its
# communicators, loads compiled code and fills its data loader.
TRAINING_START_S = 30.0
# A checkpoint of unknown size is taken for one of this many bytes a node (5.3 TB on 2,048 nodes).
NODE_BYTES = 2.6e9
# Storage of unknown speed takes a whole checkpoint in this time.
WRITE_S = 60.0
# A requeued run waits this long until enough nodes are free.
QUEUE_S = 600.0

_RATES = ("copy", "replicate", "restore")
_PARTS = ("detect", "stop", "launch")
_USUAL = Settings()


@dataclass(frozen=True)
class Measured:
    """`kinds`: what each kind of failure takes (its detection: what that takes besides the detector's own
    limit, where there is one); `requeue_s`: from a requeue to the next allocation where
    nodes are free; rates in bytes per second of one node; `source` says where the figures come from."""

    source: str
    kinds: Mapping[str, Parts]
    requeue_s: float
    copy: float
    replicate: float
    restore: float

    def durations(
        self,
        nodes: int,
        checkpoint_bytes: float | None = None,
        storage_bytes_per_s: float | None = None,
        settings: Settings = _USUAL,
    ) -> Durations:
        """For a run on `nodes` nodes whose checkpoint has so many bytes altogether. A node's silence is
        noticed as its heartbeats' detector decides by the policy's `settings`. Raises ValueError for parts
        that the run's own limits would cut short."""
        node_bytes = NODE_BYTES if checkpoint_bytes is None else checkpoint_bytes / nodes
        write_s = WRITE_S
        if storage_bytes_per_s is not None:
            write_s = node_bytes * nodes / storage_bytes_per_s
        worst = self.kinds[POWER_LOSS]
        silence_s = steady_limit_s(settings.heartbeat_s, settings.node_lost_after_s)
        return Durations(
            detection_s=silence_s + worst.detect_s, stop_s=worst.stop_s, launch_s=worst.launch_s,
            kinds=self.kinds, restore_s=node_bytes / self.restore, warm_up_s=TRAINING_START_S,
            requeue_s=self.requeue_s + QUEUE_S, stall_s=node_bytes / self.copy,
            copy_s=node_bytes / self.replicate, slowdown=SLOWDOWN, write_s=write_s, read_s=write_s,
        )  # fmt: skip


def read_measured(path: Path | None = None) -> Measured:
    """The packaged figures, with those of a file of the same form in their place where it has them.

    Raises UsageError for a file that cannot be read, and for entries that are unknown or no figures.
    """
    text = (resources.files("jurymast.sim") / "data" / "durations.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    if path is not None:
        own = _read(path)
        for name, value in own.items():
            if name not in found:
                raise UsageError(f"{path}: no figure is called {name}{did_you_mean(name, found)}")
            if name == "kinds":
                _merge_kinds(path, found["kinds"], value)
            elif name != "source":
                found[name] = _number(path, name, value, least=1.0 if name in _RATES else 0.0)
        found["source"] = str(own.get("source", path))
    kinds = {name: Parts(**{f"{part}_s": parts[part] for part in _PARTS})
             for name, parts in found["kinds"].items()}  # fmt: skip
    return Measured(found["source"], kinds, found["requeue"], *(found[name] for name in _RATES))


def _read(path: Path) -> dict[str, Any]:
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        told = " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {told}", hint="YAML like sim/data/durations.yaml") from error
    if not isinstance(own, dict):
        raise UsageError(f"{path}: not a mapping of figures", hint="YAML like sim/data/durations.yaml")
    return own


def _merge_kinds(path: Path, kinds: dict[str, dict[str, float]], own: object) -> None:
    if not isinstance(own, dict):
        raise UsageError(f"{path}: kinds is a mapping: {', '.join(KINDS)}")
    for kind, parts in own.items():
        if kind not in KINDS:
            raise UsageError(f"{path}: no kind of failure is called {kind}{did_you_mean(str(kind), KINDS)}")
        if not isinstance(parts, dict):
            raise UsageError(f"{path}: kinds.{kind} has {', '.join(_PARTS)}, in seconds")
        for part, value in parts.items():
            if part not in _PARTS:
                raise UsageError(f"{path}: kinds.{kind} has {', '.join(_PARTS)}, not {part}")
            kinds[kind][part] = _number(path, f"kinds.{kind}.{part}", value)


def _number(path: Path, name: str, value: object, least: float = 0.0) -> float:
    if isinstance(value, str):  # YAML takes 100e9 for a text
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise UsageError(f"{path}: {name}: {value!r} is not a number from {least:g} on")
    return float(value)
