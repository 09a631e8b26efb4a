"""A requeue that must come off: slurmctld may be away just then, or a successor be about to ask for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from jurymast import reading
from jurymast.agent import real_io
from jurymast.cluster import control
from jurymast.cluster.allocation import Allocation
from jurymast.core.state.settings import RunPlan
from jurymast.errors import ClusterUnavailableError, ControllerAwayError, RunDirectoryError
from jurymast.jobs import await_ended, began_at, run_command
from jurymast.rundir import RunDirectory, write_atomically
from jurymast.wire.endpoint import claim_epoch, find
from support.waiting import wait_until

LIMIT_S = 90.0
# Slurm's programs as far as a requeue asks them; `answer` is what `scontrol requeue` does.
SCONTROL = """#!/bin/sh
echo "$*" >> {root}/asked
case "$*" in
*hostnames*) printf 'n1\\nn2\\n';;
"show job"*) if [ -e {root}/requeued ]; then echo JobState=PENDING; else echo JobState=RUNNING; fi;;
requeue*) {answer};;
esac
"""
AWAY = "echo 'slurm_requeue error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
UNHEARD = "echo 'slurm_requeue error: Socket timed out on send/recv operation' >&2; exit 1"
REFUSED = "echo 'slurm_requeue error: Requested operation is presently disabled' >&2; exit 1"
BATCH = """
import sys
from jurymast.cluster import batch
from jurymast.core.supervision import batch as core
core.SUCCESSOR_LIMIT_S = float(sys.argv[2])
sys.exit(batch.main(sys.argv[1]))
"""


LOGS = "import sys; from jurymast.processes import log_as; log_as('batch')"


class Cluster:
    """A run directory and, on the PATH, the programs of a Slurm in which the run is job 17."""

    def __init__(self, root: Path, answer: str = "touch {root}/requeued") -> None:
        self.root = root
        self.directory = RunDirectory(root / "run")
        self.directory.create()
        self.plan = RunPlan(
            run="r", name="r", directory=str(self.directory.root), cluster="slurm", active=2, spares=0,
            ranks_per_node=1, script="x", python=sys.executable,
        )  # fmt: skip
        self.directory.save_plan(self.plan)
        self.allocation = Allocation("17", 0, ("n1", "n2"), "n1", 0.0)
        programs = {
            "scontrol": SCONTROL.format(root=root, answer=answer.format(root=root)),
            "sbatch": "#!/bin/sh\nexit 0\n",
            "srun": f"#!/bin/sh\necho $$ > {root}/srun\nexec sleep 1000\n",
        }
        for name, text in programs.items():
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def requeues(self) -> int:
        asked = self.root / "asked"
        return asked.read_text().splitlines().count("requeue 17") if asked.exists() else 0

    def requeue(self) -> list[str]:
        told: list[str] = []
        control.requeue(self.plan, self.allocation, ["n2"], ["n2"], told.append)
        return told


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(control, "CONTROLLER_RETRY_S", 0.0)
    return tmp_path


def test_a_requeue_waits_for_a_slurmctld_that_is_away(root: Path) -> None:
    away_twice = f"if [ $(grep -c ^requeue {{root}}/asked) -le 2 ]; then {AWAY}; fi; touch {{root}}/requeued"
    cluster = Cluster(root, away_twice)
    told = cluster.requeue()
    assert (root / "requeued").exists()
    assert cluster.requeues() == 3
    assert len([line for line in told if "Unable to contact" in line and "again" in line]) == 2


def test_a_requeue_without_an_answer_may_have_been_heard(root: Path) -> None:
    cluster = Cluster(root, f"touch {{root}}/requeued; {UNHEARD}")
    cluster.requeue()
    assert cluster.requeues() == 1


def test_a_job_that_was_requeued_already_is_left_alone(root: Path) -> None:
    cluster = Cluster(root)
    (root / "requeued").touch()
    cluster.requeue()
    assert cluster.requeues() == 0


def test_slurms_refusal_is_final(root: Path) -> None:
    cluster = Cluster(root, REFUSED)
    with pytest.raises(ClusterUnavailableError, match="presently disabled"):
        cluster.requeue()
    assert cluster.requeues() == 1


def test_a_slurmctld_that_stays_away_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONTROLLER_LIMIT_S", 0.0)
    cluster = Cluster(root, AWAY)
    with pytest.raises(ClusterUnavailableError, match="Unable to contact"):
        cluster.requeue()


def test_a_slurmctld_that_is_away_differs_from_one_that_refuses() -> None:
    """Only the first is asked again. A command that never ends counts as no answer."""
    for words in ("Unable to contact slurm controller", "Socket timed out", "Zero Bytes were transmitted"):
        with pytest.raises(ControllerAwayError, match=words):
            run_command(["sh", "-c", f"echo 'scontrol: {words}' >&2; exit 1"])
    with pytest.raises(ControllerAwayError, match="did not answer"):
        run_command(["sleep", "infinity"], limit_s=0.1)
    with pytest.raises(ClusterUnavailableError, match="Invalid job id") as refused:
        run_command(["sh", "-c", "echo 'Invalid job id specified' >&2; exit 1"])
    assert not isinstance(refused.value, ControllerAwayError)


@contextmanager
def superseded(cluster: Cluster, limit_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The batch process of a job whose supervisor another node's has replaced; that one decided to requeue,
    and wrote so."""
    names = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    command = [sys.executable, "-c", BATCH, str(cluster.directory.root), str(limit_s)]
    with subprocess.Popen(command, env={**os.environ, **names}, start_new_session=True) as batch:
        try:
            wait_until("supervisor", lambda: find(cluster.directory.epochs), LIMIT_S)
            wait_until("srun", (cluster.root / "srun").exists, LIMIT_S)
            claim_epoch(cluster.directory.epochs)
            outcome = {"state": "requeued", "exit_code": 0, "exclude": [], "lost": ["n2"]}
            supervisor = find(cluster.directory.epochs)
            assert supervisor is not None
            assert await_ended([supervisor.pid], LIMIT_S)
            write_atomically(cluster.directory.outcome_file, json.dumps(outcome).encode())
            yield batch
        finally:
            try:
                os.killpg(batch.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_a_batch_process_leaves_the_requeue_to_its_successor(root: Path) -> None:
    cluster = Cluster(root)
    with superseded(cluster, LIMIT_S) as batch:
        with pytest.raises(subprocess.TimeoutExpired):  # its end would end the job, with nothing requeued
            batch.wait(2.0)
        assert began_at(int((root / "srun").read_text())) is not None, "the successor runs below it"
        (root / "requeued").touch()
        batch.terminate()  # by Slurm, once it has requeued the job
        assert batch.wait(LIMIT_S) == 0
        assert cluster.requeues() == 0


def test_a_stray_sigterm_before_the_successor_s_requeue_does_not_prevent_it(root: Path) -> None:
    cluster = Cluster(root)
    with superseded(cluster, LIMIT_S) as batch:
        wait_until("its view of the outcome", cluster.directory.outcome_file.exists, LIMIT_S)
        batch.terminate()
        assert batch.wait(LIMIT_S) == 0
        assert cluster.requeues() == 1


def test_a_batch_process_requeues_itself_if_its_successor_does_not(root: Path) -> None:
    cluster = Cluster(root)
    with superseded(cluster, 0.0) as batch:
        assert batch.wait(LIMIT_S) == 0
        assert cluster.requeues() == 1


def test_a_job_waits_until_its_storage_can_be_read_and_written(root: Path) -> None:
    """As where it is mounted late, or full when a job is requeued at night: the run would be over."""
    cluster, log = Cluster(root), root / "log"
    hidden = cluster.directory.plan_file.rename(root / "plan")
    cluster.directory.outcome_file.mkdir()  # cannot be unlinked
    names = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    command = [sys.executable, "-c", BATCH.replace("import sys", LOGS), str(cluster.directory.root), "0"]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, env={**os.environ, **names}, start_new_session=True, stdout=output, stderr=output
        ) as batch,
    ):
        try:
            wait_until("another try to read", lambda: "plan.json" in log.read_text(), LIMIT_S)
            hidden.rename(cluster.directory.plan_file)
            wait_until("another try to write", lambda: "outcome.json" in log.read_text(), LIMIT_S)
            cluster.directory.outcome_file.rmdir()
            wait_until("supervisor", lambda: find(cluster.directory.epochs), LIMIT_S)
        finally:
            os.killpg(batch.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", ["plan_file", "allocation_file", "secret_file"])
def test_an_agent_begins_once_its_run_can_be_read(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node would be lost to the run. What is damaged is told at once."""
    cluster = Cluster(root)
    cluster.allocation.save(cluster.directory)
    path = getattr(cluster.directory, name)
    hidden, content = root / "hidden", path.read_bytes()
    path.rename(hidden)
    monkeypatch.setattr(reading, "PAUSES_S", (0.0,))
    monkeypatch.setattr(time, "sleep", lambda seconds: hidden.exists() and hidden.rename(path))
    monkeypatch.setattr(real_io, "node_agent", lambda *words: words)
    with pytest.raises(AttributeError, match="run"):  # of what stands for an agent
        asyncio.run(real_io.serve(cluster.directory, "n1", None))
    assert not hidden.exists()
    assert path.read_bytes() == content
    path.write_bytes(b"{")
    reads: dict[str, Callable[[], object]] = {
        "plan_file": cluster.directory.own_plan, "secret_file": cluster.directory.secret,
        "allocation_file": partial(Allocation.load, cluster.directory),
    }  # fmt: skip
    with pytest.raises(RunDirectoryError):
        reading.to_begin(reads[name])
