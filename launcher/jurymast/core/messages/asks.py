"""What people ask of a run by hand, through a command, and what they are answered."""

from __future__ import annotations

from jurymast.core.message import ToAsker, ToSupervisor
from jurymast.core.run.alert import Alert


class Ask(ToSupervisor, frozen=True, kw_only=True):
    """`what`: cancel, restart, drain (a `node`), rollback (to a `step`), save, or how (how is it?); `by`:
    who."""

    what: str
    by: str
    node: str = ""
    step: int | None = None


class Accepted(ToAsker, frozen=True, kw_only=True):
    """It is done now. `gives_up`: what a run that had ended was still waiting for, or ""."""

    gives_up: str = ""


class Declined(ToAsker, frozen=True, kw_only=True):
    """It cannot be done now, or not at all."""

    why: str


class Condition(ToAsker, frozen=True, kw_only=True):
    """How the run is where its journal may be silent: what it `waits` for, and why the `journal` cannot be
    written, "" for neither; the newest `step` done."""

    state: str
    waits: str
    journal: str
    step: int
    alerts: tuple[Alert, ...] = ()
