"""What a user requests of a run, sent to its supervisor."""

from __future__ import annotations

import getpass
import os

from jurymast.errors import NotNowError
from jurymast.rundir import RunDirectory


def user() -> str:
    """The user who makes the request, for the journal."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def ask_supervisor(directory: RunDirectory, what: str, node: str = "", *, step: int | None = None) -> str:
    """Send a request to the supervisor. Return what the user should know as well, or "". Raises NotNowError
    if it refuses, if none answers, or if the run has ended."""
    from jurymast.core.state.messages import Accepted, Declined
    from jurymast.report.liveness import Liveness
    from jurymast.report.status import public_state, read_status
    from jurymast.wire.channel import ask

    watcher = read_status(directory)
    if watcher.plan.observed:
        raise NotNowError("the run is only observed: jurymast does nothing to it")
    state = watcher.state
    if state.ended:
        word, why = public_state(state, Liveness("ended"))
        raise NotNowError(f"the run has ended already ({word}: {why})")
    answer = ask(directory, what, by=user(), node=node, step=step)
    if answer is None:
        raise NotNowError("no supervisor answers for this run", hint=f"see jurymast status {directory.root}")
    if isinstance(answer, Declined):
        raise NotNowError(f"the supervisor refused: {answer.why}")
    if isinstance(answer, Accepted) and answer.unwritten:
        return "; the run directory could not be written in time: if another supervisor takes over, ask again"
    return ""
