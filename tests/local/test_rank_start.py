"""Ranks that cannot use what was loaded ahead of them; what a rank leaves behind when it dies."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from jurymast.core.state import events as ev
from jurymast.jobs import await_ended
from support.runs import RunUnderTest, hosts, jurymast, local_run, wait_gone
from support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.torch


def logs(run: RunUnderTest, attempt: int) -> list[str]:
    return [path.read_text() for path in run.directory.rank_logs(attempt)]


def test_what_a_script_sets_before_torch_counts_and_is_told_once(tmp_path: Path) -> None:
    with local_run(tmp_path / "runs", "--nodes", "2", "--spares", "0", script="sets_threads.py") as run:
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    for attempt in (1, 2):  # nothing is printed twice, although the ranks of the first began twice
        assert logs(run, attempt) == ["begins\nthreads 2\n"] * 2
    (cold,) = [event for event in run.events() if isinstance(event, ev.ColdStart)]
    assert (cold.attempt, cold.seconds > 0) == (1, True)
    assert cold.why == "the script sets OMP_NUM_THREADS before it imports torch"
    told = jurymast("events", str(run.directory.root)).stdout
    assert "from now on ranks start cold and load everything themselves, which adds" in told


SIDE_EFFECTS = """
import os, sys
os.mkdir(sys.argv[1])
print("begins")
{set}
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 1)).sum().backward()
optimizer.step()
print("threads", torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("setting", "threads", "why"),
    [
        ('if os.path.exists(sys.argv[1]):\n    os.environ["OMP_NUM_THREADS"] = str(len("ab"))', 2,
         "the script sets OMP_NUM_THREADS before it imports torch"),
        # As a package does whose text is not read.
        ('setter = getattr(os, "en" + "viron"); setter["OMP_" + "NUM_THREADS"] = str(len("ab"))', 1,
         "the script sets OMP_NUM_THREADS before it imports torch"),
    ],
    ids=["shown", "not shown"],
)  # fmt: skip
def test_a_script_that_leaves_something_behind_begins_once(
    tmp_path: Path, setting: str, threads: int, why: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SIDE_EFFECTS.replace("{set}", setting))
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script=str(script),
                   arguments=(str(tmp_path / "made"),)) as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert (state.exit_code, state.attempt) == (0, 1), run.story()
    (printed,) = logs(run, 1)
    lines = [line for line in printed.splitlines() if not line.startswith("jurymast: ")]
    assert lines == ["begins", f"threads {threads}"]
    assert (f"jurymast: {why}, which has no effect here" in printed) == (threads == 1)
    (cold,) = [event for event in run.events() if isinstance(event, ev.ColdStart)]
    assert (cold.why, cold.seconds > 0) == (why, threads == 2)


def test_a_policy_that_wants_cold_starts_gets_them(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("start: cold\n")
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", "--policy", str(policy),
                   script="sets_threads.py") as run:  # fmt: skip
        state = run.wait_end()
        wait_gone(run.directory.root)
    assert state.exit_code == 0, run.story()
    assert logs(run, 2) == ["begins\nthreads 2\n"]
    assert [event for event in run.events() if isinstance(event, ev.ColdStart)] == []
    assert state.step == 1, "a rank that starts cold is seen as well"


def test_a_signal_to_the_ranks_group_reaches_what_they_started(tmp_path: Path) -> None:
    """A rank that is killed leaves no loader worker behind."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, _utils\n"
        "_utils.worker.MP_STATUS_CHECK_INTERVAL = 3600.0  # when a worker looks whether its rank is alive\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.001)\n"
        "for epoch in range(100_000):\n"
        "    loader = DataLoader(torch.ones(8, 1), num_workers=2) if epoch == 0 else loader\n"
        "    for batch in loader if epoch % 50 == 0 else [torch.ones(1, 1)] * 8:\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
    )
    with local_run(tmp_path / "runs", "--nodes", "1", "--spares", "0", script=str(script)) as run:
        node = run.wait_step(20).placement[0]
        assert len(hosts(run.agent_pid(node))) == 1
        (pid,) = run.pids(node)
        rank = psutil.Process(pid)
        workers = wait_until("loader workers", rank.children)
        rank.kill()
        assert await_ended([worker.pid for worker in workers], LIMIT_S)
        jurymast("cancel", str(run.directory.root))
        run.wait_end()
        wait_gone(run.directory.root)
