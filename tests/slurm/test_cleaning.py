"""Cleaning a node's disks between tests never reaches what is mounted into them from the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from testcluster import Cluster

pytestmark = pytest.mark.slurm


def test_cleaning_spares_what_the_host_has_mounted_below_a_disk(cluster: Cluster, tmp_path: Path) -> None:
    """As the checkout is, and the Python, when they lie below the host's /tmp."""
    precious = cluster.shared / tmp_path.name
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "file").write_text("kept")
    script = (
        f"mkdir -p /tmp/way/place /tmp/own && mount --bind {precious} /tmp/way/place && touch /tmp/own/file"
    )
    try:
        cluster.exec("n1", ["bash", "-c", script], root=True)
        cluster.repair_all()
        assert (precious / "deep" / "file").read_text() == "kept"
        found = cluster.exec("n1", ["find", "/tmp", "-mindepth", "1", "-maxdepth", "3"], root=True)
        assert sorted(found.stdout.split()) == ["/tmp/way", "/tmp/way/place", "/tmp/way/place/deep"]
    finally:
        cluster.fault("crash", "n1")
        cluster.repair("n1")
