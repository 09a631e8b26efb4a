"""What the supervisor needs of the world around it, as interfaces with a real and a simulated side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Cluster(Protocol):
    """Where the nodes come from."""

    async def requeue(self, exclude: Sequence[str]) -> None:
        """Give the allocation back and ask for one without `exclude`. Raises ClusterUnavailableError."""

    async def why_ending(self) -> str:
        """After a SIGTERM: cancelled, timeout, preempted or unknown."""

    async def release(self) -> None:
        """The run is over but nothing will end the allocation by itself (its batch host died): end it."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the Unix epoch; never runs backwards."""
