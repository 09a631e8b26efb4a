"""A submission. Its request is exact: a dry run shows what submit sends unchanged. jurymast asks Slurm
whether it answers and how large a partition is, submits the job, and asks how it ended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jurymast import foreign, programs
from jurymast.cluster.allocation import TEARDOWN, batch_process, submit_local
from jurymast.cluster.planning import WARN_SIGNAL
from jurymast.cluster.sbatch import (
    DONE_HERE,
    STANDARD_INPUT,
    WRAP,
    BatchScript,
    CommandLine,
    quoted,
    words_of,
)
from jurymast.cluster.sbatch_command import accepted, sbatch, slurms_words
from jurymast.cluster.signals import SLURMS_WARNING, WARNINGS
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import did_you_mean
from jurymast.errors import ClusterUnavailableError, RunDirectoryError, SubmissionError, UsageError
from jurymast.interpreter import run_module
from jurymast.jobs import ENDED_STATES, jobs_in, run_command
from jurymast.policy.resolve import Resolved
from jurymast.rundir import Made, RunDirectory, write_atomically


@dataclass(frozen=True)
class Request:
    """A submission. `argv` runs in the run directory with `script`, Slurm's batch script (empty on the local
    cluster). `users`: the user's own batch script, if one is submitted. `teardown`: shell that the job runs
    last."""

    plan: RunPlan
    policy: str
    script: str
    argv: tuple[str, ...]
    users: str = ""
    teardown: str = ""

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.plan.directory)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.plan.run,
            "cluster": self.plan.cluster,
            "directory": self.plan.directory,
            "argv": list(self.argv),
            "script": self.script,
            "policy": self.policy,
            "plan": self.plan.to_json(),
        }


@dataclass(frozen=True)
class Submitted:
    """The result of a request: the Slurm job id (empty on the local cluster), or the local process."""

    request: Request
    slurm_job: str = ""
    slurm_cluster: str = ""
    pid: int | None = None
    notes: str = ""  # what sbatch printed besides the job id

    @property
    def job(self) -> str:
        """The name of the allocation: the Slurm job id, or local-PID."""
        return self.slurm_job or f"local-{self.pid}"


def script_file(plan: RunPlan) -> Path:
    return RunDirectory(plan.directory).submission / "job.sh"


def users_script(run: RunDirectory) -> Path:
    """The copy of the user's batch script, named as Slurm names it on the node that runs it."""
    return run.submission / "slurm_script"


def build_request(
    plan: RunPlan, policy: Resolved, script: BatchScript | None = None, setup: Sequence[str] = ()
) -> Request:
    """Build the request for this plan, with the batch script if there is one. Without one, the lines of shell
    `setup` run in the job first. Writes nothing and asks no other program."""
    text = policy.yaml(origins=True)
    if plan.cluster == "local" and setup:
        return Request(plan, text, local_script(plan, setup), ("bash", str(script_file(plan))))
    if plan.cluster == "local":
        return Request(plan, text, "", batch_process(plan))
    if script is not None:
        return Request(plan, text, script_around(plan, script), command(plan), script.text)
    return Request(plan, text, render_script(plan, setup), command(plan))


def observed_request(plan: RunPlan, policy: Resolved, script: BatchScript, line: CommandLine) -> Request:
    """The request for a job that is only observed: sbatch's own command line, as it was typed."""
    named = line.command if script.name not in (WRAP, STANDARD_INPUT) else []
    argv = ("sbatch", "--parsable", *words_of(line.options, DONE_HERE), *named)
    return Request(plan, policy.yaml(origins=True), "", argv, script.text)


def check_runs_directory(runs: Path, script: BatchScript | None = None, *, shared: bool = False) -> None:
    """Raise RunDirectoryError if no run directory usable for `script` can be made below `runs`. `shared`: the
    user accepts that others can replace runs in it."""
    if script is not None and ":" in str(runs):
        raise RunDirectoryError(
            f"the runs directory {str(runs)!r} has a colon, and batch scripts find jurymast by PATH",
            hint="choose another directory with --runs DIR",
        )
    if any(mark in str(runs) for mark in "%\\\n\r"):
        raise RunDirectoryError(
            f"the runs directory {str(runs)!r} has a character that Slurm does not take: %, \\ or line break",
            hint="choose another directory with --runs DIR",
        )
    place = runs
    while not foreign.exists(place) and place != place.parent:
        place = place.parent
    if not foreign.is_directory(place) or not os.access(place, os.W_OK | os.X_OK):
        raise RunDirectoryError(
            f"cannot write to the runs directory {runs}" + ("" if place == runs else f" ({place})"),
            hint="choose another directory with --runs DIR, on storage that all nodes share",
        )
    if place == runs and not shared and (others := foreign.who_may_change(runs)):
        raise RunDirectoryError(
            f"{others} can replace the runs in {runs}, and what is put there would be run as you",
            hint="name a directory of your own with --runs DIR, or accept this with --shared-runs",
        )


def write_run_directory(request: Request) -> Made:
    """Create the run directory with its plan, policy and batch script. Raises RunDirectoryError; then, as
    after a failed submission, nothing half submitted is left."""
    run = request.run_directory
    made = run.create()
    try:
        (run.submission / "jobs").mkdir(mode=0o700)
        run.save_plan(request.plan)
        write_atomically(run.policy_file, request.policy.encode())
        if request.users:
            data = request.users.encode(errors="surrogateescape")
            write_atomically(users_script(run), data)
        if request.script:
            write_atomically(script_file(request.plan), request.script.encode())
        if request.teardown:
            write_atomically(run.submission / TEARDOWN, request.teardown.encode())
    except BaseException as error:
        run.unmake(made)
        if isinstance(error, OSError):
            what = f"cannot write the run directory {run.root}: {error.strerror}"
            raise RunDirectoryError(what, hint="choose another directory with --runs DIR") from error
        raise
    return made


def submit(request: Request) -> Submitted:
    """Send the request. Raises RunDirectoryError, ClusterUnavailableError, SubmissionError."""
    made = write_run_directory(request)
    try:
        if request.plan.cluster == "local":
            return Submitted(request, pid=submit_local(request.plan.directory, request.argv))
        return submit_slurm(request)
    except BaseException:
        request.run_directory.unmake(made)
        raise


# ---- how large a partition is

ANSWER_LIMIT_S = 60.0
# Nodes in these states run no job until an administrator acts; sinfo marks a node that does not answer with
# *.
_OUT = ("down", "drain", "fail", "future", "unk", "inval", "perfctrs", "power_down", "powered_down")


@dataclass
class Partition:
    """Node counts of a partition; `largest_job` is its MaxNodes, None if unlimited."""

    name: str
    default: bool
    total: int = 0
    out: int = 0
    largest_job: int | None = None


def parse_partitions(text: str) -> dict[str, Partition]:
    """Parse the lines of `sinfo -h -a -o '%P|%a|%s|%D|%T'`."""
    partitions: dict[str, Partition] = {}
    for line in text.splitlines():
        if line.count("|") != 4:
            continue
        named, _, sizes, count, state = (part.strip() for part in line.split("|"))
        name = named.removesuffix("*")
        partition = partitions.setdefault(name, Partition(name, named.endswith("*")))
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
        if programs.located(program) is None:
            raise ClusterUnavailableError(
                f"Slurm's commands are not available: {program} is not in PATH", hint=hint
            )
    where = [f"--clusters={clusters}"] if clusters else []
    command = ["sinfo", "--noheader", "--all", *where, "--format=%P|%a|%s|%D|%T"]
    try:
        return parse_partitions(run_command(command, ANSWER_LIMIT_S))
    except ClusterUnavailableError as error:
        raise ClusterUnavailableError(f"Slurm does not answer: {error}", hint=hint) from error


def check_fits(found: dict[str, Partition], asked: str, active: int, spares: int) -> None:
    """Raise UsageError when no partition of `asked` (comma list; empty: the default) could hold the run."""
    names = asked.split(",") if asked else [name for name, partition in found.items() if partition.default]
    for name in names:
        if name not in found:
            raise UsageError(
                f"there is no partition {name}{did_you_mean(name, found)}",
                hint=f"the partitions are {', '.join(sorted(found)) or 'none'}",
            )
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


# ---- how a job ended

POLL_S = 2.0
# Slurm forgets a job five minutes after its end, so it makes no sense to wait longer for an answer.
SILENCE_LIMIT_S = 240.0


def exit_code(told: str) -> int | None:
    """The exit code of a job, from `scontrol show job --oneliner`: the highest of an array's tasks, 128 +
    number for a signal; None while a task may still run."""
    codes = []
    for fields in jobs_in(told):
        # A revoked job runs on another cluster of its federation.
        if fields.get("JobState") not in ENDED_STATES - {"REVOKED"}:
            return None
        code, _, number = fields.get("ExitCode", "1:0").partition(":")
        codes.append(128 + int(number) if int(number or 0) else int(code))
    return max(codes, default=None)


def wait(job: str, cluster: str = "") -> int:
    """Wait for the job's end; returns its exit code. Raises ClusterUnavailableError if Slurm does not answer
    for `SILENCE_LIMIT_S`."""
    where = [f"--clusters={cluster}"] if cluster else []
    silent_since = None
    while True:
        try:
            code = exit_code(run_command(["scontrol", *where, "show", "job", job, "--oneliner"]))
            if code is not None:
                return code
            silent_since = None
        except ClusterUnavailableError:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() > silent_since + SILENCE_LIMIT_S:
                raise
        time.sleep(POLL_S)


def script_around(plan: RunPlan, script: BatchScript) -> str:
    """The script that sbatch gets in place of a user's batch script: its options, and the command that runs
    it. Our own options are on the command line, which takes precedence."""
    run = run_module("jurymast.script", "job", plan.directory, python=plan.python)
    ignore = f"{_ignore([SLURMS_WARNING])}\n" if warns_itself(plan) else ""
    return f'#!/bin/sh\n{script.head}\n{ignore}exec {shlex.join(run)} "$@"\n'


def warns_itself(plan: RunPlan) -> bool:
    """Whether Slurm warns of the time limit by our own signal, which a batch script knows nothing of."""
    return plan.sbatch_options[-1:] == (f"--signal={WARN_SIGNAL}",)


def _ignore(signals: Iterable[signal.Signals]) -> str:
    """The line of shell that ignores warnings until Python has started and handles them: one that comes
    within that second would end the job, and the supervisor asks Slurm for the time limit in any case."""
    return f"trap '' {' '.join(one.name.removeprefix('SIG') for one in signals)}"


def render_script(plan: RunPlan, setup: Sequence[str] = ()) -> str:
    """The batch script's text; the lines of shell `setup` run first."""
    folder = RunDirectory(plan.directory).submission
    options = {
        "job-name": plan.name, "nodes": plan.nodes, "ntasks-per-node": 1, "output": folder / "job-%j.log",
        "open-mode": "append",
    }  # fmt: skip
    if not any(word.startswith("--signal") for word in plan.sbatch_options):
        options["signal"] = WARN_SIGNAL  # sbatch would take its B: for the other one as well
    lines = [f"#SBATCH --{name}={quoted(str(value))}" for name, value in options.items()]
    lines += ["#SBATCH --no-kill", f"#SBATCH --{'requeue' if plan.requeue else 'no-requeue'}", ""]
    return "\n".join(["#!/bin/bash", *lines, *_setup_and_run(plan, setup)])


def local_script(plan: RunPlan, setup: Sequence[str]) -> str:
    """What starts a local run after the lines of shell `setup`, which run where Slurm would run them."""
    where = f"cd {shlex.quote(plan.working_directory)} || exit {RunDirectoryError.exit_code}"
    return "\n".join(["#!/bin/bash", where, *_setup_and_run(plan, setup)])


def _setup_and_run(plan: RunPlan, setup: Sequence[str]) -> list[str]:
    folder = RunDirectory(plan.directory).submission
    # Not in the user's directory: Python looks for modules in the directory in which it starts, and a
    # queue.py there must not replace Python's own. The ranks start in the plan's working directory.
    change = f"cd {shlex.quote(str(folder))} || exit {RunDirectoryError.exit_code}"
    # With exec, Python becomes the batch process, so that signals for the batch process (B:) reach it.
    return [_ignore(WARNINGS), *setup, change, f"exec {shlex.join(batch_process(plan))}", ""]


def command(plan: RunPlan) -> tuple[str, ...]:
    """sbatch's command line. It contains the user's options, so that they override those in the script."""
    nodes = plan.excluded_at(plan.submitted_at)
    exclude = (f"--exclude={','.join(nodes)}",) if nodes else ()
    arguments = plan.arguments if plan.batch else ()
    return ("sbatch", "--parsable", *plan.sbatch_options, *exclude, str(script_file(plan)), *arguments)


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Delay Ctrl-C until the end of this context, so that no job is accepted by Slurm and then forgotten
    here."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def submit_slurm(request: Request) -> Submitted:
    """Submit the request with sbatch. Raises SubmissionError with Slurm's own words.

    If anything fails after Slurm accepted the job (Ctrl-C, a full disk), the job is cancelled.
    """
    job, cluster = "", ""
    try:
        with _interrupt_held():
            done = _sbatch_observed(request) if request.plan.observed else sbatch(request.argv)
            job, cluster = accepted(done.stdout)
        write_atomically(request.run_directory.submission / "jobs" / job, cluster.encode())
    except BaseException as error:
        if job:
            where = [f"--clusters={cluster}"] if cluster else []
            programs.run(["scancel", *where, job], stdin=subprocess.DEVNULL)
        if isinstance(error, OSError):
            raise SubmissionError(f"the job could not be submitted: {error}") from error
        raise
    # A site's submission plugin may print more ("moved to partition X"), which is for the user.
    return Submitted(request, slurm_job=job, slurm_cluster=cluster, notes=done.stderr.strip())


def _sbatch_observed(request: Request) -> subprocess.CompletedProcess[str]:
    """Run sbatch as its user would, but for SBATCH_WAIT, with which it would return when the job ends."""
    variables = {name: value for name, value in os.environ.items() if name != "SBATCH_WAIT"}
    read = request.plan.script == STANDARD_INPUT
    return sbatch(request.argv, variables, users_script(request.run_directory) if read else None)


def test_only(request: Request) -> str:
    """Slurm's estimate of whether and when the job could start; submits nothing. Raises SubmissionError."""
    place = foreign.temporary_place()
    with tempfile.NamedTemporaryFile("w", prefix="jurymast-", suffix=".sh", dir=place) as file:
        file.write(request.script)
        file.flush()
        ours = str(script_file(request.plan))
        return slurms_words(sbatch([file.name if word == ours else word for word in request.argv]).stderr)
