"""What a run's supervisor says itself where its journal is silent: on a full disk none can be written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurymast import foreign
from jurymast.core.run.state import RunState
from jurymast.errors import RunDirectoryError
from jurymast.rundir import RunDirectory
from jurymast.wire.endpoint import find

if TYPE_CHECKING:
    from jurymast.core.messages import Condition

# While steps are done a supervisor writes every two seconds, of a run that is no longer young less often.
SILENT_S = 10.0


def hear(directory: RunDirectory, state: RunState, silent_s: float) -> Condition | None:
    """How it is; None when there is no need to ask, or no answer. A run that has ended may still wait for its
    last checkpoint."""
    if foreign.exists(directory.outcome_file) or (silent_s < SILENT_S and not state.ended):
        return None
    if find(directory.epochs) is None:
        return None
    from jurymast.core.messages import Condition
    from jurymast.wire.ask import ask  # with asyncio, which is seldom needed

    try:
        answer = ask(directory, "how", by="")
    except RunDirectoryError:
        return None
    return answer if isinstance(answer, Condition) else None
