"""What a node's keeper needs to talk to others: the run's secret, and how their bytes are protected."""

from __future__ import annotations

from dataclasses import dataclass

from jurymast.wire import shield


@dataclass(frozen=True)
class Access:
    """`encrypt`: the policy wants images hidden on the network."""

    secret: bytes
    encrypt: bool = False

    @property
    def ways(self) -> tuple[str, ...]:
        """Raises PolicyError when they are to be hidden and cannot be."""
        return shield.ways(self.encrypt)
