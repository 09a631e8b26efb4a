#!/usr/bin/env python3
"""How soon a script trains under jurymast and under torchrun: from the command, after a kill, from a loader.

Scripts of the conformance suite run unchanged but for one line put in front of their own, which imports
`starting/timed.py`: that tells when the script began and when its first optimizer step was done, at the same
cost under both launchers. Both have one node with two ranks; each is started in turn, in random order within
a round, so that a machine that is slower now than it was a minute ago slows both alike. A round gives a
ratio, jurymast over torchrun; the target is about its median.

    first line                from the command until all ranks have begun with the script; without a target,
                              for under jurymast torch is loaded before it, and under torchrun after it
    first step                from the command until all ranks have done an optimizer step
    first step after a kill   from a rank's SIGKILL until all ranks of a later attempt have done one
    first batch               within a rank, from iter(DataLoader) with two workers to its first batch: the
                              median of 20 starts of forked workers, in each rank; spawned ones once

torchrun is started with `--standalone --max-restarts=3`, jurymast with `--cluster local` and its defaults.
In torchrun's favour it has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without, gloo finds the addresses of ranks
that have gone in the store of a restart, and about every other restart hangs.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.common import Row, Target

STARTING = Path(__file__).resolve().parent / "starting"
SUITE = Path(__file__).resolve().parents[1] / "tests" / "conformance" / "scripts"
RANKS = 2
RATIO_TARGET = 1.10
ROUNDS, QUICK_ROUNDS = 5, 2
SUBMIT_LIMIT_S = 60.0
RUN_LIMIT_S = 120.0
END_LIMIT_S = 20.0
POLL_S = 0.05
TORCHRUN = f"torchrun {common.public_version('torch')}"
SYSTEMS = (common.JURYMAST, TORCHRUN)
LINE, STEP, AGAIN = "first line", "first step", "first step after a kill"
BATCH = {"fork": "first batch, workers forked", "spawn": "first batch, workers spawned"}
# In front of a script's own lines; a spawned process reads the script, too.
FIRST_LINE = 'if __name__ == "__main__":\n    import timed\n'
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}
STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun's: each attempt gets a store of its own


@dataclass(frozen=True)
class Script:
    """`needs`: packages without which it is left out."""

    name: str
    path: Path
    needs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = (LINE, STEP, AGAIN)

    def missing(self) -> str:
        """Why it cannot run; "" if it can."""
        if not self.path.exists():
            return f"there is no {self.path.name} in the suite"
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(absent)}: not installed" if absent else ""


SCRIPTS = (
    Script("loaders", SUITE / "loaders.py"),
    Script("torch.compile", SUITE / "compiled.py"),
    Script("FSDP2", SUITE / "sharded.py", ("torchdata",)),
    Script("Hugging Face Trainer", SUITE / "trainer_hf.py", ("transformers", "accelerate")),
    Script("Lightning", SUITE / "trainer_lightning.py", ("lightning",)),
    Script("a variable set before torch", STARTING / "cold.py"),
)
QUICK_SCRIPTS = 2
LOADER = Script("a rank's own loader", STARTING / "loader.py", metrics=tuple(BATCH.values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="two scripts and rounds, in about a minute")
    parser.add_argument("--rounds", type=int, help=f"of all scripts under both [{ROUNDS}]")
    parser.add_argument("--scripts", nargs="+", choices=[script.name for script in SCRIPTS], metavar="NAME",
                        help="of " + ", ".join(script.name for script in SCRIPTS))  # fmt: skip
    parser.add_argument("--seed", type=int, help="of the order within rounds; printed, to have it again")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 16) if arguments.seed is None else arguments.seed
    about = {**common.machine(), "seed": seed, "low_and_high": "lowest and highest sample"}
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    scripts = SCRIPTS[:QUICK_SCRIPTS] if arguments.quick else SCRIPTS
    if arguments.scripts:
        scripts = tuple(script for script in SCRIPTS if script.name in arguments.scripts)
    bench = Bench(random.Random(seed), rounds)
    try:
        bench.measure(scripts)
    except KeyboardInterrupt:
        common.progress("interrupted: what there is so far")
    common.print_report("start", bench.rows(), bench.targets(), about, arguments.json)
    return 0


Figures = dict[str, float]


@dataclass
class Bench:
    """`found`: (case, metric) -> what each round gave under each; None where a run did not get there."""

    chance: random.Random
    rounds: int
    found: dict[tuple[str, str], list[dict[str, float | None]]] = field(default_factory=dict)
    notes: dict[tuple[str, str], str] = field(default_factory=dict)  # by case and system
    left_out: dict[str, str] = field(default_factory=dict)

    def measure(self, scripts: tuple[Script, ...]) -> None:
        self.left_out = {script.name: why for script in scripts if (why := script.missing())}
        cases = [script for script in (*scripts, LOADER) if script.name not in self.left_out]
        for number in range(self.rounds):
            for script in cases:
                latest = self._round(script)
                common.progress(f"round {number + 1} of {self.rounds}, {script.name}: {latest}")

    def _round(self, script: Script) -> str:
        """The script under both; returns what is to be told of it."""
        figures = {system: self._run(script, system) for system in self.chance.sample(SYSTEMS, len(SYSTEMS))}
        told = []
        for metric in script.metrics:
            values = {system: figures[system].get(metric) for system in SYSTEMS}
            self.found.setdefault((script.name, metric), []).append(values)
            told.append(f"{metric} " + " / ".join(common.number(values[system]) for system in SYSTEMS))
        return "; ".join(told)

    def _run(self, script: Script, system: str) -> Figures:
        figures, why = run(script, system)
        if why:
            common.progress(f"{script.name}, {system}: {why}")
            self.notes[script.name, system] = why
        return figures

    def rows(self) -> list[Row]:
        rows = []
        for (case, metric), rounds in self.found.items():
            for system in SYSTEMS:
                samples = [values[system] for values in rounds]
                rows.append(_row(case, system, metric, "s", samples, self.notes.get((case, system), "")))
            note = "jurymast over torchrun, of each round"
            rows.append(_row(case, common.JURYMAST, f"{metric}, ratio", "ratio", ratios(rounds), note))
        for case, why in self.left_out.items():
            rows += [_row(case, system, STEP, "s", [], why) for system in SYSTEMS]
        return rows

    def targets(self) -> list[Target]:
        return [
            Target(f"{metric}: {case}", common.spread(ratios(rounds)).median, RATIO_TARGET, "lower")
            for (case, metric), rounds in self.found.items()
            if metric != LINE
        ]


def ratios(rounds: Sequence[Mapping[str, float | None]]) -> list[float | None]:
    """Of the rounds in which torchrun got there; those in which jurymast did not count as endless."""
    found: list[float | None] = []
    for values in rounds:
        ours, theirs = values[common.JURYMAST], values[TORCHRUN]
        if theirs is not None:
            found.append(None if ours is None else ours / theirs)
    return found


def _row(case: str, system: str, metric: str, unit: str, samples: Sequence[float | None], note: str) -> Row:
    found = common.spread(samples)
    return Row(case, system, metric, unit, found.median, found.low, found.high, found.n, note, list(samples))


# ---- one run


def run(script: Script, system: str) -> tuple[Figures, str]:
    """What it gave by metric, and why something is missing."""
    with tempfile.TemporaryDirectory(prefix="jurymast-start-", ignore_cleanup_errors=True) as name:
        folder, work = Path(name), Path(name) / "work"
        (work / "stamps").mkdir(parents=True)
        shutil.copy(STARTING / "timed.py", work)
        shutil.copy(script.path, work)
        if script is not LOADER:
            (work / script.path.name).write_text(with_stamps(script.path.read_text()))
        began = time.time()

        def look() -> Figures:
            return loader_starts(work) if script is LOADER else starts(work / "stamps", began)

        try:
            with LAUNCHERS[system](folder, script.path.name) as root:
                end = time.monotonic() + RUN_LIMIT_S
                while len(look()) < len(script.metrics) and is_alive(root) and time.monotonic() < end:
                    time.sleep(POLL_S)
        except (OSError, subprocess.SubprocessError, KeyError, ValueError) as error:
            return {}, f"did not start: {error}"
        figures = look()
        if len(figures) == len(script.metrics):
            return figures, ""
        logs = "".join(path.read_text(errors="replace")[-400:] for path in sorted(folder.rglob("*.log")))
        return figures, f"did not get there: {logs}"


def with_stamps(source: str) -> str:
    """The script, which first says that it has begun: behind what Python wants to be in front."""
    lines = source.splitlines(keepends=True)
    body = ast.parse(source).body
    before = 0
    for number, node in enumerate(body):
        is_text = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        before = node.end_lineno or 0
    return "".join([*lines[:before], FIRST_LINE, *lines[before:]])


def starts(folder: Path, began: float) -> Figures:
    """By metric; the slowest rank counts. One that begins anew before its first step has begun only then."""
    by_rank: list[dict[tuple[int, str], float]] = []
    for rank in range(RANKS):
        found: dict[tuple[int, str], float] = {}
        for line in _text(folder / f"rank-{rank}.txt").splitlines():
            time_of, restart, what = line.split()
            found[int(restart), what] = float(time_of)
        by_rank.append(found)

    def all_had(restart: int, what: str) -> float | None:
        times = [found[restart, what] for found in by_rank if (restart, what) in found]
        return max(times) if len(times) == RANKS else None

    later = sorted({restart for found in by_rank for restart, _ in found if restart > 0})
    again = [at for restart in later if (at := all_had(restart, "step")) is not None]
    spans = {
        LINE: (began, all_had(0, "line")),
        STEP: (began, all_had(0, "step")),
        AGAIN: (by_rank[-1].get((0, "killed")), min(again, default=None)),
    }
    return {name: to - since for name, (since, to) in spans.items() if since is not None and to is not None}


def loader_starts(work: Path) -> Figures:
    """By metric, the median of all starts in all ranks."""
    texts = [_text(work / f"loader-{rank}.json") for rank in range(RANKS)]
    if not all(texts):
        return {}
    found = [json.loads(text) for text in texts]
    return {
        metric: statistics.median(seconds for one in found for seconds in one[name])
        for name, metric in BATCH.items()
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


# ---- the launchers


@contextmanager
def torchrun(folder: Path, *script: str) -> Iterator[psutil.Process]:
    command = [_command("torchrun"), "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3", *script]
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder / "work", env={**_environment(), **STORES}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
    root = psutil.Process(process.pid)
    try:
        yield root
    finally:
        end(root)
        process.wait(END_LIMIT_S)


@contextmanager
def jurymast(folder: Path, *script: str) -> Iterator[psutil.Process]:
    command = [_command("jurymast"), "submit", "--cluster", "local", "--runs", str(folder / "runs")]
    command += ["--nodes", "1", "--spares", "0", "--nproc-per-node", str(RANKS), "--json", "--", *script]
    done = subprocess.run(
        command, cwd=folder / "work", env=_environment(), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=SUBMIT_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ValueError(done.stderr.strip()[-1000:])
    root = psutil.Process(int(json.loads(done.stdout)["pid"]))
    try:
        yield root
    finally:
        end(root)


LAUNCHERS = {common.JURYMAST: jurymast, TORCHRUN: torchrun}


def _command(name: str) -> str:
    """The installed command: with `python -m`, the working directory would be where Python looks first."""
    return str(Path(sys.executable).with_name(name))


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def is_alive(root: psutil.Process) -> bool:
    return bool(root.is_running() and root.status() != psutil.STATUS_ZOMBIE)


def end(root: psutil.Process) -> None:
    """The process, and all that descends from it."""
    try:
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in found:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=END_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
