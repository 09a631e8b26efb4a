"""The launchers that are compared, each as its users start it: what is submitted, and what it says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common
from jurymast.report.which_run import find_run
from testcluster import Cluster

ACTIVE = 3
TRAIN = Path(__file__).resolve().with_name("train.py")
TRAIN_CHECKPOINTER = TRAIN.with_name("train_checkpointer.py")
TRAIN_IN_PROCESS = TRAIN.with_name("train_in_process.py")
STEP_S = 0.05
SAVE_EVERY = 3
TRAIN_ARGUMENTS = ("--step-time", str(STEP_S), "--save-every", str(SAVE_EVERY))
# gloo must find the nodes' interface, and one thread a rank is what a small machine can bear.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
RESTARTS = 1000
# In place, before torchrun gives up and the job is requeued: what torchrun's users commonly set.
REQUEUE_RESTARTS = 3
PORT = 29400
SAID_CHARACTERS = 240
# Without it torchrun restarts meet the keys of the attempt before, and often fail for good.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

NVRX_VERSION = "0.4.1"
# Of a failed job's output: the exception that ended a launcher or a rank, not what Slurm says about it.
TELLING = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception|Timeout)\b|\w+ timeout")
SLURMS_OWN = ("srun: ", "slurmstepd: ")
JURYMAST, IN_PROCESS, REFILL, TORCHRUN, TORCHRUN_OWN_STORE, REQUEUE, NVRX = (
    "jurymast", "in-process", "refill", "torchrun", "torchrun-own-store", "requeue", "nvrx",
)  # fmt: skip
WITH_REFILL = "nodes_policy: {refill: on}"


@dataclass(frozen=True)
class Place:
    """Where one trial's training runs: its folder on shared storage, and how many spare nodes it has."""

    folder: Path
    spares: int

    @property
    def record(self) -> Path:
        return self.folder / "record"

    @property
    def output(self) -> Path:
        return self.folder / "job.out"

    def command(self, script: Path = TRAIN) -> list[str]:
        """The training script with its arguments: the same for every launcher."""
        checkpoint = self.folder / "checkpoint.pt"
        return [str(script), *TRAIN_ARGUMENTS, "--record", str(self.record), "--checkpoint", str(checkpoint)]


@dataclass(frozen=True)
class Started:
    """A submitted training. `logs` are searched for what it said when it did not recover."""

    job: int
    logs: tuple[Path, ...]
    run: Path | None = None  # jurymast's run directory


@dataclass(frozen=True)
class System:
    """A launcher. `key` is what `--systems` takes, `label` what a row shows.

    `instead_of`: only tried in a case in which that other system has not recovered yet.
    `without_spare`, `with_spare`: why it has no row in a case without a spare, or with one; else empty.
    """

    key: str
    label: str
    submit: Callable[[Cluster, Place], Started]
    instead_of: str = ""
    without_spare: str = ""
    with_spare: str = ""


def systems(cache: Path) -> list[System]:
    """All of them, in the order in which every round goes through them; jurymast first."""
    torchrun = f"torchrun {common.public_version('torch')}"
    lost = (
        "not run: without a spare torchrun only waits for a node that nobody brings;"
        f" see sbatch --requeue + {torchrun}"
    )
    return [
        System(JURYMAST, common.JURYMAST, submit_jurymast(TRAIN)),
        System(IN_PROCESS, f"{common.JURYMAST} in process", submit_jurymast(TRAIN_IN_PROCESS)),
        System(
            REFILL, f"{common.JURYMAST} with refill", submit_jurymast(TRAIN_CHECKPOINTER, WITH_REFILL),
            with_spare="not run: the spare takes the place of what was lost",
        ),
        System(TORCHRUN, torchrun, submit_torchrun({}), without_spare=lost),
        System(
            TORCHRUN_OWN_STORE, f"{torchrun} {OWN_STORE}=1", submit_torchrun({OWN_STORE: "1"}),
            instead_of=TORCHRUN, without_spare=lost,
        ),
        System(REQUEUE, f"sbatch --requeue + {torchrun}", submit_requeue),
        System(NVRX, f"nvrx {NVRX_VERSION}", submit_nvrx(nvrx_python(cache))),
    ]  # fmt: skip


def nvrx_python(cache: Path) -> Path:
    """The Python of NVRx's own virtual environment."""
    return cache / f"nvrx-{NVRX_VERSION}" / "bin" / "python"


def submit_jurymast(script: Path, policy: str = "") -> Callable[[Cluster, Place], Started]:
    """`jurymast submit` with its defaults, or with what this policy says, of this training."""

    def submit(cluster: Cluster, place: Place) -> Started:
        runs = place.folder / "runs"
        command = [str(cluster.python.parent / "jurymast"), "submit", "--runs", str(runs), "--parsable"]
        command += ["--nodes", str(ACTIVE), "--spares", str(place.spares)]
        if policy:
            file = place.folder / "policy.yaml"
            file.write_text(f"{policy}\n")
            command += ["--policy", str(file)]
        command += ["--", *place.command(script)]
        told = cluster.login(command, env=ENVIRONMENT, cwd=place.folder).stdout
        job = told.strip()
        run = find_run(job, runs).root
        return Started(int(job), tuple((run / part) for part in ("slurm", "logs")), run)

    return submit


# srun's options keep one node's end from ending the other nodes' tasks.
IN_ALLOCATION = """#!/bin/bash
#SBATCH --no-kill
#SBATCH --ntasks-per-node=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --no-kill --kill-on-bad-exit=0 --wait=0 --overlap \\
    {launcher} --nnodes={active}:{active} --nproc-per-node=1 --max-restarts={restarts} \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:{port}" {command}
"""


def in_allocation(launcher: str, place: Place) -> str:
    """A batch script that starts a torchrun-like launcher on every node; those beyond `ACTIVE` wait."""
    return IN_ALLOCATION.format(
        launcher=launcher, active=ACTIVE, restarts=RESTARTS, port=PORT, command=shlex.join(place.command())
    )


# What sites write by hand: any end but a good one puts the job back; a lost node makes Slurm itself do so.
REQUEUED = """#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 \\
    {launcher} --nnodes={active} --nproc-per-node=1 --max-restarts={restarts} \\
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$head:{port}" {command} \\
    || scontrol requeue "$SLURM_JOB_ID"
"""


def requeued(launcher: str, restarts: int, place: Place) -> str:
    """A batch script that has Slurm start it again; `restarts` are the launcher's own, before that."""
    return REQUEUED.format(
        launcher=launcher, active=ACTIVE, restarts=restarts, port=PORT, command=shlex.join(place.command())
    )


def sbatch(cluster: Cluster, place: Place, script: str, nodes: int, environment: dict[str, str]) -> Started:
    """Submit a batch script as the unprivileged user."""
    options = [f"--nodes={nodes}", f"--output={place.output}", f"--chdir={place.folder}"]
    job = cluster.sbatch(script, *options, env={**ENVIRONMENT, **environment})
    return Started(job, (place.output,))


def submit_torchrun(environment: dict[str, str]) -> Callable[[Cluster, Place], Started]:
    """torchrun, with the spare's own waiting to be let in."""

    def submit(cluster: Cluster, place: Place) -> Started:
        script = in_allocation(f"{cluster.python} -m torch.distributed.run", place)
        return sbatch(cluster, place, script, ACTIVE + place.spares, environment)

    return submit


def submit_requeue(cluster: Cluster, place: Place) -> Started:
    """torchrun on the active nodes only: other nodes of the cluster idle, and Slurm takes one of them."""
    script = requeued(f"{cluster.python} -m torch.distributed.run", REQUEUE_RESTARTS, place)
    return sbatch(cluster, place, script, ACTIVE, {})


def submit_nvrx(python: Path) -> Callable[[Cluster, Place], Started]:
    """ft_launcher with its defaults, the spare's own waiting; without a spare, Slurm requeues."""
    launcher = f"{python.parent / 'ft_launcher'} --ignore-missing-fault-tol-cfg"

    def submit(cluster: Cluster, place: Place) -> Started:
        script = in_allocation(launcher, place) if place.spares else requeued(launcher, RESTARTS, place)
        return sbatch(cluster, place, script, ACTIVE + place.spares, {})

    return submit


def said(logs: tuple[Path, ...]) -> str:
    """The last line of the logs that looks like a complaint, else the last line; cut to fit into a note."""
    lines: list[str] = []
    for place in logs:
        files = [place] if place.is_file() else sorted(place.rglob("*")) if place.is_dir() else []
        for file in files:
            if file.is_file() and file.suffix in (".out", ".log", ".err", ""):
                lines += file.read_text(errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip() and not line.startswith(SLURMS_OWN)]
    telling = [line for line in lines if re.match(TELLING, line)]
    return (telling or lines or [""])[-1][:SAID_CHARACTERS]


def own_story(started: Started) -> dict[str, Any] | None:
    """jurymast's own account of its last incident, with the time each part took; None for others."""
    if started.run is None:
        return None
    from jurymast.journal import replay
    from jurymast.rundir import RunDirectory

    incidents = replay(RunDirectory(started.run)).incidents
    if not incidents:
        return None
    told = incidents[-1].to_json()
    kept = {key: told[key] for key in ("cause", "action", "seconds", "reason")}
    return {**kept, "recovered": incidents[-1].recovered_at is not None}
