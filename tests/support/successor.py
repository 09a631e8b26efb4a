"""A supervisor that takes a story over, and agents that answer it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jurymast.core.nodes.acknowledgement import Disk
from jurymast.core.nodes.watch import WATCH_INTERVAL_S
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import AskSuperseded, Effect, Send
from jurymast.core.supervision.machine import Heard, Supervision
from support.reports import hello
from support.stories import Story


def launches(effects: Sequence[Effect]) -> dict[str, msg.Launch]:
    """Who is told of a launch."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    return {one.node: one.message for one in sent if isinstance(one.message, msg.Launch)}


class Successor:
    """A supervisor that takes over, and agents that answer it as they should. `superseded`: what the run
    directory says when it is asked; None: it does not answer."""

    superseded: bool | None = False

    def __init__(self, story: Story) -> None:
        self.story, self.nodes = story, list[str]()
        self.machine = Supervision(story.state, "/runs/a", story.t)
        self.effects = self.machine.start(story.t)

    def joins(self, node: str, **said: Any) -> list[Effect]:
        self.nodes.append(node)
        known = self.story.state.nodes[node].incarnation
        greeting = hello(node, incarnation=known, **said)
        effects = self.machine.on_agent_joined(node, len(self.nodes), greeting, self.story.t)
        self.machine.check()
        return effects

    def hears(self, node: str, message: Heard) -> list[Effect]:
        effects = self.machine.on_message(node, self.nodes.index(node) + 1, message, self.story.t)
        self.machine.check()
        return effects

    def waits(
        self,
        seconds: float,
        beating: Sequence[str] | None = None,
        *,
        unwritten: bool = False,
        hangs: bool = False,
    ) -> list[Effect]:
        """Heartbeats come from all that have joined, or from these only. `unwritten`: the journal is;
        `hangs`: its storage does, all the time."""
        effects: list[Effect] = []
        for number in range(round(seconds / WATCH_INTERVAL_S)):
            self.story.t += WATCH_INTERVAL_S
            for node in self.nodes if beating is None else beating:
                effects += self.hears(node, msg.Beat(1, []))
            waits_s = number * WATCH_INTERVAL_S if hangs else 0.0
            due = self.machine.on_time(self.story.t, Disk(waits_s, int(unwritten)))
            effects += due
            if AskSuperseded() in due and self.superseded is not None:
                effects += self.machine.on_superseded(self.superseded, self.story.t)
        return effects

    def fenced(self, attempt: int) -> dict[str, msg.Launch]:
        """Whom that lets launch."""
        return launches(self.machine.on_fenced(attempt, "", self.story.t))


def image(rank: int, tier: str = "memory") -> msg.CopyReport:
    return msg.CopyReport(step=8, attempt=1, rank=rank, world=2, tier=tier, part="all", size_bytes=9)


def written(effects: list[Effect]) -> dict[str, msg.Write]:
    """Who is to write, and what."""
    sent = [effect for effect in effects if isinstance(effect, Send)]
    return {one.node: one.message for one in sent if isinstance(one.message, msg.Write)}


def sent_home(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Send) and isinstance(effect.message, msg.Leave) for effect in effects)
