"""What Slurm reports: before a submission, whether it answers and how large a partition is; afterwards, how a
job ended."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jurymast.cluster.allocation import run_command
from jurymast.core.texts import did_you_mean
from jurymast.errors import ClusterUnavailableError, UsageError

ANSWER_LIMIT_S = 60.0
# Nodes in these states run no job until an administrator acts; sinfo marks a node that does not answer with
# *.
_OUT = ("down", "drain", "fail", "future", "unk", "inval", "perfctrs", "power_down", "powered_down")


@dataclass
class Partition:
    """Node counts of a partition; `largest_job` is its MaxNodes, None if unlimited."""

    name: str
    default: bool
    up: bool
    total: int = 0
    out: int = 0
    largest_job: int | None = None


def parse_partitions(text: str) -> dict[str, Partition]:
    """Parse the lines of `sinfo -h -a -o '%P|%a|%s|%D|%T'`."""
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        if line.count("|") != 4:
            continue
        named, up, sizes, count, state = (part.strip() for part in line.split("|"))
        name = named.removesuffix("*")
        partition = partitions.setdefault(name, Partition(name, named.endswith("*"), up == "up"))
        most = sizes.rpartition("-")[2]
        partition.largest_job = int(most) if most.isdigit() else None
        nodes = int(count) if count.isdigit() else 0
        partition.total += nodes
        if state.endswith("*") or state.startswith(_OUT):
            partition.out += nodes
    return partitions


def partitions(clusters: str = "") -> dict[str, Partition]:
    """Return all partitions. Raises ClusterUnavailableError if there is no Slurm here, or it does not
    answer."""
    hint = "to run on this machine without Slurm, use --cluster local"
    for program in ("sbatch", "sinfo"):
        if shutil.which(program) is None:
            raise ClusterUnavailableError(f"there is no Slurm here: {program} is not in PATH", hint=hint)
    where = [f"--clusters={clusters}"] if clusters else []
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--all", *where, "--format=%P|%a|%s|%D|%T"],
            capture_output=True, text=True, check=False, timeout=ANSWER_LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ClusterUnavailableError(
            f"Slurm did not answer within {ANSWER_LIMIT_S:.0f} s", hint=hint
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise ClusterUnavailableError(
            f"Slurm does not answer: {said[-1] if said else 'sinfo failed'}", hint=hint
        )
    return parse_partitions(done.stdout)


def check_fits(found: dict[str, Partition], asked: str, active: int, spares: int) -> None:
    """Raise UsageError when no partition of `asked` (comma list; empty: the default) could hold the run."""
    if asked:
        names: Iterable[str] = asked.split(",")
        for name in names:
            if name not in found:
                raise UsageError(
                    f"there is no partition {name}{did_you_mean(name, found)}",
                    hint=f"partitions here: {', '.join(sorted(found)) or 'none'}",
                )
    else:
        names = [partition.name for partition in found.values() if partition.default]
    candidates = [found[name] for name in names]
    rooms = {p.name: p.total if p.largest_job is None else min(p.total, p.largest_job) for p in candidates}
    if not rooms or max(rooms.values()) >= active + spares:
        return
    best = max(candidates, key=lambda partition: rooms[partition.name])
    room = rooms[best.name]
    plural = "" if room == 1 else "s"
    counted = f"has {room} node{plural}" if room == best.total else f"allows {room} node{plural} a job"
    out = f", {best.out} of them out of service" if best.out else ""
    if room >= active:
        hint = f"the largest number that fits is --spares {room - active}"
    else:
        hint = f"--nodes {active} does not fit; without spares, at most --nodes {room} fits"
    nodes = active + spares
    raise UsageError(
        f"the run needs {nodes} node{'s' if nodes > 1 else ''} ({active} active + {spares} spare), "
        f"and partition {best.name} {counted}{out}",
        hint=hint,
    )


POLL_S = 2.0
# Slurm forgets a job five minutes after its end, so it makes no sense to wait longer for an answer.
SILENCE_LIMIT_S = 240.0
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
})  # fmt: skip


def exit_code(told: str) -> int | None:
    """The exit code of a job, from `scontrol show job --oneliner`: the highest of an array's tasks, 128 +
    number for a signal; None while a task may still run."""
    codes = []
    for line in filter(None, told.splitlines()):
        fields = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if fields.get("JobState") not in ENDED:
            return None
        code, _, number = fields.get("ExitCode", "1:0").partition(":")
        codes.append(128 + int(number) if int(number or 0) else int(code))
    return max(codes, default=None)


def wait(job: str, cluster: str = "", ask: Callable[[list[str]], str] = run_command) -> int:
    """Wait for the job's end; returns its exit code. Raises ClusterUnavailableError if Slurm does not answer
    for `SILENCE_LIMIT_S`."""
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
