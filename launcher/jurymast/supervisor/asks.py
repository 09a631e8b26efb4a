"""What people ask of a run by hand: cancel, restart, drain, rollback, save, and how it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jurymast.core import events as ev
from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.effects import Effect
from jurymast.core.messages import Accepted, Ask, Condition, Declined, Said
from jurymast.core.state import Phase, RunState
from jurymast.supervisor.cadence import Cadence
from jurymast.wire.channel import Channel

KNOWN = {"cancel", "restart", "drain", "rollback", "save"}
HOW = "how"  # nothing is to be done: how is it?
# A drain by hand can wait so long for a save; with steps of minutes it loses some of them instead.
SAVE_LIMIT_S = 60.0


@dataclass
class Asks:
    """`do` carries effects out, `feed` journals an event, `now` is the supervisor's clock, `how` tells what
    the journal may not tell. `given_up_by`: who does not want to wait for the last checkpoint of a run that
    has ended."""

    state: RunState
    checkpoints: Checkpoints
    cadence: Cadence
    do: Callable[[Sequence[Effect]], None]
    feed: Callable[[ev.Event], None]
    now: Callable[[], float]
    how: Callable[[], Condition]
    given_up_by: str = ""

    async def answer(self, connection: Channel[Said], asked: Ask) -> None:
        """Say what comes of it, and do it."""
        what, by, node, back_to = asked.what, asked.by, asked.node, asked.step
        why = self._refusal(what, node, back_to)
        if what == "save" and not why and not self.cadence.ask(by):
            why = "its ranks have no Checkpointer, or have not done a step with it yet"
        connection.send(Declined(why=why) if why else self._told(what, by))
        await connection.drain()
        if why or what == HOW:
            return
        if what == "drain" and node in self.state.places:
            await self._save_before(f"drain of {node}, {by}")
        if what == "rollback" and back_to is not None:
            self.do(self.checkpoints.go_back(back_to, self.now()))
        self.feed(ev.Asked(t=self.now(), what=what, by=by, node=node))

    def _told(self, what: str, by: str) -> Accepted | Condition:
        if what == HOW:
            return self.how()
        if what == "cancel" and self.state.ended:
            self.given_up_by = by
            return Accepted(gives_up=self.checkpoints.unsaved())
        return Accepted()

    def _refusal(self, what: str, node: str, back_to: int | None) -> str:
        if what not in KNOWN and what != HOW:
            return f"unknown request {what!r}"
        if what == "drain" and node not in self.state.nodes:
            return f"no node {node!r} in this run; it has {', '.join(self.state.nodes)}"
        if what == "rollback" and back_to is None:
            return "a rollback needs the step to go back to"
        if what == "save" and self.state.phase is not Phase.RUNNING:
            return f"the run is {self.state.public_state}: no steps are being done"
        return ""

    def warned(self) -> None:
        """Slurm's warning (SIGUSR2) that a time limit or a preemption is near: what is done is kept."""
        self.feed(ev.Signalled(t=self.now(), signal="SIGUSR2"))
        if self.state.phase is Phase.RUNNING and self.cadence.ask("Slurm's warning"):
            self.feed(ev.Asked(t=self.now(), what="save", by="Slurm's warning"))

    async def _save_before(self, by: str) -> None:
        self.feed(ev.Asked(t=self.now(), what="save", by=by))
        if not await self.cadence.save_first(by, SAVE_LIMIT_S) and self.state.phase is Phase.RUNNING:
            self.feed(ev.Noted(t=self.now(), message=f"nothing was saved before the {by}"))
