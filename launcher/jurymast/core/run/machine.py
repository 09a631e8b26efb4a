"""The run's state machine: `step(state, event)` returns the instructions that follow from an event.

No clock, no I/O: time comes with the events. All decisions about the run are made here and in
`core.run.recovery`, so a journal replays to the same state, and the simulator runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from jurymast.core.agent.link import IDLE_ALONE_LIMIT_S
from jurymast.core.judges import blame, explained, leaving, loops, stragglers
from jurymast.core.judges.silence import rejoin_limit_s
from jurymast.core.nodes import preflight
from jurymast.core.run import ends, recovery, refill, restoring, size, sparing, tasks
from jurymast.core.state import events as ev
from jurymast.core.state.effects import Dismiss, Instruction, Requeue
from jurymast.core.state.failure_rate import DAY_S, FailureRate, prior
from jurymast.core.state.findings import Verdict
from jurymast.core.state.images import SHARED
from jurymast.core.state.run import (
    WITH_RANKS,
    EndOrder,
    Node,
    Phase,
    Role,
    RunState,
    TierState,
)
from jurymast.core.state.texts import NODES_TOLD, reservation, some
from jurymast.core.state.within import NONE
from jurymast.errors import RunCancelledError, RunFailedError

# A silence that comes back without a new step before it may be no hang: it has twice the time, until there is
# a new step. Not more, because a hang that comes back each time is to be found each time.
HANG_PATIENCE = 2.0
# How many nodes an event may make ready, if it changes nothing else that a start waits for.
_CAME = {ev.NodeJoined: 1, ev.NodeReady: 1, ev.Tick: 0}
# Slurm's answer, asked why it ends the job, when it does not.
NOT_ENDING = "running"


def step(state: RunState, event: ev.Event) -> list[Instruction]:
    """Apply one event; returns what to do, in order. Never raises on a late or repeated event."""
    state.now = max(state.now, event.t)
    if state.ended and not isinstance(event, _AFTER_THE_END):
        return []
    before = state.phase
    instructions: list[Instruction] = []
    if getattr(event, "attempt", state.attempt) == state.attempt or isinstance(event, _OF_ANY_ATTEMPT):
        handler = _HANDLERS.get(type(event))
        instructions = (handler(state, event) if handler else None) or []
    if not state.ended:
        instructions += recovery.advance(state, came=_CAME.get(type(event)))
    if state.phase is not before or isinstance(event, _LETS_TEST) or _of_suspect(state, event):
        instructions += preflight.suspects(state)
    if state.nodes_min:
        size.note(state)
    return instructions


def step_quietly(
    state: RunState, kind: type[ev.Event], attempt: int, nodes: Sequence[str], ports: Sequence[int]
) -> bool:
    """Apply the same event of each of several nodes as `step` does, if nothing follows from any of them;
    otherwise return False and do nothing. Such events of thousands of nodes are most of a journal. `ports`:
    of stores, for events that name one."""
    names = set(nodes)
    if attempt != state.attempt:
        return False
    if kind is ev.WorkersStarted and state.phase is Phase.LAUNCHING:
        new = {name for name in names if name in state.places and name not in state.started}
        if len(state.started) + len(new) == len(state.placement):
            return False
        state.started |= new
        return True
    hosts_live = len(ports) == len(nodes) and all(ports)
    if kind is ev.WorkersStopped and state.phase is Phase.STOPPING and hosts_live:
        known = [state.nodes[name] for name in nodes if name in state.nodes]
        if len(known) < len(nodes) or any(node.role is Role.JOINING for node in known):
            return False
        if not recovery.others_run(state, names):
            return False
        for node, port in zip(known, ports, strict=True):
            node.ready, node.store_port = True, port
        state.stopped |= names
        state.finished -= names
        return True
    return False


def _of_suspect(state: RunState, event: ev.Event) -> bool:
    """Whether this event of a suspect may allow its tests. Thousands of nodes report at once; only suspects
    matter here."""
    if not isinstance(event, ev.NodeReady | ev.WorkersStarted | ev.WorkersStopped):
        return False
    node = state.nodes.get(event.node)
    return node is not None and node.role is Role.SUSPECT


def resume(state: RunState) -> list[Instruction]:
    """Return what a supervisor that takes over must send again: instructions that may not have arrived."""
    why = "sent again by the supervisor that took over"
    if state.phase is Phase.STOPPING:
        return [recovery.stop_workers(state, why)]
    if state.phase is Phase.REQUEUED:
        return [Requeue(exclude=tuple(state.excluded), reason=why)]
    return preflight.again(state, why)


def _allocation_started(state: RunState, event: ev.AllocationStarted) -> list[Instruction]:
    allocation = f"{event.slurm_job}.{event.restarts}"
    instructions = ends.next_allocation(state, event.t, event.before)
    ends.count_exposure(state, event.t)
    state.end_order = None
    if state.ended:  # requeued all the same: none of the nodes that there were is to come back
        state.allocation, state.nodes = allocation, {}
        state.to_remove, state.reservations = {}, {}
        return instructions
    state.allocation = allocation
    if event.slurm_job not in state.slurm_jobs:
        state.slurm_jobs.append(event.slurm_job)
    state.restarts += 1 if state.attempt or state.phase is Phase.REQUEUED else 0
    state.nodes = {
        name: Node(name, order, since=event.t) for order, name in enumerate(dict.fromkeys(event.nodes))
    }
    state.host, state.allocated_at = event.host, min(event.t, event.began_at or event.t)
    state.refills, state.refill_failures, state.refill_failed_at = {}, 0, 0.0
    state.to_remove, state.reservations = {}, {}
    recovery.serve_again(state, event.nodes)
    if state.failures is None:
        state.began_at = event.t
        state.failures = FailureRate(
            event.t, prior(state.settings.rate), state.settings.half_life_s / DAY_S,
            state.settings.burst_s, state.earlier,
        )  # fmt: skip
    state.placement, state.started, state.finished, state.stopped = (), set(), set(), set()
    state.findings = tasks.remembered(state)
    state.pretested, state.testing, state.awaited = False, set(), 0
    state.phase, state.enough_since = Phase.STARTING, None
    state.deadline = recovery.deadline(state, event.t)
    return instructions


def _run_started(state: RunState, event: ev.RunStarted) -> None:
    state.alone, state.kill_on_bad_exit = event.guessed, event.kill_on_bad_exit


def _supervisor_started(state: RunState, event: ev.SupervisorStarted) -> None:
    state.epoch = event.epoch
    silent = {name for name in state.abandoned if name in state.nodes and not state.nodes[name].heard}
    state.abandoned = {name: at for name, at in state.abandoned.items() if name in silent}
    if state.supervised_on:
        state.abandoned[state.supervised_on] = event.t - event.silent_s
    state.abandoned.pop(event.node, None)
    state.supervised_on = event.node
    for node in state.nodes.values():
        node.heard = False
        # What the last supervisor did not hear, this one may: its agent is looking for one, if it lives.
        node.awaited = node.unheard and node.since > state.now - IDLE_ALONE_LIMIT_S
    if state.placement:
        state.rejoin_until = event.t + rejoin_limit_s(len(state.nodes))
    state.unfindable = False
    _begin_anew(state, event.t)  # while no supervisor was there nobody could do what a deadline is for


def _begin_anew(state: RunState, t: float) -> None:
    """Give nodes all the time that they have in this phase from now on: clocks of nodes may differ."""
    if state.deadline is not None:
        state.deadline = max(state.deadline, recovery.deadline(state, t))
    if state.phase is Phase.WAITING:
        state.not_before = max(state.not_before, t)


def _unfindable(state: RunState, event: ev.Unfindable) -> None:
    state.unfindable = bool(event.who)
    if not state.unfindable:
        _begin_anew(state, event.t)


def _node_joined(state: RunState, event: ev.NodeJoined) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        node = state.nodes[event.node] = Node(event.node, len(state.nodes), since=event.t)
    node.heard = True
    returning = node.incarnation == event.incarnation
    if returning and node.role is not Role.FAILED:
        return []
    was_placed = node.name in state.places and node.role is Role.ACTIVE
    node.address, node.incarnation, node.pid = event.address, event.incarnation, event.pid
    node.ready, node.gpus = False, event.gpus
    if was_placed and state.phase in WITH_RANKS:
        why = "its agent restarted"  # and the ranks of the old one are gone
        lost = ev.NodeLost(
            t=event.t, node=node.name, how="closed", silent_s=0.0, evidence=why, oom_kills=event.oom_kills
        )
        instructions = _node_lost(state, lost)
        node.become(Role.JOINING, why, event.t)
        state.stopped.add(node.name)
        return instructions
    if node.drained or node.bad:
        return [Dismiss(node=node.name, reason=node.reason)]
    if node.role is Role.FAILED and event.oom_kills and not returning:
        cause = explained.explain(state, node, event.oom_kills)
        return recovery.reconsider(state, cause) if cause is not None else []
    if node.role is Role.FAILED:
        if state.phase is Phase.STOPPING and node.name in state.places:
            state.stopped.add(node.name)  # it is dismissed, nobody asks it to stop
        recovery.note_failure(state, node)
        recovery.serve_again(state, [node.name])
        node.become(Role.SUSPECT, f"came back after: {node.reason}", event.t)
        return [Dismiss(node=node.name, reason="it counted as lost while it was disconnected")]
    if node.role is not Role.SUSPECT:
        node.become(Role.JOINING, "warming up", event.t)
    return []


def _node_ready(state: RunState, event: ev.NodeReady) -> None:
    node = state.nodes.get(event.node)
    if node is None:
        return
    node.ready, node.store_port = True, event.store_port
    refill.came(state, node.name)
    if node.role is Role.JOINING:
        node.become(Role.SPARE, "ready", event.t)


def _node_lost(state: RunState, event: ev.NodeLost) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        return []
    node.ready = node.awaited = False
    state.spared.pop(node.name, None)
    if node.role is Role.FAILED:
        return []
    how = {
        "silent": f"silent for {event.silent_s:.1f} s", "closed": "its agent's connection was reset",
        "taken": "its agent got a SIGTERM",
    }  # fmt: skip
    node.unloadable = event.how == "environment"
    # What Slurm or somebody ends has not failed.
    node.faultless = event.how == "taken" or node.returned or state.end_order is not None
    node.become(Role.FAILED, how.get(event.how, event.evidence or "its agent left"), event.t)
    node.lost_how = event.how
    if event.node not in state.places:
        return []
    if state.phase is Phase.WAITING:  # decided already; its place is one more to fill
        if state.incident is not None:
            state.incident.evidence += f"; then {node.name}: {node.reason}"
        return []
    if state.phase is Phase.RUNNING and tasks.none_left(state, event.node):
        return _finished_on(state, event.node)
    state.findings.lost.append(event)
    return recovery.begin(state, event.t, max(event.t - event.silent_s, state.stepped_at))  # all lived then


def _workers_started(state: RunState, event: ev.WorkersStarted) -> None:
    if event.node not in state.places:
        return
    state.started.add(event.node)
    node = state.nodes[event.node]
    if node.role is Role.SPARE:  # its torchrun host died after the launch, and another took the order
        node.become(Role.ACTIVE, f"group rank {state.places[node.name]}", event.t)
    if state.phase is Phase.LAUNCHING and len(state.started) == len(state.placement):
        state.phase, state.deadline, state.up_at = Phase.RUNNING, None, event.t
        if state.incident is not None:
            state.incident.started_at = event.t


def _ranks_hung(state: RunState, event: ev.RanksHung) -> list[Instruction]:
    if state.phase not in (Phase.LAUNCHING, Phase.RUNNING):
        return []
    state.findings.hung = event
    if any(incident.cause == "hang" for incident in loops.fruitless(state)):
        state.hang_patience = HANG_PATIENCE
    return recovery.begin(state, event.t, event.t - event.silent_s)


def _asked(state: RunState, event: ev.Asked) -> list[Instruction]:
    if event.what == ev.STEP_ENDED:
        ends.step_ended(state)
    if event.what in ("cancel", ev.STEP_ENDED):
        why = f"cancel requested by {event.by}"
        return ends.finish_from_outside(state, "cancelled", RunCancelledError.exit_code, why)
    if event.what == "save":
        if event.node in state.nodes:
            state.to_remove[event.node] = event.by
        return []  # nothing to decide: the ranks save at their next common step
    if event.what == "drain":
        state.to_remove.pop(event.node, None)
    if event.what == "drain" and (event.node not in state.places or state.phase is Phase.WAITING):
        # No ranks run on it, so it is out at once; if it had a place, that place must be filled.
        node = state.nodes.get(event.node)
        if node is not None:
            node.drained = True
            node.become(Role.FAILED, f"removed by {event.by}", event.t)
            return [Dismiss(node=node.name, reason=node.reason)]
        return []
    if event.what in sparing.ANEW:
        state.spare = False  # where it is decided already
    if event.what == "restart" and state.phase is Phase.WAITING:
        state.not_before = event.t  # no back-off: somebody wants it now
    if state.phase not in WITH_RANKS:
        return []
    state.findings.asked = event
    if event.what == "drain":
        state.findings.leave.add(event.node)
    return recovery.begin(state, event.t, event.t)


def _workers_stopped(state: RunState, event: ev.WorkersStopped) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        return []
    node.ready, node.store_port = event.store_port != 0, event.store_port
    if event.attempt == state.attempt and (event.spared or not node.ready):
        # Those of the attempt before were to end for this one, if it did not begin there yet.
        before = state.anew and event.node not in state.started
        state.spared[node.name] = () if before else event.spared
    if not node.ready and node.role in (Role.ACTIVE, Role.SPARE):
        node.become(Role.JOINING, "its torchrun host died, another is warming up", event.t)
    elif node.ready and node.role is Role.JOINING:  # it was ready before, as the journal does not know
        node.become(Role.SPARE, "ready", event.t)
    if tasks.ended_alone(state, event) or leaving.ended(state, event):
        return _finished_on(state, event.node)
    unasked = state.phase is Phase.RUNNING and event.node in state.places and event.node not in state.finished
    if unasked and event.attempt == state.attempt:
        # It was reported with its reason while no supervisor listened.
        gone = ev.WorkerFailed(
            t=event.t, node=event.node, attempt=event.attempt, rank=-1, exit_code=-9,
            error=recovery.RANKS_GONE, message="its ranks ended while no supervisor was connected",
        )  # fmt: skip
        instructions = recovery.rank_failed(state, gone)
        state.stopped.add(event.node)
        return instructions
    if event.attempt == state.attempt:
        state.stopped.add(event.node)
        if state.phase is Phase.STOPPING:  # else it is dismissed, and tasks that have ended stay so
            state.finished.discard(event.node)
    return []


def _attempt_found(state: RunState, event: ev.AttemptFound) -> list[Instruction]:
    """Handle an attempt whose placement was lost, so that it cannot be watched: stop its ranks and
    recover."""
    if event.attempt <= state.attempt:
        return []
    behind = state.attempt
    state.attempt = event.attempt
    if state.phase is Phase.STOPPING:
        state.stopped = set()  # of the attempt before
        state.unstopped.clear()
        reason = f"attempt {event.attempt} is not in the journal"
        return [recovery.stop_workers(state, reason)]
    if not state.placement or state.phase is Phase.REQUEUED:
        return []  # the node that runs it is dismissed
    by = f"the supervisor, because the journal ends in attempt {behind}, before attempt {event.attempt}"
    state.findings.asked = ev.Asked(t=event.t, what=ev.RELAUNCH, by=by)
    return recovery.begin(state, event.t, event.t)


def _launch_waits(state: RunState, event: ev.LaunchWaits) -> list[Instruction]:
    if state.phase is not Phase.LAUNCHING:
        return []
    message = f"the launch of attempt {event.attempt} waits for {event.what}"
    return blame.raise_alert(state, "launch waits", message, ())


def _node_finished(state: RunState, event: ev.NodeFinished) -> list[Instruction]:
    if state.phase not in (Phase.RUNNING, Phase.LAUNCHING):
        return []
    return _finished_on(state, event.node)


def _finished_on(state: RunState, node: str) -> list[Instruction]:
    """End the run if this was the last node with ranks."""
    if node in state.places:
        state.finished.add(node)
        tasks.done_on(state, node)
        leaving.done_on(state, node)
    return _all_finished(state)


def _all_finished(state: RunState) -> list[Instruction]:
    """End the run if the ranks of all nodes have ended."""
    if len(state.finished) < len(state.placement):
        return []
    if leaving.as_ordered(state):
        return []
    failures = [*state.findings.failures.values()]
    if failures and not state.alone:  # they have all left, some of them with an error
        return recovery.begin(state, state.now, min(one.t for one in failures))
    recovery.close_incident(state, state.now)
    if failures:
        return recovery.tasks_ended(state)
    told = f"; {recovery.ALONE}" if state.alone else ""
    return recovery.finish(state, "succeeded", 0, f"every rank ended with exit code 0{told}")


def _group_made(state: RunState, event: ev.GroupMade) -> list[Instruction]:
    """The tasks are ranks of one training. Those that failed before count now."""
    failures = tasks.are_ranks(state)
    if not failures or state.phase not in WITH_RANKS:
        return []
    return recovery.begin(state, event.t, min(failure.t for failure in failures))


def _began_at(state: RunState, event: ev.BeganAt) -> None:
    """What the optimizer counts is true; a script that read nothing of the run begins where the first attempt
    did. Otherwise it is not known where it begins."""
    base = event.step
    if state.given_in == state.attempt:
        return
    if state.stepped_first in (0, state.attempt):
        base = state.origin = base or 0
    elif base is None and not event.reads:
        base = state.origin
    if base is None:
        return
    if state.first_step_at is not None:  # steps were told before
        state.step, state.absolute = state.step - (state.base or 0) + base, True
    state.base = base


def _progress(state: RunState, event: ev.Progress) -> None:
    took_s = event.stepped_at - state.stepped_at - event.stall_s
    if event.step_s > 0.0 and took_s > 0.0:
        state.samples_s = max(0, event.samples - state.samples) / took_s
        state.tokens_s = max(0, event.tokens - state.tokens) / took_s
    state.samples, state.tokens = event.samples, event.tokens
    state.joules = max(state.joules, event.joules)
    state.step, state.stepped_at, state.absolute = event.step, event.stepped_at, event.absolute
    state.given_in = state.attempt if event.given else state.given_in
    if event.saves:
        tier = state.saved.setdefault(event.saved_in, TierState())
        tier.step, tier.at = max(tier.step or 0, event.saved_step), event.t
        state.saved_step = max(event.saved_step, state.saved_step or 0)
        state.stalls.append(event.stall_s / event.saves)
    state.step_s = event.step_s or state.step_s  # the first of an attempt has none to compare with
    if state.first_step_at is None:
        state.first_step_at = event.stepped_at
        state.stepped_first = state.stepped_first or state.attempt
    incident = state.incident
    if incident is not None and state.phase is Phase.STOPPING:  # how far the attempt had really come
        incident.step_lost_from = max(incident.step_lost_from, event.step)
        incident.steps_done = max(incident.steps_done, event.step)
    if incident is not None and state.recovers(event.step, event.absolute):
        recovery.close_incident(state, event.stepped_at)
        incident.rework_known = event.absolute and incident.numbered
    if event.step > state.best_step if event.absolute else not state.given_in:
        state.without_progress = 0
    if event.step > state.best_step:
        state.hang_patience = 1.0
    state.best_step = max(state.best_step, event.step)


def _saved(state: RunState, event: ev.Saved) -> None:
    tier = state.saved.setdefault(event.tier, TierState())
    if event.ok:
        ranks_waited = event.tier == SHARED and not event.copied
        if ranks_waited and event.attempt == state.attempt and event.step > state.step:
            # The next step begins when the save is over: times of steps are taken from here.
            state.step, state.stepped_at = event.step, event.t
        state.saved_step = max(event.step, state.saved_step or 0)
        tier.step, tier.at = event.step, event.t
        tier.size_bytes, tier.seconds = event.size_bytes, event.seconds or tier.seconds
        tier.failures, tier.error = 0, ""
        if not event.copied:
            state.save_failures = 0
            state.stalls.append(event.stall_s)
        return
    tier.failures += 1
    tier.error, tier.failed_step = event.error, event.step
    if not event.copied:
        state.save_failures += 1


def _time_out_set(state: RunState, event: ev.TimeOutSet) -> None:
    state.time_out_s = max(state.time_out_s, event.seconds)


def _loss_not_finite(state: RunState, event: ev.LossNotFinite) -> list[Instruction]:
    if state.loss is not None:
        return []
    state.loss = event
    what = f"the {event.of} was {event.loss}" if event.loss != NONE else "the optimizer had no gradients"
    message = f"{what} at step {event.step} (rank {event.rank}), and the training goes on"
    return blame.raise_alert(state, "loss", message, ())


def _batch_differs(state: RunState, event: ev.BatchDiffers) -> None:
    state.batch_differs = event


def _cold_start(state: RunState, event: ev.ColdStart) -> None:
    state.cold = event.why


def _saves_to(state: RunState, event: ev.SavesTo) -> None:
    state.checkpoints = event.directory


def _health_found(state: RunState, event: ev.HealthFound) -> list[Instruction]:
    node = state.nodes.get(event.node)
    finding = blame.take(state, event) if node is not None else None
    if node is None or finding is None:
        return []
    finding = blame.escalated(state, node.name, finding)
    if (alert := blame.stays(state, node, finding)) is not None:
        return alert
    placed = node.name in state.places
    idle = placed and state.phase is Phase.RUNNING and tasks.none_left(state, node.name)
    if state.phase in WITH_RANKS and placed and not idle:
        before = state.findings.health.get(node.name)
        if before is None or before.verdict is not Verdict.BAD:
            state.findings.health[node.name] = finding
        # Steps that were done after it are done.
        fault_at = min(event.t, max(finding.at, state.stepped_at))
        return recovery.begin(state, event.t, fault_at)
    out = blame.put_out(state, blame.blame_for(state, node.name, finding))
    return [*out, *_finished_on(state, node.name)] if idle else out


def _node_tested(state: RunState, event: ev.NodeTested) -> list[Instruction]:
    found = preflight.result(state, event)
    return _health_found(state, found) if found is not None else []


def _signalled(state: RunState, event: ev.Signalled) -> list[Instruction]:
    if event.signal == ev.CAUGHT:
        state.warned, state.warned_at = state.attempt, event.t
    if event.signal in ("SIGUSR2", ev.CAUGHT):
        return []
    if event.signal == NOT_ENDING:
        ends.goes_on(state)
        return _all_finished(state) if state.phase is Phase.RUNNING and state.finished else []
    since = event.t if state.end_order is None else state.end_order.at
    state.end_order = EndOrder(since, "" if event.signal in ("SIGTERM", "unknown") else event.signal)
    if event.signal == "timeout":
        why = "the Slurm job reached its time limit"
        return ends.finish_from_outside(state, "failed", RunFailedError.exit_code, why)
    return ends.end_ordered(state)


def _cadence_set(state: RunState, event: ev.CadenceSet) -> None:
    state.cadence = event


def _straggling(state: RunState, event: ev.Straggling) -> list[Instruction]:
    if state.alone or not stragglers.is_current(state, event):
        return []
    told = f"{event.node}: {event.evidence}"
    again = stragglers.slow_before(state, event)
    state.slow_on[event.rank] = tuple(dict.fromkeys((*state.slow_on.get(event.rank, ()), event.node)))
    if again:
        blame.withdraw(state, again, "straggler")
        message = (
            f"{told}; rank {event.rank} was slow on {again} as well, so the data or the code is slow, and "
            "neither node is blamed"
        )
        return blame.raise_alert(state, "slow again", message, (event.node,))
    why_not = stragglers.refusal(state, event)
    if why_not:
        state.notes.append((event.t, f"{told}; {why_not}"))
        return []
    state.findings.straggling = structs.replace(
        event, evidence=f"{event.evidence}; {stragglers.worth(state, event)[1]}"
    )
    return recovery.begin(state, event.t, event.t)


def _stacks_taken(state: RunState, event: ev.StacksTaken) -> None:
    if state.phase is Phase.STOPPING:
        state.findings.stacks.append(event)


def _ranks_ended(state: RunState, event: ev.RanksEnded) -> None:
    if state.alone:
        tasks.note_done(state, {*event.ranks} - {*event.unknown})
    elif state.phase is Phase.RUNNING:
        leaving.note_done(state, event)
    elif state.phase is Phase.STOPPING:
        state.findings.ended, state.findings.without_code = event.ranks, event.unknown


def _node_draining(state: RunState, event: ev.NodeDraining) -> None:
    if (node := state.nodes.get(event.node)) is not None:
        node.draining = event.why


def _reservation_ahead(state: RunState, event: ev.ReservationAhead) -> None:
    if event.nodes:
        state.reservations[event.name] = event
    else:
        state.reservations.pop(event.name, None)
    near = [one for one in state.reservations.values() if one.near]
    titles = {node: reservation(one.name, maintenance=one.maintenance) for one in near for node in one.nodes}
    for name, node in state.nodes.items():
        node.reserved = titles.get(name, "")


def _noted(state: RunState, event: ev.Noted) -> None:
    where = f"{event.node}: " if event.node else ""
    state.notes.append((event.t, f"{where}{event.message}"))


def _tick(state: RunState, event: ev.Tick) -> list[Instruction]:
    if (failed_at := leaving.failed_at(state)) is not None:
        return recovery.begin(state, event.t, failed_at)
    if state.deadline is None or event.t < state.deadline or state.unfindable:
        return []
    if state.phase is Phase.STOPPING:
        unstopped = recovery.not_stopped(state)
        told = [name for name in unstopped if state.nodes[name].heard]
        # A node that is not back after a take-over was not told to stop; only its silence can make it lost.
        state.deadline = recovery.deadline(state, event.t) if len(told) < len(unstopped) else None
        why = "its ranks could not be stopped"
        for name in told:
            _node_lost(state, ev.NodeLost(t=event.t, node=name, how="left", silent_s=0.0, evidence=why))
        return []
    if state.phase is Phase.LAUNCHING:
        late = [name for name in state.placement if name not in state.started]
        where = some(late, NODES_TOLD)
        state.findings.hung = ev.RanksHung(
            t=event.t, attempt=state.attempt, ranks=(), node=late[0] if len(late) == 1 else "",
            silent_s=recovery.LAUNCH_LIMIT_S, limit_s=recovery.LAUNCH_LIMIT_S,
            evidence=f"ranks did not start within {recovery.LAUNCH_LIMIT_S:.0f} s on {where}",
        )  # fmt: skip
        return recovery.begin(state, event.t, event.t - recovery.LAUNCH_LIMIT_S)
    return []


# They are still true of an attempt that is over, or lead to one of which this state does not know yet.
_OF_ANY_ATTEMPT = (ev.WorkersStopped, ev.AttemptFound, ev.Saved, ev.ColdStart)
# The newest checkpoint is being written to storage, and a node that takes part may be lost as well.
_AFTER_THE_END = (
    ev.AllocationStarted, ev.AllocationEnded, ev.Saved, ev.Noted, ev.SupervisorStarted, ev.Unfindable,
)  # fmt: skip
# Events that may allow a suspect's tests; checking at every event would cost too much with 10,000 nodes.
_LETS_TEST = (ev.Tick, ev.NodeTested)
# From some events nothing ever follows at once: their handlers return nothing.
_HANDLERS: dict[type[ev.Event], Callable[[RunState, Any], list[Instruction] | None]] = {
    ev.RunStarted: _run_started,
    ev.AllocationStarted: _allocation_started,
    ev.SupervisorStarted: _supervisor_started,
    ev.Unfindable: _unfindable,
    ev.RefillAsked: refill.asked,
    ev.RefillRefused: refill.refused,
    ev.RefillExpected: refill.expected,
    ev.RefillStarted: refill.started,
    ev.RefillEnded: refill.ended,
    ev.NodeJoined: _node_joined,
    ev.NodeReady: _node_ready,
    ev.NodeLost: _node_lost,
    ev.WorkersStarted: _workers_started,
    ev.WorkerFailed: recovery.rank_failed,
    ev.RanksHung: _ranks_hung,
    ev.WorkersStopped: _workers_stopped,
    ev.AttemptFound: _attempt_found,
    ev.LaunchWaits: _launch_waits,
    ev.NodeFinished: _node_finished,
    ev.Progress: _progress,
    ev.Saved: _saved,
    ev.RestorePlanned: restoring.restore_planned,
    ev.RestoreFailed: restoring.restore_failed,
    ev.RestoreWaits: restoring.restore_waits,
    ev.Fetched: restoring.fetched,
    ev.Restored: restoring.restored,
    ev.BeganAt: _began_at,
    ev.GroupMade: _group_made,
    ev.LossNotFinite: _loss_not_finite,
    ev.BatchDiffers: _batch_differs,
    ev.TimeOutSet: _time_out_set,
    ev.ColdStart: _cold_start,
    ev.SavesTo: _saves_to,
    ev.Asked: _asked,
    ev.Signalled: _signalled,
    ev.CadenceSet: _cadence_set,
    ev.HealthFound: _health_found,
    ev.NodeTested: _node_tested,
    ev.Straggling: _straggling,
    ev.StacksTaken: _stacks_taken,
    ev.RanksEnded: _ranks_ended,
    ev.NodeDraining: _node_draining,
    ev.ReservationAhead: _reservation_ahead,
    ev.Noted: _noted,
    ev.Tick: _tick,
}
