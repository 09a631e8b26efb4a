"""Two parts of the suite: what may run beside other tests, and what has the machine to itself."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else this machine does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A cluster of its own that a session shares, or a bound on time or load.
_ALONE = ("slurm", "alone")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=("beside", "alone"), help="only tests that may run beside others, or only the rest"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if _part_of(item) != part])
    items[:] = [item for item in items if _part_of(item) == part]


def _part_of(item: pytest.Item) -> str:
    return "alone" if any(item.get_closest_marker(name) for name in _ALONE) else "beside"
