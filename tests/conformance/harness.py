"""Runs one script under plain torchrun and under jurymast, and says what differs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jurymast.core.state import events as ev
from support.ports import free_port
from support.runs import RunUnderTest, end_all, telling_where, tree, wait_gone
from support.waiting import wait_until

SCRIPTS = Path(__file__).resolve().parent / "scripts"
RANKS = 2
LIMIT_S = 300.0
# All that either launcher is started with, beside where programs and the user's files are.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
    "LC_ALL": "C.UTF-8",
}
# A failed script is not tried again: what counts is how it failed.
# As long as under torchrun.
POLICY = "failures: {restarts: {application: 0 per 1h}, stop_grace: 30s}\n"


@dataclass(frozen=True)
class Case:
    """`command` runs where copies of `sources` are: files of the scripts' folder, or what is in a folder."""

    name: str
    sources: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    fails: Mapping[int, int] = field(default_factory=dict)  # the rank that fails first, and its exit code
    needs: str = ""  # a package that may be missing
    unlike: tuple[str, ...] = ()  # files that are another at each run
    ordered: bool = True  # whether each rank prints its lines in the same order each time


@dataclass
class Outcome:
    """What is left of a run. `work`: where it ran. `failures`: the rank that failed first, with its exit
    code. `printed`: for each rank the lines of its standard output and of its standard error, or of both
    where they share a log."""

    work: Path
    failures: dict[int, int]
    printed: dict[int, list[list[str]]]
    files: dict[str, str]


def run_both(case: Case, folder: Path, shared: Path) -> tuple[Outcome, Outcome]:
    """Under torchrun and under jurymast. `shared`: see `under_torchrun`."""
    with jurymast_run(case, folder / "jurymast") as run:
        torchrun = under_torchrun(case, shared)
        run.wait_end(LIMIT_S)
        wait_gone(run.directory.root)
    return torchrun, _of_jurymast(folder / "jurymast", run)


def under_torchrun(case: Case, shared: Path) -> Outcome:
    """It runs once for all that give the same folder, in processes beside each other as well."""
    # No spaces: torch's compiler takes a path apart at them.
    place = shared / "-".join(["torchrun", *(re.sub(r"\W+", "-", word) for word in case.command)])
    place.mkdir(exist_ok=True)
    with open(place / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, again = place / "first", place / "again"
        if not first.exists():
            _torchrun(case, first)
        if not again.exists():
            if (outcome := _of_torchrun(first)).failures == case.fails:
                return outcome
            _torchrun(case, again)  # what is compared with; gloo aborts now and then at a rank's end
        return _of_torchrun(again)


def assert_alike(case: Case, torchrun: Outcome, jurymast: Outcome) -> None:
    told: list[str] = []
    for launcher, failures in (("torchrun", torchrun.failures), ("jurymast", jurymast.failures)):
        if failures != case.fails:
            told.append(f"failed under {launcher}: {failures}, not {case.fails}")
    for rank in range(RANKS):
        (both,) = jurymast.printed[rank]
        wrong = _differences([line for stream in torchrun.printed[rank] for line in stream], both)
        if case.ordered and not wrong:
            wrong = [line for stream in torchrun.printed[rank] for line in _out_of_order(stream, both)]
        told += [f"rank {rank}: {line}" for line in wrong]
    for name in sorted({*torchrun.files, *jurymast.files} - {*case.unlike}):
        theirs, ours_ = torchrun.files.get(name, "missing"), jurymast.files.get(name, "missing")
        if theirs != ours_:
            told.append(f"file {name}: {theirs} under torchrun, {ours_} under jurymast")
    assert not told, "\n".join(told)


def _differences(torchrun: list[str], jurymast: list[str]) -> list[str]:
    theirs, ours = Counter(torchrun), Counter(jurymast)
    only_theirs = [f"only torchrun: {line}" for line in (theirs - ours).elements()]
    return only_theirs + [f"only jurymast: {line}" for line in (ours - theirs).elements()]


def _out_of_order(stream: list[str], both: list[str]) -> list[str]:
    """The first line of the stream that does not follow there on the ones before it."""
    rest = iter(both)
    return next(([f"out of order: {line}"] for line in stream if line not in rest), [])


def command_of(name: str) -> str:
    """The installed command: as users start it, their working directory is not where Python looks first."""
    return str(Path(sys.executable).with_name(name))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "USER") if name in os.environ}
    return {**kept, **ENVIRONMENT, **more}


def _prepare(case: Case, folder: Path) -> None:
    work = folder / "work"
    work.mkdir(parents=True)
    for source in case.sources:
        if (SCRIPTS / source).is_dir():
            shutil.copytree(
                SCRIPTS / source, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(SCRIPTS / source, work)


def _torchrun(case: Case, folder: Path) -> None:
    _prepare(case, folder)
    # Older torch takes one and the same port for all on a machine unless told otherwise.
    command = [command_of("torchrun"), "--nproc-per-node", str(RANKS), "--master-port", str(free_port()),
               "--redirects", "3", "--log-dir", str(folder / "logs"), *case.command]  # fmt: skip
    with open(folder / "torchrun.log", "wb") as log:
        process = subprocess.Popen(
            command, cwd=folder / "work", env=environment(case.environment), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until("end of torchrun", lambda: process.poll() is not None, limit_s=LIMIT_S)
    finally:
        end_all(tree(process.pid))
        process.wait()


def torchruns_weights(script: str, shared: Path) -> str:
    """What the script, undisturbed, leaves in weights.txt under torchrun."""
    plain = under_torchrun(Case(script, (script,), (script,)), shared)
    assert plain.failures == {}
    return (plain.work / "weights.txt").read_text()


@contextmanager
def jurymast_run(case: Case, folder: Path, *, policy: str = POLICY) -> Iterator[RunUnderTest]:
    """Submit to the local cluster; whatever is left of it afterwards is ended."""
    if not (folder / "work").exists():
        _prepare(case, folder)
    (folder / "policy.yaml").write_text(policy)
    done = subprocess.run(
        [command_of("jurymast"), "submit", "--cluster", "local", "--nodes", "1",
         "--nproc-per-node", str(RANKS), "--spares", "0", "--runs", str(folder / "runs"),
         "--policy", str(folder / "policy.yaml"), "--json", "--", *case.command],
        cwd=folder / "work", env=environment(case.environment), capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    submitted = json.loads(done.stdout)
    run = RunUnderTest(Path(submitted["directory"]))
    try:
        with telling_where(submitted["pid"]):
            yield run
    except BaseException:
        print(run.story())
        raise
    finally:
        end_all(tree(submitted["pid"]))


def _of_torchrun(folder: Path) -> Outcome:
    printed: dict[int, list[list[str]]] = {}
    for rank in range(RANKS):
        printed[rank] = [_lines(log, folder) for log in folder.glob(f"logs/*/attempt_0/{rank}/*.log")]
    failures = _root_cause((folder / "torchrun.log").read_text())
    return Outcome(folder / "work", failures, printed, files_of(folder))


def _root_cause(log: str) -> dict[int, int]:
    """What torchrun tells of the first rank that failed."""
    _, _, told = log.partition("Root Cause")
    numbers = re.search(r"rank\s*: (\d+) .*?exitcode\s*: (-?\d+)", told, re.DOTALL)
    return {} if numbers is None else {int(numbers[1]): int(numbers[2])}


def _of_jurymast(folder: Path, run: RunUnderTest) -> Outcome:
    logs = {rank: run.directory.rank_log(1, rank) for rank in range(RANKS)}
    printed = {rank: [_lines(log, folder)] for rank, log in logs.items()}
    failed = [event for event in run.events() if isinstance(event, ev.WorkerFailed) and event.attempt == 1]
    failures = {event.rank: event.exit_code for event in failed[:1]}
    return Outcome(folder / "work", failures, printed, files_of(folder))


# What is another at each run, and what stands for it.
_VARYING = [
    (re.compile(r"\b0x[0-9a-f]+\b"), "0x…"),
    (re.compile(r"('\w+_(runtime|per_second)': )'[\d.]+'"), r"\1…"),
    (re.compile(r"\b([WEIFV])\d{4} \d\d:\d\d:\d\d\.\d+( \d+)?"), r"\1 time"),
]
_PROGRESS = re.compile(r"\d+%\||\d+/\d+ \[|\bit/s\b|\bs/it\b")


def _lines(log: Path, folder: Path) -> list[str]:
    """A log's lines, without progress bars, which are drawn by the clock."""
    text = log.read_text(errors="replace").replace(str(folder / "work"), "WORK")
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    lines = re.split(r"[\r\n]+", text)
    return [line.rstrip() for line in lines if line.strip() and not _PROGRESS.search(line)]


def files_of(folder: Path) -> dict[str, str]:
    """What lies in the working directory, with a hash of each file; not what Python keeps for itself."""
    work = folder / "work"
    found = {}
    for path in sorted(work.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found[str(path.relative_to(work))] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return found
