"""Failures as scripts: what the nodes and ranks of a run tell, and whom the state machine should blame.

A script is a sequence of steps, separated by ";" or by lines. Each names nodes (n3, n4-n9, "active": all that
have ranks, "others": those but the ones named before) and what happens to them:

    n3 CODE [DEVICE] [TEXT]   a probe's finding, of support.findings (CODE ok: it is over)
    n3 raises CLASS: TEXT     its rank ends with that exception
    n3 exits 3                its rank ends with that exit code
    n3 signal 9 [oom=1] [shm=0.99] [log=TEXT]   its rank ends by that signal (oom=?: nobody counts)
    n3 silent | closed | left   the node is lost in that way
    n3 frozen | host-died     its rank stands still; its torchrun host ends
    n3 old CODE [DEVICE]      a finding of the time before the job
    n3 tested ok | ready      its tests are over; it is back after it was lost
    hang | ask WHAT [NODE] | wait SECONDS

"stop" has the ranks stopped and the cause named; "go" starts the next attempt and does new steps. At the end
of a script the ranks are stopped if an incident is open, and the next attempt begins. In a run of A active
nodes and S spares, n1 is the batch host and the last of the spares, and n2 to n(A+1) have the ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from jurymast.core.state import events as ev
from jurymast.core.state.effects import RaiseAlert
from jurymast.core.state.incident import Incident
from jurymast.core.state.run import Phase, Role
from jurymast.core.state.settings import Settings
from jurymast.health.probe import unit_in
from support.findings import FINDINGS
from support.stories import Story

GLOO_RESET = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
NCCL_REMOTE = "DistBackendError: NCCL error, unhandled system error: ncclRemoteError: remote process exited"
WATCHDOG = "[rank3]:[E] Watchdog caught collective operation timeout: ALLREDUCE ran for 600000 ms"


@dataclass(frozen=True)
class Scenario:
    """What must come of `script`: the newest incident's `cause`, `culprit` (a node; "": nobody) and `action`
    (none: no incident), and whether people are alerted.

    `out` are the nodes that do not serve at the end, the culprit unless given; nobody else may be blamed.
    `category` is a row of Llama 3's table of interruptions, or says where the story comes from.
    """

    name: str
    category: str
    script: str
    culprit: str = ""
    cause: str = ""
    action: str = "none"
    out: str | None = None
    alert: bool = False
    active: int = 4
    spares: int = 2
    settings: Settings = field(default_factory=Settings)

    @property
    def out_nodes(self) -> set[str]:
        if self.out is not None:
            return set(names(self.out)) if self.out else set()
        return {self.culprit} if self.culprit and self.action in ("swap", "requeue") else set()


@dataclass(frozen=True)
class Outcome:
    """What came of a scenario. `out`: nodes that do not serve; `barred`: those excluded from requeues;
    `first`: the node whose rank, or which itself, was the first of the incident to fail."""

    cause: str
    culprit: str
    action: str
    evidence: str
    reason: str
    out: frozenset[str]
    barred: frozenset[str]
    alerted: bool
    first: str

    def wrong(self, wanted: Scenario) -> list[str]:
        """Which of culprit, cause, action, innocents and alert are not as they should be."""
        found = {
            "culprit": self.culprit == wanted.culprit and wanted.out_nodes <= self.out,
            "cause": self.cause == wanted.cause,
            "action": self.action == wanted.action,
            "innocents": (self.out | self.barred) <= wanted.out_nodes,
            "alert": self.alerted == wanted.alert,
        }
        return [name for name, right in found.items() if not right]


def play(scenario: Scenario) -> Outcome:
    """Run the script through the state machine."""
    story = Story(active=scenario.active, spares=scenario.spares, settings=scenario.settings)
    story.running(50)
    for line in re.split(r"[;\n]", scenario.script):
        if line.strip():
            _step(story, line.split())
    if story.state.phase is Phase.STOPPING:
        story.stopped()
    story.backed_off()
    state = story.state
    incident = state.incidents[-1] if state.incidents else Incident(0, 0.0, 0.0, 0, 0, action="none")
    failed = (ev.WorkerFailed, ev.NodeLost, ev.RanksHung)
    first = next((e.node for e in story.events if isinstance(e, failed) and e.t >= incident.detected_at), "")
    served = (Role.ACTIVE, Role.SPARE, Role.JOINING)
    return Outcome(
        incident.cause, incident.node, incident.action, incident.evidence, incident.reason,
        frozenset(n.name for n in state.nodes.values() if n.role not in served), frozenset(state.excluded),
        any(isinstance(instruction, RaiseAlert) for _, instruction in story.decisions), first,
    )  # fmt: skip


def names(words: str) -> list[str]:
    """n3, n4-n9 and lists of these, separated by commas."""
    found = []
    for word in words.split(","):
        first, _, last = word.strip().partition("-")
        until = int(last[1:]) if last else int(first[1:])
        found += [f"n{number}" for number in range(int(first[1:]), until + 1)]
    return found


def _step(story: Story, words: list[str]) -> None:
    story.t += 0.02
    verb = words[0]
    if verb == "wait":
        story.wait(float(words[1]))
    elif verb == "stop":
        story.stopped()
    elif verb == "go":
        if story.state.phase is Phase.STOPPING:
            story.stopped()
        best = story.state.best_step
        story.recovered(best, best + 10)
    elif verb == "hang":
        story.hung()
    elif verb == "ask":
        story.asked(words[1], words[2] if len(words) > 2 else "")
    else:
        placed = list(story.state.placement)
        if verb == "active":
            nodes = placed
        elif verb.startswith("others-than-"):
            nodes = [name for name in placed if name not in names(verb.removeprefix("others-than-"))]
        else:
            nodes = names(verb)
        for node in nodes:
            story.t += 0.001
            story.feed(_event(story, node, words[1], words[2:]))


def _event(story: Story, node: str, what: str, rest: list[str]) -> ev.Event:
    state, t = story.state, story.t
    rank = state.placement.index(node) if node in state.placement else 0
    if what in ("silent", "closed", "left"):
        story.t = t = t + (1.6 if what == "silent" else 0.0)
        return ev.NodeLost(t=t, node=node, how=what, silent_s=1.6, limit_s=1.5)
    if what == "frozen":
        return ev.RanksHung(
            t=t, attempt=state.attempt, ranks=(rank,), node=node, silent_s=1.2, limit_s=1.0,
            evidence=f"rank {rank} is stopped",
        )  # fmt: skip
    if what == "ready":  # again, after it was lost
        story.feed(ev.NodeJoined(t=t, node=node, address="10.0.0.1", incarnation=f"{node} again"))
        return ev.NodeReady(t=t, node=node, store_port=29000)
    if what == "tested":
        return ev.NodeTested(t=t, node=node, verdict=rest[0], slowness=1.0, message="as the others")
    if what in ("raises", "exits", "signal", "host-died"):
        return _failure(node, state.attempt, rank, t, what, rest)
    return _finding(story, node, what, rest)


def _failure(node: str, attempt: int, rank: int, t: float, what: str, rest: list[str]) -> ev.WorkerFailed:
    text = " ".join(rest)
    if what == "raises":
        error, _, message = text.partition(": ")
        return ev.WorkerFailed(
            t=t, node=node, attempt=attempt, rank=rank, exit_code=1, error=error, message=message
        )
    if what == "host-died":
        return ev.WorkerFailed(
            t=t, node=node, attempt=attempt, rank=-1, exit_code=-9, error="TorchrunHostDied", message="gone"
        )
    code = int(rest[0]) if what == "exits" else -int(rest[0])
    log = text.partition("log=")[2]
    facts = dict(word.split("=", 1) for word in rest[1:] if "=" in word)
    return ev.WorkerFailed(
        t=t, node=node, attempt=attempt, rank=rank, exit_code=code, log=log,
        oom_kills=None if facts.get("oom") == "?" else int(facts.get("oom", 0)),
        shm_used=float(facts.get("shm", 0.0)),
    )  # fmt: skip


def _finding(story: Story, node: str, code: str, rest: list[str]) -> ev.HealthFound:
    at = story.t
    if code == "old":
        code, rest, at = rest[0], rest[1:], story.state.allocated_at - 3600.0
    probe, verdict, kind = FINDINGS[code]
    if rest[-1:] == ["ok"]:
        verdict, rest = "ok", rest[:-1]
    device = rest[0] if rest else ("gpu0" if code.startswith(("gpu-", "xid-")) else "")
    return ev.HealthFound(
        t=story.t, node=node, probe=probe, code=code, verdict=verdict, kind=kind, device=device, at=at,
        message=" ".join(rest[1:]) or code, unit=unit_in(" ".join(rest[1:])),
    )  # fmt: skip
