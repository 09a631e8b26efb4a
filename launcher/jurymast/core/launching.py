"""When the nodes of a decided launch are told to start: not before earlier attempts are fenced off, and not
before all who may hold a part of what it restores have said so. Unknown is not no."""

from __future__ import annotations

from collections.abc import Collection

from jurymast.core.copies import Copies
from jurymast.core.texts import some

# A launch that waits for so long is told of, and again each time as much has passed.
WAIT_TOLD_S = 15.0
NAMED_MAX = 5


def waits_for(
    placement: Collection[str], here: Collection[str], away: Collection[str], copies: Copies, directory: str
) -> str:
    """What the launch on `placement` has to wait for; "" for nothing.

    `here` are the nodes whose agents are connected; `away` those that are to come back and have time left for
    it, as after a take-over: while `copies` are not enough a spare among them may have the only one of
    something. `directory` is the run directory while the attempt's number is not in it, else "".
    """
    if directory:
        return f"the run directory {directory}, which does not answer"
    missing = sorted({*placement}.difference(here))
    if not missing and away and not copies.newest_is_whole():
        missing = sorted(away)
    if not missing:
        return ""
    return f"the agents of {some(missing, NAMED_MAX)}"
