"""The contract of submitit's executors with `cluster="jurymast"`, on the local cluster."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit
from submitit.core.utils import CommandFunction, FailedJobError, UncompletedJobError

import jurymast
from jurymast.core.state.run import Phase
from jurymast.executor import JurymastJob
from support.runs import RunUnderTest, wait_gone
from support.waiting import wait_until

pytestmark = pytest.mark.torch

for name in (__name__, "support.waiting"):  # ranks cannot import these
    cloudpickle.register_pickle_by_value(sys.modules[name])


@pytest.fixture
def auto(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JURYMAST_RUNS", str(tmp_path / "runs"))
    given = getattr(request, "param", {})
    found = submitit.AutoExecutor(tmp_path / "log", cluster="jurymast", jurymast_cluster="local", **given)
    found.update_parameters(jurymast_spares=0, slurm_partition="none", timeout_min=10)
    return found


def add(a: int, b: int = 0) -> tuple[int, int, int, list[str]]:
    """The sum, and what the task knows of itself."""
    if a < 0:
        raise ValueError(f"{a} is negative")
    job = submitit.JobEnvironment()
    print("adds", a, flush=True)
    print("warns", file=sys.stderr, flush=True)
    return a + b, job.global_rank, job.num_tasks, [job.job_id, job.cluster, str(job.node)]


def test_each_task_has_its_result_and_its_logs(auto: Any) -> None:
    auto.update_parameters(nodes=2, tasks_per_node=2)
    job = auto.submit(add, 1, b=2)
    again = pickle.loads(pickle.dumps(job))
    assert job.results() == [(3, rank, 4, [job.job_id, "jurymast", str(rank // 2)]) for rank in range(4)], (
        job.stderr()
    )
    assert (job.state, job.done(), job.exception()) == ("COMPLETED", True, None)
    assert again.task(3).result()[1] == 3
    assert "adds 1" in (job.task(2).stdout() or "")
    assert "warns" in (job.task(2).stderr() or "")
    assert job.status()["state"] == "succeeded"
    assert job.get_info()["Run"] == str(job.run.root)
    # As another process finds it again, by its id alone.
    assert JurymastJob(job.paths.folder, job.job_id, range(4)).results() == job.results()


def test_of_several_functions_one_fails(auto: Any) -> None:
    auto.update_parameters(stderr_to_stdout=True)
    with auto.batch():
        jobs = [auto.submit(add, n, 1) for n in (5, -1)]
    assert jobs[0].result()[0] == 6
    with pytest.raises(FailedJobError, match="ValueError: -1 is negative"):
        jobs[1].result()
    assert [job.state for job in jobs] == ["COMPLETED", "FAILED"]
    assert "warns" in (jobs[0].stdout() or "")
    assert jobs[0].stderr() is None
    assert jobs[1].status()["attempt"] == 1


def test_a_command(auto: Any) -> None:
    good = auto.submit(CommandFunction(["sh", "-c", "echo all $0"]), "well")
    bad = auto.submit(CommandFunction(["sh", "-c", "echo no >&2; exit 3"]))
    assert good.result().splitlines()[-1] == "all well"
    assert "no" in str(bad.exception())


def wait_for(path: Path) -> int:
    path.with_suffix(".began").touch()
    wait_until("go", path.exists)
    return 7


def test_cancel(auto: Any, tmp_path: Path) -> None:
    job = auto.submit(wait_for, tmp_path / "go")
    wait_until("the function", (tmp_path / "go.began").exists)
    assert (job.state, job.done(force_check=True)) == ("RUNNING", False)
    job.cancel()
    assert isinstance(job.exception(), UncompletedJobError)
    assert job.state == "CANCELLED"
    wait_gone(job.run.root)


class Counts:
    """Checkpointable as in submitit's documentation: it counts to `most`, and goes on from `at`."""

    def __init__(self, place: Path, most: int) -> None:
        self.place, self.most, self.at, self.began = place, most, 0, 0

    def __call__(self) -> tuple[int, int]:
        self.began = self.at
        while self.at < self.most:
            self.at += 1
            (self.place / f"{submitit.JobEnvironment().global_rank}").write_text(str(self.at))
            if self.at == self.most // 2:
                wait_until("go", (self.place / "go").exists)
        return self.began, self.at

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


def test_a_lost_node_has_a_function_go_on_from_its_checkpoint(auto: Any, tmp_path: Path) -> None:
    auto.update_parameters(nodes=2, jurymast_spares=1)
    job = auto.submit(Counts(tmp_path, 10))
    for rank in (0, 1):
        wait_until("half", lambda rank=rank: (tmp_path / str(rank)).exists()  # type: ignore[misc]
                   and (tmp_path / str(rank)).read_text() == "5")  # fmt: skip
    run = RunUnderTest(job.run.root)
    os.killpg(run.agent_pid(run.state().placement[1]), signal.SIGKILL)
    run.wait("the next attempt", lambda state: state.attempt == 2)
    (tmp_path / "go").touch()
    assert job.results() == [(5, 10), (5, 10)], run.story()
    assert run.state().attempt == 2


def test_scripts_by_the_short_form(auto: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, sys\nprint(os.environ['RANK'])\nsys.exit(len(sys.argv) - 1)\n")
    how = {"cluster": "local", "spares": 0}
    good, bad = (jurymast.submit(script, words, tasks_per_node=2, **how) for words in ([], ["x"]))
    assert good.result() == 0
    assert sorted((good.stdout() or "").split()) == ["0", "1"]
    with pytest.raises(FailedJobError, match="the run failed"):
        bad.result()
    assert jurymast.submit(add, [1, 2], folder=tmp_path / "log", **how).result()[0] == 3


class Slow(Counts):
    """It needs longer for what it keeps than `failures.stop_grace` gives."""

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        threading.Event().wait(4.0)
        return super().checkpoint()


class Ends(Counts):
    """It does not want to be requeued."""

    def checkpoint(self) -> None:  # type: ignore[override]
        return None


def half_done(auto: Any, function: Counts) -> Any:
    auto.update_parameters(jurymast_spares=0)
    job = auto.submit(function)
    told = function.place / "0"
    wait_until("half", lambda: told.exists() and told.read_text() == str(function.most // 2))
    return job


@pytest.mark.parametrize("auto", [{"slurm_max_num_timeout": 1}], indirect=True)
def test_what_submitit_s_users_do_to_test_a_checkpoint(auto: Any, tmp_path: Path) -> None:
    """As its documentation has it: `job._interrupt`, for a preemption or a time limit."""
    job = half_done(auto, Slow(tmp_path, 10))
    run = RunUnderTest(job.run.root)
    for attempt, timeout in ((2, False), (3, True)):
        job._interrupt(timeout=timeout)
        run.wait("the next attempt", lambda state, attempt=attempt: state.attempt == attempt)  # type: ignore[misc]
        run.wait("its ranks", lambda state: state.phase is Phase.RUNNING)
    state = run.state()
    assert (state.restarts, state.timeouts) == (2, 1), run.story()
    assert {one.cause for one in state.incidents} == {"requeue_asked"}
    (tmp_path / "go").touch()
    assert job.result() == (5, 10), "from what checkpoint() kept, however long that took"


@pytest.mark.parametrize("auto", [{"slurm_max_num_timeout": 0}], indirect=True)
def test_one_timeout_too_many(auto: Any, tmp_path: Path) -> None:
    job = half_done(auto, Counts(tmp_path, 10))
    job._interrupt(timeout=True)
    with pytest.raises(UncompletedJobError, match="time limit"):
        job.result()
    assert job.state == "FAILED"


def test_a_function_that_does_not_want_to_be_requeued(auto: Any, tmp_path: Path) -> None:
    """Its checkpoint() returns None, as submitit's documentation allows."""
    job = half_done(auto, Ends(tmp_path, 10))
    job._interrupt()
    assert "checkpoint function returned None" in str(job.exception())
    assert (tmp_path / "0").read_text() == "5", "it was not begun anew"


def test_lines_of_shell_run_around_a_local_run(auto: Any, tmp_path: Path) -> None:
    last = tmp_path / "last"
    auto.update_parameters(
        slurm_setup=["export FROM_SETUP='a b'"], slurm_teardown=[f'echo "after $FROM_SETUP" >>{last}']
    )
    job = auto.submit(os.getenv, "FROM_SETUP")
    assert job.result() == "a b"
    wait_until("what runs last", lambda: last.exists() and last.read_text() != "")
    assert last.read_text() == "after a b\n"
