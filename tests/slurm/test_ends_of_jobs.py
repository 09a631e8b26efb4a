"""What Slurm ends while the newest checkpoint is on its way to slow storage, and signals that end no job.

The file system of the checkpoints hangs for longer than KillWait, and goes on: a write that takes that long.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jurymast.core.state import events as ev
from support.runs import result
from support.slurm_runs import TRAIN, SlurmRun, kill_rank, running_cluster, submit, submit_script
from support.waiting import ASK_POLL_S, wait_until
from testcluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.torch]

LIMIT_S = 240.0
KILL_WAIT_S, GRACE_S = 5, 60
WARNED_S = 180  # before a time limit; long for a busy machine
# Of partitions that preempt, and are preempted.
CONF = (
    f"KillWait={KILL_WAIT_S}",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    f"PartitionName=low Nodes=n1,n2,n3 PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} State=UP",
    "PartitionName=high Nodes=n1,n2,n3 PriorityTier=9 PreemptMode=OFF State=UP",
)


@pytest.fixture(scope="module")
def cluster(place: Path) -> Iterator[Cluster]:
    """One of its own, on which jobs are preempted."""
    with running_cluster(place, "preempts", nodes=3, conf=CONF) as running:
        yield running


class Training:
    """A run that goes on until it is let end, and then trains some steps more; it is copied to shared storage
    once, and from then on once an hour."""

    def __init__(self, cluster: Cluster, folder: Path, checkpoints: Path, disk: Path) -> None:
        self._disk = disk
        self._cluster, self._folder = cluster, folder
        self._enough = cluster.shared / f"{folder.name}.end"
        self._enough.unlink(missing_ok=True)  # an earlier session's
        policy = cluster.shared / f"{folder.name}.yaml"
        policy.write_text(json.dumps({"checkpoint": {"tiers": {"shared": {"every": "1h"}}}}))
        policy.chmod(0o644)
        self._options = ("--nodes", "2", "--spares", "0", "--policy", str(policy))
        self.checkpoints = checkpoints

    def submit(self, *options: str) -> SlurmRun:
        arguments = (*TRAIN, "--steps", "100000", "--until", str(self._enough))
        saved = ("--checkpoints", str(self.checkpoints))
        return submit(self._cluster, self._folder, *self._options, *options, arguments=(*arguments, *saved))

    def copied(self, run: SlurmRun) -> int:
        """Wait for the one copy, and return its step."""
        state = run.wait("the copy", lambda s: "shared" in s.saved and bool(s.saved["shared"].step), LIMIT_S)
        return state.saved["shared"].step or 0

    @contextmanager
    def slow_storage(self) -> Iterator[None]:
        """The checkpoints' file system writes nothing before the end of the block."""
        subprocess.run(["fsfreeze", "--freeze", str(self._disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self._disk)], check=True)

    def let_end(self) -> None:
        self._enough.touch()

    def ended_as_undisturbed(self, run: SlurmRun, trained_plainly: Callable[..., str]) -> None:
        assert run.wait_end(LIMIT_S).exit_code == 0, run.story()
        found = result(self._cluster.shared / f"{self._folder.name}.json")
        assert found["sha256"] == trained_plainly("--steps", str(found["steps"]), nodes=2), run.story()


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path) -> Iterator[Training]:
    checkpoints = cluster.shared / f"{tmp_path.name}-checkpoints"
    checkpoints.mkdir(exist_ok=True)
    with cluster.small_share(checkpoints, 64, image=tmp_path / "disk.img") as disk:
        yield Training(cluster, tmp_path, checkpoints / "here", disk)
        for job in cluster.squeue():
            cluster.login(["scancel", str(job.id)], check=False)


def signalled(run: SlurmRun, signal: str) -> float:
    """Wait until the journal has this signal of Slurm, and return when it came."""

    def found() -> list[float]:
        return [e.t for e in run.events() if isinstance(e, ev.Signalled) and e.signal == signal]

    return wait_until(signal, found, LIMIT_S)[0]


def noted(run: SlurmRun, words: str) -> float:
    """Wait until the journal has a note with these words, and return when it came."""

    def found() -> list[float]:
        return [e.t for e in run.events() if isinstance(e, ev.Noted) and words in e.message]

    return wait_until(words, found, LIMIT_S)[0]


def longer_than_kill_wait_after(at: float) -> None:
    wait_until("the end of KillWait", lambda: time.time() > at + 2 * KILL_WAIT_S, LIMIT_S)


def left_of(run: SlurmRun) -> list[str]:
    """Processes with the run's name on their command line. A script's shell that ends at once hides them from
    Slurm, if that finds processes by their parents."""
    found = [process for node in run.cluster.nodes for process in run.cluster.processes(node)]
    return [process.command for process in found if run.directory.root.name in process.command]


def restored(run: SlurmRun) -> int:
    steps = [e.step for e in run.events() if isinstance(e, ev.Restored) and e.step]
    assert steps, run.story()
    return steps[0]


def test_a_write_longer_than_kill_wait_is_done_in_the_grace_time_of_a_preemption(
    cluster: Cluster, training: Training, trained_plainly: Callable[..., str]
) -> None:
    # A comment is anybody's words: Slurm prints it among its own fields.
    run = training.submit("--partition", "low", "--comment=x EndTime=Unknown PreemptTime=None")
    copied = training.copied(run)
    newest = run.wait_safe(copied + 30, LIMIT_S).saved["peer"].step or 0
    with training.slow_storage():
        urgent = cluster.sbatch("#!/bin/sh\nsleep 1000\n", "--partition=high", "--nodes=3", "--exclusive")
        longer_than_kill_wait_after(signalled(run, "preempted"))
        assert run.job_state() == "RUNNING", run.story()
    wait_until("the requeue", lambda: cluster.job(run.job).get("Restarts") == "1", LIMIT_S, ASK_POLL_S)
    assert (run.state().saved["shared"].step or 0) >= newest, run.story()
    cluster.login(["scancel", str(urgent)])
    run.wait("the next life", lambda s: s.restarts == 1, LIMIT_S)
    training.let_end()
    training.ended_as_undisturbed(run, trained_plainly)
    assert restored(run) >= newest
    assert {incident.cause for incident in run.state().incidents} == {"preempted"}, run.story()


def change(cluster: Cluster, job: int, limit: str) -> None:
    """The job's limit. Slurm looks twice a minute whom it is to warn, and whom to end."""
    cluster.slurm(["scontrol", "update", f"JobId={job}", limit])


@pytest.mark.long
def test_a_write_longer_than_kill_wait_is_done_before_the_time_limit(
    cluster: Cluster, training: Training, trained_plainly: Callable[..., str]
) -> None:
    """It is begun early enough, although Slurm warns of nothing, and the limit is moved. The run, submitted
    again, goes on from there."""
    run = training.submit("--time=60", "--signal=B:URG@60")
    training.copied(run)
    change(cluster, run.job, f"EndTime=now+{WARNED_S}")
    with training.slow_storage():
        warned_at = noted(run, "the job reaches its time limit in")
        before = run.state().step
        longer_than_kill_wait_after(warned_at)
    run.wait("the copy", lambda s: (s.saved["shared"].step or 0) > before, LIMIT_S)
    change(cluster, run.job, "EndTime=now+10")  # nothing more would happen until the end
    assert run.wait_end(LIMIT_S).end_reason == "the Slurm job reached its time limit", run.story()
    cluster.wait_job(run.job, "TIMEOUT", deadline_s=LIMIT_S)
    again = training.submit()
    again.wait("steps", lambda s: s.step > before, LIMIT_S)
    training.let_end()
    training.ended_as_undisturbed(again, trained_plainly)
    assert restored(again) > before


def test_a_plain_run_saves_at_the_warning_that_it_asked_for(
    cluster: Cluster, training: Training, trained_plainly: Callable[..., str]
) -> None:
    run = training.submit("--time=60", "--signal=B:USR1@60")
    before = training.copied(run) + 20
    run.wait_safe(before, LIMIT_S)
    cluster.login(["scancel", "--batch", "--signal=USR1", str(run.job)])
    run.wait("the copy", lambda s: (s.saved["shared"].step or 0) >= before, LIMIT_S)
    training.let_end()
    training.ended_as_undisturbed(run, trained_plainly)
    assert run.state().attempt == 1, run.story()


SAVES = f"""import os, signal, sys, time
import torch
def save(*_):
    open(f"signals-{{os.environ['RANK']}}", "a").write("SIGTERM ")
    if os.environ["RANK"] == "0":
        time.sleep({KILL_WAIT_S / 2})
        open("saved", "a").write("saved ")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
while True:
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("srun", [False, True], ids=["plain run", "batch script"])
def test_a_script_that_saves_at_slurms_sigterm_has_the_time_for_it(
    cluster: Cluster, tmp_path: Path, srun: bool
) -> None:
    """Ranks that have nothing to save exit at once, with 0, which is not the end of the training. Each gets
    one SIGTERM: another would interrupt what the first has begun."""
    work = cluster.shared / tmp_path.name
    cluster.login(["mkdir", "-p", str(work)])
    (work / "train.py").write_text(SAVES)
    options = ("--spares", "0", "--policy", str(work / "policy.yaml"))
    (work / "policy.yaml").write_text("failures: {requeues: 0}\n")
    train = f"cd {work}; srun torchrun --nnodes=2 --nproc-per-node=2 train.py"
    if srun:
        script = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n{train}\n"
        run = submit_script(cluster, work, script, *options)
    else:
        nodes = ("--nodes", "2", "--nproc-per-node", "2")
        run = submit(cluster, tmp_path, *options, *nodes, f"--chdir={work}", script=work / "train.py")
    run.wait("steps", lambda s: s.step > 0, LIMIT_S)
    cluster.login(["scancel", str(run.job)])
    wait_until("what is saved", lambda: (work / "saved").exists(), LIMIT_S)
    wait_until("the end of the run's processes", lambda: not left_of(run), LIMIT_S)
    signals = {path.name: path.read_text() for path in work.glob("signals-*")}
    assert signals == {f"signals-{rank}": "SIGTERM " for rank in range(4)}, run.story()
    assert (work / "saved").read_text() == "saved "
    assert run.state().public_state == "cancelled", run.story()


@pytest.mark.parametrize("to", ["steps", "batch"])
def test_a_signal_that_does_not_end_the_job_ends_no_run(
    cluster: Cluster, training: Training, trained_plainly: Callable[..., str], to: str
) -> None:
    """scancel --signal=TERM; that to the steps ends the ranks, and they are started again. So are ranks that
    fail later."""
    run = training.submit()
    training.copied(run)
    nodes = run.state().placement
    cluster.login(["scancel", "--signal=TERM", *(["--batch"] if to == "batch" else []), str(run.job)])
    if to == "batch":
        signalled(run, "running")
    else:
        run.wait("the restart", lambda s: s.attempt > 1 and s.incident is None, LIMIT_S)
    attempt = run.state().attempt
    kill_rank(run, nodes[1])
    run.wait("the next restart", lambda s: s.attempt > attempt and s.incident is None, LIMIT_S)
    run.wait_safe(run.state().step + 30, LIMIT_S)
    assert run.state().placement == nodes
    training.let_end()
    training.ended_as_undisturbed(run, trained_plainly)
    assert run.state().restarts == 0


ASKS = """import os, signal
import torch
import torch.distributed as dist
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
dist.init_process_group("gloo")
said = torch.zeros(1)
while not said:
    said = torch.tensor([float(bool(heard))])
    dist.all_reduce(said)
open("saved", "a").write("saved ") if dist.get_rank() == 0 else None
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_ranks_of_a_plain_run_hear_the_warning_that_it_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's own, at a real time limit: a `B:` anywhere would keep it from them."""
    work = cluster.shared / tmp_path.name[:30]
    cluster.login(["mkdir", "-p", str(work)])
    (work / "train.py").write_text(ASKS)
    options = ("--nodes", "2", "--spares", "0", "--time=3", "--signal=USR1@100", f"--chdir={work}")
    run = submit(cluster, tmp_path, *options, script=work / "train.py", arguments=())
    state = run.wait_end(LIMIT_S)
    assert (state.public_state, state.attempt) == ("succeeded", 1), run.story()
    assert (work / "saved").read_text() == "saved "
