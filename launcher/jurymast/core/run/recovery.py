"""The second half of the run's state machine, from a failure to the next attempt: open an incident, stop the
ranks, name the cause, choose an action (`core.run.ladder`), launch. `core.run.machine` calls it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from jurymast.core.judges import blame, explained, leaving, loops
from jurymast.core.judges.attribution import (
    LOCAL_PATHS,
    NEAR_S,
    OF_A_LOSS,
    OF_AN_END,
    Cause,
    Surroundings,
    attribute,
    cause_of,
    cause_of_end,
)
from jurymast.core.nodes import preflight
from jurymast.core.run import ladder, refill, size, tasks
from jurymast.core.run.decision import Decision
from jurymast.core.state.effects import Dismiss, Finish, Instruction, Launch, Requeue, StopWorkers
from jurymast.core.state.events import WorkerFailed
from jurymast.core.state.failure_rate import AFTER_REPAIR_S, INFRASTRUCTURE, FrailNode
from jurymast.core.state.findings import STORAGE, Finding, Verdict
from jurymast.core.state.incident import (
    AHEAD,
    Incident,
    because,
)
from jurymast.core.state.run import WITH_RANKS, Blame, Exclusion, Node, Phase, Role, RunState, expected_mtbf_s
from jurymast.core.state.texts import NODES_TOLD, request, some
from jurymast.errors import RunFailedError

# ---- from the finding to the launch

# Once enough nodes are ready, wait this long for the rest, so that the slowest become the spares.
SPARE_GRACE_S = 2.0
# Stopping is SIGTERM, the policy's grace, SIGKILL. Ranks that survive it this long are stuck in the kernel.
STOP_LIMIT_S = 7.0
# Ranks have this long to start after their agents were told to start them.
LAUNCH_LIMIT_S = 60.0
SPARE_WAIT_S = 30.0
# Allocations in a row that never have enough nodes before the run gives up.
STARTS_MAX = 3
# At most this many nodes that were left out as likely to fail are named.
NAMED_MAX = 3
# What was taken for what, and how to choose.
ALONE = (
    "no task made a process group, so each was for itself as under srun "
    "(`#JURYMAST train: yes` makes them one training)"
)
ENDED_BY_SRUN = 143  # of a task to which srun sends SIGTERM
RANKS_GONE = "RanksGone"  # an error that no rank tells


def deadline(state: RunState, t: float) -> float:
    """Return when the present phase ends that began at `t`, or that a supervisor takes over at `t`."""
    match state.phase:
        case Phase.STARTING:
            return t + state.settings.join_limit_s
        case Phase.STOPPING:  # ranks were told at `t`, or when their node was back after a take-over
            return max(t, state.rejoin_until) + stop_grace_s(state) + STOP_LIMIT_S
        case Phase.LAUNCHING:
            return t + LAUNCH_LIMIT_S
        case _:
            return t


def stop_grace_s(state: RunState) -> float:
    """How long ranks that are stopped now have to keep what they have to."""
    asked = state.findings.asked
    return max(state.settings.stop_grace_s, asked.grace_s if asked is not None else 0.0)


def stop_workers(state: RunState, reason: str, *, stacks: bool = False) -> StopWorkers:
    asked = state.findings.asked
    return StopWorkers(
        attempt=state.attempt, nodes=not_stopped(state), reason=reason, stacks=stacks,
        grace_s=asked.grace_s if asked is not None else 0.0,
    )  # fmt: skip


def open_incident(state: RunState, detected_at: float, fault_at: float) -> Incident:
    """Open an incident for this finding. A failure during a recovery ends that incident and opens the
    next."""
    number, fault_at = len(state.incidents) + 1, min(fault_at, detected_at)
    if state.incident is not None:
        state.incident.end_unrecovered(detected_at, state.first_step_at, fault_at)
    before = state.incidents[-1].step_lost_from if state.without_progress and state.incidents else 0
    incident = Incident(
        number, fault_at, detected_at, state.attempt, max(state.step, before), steps_done=state.step,
        lived_s=max(0.0, fault_at - state.up_at) if state.attempt else 0.0,
        numbered=state.absolute or state.first_step_at is None,
    )  # fmt: skip
    state.incidents.append(incident)
    state.without_progress += 1
    return incident


def begin(state: RunState, detected_at: float, fault_at: float) -> list[Instruction]:
    """Handle a finding on running ranks: open an incident (unless one is being diagnosed) and stop all
    ranks."""
    if state.phase is Phase.STOPPING:
        return []
    open_incident(state, detected_at, fault_at)
    state.phase, state.stopped, state.spared = Phase.STOPPING, set(), {}
    state.findings.ended = _ended_before(state)
    state.deadline = deadline(state, detected_at)
    asked = state.findings.asked
    told = f"{request(asked.what, asked.node)} requested by {asked.by}" if asked else ""
    reason = told or "a failure ends the attempt for every rank"
    for name, finding in state.findings.health.items():
        reason = f"{name} leaves because of {blame.describe(finding)}"
    if state.findings.straggling is not None:
        reason = state.findings.straggling.evidence
    hangs = state.findings.hung is not None
    return [stop_workers(state, reason, stacks=hangs)]


def _ended_before(state: RunState) -> tuple[int, ...]:
    """The ranks of nodes that had reached the script's end. Their heartbeats say so as well, but a supervisor
    that took over since has not heard those."""
    failed = {failure.node for failure in state.findings.failures.values()}
    count = state.ranks_per_node
    places = (place for name, place in state.places.items() if name in state.finished - failed)
    return tuple(place * count + local for place in places for local in range(count))


def reconsider(state: RunState, cause: Cause) -> list[Instruction]:
    """An incident that was decided proves to have `cause`: stop if another attempt cannot help."""
    stuck = loops.fruitless(state)
    while stuck and stuck[-1].lost and stuck[-1].signature != cause.signature:
        stuck.pop()  # it came later, and may prove to be another one as well
    why = loops.crash_loop(stuck, cause) or ladder.spent(state, cause.charged)
    if not why or state.phase is Phase.STOPPING:
        return []
    if state.incident is not None:
        state.incident.action, state.incident.why = "stop", why
    return finish(state, "failed", ladder.job_exit_code(cause), because(cause.evidence, why))


def rank_failed(state: RunState, event: WorkerFailed) -> list[Instruction]:
    """Handle the end of a rank, or a reason to end it."""
    task = state.alone and event.rank >= 0 and event.exit_code != 0
    if state.phase not in WITH_RANKS and not (task and tasks.is_told_by_trusted(state, event.node)):
        return []
    if event.rank >= 0:  # the reason came after all
        state.findings.failures.pop((event.node, -1, RANKS_GONE), None)
    state.findings.failures.setdefault((event.node, event.rank, event.error), event)
    if task and state.kill_on_bad_exit:
        return tasks_ended(state)
    if task or leaving.may_explain(state, event):
        return []  # the others are not concerned, unless they prove to be ranks that train
    return begin(state, event.t, event.t)


def tasks_ended(state: RunState) -> list[Instruction]:
    """End a run of tasks that were each for themselves, after one of them failed, and with it the others that
    still run, if any: with srun's exit code, and nothing is done again."""
    failures = [*state.findings.failures.values()]
    open_incident(state, state.now, min(event.t for event in failures))
    cause = attribute(state.findings, _surroundings(state, state.incidents[-1]))
    incident = settle(state, cause)
    incident.traceback = next((f.traceback for f in failures if f.rank == cause.rank), "")
    codes = [f.exit_code if f.exit_code > 0 else 128 - f.exit_code for f in failures]
    if len(tasks.ended(state)) < state.active * state.ranks_per_node:
        codes.append(ENDED_BY_SRUN)
        others = "ended as srun is told (--kill-on-bad-exit)"
    else:
        others = "finished"
    incident.action, incident.why = "stop", f"{ALONE}, so the others {others} and nothing is done again"
    return finish(state, "failed", max(codes), incident.reason)


def not_stopped(state: RunState) -> tuple[str, ...]:
    return tuple(
        n for n in state.placement if n not in state.stopped and state.nodes[n].role is not Role.FAILED
    )


def _all_stopped(state: RunState) -> bool:
    """Return `not not_stopped(state)` faster, because thousands of answers must not each go through thousands
    of nodes. One node that has not stopped is enough, and a node that has stays stopped."""
    unstopped = state.unstopped
    if not unstopped:
        unstopped.extend(reversed(not_stopped(state)))
    while unstopped:
        name = unstopped[-1]
        if _runs(state, name):
            return False
        unstopped.pop()
    return not not_stopped(state)


def _runs(state: RunState, name: str) -> bool:
    return name in state.places and name not in state.stopped and state.nodes[name].role is not Role.FAILED


def others_run(state: RunState, names: Collection[str]) -> bool:
    """Whether a node besides these is known not to have stopped."""
    return any(name not in names and _runs(state, name) for name in reversed(state.unstopped))


def settle(state: RunState, cause: Cause) -> Incident:
    """Enter the cause of the newest incident, whose ranks are gone by now. A failure of the infrastructure
    counts for the nodes' failure rate."""
    incident = state.incidents[-1]
    explained.enter(incident, cause)
    incident.place = state.places.get(cause.node, -1)
    incident.stopped_at = incident.decided_at = state.now
    if state.failures is not None and incident.charged == INFRASTRUCTURE:
        state.failures.watched(incident.fault_at, state.exposed, state.fresh_until())
        state.failures.incident(incident.fault_at)
    return incident


def close_incident(state: RunState, t: float) -> None:
    if state.incident is not None:
        state.incident.recovered_at = state.incident.ended_at = max(t, state.incident.detected_at)


def finish(state: RunState, how: str, exit_code: int, reason: str) -> list[Instruction]:
    state.phase, state.exit_code, state.end_reason, state.ended_at = Phase(how), exit_code, reason, state.now
    if state.incident is not None:
        state.incident.end_unrecovered(state.now, state.first_step_at, state.stepped_at)
    if state.phase is Phase.SUCCEEDED and not state.stepped_first:  # ranks did what no step tells of
        for incident in state.incidents:
            incident.rework_known = False
    return [Finish(state=how, exit_code=exit_code, reason=reason)]


def advance(state: RunState, *, came: int | None = None) -> list[Instruction]:
    """Continue if the present phase has what it waited for. `came`: the only news is that so many nodes
    joined or became ready, or that time has passed (0)."""
    if state.phase is Phase.STOPPING and _all_stopped(state) and not explained.awaited(state):
        return _diagnose(state)
    if state.phase is Phase.STARTING:
        return _start(state, came)
    if state.phase is Phase.WAITING:
        return _replace(state)
    return []


def _diagnose(state: RunState) -> list[Instruction]:
    cause = attribute(state.findings, _surroundings(state, state.incidents[-1]))
    order = state.end_order
    if order is not None and order.why and cause.kind in OF_AN_END:
        return _await_end(state, replace(cause_of_end(order), evidence=cause.evidence))
    if series := loops.follows_script(state, cause):
        cause = loops.script_fault(series, cause)
        loops.acquit(state, series, cause)
    incident, failures = settle(state, cause), state.findings.failures.values()
    incident.lost = tuple(state.findings.lost) if cause.kind in OF_A_LOSS else ()
    incident.traceback = next((f.traceback for f in failures if f.rank == cause.rank), "")
    decision = ladder.decide(state, cause)
    if decision.action == "stop" and loops.endless(state):
        loops.give_up(state)
    incident.action, incident.why = decision.action, decision.why
    return _alert_on(state, cause) + _carry_out(state, cause, decision)


def _await_end(state: RunState, cause: Cause) -> list[Instruction]:
    """The ranks ended with the job: nothing is started in the seconds that are left of it."""
    incident = settle(state, cause)
    incident.action, incident.why = "requeue", "Slurm ends the job"
    state.findings, state.phase, state.deadline = tasks.remembered(state), Phase.WAITING, None
    state.not_before = math.inf
    return []


def _surroundings(state: RunState, incident: Incident) -> Surroundings:
    """What was found on the placed nodes around `incident`; what many nodes show counts against none."""
    leaving = [(name, f) for name, f in state.findings.health.items() if not blame.on_many(state, f)]
    near: list[tuple[str, Finding]] = []
    for name in state.placement:
        for told in state.nodes[name].findings.values():
            finding = blame.escalated(state, name, told)
            lasts = finding.kind == STORAGE and finding.at <= incident.detected_at
            close = lasts or abs(finding.at - incident.detected_at) <= NEAR_S or blame.is_bad(finding)
            if (name, finding) in leaving or not close:
                continue
            if blame.speaks(finding) and not blame.on_many(state, finding):
                near.append((name, finding))
    lately = [*state.findings.health.values(), *(s.finding for s in state.recent)]
    common, kind = next(((why, f.kind) for f in lately if (why := blame.on_many(state, f))), ("", ""))
    local = (*LOCAL_PATHS, *([state.settings.local_path] if state.settings.local_path else []))
    for found in (leaving, near):
        found.sort(key=lambda pair: pair[1].at)
    return Surroundings(leaving, near, common, kind, len(state.placement), local)


def _alert_on(state: RunState, cause: Cause) -> list[Instruction]:
    """Alert to a fault of many nodes: those that were lost are replaced, but not excluded."""
    if cause.kind != "fabric_fault" or not cause.nodes:
        return []
    for node in state.nodes.values():
        if node.role is Role.FAILED and not (node.bad or node.drained) and node.since >= state.now - NEAR_S:
            node.faultless = True
    message = f"{len(cause.nodes)} nodes were lost at once, as if by their switch or power: none is blamed"
    return blame.raise_alert(state, "nodes lost at once", message, cause.nodes)


def _carry_out(state: RunState, cause: Cause, decision: Decision) -> list[Instruction]:
    instructions: list[Instruction] = []
    lost = {loss.node for loss in state.findings.lost}
    incident, asked, left = state.incidents[-1], state.findings.asked, {*state.findings.leave}
    state.findings = tasks.remembered(state, {*decision.bad, *lost})
    drained = {cause.node, *left} if cause.kind in ("drain_asked", AHEAD) else left
    instructions += _take_out(state, decision.bad, decision.blames, drained)
    state.kept, state.spare = dict(decision.kept), decision.spare
    if decision.action == "stop":
        return instructions + finish(state, "failed", ladder.job_exit_code(cause), incident.reason)
    if decision.action == "requeue":
        state.ordered_restarts += cause.kind in ("requeue_asked", AHEAD)
        state.timeouts += asked is not None and asked.timeout
        return instructions + _requeue(state, incident.reason)
    state.phase, state.deadline = Phase.WAITING, None
    state.not_before = state.now + decision.backoff_s
    return instructions + _replace(state)


def _take_out(
    state: RunState, bad: Collection[str], blames: Collection[Blame], drained: Collection[str] = ()
) -> list[Instruction]:
    """Nodes leave the placement: for a finding (`blames`), by hand, or as suspects."""
    instructions: list[Instruction] = []
    reason, blamed = state.incidents[-1].reason, {one.node: one for one in blames}
    for one in blames:
        instructions += blame.put_out(state, one)
        if not one.bad:
            instructions.append(Dismiss(node=one.node, reason=reason))
    for name in bad:
        node = state.nodes[name]
        if name not in blamed and node.role is not Role.FAILED:
            # Others may lack no more than a torchrun host.
            node.drained = name in drained
            node.faultless = node.faultless or (node.drained and bool(node.reserved))
            node.become(Role.FAILED if node.drained else Role.SUSPECT, reason, state.now)
            instructions.append(Dismiss(node=name, reason=reason))
    return instructions


def _requeue(state: RunState, reason: str) -> list[Instruction]:
    oldest = state.now - state.settings.exclusion_s
    state.excluded = {name: told for name, told in state.excluded.items() if told.at > oldest}
    dismissed = _found_meanwhile(state)
    for node in state.nodes.values():
        if node.role is Role.FAILED and not node.faultless:
            state.excluded[node.name] = Exclusion(node.reason, state.now)
            note_failure(state, node)
    state.phase, state.deadline, state.placement = Phase.REQUEUED, None, ()
    state.started, state.finished = set(), set()
    return [*dismissed, Requeue(exclude=tuple(sorted(state.excluded)), reason=reason)]


def _found_meanwhile(state: RunState) -> list[Instruction]:
    """Put out nodes that are known to be bad, but are not why the run leaves: it need not have them again."""
    instructions: list[Instruction] = []
    for node in state.nodes.values() if state.settings.bad_nodes != "report" else ():
        if not node.findings or node.role is Role.FAILED:
            continue
        finding = blame.standing(state, node)
        if finding is None or finding.verdict is not Verdict.BAD:
            continue
        if not blame.beyond_limits(state, node.name):
            instructions += blame.put_out(state, blame.blame_for(state, node.name, finding))
    return instructions


def _start(state: RunState, came: int | None) -> list[Instruction]:
    """Place the first attempt of an allocation, in its order. The node of the batch script, the slowest, and
    those that are likely to fail stay spares."""
    if preflight.going_on(state):
        return []
    in_grace = state.enough_since is None or state.now < state.enough_since + SPARE_GRACE_S
    late = state.deadline is not None and state.now >= state.deadline and not state.unfindable
    if came is not None and state.awaited > 1 and in_grace and (came or not late):
        state.awaited -= came  # it makes no more than itself ready: nobody need look at thousands of nodes
        return []
    usable = sum(node.usable for node in state.nodes.values())
    state.awaited = (len(state.nodes) if usable >= state.active else state.active) - usable
    if usable >= state.active:
        state.enough_since = state.now if state.enough_since is None else state.enough_since
        all_here = usable == len(state.nodes)
        if all_here or state.now >= state.enough_since + SPARE_GRACE_S or state.pretested:
            ready = state.spare_nodes()
            if tests := preflight.before_first_attempt(state):
                return tests
            chosen = sorted(ready[: state.active], key=lambda node: node.order)
            reason = f"{state.active} of {len(ready)} ready nodes{_left_out(state, ready[state.active :])}"
            return _launch(state, tuple(n.name for n in chosen), reason)
        return []
    state.enough_since = None
    if came:  # nothing is lost by that
        return []
    alive = [n for n in state.nodes.values() if n.role is not Role.FAILED or n.may_return]
    # If one cannot load torch, another shows whose fault that is.
    tell = sum(n.unloadable for n in state.nodes.values()) == 1 and any(n.role is Role.JOINING for n in alive)
    if not late and (len(alive) >= state.active or tell):
        return []
    if explained.may_have_ended(state):
        state.awaited = 0  # time alone ends that
        return []
    # Nodes that are still warming up are not to blame, unless they have used all their time.
    missing = [n for n in state.nodes.values() if n.role is Role.FAILED or (late and not n.usable)]
    slow = loops.slow_to_load(state) if late else None
    for node in missing:
        node.become(Role.FAILED, node.reason, state.now)
    return _try_elsewhere(state, missing, slow)


def _left_out(state: RunState, spares: list[Node]) -> str:
    likely = [(state.expected_times(node), node.name) for node in spares if state.expected_times(node) > 1.0]
    told = [
        f"{name} fails {times:.0f} times as often as others: {state.frail[name].why}"
        for times, name in sorted(likely, reverse=True)[:NAMED_MAX]
    ]
    more = [f"and {len(likely) - NAMED_MAX} more"] if len(likely) > NAMED_MAX else []
    return f"; spares: {'; '.join(told + more)}" if told else ""


def _try_elsewhere(state: RunState, missing: list[Node], slow: Cause | None) -> list[Instruction]:
    """Request another allocation for one that never had enough nodes, but not for ever. If users took the
    nodes out, that is no failure. `slow`: the cause if all nodes still load torch."""
    if (cause := loops.environment_fault(state)) is not None:
        open_incident(state, state.now, state.now)
        incident = settle(state, cause)
        incident.action, incident.why = "stop", "other nodes would not help"
        return finish(state, "failed", RunFailedError.exit_code, incident.reason)
    names = some([f"{node.name} ({node.reason})" for node in missing], NODES_TOLD)
    reason = f"fewer than {state.active} nodes came up; missing: {names}"
    open_incident(state, state.now, state.now)
    drained = all(node.drained for node in missing)
    settle(state, slow or cause_of("drain_asked" if drained else "node_lost", reason)).action = "requeue"
    starts = 0
    for incident in reversed(state.incidents):
        if incident.launched_at is not None or incident.action != "requeue":
            break
        starts += incident.charged == INFRASTRUCTURE
    hopeless = loops.endless(state) or ladder.spent(state, INFRASTRUCTURE)
    if state.may_requeue and starts <= STARTS_MAX and not hopeless:
        return _requeue(state, slow.evidence if slow else reason)
    return finish(
        state, "failed", RunFailedError.exit_code, because(slow.evidence if slow else reason, hopeless)
    )


def _replace(state: RunState) -> list[Instruction]:
    """Fill the places of nodes that are out, then launch; without enough spares, requeue."""
    if state.now < state.not_before:
        return []
    return [*_swap_after_all(state), *_fill_places(state)]


def _swap_after_all(state: RunState) -> list[Instruction]:
    """Take out who stayed only because no spare was ready, if one is by now: there was a pause."""
    nodes = [state.nodes[name] for name in state.placement]
    if not (state.kept or any(node.findings or ladder.is_doubtful(node) for node in nodes)):
        return []
    out = [name for name in state.placement if state.nodes[name].role is not Role.ACTIVE]
    spares = [node.name for node in state.spare_nodes() if node.role is Role.SPARE]
    kept = [name for name in state.kept if name in state.places and name not in out]
    bad = kept[: max(0, len(spares) - len(out))]
    blames = [blamed for name in bad if (blamed := state.kept[name]) is not None]
    blames += ladder.set_aside(state, (), [*out, *bad], spares, [one.node for one in blames])
    bad += ladder.failed_tests(state, [*out, *bad, *(one.node for one in blames)], spares)
    names = list(dict.fromkeys([*bad, *(one.node for one in blames)]))
    if not names:
        return []
    state.incidents[-1].why += f"; then {some(names, NODES_TOLD)} out, as a spare was ready"
    return _take_out(state, bad, blames)


def _fill_places(state: RunState) -> list[Instruction]:
    open_places = [i for i, name in enumerate(state.placement) if state.nodes[name].role is not Role.ACTIVE]
    # A blamed node gets its own place back only if the alternative is a requeue.
    usable = state.spare_nodes()
    spares = [n for n in usable if n.role is Role.SPARE or n.name not in state.places]
    coming = [node for node in state.nodes.values() if node.coming]
    missing = len(open_places) - len(spares)
    # After a take-over suspects may be heard before the spares, which are better.
    doubted = len(open_places) > sum(node.role is Role.SPARE for node in spares)
    better = doubted and any(node.role is Role.SPARE and not node.heard for node in coming)
    if better or 0 < missing <= len(coming) or 0 < len(open_places) - len(usable) <= len(coming):
        state.deadline = state.not_before + _patience_s(state, coming)
        if state.now < state.deadline or state.unfindable:
            return []
    spares = spares if missing <= 0 else usable
    missing_now = len(open_places) - len(spares)
    if len(spares) >= len(open_places):
        likely = [n for i, n in enumerate(spares) if i < len(open_places) or n.name in state.places]
        doubtful = [node for node in likely if node.role is Role.SUSPECT]
        if (tests := preflight.before_use(state, doubtful)) is not None:
            return tests
        more = size.growers(state, spares, len(open_places)) if not state.spare else []
        return _fill(state, open_places, [node.name for node in spares], [node.name for node in more])
    if not (why_not := refill.why_not_held(state)):
        return []
    incident = state.incidents[-1]
    if size.may_shrink_to(state, len(state.placement) - missing_now):
        return _shrink(state, open_places, [node.name for node in spares], why_not)
    if explained.may_have_ended(state):
        return []
    incident.action = "requeue"
    incident.why += f"; {why_not}"
    if state.may_requeue:
        return _requeue(state, incident.reason)
    incident.action = "stop"
    return finish(state, "failed", RunFailedError.exit_code, incident.reason)


def _patience_s(state: RunState, coming: list[Node]) -> float:
    """How long to wait for these. A living node with a place whose torchrun host restarts has as long as at
    the run's start: a requeue would not make its import of torch any faster."""
    own = any(node.name in state.places for node in coming)
    return max(SPARE_WAIT_S, state.settings.join_limit_s) if own else SPARE_WAIT_S


def _fill(
    state: RunState, open_places: list[int], spares: list[str], more: Sequence[str] = ()
) -> list[Instruction]:
    """Put spares into the open places and a returned node into its own, and launch once all are ready. The
    placement grows by `more`."""
    placement = list(state.placement)
    own = [place for place in open_places if placement[place] in spares]
    for place in [*own, *(place for place in open_places if place not in own)]:
        name = placement[place] if place in own else spares[0]
        spares.remove(name)
        placement[place] = name
    if not all(state.nodes[name].ready for name in placement):
        return []
    swapped = [f"{old} -> {new}" for old, new in zip(state.placement, placement, strict=True) if old != new]
    if swapped:
        state.incidents[-1].action = "swap"
    elif state.incidents[-1].action in ("swap", size.SHRINK):  # the node is back in time
        state.incidents[-1].action = "restart"
    reason = some(swapped, NODES_TOLD) or "same nodes"
    added = [name for name in more if name not in placement]
    if added:
        if not swapped:
            state.incidents[-1].action = size.GROW
        reason += f", and {some(added, NODES_TOLD)} more"
    return _launch(state, (*placement, *added), reason)


def _shrink(state: RunState, open_places: list[int], spares: list[str], why_not: str) -> list[Instruction]:
    """Go on without the nodes for whose places there are no spares, once all others are ready."""
    filled = dict(zip(open_places, spares, strict=False))
    out = [i for i in open_places if i not in filled]
    left = [filled.get(i, name) for i, name in enumerate(state.placement) if i not in out]
    if not all(state.nodes[name].ready for name in left):
        return []
    incident = state.incidents[-1]
    if incident.action != size.SHRINK:  # it was not decided at once
        incident.action = size.SHRINK
        incident.why += f"; {why_not}, {size.told(state, len(left))}"
    state.spare = False  # ranks of another number begin anew
    without = [state.placement[i] for i in out]
    return _launch(state, tuple(left), f"without {some(without, NODES_TOLD)}")


def _launch(state: RunState, placement: tuple[str, ...], reason: str) -> list[Instruction]:
    if state.attempt and state.incidents:
        reason = f"{state.incidents[-1].action} after incident {state.incidents[-1].id}, {reason}"
    state.launched = state.attempt = state.attempt + 1
    state.placement, state.phase, state.deadline = placement, Phase.LAUNCHING, None
    state.started, state.finished, state.stopped = set(), set(), set()
    state.restore = state.cadence = None
    spare = state.spare and any(state.spared.get(name) for name in placement)
    state.kept, state.spared, state.spare, state.anew = {}, {}, False, not spare
    state.unanswered, state.base, state.time_out_s = {}, None, 0.0
    state.step, state.first_step_at, state.stepped_at, state.up_at = 0, None, state.now, state.now
    state.samples = state.tokens = 0
    state.done = state.done if state.alone else set()
    state.testing.difference_update(placement)
    for rank, name in enumerate(placement):
        state.nodes[name].become(Role.ACTIVE, f"group rank {rank}", state.now)
        state.nodes[name].ready = False
    if state.incident is not None:
        state.incident.launches(state.now, in_process=spare)
    master = state.nodes[placement[0]]
    launch = Launch(
        attempt=state.attempt, placement=placement, master_address=master.address,
        master_port=master.store_port, mtbf_s=expected_mtbf_s(state, state.now),
        reason=reason + tasks.told(state), ended=tasks.ended(state), spare=spare,
    )  # fmt: skip
    return [launch]


def note_failure(state: RunState, node: Node) -> None:
    """Expect this node to fail more often for a day after it serves again."""
    if not (node.faultless or node.drained):
        before = state.frail.get(node.name, FrailNode(node=node.name))
        state.frail[node.name] = replace(before, fresh_until=None, why=f"failed this run: {node.reason}")


def serve_again(state: RunState, names: Collection[str]) -> None:
    """Note that these nodes serve now. For those that had failed, the day with more failures begins."""
    for name in state.frail.keys() & set(names) if state.frail else ():
        if state.frail[name].fresh_until is None:
            state.frail[name] = replace(state.frail[name], fresh_until=state.now + AFTER_REPAIR_S)
