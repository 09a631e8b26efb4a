"""Which probes there are: every entry point of the group, this package's own and anybody's."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from jurymast.core.nodes.findings import HOST, Finding, Verdict
from jurymast.health.probe import ENTRY_POINTS, Context, Probe


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
    raise TypeError(f"{point.value} returned {probe!r}, which is no probe")


def failed(name: str, error: BaseException, doing: str) -> Finding:
    """What a probe that raises comes to: nothing was seen, and nobody's node is to blame."""
    return Finding(
        probe=name, code="probe-failed", verdict=Verdict.UNKNOWN, kind=HOST,
        message=f"the probe could not {doing}: {type(error).__name__}: {error}"[:500],
    )  # fmt: skip
