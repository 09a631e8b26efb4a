"""A real Slurm cluster on one machine: for tests, benchmarks and anyone trying jurymast.

Every node has its own network, process, mount, host-name and IPC namespaces, its own munge and slurmd,
and dies, hangs or loses its network as a machine would. ``Cluster`` is the whole interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testcluster.cluster import Cluster
    from testcluster.errors import ClusterError

__all__ = ["Cluster", "ClusterError"]


def __getattr__(name: str) -> Any:
    """Import on first use: machine.py and enter.py start often and need none of the rest."""
    if name == "Cluster":
        from testcluster.cluster import Cluster

        return Cluster
    if name == "ClusterError":
        from testcluster.errors import ClusterError

        return ClusterError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
