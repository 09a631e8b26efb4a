"""Finds what an agent needs on its node, and makes its ranks' environment."""

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

# The nodes of an attempt, for ranks of a batch script: some scripts take the first for rank 0's node.
SLURM_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
TEMPORARY_PREFIX = "jurymast-agent-"


def own_temporary_directory() -> tuple[Path, int]:
    """Create a directory for this agent. Return it with the descriptor of the lock that shows that the agent
    lives."""
    while True:
        own = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
        lock = os.open(own / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return own, lock
        os.close(lock)  # another agent that is just starting took it for an abandoned one and removed it


def remove_abandoned() -> None:
    """Remove temporary directories of this user's killed agents. Best effort: it may take long, and what
    cannot be removed stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{TEMPORARY_PREFIX}*"):
        try:
            check_private(path)
            lock = os.open(path / "lock", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or not an agent's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Not in Python, whose recursion limit deeply nested directories exceed.
            subprocess.run(["rm", "-rf", "--", path], stdin=DEVNULL, stderr=DEVNULL, check=False)
        except OSError:
            pass  # its agent is alive
        finally:
            os.close(lock)


def host_plan(plan: RunPlan, run_directory: Path, temporary: Path) -> dict[str, object]:
    """Return the torchrun host's plan: see `worker.elastic.serve`."""
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
    """Return variables for the ranks of this node, which other nodes reach at `address`."""
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
    # The Checkpointer's cadence, if the policy gives one; otherwise it follows from the attempt's MTBF.
    if settings.cadence_steps is not None:
        values["JURYMAST_CADENCE_STEPS"] = str(settings.cadence_steps)
    if settings.cadence_s is not None:
        values["JURYMAST_CADENCE_S"] = str(settings.cadence_s)
    if plan.ranks_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        values["OMP_NUM_THREADS"] = "1"  # as torchrun does
    interface = interface_of(address)
    if interface and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo resolves the host's name, which may not lead to the address that other nodes reach.
        values["GLOO_SOCKET_IFNAME"] = interface
    return values


def local_address(host: str, port: int) -> str:
    """Return this machine's address on the way to `host`, or "" if there is none. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
