"""Nodes that are to leave although nothing failed.

An administrator may drain a node while the run has it: Slurm gives it no other job, and the administrator
waits for this one. Its ranks save and move to a spare as soon as one is ready, and Slurm gets the node back.
Nothing waits for that, and without a spare the ranks stay. Or a user requests that a node leaves: its ranks
save, and it is removed in any case.
"""

from __future__ import annotations

from collections.abc import Mapping

from jurymast.core.nodes.health import SickNodes
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, LookAtNodes, Record, SaveFirst
from jurymast.core.state.run import Node, Phase, Role, RunState

LOOK_EVERY_S = 30.0
# After the ranks have moved: by then they have saved, and nobody needs what the node holds.
BACK_AFTER_S = 60.0


class Withdrawals:
    """`now` is the supervisor's clock. `moves` are requests to take nodes out, one at a time."""

    def __init__(self, state: RunState, sick: SickNodes) -> None:
        self._state, self._sick = state, sick
        self._look_at = 0.0
        self._looking = False
        # Whether some node may be drained: if not, thousands need not be looked at each time.
        self._any = True
        self._asked: set[str] = set()  # nodes whose ranks were asked to move

    def on_time(self, now: float) -> list[Effect]:
        state = self._state
        if self._looking or now < self._look_at or state.phase is not Phase.RUNNING:
            return []
        self._look_at, self._looking = now + LOOK_EVERY_S, True
        return [LookAtNodes(tuple(state.nodes))]

    def on_nodes_seen(self, draining: Mapping[str, str] | None, now: float) -> list[Effect]:
        """Take in which nodes are being drained, with the reasons; None: Slurm did not say."""
        self._looking = False
        if draining is None:
            return []
        self._any, out = bool(draining), list[Effect]()
        for name, node in self._state.nodes.items():
            why = draining.get(name, "")
            if node.draining != why and (node.role is not Role.FAILED or not why):
                out.append(Record(ev.NodeDraining(t=now, node=name, why=why)))
        return out

    def save_first(self, ask: msg.Ask, now: float) -> list[Effect]:
        """The ranks of this node save before it is removed."""
        self._asked.add(ask.node)
        save = ev.Asked(t=now, what="save", by=ask.by, node=ask.node)
        drain = ev.Asked(t=now, what="drain", by=ask.by, node=ask.node)
        return [Record(save), SaveFirst(f"{ask.by}, before {ask.node} is removed", drain)]

    def moves(self, now: float) -> list[msg.Ask]:
        """Which node is to be taken out now."""
        state = self._state
        if state.phase is not Phase.RUNNING or state.incident is not None or state.end_order is not None:
            return []
        if now < state.rejoin_until:  # then ranks have been heard, and can save first
            return []
        for name, by in state.to_remove.items():
            if name not in self._asked:  # an earlier supervisor was lost between the save and the removal
                return self._take_out(state.nodes[name], by, now)
        if not self._any or state.settings.bad_nodes == "report" or state.alone:
            return []
        for node in self._draining():
            if node.name in state.places and not self._has_spare():
                continue
            return self._take_out(node, f"Slurm's administrator ({node.draining})", now)
        return []

    def _take_out(self, node: Node, by: str, now: float) -> list[msg.Ask]:
        self._asked.add(node.name)
        if node.draining:
            self._sick.give_back_later(node.name, now + BACK_AFTER_S)
        return [msg.Ask(what="drain", by=by, node=node.name)]

    def _draining(self) -> list[Node]:
        nodes = self._state.nodes.values()
        return [n for n in nodes if n.draining and n.role is not Role.FAILED and n.name not in self._asked]

    def _has_spare(self) -> bool:
        return any(node.role is Role.SPARE and not node.draining for node in self._state.spare_nodes())
