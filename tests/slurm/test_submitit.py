"""A script of submitit's users, written for its Slurm executor, with one word changed: arrays, results, and a
function whose node loses power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.runs import RunUnderTest
from support.waiting import wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

# Without its first two words, `submitit.AutoExecutor(folder, cluster="slurm")` runs it under submitit alone.
COMMON = """
import json, os, sys, time
from pathlib import Path
import submitit

here = Path(sys.argv[1])
executor = submitit.AutoExecutor(here / "log", cluster="jurymast")
executor.update_parameters(timeout_min=20, cpus_per_task=1, slurm_setup=["export FROM_SETUP=yes"])
"""
# A sum over all ranks each step, with its state in a Checkpointable.
TRAINING = """
class Training:
    def __init__(self):
        self.step, self.sum, self.began = 0, 0.0, []

    def __call__(self):
        import torch, torch.distributed as dist
        job = submitit.JobEnvironment()
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        dist.init_process_group("gloo")
        told = [self.step, self.sum]
        dist.broadcast_object_list(told)
        self.step, self.sum = told
        self.began.append(self.step)
        while self.step < 40:
            x = torch.tensor([float(dist.get_rank() + 1) * (self.step + 1)])
            dist.all_reduce(x)
            self.step, self.sum = self.step + 1, self.sum + x.item()
            if dist.get_rank() == 0:
                (here / "step").write_text(str(self.step))
            while self.step == 20 and not (here / "go").exists():
                time.sleep(0.05)
        dist.barrier()
        return {"began": self.began, "sum": self.sum, "rank": job.global_rank, "of": job.num_tasks,
                "hosts": list(job.hostnames), "host": job.hostname, "setup": os.environ.get("FROM_SETUP")}

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)

executor.update_parameters(nodes=2, tasks_per_node=2, jurymast_spares=1)
job = executor.submit(Training())
(here / "submitted").write_text(job.job_id)
results = job.results()
print(json.dumps({"results": results, "state": job.state, "status": job.status()["state"]}))
"""
ARRAY = """
def square(n):
    job = submitit.JobEnvironment()
    if n == 3:
        raise ValueError("three")
    while n == 4:
        time.sleep(0.1)
    return n * n, job.job_id

executor.update_parameters(slurm_array_parallelism=4, jurymast_spares=0)
jobs = executor.map_array(square, [2, 3, 4])
(here / "submitted").write_text(jobs[0].job_id)
squares = jobs[0].result()
error = str(jobs[1].exception())
while jobs[2].state != "RUNNING":
    time.sleep(0.5)
jobs[2].cancel()
try:
    jobs[2].result()
    cancelled = ""
except submitit.core.utils.UncompletedJobError as stopped:
    cancelled = str(stopped)
print(json.dumps({"squares": squares, "ids": [job.job_id for job in jobs], "error": error,
                  "cancelled": cancelled, "states": [job.state for job in jobs]}))
"""


def start(cluster: Cluster, tmp_path: Path, text: str) -> Path:
    """Run the script at the login host in the background; returns its folder."""
    here = cluster.shared / tmp_path.name
    cluster.login(["mkdir", "-p", str(here)])
    (here / "script.py").write_text(COMMON + text)
    python, place = cluster.python, str(here)
    command = f"exec >out 2>err; {python} script.py {place}; echo $? >code"
    cluster.login(
        ["setsid", "-f", "sh", "-c", command], cwd=here,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "JURYMAST_RUNS": f"{place}/runs",
             "PATH": f"{python.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    wait_until("the submission", lambda: (here / "submitted").exists() or (here / "code").exists(), 120.0)
    return here


def told(here: Path) -> dict[str, Any]:
    wait_until("the script's end", (here / "code").exists, 240.0)
    assert (here / "code").read_text() == "0\n", (here / "err").read_text()
    found: dict[str, Any] = json.loads((here / "out").read_text().splitlines()[-1])
    return found


def test_a_function_outlives_a_power_loss(cluster: Cluster, tmp_path: Path) -> None:
    here = start(cluster, tmp_path, TRAINING)
    wait_until("step 20", lambda: (here / "step").exists() and (here / "step").read_text() == "20", 240.0)
    job = (here / "submitted").read_text()
    run = RunUnderTest((here / "log" / f"{job}_run").readlink())
    before = run.state().placement
    cluster.fault("power-loss", before[1])
    run.wait("the next attempt", lambda state: state.attempt == 2)
    (here / "go").touch()
    found = told(here)
    state = run.state()
    assert (found["state"], found["status"], state.attempt) == ("COMPLETED", "succeeded", 2), run.story()
    assert [one["rank"] for one in found["results"]] == [0, 1, 2, 3]
    assert {one["sum"] for one in found["results"]} == {10.0 * 40 * 41 / 2}
    assert found["results"][0]["began"] == [0, 20], "from what checkpoint() kept"
    assert {(one["of"], one["setup"]) for one in found["results"]} == {(4, "yes")}
    placed = [*state.placement]
    assert placed != [*before]
    assert found["results"][0]["hosts"] == placed
    assert [one["host"] for one in found["results"]] == [placed[0], placed[0], placed[1], placed[1]]


def test_functions_of_an_array(cluster: Cluster, tmp_path: Path) -> None:
    here = start(cluster, tmp_path, ARRAY)
    first = (here / "submitted").read_text()
    assert first.endswith("_0")
    found = told(here)
    assert found["squares"] == [4, first]
    assert found["ids"] == [first, first.replace("_0", "_1"), first.replace("_0", "_2")]
    assert "ValueError: three" in found["error"]
    assert "CANCELLED" in found["cancelled"]
    assert found["states"] == ["COMPLETED", "FAILED", "CANCELLED"]


LIMITED = """
class Counts:
    def __init__(self):
        self.at, self.began = 0, []

    def __call__(self):
        self.began.append(self.at)
        (here / "began").write_text(json.dumps(self.began))
        while not (here / "go").exists():
            self.at += 1
            time.sleep(0.1)
        return self.began, self.at

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)

executor.update_parameters(nodes=1, timeout_min=4, jurymast_spares=0, slurm_signal_delay_s=60,
                           slurm_teardown=[f"echo after $FROM_SETUP >>{here}/last"])
job = executor.submit(Counts())
(here / "submitted").write_text(job.job_id)
began, at = job.result()
print(json.dumps({"began": began, "at": at, "state": job.state}))
"""


@pytest.mark.long  # Slurm's shortest limits are minutes
@pytest.mark.timeout(1200)
def test_a_function_is_requeued_at_its_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """As with submitit's own executor, from what checkpoint() kept; and what is to run last runs once."""
    here = start(cluster, tmp_path, LIMITED)
    job, began = (here / "submitted").read_text(), here / "began"
    run = RunUnderTest((here / "log" / f"{job}_run").readlink())
    # On a busy machine it may reach a limit before it has begun.
    wait_until("a start", began.exists, 900.0)
    wait_until("a start after the limit", lambda: len(json.loads(began.read_text() or "[]")) > 1, 900.0)
    assert not (here / "last").exists(), "the job goes on"
    (here / "go").touch()
    found = told(here)
    state = run.state()
    assert found["state"] == "COMPLETED"
    first, second = found["began"]
    assert first == 0
    assert 0 < second <= found["at"]
    assert state.restarts >= 1
    assert {incident.cause for incident in state.incidents} == {"requeue_asked"}, run.story()
    assert state.timeouts == len(state.incidents)
    wait_until("what runs last", (here / "last").exists, 60.0)
    assert (here / "last").read_text() == "after yes\n"


# As in submitit's documentation: the state goes into a file of one's own, and the next life has a new object.
DOCUMENTED = """
class NetworkTraining:
    def __init__(self):
        self.model = None

    def __call__(self, path):
        self.model = json.loads(Path(path).read_text()) if Path(path).exists() else {"step": 0, "lives": 0}
        self.model["lives"] += 1
        while self.model["step"] < 5 or not (here / "go").exists():
            self.model["step"] += 1
            (here / "lives").write_text(str(self.model["lives"]))
            time.sleep(0.05)
        return self.model

    def checkpoint(self, path):
        time.sleep(3.0)  # longer than failures.stop_grace
        Path(path).write_text(json.dumps(self.model))
        return submitit.helpers.DelayedSubmission(NetworkTraining(), path)

executor.update_parameters(nodes=1, jurymast_spares=0)
job = executor.submit(NetworkTraining(), str(here / "model"))
(here / "submitted").write_text(job.job_id)
for life, timeout in ((1, False), (2, True)):
    while not (here / "lives").exists() or (here / "lives").read_text() != str(life):
        time.sleep(0.2)
    job._interrupt(timeout=timeout)
while (here / "lives").read_text() != "3":
    time.sleep(0.2)
(here / "go").touch()
print(json.dumps({"model": job.result(), "state": job.state}))
"""


def test_the_checkpoint_of_submitit_s_documentation(cluster: Cluster, tmp_path: Path) -> None:
    here = start(cluster, tmp_path, DOCUMENTED)
    run = RunUnderTest((here / "log" / f"{(here / 'submitted').read_text()}_run").readlink())
    found = told(here)
    state = run.state()
    assert (found["state"], found["model"]["lives"]) == ("COMPLETED", 3), run.story()
    assert found["model"]["step"] >= 5
    assert (state.restarts, state.timeouts) == (2, 1), run.story()
    assert {incident.cause for incident in state.incidents} == {"requeue_asked"}
