"""What a health probe is: the interface that plugins implement and name under the entry point below.

A probe runs in a child process of the agent that is killed when a look takes too long, so it may call
drivers that hang. It never decides anything: it reports findings, and `unknown` where it cannot see.
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

# All that a package with probes needs of jurymast.
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
    """What a probe may know of the run on this node. Times in seconds.

    `thresholds` are the packaged ones with the policy's on top; `xid` maps codes to the policy's verdicts.
    `paths` are directories that several nodes share and that the run writes to, `data_paths` those it only
    reads, `local_path` a directory on this node's own disk ("": none). `gpus` is what Slurm granted (None:
    not known). `started_at` is when the job started here, seconds since the epoch: older events are not of
    this run. `fresh`: the run has done nothing here yet that a probe could see.
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
    """`name` is the entry point's; `interval_s` is how often `look` is due.

    The first look takes the baseline: counters are lifetime totals, and only what they gain counts. A look
    returns every finding that holds now, not only new ones; events (an Xid) are returned once. A look that
    raises, or takes longer than three intervals (and look-limit-s), is itself a finding.
    """

    name: str
    interval_s: float

    def look(self, now: float) -> Sequence[Finding]:
        """`now`: seconds since the epoch."""
        ...

    def close(self) -> None:
        """Give handles back; called once."""
        ...


def granted_gpus(environment: Mapping[str, str]) -> int | None:
    """How many GPUs Slurm gave this job on this node; None when it does not say."""
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    if count.isdigit():
        return int(count)
    visible = [part for part in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return len(visible) or None


def installed() -> dict[str, EntryPoint]:
    """Probes by name, sorted; of two with one name the first on Python's path. Looks at the metadata of
    packages and imports none of them."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, point)
    return dict(sorted(found.items()))


def open_probe(point: EntryPoint, context: Context) -> Probe | None:
    """Import it and call it; None when it has nothing to see here. Raises whatever the plugin does, and
    TypeError for what is no probe."""
    probe = point.load()(context)
    if probe is None or isinstance(probe, Probe):
        return probe
    raise TypeError(f"{point.value} returned {probe!r}, which is not a probe")


def failed(name: str, error: BaseException, doing: str) -> Finding:
    """What a probe that raises comes to: nothing was seen, and nobody's node is to blame."""
    return Finding(
        probe=name, code="probe-failed", verdict=Verdict.UNKNOWN, kind=HOST,
        message=f"the probe could not {doing}: {type(error).__name__}: {error}"[:500],
    )  # fmt: skip
