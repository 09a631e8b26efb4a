"""Outcomes of an attempt's restore: it is planned, done, impossible, or waits for storage."""

from __future__ import annotations

from jurymast.core import events as ev
from jurymast.core.checkpoints.copies import LOCAL, MEMORY, PEER, SHARED
from jurymast.core.run import blame, recovery
from jurymast.core.run.attribution import RESTORE_FAILED, STORAGE_HANGS
from jurymast.core.run.instructions import Instruction
from jurymast.core.run.state import RESTORE_TRIES, WITH_RANKS, Phase, RunState, TierState

# How long storage may leave a restoring rank without an answer: longer than the replacement of a file server
# takes, but shorter than the time-out of the other ranks' collectives (NCCL: 600 s).
WAIT_LIMIT_S = 300.0


def planned(state: RunState, event: ev.RestorePlanned) -> None:
    state.restore = event
    # Later steps than the one from which the attempt continues are lost, or are given up.
    for name in (MEMORY, PEER, LOCAL):
        tier = state.saved.get(name)
        if tier is not None and tier.step is not None and tier.step > event.step:
            tier.step = None
    kept = [tier.step for tier in state.saved.values() if tier.step is not None]
    state.saved_step = event.step if event.tier else max(kept, default=None)
    if state.phase is Phase.LAUNCHING:  # agents are told now: the wait for them, or for storage, is over
        state.deadline = recovery.deadline(state, event.t)


def failed(state: RunState, event: ev.RestoreFailed) -> list[Instruction]:
    """Try another attempt, and if necessary another node. An older state is the last resort."""
    if state.phase not in WITH_RANKS:
        return []
    key, instructions = (event.step, event.of), []
    if not any(error == RESTORE_FAILED for *_, error in state.findings.failures):
        state.unrestored[key] = state.unrestored.get(key, 0) + 1
        if state.unrestored[key] == RESTORE_TRIES:
            message = (
                f"step {event.step} could not be restored {RESTORE_TRIES} times: the run goes on "
                f"from an older checkpoint, if there is one; {event.why}"
            )
            instructions = blame.raise_alert(state, "restore", message, [event.node])
    return instructions + _end(state, event, event.t, RESTORE_FAILED, event.why)


def waits(state: RunState, event: ev.RestoreWaits) -> list[Instruction]:
    """A restore waits for storage. After a while another attempt, and if necessary another node, may get an
    answer; otherwise people must help."""
    if state.phase not in (Phase.LAUNCHING, Phase.RUNNING) or state.first_step_at is not None:
        return []
    state.unanswered[event.rank] = event
    message = f"rank {event.rank} restores from {event.path}, whose storage does not answer"
    instructions = blame.raise_alert(state, "restore waits", message, [event.node])
    if event.seconds >= WAIT_LIMIT_S:
        for waiting in state.unanswered.values():
            why = f"{waiting.path}: its storage has not answered for {WAIT_LIMIT_S:.0f} s"
            instructions += _end(state, waiting, event.t, STORAGE_HANGS, why)
    return instructions


def _end(
    state: RunState, rank: ev.RestoreFailed | ev.RestoreWaits, t: float, error: str, why: str
) -> list[Instruction]:
    """A rank that cannot restore has to end."""
    end = ev.WorkerFailed(
        t=t, node=rank.node, attempt=rank.attempt, rank=rank.rank, exit_code=0, error=error, message=why
    )
    return recovery.rank_failed(state, end)


def restored(state: RunState, event: ev.Restored) -> None:
    state.unanswered = {}
    for key in [key for key in state.unrestored if key[0] == event.step]:
        del state.unrestored[key]  # it can be had after all
    if event.tier == SHARED and event.step:
        # It is complete, although a lost node may not have reported its part.
        tier = state.saved.setdefault(SHARED, TierState(at=event.t))
        tier.step = max(tier.step or 0, event.step)
    incident = state.incident
    if incident is None:
        return
    incident.restored_at, incident.restore_s, incident.step_restored = event.t, event.seconds, event.step
    plan = state.restore
    if plan is not None and plan.tier == MEMORY and (event.tier, event.step) == (MEMORY, plan.step):
        incident.tiers = {tier: size for tier, size in plan.tiers.items() if size}
    elif event.size_bytes:
        incident.tiers = {event.tier: event.size_bytes}
