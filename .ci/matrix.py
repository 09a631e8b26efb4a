#!/usr/bin/env python3
"""Runs the tests on several Pythons, torches, Debians and Slurms, and prints a table of what passed where.

    make matrix MATRIX_FLAGS='[--list] [--quick] [--only WORD ...] [--json] [-- FLAGS OF PYTEST]'

A row without a Slurm runs the unit, simulation and conformance tests; a row with one runs the tests on a real
cluster of that release. A row of another Debian runs inside it, so with its C library; that needs root. A row
without torch, which `--quick` is about, runs a few of the unit tests with what `pip install` installs. Each
row has a virtual environment below .venv/matrix, which is kept, and a log beside it. What cannot be had on
this machine is said in the table, and is no failure. pyenv shows those Pythons that PYENV_VERSION names.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from testcluster.errors import ClusterError
from testcluster.settings import SLURM_SYSTEM
from testcluster.software import debian

ROOT = Path(__file__).resolve().parents[1]

HERE = "this machine"
SUITES = {"Debian 13": "trixie", "Debian 14": "forky"}
SYSTEMS = Path("/var/cache/jurymast-matrix")
PACKAGES = "python3-venv,python3-dev,gcc,libc6-dev,git,make,procps,iproute2,psmisc,ca-certificates"
# What another Debian shares with this machine: the network's settings, the checkout, and its environments.
SHARED = ("/dev", "/proc", "/sys", "/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", str(ROOT))
ENVIRONMENTS = ROOT / ".venv/matrix"
WITHOUT_SLURM = ("tests/unit", "tests/sim", "tests/conformance")
WITH_SLURM = ("tests/slurm",)
WITHOUT_TORCH = tuple(
    f"tests/unit/test_{name}.py"
    for name in ("run_machine", "policy", "journal", "messages", "script_parts", "stacks", "background")
)
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
# As in `make test`: what bounds a time has the machine to itself.
PARTS = (("beside", 2), ("alone", 1))
NO_TESTS = 5  # as pytest says it


@dataclass(frozen=True)
class Row:
    """`python`: a command; `torch`: a release, or none; `system`: HERE or one of SUITES; `slurm`: as the test
    cluster names its releases."""

    python: str
    torch: str = ""
    system: str = HERE
    slurm: str | None = None

    @property
    def environment(self) -> str:
        system = "" if self.system == HERE else f"{SUITES[self.system]}-"
        return f"{system}{self.python}" + (f"-torch-{self.torch}" if self.torch else "")

    @property
    def name(self) -> str:
        return self.environment + (f"-slurm-{self.slurm}" if self.slurm else "")


ROWS = (
    *(Row(f"python3.{minor}") for minor in (10, 13, 14)),
    Row("python3.10", "2.6.0"),
    Row("python3.12", "2.13.0"),
    Row("python3.13", "2.14.1"),
    Row("python3", "2.14.1", "Debian 13"),
    Row("python3", "2.15.0", "Debian 14"),
    Row("python3.11", "2.13.0", slurm=SLURM_SYSTEM),
    Row("python3.11", "2.13.0", slurm="24.11"),
    Row("python3.11", "2.13.0", slurm="26.05"),
)


@dataclass
class Result:
    """What a row gave. `python`, `libc`: releases; `outcome`: passed, failed, or why there is none; `tests`:
    pytest's last line, of each part of the tests."""

    row: Row
    python: str = ""
    libc: str = ""
    outcome: str = ""
    tests: str = ""


class NotHere(Exception):
    """Something that a row needs cannot be had on this machine."""


class NotInstalled(Exception):
    """The row's Python is here, and jurymast cannot be installed into it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    parser.add_argument("--quick", action="store_true", help="rows without torch: half a minute each")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="rows with any of these in their names")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("flags", nargs="*", help="passed to pytest")
    options = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)  # for this file; with it the tests would not find their own modules
    rows = [row for row in ROWS if not (options.quick and row.torch)]
    rows = [row for row in rows if not options.only or any(word in row.name for word in options.only)]
    if options.list:
        print("\n".join(row.name for row in rows))
        return 0
    if not rows:
        parser.error(f"no row has any of {' '.join(options.only)} in its name; --list prints the names")
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    results = [result_of(row, options.flags) for row in rows]
    print(json.dumps({"rows": [asdict(one) for one in results]}) if options.json else table(results))
    return int(any(one.outcome.startswith("failed") for one in results))


def result_of(row: Row, flags: Sequence[str]) -> Result:
    log, began = ENVIRONMENTS / f"{row.name}.log", time.monotonic()
    print(f"{row.name}: runs, see {log}", file=sys.stderr, flush=True)
    result = Result(row)
    try:
        within = entering(row)
        log.write_text("")
        install(row, within, log)
        result.python, result.libc = releases(row, within)
        result.outcome, result.tests = tested(row, within, flags, log)
    except (NotHere, ClusterError) as error:
        result.outcome = f"not run: {error}"
    except NotInstalled as error:
        result.outcome = f"failed: {error}"
    print(f"{row.name}: {result.outcome}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return result


def entering(row: Row) -> list[str]:
    """What to put before a command that runs in the row's system, at the checkout's path."""
    if row.system == HERE:
        if not works(row.python):
            raise NotHere(f"there is no {row.python}")
        return []
    if os.geteuid() != 0:
        raise NotHere("another Debian needs root")
    root = debian(SUITES[row.system], SYSTEMS / SUITES[row.system], PACKAGES)
    steps = [f"mkdir -p {shlex.quote(f'{root}{ROOT}')}", f"mount -t tmpfs tmpfs {root}/tmp"]
    steps += [f"mount --rbind {shlex.quote(one)} {shlex.quote(f'{root}{one}')}" for one in SHARED]
    steps.append(
        f'exec chroot {root} /usr/bin/env --chdir={shlex.quote(str(ROOT))} PATH=/usr/bin:/usr/sbin "$@"'
    )
    return ["unshare", "--mount", "--propagation=slave", "sh", "-c", " && ".join(steps), "sh"]


def works(python: str) -> bool:
    """pyenv has a command for each of its Pythons, which fails unless that one is chosen."""
    return (
        shutil.which(python) is not None
        and not subprocess.run([python, "-c", ""], stderr=subprocess.DEVNULL).returncode
    )


def install(row: Row, within: Sequence[str], log: Path) -> None:
    place = str(relative(row))
    if row.torch:
        make = ["make", "--no-print-directory", "install", f"VENV={place}", f"PYTHON={row.python}"]
        steps = [[*make, f"TORCH=torch=={row.torch}"]]
    else:
        pip = [f"{place}/bin/python", "-m", "pip", "install", "--quiet"]
        steps = [[row.python, "-m", "venv", place], [*pip, "--editable", ".", *FOR_TESTS]]
    if any(run([*within, *step], log) for step in steps):
        raise NotInstalled(f"jurymast cannot be installed, see {log}")


def relative(row: Row) -> Path:
    return (ENVIRONMENTS / row.environment).relative_to(ROOT)


def releases(row: Row, within: Sequence[str]) -> tuple[str, str]:
    """Of Python and of its C library."""
    says = "import platform as p; print(p.python_version(), p.libc_ver()[1])"
    command = [*within, f"{relative(row)}/bin/python", "-c", says]
    python, libc = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    return python, libc


def tested(row: Row, within: Sequence[str], flags: Sequence[str], log: Path) -> tuple[str, str]:
    """(outcome, pytest's last line of each part that has tests)."""
    tests = WITH_SLURM if row.slurm else WITHOUT_SLURM if row.torch else WITHOUT_TORCH
    slurm = [f"JURYMAST_TESTCLUSTER_SLURM={row.slurm}"] if row.slurm else []
    command = [*within, "env", *slurm, f"{relative(row)}/bin/python", "-m", "pytest", "--dist=loadfile"]
    codes, lines = [], []
    for part, processes in PARTS:
        code = run([*command, f"--part={part}", f"--numprocesses={processes}", *tests, *flags], log)
        if code != NO_TESTS:
            codes.append(code)
            lines.append(log.read_text(errors="replace").strip().rpartition("\n")[2].strip("= "))
    return ("passed" if codes and not any(codes) else "failed"), "; ".join(lines)


def run(command: Sequence[str], log: Path) -> int:
    with log.open("a") as output:
        ran = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    return ran.returncode


def table(results: Sequence[Result]) -> str:
    """In Markdown."""
    lines = [
        "| Python | torch | C library | Slurm | outcome | tests |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in results:
        python = one.python or f"{one.row.python}, {one.row.system}"
        cells = (python, one.row.torch or "none", one.libc, one.row.slurm or "none", one.outcome, one.tests)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
