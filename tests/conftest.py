"""Two parts of the suite: what may run beside other tests, and what has the machine to itself. In each,
what takes longest begins first."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from support.runs import SCRIPTS, result

pytest_plugins = ["support.limits"]

# How long an example takes depends on what else this machine does. `support.limits` ends one that hangs.
settings.register_profile(
    "patient", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

COROUTINE_LIMIT_S = 120.0
_HERE = Path(__file__).parent

_FOLDERS = ("slurm", "conformance", "local", "gpu", "sim", "unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part",
        choices=("beside", "alone"),
        help="only tests that may run beside others, or only the rest",
    )

    parser.addoption("--short", action="store_true", help="without tests marked long")


class _Failures:
    """Tells of each at once: the suite goes on for minutes."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} ({report.when}): {report.longreprtext[-500:]}")


def pytest_configure(config: pytest.Config) -> None:
    # `nohup make test` has all processes ignore it: this one still does, and what it executes does not.
    signal.signal(signal.SIGHUP, lambda *_: None)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Failures(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Nearly all files need not be imported to find the few tests that run alone."""
    if config.getoption("--part") == "alone" and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _FOLDERS.index(item.path.relative_to(_HERE).parts[0]))
    part, short = config.getoption("--part"), config.getoption("--short")
    chosen = [
        item
        for item in items
        if part in (None, _part_of(item)) and not (short and item.get_closest_marker("long"))
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own, for a limited time."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), COROUTINE_LIMIT_S))
    return True


def _part_of(item: pytest.Item) -> str:
    return "alone" if item.get_closest_marker("alone") else "beside"


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what all tests of a session share, in whichever of its processes they run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def trained_plainly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Hash of the weights that a script gets with these options without us, and with no fault."""
    from support.ranks import run_script, stop_server  # loads torch, which most tests do without

    @cache
    def weights(*train: str, nodes: int = 2, script: str = "train_tiny.py", each: int | None = None) -> str:
        out = tmp_path_factory.mktemp("plain") / "out.json"
        quickly = ("--step-time", "0", *(("--save-every", "never") if script == "train_tiny.py" else ()))
        run_script(SCRIPTS / script, nodes, *train, *quickly, "--out", str(out), folder=out.parent, each=each)
        return str(result(out)["sha256"])

    yield weights
    stop_server()
