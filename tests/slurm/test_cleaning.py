"""Cleaning a node's disks between tests never reaches what is mounted into them from the host."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from testcluster import Cluster

pytestmark = pytest.mark.slurm


def test_cleaning_spares_what_the_host_has_mounted_below_a_disk(cluster: Cluster, tmp_path: Path) -> None:
    """As the checkout is, and the Python, when they lie below the host's /tmp."""
    name = f"{tmp_path.name}-{secrets.token_hex(4)}"  # the shared directory outlives this session
    precious = cluster.shared / name
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "file").write_text("kept")
    own, way = f"/tmp/{name}-own", f"/tmp/{name}-way"
    script = (
        f"mkdir -p {own} {way}/place && mount --bind {precious} {way}/place && touch {own}/file {way}/file"
    )
    try:
        cluster.exec("n1", ["bash", "-c", script], root=True)
        cluster.repair_all()
        assert (precious / "deep" / "file").read_text() == "kept"
        found = cluster.exec("n1", ["find", "/tmp", "-path", f"/tmp/{name}*"], root=True)
        assert sorted(found.stdout.split()) == [
            way,
            *(f"{way}/place{rest}" for rest in ("", "/deep", "/deep/file")),
        ]
    finally:
        cluster.fault("crash", "n1")
        cluster.repair("n1")
