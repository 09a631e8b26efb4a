"""Failures that come back without one new step between them.

They are bounded whatever their causes, and ends that somebody ordered are not among them. Where machines fail
so often that more may well come by chance, the bound is higher. If one fault comes at the same point of the
script, or after the same time, on node after node, it is the script's: the nodes are acquitted of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile

from jurymast.core.judges.attribution import Cause, cause_of
from jurymast.core.state.failure_rate import Posterior
from jurymast.core.state.incident import APPLICATION, INFRASTRUCTURE, ORDERED, Incident
from jurymast.core.state.run import Role, RunState
from jurymast.core.state.signatures import Signature
from jurymast.core.state.texts import NODES_TOLD, count, some, spoken_s

SCRIPT_FAULT = "script_fault"
# So many times in a row without a new step: the cause is not going away by itself.
SAME_APPLICATION_ERROR = 3
SAME_INFRASTRUCTURE_ERROR = 5
# Causes that people repair elsewhere and no other node avoids: the run waits for them, an hour and a half.
PATIENT = frozenset({"storage_full", "storage_failed", "fabric_fault"})
SAME_PATIENT_ERROR = 20
# A network may take as long to recover, and may do so at any moment: it is tried as often, with shorter
# waits.
LASTING = PATIENT | {"communication"}
PATIENT_WINDOW_S = 3600.0
# Failures of machines that a script can cause as well: it fills memory or disks, or kills or stops processes.
_OF_SCRIPTS_TOO = frozenset({
    "node_lost", "node_crash", "worker_killed", "bus_error", "shm_full", "host_died", "rank_frozen", "hang",
    "gpu_unavailable", "disk_full",
})  # fmt: skip
# One fault on this many nodes, or on this many that had the same ranks one after the other, is not theirs; on
# more of them where so many may well fail at the same point by chance.
NODES, NODES_IN_ONE_PLACE = 3, 2
CHANCE_MAX = 1e-4
# If only these ended the attempts without a new step, chance explains up to so many times those that the
# policy allows: in the trace of `sim/data`, 27 in a row on 12,000 nodes that save once an hour.
_OF_MACHINES = frozenset({"node_lost", "node_crash", "fabric_fault"})
CHANCE_TIMES = 2
# The same time after the start: within this share of it. Nodes that die soon after each start may do so for a
# reason outside, a power outage say; only if three with the same ranks do so is that the script's.
SAME_SHARE, LONG_S, SAME_S = 0.2, 30.0, 2.0


def failed(incidents: Sequence[Incident]) -> list[Incident]:
    """Return those of `incidents` that nobody ordered."""
    return [incident for incident in incidents if incident.cause not in ORDERED]


def fruitless(state: RunState) -> list[Incident]:
    """Return the newest failures in a row without a new step between them, oldest first. A script that counts
    its steps from 0 in each attempt has done no new step, as far as is known, if it ended after as many."""
    stuck = failed(state.incidents[-state.without_progress :] if state.without_progress else [])
    if state.absolute or not state.incidents:
        return stuck
    step = state.incidents[-1].step_lost_from
    alike = takewhile(lambda one: abs(one.step_lost_from - step) <= 1, reversed(failed(state.incidents)))
    return max(stuck, [*alike][::-1], key=len)


def repeats(incidents: Sequence[Incident], cause: Cause, at_step: int | None = None) -> int:
    """Return how many of the newest incidents in a row have this cause, each `at_step` if that is given."""
    same = takewhile(
        lambda one: one.signature == cause.signature and at_step in (None, one.step_lost_from),
        reversed(incidents),
    )
    return sum(1 for _ in same)


def most_repeats(cause: Cause) -> int:
    """How often in a row this cause ends the run."""
    script = cause.kind != SCRIPT_FAULT or cause.signature.code == "hang"
    own = (cause.charged == APPLICATION and script) or cause.kind == "collective_timeout"
    most = SAME_APPLICATION_ERROR if own else SAME_INFRASTRUCTURE_ERROR
    return SAME_PATIENT_ERROR if cause.kind in LASTING else most


def crash_loop(stuck: Sequence[Incident], cause: Cause) -> str:
    """Say that the newest of `stuck`, failures without a new step, had this cause too often; otherwise ""."""
    if (repeated := repeats(stuck, cause)) < most_repeats(cause):
        return ""
    return f"crash loop: the same failure {repeated} times without a new step"


def patient_tries(state: RunState, cause: Cause) -> int:
    """How often the cause came within the hour. A script that saves for itself does some steps each time, so
    new steps do not reset this."""
    since = state.now - PATIENT_WINDOW_S
    recent = sum(1 for one in state.incidents if one.cause == cause.kind and one.detected_at > since)
    return max(len(fruitless(state)), recent)


def endless(state: RunState) -> str:
    """Say that there were too many attempts without a new step, and what ended them; otherwise ""."""
    stuck, most = fruitless(state), state.settings.attempts_without_step
    if most is None or len(stuck) < max(1, most, min(CHANCE_TIMES * most, _by_chance(stuck))):
        return ""
    return f"{count(len(stuck), 'attempt')} in a row without a new step: {causes_of(stuck)}"


def _by_chance(stuck: Sequence[Incident]) -> float:
    """Return how many attempts in a row may well be ended by chance, by machines that fail as often as they
    do now, before one comes to a new step. That takes longer than the longest of these attempts lived. (By
    chance some live far longer than others. A fault at always the same point is none after 20.)"""
    lives = [one.lived_s for one in stuck if one.cause in _OF_MACHINES]
    if len(lives) < len(stuck) or not any(lives):
        return 0.0
    return math.log(CHANCE_MAX) / math.log1p(-math.exp(-max(lives) * len(lives) / sum(lives)))


def causes_of(incidents: Sequence[Incident]) -> str:
    """Say which causes these had: "hang 3 times, node_lost once", the most frequent first."""
    counted = Counter(incident.cause for incident in incidents).most_common()
    return ", ".join(f"{cause} {'once' if n == 1 else f'{n} times'}" for cause, n in counted)


# ---- a fault that follows the script


def follows_script(state: RunState, cause: Cause) -> list[Incident]:
    """Return the newest failures in a row without a new step, if `cause`, that of the newest, and they are
    one fault on node after node; otherwise []."""
    newest = state.incidents[-1]
    if again := _same_place(state, cause):
        return [*again, newest]
    if cause.kind not in _OF_SCRIPTS_TOO or not cause.node:
        return []
    fault, place = _fault(cause.signature), state.places.get(cause.node, -1)
    earlier = [
        *takewhile(lambda one: bool(one.node) and _fault(one.signature) == fault, fruitless(state)[-2::-1])
    ]
    anywhere = takewhile(lambda one: _at_the_same_point(one, newest, LONG_S, 0.0), earlier)
    beside = takewhile(lambda one: one.place == place, earlier)
    here = takewhile(lambda one: _at_the_same_point(one, newest, 0.0, SAME_S), beside)
    all_nodes = state.exposed
    chance = _chance(state, newest, all_nodes)
    soon = fault.kind == "node_lost" and newest.lived_s < LONG_S
    for found, least, by_chance in (
        (anywhere, NODES, chance),
        (here, NODES if soon else NODES_IN_ONE_PLACE, chance / all_nodes),
    ):
        nodes = len({cause.node, *(one.node for one in found)})
        if nodes >= least and by_chance ** (nodes - 1) <= CHANCE_MAX:
            return [*earlier[::-1], newest]  # also those before: no attempt has come past that point
    return []


def _same_place(state: RunState, cause: Cause) -> list[Incident]:
    """Return the failures in a row before this hang in which the rank that the others waited for stood at the
    same line of the script; otherwise []."""
    if cause.kind != "hang" or not cause.signature.error.message:
        return []
    before = failed(state.incidents[:-1])[::-1]
    return [*takewhile(lambda one: _fault(one.signature) == cause.signature, before)][::-1]


def _chance(state: RunState, newest: Incident, nodes: int) -> float:
    """Return the probability that a failure of any of the active `nodes`, at the rate observed, comes at the
    same point as `newest` (see `_at_the_same_point`): on 12,000 nodes, after 10 minutes, 1 in 7."""
    posterior = state.failures.posterior if state.failures is not None else Posterior()
    share = max(2 * SAME_SHARE, 3 / newest.steps_done if newest.steps_done else 0.0)
    window_s = max(2 * SAME_S, share * newest.lived_s)
    return -math.expm1(-window_s / posterior.mtbf_s(nodes))


def _fault(signature: Signature) -> Signature:
    """The fault wherever it is: a node that dies may close its connections or not."""
    kind = signature.code if signature.kind == SCRIPT_FAULT else signature.kind
    return replace(signature, kind="node_lost" if kind == "node_crash" else kind, node="", code="")


def _at_the_same_point(one: Incident, other: Incident, least_s: float, slack_s: float) -> bool:
    """After as many steps of the attempt, or after as much time, if that is at least `least_s`."""
    if min(one.steps_done, other.steps_done) > 0 and abs(one.steps_done - other.steps_done) <= 1:
        return True
    longer_s = max(one.lived_s, other.lived_s)
    return longer_s >= least_s and abs(one.lived_s - other.lived_s) <= max(slack_s, SAME_SHARE * longer_s)


def script_fault(series: Sequence[Incident], cause: Cause) -> Cause:
    """Return the cause of this series, the newest of which has had `cause` so far."""
    nodes = tuple(dict.fromkeys([*(one.node for one in series[:-1]), cause.node]))
    newest = series[-1]
    after = f"after {count(newest.steps_done, 'step')}" if newest.steps_done else f"{newest.lived_s:.0f} s"
    where = f"{after}{'' if newest.steps_done else ' after the start'}"
    times = f"on {count(len(nodes), 'node')} one after the other ({some(nodes, NODES_TOLD)})"
    if cause.kind == "hang" and cause.signature.error.message:
        times = f"{len(series)} times in a row at the same place ({cause.signature.error.message})"
    evidence = (
        f"{cause.kind} {times}, each about {where}, so the script causes it and no node is blamed; "
        f"the last: {cause.evidence}"
    )
    signature = replace(cause.signature, kind=SCRIPT_FAULT, node="", code=_fault(cause.signature).kind)
    return cause_of(
        SCRIPT_FAULT, evidence, cause.node, rank=cause.rank, exit_code=cause.exit_code, signature=signature
    )


def acquit(state: RunState, series: Sequence[Incident], cause: Cause) -> None:
    """Charge the earlier ones of `series` to `cause`, the script's, as the newest is about to be, and
    withdraw what all of them have led to for their nodes."""
    for one in series[:-1]:
        if state.failures is not None and one.charged == INFRASTRUCTURE:
            state.failures.withdraw(one.fault_at)
        one.cause, one.charged, one.signature = cause.kind, cause.charged, cause.signature
    state.recount()
    _forgive(state, {cause.node, *(one.node for one in series[:-1])}, series[0].fault_at)


def environment_fault(state: RunState) -> Cause | None:
    """Return the cause if no node of the allocation could load torch, and more than one tried, or the only
    one: then the environment is broken and not the nodes, none of which is excluded."""
    tried = [node for node in state.nodes.values() if node.unloadable]
    if not tried or len(tried) < min(2, state.active) or any(node.ready for node in state.nodes.values()):
        return None
    for node in tried:
        node.faultless = True
    names = some([node.name for node in tried], NODES_TOLD)
    return cause_of("import_failed", f"{tried[0].reason} (on {names})")


def slow_to_load(state: RunState) -> Cause | None:
    """Return the cause if the agents of several nodes are there, and none has its torchrun host yet: what all
    of them wait for is on none of them, and none is excluded."""
    nodes = state.nodes.values()
    slow = [node for node in nodes if node.role is Role.JOINING and node.incarnation]
    if len(slow) < 2 or any(node.ready for node in nodes):
        return None
    for node in slow:
        node.faultless = True
    waited = spoken_s(state.now - min(node.since for node in slow))
    names = some([node.name for node in slow], NODES_TOLD)
    return cause_of("storage_failed", f"after {waited} no node had loaded torch ({names})")


def give_up(state: RunState) -> None:
    """The run stops because it does no new steps. If many nodes failed meanwhile, that does not count against
    any of them: nothing shows that they are the cause."""
    stuck = fruitless(state)
    nodes = {one.node for one in stuck if one.node and one.cause in _OF_SCRIPTS_TOO}
    if len(nodes) >= NODES:
        _forgive(state, nodes, stuck[0].fault_at)


def _forgive(state: RunState, nodes: Collection[str], since: float) -> None:
    for name in filter(None, nodes):
        state.acquitted[name] = (min(since, state.acquitted.get(name, (since, 0.0))[0]), state.now)
        state.excluded.pop(name, None)
        if name in state.nodes:
            state.nodes[name].faultless = True
        if (frail := state.frail.get(name)) is not None:
            state.frail[name] = replace(frail, fresh_until=0.0)
