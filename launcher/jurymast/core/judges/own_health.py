"""A node's own view of its health: all findings on it, kept for a supervisor that comes later, and the
difference between its clock and the supervisor's.

Also decides what follows from looks through the node's probes: which findings are news, which are over, and
which probe is left out because it hangs or crashes. Each probe looks in a process of its own, which may end
at any time. That a process ended, hangs, or is a new one says nothing about the node: a finding is over only
when a process that can judge it has looked and not found it again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from jurymast.core.state.findings import HOST, NOT_OBSERVABLE, STORAGE, Finding, Verdict

# A process that wants to run while the ranks keep the processors busy has this many limits more.
STARVED_MAX = 5
# Processes that end without a word: pauses between them, and how many in a row are enough.
PAUSES_S = (1.0, 5.0, 30.0, 60.0)
STRIKES = 2
# Two channels report the same event within this time.
SAME_EVENT_S = 10.0
EVENTS_KEPT = 50
# The code of the finding that a probe could not look.
FAILED = "probe-failed"

# What a hanging probe means for its node. For any other probe, the host is suspect.
WEDGED = defaultdict(
    lambda: (Verdict.SUSPECT, HOST),
    nvidia=(Verdict.BAD, HOST),
    amd=(Verdict.BAD, HOST),
    storage=(Verdict.UNKNOWN, STORAGE),  # shared storage is no single node's fault
)
Key = tuple[str, str, str]


@dataclass(frozen=True)
class ChildEnd:
    """Why the process of `probe` ended: `how` is done, hung, crashed or gone (for external reasons, or before
    a look). `detail` is what could be seen, `on_storage` that it waited for shared storage (from which a
    look's imports may come), `undead` that SIGKILL did not end it."""

    how: str
    probe: str = ""
    detail: str = ""
    on_storage: bool = False
    undead: bool = False


@dataclass(frozen=True)
class After:
    """What follows: `news` to report, and another process after this many seconds, or (`over`) none."""

    news: tuple[Finding, ...] = ()
    pause_s: float = 0.0
    over: bool = False


@dataclass
class ProbeLooked:
    """The result for one probe: `state` is looked, nothing, failed or left out ("" before the first look).

    `memory` is what the probe wants its next process to know: the baselines of its counters, and what was
    there at first. `own` are the findings that the current process made itself, and `whole` says whether it
    can judge those of earlier processes, too, because it continued from their memory.
    """

    state: str = ""
    findings: dict[Key, Finding] = field(default_factory=dict)
    memory: Any = None
    own: set[Key] = field(default_factory=set)
    whole: bool = True
    strikes: int = 0
    answered: bool = False  # the current process
    failures: int = 0  # processes in a row that never did


class ProbeLooks:
    """Plans looks. `probes` has the result for every probe that ran. With `once`, one look through each is
    enough. `now`: Unix time in seconds."""

    def __init__(self, names: Iterable[str], *, once: bool = False) -> None:
        self._names, self._once = list(names), once
        self._events: deque[Finding] = deque(maxlen=EVENTS_KEPT)
        self.probes: dict[str, ProbeLooked] = {}

    def findings(self) -> list[Finding]:
        """Return all findings that hold now, and the newest events."""
        return [*(f for probe in self.probes.values() for f in probe.findings.values()), *self._events]

    def wanted(self) -> list[str]:
        """Return the probes that are to run."""
        return [name for name in self._names if self.is_wanted(name)]

    def is_wanted(self, name: str) -> bool:
        state = self.probes[name].state if name in self.probes else ""
        return state not in ("left out", "nothing") and not (self._once and state)

    def memory(self, name: str) -> Any:
        """Return what the next process of the probe is given: what the last ones wanted it to know, or
        None."""
        return self.probes[name].memory if name in self.probes else None

    def looked(
        self, probe: str, state: str, found: Iterable[Finding], now: float, memory: Any = None
    ) -> list[Finding]:
        """Process a look; returns the findings that are new, changed, or over (verdict ok). `memory`: what
        the probe wants its next process to know; None if it cannot tell, or kept nothing from before."""
        known = self.probes.setdefault(probe, ProbeLooked())
        known.strikes, known.answered, known.state = 0, True, state
        if memory is not None:
            known.memory, known.whole = memory, True
        found = list(found)
        held = {(one.probe, one.code, one.device): one for one in found if not one.once}
        news = [event for event in found if event.once and self._is_new(event)]
        for key, finding in held.items():
            before = known.findings.get(key)
            held[key] = replace(finding, at=before.at if before else finding.at or now)
            if before is None or (before.verdict, before.kind) != (finding.verdict, finding.kind):
                news.append(held[key])
        over = [one for key, one in known.findings.items() if key not in held and _is_over(known, key, found)]
        for one in over:
            del known.findings[one.probe, one.code, one.device]
        known.findings.update(held)
        known.own = {key for key in known.own | held.keys() if key in known.findings}
        return news + [replace(one, verdict=Verdict.OK, message="is over", at=now) for one in over]

    def _is_new(self, event: Finding) -> bool:
        if any(_is_same(event, known) for known in self._events):
            return False
        self._events.append(event)
        return True

    def starves(self, limits: int) -> bool:
        """Return whether a process that wants to run, and was silent for this many more limits, lacks a
        processor rather than hangs."""
        return limits < STARVED_MAX

    def ended(self, end: ChildEnd, now: float) -> After:
        """Process the end of a probe's process."""
        if end.how == "done":
            return After(over=True)
        known = self.probes.setdefault(end.probe, ProbeLooked())
        known.failures = 0 if known.answered else known.failures + 1
        known.answered, known.own, known.whole = False, set(), False
        if end.how != "gone":
            return After(self._strike(end, known, now))
        if known.failures > len(PAUSES_S):
            why = f"the probe {end.probe} is no longer used: its process ends at once ({end.detail})"
            news = _left_out(known, "health", "no-probes", Verdict.UNKNOWN, HOST, why, now, end.probe)
            return After((news,), over=True)
        return After(pause_s=0.0 if self._once else PAUSES_S[max(0, known.failures - 1)])

    def _strike(self, end: ChildEnd, known: ProbeLooked, now: float) -> tuple[Finding, ...]:
        """Count a hang or a crash during a look. Another process is to confirm it, unless it is certain."""
        known.strikes += 1
        if known.strikes < STRIKES and not end.undead:
            return ()
        if end.how == "hung":
            code, (verdict, kind) = "driver-wedged", WEDGED["storage" if end.on_storage else end.probe]
            how = f"hung{', and SIGKILL did not end it' if end.undead else ' twice, in two processes'}"
        else:
            code, verdict, kind, how = "probe-crashes", Verdict.UNKNOWN, HOST, "crashed its process twice"
        why = f"the probe {end.probe} {how}: {end.detail}; it is no longer used"
        return (_left_out(known, end.probe, code, verdict, kind, why, now),)


def _left_out(
    known: ProbeLooked, probe: str, code: str, verdict: Verdict, kind: str, why: str, now: float,
    device: str = "",
) -> Finding:  # fmt: skip
    """Leave the probe out from now on, for this reason. What it found holds on: nobody looks any more."""
    finding = Finding(probe=probe, code=code, verdict=verdict, kind=kind, at=now, message=why, device=device)
    known.state = "left out"
    known.findings[probe, code, device] = finding
    return finding


def _is_over(known: ProbeLooked, key: Key, found: Iterable[Finding]) -> bool:
    """Return whether a look that did not make this finding again shows that it is over."""
    if known.state != "looked":
        return False
    _, code, device = key
    if code in (FAILED, NOT_OBSERVABLE):
        return True  # they speak of looking itself
    unseen = {finding.device for finding in found if finding.code == NOT_OBSERVABLE}
    return (known.whole or key in known.own) and not unseen & {device, ""}


def _is_same(event: Finding, known: Finding) -> bool:
    same = (event.probe, event.code, event.device) == (known.probe, known.code, known.device)
    return same and abs(event.at - known.at) < SAME_EVENT_S


# Smaller offsets of the clock, in seconds, are not compared with the limit.
OFFSET_WORTH_S = 0.1
OFFSETS = 10
KEPT_MAX = 200
CLOCK: Key = ("agent", "clock-offset", "")


class OwnHealth:
    """The node's findings. `now`: this node's clock, Unix time in seconds."""

    def __init__(self) -> None:
        self._last: dict[Key, Finding] = {}  # the newest word on each, also that it is over
        self._offsets: deque[float] = deque(maxlen=OFFSETS)

    def known(self) -> tuple[Finding, ...]:
        """Return the newest state of every finding except events, for a hello."""
        return tuple(self._last.values())

    def holding(self) -> list[Finding]:
        """Return the agent's own findings that hold now."""
        own = self._last.get(CLOCK)
        return [own] if own is not None and own.verdict is not Verdict.OK else []

    def found(self, finding: Finding) -> bool:
        """Take a finding in; returns whether to send it to the supervisor."""
        if finding.code == NOT_OBSERVABLE:
            return False  # true of most nodes, and changes nothing
        key = (finding.probe, finding.code, finding.device)
        if not finding.once and (key in self._last or len(self._last) < KEPT_MAX):
            self._last[key] = finding
        return True

    # The clock.

    def new_supervisor(self) -> None:
        """Start measuring against another machine's clock."""
        self._offsets.clear()

    def clock(self, theirs: float, now: float) -> float | None:
        """Take the supervisor's clock, as it just arrived; returns this clock's offset, if that is worth a
        closer look. Of the last offsets, the smallest had the least delay on the way, so it is closest to the
        clocks' own difference."""
        self._offsets.append(now - theirs)
        if len(self._offsets) < OFFSETS:
            return None
        offset = min(self._offsets, key=abs)
        return offset if abs(offset) >= OFFSET_WORTH_S or CLOCK in self._last else None

    def judge(self, offset: float, limit: float, now: float) -> Finding | None:
        """Return the finding that the clock is off by this much, or no longer is; None if that is known."""
        known = self._last.get(CLOCK)
        verdict = Verdict.SUSPECT if abs(offset) > limit else Verdict.OK
        if verdict is (known.verdict if known else Verdict.OK):
            return None
        where = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the supervisor's"
        return Finding(
            probe=CLOCK[0], code=CLOCK[1], verdict=verdict, kind=HOST, at=now,
            message=f"this node's clock is {where} (limit {limit:g} s)",
        )  # fmt: skip
