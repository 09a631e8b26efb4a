"""The interface of health probes, which plugins implement and name under the entry point below.

A probe runs in a child process of the agent that is killed if a look takes too long, so it may call drivers
that hang. It decides nothing: it reports findings, and `unknown` if it cannot see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol, runtime_checkable

from jurymast.core.nodes.findings import (
    APPLICATION,
    HARDWARE,
    HOST,
    NETWORK,
    NOT_OBSERVABLE,
    STORAGE,
    SYMPATHETIC,
    Finding,
    Verdict,
)

# Everything that a package with probes needs from jurymast.
__all__ = [
    "APPLICATION",
    "ENTRY_POINTS",
    "HARDWARE",
    "HOST",
    "NETWORK",
    "NOT_OBSERVABLE",
    "STORAGE",
    "SYMPATHETIC",
    "Context",
    "Finding",
    "Probe",
    "Verdict",
    "granted_gpus",
]

# [project.entry-points."jurymast.probes"]  NAME = "package:function"; function(context) -> Probe | None
ENTRY_POINTS = "jurymast.probes"


@dataclass(frozen=True)
class Context:
    """The facts that a probe may know of the run on this node. Times are in seconds.

    `thresholds` are the packaged ones, overridden by the policy's; `xid` maps codes to the policy's verdicts.
    `paths` are shared directories to which the run writes, `data_paths` shared ones that it only reads,
    `local_path` a directory on this node's own disk ("" if there is none). `gpus` is the number that Slurm
    granted (None if not known). `started_at` is when the job started here, in seconds since the epoch: older
    events are not the run's. `fresh`: the run has not done anything yet that a probe could see.
    """

    node: str = ""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    xid: Mapping[str, str] = field(default_factory=dict)
    paths: Sequence[str] = ()
    data_paths: Sequence[str] = ()
    local_path: str = ""
    gpus: int | None = None
    started_at: float = 0.0
    fresh: bool = True


@runtime_checkable
class Probe(Protocol):
    """A health probe. `name` is the entry point's; `interval_s` is how often `look` is due.

    The first look takes the baseline: counters are lifetime totals, and only their gains count. A look
    returns every finding that holds now, not only new ones; events (an Xid) are returned once. A look that
    raises, or takes longer than three intervals (and look-limit-s), is itself a finding.
    """

    name: str
    interval_s: float

    def look(self, now: float) -> Sequence[Finding]:
        """Return the findings. `now`: seconds since the epoch."""
        ...

    def close(self) -> None:
        """Release handles; called once."""
        ...


def granted_gpus(environment: Mapping[str, str]) -> int | None:
    """The number of GPUs that Slurm gave this job on this node; None if it does not say."""
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    visible = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return len(visible) or None


def installed() -> dict[str, EntryPoint]:
    """The installed probes by name, sorted; of two with the same name, the first on Python's path. Reads only
    the metadata of packages, and imports none."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, point)
    return dict(sorted(found.items()))


def open_probe(point: EntryPoint, context: Context) -> Probe | None:
    """Import a probe and create it; None if it has nothing to see on this machine. Raises whatever the plugin
    raises, and TypeError if the result is not a probe."""
    probe = point.load()(context)
    if probe is None or isinstance(probe, Probe):
        return probe
    raise TypeError(f"{point.value} returned {probe!r}, which is not a probe")


def failed(name: str, error: BaseException, doing: str) -> Finding:
    """The finding for a probe that raised: nothing was seen, and no node is to blame."""
    return Finding(
        probe=name, code="probe-failed", verdict=Verdict.UNKNOWN, kind=HOST,
        message=f"the probe could not {doing}: {type(error).__name__}: {error}"[:500],
    )  # fmt: skip
