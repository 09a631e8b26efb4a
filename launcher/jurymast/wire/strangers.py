"""Counts messages that are not understood, and names the first: nothing ends because of them.

Both sides of a connection have the same version (see `channel.MAGIC`). So such a message is a defect of
jurymast, or of somebody who knows the run's secret: people should hear of it, and the training should go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jurymast.core.message import Strange

KINDS_TOLD = 5


class Strangers:
    """`note` tells people, of a sender."""

    def __init__(self, note: Callable[[str, str], object]) -> None:
        self._note = note
        self._said: dict[str, Counter[str]] = {}
        self._told: dict[str, int] = {}

    def heard(self, sender: str, what: Strange) -> None:
        """The sender's first one is told at once."""
        kinds = self._said.setdefault(sender, Counter())
        kinds[what.kind] += 1
        if sender not in self._told:
            self._told[sender] = 1
            self._note(sender, f"an unknown message was ignored: {what}")

    def left(self, sender: str) -> None:
        """The connection has ended: how many it were by now, if that was not told."""
        kinds = self._said.get(sender, Counter())
        if kinds.total() > self._told.get(sender, 0):
            self._told[sender] = kinds.total()
            told = ", ".join(f"{kind or 'without a kind'} {n}" for kind, n in kinds.most_common(KINDS_TOLD))
            self._note(sender, f"{kinds.total()} unknown messages were ignored: {told}")
