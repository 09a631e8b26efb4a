"""A real Slurm cluster for the tests of this folder: one a test process, mended and checked after every test.

``JURYMAST_TESTCLUSTER_SLURM=24.11``, or 26.05, runs them on a newer Slurm, ``JURYMAST_TESTCLUSTER_DIR``
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slurm_runs import running_cluster
from testcluster import Cluster
from testcluster.settings import DEFAULT_DIR, DIR_VARIABLE


@pytest.fixture(scope="session")
def place() -> Path:
    """Directory of the cluster: each of the processes that the tests are divided among has one of its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    found = Path(os.environ.get(DIR_VARIABLE) or DEFAULT_DIR)
    return found if worker is None else found.with_name(f"{found.name}-{worker}")


@pytest.fixture(scope="session")
def cluster(place: Path) -> Iterator[Cluster]:
    """Six nodes with eight stand-in GPUs each."""
    with running_cluster(place, nodes=6) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_left(cluster: Cluster) -> Iterator[None]:
    """After each test: end its jobs, see what they left behind, and give the next one a healthy cluster."""
    yield
    strays = cluster.repair_all()
    assert strays == []
    assert cluster.leftovers() == []
