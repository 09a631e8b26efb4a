"""How long everything takes in a simulated run: durations that were measured, scaled to the size of the run.
What is assumed instead is listed as such."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from jurymast import foreign
from jurymast.core.nodes.heartbeat import steady_limit_s
from jurymast.core.planning.forecast import SLOWDOWN
from jurymast.core.run.recovery import LAUNCH_LIMIT_S, STOP_LIMIT_S
from jurymast.core.settings import Settings
from jurymast.core.texts import did_you_mean
from jurymast.errors import UsageError

# Maximum size of a file of figures, which is about a page.
BYTES_MAX = 64 << 10

# A run begins here: a time of 0 would read as "not known".
START = 86_400.0

# Kinds of failure. A power loss is noticed by silence, a crash by a connection that is reset, a killed rank
# and a failure of the script by the node's agent, a hang by steps that do not come.
POWER_LOSS, NODE_CRASH, WORKER_KILL, SCRIPT, HANG = KINDS = (
    "power_loss", "node_crash", "worker_kill", "script", "hang",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds from a failure until it is detected, then until all ranks are stopped, and from the order to
    launch until the new ranks have started."""

    detect_s: float = 0.0
    stop_s: float = 0.0
    launch_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of a simulated run, in seconds.

    A failure costs `restart_s` and the steps since the newest complete save. A save becomes complete `copy_s`
    after its stall; meanwhile training continues, and steps take longer by the share `slowdown` (0.1: a
    tenth). `repair_s` is the time until a lost node, or its replacement, joins as a spare again.

    `detection_s`, `stop_s` and `launch_s` apply to a node that becomes silent. `kinds` has the parts of other
    failures; a kind without an entry is detected at once and otherwise takes the same. The hang detector
    itself decides how long a hang stays undetected.

    With `write_s`, saves use two tiers: complete means two copies in memory, and some saves are also written
    to durable storage, which takes `write_s` and costs the training nothing; `read_s` is a restore from
    there. None: a complete save survives everything.
    """

    detection_s: float = 2.0
    stop_s: float = 1.0
    launch_s: float = 5.0
    restore_s: float = 30.0
    warm_up_s: float = 0.0  # extra time of the first step
    step_s: float = 5.0
    stall_s: float = 1.0
    copy_s: float = 0.0
    slowdown: float = 0.0
    repair_s: float = 6 * 3600.0
    requeue_s: float = 600.0
    write_s: float | None = None
    read_s: float = 0.0
    kinds: Mapping[str, Parts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for impossible times, or times that the run's own limits would cut short."""
        if self.step_s <= 0.0:
            raise ValueError("a step takes some time")
        parts = [self.parts(kind) for kind in KINDS]
        times = [value for value in self.__dict__.values() if isinstance(value, int | float)]
        if min(*times, *(value for each in parts for value in vars(each).values())) < 0.0:
            raise ValueError("no duration is negative")
        if any(each.stop_s >= STOP_LIMIT_S or each.launch_s >= LAUNCH_LIMIT_S for each in parts):
            raise ValueError(
                f"ranks stop within {STOP_LIMIT_S:.0f} s and start within {LAUNCH_LIMIT_S:.0f} s"
            )

    def parts(self, kind: str) -> Parts:
        if kind in self.kinds and kind != POWER_LOSS:
            return self.kinds[kind]
        noticed_s = self.detection_s if kind == POWER_LOSS else 0.0
        return Parts(detect_s=noticed_s, stop_s=self.stop_s, launch_s=self.launch_s)

    @property
    def restart_s(self) -> float:
        """Seconds from the loss of a node to the first step after it, if no node has to be waited for."""
        return self.detection_s + self.stop_s + self.launch_s + self.restore_s + self.warm_up_s

    def time_of(self, steps: float, *, copying: bool) -> float:
        """Return the seconds that `steps` take. `copying`: a save was made just before them."""
        slow = self._slow_steps() if copying else 0.0
        return self.step_s * (steps + self.slowdown * min(steps, slow))

    def steps_in(self, seconds: float, *, copying: bool) -> int:
        """Return the number of whole steps done in `seconds`. Inverse of `time_of`."""
        slow = self._slow_steps() if copying else 0.0
        slow_s = slow * self.step_s * (1.0 + self.slowdown)
        if seconds < slow_s:
            return int(seconds / (self.step_s * (1.0 + self.slowdown)) + 1e-9)
        return int(slow + (seconds - slow_s) / self.step_s + 1e-9)

    def _slow_steps(self) -> float:
        return self.copy_s / (self.step_s * (1.0 + self.slowdown)) if self.slowdown else 0.0


# An assumption, because no benchmark here can measure it: from new ranks to their first step a large training
# sets up its communicators, loads compiled code and fills its data loader.
TRAINING_START_S = 30.0
# A checkpoint of unknown size is taken for one of this many bytes a node (5.3 TB on 2,048 nodes).
NODE_BYTES = 2.6e9
# Storage of unknown speed takes a whole checkpoint in this time.
WRITE_S = 60.0
# A requeued run waits this long until enough nodes are free.
QUEUE_S = 600.0

_RATES = ("copy", "replicate", "restore")
_USUAL = Settings()


@dataclass(frozen=True)
class Measured:
    """Measured durations. `kinds`: the parts of each kind of failure (where a detector has a limit, its
    detection is the time beyond that limit). `requeue_s`: from a requeue to the next allocation while nodes
    are free. Rates are bytes per second of one node. `source` states where the figures come from."""

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
        """Return the durations for a run on `nodes` nodes whose checkpoint has this many bytes in total. The
        heartbeat detector with the policy's `settings` decides when a silent node is detected. Raises
        ValueError for parts that the run's own limits would cut short."""
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
    """Return the packaged figures, overridden by those in a file of the same form.

    Raises UsageError for a file that cannot be read, and for unknown or non-numeric entries.
    """
    text = (resources.files("jurymast.sim") / "data" / "durations.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    if path is not None:
        found = _replaced(path, "", found, {"source": str(path), **_read(path)})
    kinds = {name: Parts(**{f"{part}_s": seconds for part, seconds in parts.items()})
             for name, parts in found["kinds"].items()}  # fmt: skip
    return Measured(found["source"], kinds, found["requeue"], *(found[name] for name in _RATES))


def _read(path: Path) -> dict[str, Any]:
    try:
        own = yaml.safe_load(foreign.read(path, BYTES_MAX).decode())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        told = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"cannot read {path}: {told}", hint="YAML like sim/data/durations.yaml") from error
    if not isinstance(own, dict):
        raise UsageError(f"{path}: not a mapping of figures", hint="YAML like sim/data/durations.yaml")
    return own


def _replaced(path: Path, key: str, usual: Any, own: Any) -> Any:
    """Return the `usual` figures with those of one's `own`, which have the same form, in their place."""
    if isinstance(usual, dict):
        if not isinstance(own, dict):
            raise UsageError(f"{path}: {key} is a mapping: {', '.join(usual)}")
        for name in own:
            if name not in usual:
                where = f"{path}: {key}" if key else f"{path}"
                raise UsageError(f"{where}: no figure is called {name}{did_you_mean(str(name), usual)}")
        own = {name: _replaced(path, f"{key}.{name}".lstrip("."), usual[name], own[name]) for name in own}
        return usual | own
    if isinstance(usual, str):
        return own if isinstance(own, str) else str(path)
    return _number(path, key, own, least=1.0 if key in _RATES else 0.0)


def _number(path: Path, name: str, value: object, least: float) -> float:
    if isinstance(value, str):  # YAML takes 100e9 for a text
        try:
            value = float(value)
        except ValueError:
            pass
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        # A list may repeat itself through aliases until no memory holds it as text.
        told = "a list or mapping" if isinstance(value, list | dict) else repr(value)
        raise UsageError(f"{path}: {name}: {told} is not a number from {least:g} on")
    return float(value)
