"""Nodes that are to leave although nothing failed.

An administrator may drain a node while the run has it: Slurm gives it no other job, and the administrator
waits for this one. Or a reservation is about to begin on it. Its ranks save and move to a spare as soon as
one is ready, and Slurm gets the node back. Nothing waits for that, and without a spare the ranks stay. Or a
user requests that a node leaves: its ranks save, and it is removed in any case.
"""

from __future__ import annotations

from collections.abc import Mapping

from jurymast.core.nodes.health import SickNodes
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, LookAtNodes, Record, SaveFirst
from jurymast.core.state.run import Node, Phase, Role, RunState

# Slurm tells no user when a node is drained. It is asked as often as costs it little: to send what it knows
# of all its nodes takes most of the time until it answers, so a large cluster is asked less often, and so is
# a slurmctld that has much to do.
LOOK_LEAST_S, LOOK_MOST_S, LOOK_SHARE = 10.0, 30.0, 0.01
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
        self._look_at, self._looking = now + LOOK_MOST_S, True
        return [LookAtNodes(tuple(state.nodes))]

    def on_nodes_seen(self, draining: Mapping[str, str] | None, now: float) -> list[Effect]:
        """Take in which nodes are being drained, with the reasons; None: Slurm did not say."""
        self._looking = False
        asked_at = self._look_at - LOOK_MOST_S
        if draining is None:
            return []
        self._look_at = asked_at + min(LOOK_MOST_S, max(LOOK_LEAST_S, (now - asked_at) / LOOK_SHARE))
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
        drain = ev.Asked(t=now, what="drain", by=ask.by, node=ask.node, reserved=self._is_ahead(ask))
        return [Record(save), SaveFirst(f"{ask.by}, before {ask.node} is removed", drain)]

    def moves(self, now: float) -> list[msg.Ask]:
        """Which node is to be taken out now."""
        state = self._state
        if state.phase is not Phase.RUNNING or state.incident is not None or state.end_order is not None:
            return []
        if now < state.rejoin_until:  # then ranks have been heard, and can save first
            return []
        # These stayed: something else ended the attempt, and there was no spare for them as well.
        self._asked -= state.places.keys() - state.to_remove.keys()
        for name, by in state.to_remove.items():
            if name not in self._asked:  # an earlier supervisor was lost between the save and the removal
                return self._take_out(state.nodes[name], by, now)
        going = self._any or any(one.near for one in state.reservations.values())
        if not going or state.settings.bad_nodes == "report" or state.alone:
            return []
        for node in self._going():
            if node.name in state.places and not self._has_spare():
                continue
            return self._take_out(node, _whose(node), now)
        return []

    def _is_ahead(self, ask: msg.Ask) -> bool:
        """Whether this was asked because of a reservation."""
        node = self._state.nodes[ask.node]
        return not node.draining and bool(node.reserved) and ask.by == _whose(node)

    def _take_out(self, node: Node, by: str, now: float) -> list[msg.Ask]:
        self._asked.add(node.name)
        if node.going:
            self._sick.give_back_later(node.name, now + BACK_AFTER_S)
        return [msg.Ask(what="drain", by=by, node=node.name)]

    def _going(self) -> list[Node]:
        """A spare that is reserved is better than none until then."""
        state = self._state
        left = (n for n in state.nodes.values() if n.role is not Role.FAILED and n.name not in self._asked)
        return [n for n in left if n.draining or (n.reserved and n.name in state.places)]

    def _has_spare(self) -> bool:
        """Whether there is a spare besides those for ranks that save already, and then move together."""
        state = self._state
        spares = sum(node.role is Role.SPARE and not node.going for node in state.spare_nodes())
        return spares > sum(name in state.places for name in state.to_remove)


def _whose(node: Node) -> str:
    """Who wants the node to leave."""
    if node.draining:
        return f"Slurm's administrator ({node.draining})"
    return f"jurymast, as {node.reserved} is ahead"
