"""Carries out a decided launch: its nodes are told to start, but only after earlier attempts are fenced off,
and after all nodes that may hold a part of what it restores have reported. Unknown is not no. What another
number of ranks saved is brought before to where this one can restore it."""

from __future__ import annotations

from typing import Any

from jurymast.core.checkpoints.checkpoints import Checkpoints
from jurymast.core.nodes.watch import Watch
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Fence, Launch, Record, Send
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.texts import compressed, some

# ---- a launch

# A launch that has waited this long is reported, and again each time this much more has passed.
WAIT_TOLD_S = 15.0
NAMED_MAX = 5
# For so long no progress of the newest checkpoint towards shared storage, in seconds, is waited for.
RESHARD_STILL_S = 300.0
# This many nodes share one look per second at whether all of them are there.
LOOKS_A_SECOND = 10_000.0


def may_know_more(attempts: int, watch: Watch, checkpoints: Checkpoints) -> list[str]:
    """Return the nodes that are to return, as after a take-over, if one of them may have the only image of
    something: without them the newest state is not whole. If no attempt was made yet (`attempts` is their
    number), none has."""
    away = watch.away() if attempts else []
    return away if away and not checkpoints.copies.newest_is_whole() else []


class Launching:
    """Handles one launch at a time; a newer one ends it. `now` is the supervisor's clock."""

    def __init__(self, state: RunState, watch: Watch, checkpoints: Checkpoints, directory: str) -> None:
        self._state, self._watch, self._checkpoints = state, watch, checkpoints
        self._directory = directory
        self._launch: Launch | None = None
        self._fenced = False
        self._since = self._told_at = self._look_at = 0.0
        self._nodes = ""
        self._told = False  # whether what it restores is decided and sent

    def begin(self, launch: Launch, now: float) -> list[Effect]:
        self._launch, self._fenced, self._told = launch, False, False
        self._nodes = compressed(launch.placement)
        self._since = self._told_at = now
        return [Fence(launch.attempt)]

    def on_fenced(self, attempt: int, why: str, now: float) -> list[Effect]:
        """The attempt's number is in the run directory. If not (`why`), no checkpoint can be saved to shared
        storage, but the training can continue."""
        if self._launch is None or self._launch.attempt != attempt:
            return []
        self._fenced = True
        effects: list[Effect] = [Record(ev.Noted(t=now, message=why))] if why else []
        return effects + self.look(now)

    def on_time(self, now: float) -> list[Effect]:
        """Do what is due. To be called often."""
        return self.look(now) if now >= self._look_at else []

    def look(self, now: float) -> list[Effect]:
        """Send the launch to the nodes unless it has to wait."""
        launch = self._launch
        if launch is None or self._told or not self._is_due(launch):
            return []
        self._look_at = now + len(self._state.nodes) / LOOKS_A_SECOND
        what, effects = self.waits_for(launch), list[Effect]()
        if not what:
            effects, what = self._reshard(launch, now)
        if not what:
            return effects + self._tell(launch, now)
        if now <= self._told_at + WAIT_TOLD_S:
            return effects
        self._told_at = now
        waited_s = round(now - self._since, 3)
        return [*effects, Record(ev.LaunchWaits(t=now, attempt=launch.attempt, what=what, seconds=waited_s))]

    def _reshard(self, launch: Launch, now: float) -> tuple[list[Effect], str]:
        """See that what another number of ranks saved can be restored, unless that makes no progress."""
        effects, what = self._checkpoints.reshard(len(launch.placement) * self._state.ranks_per_node, now)
        if what and now > max(self._since, self._checkpoints.moved_at) + RESHARD_STILL_S:
            text = f"{what}, made no progress for {RESHARD_STILL_S:.0f} s: an older checkpoint is restored"
            return [*effects, Record(ev.Noted(t=now, message=text))], ""
        return effects, what

    def waits_for(self, launch: Launch) -> str:
        """Return what the launch has to wait for; "" for nothing."""
        if not self._fenced:
            return f"the run directory {self._directory}, which does not answer"
        missing = {*launch.placement} - self._watch.here
        missing = missing or {*may_know_more(launch.attempt - 1, self._watch, self._checkpoints)}
        return f"the agents of {some(sorted(missing), NAMED_MAX)}" if missing else ""

    def _tell(self, launch: Launch, now: float) -> list[Effect]:
        self._told = True
        effects = self._checkpoints.choose(launch, now)
        common = self._common(launch)
        nodes = enumerate(launch.placement)
        return [*effects, *(Send(node, self._message(launch, place, common)) for place, node in nodes)]

    def tell_again(self, node: str, attempt: int) -> list[Effect]:
        """Send the launch again to a placed node of its newest attempt that may have missed it."""
        launch = self._launch
        if launch is None or not self._told or not self._is_due(launch) or attempt >= launch.attempt:
            return []
        return [Send(node, self._message(launch, self._state.places[node], self._common(launch)))]

    def _is_due(self, launch: Launch) -> bool:
        return (self._state.attempt, self._state.phase) == (launch.attempt, Phase.LAUNCHING)

    def _common(self, launch: Launch) -> dict[str, Any]:
        """What the launch says to each node, after the choice of what is restored."""
        chosen = self._checkpoints.restore.chosen
        return {
            "attempt": launch.attempt, "world": len(launch.placement), "nodes": self._nodes,
            "master_address": launch.master_address, "master_port": launch.master_port,
            "mtbf_s": launch.mtbf_s, "cold": bool(self._state.cold), "spare": launch.spare,
            "chosen": chosen.step if chosen is not None else 0,
            "saved": self._checkpoints.saved_on_shared,
            "unreadable": self._checkpoints.restore.unreadable(),
        }  # fmt: skip

    def _message(self, launch: Launch, place: int, common: dict[str, Any]) -> msg.Launch:
        """The launch for the node with this group rank."""
        count = self._state.ranks_per_node
        ranks = range(place * count, (place + 1) * count)
        ended = (local for local, rank in enumerate(ranks) if rank in launch.ended) if launch.ended else ()
        restore = self._checkpoints.restore.message(launch.placement[place], ranks)
        return msg.Launch(rank=place, restore=restore, ended=tuple(ended), **common)

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        launch = self._launch
        if launch is not None and self._told and self._is_due(launch):
            assert self._fenced, "nodes are told of a launch, and earlier attempts are not fenced off"
