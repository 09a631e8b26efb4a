"""The restart ladder chooses the cheapest safe action for a known cause, and gives the reason: 0. recovery in
process (`core.run.sparing`), 1. restart in place, 2. swap a spare in, or a node for which the run holds its
others (`core.run.refill`), 3. go on with fewer nodes (`core.run.size`), 4. requeue without the bad nodes; or
stop, if another attempt cannot help."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from jurymast.core.judges import blame, leaving, loops
from jurymast.core.judges.attribution import ENDED_EARLY, Cause
from jurymast.core.run import refill, size, sparing
from jurymast.core.run.decision import Decision
from jurymast.core.state.failure_rate import INFRASTRUCTURE
from jurymast.core.state.findings import Verdict
from jurymast.core.state.incident import (
    AHEAD,
    APPLICATION,
    CHOSEN,
    FROM_FINDINGS,
    NOBODY,
    ORDERED,
    PREEMPTION,
)
from jurymast.core.state.run import Blame, Node, Role, RunState
from jurymast.core.state.texts import NODES_TOLD, count, some
from jurymast.errors import RunFailedError

# Of a node in the placement, the second from when its torchrun host has been replaced until the next launch.
PLACED = Role.ACTIVE, Role.SPARE
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
PATIENT_FIRST_S = 15.0
PATIENT_MAX_S = 300.0


def decide(state: RunState, cause: Cause) -> Decision:
    """Return what to do now that all ranks are stopped and the cause is known."""
    return sparing.considered(state, _decide(state, cause))


def _decide(state: RunState, cause: Cause) -> Decision:
    if hopeless := _hopeless(state, cause):
        return Decision("stop", hopeless)
    if cause.kind == "requeue_asked" and state.requeue_allowed:
        return Decision("requeue", "it has all its time again then")
    if cause.kind == AHEAD and not cause.node and state.requeue_allowed:
        return Decision("requeue", "no node of it is outside")
    bad, why = _bad_nodes(state, cause)
    wait_s = _pause_s(len(loops.fruitless(state)), BACKOFF_FIRST_S, BACKOFF_MAX_S)
    spares = [node.name for node in state.spare_nodes() if node.name not in bad]
    blames = _blames(state, cause, bad)
    judged = cause.nodes if cause.kind in FROM_FINDINGS else ()
    aside = set_aside(state, judged, bad, spares, [blamed.node for blamed in blames])
    blames += tuple(aside)
    if aside:
        bad += tuple(b.node for b in aside)
        why += "; also removed: " + ", ".join(f"{b.node} ({b.evidence})" for b in aside)
    if doubtful := failed_tests(state, bad, spares):
        bad += doubtful
        why += f"; also removed: {', '.join(doubtful)} (failed the tests before use)"
    if wished := _wished(state, bad, spares):
        bad += wished
        why += f"; also removed: {', '.join(wished)} (as requested)"
    if not bad:
        if cause.kind in loops.PATIENT:
            wait_s = _pause_s(loops.patient_tries(state, cause), PATIENT_FIRST_S, PATIENT_MAX_S)
        return Decision("restart", why, backoff_s=wait_s)
    coming = [node for node in state.nodes.values() if node.coming]
    doubtful = (Role.SUSPECT, Role.FAILED)
    unblamed = [node for node in coming if node.role not in doubtful and node.name not in bad]
    if len(spares) + len(unblamed) >= len(bad):
        names = some(bad, NODES_TOLD)
        return Decision("swap", f"{why}: {names} out, a spare in", bad, wait_s, blames=blames)
    lost = any(state.nodes[name].role is Role.FAILED for name in bad)
    asked = cause.kind == "drain_asked" or any(not state.nodes[name].going for name in wished)
    must_go = lost or asked or any(b.bad for b in blames)
    fewer = len(state.placement) - len(bad) + len(spares)
    if not must_go or (blames and not lost and without_spare(state, fewer) == "stop"):
        # Blamed but alive, and nothing to put in its place: a requeue costs more than another try.
        kept = dict.fromkeys(bad) | {blamed.node: blamed for blamed in blames}
        why += ", but no spare is left: restarted in place"
        return Decision("restart", why, backoff_s=wait_s, kept=kept)
    # A node among these that only lacks a torchrun host takes its own place again, as does a lost one that
    # has returned, or that is to return to a supervisor that took over; and a suspect that is about to be
    # ready is better than a requeue.
    blamed = {blame.node for blame in blames}
    back = [node for node in state.nodes.values() if node.usable and node.name in bad]
    able = [node for node in (*back, *coming) if node.name not in blamed]
    if len(spares) + len(able) >= len(bad):
        names = some(bad, NODES_TOLD)
        return Decision("swap", f"{why}: {names} out, unless ready again soon", bad, wait_s, blames=blames)
    if not (why_not := refill.why_not_held(state)):
        why += f": {some(bad, NODES_TOLD)} out, held for a node in its place"
        return Decision("swap", why, bad, wait_s, blames=blames)
    why_not = f"; {why_not}" if state.may_refill else ""
    left = len(state.placement) - len(bad) + len(spares) + len(able)
    if size.may_shrink_to(state, left):
        why += f": {some(bad, NODES_TOLD)} out{why_not}, {size.told(state, left)}"
        return Decision(size.SHRINK, why, bad, wait_s, blames=blames)
    if state.may_requeue:
        why = f"{count(len(bad), 'node')} to replace, {count(len(spares), 'spare')} ready{why_not}"
        return Decision("requeue", why, bad, blames=blames)
    return Decision("stop", f"no spare is left and requeueing is not allowed{why_not}", bad)


def without_spare(state: RunState, nodes: int) -> str:
    """Return the action for a node that leaves while no spare is ready, as far as it is known before: with
    `nodes` left. Where the run holds its nodes first, it is what follows if none comes."""
    if size.may_shrink_to(state, nodes):
        return size.SHRINK
    return "requeue" if state.may_requeue else "stop"


def _pause_s(in_a_row: int, first_s: float, most_s: float) -> float:
    """The pause before the next attempt: none after a first failure, then doubling."""
    return 0.0 if in_a_row <= 1 else min(most_s, first_s * 2.0 ** (in_a_row - 2))


def job_exit_code(cause: Cause) -> int:
    """Return the application's own code, as a shell gives it (128 + signal); jurymast's if no rank ended by
    itself."""
    if cause.exit_code == 0:
        return RunFailedError.exit_code
    return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code


def _hopeless(state: RunState, cause: Cause) -> str:
    """Why another attempt cannot help, if the same cause returned without progress or a restart budget is
    spent; otherwise ""."""
    if cause.kind in ORDERED | CHOSEN:
        return loops.endless(state) if cause.kind in CHOSEN else ""
    if cause.signature == ENDED_EARLY and state.may_leave(state.now) or leaving.explains(state, cause):
        return "the ranks had caught a signal before, and leave"
    incidents, most = loops.failed(state.incidents), loops.most_repeats(cause)
    if cause.kind not in ("node_lost", "node_crash"):
        # A script that counts from 0 in every attempt does new steps each time, maybe without progress.
        step = incidents[-1].step_lost_from
        alike = loops.repeats(incidents, cause, step)
        if alike >= most and step and not state.absolute:
            return f"crash loop: the same failure {alike} times, each after {step} steps"
        if loop := loops.crash_loop(loops.fruitless(state), cause):
            return loop
    return loops.endless(state) or ("" if cause.charged == NOBODY else spent(state, cause.charged))


def spent(state: RunState, charged: str, *, coming: int = 0) -> str:
    """Say that the incidents so far, and `coming` more, are more than their budget; "" if they are not."""
    settings = state.settings
    budget = {
        APPLICATION: settings.application, INFRASTRUCTURE: settings.infrastructure,
        PREEMPTION: settings.preemption,
    }[charged]  # fmt: skip
    recent = takewhile(lambda one: one.detected_at > state.now - budget.window_s, reversed(state.incidents))
    if budget.count is not None and coming + sum(one.charged == charged for one in recent) > budget.count:
        what = "preemptions" if charged == PREEMPTION else "failures"
        paid = [one for one in state.incidents if one.charged == charged]
        told = f": {loops.causes_of(paid[-budget.count - 1 :])}" if charged != PREEMPTION else ""
        return f"the {charged} budget of {budget.count} {what} per {budget.window_s:.0f} s is spent{told}"
    return ""


def _left(state: RunState, cause: Cause) -> tuple[str, ...]:
    return tuple(name for name in state.placement if name == cause.node or name in state.findings.leave)


def _wished(state: RunState, bad: Collection[str], spares: Collection[str]) -> tuple[str, ...]:
    """Those that were asked to leave before something else ended the attempt. What is about to be used for
    something else stays if there is no spare for it as well."""
    left = [name for name in state.placement if name in state.findings.leave and name not in bad]
    must = [name for name in left if not state.nodes[name].going]
    may = [name for name in left if state.nodes[name].going]
    return (*must, *may[: max(0, len(spares) - len(bad) - len(must))])


def _bad_nodes(state: RunState, cause: Cause) -> tuple[tuple[str, ...], str]:
    """The placed nodes that have to leave, and why (or why none has)."""
    here = (Role.ACTIVE, Role.SPARE)  # or its torchrun host died, and another is ready by now
    gone = tuple(name for name in state.placement if state.nodes[name].role not in here)
    if cause.kind in FROM_FINDINGS:
        found, why = _found_bad(state, cause)
        return tuple(dict.fromkeys((*gone, *found))), why
    if gone:
        return gone, "replaced"
    if cause.kind == "drain_asked":
        return _left(state, cause), "removed by hand"
    if cause.kind == AHEAD:
        return _left(state, cause), "left before others need it"
    if cause.kind == "grow_asked":
        return (), "the state of this step is brought to all ranks"
    if cause.kind == "straggler":
        return cause.nodes, "a swap pays off"
    if cause.charged != "infrastructure" or not cause.node:
        return (), "restarted in place, no node is at fault"
    if len(cause.nodes) > 1:
        return (), "several nodes show the same cause, so none is blamed"
    earlier = [i for i in state.incidents[:-1] if i.cause == cause.kind]
    if earlier and earlier[-1].node == cause.node and state.nodes[cause.node].role in here:
        if any(i.action == "swap" for i in earlier[-2:]):
            return (), "the node that took over shows the same cause, so the node is not blamed"
        return (cause.node,), f"second time in a row on {cause.node}"
    if earlier and earlier[-1].node not in ("", cause.node):
        return (), "another node showed the same cause before, so the node is not blamed"
    return (), "restarted in place, first time on this node"


def _found_bad(state: RunState, cause: Cause) -> tuple[tuple[str, ...], str]:
    """Nodes that leave for a finding, or for an end of a rank that is as certain."""
    if state.settings.bad_nodes == "report":
        return (), "the policy only reports bad nodes"
    here = [i for i in state.incidents[:-1] if i.node == cause.node and i.detected_at >= state.allocated_at]
    is_first = all(incident.cause != cause.kind for incident in here)
    if cause.kind == "network_suspect" and state.settings.workaround and is_first:
        return (), "restarted in place, where its ranks do without the device"
    # The limits on blame are for findings; they do not hold where ranks failed twice.
    last = [i.node for i in state.incidents[-2:-1] if i.cause == cause.kind]
    bad: list[str] = []
    for name in cause.nodes:
        refused = blame.beyond_limits(state, name, bad)
        if refused and name not in last:
            return tuple(bad), f"{name} stays, because {refused}"
        bad.append(name)
    return tuple(bad), "removed on health findings"


def _blames(state: RunState, cause: Cause, bad: tuple[str, ...]) -> tuple[Blame, ...]:
    """The blames of those in `bad` that leave because of a finding, of what a rank said about its GPU, or of
    slowness."""
    if cause.kind not in FROM_FINDINGS and cause.kind != "straggler":
        return ()
    found = []
    for name in bad:
        if name in cause.nodes and state.nodes[name].role is Role.ACTIVE:
            finding = state.findings.health.get(name) or blame.standing(state, state.nodes[name])
            if finding is not None:
                found.append(blame.blame_for(state, name, finding))
            else:
                is_bad = cause.kind.endswith("_bad")
                found.append(Blame(name, state.now, cause.kind, cause.evidence, is_bad, cause.kind))
    return tuple(found)


def failed_tests(state: RunState, bad: Collection[str], spares: Sequence[str]) -> tuple[str, ...]:
    """Nodes that have ranks although they failed their tests, because no other was ready then. As ranks are
    stopped now, these leave as far as there are `spares` besides those for `bad`."""
    trusted = _trusted(state, spares) - len(bad)
    if trusted <= 0 or state.settings.bad_nodes == "report":
        return ()
    return tuple(n for n in state.placement if n not in bad and is_doubtful(state.nodes[n]))[:trusted]


def is_doubtful(node: Node) -> bool:
    return node.role in PLACED and node.tested == Verdict.SUSPECT.value


def _trusted(state: RunState, spares: Sequence[str]) -> int:
    return sum(state.nodes[name].role is Role.SPARE and name not in state.places for name in spares)


def set_aside(
    state: RunState,
    judged: Collection[str],
    bad: Collection[str],
    spares: Sequence[str],
    blamed: Sequence[str],
) -> list[Blame]:
    """Nodes with a finding that could not leave when it came, or are not why the ranks are stopped, besides
    those that are `judged` already. As ranks are stopped now, these leave as far as there are `spares`. Of
    those in `bad` only the `blamed` count for the limits of blame: a node that is lost is not out for a
    finding."""
    aside: list[Blame] = []
    if state.settings.bad_nodes == "report":
        return aside
    trusted = _trusted(state, spares)
    for name in state.placement:
        node = state.nodes[name]
        if len(bad) + len(aside) >= trusted:
            break
        if not node.findings or node.role not in PLACED or name in bad or name in judged:
            continue
        finding = blame.standing(state, node)
        if finding is None or blame.worked_around(state, finding):
            continue
        if not blame.beyond_limits(state, name, [*blamed, *(b.node for b in aside)]):
            aside.append(blame.blame_for(state, name, finding))
    return aside
