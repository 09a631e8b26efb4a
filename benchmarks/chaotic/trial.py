"""One trial: a run is submitted, struck as its plan says, watched to its end, and everything that tells of it
is kept in a folder of its own: plan, log of the faults, journal, logs, report, Slurm's words, verdict."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.chaotic.checker import Facts, load, wrong
from benchmarks.chaotic.faultlog import write_log
from benchmarks.chaotic.nemesis import Nemesis, Places
from benchmarks.chaotic.plans import SAVE_EVERY, STEP_S, Plan
from jurymast.core.state.run import ENDED, Role
from jurymast.report.which_run import find_run
from support.ranks import run_script
from support.runs import ROOT, SCRIPTS, result
from support.slurm_runs import SlurmRun, jurymast
from testcluster import Cluster, ClusterError
from testcluster.errors import DeadlineError
from testcluster.processes import wait_until
from testcluster.settings import USER

LIMIT_S = 600.0
LEFT_S = 240.0  # a job that was preempted as its run ended is pending for two minutes, and then ends at once
SHARE_MIB = 1024
GRACE_S = 8
_SCRIPT = SCRIPTS / "train_tiny.py"
# Only what the cluster's user owns is a run's.
_DISKS = ("/tmp", "/scratch", "/dev/shm")
_OF_KILLED = "pymp-", "torch_", "jurymast-agent-"
_LOG_BYTES = 400_000


def conf(nodes: int) -> tuple[str, ...]:
    """Lines of slurm.conf: partitions that preempt and are preempted."""
    every = ",".join(f"n{number}" for number in range(1, nodes + 1))
    return (
        "KillWait=5",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"PartitionName=low Nodes={every} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} State=UP",
        f"PartitionName=high Nodes={every} PriorityTier=9 PreemptMode=OFF State=UP",
    )


@dataclass
class Stage:
    """A cluster with the file systems that trials use, and what undisturbed runs end with."""

    cluster: Cluster
    share: Path  # checkpoints, at the same path everywhere
    runs: Path
    hosts_share: Path  # the same, as this host reaches them
    hosts_runs: Path
    release: str
    scratch: Path
    revision: str
    _weights: dict[tuple[int, int], str] = field(default_factory=dict)

    def undisturbed(self, plan: Plan) -> str:
        """The weights of the same training without us and without a fault."""
        key = plan.active, plan.steps
        if key not in self._weights:
            out = self.scratch / f"undisturbed-{plan.active}-{plan.steps}.json"
            words = ("--steps", str(plan.steps), "--save-every", "never", "--out", str(out))
            run_script(_SCRIPT, plan.active, *words, folder=self.scratch)
            self._weights[key] = str(result(out)["sha256"])
        return self._weights[key]


@contextmanager
def stage(cluster: Cluster, scratch: Path) -> Iterator[Stage]:
    """Give the cluster two file systems that can be made to hang."""
    scratch.mkdir(parents=True, exist_ok=True)
    share, runs = cluster.shared / "chaos-checkpoints", cluster.shared / "chaos-runs"
    for place in (share, runs):
        place.mkdir(exist_ok=True)
    with (
        cluster.small_share(share, SHARE_MIB, image=scratch / "checkpoints.img") as hosts_share,
        cluster.small_share(runs, SHARE_MIB, image=scratch / "runs.img") as hosts_runs,
    ):
        release = cluster.login(["sinfo", "--version"]).stdout.strip()
        yield Stage(cluster, share, runs, hosts_share, hosts_runs, release, scratch, _revision())


def _revision() -> str:
    """As git names this checkout, with "-dirty" if it was changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def play(at: Stage, plan: Plan, folder: Path) -> list[str]:
    """Play a plan, keep the evidence in `folder`, and return what is wrong."""
    began = time.monotonic()
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(f"{plan.to_json()}\n")
    inside, job, orders, out = _submitted(at, plan, folder.name)
    run = SlurmRun(at.cluster, at.hosts_runs / inside.relative_to(at.runs), job)
    places = Places(at.hosts_share, at.hosts_runs, at.hosts_share / folder.name, orders, inside)
    nemesis = Nemesis(at.cluster, run, plan, places)
    state = nemesis.play(LIMIT_S)
    left = _left(at, run) if state.ended else []
    facts = Facts(
        weights=str(result(out)["sha256"]) if out.exists() else None, undisturbed=at.undisturbed(plan),
        ended=state.phase in ENDED, left=left, slurm=at.release, seconds=round(time.monotonic() - began, 1),
        load=round(os.getloadavg()[0], 1), revision=at.revision,
    )  # fmt: skip
    _keep(at, run, inside, folder)
    write_log(folder / "faults.jsonl", nemesis.log)
    (folder / "facts.json").write_bytes(msgspec.json.format(msgspec.json.encode(facts)))
    _clear(at)
    found = wrong(load(folder))
    (folder / "verdict.json").write_text(json.dumps({"wrong": found}, indent=1))
    return found


def _submitted(at: Stage, plan: Plan, name: str) -> tuple[Path, int, Path, Path]:
    cluster = at.cluster
    orders = cluster.shared / f"{name}.orders"
    shutil.rmtree(orders, ignore_errors=True)
    orders.mkdir()
    orders.chmod(0o777)
    tiers: dict[str, object] = {} if plan.peer else {"peer": False}
    if plan.local:
        tiers["local"] = {"path": "/scratch"}
    if plan.shared_s:
        tiers["shared"] = {"every": f"{plan.shared_s:g}s"}
    policy = cluster.shared / f"{name}.yaml"
    values: dict[str, object] = {"health": {"straggler": "off"}}
    if plan.silent_s:
        values["detect"] = {"node_lost_after": f"{plan.silent_s:g}s"}
    policy.write_text(json.dumps({**values, **({"checkpoint": {"tiers": tiers}} if tiers else {})}))
    policy.chmod(0o644)
    out = cluster.shared / f"{name}.json"
    out.unlink(missing_ok=True)
    train = [
        "--steps", str(plan.steps), "--step-time", str(STEP_S), "--save-every", f"{SAVE_EVERY} steps",
        "--orders", str(orders), "--checkpoints", str(at.share / name), "--out", str(out),
    ]  # fmt: skip
    train += ["--loader"] if plan.loader else []
    train += ["--in-process"] if plan.in_process else []
    options = ("--nodes", str(plan.active), "--spares", str(plan.spares), "--partition", "low")
    inside, job = _submit(at, at.runs / name, *options, "--policy", str(policy), train=train)
    return inside, job, orders, out


def _submit(at: Stage, runs: Path, *options: str, train: list[str]) -> tuple[Path, int]:
    """Return the run's directory, as the cluster knows it, and its job."""
    code, told, error = jurymast(
        at.cluster, "submit", "--runs", str(runs), "--parsable", *options, "--", str(_SCRIPT), *train
    )
    if code != 0:
        raise ClusterError(f"submit: {error}")
    seen = at.hosts_runs / runs.relative_to(at.runs)
    return runs / find_run(told.strip(), seen).root.name, int(told)


def _left(at: Stage, run: SlurmRun) -> list[str]:
    """What the run leaves behind, once its job is over, and the next run has removed what is for it."""
    cluster = at.cluster

    def over() -> bool:
        return not [job for job in cluster.squeue() if job.id == run.job] and not cluster.leftovers()

    with suppress(DeadlineError):
        wait_until(over, LEFT_S, "the end of the job", 1.0)
    for name in _for_the_next(at, run):
        _run_next(at, run, name)
    found = cluster.leftovers()
    for name in _alive(cluster):
        found += [f"{name}: port {port} is open" for port in _ports(cluster, name)]
        found += _files(cluster, name)
    return found + [f"{name} on shared storage" for name in _unfinished(at)]


def _for_the_next(at: Stage, run: SlurmRun) -> list[str]:
    """The nodes on which the next run is to remove something: images on disks of nodes that have no agent of
    the run any more, as after a requeue; and on any node an unfinished write whose process died as the run
    ended."""
    alive, nodes = _alive(at.cluster), run.state().nodes
    without = [name for name in alive if name not in nodes or nodes[name].role is Role.FAILED]
    images = [name for name in without if _files(at.cluster, name)]
    return images or (alive[:1] if _unfinished(at) else [])


def _run_next(at: Stage, run: SlurmRun, name: str) -> None:
    """Have a run of one step on the node, once it is repaired, with the policy and the folders of the run
    before."""
    folder = run.directory.root.parent.name
    policy = str(at.cluster.shared / f"{folder}.yaml")
    options = ("--nodes", "1", "--spares", "0", "--partition", "low", "--nodelist", name, "--policy", policy)
    train = ["--steps", "1", "--checkpoints", str(at.share / folder)]
    jurymast(at.cluster, "nodes", "--runs", str(at.runs / folder), "--forgive", name)
    _, job = _submit(at, at.runs / folder, *options, train=train)
    # It fails where the only checkpoint was damaged.
    at.cluster.wait_job(job, "COMPLETED", "FAILED", deadline_s=LEFT_S)


def _alive(cluster: Cluster) -> list[str]:
    return [name for name in cluster.nodes if cluster.machine(name).alive]


def _unfinished(at: Stage) -> list[str]:
    return [path.name for path in at.hosts_share.glob("*/.writing-*")]


def _ports(cluster: Cluster, name: str) -> list[int]:
    """At which the cluster's user listens."""
    uid = pwd.getpwnam(USER).pw_uid
    table = Path(f"/proc/{cluster.machine(name).init}/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in table]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and int(row[7]) == uid]


def _files(cluster: Cluster, name: str) -> list[str]:
    """But for what a rank of Python's that was killed leaves itself, and an agent, which the next one on the
    node removes."""
    found = []
    for disk in _DISKS:
        place = cluster.machine(name).path(disk)
        with suppress(OSError):
            of_users = [path.name for path in place.iterdir() if _is_users(path)]
            found += [f"{name}: {disk}/{file}" for file in of_users if not file.startswith(_OF_KILLED)]
    return found


def _is_users(path: Path) -> bool:
    """Whether it is a file of the cluster's user, or a directory in which there are some."""
    files = any(below.is_file() for below in path.rglob("*")) if path.is_dir() else True
    return path.lstat().st_uid != 0 and files


def _keep(at: Stage, run: SlurmRun, inside: Path, folder: Path) -> None:
    unwanted = shutil.ignore_patterns("checkpoints", "reserve")
    shutil.copytree(run.directory.root, folder / "run", ignore=unwanted, symlinks=True)
    (folder / "run").chmod(0o700)
    code, told, error = jurymast(at.cluster, "report", "--json", str(inside))
    (folder / "report.json").write_text(told) if code == 0 else (folder / "report.error").write_text(error)
    with suppress(ClusterError):
        (folder / "job.json").write_text(json.dumps(at.cluster.job(run.job), indent=1))
    for log in at.cluster.layout.log.glob("slurm*.log"):
        (folder / log.name).write_bytes(log.read_bytes()[-_LOG_BYTES:])


def _clear(at: Stage) -> None:
    at.cluster.repair_all()
    for place in (at.hosts_share, at.hosts_runs):
        for entry in place.iterdir():
            if entry.name != "lost+found":
                shutil.rmtree(entry, ignore_errors=True)
