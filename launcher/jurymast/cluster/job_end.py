"""Waiting for a batch script's job to end, as `sbatch --wait` does."""

from __future__ import annotations

import time
from collections.abc import Callable

from jurymast.cluster.allocation import run_command
from jurymast.errors import ClusterUnavailableError

POLL_S = 2.0
# Slurm forgets a job five minutes after its end; who cannot be asked for so long is not waited for.
SILENCE_LIMIT_S = 240.0
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
})  # fmt: skip


def exit_code(told: str) -> int | None:
    """Of a job by `scontrol show job --oneliner`: the highest of an array's tasks, 128 and more for a signal;
    None while one of them may go on."""
    codes = []
    for line in filter(None, told.splitlines()):
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if fields.get("JobState") not in ENDED:
            return None
        code, _, number = fields.get("ExitCode", "1:0").partition(":")
        codes.append(128 + int(number) if int(number or 0) else int(code))
    return max(codes, default=None)


def wait(job: str, cluster: str = "", ask: Callable[[list[str]], str] = run_command) -> int:
    """The job's exit code, once it has ended. Raises ClusterUnavailableError when Slurm cannot be asked."""
    where = [f"--clusters={cluster}"] if cluster else []
    silent_since = None
    while True:
        try:
            code = exit_code(ask(["scontrol", *where, "show", "job", job, "--oneliner"]))
            silent_since = None
        except ClusterUnavailableError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() > silent_since + SILENCE_LIMIT_S:
                raise
            code = None
        if code is not None:
            return code
        time.sleep(POLL_S)
