"""submitit's executor `jurymast`: what it asks of Slurm, and what a rank learns of its job. Nothing runs."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import submitit
from submitit.core import plugins

import jurymast
from jurymast import executor, foreign
from jurymast.cluster import batch, slurm
from jurymast.cluster.slurm import Request, Submitted
from jurymast.errors import SubmissionError, UsageError
from jurymast.executor import JurymastExecutor
from jurymast.rundir import RunDirectory
from jurymast.worker import function
from jurymast.worker.function import own_variables

OTHER_UID = 65533


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Request]:
    """What is submitted, to a Slurm that takes everything."""
    found: list[Request] = []

    def submitted(request: Request) -> Submitted:
        found.append(request)
        return Submitted(request, slurm_job="4711")

    monkeypatch.setattr(slurm, "submit", submitted)
    monkeypatch.setattr(executor, "check_request", lambda request, line: None)
    monkeypatch.setenv("JURYMAST_SITE", "")
    monkeypatch.setenv("JURYMAST_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return found


def add(a: int, b: int) -> int:
    return a + b


def test_submitit_finds_the_executor_and_never_chooses_it() -> None:
    assert plugins.get_executors()["jurymast"] is JurymastExecutor
    assert "jurymast" in plugins.get_job_environments()
    assert JurymastExecutor.affinity() == 0


def test_a_script_of_the_slurm_executor_needs_one_other_word(requests: list[Request], tmp_path: Path) -> None:
    auto = submitit.AutoExecutor(tmp_path / "log", cluster="jurymast")
    auto.update_parameters(
        nodes=2, tasks_per_node=4, cpus_per_task=3, gpus_per_node=4, mem_gb=1.5, timeout_min=90, name="sum",
        slurm_partition="train", slurm_gpus_per_task=2, slurm_constraint=None, slurm_exclusive=True,
        slurm_time=60, slurm_setup=["module load cuda"], slurm_additional_parameters={"switches": 1},
        slurm_mem="2GB", slurm_signal_delay_s=90, local_setup=["none"], jurymast_spares=1,
    )  # fmt: skip
    job = auto.submit(add, 1, 2)
    (request,) = requests
    plan = request.plan
    assert [job.job_id, job.num_tasks] == ["4711", 8]
    assert (plan.name, plan.active, plan.spares, plan.ranks_per_node) == ("sum", 2, 1, 4)
    assert (plan.script, plan.module, plan.arguments) == (
        "jurymast.worker.function", True, (str(tmp_path / "log"),)
    )  # fmt: skip
    assert (plan.tasks, plan.guessed, plan.stderr_apart) == (True, True, True)
    assert {*plan.sbatch_options} == {
        "--cpus-per-task=12", "--gpus-per-node=8", "--mem=2GB", "--time=60", "--partition=train",
        "--exclusive", "--switches=1", "--signal=B:USR2@90",
    }  # fmt: skip
    assert "\nmodule load cuda\ncd " in request.script
    assert (tmp_path / "log" / "4711_run").readlink() == Path(plan.directory)
    assert job.submission().args == (1, 2)


def test_nothing_is_read_that_another_user_has_put_in_the_folder(
    requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run that user's code."""
    job = submitit.AutoExecutor(tmp_path / "log", cluster="jurymast").submit(add, 1, 2)
    paths = job.paths
    assert stat.S_IMODE(paths.submitted_pickle.stat().st_mode) == 0o600
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    monkeypatch.setattr(type(job), "wait", lambda self: None)
    paths.result_pickle.write_bytes(cloudpickle.dumps(("success", 3)))
    assert job.result() == 3
    os.chown(paths.result_pickle, OTHER_UID, -1)
    with pytest.raises(foreign.NotOurs, match="not private to this user"):
        job.result()
    os.chown(paths.submitted_pickle, OTHER_UID, -1)
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    run.allocation_file.write_text(json.dumps({"job": "4711"}))
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"
    variables = {"JURYMAST_RUN_DIR": str(run.root), **dict.fromkeys(names, "0")}
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    with pytest.raises(foreign.NotOurs, match="submitted.pkl"):
        function.main(str(tmp_path / "log"))


class Runs:
    """Pickled as a call that makes this directory: what an attacker would have run."""

    def __init__(self, proof: Path) -> None:
        self._proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._proof),)


def put_by_another(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    os.chown(path, OTHER_UID, OTHER_UID)


@pytest.fixture
def job(requests: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A submitted job, in the environment of its only rank."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    made = submitit.AutoExecutor(tmp_path / "log", cluster="jurymast").submit(add, 1, 2)
    monkeypatch.setattr(type(made), "wait", lambda self: None)
    run = RunDirectory(requests[0].plan.directory)
    run.root.mkdir(parents=True)
    run.allocation_file.write_text(json.dumps({"job": "4711", "restarts": 0}))
    names = "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"
    sizes = {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"}
    variables = {"JURYMAST_RUN_DIR": str(run.root), **dict.fromkeys(names, "0"), **sizes}
    monkeypatch.setattr(os, "environ", {**os.environ, **variables})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield made
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_what_replaces_a_function_once_it_was_looked_at_is_not_run(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others may rename what is in the folder."""
    evil, prepare = cloudpickle.dumps(Runs(tmp_path / "proof")), function._prepare

    def swap(paths: Any, variables: Any) -> None:
        prepare(paths, variables)
        put_by_another(job.paths.submitted_pickle, evil)

    monkeypatch.setattr(function, "_prepare", swap)
    function.main(str(tmp_path / "log"))
    assert not (tmp_path / "proof").exists()
    assert job.result() == 3
    with pytest.raises(foreign.NotOurs):
        job.submission()
    assert not (tmp_path / "proof").exists()


def test_a_result_that_another_user_leaves_while_it_is_waited_for_is_not_read(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in any directory that all may write to, once the run has ended without one."""
    evil = cloudpickle.dumps(("success", Runs(tmp_path / "proof")))
    monkeypatch.setattr(executor, "renew", lambda folder: put_by_another(job.paths.result_pickle, evil))
    with pytest.raises(foreign.NotOurs):
        job.result()
    assert not (tmp_path / "proof").exists()


class Opens:
    """Opens a file once it is unpickled, as of a data set that is mapped into memory."""

    def __reduce__(self) -> Any:
        return open, ("/nonexistent/data",)


def test_what_unpickling_a_result_raises_is_told_as_it_is(job: Any) -> None:
    job.paths.result_pickle.write_bytes(cloudpickle.dumps(("success", Opens())))
    with pytest.raises(FileNotFoundError, match="/nonexistent/data"):
        job.result()
    job.paths.result_pickle.write_bytes(b"")
    job._results_timeout_s = 0.1
    with pytest.raises(EOFError):
        job.result()


def test_no_log_that_another_user_has_made_a_pipe_is_waited_for(job: Any) -> None:
    os.mkfifo(job.paths.stdout)
    with pytest.raises(foreign.NotAFile):
        job.stdout()


def test_what_another_user_says_of_a_job_s_run_does_not_count(job: Any, tmp_path: Path) -> None:
    """Or `cancel` would end another run."""
    link = tmp_path / "log" / "4711_run"
    assert job.run.root == link.readlink()
    os.chown(link, OTHER_UID, OTHER_UID, follow_symlinks=False)
    with pytest.raises(foreign.NotOurs):
        job.cancel()


def test_other_executors_parameters_stay_as_they_are(tmp_path: Path) -> None:
    auto = submitit.AutoExecutor(tmp_path, cluster="debug")
    auto.update_parameters(slurm_partition="train", jurymast_spares=1)
    assert auto.parameters == {}


@pytest.mark.parametrize("batch", [False, True])
def test_many_functions_are_one_array(requests: list[Request], tmp_path: Path, batch: bool) -> None:
    ours = JurymastExecutor(tmp_path / "log", array_parallelism=2)
    if batch:
        with ours.batch():
            jobs: list[Any] = [ours.submit(add, n, n) for n in range(3)]
    else:
        jobs = ours.map_array(add, range(3), range(3))
    (request,) = requests
    assert "--array=0-2%2" in request.argv
    assert [job.job_id for job in jobs] == ["4711_0", "4711_1", "4711_2"]
    assert jobs[2].submission().args == (2, 2)
    assert jobs[2].run.root == Path(f"{request.plan.directory}-task-2")


class Keeps:
    """A function that keeps its own state."""

    def __call__(self) -> int:
        return 1

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        return submitit.helpers.DelayedSubmission(self)


def test_what_keeps_its_state_is_requeued_at_its_limit(requests: list[Request], tmp_path: Path) -> None:
    """As submitit's max_num_timeout says; functions of an array, if all of them do."""
    one, two, both = (JurymastExecutor(tmp_path / name, max_num_timeout=5) for name in ("a", "b", "c"))
    one.update_parameters(signal_delay_s=300)
    one.submit(Keeps())
    two.submit(add, 1, 2)
    with both.batch():
        both.submit(Keeps())
        both.submit(add, 1, 2)
    assert [request.plan.timeouts for request in requests] == [5, 0, 0]
    assert requests[0].plan.keeps_s == 300.0


def test_lines_that_run_last(requests: list[Request], tmp_path: Path) -> None:
    ours = JurymastExecutor(tmp_path / "log", teardown=["echo bye", "rm -r /scratch/x"])
    ours.submit(add, 1, 2)
    (request,) = requests
    assert request.teardown == "echo bye\nrm -r /scratch/x\n"
    assert "bye" not in request.script
    run = replace(request, teardown=f"echo bye >{tmp_path}/said\n")
    slurm.write_run_directory(run)
    batch.tear_down(run.run_directory)
    assert (tmp_path / "said").read_text() == "bye\n"


def test_a_batch_script_is_for_the_command(requests: list[Request], tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n")
    told = "job.sbatch is a batch script; submit it with: jurymast submit job.sbatch --lr 1"
    with pytest.raises(UsageError, match=told):
        jurymast.submit("job.sbatch", ["--lr", 1])
    assert requests == []


def test_wrong_parameters_are_named(tmp_path: Path) -> None:
    ours = JurymastExecutor(tmp_path)
    ours.update_parameters(tasks_per_node=2, mem_gb=2)
    assert ours.parameters == {"ntasks_per_node": 2, "mem": "2048M"}
    for wrong in ("partitoin", "srun_args"):
        with pytest.raises(ValueError, match=f"{wrong}; valid are account, "):
            ours.update_parameters(**{wrong: "x"})


def test_a_refused_submission_leaves_no_pickle(
    requests: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(request: Request) -> Submitted:
        raise SubmissionError("no")

    monkeypatch.setattr(slurm, "submit", refuse)
    with pytest.raises(SubmissionError):
        JurymastExecutor(tmp_path / "log").submit(add, 1, 2)
    assert not [*(tmp_path / "log").iterdir()]


def test_the_short_form(requests: list[Request], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    job = jurymast.submit("train.py", ["--lr", 1], nodes=2, tasks_per_node=8, spares=1, partition="train")
    plan = requests[0].plan
    assert (plan.script, plan.arguments, plan.tasks) == ("train.py", ("--lr", "1"), False)
    assert (plan.active, plan.ranks_per_node, plan.spares) == (2, 8, 1)
    assert (plan.name, plan.sbatch_options) == ("train", ("--partition=train",))
    assert (job.job_id, job.run.root) == ("4711", Path(plan.directory))
    jurymast.submit(add, [1, 2], folder=tmp_path / "log")
    assert requests[1].plan.name == "add"
    assert (tmp_path / "log" / "4711_submitted.pkl").exists()


def test_a_rank_s_numbers() -> None:
    torchs = {
        "RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3",
    }  # fmt: skip
    slurms = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "6",
        "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]",
    }  # fmt: skip
    local, task = own_variables(torchs | {"SLURM_PROCID": "0"}, "local-7"), own_variables(slurms, "7")
    differ = {name for name in task if task[name] != local[name]}
    assert differ == {"SUBMITIT_JURYMAST_JOB_ID", "SUBMITIT_JURYMAST_NODES"}
    assert (local["SUBMITIT_JURYMAST_JOB_ID"], task["SUBMITIT_JURYMAST_JOB_ID"]) == ("local-7", "7")
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    assert own_variables(slurms | array, "7")["SUBMITIT_JURYMAST_JOB_ID"] == "6_1"


def test_importing_jurymast_stays_light() -> None:
    program = "import sys, jurymast; print('submitit' in sys.modules, 'submit' in jurymast.__all__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("name", ["slurm_max_num_timeout", "jurymast_max_num_timeout", "max_num_timeout"])
def test_what_a_script_gives_its_executor_at_once(name: str, requests: list[Request], tmp_path: Path) -> None:
    """Written for the Slurm executor; submitit itself drops what has another executor's prefix."""
    given: dict[str, Any] = {name: 7, "slurm_python": "/opt/python"}
    submitit.AutoExecutor(tmp_path / "log", cluster="jurymast", **given).submit(Keeps())
    (request,) = requests
    assert (request.plan.timeouts, request.plan.python) == (7, "/opt/python")
