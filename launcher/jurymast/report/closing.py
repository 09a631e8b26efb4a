"""Closes the journal of a run that no supervisor serves any more, after a cancel by hand."""

from __future__ import annotations

import socket
import time

import jurymast
from jurymast.core import events as ev
from jurymast.core.run.machine import step
from jurymast.core.run.state import RunState
from jurymast.journal import JournalWriter, first_events, replay
from jurymast.rundir import RunDirectory, write_json
from jurymast.wire.endpoint import claim_epoch


def record_cancel(directory: RunDirectory, *, by: str) -> RunState:
    """Record in the journal, as a new epoch, that `by` cancelled the run; then write the outcome, for which
    other runs may wait that want to use the checkpoint directory. The run's job must have ended. Claiming the
    epoch fences a supervisor that could not be reached. Raises RunDirectoryError, OSError."""
    epoch = claim_epoch(directory.epochs)
    state = replay(directory)
    if state.ended:
        return state
    journal = JournalWriter(directory.journal, epoch)
    t = max(time.time(), state.now)
    events = first_events(directory, t, jurymast.__version__) if state.epoch == 0 else []
    events += [
        ev.SupervisorStarted(t=t, epoch=epoch, node=socket.gethostname(), read=dict(state.lines_read)),
        ev.Asked(t=t, what="cancel", by=by),
    ]
    for event in events:
        instructions = step(state, event)
        journal.event(event)
        for instruction in instructions:
            journal.decision(state.now, instruction)
    journal.close()
    outcome = {"state": state.public_state, "exit_code": state.exit_code, "exclude": [], "lost": []}
    write_json(directory.outcome_file, outcome)
    return state
