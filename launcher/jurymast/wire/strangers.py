"""Counts messages that are not understood, and reports the first; nothing ends because of them.

Both sides of a connection have the same version (see `channel.MAGIC`). So such a message comes from a bug in
jurymast, or from somebody who knows the run's secret: people should learn of it, and the training should go
on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jurymast.core.message import Strange

KINDS_TOLD = 5


class Strangers:
    """The unknown messages of each sender; `note` reports them to people."""

    def __init__(self, note: Callable[[str, str], object]) -> None:
        self._note = note
        self._said: dict[str, Counter[str]] = {}
        self._told: dict[str, int] = {}

    def heard(self, sender: str, what: Strange) -> None:
        """Count a message; the sender's first one is reported at once."""
        kinds = self._said.setdefault(sender, Counter())
        kinds[what.kind] += 1
        if sender not in self._told:
            self._told[sender] = 1
            self._note(sender, f"an unknown message was ignored: {what}")

    def left(self, sender: str) -> None:
        """Report, once the connection has ended, how many messages there were, unless that was reported."""
        kinds = self._said.get(sender, Counter())
        if kinds.total() > self._told.get(sender, 0):
            self._told[sender] = kinds.total()
            told = ", ".join(f"{kind or 'without a kind'} {n}" for kind, n in kinds.most_common(KINDS_TOLD))
            self._note(sender, f"{kinds.total()} unknown messages were ignored: {told}")
