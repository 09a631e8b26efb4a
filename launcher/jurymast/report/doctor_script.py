"""What a script will find on a compute node: `jurymast doctor` in its place, behind its set-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

import psutil

from jurymast.report.doctor import NO, NOTE, YES, Check

LOOK_S = 60.0
# In the script's own Python, which need not have jurymast.
LOOK = """
import importlib.metadata as m, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return "none"
print("%d.%d" % sys.version_info[:2], version("jurymast"), version("torch"), sys.executable)
"""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def examine_script(environment: Mapping[str, str]) -> Iterator[Check]:
    """Nothing outside a Slurm job."""
    if "SLURM_JOB_ID" not in environment:
        return
    yield _python(environment)
    for variable in INTERFACES:
        if variable in environment:
            yield _interface(variable, environment[variable], set(psutil.net_if_addrs()))


def _python(environment: Mapping[str, str]) -> Check:
    name = "the script's python"
    path = environment.get("PATH", os.defpath)
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    if found is None:
        return Check(name, NO, f"none on PATH: {path}", "load its module or environment before")
    try:
        command = [found, "-c", LOOK]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False)
        python, ours, torch, place = done.stdout.strip().split(" ", 3)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return Check(name, NO, f"{found} does not run: {type(error).__name__}", "try: python -c pass")
    told = f"{place} (Python {python}, torch {torch}, jurymast {ours})"
    missing = [package for package, version in (("jurymast", ours), ("torch", torch)) if version == "none"]
    if missing:
        return Check(name, NO, told, f"{place} -m pip install {' '.join(missing)}")
    from jurymast import __version__

    if ours != __version__:
        return Check(name, NOTE, told, f"this one is {__version__}, in {sys.executable}: install the same")
    return Check(name, YES, told)


def _interface(variable: str, value: str, here: set[str]) -> Check:
    """As NCCL reads it: names begin so; `=` before them means all of the name, `^` others than these. gloo
    knows names only."""
    exact, others = "=" in value[:2], value.startswith("^")
    names = re.sub(r"^\^?=?", "", value).split(",")

    def is_named(interface: str) -> bool:
        whole = exact or variable.startswith("GLOO")
        return any(interface == name if whole else interface.startswith(name) for name in names)

    if any(is_named(interface) != others for interface in here):
        return Check(variable, YES, value)
    found = f"{value}, which is none of {', '.join(sorted(here))}"
    return Check(variable, NO, found, "name one that all nodes have")
