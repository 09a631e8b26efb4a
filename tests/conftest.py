"""Three parts of the suite: what may run beside other tests; what needs the one Slurm cluster, test after
test; and what has the machine to itself. In each, what takes longest begins first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else this machine does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_HERE = Path(__file__).parent

_FOLDERS = ("slurm", "conformance", "local", "sim", "unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("beside", "slurm", "alone"),
        help="only tests that may run beside others, only those on the Slurm cluster, or only the rest",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FOLDERS.index(item.path.relative_to(_HERE).parts[0]))
    part = config.getoption("--part")
    if part is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if _part_of(item) != part])
    items[:] = [item for item in items if _part_of(item) == part]


def _part_of(item: pytest.Item) -> str:
    marked = (name for name in ("slurm", "alone") if item.get_closest_marker(name))
    return next(marked, "beside")
