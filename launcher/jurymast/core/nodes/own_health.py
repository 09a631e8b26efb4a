"""What a node tells of its own health: whatever is found on it, kept for a supervisor that comes later, and
its clock beside the supervisor's."""

from __future__ import annotations

from collections import deque

from jurymast.core.nodes.findings import HOST, NOT_OBSERVABLE, Finding, Verdict

# Offsets of the clock are worth looking a limit up from here on, seconds.
OFFSET_WORTH_S = 0.1
OFFSETS = 10
KEPT_MAX = 200
Key = tuple[str, str, str]
CLOCK: Key = ("agent", "clock-offset", "")


class OwnHealth:
    """`now`: this node's clock, Unix time in seconds."""

    def __init__(self) -> None:
        self._last: dict[Key, Finding] = {}  # the newest word on each, also that it is over
        self._offsets: deque[float] = deque(maxlen=OFFSETS)

    def known(self) -> tuple[Finding, ...]:
        """For a hello: the newest word on each but events."""
        return tuple(self._last.values())

    def holding(self) -> list[Finding]:
        """The agent's own that hold now."""
        own = self._last.get(CLOCK)
        return [own] if own is not None and own.verdict is not Verdict.OK else []

    def found(self, finding: Finding) -> bool:
        """Whether the supervisor is to hear of it."""
        if finding.code == NOT_OBSERVABLE:
            return False  # true of most nodes, and changes nothing
        key = (finding.probe, finding.code, finding.device)
        if not finding.once and (key in self._last or len(self._last) < KEPT_MAX):
            self._last[key] = finding
        return True

    # The clock.

    def new_supervisor(self) -> None:
        """Another machine's clock from here on."""
        self._offsets.clear()

    def clock(self, theirs: float, now: float) -> float | None:
        """The supervisor's clock, as it just arrived; this one's offset, if that is worth a closer look. The
        smallest of the last offsets has waited least on the way: what is left of it is the clocks' own."""
        self._offsets.append(now - theirs)
        if len(self._offsets) < OFFSETS:
            return None
        offset = min(self._offsets, key=abs)
        return offset if abs(offset) >= OFFSET_WORTH_S or CLOCK in self._last else None

    def judge(self, offset: float, limit: float, now: float) -> Finding | None:
        """The finding that the clock is so far off, or not any more; None: that is known."""
        known = self._last.get(CLOCK)
        verdict = Verdict.SUSPECT if abs(offset) > limit else Verdict.OK
        if verdict is (known.verdict if known else Verdict.OK):
            return None
        where = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the supervisor's"
        return Finding(
            probe=CLOCK[0], code=CLOCK[1], verdict=verdict, kind=HOST, at=now,
            message=f"this node's clock is {where} (limit {limit:g} s)",
        )  # fmt: skip
