"""How tests are divided among processes that may end: see `support.limits`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.limits import _Scheduling

TESTS = [f"test_{file}.py::test_{number}" for file in range(8) for number in range(2)]


class _Process:
    """What it was sent, by name."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[str] = []
        self.shutting_down = self.has_ended = False

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.has_ended:
            raise OSError("cannot send (already closed?)")
        self.sent += [TESTS[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_process_of_whose_end_is_yet_to_be_heard_takes_no_test_along() -> None:
    config: Any = SimpleNamespace(
        getvalue=lambda _: ["popen", "popen"], option=SimpleNamespace(loadscopereorder=False)
    )
    scheduling = _Scheduling(config, None)
    first, second = processes = [_Process("gw0"), _Process("gw1")]
    for process in processes:
        scheduling.add_node(process)
        scheduling.add_node_collection(process, TESTS)
    scheduling.schedule()
    first.has_ended = True
    before, ended_at = first.sent[:2]
    scheduling.mark_test_complete(first, TESTS.index(before))
    scheduling.mark_test_complete(first, TESTS.index(ended_at))
    lost, *_ = first.sent[2:]
    assert scheduling.remove_node(first) == lost, "the test at which it ended, as far as is known"
    for test in second.sent:  # grows
        scheduling.mark_test_complete(second, TESTS.index(test))
    assert sorted([before, ended_at, lost, *second.sent]) == sorted(TESTS)
