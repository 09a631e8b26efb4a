"""Asking the supervisor from a command: what cancel, restart, drain, rollback and save have in common."""

from __future__ import annotations

from jurymast.cli.options import user
from jurymast.errors import NotNowError
from jurymast.rundir import RunDirectory


def refuse_ended(directory: RunDirectory, what: str) -> None:
    """Raises NotNowError when the run is over."""
    from jurymast.report.status import public_state, read_status

    watcher = read_status(directory)
    if watcher.state.ended:
        from jurymast.report.liveness import Liveness

        word, why = public_state(watcher.state, Liveness("ended"))
        raise NotNowError(f"the run has ended ({word}: {why}): there is nothing to {what}")


def ask_supervisor(directory: RunDirectory, what: str, node: str = "", *, step: int | None = None) -> None:
    """Raises NotNowError when the supervisor refuses, or none answers."""
    from jurymast.core.messages import Declined
    from jurymast.wire.ask import ask

    refuse_ended(directory, what)
    answer = ask(directory, what, by=user(), node=node, step=step)
    if answer is None:
        raise NotNowError(
            "no supervisor answers for this run", hint=f"jurymast status {directory.root} says how it is"
        )
    if isinstance(answer, Declined):
        raise NotNowError(f"the supervisor refuses: {answer.why}")
