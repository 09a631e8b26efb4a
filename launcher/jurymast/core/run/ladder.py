"""The restart ladder: what to do about a known cause. It chooses the cheapest safe action, and gives the
reason.

1. restart in place, 2. swap a spare in, 4. requeue without the bad nodes; or stop, if another attempt cannot
help. (Rung 3, shrinking, is not supported.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from jurymast.core.run import blame, causes
from jurymast.core.run.attribution import Cause
from jurymast.core.run.incident import Incident
from jurymast.core.run.state import Blame, Role, RunState
from jurymast.core.texts import NODES_TOLD, count, some
from jurymast.errors import RunFailedError

# A cause that comes back without one new step between is not going away by itself.
SAME_APPLICATION_ERROR = 3
SAME_INFRASTRUCTURE_ERROR = 5
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
# Causes that people repair elsewhere and no other node avoids: the run waits for them, an hour and a half.
PATIENT = frozenset({"storage_full", "storage_failed", "fabric_fault"})
SAME_PATIENT_ERROR = 20
# A network may take as long to recover, and may do so at any moment: it is tried as often, with shorter
# waits.
LASTING = PATIENT | {"communication"}
PATIENT_FIRST_S = 15.0
PATIENT_MAX_S = 300.0
PATIENT_WINDOW_S = 3600.0


@dataclass(frozen=True)
class Decision:
    """`action`: restart, swap, requeue or stop; `why`: the reason, without the cause's evidence; `bad`: nodes
    that leave the placement, those of `blames` for a finding."""

    action: str
    why: str
    bad: tuple[str, ...] = ()
    backoff_s: float = 0.0
    blames: tuple[Blame, ...] = ()


def decide(state: RunState, cause: Cause) -> Decision:
    """Return what to do now that all ranks are stopped and the cause is known."""
    if hopeless := _hopeless(state, cause):
        return Decision("stop", hopeless)
    bad, why = _bad_nodes(state, cause)
    wait_s = _pause_s(state.without_progress, BACKOFF_FIRST_S, BACKOFF_MAX_S)
    spares = [node.name for node in state.spare_nodes() if node.name not in bad]
    aside = _set_aside(state, cause, bad, spares)
    blames = _blames(state, cause, bad) + tuple(aside)
    if aside:
        bad += tuple(b.node for b in aside)
        why += "; also removed: " + ", ".join(f"{b.node} ({b.evidence})" for b in aside)
    if not bad:
        if cause.kind in PATIENT:
            wait_s = _pause_s(_patient_tries(state, cause), PATIENT_FIRST_S, PATIENT_MAX_S)
        return Decision("restart", why, backoff_s=wait_s)
    coming = [node for node in state.nodes.values() if node.coming]
    unblamed = [node for node in coming if node.role is not Role.SUSPECT and node.name not in bad]
    if len(spares) + len(unblamed) >= len(bad):
        names = some(bad, NODES_TOLD)
        return Decision("swap", f"{why}: {names} out, a spare in", bad, wait_s, blames=blames)
    lost = any(state.nodes[name].role is Role.FAILED for name in bad)
    must_go = lost or cause.kind == "drain_asked" or any(b.bad for b in blames)
    if not must_go or (blames and not lost and not state.may_requeue):
        # Blamed but alive, and nothing to put in its place: a requeue costs more than another try.
        return Decision("restart", f"{why}, but no spare is left: restarted in place", backoff_s=wait_s)
    # A node among these that only lacks a torchrun host takes its own place again, as does a lost one that
    # has returned; and a suspect that is about to be ready is better than a requeue.
    back = [node for node in state.nodes.values() if node.usable and node.name in bad]
    if len(spares) + len(back) + len(coming) >= len(bad) and not blames:
        names = some(bad, NODES_TOLD)
        return Decision("swap", f"{why}: {names} out unless back soon", bad, wait_s)
    if state.may_requeue:
        why = f"{count(len(bad), 'node')} to replace, {count(len(spares), 'spare')} ready"
        return Decision("requeue", why, bad, blames=blames)
    return Decision("stop", "no spare is left and requeueing is not allowed", bad)


def _pause_s(in_a_row: int, first_s: float, most_s: float) -> float:
    """The pause before the next attempt: none after a first failure, then doubling."""
    return 0.0 if in_a_row <= 1 else min(most_s, first_s * 2.0 ** (in_a_row - 2))


def _patient_tries(state: RunState, cause: Cause) -> int:
    """How often the cause came within the hour. A script that saves for itself does some steps each time, so
    new steps do not reset this."""
    since = state.now - PATIENT_WINDOW_S
    recent = sum(1 for one in state.incidents if one.cause == cause.kind and one.detected_at > since)
    return max(state.without_progress, recent)


def job_exit_code(cause: Cause) -> int:
    """Return the application's own code, as a shell gives it (128 + signal); jurymast's if no rank ended by
    itself."""
    if cause.exit_code == 0:
        return RunFailedError.exit_code
    return cause.exit_code if cause.exit_code > 0 else 128 - cause.exit_code


def _hopeless(state: RunState, cause: Cause) -> str:
    """Why another attempt cannot help, if the same cause returned without progress or a restart budget is
    spent; otherwise ""."""
    if cause.charged == causes.NOBODY:
        return ""
    incidents, application = state.incidents, cause.charged == causes.APPLICATION
    most = SAME_APPLICATION_ERROR if application else SAME_INFRASTRUCTURE_ERROR
    most = SAME_PATIENT_ERROR if cause.kind in LASTING else most
    if cause.kind not in ("node_lost", "node_crash"):
        repeated = repeats(incidents[-max(1, state.without_progress) :], cause)
        if repeated >= most:
            return f"crash loop: the same failure {repeated} times without a new step"
        # A script that counts from 0 in every attempt does new steps each time, maybe without progress.
        step = incidents[-1].step_lost_from
        alike = repeats(incidents, cause, step)
        if alike >= most and not state.absolute:
            return f"crash loop: the same failure {alike} times, each after {step} steps"
    budget = state.settings.application if application else state.settings.infrastructure
    recent = takewhile(lambda one: one.detected_at > state.now - budget.window_s, reversed(incidents))
    if budget.count is not None and sum(one.charged == cause.charged for one in recent) > budget.count:
        return f"the {cause.charged} budget of {budget.count} failures per {budget.window_s:.0f} s is spent"
    return ""


def repeats(incidents: Sequence[Incident], cause: Cause, at_step: int | None = None) -> int:
    """Return how many of the newest incidents in a row have this cause, each `at_step` if that is given."""
    same = takewhile(
        lambda one: one.signature == cause.signature and at_step in (None, one.step_lost_from),
        reversed(incidents),
    )
    return sum(1 for _ in same)


def _bad_nodes(state: RunState, cause: Cause) -> tuple[tuple[str, ...], str]:
    """The placed nodes that have to leave, and why (or why none has)."""
    here = (Role.ACTIVE, Role.SPARE)  # or its torchrun host died, and another is ready by now
    gone = tuple(name for name in state.placement if state.nodes[name].role not in here)
    if cause.kind in causes.FROM_FINDINGS:
        found, why = _found_bad(state, cause)
        return tuple(dict.fromkeys((*gone, *found))), why
    if gone:
        return gone, "replaced"
    if cause.kind == "drain_asked":
        return tuple(n for n in state.placement if n == cause.node), "removed by hand"
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
    if cause.kind not in causes.FROM_FINDINGS and cause.kind != "straggler":
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


def _set_aside(state: RunState, cause: Cause, bad: tuple[str, ...], spares: Sequence[str]) -> list[Blame]:
    """Nodes with a finding that could not leave when it came. As the ranks are stopped now anyway, they leave
    as far as there are `spares`."""
    aside: list[Blame] = []
    if state.settings.bad_nodes == "report":
        return aside
    trusted = sum(state.nodes[name].role is Role.SPARE for name in spares)
    for name in state.placement:
        node = state.nodes[name]
        if len(bad) + len(aside) >= trusted:
            break
        if not node.findings or node.role is not Role.ACTIVE or name in bad or name in cause.nodes:
            continue
        finding = blame.standing(state, node)
        if finding is None or blame.worked_around(state, finding):
            continue
        if not blame.beyond_limits(state, name, [*bad, *(b.node for b in aside)]):
            aside.append(blame.blame_for(state, name, finding))
    return aside
