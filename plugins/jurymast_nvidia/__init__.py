"""Health probe: NVIDIA GPUs, through nvidia-ml-py (`pynvml`) and the driver's libnvidia-ml.so.1."""

from __future__ import annotations

import jurymast  # noqa: F401 - first: by hand, this may run in anybody's directory

# isort: split
from collections.abc import Sequence
from pathlib import Path

from jurymast.health.probe import HOST, Context, Finding, Probe, Verdict

NAME = "nvidia"
AMD_DRIVER = Path("/dev/kfd")


def probe(context: Context) -> Probe | None:
    """Return the probe; None if this machine has no GPU to see. If GPUs were granted but cannot be seen,
    returns a probe that reports that."""
    try:
        from jurymast_nvidia import nvml
        from jurymast_nvidia.watch import NvidiaProbe
    except ModuleNotFoundError as error:
        if error.name != "pynvml":
            raise
        return _unseen(context, "nvidia-ml-py is not installed: pip install 'jurymast[nvidia]'")
    try:
        nvml.start()
        opened = NvidiaProbe(context)
    except nvml.NvmlError as error:
        problem = nvml.problem_of(error, "nvmlInit")
        if problem is None or problem.verdict is Verdict.UNKNOWN:
            return _unseen(context, f"NVIDIA's library does not start: {error}")
        return _Unseen(problem.code, problem.verdict, problem.kind, problem.message)
    if not opened.gpus and not opened.expected:
        opened.close()
        return None
    return opened


def _unseen(context: Context, why: str) -> Probe | None:
    if not context.gpus or AMD_DRIVER.exists():
        return None
    message = f"{context.gpus} GPUs were granted here, but they cannot be checked: {why}"
    return _Unseen("gpus-unseen", Verdict.UNKNOWN, HOST, message)


class _Unseen:
    """Reports one finding: why the GPUs cannot be seen."""

    name = NAME
    interval_s = 15.0

    def __init__(self, code: str, verdict: Verdict, kind: str, message: str) -> None:
        self._said = (code, verdict, kind, message)
        self._since = 0.0

    def look(self, now: float) -> Sequence[Finding]:
        self._since = self._since or now
        code, verdict, kind, message = self._said
        return [Finding(probe=NAME, code=code, verdict=verdict, kind=kind, message=message, at=self._since)]

    def close(self) -> None:
        return None
