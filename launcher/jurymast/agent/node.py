"""What an agent finds on its node, and what it tells its ranks about it."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from subprocess import DEVNULL

from jurymast.core.settings import RunPlan
from jurymast.foreign import check_private
from jurymast.wire.addresses import ADDRESS_VARIABLE, interface_of

# The nodes of an attempt, for ranks of a batch script: some take the first for where rank 0 is.
SLURM_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
TEMPORARY_PREFIX = "jurymast-agent-"


def own_temporary_directory() -> tuple[Path, int]:
    """A new directory for this agent, with the descriptor of the lock that says it lives."""
    while True:
        own = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return own, lock
        os.close(lock)  # another agent that starts now took it for one that was left behind


def remove_abandoned() -> None:
    """Temporary directories of this user's agents that were killed. Best effort: it may take long, and what
    cannot be removed stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            check_private(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or not an agent's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not by Python, which nested directories take beyond its limit.
            subprocess.run(["rm", "-rf", "--", path], stdin=DEVNULL, stderr=DEVNULL, check=False)
        except OSError:
            pass  # its agent lives
        finally:
            os.close(lock)


def host_plan(plan: RunPlan, run_directory: Path, temporary: Path) -> dict[str, object]:
    """For the torchrun host: see `worker.elastic.serve`."""
    return {
        "run": plan.run, "nodes": plan.nodes, "ranks": plan.ranks_per_node,
        "script": plan.script, "arguments": plan.arguments, "module": plan.module,
        "directory": plan.working_directory, "run_directory": str(run_directory),
        "temporary": str(temporary), "grace_s": plan.settings.stop_grace_s,
        "warm": plan.settings.warm_start, "batch": plan.batch, "tasks": plan.tasks,
        "program": plan.program, "gpus": plan.gpus_per_task,
    }  # fmt: skip


def rank_environment(
    plan: RunPlan, run_directory: Path, node: str, temporary: Path, address: str
) -> dict[str, str]:
    """For the ranks of this node, which other nodes reach at `address`."""
    settings = plan.settings
    values = {
        "JURYMAST_RUN": plan.run,
        "JURYMAST_RUN_DIR": str(run_directory),
        "JURYMAST_NODE": node,
        ADDRESS_VARIABLE: address,
        "JURYMAST_KEEP": str(settings.keep),
        "JURYMAST_USER_TMPDIR": os.environ.get("TMPDIR", ""),
        "TMPDIR": str(temporary),
    }
    # When the Checkpointer saves, if the policy says it; else the attempt's MTBF does.
    if settings.cadence_steps is not None:
        values["JURYMAST_CADENCE_STEPS"] = str(settings.cadence_steps)
    if settings.cadence_s is not None:
        values["JURYMAST_CADENCE_S"] = str(settings.cadence_s)
    if plan.ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = "1"  # as torchrun does
    interface = interface_of(address)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo resolves the host's name, which need not be the address that the other nodes reach.
        values["GLOO_SOCKET_IFNAME"] = interface
    return values


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`; "" when there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
