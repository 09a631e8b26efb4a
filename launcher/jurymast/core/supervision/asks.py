"""Requests of users: cancel, restart, drain, rollback, save."""

from __future__ import annotations

from jurymast.core import events as ev
from jurymast.core.checkpoints.agreement import Agreement
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.effects import Effect, Record, SaveFirst
from jurymast.core.messages import Accepted, Ask, Declined
from jurymast.core.run.state import Phase, RunState

KNOWN = {"cancel", "restart", "drain", "rollback", "save"}
WARNING = "Slurm's warning"
ON_STORAGE = "a user while no supervisor was reachable"


class Asks:
    """Handles requests. `given_up_by`: the user who does not want to wait for the last checkpoint of an ended
    run. `now` is Unix time in seconds."""

    def __init__(self, state: RunState, checkpoints: Checkpoints, agreement: Agreement) -> None:
        self._state, self._checkpoints, self._agreement = state, checkpoints, agreement
        self.given_up_by = ""

    def answer(self, asked: Ask, now: float) -> tuple[Accepted | Declined, list[Effect]]:
        """Return the answer to a request, and its effects."""
        if why := self._refusal(asked):
            return Declined(why=why), []
        accepted = Accepted()
        if asked.what == "cancel" and self._state.ended:
            self.given_up_by = asked.by
            accepted = Accepted(gives_up=self._checkpoints.unsaved())
        return accepted, self._begin(asked, now)

    def _refusal(self, asked: Ask) -> str:
        what, nodes = asked.what, self._state.nodes
        if what not in KNOWN:
            return f"unknown request {what!r}"
        if what == "drain" and asked.node not in nodes:
            return f"no node {asked.node!r} in this run; it has {', '.join(nodes)}"
        if what == "rollback" and asked.step is None:
            return "a rollback needs the step to go back to"
        if what == "save" and self._state.phase is not Phase.RUNNING:
            return f"the run is {self._state.public_state}: it does no steps now"
        if what == "save" and not self._agreement.ask(asked.by):
            return "its ranks have no Checkpointer, or have not finished a step with it yet"
        return ""

    def _begin(self, asked: Ask, now: float) -> list[Effect]:
        event = ev.Asked(t=now, what=asked.what, by=asked.by, node=asked.node)
        if asked.what == "drain" and asked.node in self._state.places:
            why = f"{asked.by}, before {asked.node} is removed"
            return [Record(ev.Asked(t=now, what="save", by=why)), SaveFirst(why, event)]
        back = []
        if asked.what == "rollback" and asked.step is not None:
            back = self._checkpoints.go_back(asked.step, now)
        return [*back, Record(event)]

    def found_on_storage(self, now: float) -> list[Effect]:
        """Carry out a rollback that was written to storage while no supervisor answered. What the ranks save
        in this attempt is void, so continuing would be worse than going back."""
        step = self._checkpoints.missed_rollback
        if step is None or self._state.phase not in (Phase.LAUNCHING, Phase.RUNNING):
            return []
        return self._begin(Ask(what="rollback", by=ON_STORAGE, step=step), now)

    def warned(self, now: float) -> list[Effect]:
        """Slurm warned (SIGUSR2) that a time limit or a preemption is near: save what is done."""
        effects: list[Effect] = [Record(ev.Signalled(t=now, signal="SIGUSR2"))]
        if self._state.phase is Phase.RUNNING and self._agreement.ask(WARNING):
            effects.append(Record(ev.Asked(t=now, what="save", by=WARNING)))
        return effects
