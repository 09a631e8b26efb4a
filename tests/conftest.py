"""The order of the suite: what takes longest begins first; what bounds a time has the machine to itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else this machine does.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

_HERE = Path(__file__).parent

# The tests on the Slurm cluster run one after another, beside all others: they mostly wait.
_FOLDERS = ("slurm", "conformance", "local", "sim", "unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=("beside", "alone"), help="only tests that may run beside others, or only the rest"
    )


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))
    items.sort(key=lambda item: _FOLDERS.index(item.path.relative_to(_HERE).parts[0]))
    part = config.getoption("--part")
    if part is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if _part_of(item) != part])
    items[:] = [item for item in items if _part_of(item) == part]


def _part_of(item: pytest.Item) -> str:
    return "alone" if item.get_closest_marker("alone") else "beside"
