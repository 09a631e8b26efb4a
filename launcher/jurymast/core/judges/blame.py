"""What findings of probes lead to: whether a node leaves the active ones for a finding, and why not.

A `bad` finding takes its node out of the run, a `suspect` one makes it a spare that is tested before it is
used again, and `unknown` has no consequence. Only findings on a node's own hardware, network and machine
count. In addition:

- A finding from before the allocation does not count, and a repeated report counts once.
- The same finding on many nodes within `together_s` is nobody's fault (one NVLink crash flagged 77 healthy
  nodes at one site): on more than two nodes for sympathetic Xids, otherwise on over a tenth of them and at
  least three.
- At most `excluded_fraction` of the run's nodes (one in any case) are blamed at a time, and four an hour.
- No node leaves if nothing can take its place, and the run can go on neither with fewer nodes nor after a
  requeue, or if the policy only reports.

Where one of these keeps a node in, people are alerted instead. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from jurymast.core.state import findings, incident
from jurymast.core.state.effects import Dismiss, Instruction, RaiseAlert
from jurymast.core.state.events import HealthFound
from jurymast.core.state.findings import Finding, Verdict
from jurymast.core.state.incident import Alert
from jurymast.core.state.run import Blame, Exclusion, Node, Phase, Role, RunState, Sighting

FEW_NODES = 2
MANY_FRACTION = 0.1
PER_HOUR = 4
HOUR_S = 3600.0
# A recurrence within a day is not chance.
REPEAT_S = 86_400.0
FATAL_TIMES = 5
# Two probes, or two lines of the kernel log, report one event within this time.
DUPLICATE_S = 5.0
# A node's clock may be off by this much, and the supervisor starts some seconds after the job.
CLOCK_SLACK_S = 30.0
ALERTS_KEPT = 100
# The subject of an alert to what many nodes show, before the group of findings.
MANY = "many "

ACTING_KINDS = (findings.HARDWARE, findings.NETWORK, findings.HOST)
ACTING_VERDICTS = (Verdict.BAD, Verdict.SUSPECT)
PAGE_FAULT, GRAPHICS_EXCEPTION = "xid-31", "xid-13"
# The job's own use of memory, whatever the probe thinks of it; and what a SIGBUS may come from.
OOM_KILL, SHM_FULL = "oom-kill", "shm-full"
# With only one node, no other node can confirm it.
STORAGE_FULL = "storage-full"
PROCESS_STUCK = "process-stuck"


def take(state: RunState, event: HealthFound) -> Finding | None:
    """Enter a finding on a known node into the state; None if it is over, too old or already known."""
    finding = Finding(
        probe=event.probe, code=event.code, verdict=Verdict(event.verdict), kind=event.kind,
        message=event.message, device=event.device, at=event.at or event.t, unit=event.unit,
    )  # fmt: skip
    node = state.nodes[event.node]
    key = f"{finding.probe} {finding.code} {finding.device}"
    if finding.verdict is Verdict.OK:
        node.findings.pop(key, None)
        _recovered(state, node)
        return None
    if finding.at < state.allocated_at - CLOCK_SLACK_S:
        return None
    known = node.findings.get(key)
    node.findings[key] = finding
    told = [s.finding for s in _of_node(state, node.name, finding)] + ([known] if known else [])
    if any(f.verdict is finding.verdict and abs(f.at - finding.at) <= DUPLICATE_S for f in told):
        return None
    if finding.kind in (findings.SYMPATHETIC, findings.APPLICATION) or finding.verdict in ACTING_VERDICTS:
        _remember(state, Sighting(state.now, node.name, _group(finding), finding))
    return finding


def _remember(state: RunState, sighting: Sighting) -> None:
    here = [s for s in state.seen.get(sighting.node, ()) if s.t >= state.now - REPEAT_S]
    state.seen[sighting.node] = [*here, sighting]
    together_s = state.settings.together_s
    if state.recent and state.recent[0].t < state.now - 2 * together_s:
        state.recent = [s for s in state.recent if s.t >= state.now - together_s]
    state.recent.append(sighting)


def stays(state: RunState, node: Node, finding: Finding) -> list[Instruction] | None:
    """Return None if `node` leaves the active ones for this new finding; otherwise note why it stays, and
    return the alert, if people are to know at once."""

    def alert(subject: str, message: str) -> list[Instruction]:
        return raise_alert(state, subject, message, (node.name,))

    if common := on_many(state, finding):
        return _alert_on_many(state, node.name, _group(finding), common)
    if finding.code == STORAGE_FULL and finding.verdict in ACTING_VERDICTS:
        return alert(
            "storage full", f"{describe(finding)}; the run's writes wait for space, and no node is blamed"
        )
    if not acts(finding) or node.role is Role.FAILED or _waits_for_storage(node, finding):
        return []
    if finding.verdict is Verdict.SUSPECT and node.role is Role.SUSPECT:
        return []
    told = f"{node.name}: {describe(finding)}"
    if state.settings.bad_nodes == "report":
        return alert(
            "reported only",
            f"{told}; it would leave the active nodes, but the policy only reports bad nodes",
        )
    if refused := beyond_limits(state, node.name):
        return alert("limit of blame", f"{told}; it stays, because {refused}")
    if finding.verdict is Verdict.SUSPECT and node.role is Role.ACTIVE:
        why = ""
        if worked_around(state, finding):
            why = "its ranks do without the device from the next attempt on"
        elif not any(n.role is Role.SPARE for n in state.spare_nodes()):
            why = "no spare is ready, so it stays until the next incident"
        if why:
            state.notes.append((state.now, f"{told}; {why}"))
            return []
    elif finding.verdict is Verdict.BAD and not _replaceable(state, node):
        return alert("no replacement", f"{told}; it stays: nothing can take its place")
    return None


def acts(finding: Finding) -> bool:
    """Return whether a finding of this verdict and kind can make a node leave."""
    return finding.kind in ACTING_KINDS and finding.verdict in ACTING_VERDICTS and finding.code != OOM_KILL


def _waits_for_storage(node: Node, finding: Finding) -> bool:
    """Whether a process that is stuck in the kernel waits for storage: the node's storage does not answer,
    whatever the kernel calls the place."""
    known = node.findings.values()
    return finding.code == PROCESS_STUCK and any(
        one.kind == findings.STORAGE and one.verdict in ACTING_VERDICTS for one in known
    )


def is_bad(finding: Finding) -> bool:
    return finding.verdict is Verdict.BAD and acts(finding)


def worked_around(state: RunState, finding: Finding) -> bool:
    """Return whether ranks can avoid the part: one network device of several, which the agent leaves out at
    each launch."""
    network = finding.kind == findings.NETWORK and finding.verdict is Verdict.SUSPECT
    return network and state.settings.workaround


def speaks(finding: Finding) -> bool:
    """Return whether a finding can explain the end of ranks: it can make a node leave, or is nobody's
    fault."""
    if finding.kind == findings.APPLICATION or finding.code in (OOM_KILL, SHM_FULL):
        return True
    return finding.verdict in ACTING_VERDICTS and finding.kind != findings.SYMPATHETIC


def describe(finding: Finding) -> str:
    """Describe a finding: "xid-79 on gpu3: the GPU fell off the bus"."""
    return f"{finding.code}{f' on {finding.device}' if finding.device else ''}: {finding.message}"


def standing(state: RunState, node: Node) -> Finding | None:
    """Return the worst finding that still counts against `node`; None if none does."""
    found = [escalated(state, node.name, finding) for finding in node.findings.values()]
    against = [f for f in found if acts(f) and not on_many(state, f) and not _waits_for_storage(node, f)]
    return min(against, key=lambda f: (f.verdict is not Verdict.BAD, f.at), default=None)


def passed_tests(state: RunState, node: Node) -> None:
    """Active tests show that a suspect works: earlier findings no longer count against it."""
    node.findings = {key: f for key, f in node.findings.items() if f.verdict is Verdict.BAD}
    state.seen.pop(node.name, None)


# Counting.


def escalated(state: RunState, name: str, finding: Finding) -> Finding:
    """Return the finding with its verdict corrected by earlier ones: what is the program's fault on many GPUs
    is a GPU's own fault if it returns there and nowhere else."""
    if finding.code not in (PAGE_FAULT, GRAPHICS_EXCEPTION) and not _is_fatal(finding):
        return finding
    here = [s.finding for s in _of_node(state, name, finding) if state.now - s.t <= REPEAT_S]
    if _is_fatal(finding):
        if sum(map(_is_fatal, here)) < FATAL_TIMES:
            return finding
        message = f"{finding.message}; {FATAL_TIMES} fatal Xids within a day: contact the vendor's support"
        return replace(finding, message=message)
    if finding.kind != findings.APPLICATION or _elsewhere(state, name, finding):
        return finding
    where = ""
    if finding.code == GRAPHICS_EXCEPTION:
        here = [f for f in here if f.unit]
        if any(f.unit != finding.unit for f in here):  # the program's
            return finding
        where = f" on {finding.unit}"
    if len(here) < 2:
        return finding
    message = f"{finding.message}; {len(here)} times within a day{where} of this GPU, and on no other"
    return replace(finding, verdict=Verdict.SUSPECT, kind=findings.HARDWARE, message=message)


def _is_fatal(finding: Finding) -> bool:
    return finding.code.startswith("xid-") and finding.verdict is Verdict.BAD


def _of_node(state: RunState, name: str, like: Finding) -> list[Sighting]:
    """Earlier sightings of the same code on the same device (of any fatal code for a fatal one)."""
    return [
        s for s in state.seen.get(name, ())
        if s.finding.device == like.device
        and (s.finding.code == like.code or (_is_fatal(s.finding) and _is_fatal(like)))
    ]  # fmt: skip


def _elsewhere(state: RunState, name: str, finding: Finding) -> bool:
    return any(
        s.finding.code == finding.code and (s.node, s.finding.device) != (name, finding.device)
        for sightings in state.seen.values()
        for s in sightings
    )


def _group(finding: Finding) -> str:
    """The group of a finding, for counting. Networks and storage fail in many ways at once, so each is one
    group."""
    return finding.kind if finding.kind in (findings.NETWORK, findings.STORAGE) else finding.code


def on_many(state: RunState, finding: Finding) -> str:
    """Return why no node is blamed for `finding`, if many nodes show similar ones at once; otherwise ""."""
    sympathetic = finding.kind == findings.SYMPATHETIC
    if finding.kind == findings.APPLICATION or not (sympathetic or finding.verdict in ACTING_VERDICTS):
        return ""
    group, run_nodes, together_s = _group(finding), state.active + state.spares, state.settings.together_s
    if _open_alert(state, MANY + group) is None:
        most = FEW_NODES if sympathetic else max(FEW_NODES, MANY_FRACTION * run_nodes)
        nodes: set[str] = set()
        for sighting in reversed(state.recent):
            if sighting.t < state.now - together_s or len(nodes) > most:
                break
            if sighting.group == group:
                nodes.add(sighting.node)
        if len(nodes) <= most:
            return ""
    return (
        f"{group} on many nodes within {together_s:.0f} s: the cause is outside of them, so none is blamed; "
        f"for example {describe(finding)}"
    )


def beyond_limits(state: RunState, name: str, also: Collection[str] = ()) -> str:
    """Return why `name` (with `also`) may not be blamed now despite a finding; "" if it may."""
    now, settings = state.now, state.settings
    leaving = {*state.findings.health, *also} - {name}
    out = leaving | {blame.node for blame in state.blames if _is_out(state, blame)} - {name}
    most = max(1, int(settings.excluded_fraction * (state.active + state.spares)))
    if len(out) >= most:
        verb = "is" if len(out) == 1 else "are"
        return (
            f"at most {most} of the run's nodes may be out at a time, and {', '.join(sorted(out))} {verb} "
            "out already"
        )
    lately = leaving | {blame.node for blame in state.blames if blame.at > now - HOUR_S} - {name}
    if len(lately) >= PER_HOUR:
        return f"{len(lately)} nodes were blamed within an hour, and the limit is {PER_HOUR}"
    return ""


def _is_out(state: RunState, blame: Blame) -> bool:
    if blame.bad:
        return blame.node in state.excluded and blame.at + state.settings.exclusion_s > state.now
    return blame.node in state.nodes and state.nodes[blame.node].role is Role.SUSPECT


def _replaceable(state: RunState, node: Node) -> bool:
    others = [n for n in state.nodes.values() if n is not node]
    if state.phase is Phase.STARTING:
        enough = sum(n.role is not Role.FAILED or n.may_return for n in others) >= state.active
    else:
        spare = node.name not in state.placement
        coming = any(n.coming and n.role not in (Role.SUSPECT, Role.FAILED) for n in others)
        enough = spare or coming or any(n is not node for n in state.spare_nodes())
    goes_on_with_fewer = 0 < state.nodes_min < len(state.placement)
    return enough or state.may_requeue or goes_on_with_fewer


# Consequences.


def put_out(state: RunState, blame: Blame) -> list[Instruction]:
    """Carry out a blame, on a node on which no ranks run any more."""
    node = state.nodes[blame.node]
    state.blames.append(blame)
    if not blame.bad:
        node.become(Role.SUSPECT, blame.evidence, state.now)
        return []
    node.bad = True
    node.become(Role.FAILED, blame.evidence, state.now)
    state.excluded[node.name] = Exclusion(blame.evidence, state.now)
    return [Dismiss(node=node.name, reason=blame.evidence)]


def blame_for(state: RunState, name: str, finding: Finding) -> Blame:
    bad = finding.verdict is Verdict.BAD
    return Blame(name, state.now, incident.of_finding(finding), describe(finding), bad, _group(finding))


def raise_alert(state: RunState, subject: str, message: str, nodes: Collection[str]) -> list[Instruction]:
    """Alert people, once for findings that belong together."""
    seen = dict.fromkeys(nodes)
    alert = _open_alert(state, subject)
    if alert is not None:
        alert.nodes.update(seen)
        alert.until = state.now
        return []
    state.alerts = [*state.alerts[1 - ALERTS_KEPT :], Alert(subject, state.now, state.now, message, seen)]
    return [RaiseAlert(nodes=tuple(seen), reason=message)]


def _alert_on_many(state: RunState, name: str, group: str, message: str) -> list[Instruction]:
    """Alert to findings of a group that many nodes show: those that were blamed for them first are cleared,
    and they must not count against any of the nodes later, either."""
    names = [name]
    if _open_alert(state, MANY + group) is None:
        since = state.now - state.settings.together_s
        names = [*(s.node for s in state.recent if s.group == group and s.t >= since), name]
        _take_back(state, group, since, message)
    for node in (state.nodes[each] for each in dict.fromkeys(names) if each in state.nodes):
        for key, finding in node.findings.items():
            if _group(finding) == group and acts(finding):
                node.findings[key] = replace(finding, verdict=Verdict.UNKNOWN)
    return raise_alert(state, MANY + group, message, names)


def _open_alert(state: RunState, subject: str) -> Alert | None:
    for alert in reversed(state.alerts):
        if alert.subject == subject and alert.until >= state.now - state.settings.together_s:
            return alert
    return None


def _take_back(state: RunState, group: str, since: float, why: str) -> None:
    hasty = [b for b in state.blames if b.group == group and b.at >= since]
    state.blames = [blame for blame in state.blames if blame not in hasty]
    for blame in hasty:
        state.excluded.pop(blame.node, None)
        node = state.nodes.get(blame.node)
        if node is not None and node.bad:
            node.bad, node.cleared = False, True
            node.become(Role.SUSPECT, f"cleared: {why}", state.now)


def withdraw(state: RunState, name: str, cause: str) -> None:
    """Take back the blame of a node for this class of cause: what it was blamed for follows the rank."""
    gone = [blame for blame in state.blames if (blame.node, blame.cause) == (name, cause)]
    state.blames = [blame for blame in state.blames if blame not in gone]
    node = state.nodes.get(name)
    if node is not None and node.role is Role.SUSPECT and node.reason in [blame.evidence for blame in gone]:
        role = Role.SPARE if node.ready else Role.JOINING
        node.become(role, f"cleared: {cause} on another node as well", state.now)


def _recovered(state: RunState, node: Node) -> None:
    """The reason for which the node left is gone: it may serve again, after all others and its tests."""
    if node.bad and standing(state, node) is None:
        node.bad = False
        state.excluded.pop(node.name, None)
        node.become(Role.SUSPECT, f"no longer found: {node.reason}", state.now)
