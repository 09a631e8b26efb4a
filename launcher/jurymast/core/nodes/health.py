"""Turns probes' findings into events of the run, and handles a node that left for a finding: the site is
told, and Slurm gets the node back."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from jurymast.core.judges.admission import Rate
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, GiveBack, Record, Send
from jurymast.core.state.findings import Finding, Verdict
from jurymast.core.state.run import Phase, RunState

# What one node may report: different findings, and news of them. The first are all that people can read; more
# comes from an agent or a probe that is broken.
FINDINGS_OF_NODE, NEWS_AT_ONCE, NEWS_PER_S = 1000, 1000, 1.0
Key = tuple[str, str, str]


class NodeHealth:
    """Findings have their times by the clocks of their nodes, which may be wrong by hours, and be set. In the
    journal these are times of the supervisor's clock, as all others are that they are compared with."""

    def __init__(self) -> None:
        # As the node told it, and when it was by the supervisor's clock.
        self._known = defaultdict[str, dict[Key, tuple[Finding, float]]](dict)
        self._news = defaultdict[str, Rate](lambda: Rate(NEWS_PER_S, NEWS_AT_ONCE))
        self._too_many: set[str] = set()  # nodes of which that was told

    def on_agent_joined(self, node: str, told: Iterable[Finding], clock: float, now: float) -> list[Effect]:
        """Return the findings that hold on a node whose agent has just (re)connected, and those that have
        ended meanwhile."""
        return [effect for finding in told for effect in self.on_finding(node, finding, clock, now)]

    def on_finding(self, node: str, finding: Finding, clock: float, now: float) -> list[Effect]:
        """`clock`: the node's, as it told of the finding."""
        finding, at = finding.bounded(), _by_our_clock(finding.at, clock, now)
        known, key = self._known[node], (finding.probe, finding.code, finding.device)
        if key in known and _is_same(*known[key], finding, at):
            return []
        if (key not in known and len(known) >= FINDINGS_OF_NODE) or not self._news[node].allows(now):
            return self._ignored(node, now)
        known[key] = finding, at
        values = {**finding.to_json(), "at": at}
        del values["once"]
        return [Record(ev.HealthFound(t=now, node=node, **values))]

    def _ignored(self, node: str, now: float) -> list[Effect]:
        if node in self._too_many:
            return []
        self._too_many.add(node)
        told = f"over {FINDINGS_OF_NODE} findings, or more than {NEWS_PER_S:g} a second: the rest is ignored"
        return [Record(ev.Noted(t=now, node=node, message=told))]


def _by_our_clock(at: float, clock: float, now: float) -> float:
    """Return when something was that a node dates `at`, and told as its clock was at `clock`; 0.0 stays."""
    return min(now, max(0.0, at + now - clock)) if at else 0.0


def _is_same(known: Finding, known_at: float, told: Finding, at: float) -> bool:
    if told.once and told.at != known.at:
        return at < known_at  # an older event of a hello: it was told before the newer one
    return (known.verdict, known.kind) == (told.verdict, told.kind)


# munge on a busy node; the health check looks every few minutes anyway.
ANSWER_LIMIT_S = 30.0


@dataclass
class Case:
    """A node that is out. Until `answer_by`, its agent may still report that the site was told; from
    `back_at` on, the node is given back to Slurm. Seconds of the supervisor's clock."""

    job: str
    finding: Finding | None  # None: it is drained
    answer_by: float
    back_at: float


class SickNodes:
    """Handles nodes that are out. One node at a time is given back: Slurm is asked which nodes the job has,
    then told which ones it keeps."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._cases: dict[str, Case] = {}
        self._giving = ""
        self._refused = False  # this site does not let a running job give nodes back

    def on_node_dismissed(self, name: str, now: float) -> list[Effect]:
        """The node has left the run. If a finding was the reason, open a case."""
        node = self._state.nodes[name]
        job = self._state.allocation.rpartition(".")[0]
        finding = worst(node.findings.values()) if node.bad else None
        if finding is None or not job.isdigit() or self._state.settings.bad_nodes == "report":
            return []
        if self._state.settings.bad_nodes != "drain":
            self._cases[name] = Case(job, finding, now, now + self._state.settings.together_s)
            return []
        # The node's own agent leaves the verdict, because its place may be on a disk of the node.
        self._cases[name] = Case(job, finding, now + ANSWER_LIMIT_S, math.inf)
        return [Send(name, msg.LeaveVerdict(job=job, finding=finding))]

    def give_back_later(self, name: str, at: float) -> None:
        """Give a node back that leaves the run because it is drained, once it has left, from `at` on."""
        job = self._state.allocation.rpartition(".")[0]
        if job.isdigit():
            self._cases[name] = Case(job, None, at, at)

    def on_verdict_left(self, node: str, message: msg.VerdictLeft, now: float) -> list[Effect]:
        """The agent has left a verdict, or says why it could not."""
        return self._site_told(node, message.why, now)

    def on_node_given_back(self, name: str, gone: bool, why: str, now: float) -> list[Effect]:
        """Take Slurm's answer to GiveBack: the node has left the job (`gone`: by this action), or `why` it
        stays."""
        self._giving = ""
        if why:
            self._refused = True
            return [_note(name, f"Slurm refused to take {name} out of the running job: {why}", now)]
        if gone:
            return [_note(name, f"{name} was returned to Slurm, and the job continues without it", now)]
        return []

    def on_time(self, now: float) -> list[Effect]:
        """Do what is due. To be called from time to time."""
        if self._state.ended or self._state.phase is Phase.REQUEUED:
            self._cases.clear()
        effects: list[Effect] = []
        for name, case in list(self._cases.items()):
            if now >= case.answer_by and case.back_at == math.inf:
                why = f"its agent did not answer within {ANSWER_LIMIT_S:.0f} s"
                effects += self._site_told(name, why, now)
        return effects + self._give_back(now)

    def _site_told(self, name: str, why: str, now: float) -> list[Effect]:
        case = self._cases.get(name)
        if case is None or case.finding is None or case.back_at < math.inf:
            return []
        # Many nodes may turn out to have the same finding, and then none was to blame.
        case.back_at = now + self._state.settings.together_s
        spool = self._state.settings.spool
        told = (
            f"could not be reported to the site's health check: {why}"
            if why
            else f"is reported to the site's health check in {spool}: {case.finding.code}"
        )
        return [_note(name, f"{name} {told}", now)]

    def _give_back(self, now: float) -> list[Effect]:
        """Give the next node back once the run has recovered: what the node holds may be needed for the
        restore."""
        if self._giving or self._state.incident is not None or self._state.phase is not Phase.RUNNING:
            return []
        for name in [name for name, case in self._cases.items() if now >= case.back_at]:
            node = self._state.nodes.get(name)
            if node is not None and self._cases[name].finding is None and not node.drained:
                continue  # its ranks have yet to save, and to move
            case = self._cases.pop(name)
            out = node is not None and (node.bad or node.drained)
            if out and name != self._state.host and not self._refused:
                self._giving = name
                return [GiveBack(case.job, name)]
        return []

    def check(self) -> None:
        """Check the invariants; AssertionError names the broken one."""
        assert self._giving not in self._cases, "a node is being given back and waits for it"


def _note(node: str, message: str, now: float) -> Effect:
    return Record(ev.Noted(t=now, node=node, message=message))


def worst(findings: Iterable[Finding]) -> Finding | None:
    """Return the newest finding that takes a node out."""
    bad = [finding for finding in findings if finding.verdict is Verdict.BAD]
    return max(bad, key=lambda finding: finding.at, default=None)
