"""`make mutations`: plants mistakes in the code, one at a time, and says who notices each: random plans of
the simulated cluster, of all its kinds (a rule is broken, or they do not end), and the unit tests that import
the changed file, or what imports it. All is done in copies of this checkout.

Which mistakes: `mutations/mutants.py`. Those that change nothing that anybody could see are listed with the
reason in `mutations/equivalent.py`; others take their place. Exit code 1 if nobody notices some."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

from mutations.equivalent import EQUIVALENT
from mutations.mutants import Mutant, chosen
from support.packages import checkout

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "launcher/jurymast"
SHELLS = ("agent", "keeper", "supervisor")
# Of the processor, for all plans, and for all unit tests.
LIMIT_S = 1200
# A test imports the changed file, or imports what imports it.
FAR = 2
IN_TEXT = re.compile(r"^from (jurymast[\w.]*) import (\w+)", re.MULTILINE)
PYTEST = "pytest", "-q", "--short", "-p", "no:cacheprovider"


@dataclass(frozen=True)
class Noticed:
    """`plans`, `units`: how, or "" if they did not notice it. `plan`: how many it took; `files`: of tests."""

    mutant: Mutant
    plans: str
    plan: int
    units: str
    files: int


class Checkout:
    """A copy of this one, with everything that git would keep."""

    def __init__(self, folder: Path) -> None:
        self.root = checkout(folder)
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / PACKAGE / mutant.path
        before = path.read_bytes()
        self._write(path, mutant.applied(before))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()  # which Python takes for that of a file of the same size and second

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a Python module, within the limits of time and memory."""
        limited = ["bash", "-c", f'ulimit -t {LIMIT_S}; exec "$@"', "limited", sys.executable, "-m", *command]
        environment = {**os.environ, "PYTHONPATH": f"{self.root}/launcher", "PYTHONHASHSEED": "0"}
        return subprocess.run(
            limited, cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )


def by_plans(checkout: Checkout, mutant: Mutant, plans: int) -> tuple[str, int]:
    """Return what the first plan shows that notices it, and how many plans that took."""
    with checkout.planted(mutant):
        done = checkout.run("jurymast.sim.cluster", "--mixed", "--plans", str(plans), "--first", "--json")
    for line in done.stdout.splitlines():
        found = json.loads(line)
        return found["broken"], found["seed"] + 1
    return (_ended(done) if done.returncode else ""), plans


def by_units(checkout: Checkout, mutant: Mutant) -> tuple[str, int]:
    """Return the first test that fails, but not without the mutant, and how many files of tests there are."""
    files, passed_over = unit_tests(mutant.path), list[str]()
    while files:
        without = [f"--deselect={name}" for name in passed_over]
        with checkout.planted(mutant):
            done = checkout.run(*PYTEST, "-x", *without, *files)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py\S*)", done.stdout, re.MULTILINE)
        if done.returncode in (0, 5):
            break
        if failed is None:
            return _ended(done), len(files)
        if checkout.run(*PYTEST, failed[1]).returncode == 0:
            return failed[1], len(files)
        passed_over.append(failed[1])
    return "", len(files)


def _ended(done: subprocess.CompletedProcess[str]) -> str:
    words = (done.stderr or done.stdout).strip().splitlines()
    return (
        "they do not end" if done.returncode < 0 else (words[-1] if words else f"exit code {done.returncode}")
    )


# ---- which tests are a file's


def unit_tests(path: str) -> list[str]:
    """Return the files of unit tests that import this one, the nearest first; simulated clusters are none."""
    wanted = "jurymast." + path.removesuffix(".py").replace("/", ".")
    near: dict[str, int] = {}
    for name, imported in imports().items():
        if name.startswith(("unit.", "sim.")) and not any("sim.cluster" in one for one in imported):
            between = [of for one in imported if (of := imports().get(one, frozenset()))]
            if wanted in imported:
                near[name] = 1
            elif any(wanted in of for of in between):
                near[name] = FAR
    return [
        f"tests/{name.replace('.', '/')}.py" for name in sorted(near, key=lambda name: (near[name], name))
    ]


@cache
def imports() -> dict[str, frozenset[str]]:
    """By module, of this checkout's: the modules that it imports."""
    folders = [(ROOT / "launcher", "jurymast"), (ROOT / "tests", "")]
    paths = {
        ".".join(path.relative_to(top).with_suffix("").parts): path
        for top, below in folders
        for path in sorted((top / below).rglob("*.py"))
    }
    return {name: frozenset(one for one in _imported(path) if one in paths) for name, path in paths.items()}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for a process of its own
            for module, name in IN_TEXT.findall(node.value):
                yield from (module, f"{module}.{name}")


# ---- the command


def examine(mutant: Mutant, checkouts: SimpleQueue[Checkout], plans: int) -> Noticed:
    checkout = checkouts.get()
    try:
        return Noticed(mutant, *by_plans(checkout, mutant, plans), *by_units(checkout, mutant))
    finally:
        checkouts.put(checkout)


def tell(noticed: Noticed) -> None:
    mutant = noticed.mutant
    print(
        f"{mutant.path}:{mutant.line} {mutant.function}: {mutant.operator}: {' '.join(mutant.before.split())}"
    )
    by = f"plan {noticed.plan}: {noticed.plans}" if noticed.plans else f"none of {noticed.plan}"
    print(f"    plans: {by}\n    units: {noticed.units or f'none of {noticed.files} files'}", flush=True)


def table(all_of: list[Noticed]) -> str:
    lines = [f"{'noticed by':<12} {'plans':>5} {'units':>5} {'both':>5} {'none':>5} {'of':>5}"]
    parts = {"core": ["core"], "shells": [*SHELLS], "all": ["core", *SHELLS]}
    for part, folders in parts.items():
        of = [one for one in all_of if one.mutant.path.partition("/")[0] in folders]
        plans, units = sum(bool(one.plans) for one in of), sum(bool(one.units) for one in of)
        both = sum(bool(one.plans and one.units) for one in of)
        counts = plans, units, both, len(of) - plans - units + both, len(of)
        lines.append(f"{part:<12} " + " ".join(f"{count:>5}" for count in counts))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="which mutants (1)")
    parser.add_argument("--core", type=int, default=40, metavar="N", help="so many of the core (40)")
    parser.add_argument("--shells", type=int, default=20, metavar="N", help="and of the shells (20)")
    parser.add_argument(
        "--plans", type=int, default=500, metavar="N", help="so many plans, from seed 0 on (500)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="those with this in their name or line")
    parser.add_argument("--list", action="store_true", help="say which, and plant none")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    arguments = parser.parse_args()
    root, seed = ROOT / PACKAGE, arguments.seed
    mutants = chosen(root, ["core"], seed, arguments.core, EQUIVALENT)
    mutants += chosen(root, SHELLS, seed, arguments.shells, EQUIVALENT)
    mutants = [one for one in mutants if arguments.only in f"{one.name} {one.path}:{one.line}"]
    if arguments.list:
        print(*(mutant.name for mutant in mutants), sep="\n")
        return 0
    began, all_of = time.monotonic(), list[Noticed]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:
        checkouts = SimpleQueue[Checkout]()
        Path(folder).chmod(0o755)  # some tests run programs as another user
        for number in range(arguments.processes):
            checkouts.put(Checkout(Path(folder, str(number))))
        for noticed in pool.map(lambda mutant: examine(mutant, checkouts, arguments.plans), mutants):
            all_of.append(noticed)
            if arguments.json:
                print(json.dumps({"name": noticed.mutant.name, **asdict(noticed)}), flush=True)
            else:
                tell(noticed)
            print(f"{len(all_of)} of {len(mutants)}", file=sys.stderr, flush=True)
    took_s = time.monotonic() - began
    print(f"seed {seed}, {arguments.plans} plans, {took_s:.0f} s\n{table(all_of)}", file=sys.stderr)
    return int(any(not one.plans and not one.units for one in all_of))


if __name__ == "__main__":
    sys.exit(main())
