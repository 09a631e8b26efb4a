"""What a keeper holds, as its machine sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, LOCAL, MEMORY, PEER, age

# The order in which a reader is served.
TIERS = (MEMORY, PEER, LOCAL)

# (step, attempt, rank): the same step of another attempt is another state.
Image = tuple[int, int, int]
Entry = tuple[Image, str, str, tuple[int, ...]]


class KeptCopy:
    """One image or part of one, or with a `group` the XOR of that part of these ranks' images. `buffer`: the
    number of the buffer that contains it; 0: it is on the node's own disk. The machine's caller adds what it
    needs itself."""

    def __init__(self, report: msg.CopyReport, buffer: int) -> None:
        self.report = report
        self.buffer = buffer
        self.image: Image = report.step, report.attempt, report.rank
        self.tier, self.part = report.tier, report.part
        self.group = tuple(one.rank for one in report.members)

    @property
    def entry(self) -> Entry:
        """The key of a copy; no two copies with the same key are held."""
        return self.image, self.tier, self.part, self.group

    @property
    def age(self) -> tuple[int, int]:
        """Of two states the newer one's age is greater."""
        return age(self.image[:2])


Kept = TypeVar("Kept", bound=KeptCopy)


def best_first(
    copies: Iterable[Kept], image: Image, tiers: Collection[str] = TIERS, group: tuple[int, ...] = ()
) -> list[Kept]:
    """Return the copies of this image or parts of it, best first; with a `group`, of that group's XOR."""
    found = [one for one in copies if one.image == image and one.tier in tiers and one.group == group]
    return sorted(found, key=lambda one: (one.part != ALL, TIERS.index(one.tier)))
