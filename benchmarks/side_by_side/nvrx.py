"""NVIDIA's resiliency extension in a virtual environment of its own: its pins are not ours to live with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks import common
from benchmarks.side_by_side.systems import NVRX_VERSION, nvrx_python
from testcluster import Cluster, ClusterError

INSTALL_LIMIT_S = 1200.0
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = "import nvidia_resiliency_ext.fault_tolerance.launcher"


def ready(cache: Path) -> bool:
    """Whether a finished installation is there."""
    return _marker(cache).exists()


def install(cache: Path) -> str:
    """Make the environment unless it is there; returns why it could not be made, or ""."""
    if ready(cache):
        return ""
    python = nvrx_python(cache)
    common.progress(f"installing nvidia-resiliency-ext {NVRX_VERSION} into {python.parents[1]}")
    made = _run([sys.executable, "-m", "venv", "--clear", str(python.parents[1])])
    if made:
        return made
    # The same torch as ours. A build without CUDA has its own index, where pip does not know the build.
    exact = f"torch=={common.version('torch')}"
    public = f"torch=={common.public_version('torch')}"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    rest = [f"nvidia-resiliency-ext=={NVRX_VERSION}", "numpy"]
    for attempt in ([exact], [exact, "--extra-index-url", CPU_INDEX], [public]):
        failed = _run([*pip, *attempt, *rest])
        if not failed:
            _marker(cache).touch()
            return ""
    return f"could not be installed: {failed}"


def usable(cluster: Cluster, cache: Path) -> str:
    """Why the unprivileged user of the cluster cannot run it, or ""."""
    try:
        cluster.login([str(nvrx_python(cache)), "-W", "ignore", "-c", IMPORTS])
    except ClusterError as error:
        return f"could not be run on the cluster: {str(error)[-240:]}"
    return ""


def _marker(cache: Path) -> Path:
    return nvrx_python(cache).parents[1] / ".complete"


def _run(command: list[str]) -> str:
    """The last line of what a failed command said; "" when it went well."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False, umask=0o022
        )
    except subprocess.TimeoutExpired:
        return f"no end after {INSTALL_LIMIT_S:g} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or ["pip failed"])[-1][-240:]
