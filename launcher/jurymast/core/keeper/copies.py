"""What a keeper holds, as its machine sees it."""

from __future__ import annotations

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import age

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
