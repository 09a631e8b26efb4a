"""Plugins that write a run's own metrics beside those of its training: into TensorBoard and the like.

They run in a process that the run does not depend on, each in a thread of its own, and may take their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

# [project.entry-points."jurymast.trackers"]  NAME = "package:function"; function(run) -> Tracker. Importing
# the package raises ImportError, with what to install, if it cannot be used.
ENTRY_POINTS = "jurymast.trackers"


@dataclass(frozen=True)
class TrackedRun:
    """Whose metrics they are: the run's id, its name for people, and its directory."""

    run: str
    name: str
    directory: Path


class Tracker(Protocol):
    """What is written may be kept back until `close`. Any exception is told in the job's log."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """The metrics by name, at this step of the training and this time (seconds since the epoch)."""
        ...

    def event(self, step: int, at: float, text: str) -> None:
        """An incident, or the like, in a sentence."""
        ...

    def close(self) -> None: ...


def load(name: str) -> Any:
    """The function that makes the tracker. Raises ImportError, with the reason, if there is none that can be
    used, and what else the plugin raises."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in points:
        raise ImportError(f"no such plugin is installed; there is {', '.join(sorted(points)) or 'none'}")
    return points[name].load()
