"""A run where no IPv4 address is left, not even loopback's: a node is lost, and a spare takes its place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

WITHOUT_IPV4 = "ip link set lo up && ip -4 addr flush dev lo && exec "


def _no_own_network() -> str:
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        return "needs root, unshare and ip"
    shown = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{WITHOUT_IPV4} ip addr"],
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if "::1" in shown.stdout and "127.0.0.1" not in shown.stdout else "there is no IPv6 here"


def test_a_run_without_ipv4_loses_a_node_and_goes_on(tmp_path: Path) -> None:
    if why := _no_own_network():
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f'{WITHOUT_IPV4} "$@"', "sh", sys.executable, "-m", "jurymast",
         "demo", "--keep", "--steps", "120"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "JURYMAST_RUNS": str(tmp_path / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a spare in" in done.stdout
    (plan,) = (tmp_path / "runs").glob("*/plan.json")
    outcome = json.loads((plan.parent / "outcome.json").read_text())
    assert outcome["state"] == "succeeded"


def test_a_node_announces_the_addresses_of_ipv6_that_it_has() -> None:
    """Also if nobody resolves its name to them."""
    if why := _no_own_network():
        pytest.skip(why)
    card = "ip link add here type veth peer name there && ip addr add fd00::7/64 dev here nodad && "
    card += "ip link set here up && ip link set there up && exec "
    tell = "import socket\nfrom jurymast.cluster import allocation\n"
    tell += "listeners = allocation.listen('slurm')\n"
    tell += "print(allocation.own_addresses(), [one.getsockname()[0] for one in listeners])"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f'{card}"$@"', "sh", sys.executable, "-c", tell],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "['fd00::7'] ['fd00::7']\n", done.stderr
