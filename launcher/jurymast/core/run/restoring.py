"""What a run makes of restores: which state was chosen, whether it came, and what follows if it did not.
`core.run.machine` calls it."""

from __future__ import annotations

from jurymast.core.judges import blame
from jurymast.core.judges.attribution import RESTORE_FAILED, STORAGE_HANGS
from jurymast.core.run import recovery
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Instruction
from jurymast.core.state.images import LIVE, LOCAL, MEMORY, PEER, SHARED, StateId
from jurymast.core.state.run import RESTORE_TRIES, WITH_RANKS, Phase, RunState, TierState
from jurymast.core.state.texts import count

# How long storage may leave a restoring rank without an answer: longer than the replacement of a file server
# takes, but shorter than the time-out of the other ranks' collectives (NCCL: 600 s).
WAIT_LIMIT_S = 300.0


def restore_planned(state: RunState, event: ev.RestorePlanned) -> None:
    state.restore = event
    state.lost_step = 0 if event.tier else max(state.lost_step, state.saved_step or 0)
    # Later steps than the one from which the attempt continues are lost, or are given up.
    for name in (MEMORY, PEER, LOCAL):
        tier = state.saved.get(name)
        if tier is not None and tier.step is not None and tier.step > event.step:
            tier.step = None
    kept = [tier.step for tier in state.saved.values() if tier.step is not None]
    state.saved_step = event.step if event.tier else max(kept, default=None)
    if state.phase is Phase.LAUNCHING:  # agents are told now: the wait for them, or for storage, is over
        state.deadline = recovery.deadline(state, event.t)


def restore_failed(state: RunState, event: ev.RestoreFailed) -> list[Instruction]:
    """Try another attempt, and if necessary another node. An older state is the last resort."""
    if state.phase not in WITH_RANKS:
        return []
    key, instructions = StateId(event.step, event.of), []
    if not any(error == RESTORE_FAILED for *_, error in state.findings.failures):
        state.unrestored[key] = state.unrestored.get(key, 0) + 1
        if state.unrestored[key] == RESTORE_TRIES:
            message = (
                f"{RESTORE_TRIES} restores of step {event.step} failed: the run goes on "
                f"from an older checkpoint, if there is one; {event.why}"
            )
            instructions = blame.raise_alert(state, "restore", message, [event.node])
    return instructions + _cannot_restore(state, event, event.t, RESTORE_FAILED, event.why)


def restore_waits(state: RunState, event: ev.RestoreWaits) -> list[Instruction]:
    """After a while another attempt, and if necessary another node, may get an answer from storage; otherwise
    people must help."""
    if state.phase not in (Phase.LAUNCHING, Phase.RUNNING) or state.first_step_at is not None:
        return []
    state.unanswered[event.rank] = event
    message = f"rank {event.rank} restores from {event.path}, whose storage does not answer"
    instructions = blame.raise_alert(state, "restore waits", message, [event.node])
    if event.seconds >= WAIT_LIMIT_S:
        for waiting in state.unanswered.values():
            why = f"{waiting.path}: its storage has not answered for {WAIT_LIMIT_S:.0f} s"
            instructions += _cannot_restore(state, waiting, event.t, STORAGE_HANGS, why)
    return instructions


def _cannot_restore(
    state: RunState, rank: ev.RestoreFailed | ev.RestoreWaits, t: float, error: str, why: str
) -> list[Instruction]:
    """A rank that cannot restore has to end."""
    end = ev.WorkerFailed(
        t=t, node=rank.node, attempt=rank.attempt, rank=rank.rank, exit_code=0, error=error, message=why
    )
    return recovery.rank_failed(state, end)


def restored(state: RunState, event: ev.Restored) -> list[Instruction]:
    state.unanswered = {}
    for key in [key for key in state.unrestored if key.step == event.step]:
        del state.unrestored[key]  # it can be had after all
    if event.tier == SHARED and event.step:
        # It is complete, although a lost node may not have reported its part.
        tier = state.saved.setdefault(SHARED, TierState(at=event.t))
        tier.step = max(tier.step or 0, event.step)
    plan, alert = state.restore, _alert_on_older(state, event)
    incident = state.incident
    if incident is None or incident.launched_at is None:  # else it ended these ranks
        return alert
    incident.restored_at, incident.restore_s, incident.step_restored = event.t, event.seconds, event.step
    if event.tier == LIVE and plan is not None and event.step > plan.step:
        incident.kept_steps = event.step - plan.step
        newer = count(incident.kept_steps, "step")
        incident.why += f", after step {event.step}, {newer} newer than the save"
    if event.why and event.why != incident.went_back:  # a model that is made anew is restored once more
        incident.went_back = event.why
        incident.why += f"; back to the save of step {event.step}, because {event.why}"
    if plan is not None and plan.tier == MEMORY and (event.tier, event.step) == (MEMORY, plan.step):
        incident.tiers = {tier: size for tier, size in plan.tiers.items() if size}
    elif event.size_bytes:
        incident.tiers = {event.tier: event.size_bytes}
    return alert


def _alert_on_older(state: RunState, event: ev.Restored) -> list[Instruction]:
    """The training goes on from an older step than planned: what was done since is done again."""
    lost = state.lost_step if event.tier != LIVE else 0  # told when all began anew
    planned = max(state.restore.step if state.restore is not None else 0, lost)
    if event.step >= planned and not event.skipped:
        return []
    newest = f"step {planned}" if planned > event.step else "a newer one"
    found = "; ".join(event.skipped) or "it is no longer there"
    message = f"the run goes on from step {event.step} instead of {newest}: {found}"
    return blame.raise_alert(state, "restored older", message, ())


def fetched(state: RunState, event: ev.Fetched) -> None:
    state.notes.append((event.t, f"rank {event.rank} on {event.node}: {'; '.join(event.why)}"))
