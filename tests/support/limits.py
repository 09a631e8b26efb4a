"""The suite ends. What hangs is ended, named, and its stacks are shown; the rest runs on.

- A test, or the import of its file, is ended by a signal after `--timeout` (pytest-timeout's SIGALRM).
- What a signal does not end, as it holds the GIL or catches everything, ends its process `limit_grace`
  seconds later, by a thread of faulthandler's that needs no GIL. So does the end of a session that hangs.
- A process that ends so, or crashes, is replaced. The test that it ran has failed, and the others of its file
  go to another process.
- An example of a property test has `EXAMPLE_S` of processor time: else hypothesis would try to make an
  example smaller that does not end.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

# Of the processor's time, so that a busy machine changes nothing.
EXAMPLE_S = 60.0
# Tests that start real processes, by the folder that they are in.
SLOW_FOLDERS, SLOW_S = ("slurm", "conformance", "local"), 600.0

_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("limit_grace", "seconds from a time-out until the process is ended", default="60")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # pytest captures what is written to 2 itself
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_Processes(config))


# ---- of one process


@contextmanager
def _ended_after(seconds: float, config: pytest.Config) -> Iterator[None]:
    """End this process, with all its stacks, unless what is done here is over `limit_grace` after
    `seconds`."""
    if seconds <= 0.0:
        yield
        return
    grace_s = float(config.getini("limit_grace"))
    faulthandler.dump_traceback_later(seconds + grace_s, exit=True, file=config.stash[_stderr])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _limit_s(config: pytest.Config) -> float:
    given = config.getoption("timeout")
    return float((config.getini("timeout") if given is None else given) or 0.0)


def _limit_of_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    given = [*marker.args[:1], *marker.kwargs.values()] if marker is not None else []
    return float(given[0]) if given else _limit_s(item.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        slow = not {*item.path.parts}.isdisjoint(SLOW_FOLDERS)
        if slow and config.getoption("timeout") is None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_S))
        _bound_examples(item)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with _ended_after(_limit_of_s(item), item.config):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, object, object]:
    if not isinstance(collector, pytest.File):
        return (yield)
    limit_s = _limit_s(collector.config)

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{collector.nodeid} was not imported after {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        with _ended_after(limit_s, collector.config):
            return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    if session.config.pluginmanager.has_plugin("dsession"):  # waits for the processes
        return (yield)
    with _ended_after(float(session.config.getini("limit_grace")), session.config):
        return (yield)


# ---- of examples


class ExampleTooLong(BaseException):
    """Not an Exception: hypothesis would try to find a smaller example for that."""


def _bound_examples(item: pytest.Item) -> None:
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is not None and not hasattr(inner, "bounded"):
        handle.inner_test = _bounded(inner)  # type: ignore[union-attr]


def _bounded(example: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(example)
    def bounded(*args: Any, **values: Any) -> Any:
        def end(number: int, frame: FrameType | None) -> None:
            raise ExampleTooLong(f"this example took {EXAMPLE_S:g} s of processor time: {args} {values}")

        before = signal.signal(signal.SIGVTALRM, end)
        signal.setitimer(signal.ITIMER_VIRTUAL, EXAMPLE_S)
        try:
            return example(*args, **values)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    bounded.bounded = True  # type: ignore[attr-defined]
    return bounded


# ---- of all processes


class _Scheduling(LoadFileScheduling):  # type: ignore[misc]
    """As xdist does it, but after a process has ended: xdist runs the test again at which it ended, may give
    a process a last test that this one keeps until it gets another, which never comes, and ends altogether
    where it has a test for a process of whose end it is yet to hear."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gone: set[WorkerController] = set()

    def _assign_work_unit(self, node: WorkerController) -> None:
        try:
            super()._assign_work_unit(node)
        except OSError:
            self._gone.add(node)
            scope, unit = self.assigned_work[node].popitem()
            self.workqueue[scope] = unit
            self.workqueue.move_to_end(scope, last=False)

    def remove_node(self, node: WorkerController) -> str | None:
        units = self.assigned_work.pop(node)
        undone = [(unit, test) for unit in units.values() for test, done in unit.items() if not done]
        if not undone:
            return None
        unit, ended_at = undone[0]
        unit[ended_at] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return str(ended_at)

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            raise RuntimeError(f"{node.gateway.id} has collected other tests than those before it")

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it still imports them
        super()._reschedule(node)
        while self.workqueue and self._takes_more(node):
            super()._reschedule(node)
        if not self.workqueue:
            node.shutdown()

    def _takes_more(self, node: WorkerController) -> bool:
        free = not node.shutting_down and node not in self._gone
        return free and self._pending_of(self.assigned_work[node]) < 2


class _Processes:
    """In the process that divides the tests among others."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager
        self._collected: set[object] = set()
        self._ended: list[str] = []

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> object:
        return _Scheduling(config, log) if config.getoption("dist") == "loadfile" else None

    def pytest_xdist_node_collection_finished(self, node: WorkerController, ids: list[str]) -> None:
        self._collected.add(node)

    def pytest_testnodedown(self, node: WorkerController, error: object) -> None:
        if not error:
            return
        self._ended.append(str(node.gateway.id))
        _end_processes_of(node)
        session: Any = self._plugins.get_plugin("dsession")
        if node not in self._collected:  # and so would the next one
            why = f"{node.gateway.id} ended while it imported the tests; its stacks are above"
            session.shouldstop = why
        elif session.sched.tests_finished:  # at its end, and so would its successor
            session._max_worker_restart = session._failed_nodes_count

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._ended and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._ended:
            terminalreporter.write_line(f"ended before they were done: {', '.join(self._ended)}")


def _end_processes_of(node: WorkerController) -> None:
    """End what the tests of a process that has ended have started: nobody else will."""
    own = {
        "PYTEST_XDIST_WORKER": str(node.gateway.id),
        "PYTEST_XDIST_TESTRUNUID": str(node.workerinput["testrunuid"]),
    }
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if all(environment.get(name) == value for name, value in own.items()):
                process.kill()
        except psutil.Error:
            pass
