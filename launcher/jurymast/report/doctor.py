"""Checks whether this site is ready, and the node on which a script runs. Each check that fails says what to
do."""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from jurymast import foreign, programs
from jurymast.cluster.verdicts import seal
from jurymast.errors import ClusterUnavailableError, RunDirectoryError
from jurymast.interpreter import run_code
from jurymast.jobs import run_command, utc_time
from jurymast.report.status import read_status
from jurymast.report.text import Block, Line, Table, count
from jurymast.rundir import RunDirectory

COMMANDS = ("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
OLDEST_SLURM = (22, 5)
OLDEST_TORCH = (2, 6)
CLOCKS_AGREE_S = 2.0
SPOOL_MODE = 0o1733
# Seconds that the last checkpoint may need once Slurm ends a job.
LEAST_KILL_WAIT_S = 30
SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "wekafs", "pvfs", "orangefs", "cifs")

YES, NO, NOTE = "yes", "no", "note"


@dataclass(frozen=True)
class DoctorCheck:
    """The result of one check. `answer`: yes, no (something has to be done), or note (it works, but less
    well, or could not be checked)."""

    name: str
    answer: str
    found: str
    todo: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"check": self.name, "answer": self.answer, "found": self.found, "todo": self.todo or None}


# What a check finds: the answer, what was found, and what to do about it if there is something.
Found = tuple[str, ...]
UNSEEN: Found = (NOTE, "not known: Slurm does not answer")


def examine(runs: Path, spool: Path, newest: Sequence[str] = ()) -> Iterator[DoctorCheck]:
    """Run all checks, in the order in which problems should be solved. `newest`: names of this user's newest
    runs."""
    missing = [name for name in COMMANDS if programs.located(name) is None]
    conf: dict[str, str] = {}
    if missing:
        yield DoctorCheck(
            "slurm commands", NO, f"not in PATH: {', '.join(missing)}",
            "install Slurm's commands here or load their module; without Slurm only --cluster local works",
        )  # fmt: skip
    else:
        conf, trouble = slurm_conf()
        yield DoctorCheck("slurm", *_slurm(conf, trouble))
    yield DoctorCheck("runs directory", *_runs_directory(runs))
    for place in sorted({one for name in newest if (one := _checkpoints(runs / name))}):
        if others := foreign.who_may_change(place):
            yield DoctorCheck(
                "checkpoints", NOTE, f"{others} can replace what is in {place}, to which your runs save",
                "yours alone are restored, but saves may fail: use a directory in which only you can write",
            )  # fmt: skip
    yield DoctorCheck("torch", *_torch())
    yield DoctorCheck("gpu library", *_gpu_library())
    yield DoctorCheck("munge", *_munge(needed=bool(conf)))
    of_slurm: dict[str, Callable[[dict[str, str]], Found]] = {
        "requeue": _requeue, "give nodes back": _shrink, "time to save": _kill_wait,
        "lost nodes": _node_timeout, "drain": _drain, "health check": _health_check,
    }  # fmt: skip
    for name, check in of_slurm.items():
        yield DoctorCheck(name, *(check(conf) if conf else UNSEEN))
    yield DoctorCheck("verdicts", *_spool(spool))
    yield DoctorCheck("clocks", *(_clock() if conf else UNSEEN))


def slurm_conf() -> tuple[dict[str, str], str]:
    """Return ({key: value}, "") or ({}, why it is not known)."""
    try:
        told = run_command(["scontrol", "show", "config"])
    except ClusterUnavailableError as error:
        return {}, str(error)
    pairs = (line.split("=", 1) for line in told.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}, ""


def _slurm(conf: dict[str, str], trouble: str) -> Found:
    if not conf:
        return NO, trouble, "is slurmctld up, and is SLURM_CONF right? try: scontrol ping"
    version = conf.get("SLURM_VERSION", "")
    if _numbers(version) < OLDEST_SLURM:
        return NOTE, version, "the oldest version that jurymast is tested with is 22.05"
    return YES, f"{version}, cluster {conf.get('ClusterName', '?')}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _runs_directory(runs: Path) -> Found:
    place = runs
    while not foreign.exists(place) and place != place.parent:
        place = place.parent
    try:
        probe = RunDirectory(place / f".jurymast-doctor-{secrets.token_hex(4)}")
        probe.unmake(probe.create())
    except (RunDirectoryError, OSError) as error:
        return NO, str(error), "choose another with --runs DIR or JURYMAST_RUNS"
    if place == runs and (others := foreign.who_may_change(place)):
        found = f"{others} can replace what is in {place}, and with it your runs"
        return NO, found, "choose another with --runs DIR or JURYMAST_RUNS"
    kind = filesystem(place)
    found = f"{runs} can be written, on {kind or 'an unknown file system'}"
    if not kind.startswith(SHARED):
        return (
            NOTE, found,
            "make sure that every node sees the same directory; a supervisor that takes over needs it",
        )  # fmt: skip
    return YES, found


def _checkpoints(run: Path) -> Path | None:
    """The directory outside the run's own to which it saves; None if there is none, or it is not known."""
    try:
        place = read_status(RunDirectory(run)).state.checkpoints
    except RunDirectoryError:
        return None
    return Path(place) if place and foreign.is_directory(place) else None


def filesystem(path: Path) -> str:
    """The type of the file system of `path`; "" if the kernel does not say."""
    # Of two mounts at the same place, the later one is seen.
    mounts = reversed(psutil.disk_partitions(all=True))
    above = [mount for mount in mounts if path.absolute().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else ""


def _torch() -> Found:
    """Reads the package's metadata: importing torch takes seconds."""
    python = f"{sys.executable} (Python {sys.version_info.major}.{sys.version_info.minor})"
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        todo = "pip install torch beside jurymast, where all nodes see it"
        return NO, f"not installed in {python}", todo
    if _numbers(version) < OLDEST_TORCH:
        return NO, f"{version} in {python}", "torch 2.6 or newer is needed"
    if closed := closed_above(Path(sys.executable)):
        found = f"{python} is below {closed}, which other users cannot enter"
        return NO, found, "install it where the nodes and other users can read it"
    return YES, f"{version} in {python}"


def closed_above(path: Path) -> Path | None:
    """The first directory above `path` that is another user's and that only its owner may enter; None if
    there is none."""
    for directory in reversed(path.parents):
        status = foreign.status(directory)
        if not status.st_mode & stat.S_IXOTH and status.st_uid != os.getuid():
            return directory
    return None


def _gpu_library() -> Found:
    """Login nodes seldom have the library; the nodes matter."""
    code = "import pynvml as p; p.nvmlInit(); print(p.nvmlSystemGetDriverVersion(), p.nvmlDeviceGetCount())"
    try:
        done = programs.run(run_code(code), capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return NO, "NVML does not answer", "the driver hangs: reboot this machine"
    if done.returncode == 0:
        driver, gpus = done.stdout.split()
        return YES, f"driver {driver}, {count(int(gpus), 'GPU')} here"
    what = "pynvml is not installed" if "No module" in done.stderr else "no NVIDIA driver on this machine"
    return NOTE, what, "on the GPU nodes: pip install 'jurymast[nvidia]', then srun jurymast health"


def _munge(*, needed: bool) -> Found:
    try:
        seal("doctor")
    except ClusterUnavailableError as error:
        todo = "start munged, or install munge's commands; only nodes_policy.bad: drain needs them"
        return NO if needed else NOTE, str(error), todo
    return YES, "makes credentials"


def _requeue(conf: dict[str, str]) -> Found:
    allowed = conf.get("JobRequeue", "1") == "1"
    found = f"JobRequeue={conf.get('JobRequeue', '?')}"
    return YES, found + ("" if allowed else "; jurymast asks for --requeue itself")


def _shrink(conf: dict[str, str]) -> Found:
    if "disable_job_shrink" in conf.get("SchedulerParameters", ""):
        return (
            NOTE, "SchedulerParameters has disable_job_shrink",
            "a bad node stays idle in the job until the job ends; remove it from slurm.conf to change this",
        )  # fmt: skip
    return YES, "a running job may give a bad node back"


def _kill_wait(conf: dict[str, str]) -> Found:
    wait_s = seconds(conf.get("KillWait", ""))
    if wait_s is None:
        return UNSEEN
    if wait_s < LEAST_KILL_WAIT_S:
        todo = f"{LEAST_KILL_WAIT_S} s or more leave time to write the last checkpoint to storage"
        return NOTE, f"KillWait={wait_s} s", todo
    return YES, f"KillWait={wait_s} s"


def _node_timeout(conf: dict[str, str]) -> Found:
    wait_s = seconds(conf.get("SlurmdTimeout", ""))
    if wait_s is None:
        return UNSEEN
    found = f"SlurmdTimeout={wait_s} s; jurymast itself detects lost nodes within seconds"
    if wait_s == 0:
        return NOTE, found, "with 0, Slurm never removes a dead node from the job"
    return YES, found


def _drain(conf: dict[str, str]) -> Found:
    """How a bad node can be taken out of service."""
    if os.geteuid() == 0 or _admin_level() == "Administrator":
        return YES, "you are a Slurm administrator; runs use the site's health check nevertheless"
    if _is_ours(conf.get("HealthCheckProgram", "(null)")):
        return YES, "by the site's health check, with munge: nodes_policy.bad: drain"
    return (
        NOTE, "users may not; runs exclude bad nodes from later runs (nodes_policy.bad: exclude)",
        "ask the site to install slurm/site/healthcheck if bad nodes should be drained for everybody",
    )  # fmt: skip


def _admin_level() -> str:
    if programs.located("sacctmgr") is None:
        return ""
    try:
        command = ["sacctmgr", "--noheader", "--parsable2", "show", "user", "format=AdminLevel"]
        return run_command([*command, f"where=name={os.environ.get('USER', '')}"], limit_s=10.0).strip()
    except ClusterUnavailableError:
        return ""


def _is_ours(program: str) -> bool:
    try:
        return b"jurymast" in Path(program).read_bytes()[:4096] or "jurymast" in program
    except OSError:
        return "jurymast" in program


def _health_check(conf: dict[str, str]) -> Found:
    program, every = (conf.get(f"HealthCheck{key}", "(null)") for key in ("Program", "Interval"))
    if program == "(null)":
        return NOTE, "HealthCheckProgram is not set", "see slurm/site/README.md"
    if not _is_ours(program):
        return NOTE, f"{program} is not jurymast's", "have it also call slurm/site/healthcheck"
    if seconds(every) == 0:
        return NO, f"{program}, HealthCheckInterval=0", "set HealthCheckInterval=300"
    if not os.access(program, os.X_OK):
        return NOTE, f"{program} is not on this machine", "it must be on every node"
    return YES, f"{program}, every {every}"


def _spool(spool: Path) -> Found:
    try:
        status = spool.lstat()
    except OSError:
        todo = f"on every node, as root: install -d -m 1733 -o root {spool}; only drain needs it"
        return NOTE, f"{spool} is not on this machine", todo
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != 0 or mode != SPOOL_MODE:
        todo = f"as root: chown root {spool} && chmod 1733 {spool}"
        return NO, f"{spool} has mode {mode:o}, uid {status.st_uid}", todo
    return YES, f"{spool} accepts them"


def _clock() -> Found:
    """Compare the clock with the controller's: scontrol's answer ends with the time at which slurmctld
    answered."""
    try:
        before = time.time()
        told = run_command(["scontrol", "show", "config"], utc=True)
        after = time.time()
        match = re.search(r"Configuration data as of (\S+)", told)
        if match is None:
            return UNSEEN
        theirs = utc_time(match.group(1))
    except (ClusterUnavailableError, ValueError):
        return UNSEEN
    offset = theirs - min(max(theirs, int(before)), after)
    if abs(offset) > CLOCKS_AGREE_S:
        return NO, f"this machine and slurmctld differ by {offset:.0f} s", "repair NTP: munge needs it"
    return YES, "this machine and slurmctld agree to the second"


def seconds(text: str) -> int | None:
    """The number in Slurm's "30 sec"; None if there is no number."""
    match = re.match(r"(\d+)", text)
    return int(match.group(1)) if match else None


def doctor_blocks(checks: Sequence[DoctorCheck]) -> list[Block]:
    """Lay out a table of the checks, followed by what to do."""
    rows = [(check.name, check.answer, check.found) for check in checks]
    blocks: list[Block] = [Table(("CHECK", "READY", "FOUND"), rows)]
    for answer, title in ((NO, "to do"), (NOTE, "worth knowing")):
        todos = [f"  {check.name}: {check.todo}" for check in checks if check.answer == answer and check.todo]
        if todos:
            blocks += [Line(""), Line(title, "bold"), *map(Line, todos)]
    return blocks


LOOK_S = 60.0
# Runs in the script's own Python, which need not have jurymast.
LOOK = """
import importlib.metadata as m, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "none"
print("%d.%d" % sys.version_info[:2], version("jurymast"), version("torch"), sys.executable)
"""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def examine_script(environment: Mapping[str, str]) -> Iterator[DoctorCheck]:
    """Check the node on which a batch script runs; nothing outside a Slurm job."""
    if "SLURM_JOB_ID" not in environment:
        return
    yield DoctorCheck("the script's python", *_python(environment))
    for variable in INTERFACES:
        if variable in environment:
            here = set(psutil.net_if_addrs())
            yield DoctorCheck(variable, *_interface(variable, environment[variable], here))


def _python(environment: Mapping[str, str]) -> Found:
    found = programs.located("python", environment) or programs.located("python3", environment)
    if found is None:
        return (
            NO,
            f"none in PATH: {environment.get('PATH', os.defpath)}",
            "load its module or environment before",
        )
    try:
        command = run_code(LOOK, python=found)
        done = programs.run(command, capture_output=True, timeout=LOOK_S)
        python, ours, torch, place = done.stdout.strip().split(" ", 3)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return NO, f"{found} does not run: {type(error).__name__}", "try: python -c pass"
    told = f"{place} (Python {python}, torch {torch}, jurymast {ours})"
    missing = [package for package, version in (("jurymast", ours), ("torch", torch)) if version == "none"]
    if missing:
        return NO, told, f"{place} -m pip install {' '.join(missing)}"
    from jurymast import __version__

    if ours != __version__:
        return NOTE, told, f"this one is {__version__}, in {sys.executable}: install the same"
    return YES, told


def _interface(variable: str, value: str, here: set[str]) -> Found:
    """Check a variable as NCCL reads it: a list of prefixes of names; whole names after `=`, excluded names
    after `^`. gloo accepts only whole names."""
    exact, others = "=" in value[:2], value.startswith("^")
    names = re.sub(r"^\^?=?", "", value).split(",")

    def is_named(interface: str) -> bool:
        whole = exact or variable.startswith("GLOO")
        return any(interface == name if whole else interface.startswith(name) for name in names)

    if any(is_named(interface) != others for interface in here):
        return YES, value
    return NO, f"{value} matches none of {', '.join(sorted(here))}", "name one that all nodes have"
