"""What `jurymast doctor` says of a script's environment on a compute node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

import jurymast
from jurymast.report.doctor import NO, NOTE, YES, DoctorCheck, examine_script

HERE = sorted(psutil.net_if_addrs())[0]


def told(**environment: str) -> dict[str, DoctorCheck]:
    path = os.path.dirname(sys.executable)
    given = {"SLURM_JOB_ID": "7", "PATH": path, **environment}
    return {check.name: check for check in examine_script(given)}


def test_nothing_is_said_outside_a_job() -> None:
    assert list(examine_script({"PATH": "/usr/bin"})) == []


def test_the_python_that_will_train() -> None:
    assert told()["the script's python"].answer == YES
    assert told(PATH="/nowhere")["the script's python"].answer == NO


@pytest.mark.parametrize(
    ("prints", "answer", "todo"),
    [
        ("3.11 none 2.13.0 /opt/python", NO, "/opt/python -m pip install jurymast"),
        ("3.11 none none /opt/python", NO, "/opt/python -m pip install jurymast torch"),
        ("3.11 0.0.1 2.13.0 /opt/python", NOTE, f"this one is {jurymast.__version__}"),
        ("", NO, "python -c pass"),
    ],
)
def test_a_python_that_will_not_do(prints: str, answer: str, todo: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {prints}\n")
    python.chmod(0o755)
    check = told(PATH=str(tmp_path))["the script's python"]
    assert check.answer == answer
    assert todo in check.todo


@pytest.mark.parametrize(
    ("variable", "value", "answer"),
    [
        ("GLOO_SOCKET_IFNAME", HERE, YES),
        ("GLOO_SOCKET_IFNAME", f"nowhere,{HERE}", YES),
        ("GLOO_SOCKET_IFNAME", "nowhere0", NO),
        ("NCCL_SOCKET_IFNAME", HERE[:1], YES),
        ("NCCL_SOCKET_IFNAME", f"={HERE[:1]}", NO),
        ("NCCL_SOCKET_IFNAME", f"={HERE}", YES),
        ("NCCL_SOCKET_IFNAME", "^nowhere", YES),
    ],
)
def test_the_interfaces_that_are_named(variable: str, value: str, answer: str) -> None:
    assert told(**{variable: value})[variable].answer == answer
