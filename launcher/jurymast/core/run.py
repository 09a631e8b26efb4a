"""The run's state machine: `step(state, event)` gives the instructions that follow from an event.

No clock, no I/O: time comes with the events. All decisions of the supervisor are made here, so a journal
replays to the same state and the simulator drives the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jurymast.core import events as ev
from jurymast.core.attribution import attribute
from jurymast.core.incident import Incident
from jurymast.core.instructions import Dismiss, Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.ladder import Decision, decide
from jurymast.core.state import ENDED, Findings, Node, Phase, Role, RunState

# Once enough nodes are ready, wait this long for the rest, so that the slowest become the spares.
SPARE_GRACE_S = 2.0
# Stopping is SIGTERM, grace, SIGKILL; ranks that survive that are stuck in the kernel.
STOP_LIMIT_S = 8.0
LAUNCH_LIMIT_S = 60.0
SPARE_WAIT_S = 30.0


def step(state: RunState, event: ev.Event) -> list[Instruction]:
    """Apply one event; returns what to do, in order. Never raises on a late or repeated event."""
    state.now = max(state.now, event.t)
    if state.ended and not isinstance(event, ev.AllocationEnded):
        return []
    handler = _HANDLERS.get(type(event))
    instructions = handler(state, event) if handler else []
    if not state.ended:
        instructions += _advance(state)
    return instructions


def resume(state: RunState) -> list[Instruction]:
    """What a supervisor that takes over must send again: instructions that may not have arrived."""
    why = "sent again by the supervisor that took over"
    if state.phase is Phase.STOPPING:
        return [StopWorkers(attempt=state.attempt, nodes=_not_stopped(state), reason=why)]
    if state.phase is Phase.LAUNCHING:
        return [_launch_instruction(state, why)]
    if state.phase is Phase.REQUEUED:
        return [Requeue(exclude=tuple(state.excluded), reason=why)]
    return []


def _run_started(state: RunState, event: ev.RunStarted) -> list[Instruction]:
    state.run, state.name = event.run, event.name
    state.active, state.spares, state.ranks_per_node = event.active, event.spares, event.ranks_per_node
    state.submitted_at = event.submitted_at
    return []


def _allocation_started(state: RunState, event: ev.AllocationStarted) -> list[Instruction]:
    if state.phase not in (Phase.QUEUED, Phase.REQUEUED):
        _open_incident(state, event.t, event.t)
        _settle(
            state, "allocation_lost", "the allocation ended without a word from the supervisor", "requeue"
        )
    state.allocation = f"{event.slurm_job}.{event.restarts}"
    if event.slurm_job not in state.slurm_jobs:
        state.slurm_jobs.append(event.slurm_job)
    state.restarts += 1 if state.attempt or state.phase is Phase.REQUEUED else 0
    state.nodes = {
        name: Node(name, order, since=event.t) for order, name in enumerate(dict.fromkeys(event.nodes))
    }
    state.host = event.host
    state.placement, state.started, state.finished, state.stopped = (), set(), set(), set()
    state.findings = Findings()
    state.phase, state.deadline, state.enough_since = (
        Phase.STARTING,
        event.t + state.settings.join_limit_s,
        None,
    )
    return []


def _supervisor_started(state: RunState, event: ev.SupervisorStarted) -> list[Instruction]:
    state.epoch = event.epoch
    return []


def _node_joined(state: RunState, event: ev.NodeJoined) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        node = state.nodes[event.node] = Node(event.node, len(state.nodes), since=event.t)
    returning = node.incarnation == event.incarnation
    if returning and node.role is not Role.FAILED:
        return []
    was_placed = node.name in state.placement and node.role is Role.ACTIVE
    node.address, node.incarnation, node.pid = event.address, event.incarnation, event.pid
    node.ready = False
    if was_placed and state.phase in (Phase.RUNNING, Phase.LAUNCHING, Phase.STOPPING):
        # Its agent is a new one, so the ranks of the old one are gone.
        lost = ev.NodeLost(
            t=event.t, node=node.name, how="closed", silent_s=0.0, evidence="its agent restarted"
        )
        instructions = _node_lost(state, lost)
        node.become(Role.JOINING, "its agent restarted", event.t)
        state.stopped.add(node.name)
        return instructions
    if node.role is Role.FAILED:
        if state.phase is Phase.STOPPING and node.name in state.placement:
            state.stopped.add(node.name)  # it is dismissed, nobody asks it to stop
        node.become(Role.SUSPECT, f"came back after: {node.reason}", event.t)
        return [Dismiss(node=node.name, reason="it was counted out while it was away")]
    if node.role is not Role.SUSPECT:
        node.become(Role.JOINING, "warming up", event.t)
    return []


def _node_ready(state: RunState, event: ev.NodeReady) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        return []
    node.ready, node.store_port = True, event.store_port
    if node.role is Role.JOINING:
        node.become(Role.SPARE, "ready", event.t)
    return []


def _node_lost(state: RunState, event: ev.NodeLost) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None or node.role is Role.FAILED:
        return []
    node.ready = False
    node.strikes += 1
    how = {"silent": f"silent for {event.silent_s:.1f} s", "closed": "its agent's connection was reset"}
    node.become(Role.FAILED, how.get(event.how, event.evidence or "its agent left"), event.t)
    if event.node not in state.placement:
        return []
    if state.phase is Phase.WAITING:  # decided already; its place is one more to fill
        if state.incident is not None:
            state.incident.evidence += f"; then {node.name}: {node.reason}"
        return []
    state.findings.lost.append(event)
    return _begin(state, event.t, event.t - event.silent_s)


def _workers_started(state: RunState, event: ev.WorkersStarted) -> list[Instruction]:
    if event.attempt != state.attempt or event.node not in state.placement:
        return []
    state.started.add(event.node)
    if state.phase is Phase.LAUNCHING and state.started == set(state.placement):
        state.phase, state.deadline = Phase.RUNNING, None
        if state.incident is not None:
            state.incident.started_at = event.t
    return []


def _worker_failed(state: RunState, event: ev.WorkerFailed) -> list[Instruction]:
    if event.attempt != state.attempt or state.phase not in (Phase.LAUNCHING, Phase.RUNNING, Phase.STOPPING):
        return []
    state.findings.failures.append(event)
    return _begin(state, event.t, event.t)


def _ranks_hung(state: RunState, event: ev.RanksHung) -> list[Instruction]:
    if event.attempt != state.attempt or state.phase not in (Phase.LAUNCHING, Phase.RUNNING):
        return []
    state.findings.hung = event
    if state.best_step <= max((i.step_lost_from for i in state.incidents if i.cause == "hang"), default=-1):
        state.hang_patience = min(64.0, 2 * state.hang_patience)
    return _begin(state, event.t, event.t - event.silent_s)


def _asked(state: RunState, event: ev.Asked) -> list[Instruction]:
    if event.what == "cancel":
        return [_finish(state, "cancelled", 80, f"cancel asked by {event.by}")]
    if event.what == "drain" and event.node not in state.placement:
        node = state.nodes.get(event.node)
        if node is not None:
            node.become(Role.FAILED, f"drained by {event.by}", event.t)
            return [Dismiss(node=node.name, reason=node.reason)]
        return []
    if state.phase not in (Phase.LAUNCHING, Phase.RUNNING, Phase.STOPPING):
        return []
    state.findings.asked = event
    return _begin(state, event.t, event.t)


def _workers_stopped(state: RunState, event: ev.WorkersStopped) -> list[Instruction]:
    node = state.nodes.get(event.node)
    if node is None:
        return []
    node.ready, node.store_port = True, event.store_port
    if event.attempt == state.attempt:
        state.stopped.add(event.node)
        state.finished.discard(event.node)
    return []


def _node_finished(state: RunState, event: ev.NodeFinished) -> list[Instruction]:
    if event.attempt != state.attempt or state.phase not in (Phase.RUNNING, Phase.LAUNCHING):
        return []
    state.finished.add(event.node)
    if state.finished == set(state.placement):
        _close_incident(state, event.t)
        return [_finish(state, "succeeded", 0, "every rank ended with exit code 0")]
    return []


def _progress(state: RunState, event: ev.Progress) -> list[Instruction]:
    if event.attempt != state.attempt or state.phase in ENDED:
        return []
    state.step, state.stepped_at, state.absolute, state.step_s = (
        event.step, event.stepped_at, event.absolute, event.step_s,
    )  # fmt: skip
    if state.first_step_at is None:
        state.first_step_at = event.stepped_at
    incident = state.incident
    if incident is not None and state.phase is Phase.STOPPING:  # how far the attempt had really come
        incident.step_lost_from = max(incident.step_lost_from, event.step)
    if (
        incident is not None
        and state.phase is Phase.RUNNING
        and (not event.absolute or event.step > incident.step_lost_from)
    ):
        _close_incident(state, event.stepped_at)
    if event.step > state.best_step or not event.absolute:
        state.fruitless = 0
    state.best_step = max(state.best_step, event.step)
    return []


def _saved(state: RunState, event: ev.Saved) -> list[Instruction]:
    if event.ok:
        if event.attempt == state.attempt and event.step > state.step:
            # The next step begins when the save is over: times of steps are taken from here.
            state.step, state.stepped_at = event.step, event.t
        state.saved_step = max(event.step, state.saved_step or 0)
        state.save_failures = 0
    else:
        state.save_failures += 1
    return []


def _restored(state: RunState, event: ev.Restored) -> list[Instruction]:
    incident = state.incident
    if incident is not None and event.attempt == state.attempt:
        incident.restored_at, incident.restore_s, incident.step_restored = event.t, event.seconds, event.step
        if event.size_bytes:
            incident.tiers[event.tier] = incident.tiers.get(event.tier, 0) + event.size_bytes
    return []


def _signalled(state: RunState, event: ev.Signalled) -> list[Instruction]:
    if event.signal == "timeout":
        return [_finish(state, "failed", 79, "the Slurm job reached its time limit")]
    return []


def _noted(state: RunState, event: ev.Noted) -> list[Instruction]:
    state.notes.append((event.t, event.message))
    return []


def _tick(state: RunState, event: ev.Tick) -> list[Instruction]:
    if state.deadline is None or event.t < state.deadline:
        return []
    if state.phase is Phase.STOPPING:
        state.deadline = None
        for name in _not_stopped(state):
            lost = ev.NodeLost(
                t=event.t, node=name, how="left", silent_s=0.0, evidence="its ranks could not be stopped"
            )
            _node_lost(state, lost)
        return []
    if state.phase is Phase.LAUNCHING:
        late = [name for name in state.placement if name not in state.started]
        state.findings.hung = ev.RanksHung(
            t=event.t, attempt=state.attempt, ranks=(), node=late[0] if len(late) == 1 else "",
            silent_s=LAUNCH_LIMIT_S, limit_s=LAUNCH_LIMIT_S,
            evidence=f"ranks did not start within {LAUNCH_LIMIT_S:.0f} s on {', '.join(late)}",
        )  # fmt: skip
        return _begin(state, event.t, event.t - LAUNCH_LIMIT_S)
    return []


_HANDLERS: dict[type[ev.Event], Callable[[RunState, Any], list[Instruction]]] = {
    ev.RunStarted: _run_started,
    ev.AllocationStarted: _allocation_started,
    ev.SupervisorStarted: _supervisor_started,
    ev.NodeJoined: _node_joined,
    ev.NodeReady: _node_ready,
    ev.NodeLost: _node_lost,
    ev.WorkersStarted: _workers_started,
    ev.WorkerFailed: _worker_failed,
    ev.RanksHung: _ranks_hung,
    ev.WorkersStopped: _workers_stopped,
    ev.NodeFinished: _node_finished,
    ev.Progress: _progress,
    ev.Saved: _saved,
    ev.Restored: _restored,
    ev.Asked: _asked,
    ev.Signalled: _signalled,
    ev.Noted: _noted,
    ev.Tick: _tick,
}


# From here on: incidents and transitions.


def _open_incident(state: RunState, detected_at: float, fault_at: float) -> Incident:
    """The incident that takes this finding: a failure during a recovery ends that one and starts the next."""
    if state.incident is not None:
        state.incident.ended_at = detected_at
    lost_from = max(
        state.step, state.incidents[-1].step_lost_from if state.fruitless and state.incidents else 0
    )
    incident = Incident(
        len(state.incidents) + 1, min(fault_at, detected_at), detected_at, state.attempt, lost_from
    )
    state.incidents.append(incident)
    state.fruitless += 1
    return incident


def _begin(state: RunState, detected_at: float, fault_at: float) -> list[Instruction]:
    """A finding on running ranks: open an incident (unless one is being diagnosed) and stop all ranks."""
    if state.phase is Phase.STOPPING:
        return []
    _open_incident(state, detected_at, fault_at)
    state.phase, state.deadline, state.stopped = Phase.STOPPING, detected_at + STOP_LIMIT_S, set()
    asked = state.findings.asked
    reason = f"{asked.what} asked by {asked.by}" if asked else "a failure ends the attempt for every rank"
    return [StopWorkers(attempt=state.attempt, nodes=_not_stopped(state), reason=reason)]


def _not_stopped(state: RunState) -> tuple[str, ...]:
    return tuple(
        n for n in state.placement if n not in state.stopped and state.nodes[n].role is not Role.FAILED
    )


def _settle(state: RunState, cause: str, evidence: str, action: str) -> None:
    incident = state.incidents[-1]
    incident.cause, incident.evidence, incident.action, incident.reason = cause, evidence, action, evidence
    incident.charged, incident.signature = "infrastructure", cause
    incident.stopped_at = incident.decided_at = state.now


def _close_incident(state: RunState, t: float) -> None:
    if state.incident is not None:
        state.incident.recovered_at = state.incident.ended_at = max(t, state.incident.detected_at)


def _finish(state: RunState, how: str, exit_code: int, reason: str) -> Finish:
    state.phase, state.exit_code, state.end_reason, state.ended_at = Phase(how), exit_code, reason, state.now
    if state.incident is not None:
        state.incident.ended_at = state.now
    return Finish(state=how, exit_code=exit_code, reason=reason)


def _advance(state: RunState) -> list[Instruction]:
    """Whatever the present phase was waiting for and now has."""
    if state.phase is Phase.STOPPING and not _not_stopped(state):
        return _diagnose(state)
    if state.phase is Phase.STARTING:
        return _start(state)
    if state.phase is Phase.WAITING:
        return _replace(state)
    return []


def _diagnose(state: RunState) -> list[Instruction]:
    """All ranks are stopped: name the cause and choose the rung."""
    incident = state.incidents[-1]
    cause = attribute(state.findings.lost, state.findings.asked, state.findings.failures, state.findings.hung)
    incident.cause, incident.charged, incident.signature = cause.kind, cause.charged, cause.signature
    incident.node, incident.rank, incident.evidence = cause.node, cause.rank, cause.evidence
    incident.traceback = next((f.traceback for f in state.findings.failures if f.rank == cause.rank), "")
    incident.stopped_at = incident.decided_at = state.now
    decision = decide(state, cause)
    incident.action, incident.reason = decision.action, decision.reason
    return _carry_out(state, decision)


def _carry_out(state: RunState, decision: Decision) -> list[Instruction]:
    instructions: list[Instruction] = []
    state.findings = Findings()
    for name in decision.bad:
        node = state.nodes[name]
        if node.role is not Role.FAILED:
            drained = state.incidents[-1].cause == "drain_asked"
            node.become(Role.FAILED if drained else Role.SUSPECT, decision.reason, state.now)
            instructions.append(Dismiss(node=name, reason=decision.reason))
    if decision.action == "stop":
        return [*instructions, _finish(state, "failed", decision.exit_code, decision.reason)]
    if decision.action == "requeue":
        return [*instructions, _requeue(state, decision.reason)]
    state.phase = Phase.WAITING
    state.not_before = state.now + decision.backoff_s
    state.deadline = state.not_before + SPARE_WAIT_S
    return instructions + _replace(state)


def _requeue(state: RunState, reason: str) -> Requeue:
    for node in state.nodes.values():
        if node.role is Role.FAILED:
            state.excluded[node.name] = node.reason
    state.phase, state.deadline, state.placement = Phase.REQUEUED, None, ()
    state.started, state.finished = set(), set()
    return Requeue(exclude=tuple(sorted(state.excluded)), reason=reason)


def _start(state: RunState) -> list[Instruction]:
    """First placement in an allocation: allocation order, the batch host and the slowest stay spares."""
    ready = state.spare_nodes()
    if len(ready) >= state.active:
        state.enough_since = state.now if state.enough_since is None else state.enough_since
        all_here = len(ready) == len(state.nodes)
        if all_here or state.now >= state.enough_since + SPARE_GRACE_S:
            chosen = sorted(ready[: state.active], key=lambda node: node.order)
            return [
                _launch(state, tuple(n.name for n in chosen), f"{state.active} of {len(ready)} ready nodes")
            ]
        return []
    state.enough_since = None
    if state.deadline is None or state.now < state.deadline:
        alive = [n for n in state.nodes.values() if n.role is not Role.FAILED]
        if len(alive) >= state.active:
            return []
    missing = [n for n in state.nodes.values() if not n.usable]
    for node in missing:
        node.become(Role.FAILED, node.reason, state.now)
    reason = (
        f"only {len(ready)} of {state.active} nodes came up; missing: {', '.join(n.name for n in missing)}"
    )
    if state.incident is None:
        _open_incident(state, state.now, state.now)
        _settle(state, "node_lost", reason, "requeue")
    tries = sum(1 for i in state.incidents[-3:] if i.reason.startswith("only "))
    if state.requeue_allowed and tries < 3:
        return [_requeue(state, reason)]
    return [_finish(state, "failed", 79, reason)]


def _replace(state: RunState) -> list[Instruction]:
    """Fill the places of nodes that are out, then launch; without enough spares, requeue."""
    if state.now < state.not_before:
        return []
    open_places = [i for i, name in enumerate(state.placement) if state.nodes[name].role is not Role.ACTIVE]
    spares = state.spare_nodes()
    in_time = state.deadline is not None and state.now < state.deadline
    coming = [n for n in state.nodes.values() if n.role in (Role.JOINING, Role.SUSPECT) and n.incarnation]
    still_coming = [n for n in coming if not n.ready]
    if len(spares) < len(open_places) and not (
        in_time and len(spares) + len(still_coming) >= len(open_places)
    ):
        # Nodes that had lost their place but are there again cost less than a requeue.
        spares += [state.nodes[state.placement[i]] for i in open_places if _is_back(state, i)]
    if len(spares) >= len(open_places):
        placement = list(state.placement)
        for place, spare in zip(open_places, spares, strict=False):
            placement[place] = spare.name
        if not all(state.nodes[name].ready for name in placement):
            return []
        moved = [i for i in open_places if state.placement[i] != placement[i]]
        swapped = ", ".join(f"{state.placement[i]} -> {placement[i]}" for i in moved)
        return [_launch(state, tuple(placement), f"swap {swapped}" if swapped else "same nodes")]
    if in_time and len(spares) + len(still_coming) >= len(open_places):
        return []
    incident = state.incidents[-1]
    incident.action = "requeue"
    incident.reason += "; no spare came in time"
    if state.requeue_allowed and (
        state.settings.requeues is None or state.restarts < state.settings.requeues
    ):
        return [_requeue(state, incident.reason)]
    incident.action = "stop"
    return [_finish(state, "failed", 79, incident.reason)]


def _is_back(state: RunState, place: int) -> bool:
    """The node of this place was out, and can be used again."""
    return state.nodes[state.placement[place]].usable


def _launch(state: RunState, placement: tuple[str, ...], reason: str) -> Launch:
    if state.attempt:
        reason = (
            f"{reason}; {state.incidents[-1].action} after incident {state.incidents[-1].id}"
            if state.incidents
            else reason
        )
    state.attempt += 1
    state.placement, state.phase, state.deadline = placement, Phase.LAUNCHING, state.now + LAUNCH_LIMIT_S
    state.started, state.finished, state.stopped = set(), set(), set()
    state.step, state.first_step_at, state.stepped_at = 0, None, state.now
    for rank, name in enumerate(placement):
        state.nodes[name].become(Role.ACTIVE, f"group rank {rank}", state.now)
    if state.incident is not None:
        state.incident.launched_at = state.now
    return _launch_instruction(state, reason)


def _launch_instruction(state: RunState, reason: str) -> Launch:
    master = state.nodes[state.placement[0]]
    for name in state.placement:
        state.nodes[name].ready = False
    return Launch(
        attempt=state.attempt, placement=state.placement, master_address=master.address,
        master_port=master.store_port, reason=reason,
    )  # fmt: skip
