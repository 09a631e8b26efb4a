"""How far the ranks of every node are, and whether they hang. If ranks are silent, their stacks on all nodes
show whether they hang."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jurymast.core.judges import leaving
from jurymast.core.judges.silence import (
    IDLE_FLOOR_S,
    HangLimits,
    HangVerdict,
    RankView,
    SilentRanks,
    WatcherClock,
    judge,
)
from jurymast.core.judges.stacks import UNKNOWN
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.evidence import RankPlace
from jurymast.core.state.run import Phase, RunState
from jurymast.core.state.texts import spoken_s
from jurymast.core.state.within import DONE, OVER, TORCH_LIMIT_S

NOTHING = msg.Beat(0, [])
# People who ask are told of a silence this long, and so many times as long as a step.
QUIET_S, QUIET_STEPS = 10.0, 5.0
# A rank that ends by an exception is reported as failed this much later at most, on a busy node.
ENDS_WITHIN_S = 30.0


@dataclass(frozen=True)
class Reach:
    """How far all ranks are: the slowest one's step, and how many seconds ago it ended. The rest as in
    `events.Progress`."""

    step: int
    ago_s: float
    absolute: bool
    given: bool = False
    samples: int = 0
    tokens: int = 0


class Reports:
    """The reports of all nodes that are not lost. Ages are as of the newest tick of `clock`."""

    def __init__(self, state: RunState, clock: WatcherClock) -> None:
        self._state, self.clock = state, clock
        # Each node's newest beat with ranks, and when it came: ranks that have ended stay where they were.
        self._nodes: dict[str, tuple[msg.Beat, float]] = {}
        self._longest_before_s = 0.0

    @property
    def nodes(self) -> set[str]:
        return set(self._nodes)

    def expect(self, node: str) -> None:
        """Expect a node whose ranks have not reported yet, or not to this supervisor."""
        self._nodes[node] = NOTHING, 0.0

    def forget(self, node: str) -> None:
        self._nodes.pop(node, None)

    def on_heartbeat(self, node: str, beat: msg.Beat) -> None:
        if beat.ranks or beat.attempt != self._nodes[node][0].attempt:
            self._nodes[node] = beat, self.clock.now

    def reach(self) -> Reach | None:
        """Return how far the attempt is; None until every rank has done a step in it."""
        # By node, with the time of the report.
        found: list[tuple[msg.RankReport, float, msg.Trained]] = []
        for beat, at in self._placed():
            if not self._is_whole(beat) or beat.ranks[beat.slowest].beats == 0:
                return None
            trained = msg.Trained() if beat.trained is None else beat.trained[beat.slowest]
            found.append((beat.ranks[beat.slowest], at, trained))
        if not found:
            return None
        slowest, at, trained = min(found, key=lambda one: msg.how_far(one[0]))
        ago_s, base = (slowest.beat_s or 0.0) + self.clock.now - at, self._state.base
        counted = slowest.explicit or trained.numbered
        return Reach(
            slowest.step if counted else slowest.step + (base or 0), ago_s,
            absolute=counted or base is not None, given=slowest.explicit, samples=trained.samples,
            tokens=trained.tokens,
        )  # fmt: skip

    def hang(self) -> HangVerdict | None:
        """Return what the ranks' silence indicates, before any look at their stacks."""
        if self._moves():
            return None
        views = self._views()
        whole = len(views) == self._state.ranks_per_node * len(self._placed())
        if views and not whole or any(view.phase in OVER for view in views):
            # Some ranks have ended. The others may evaluate or save for long now, but not for ever.
            views = [replace(view, phase="saving") for view in views if view.phase not in OVER]
        settings, patience = self._state.settings, self._state.hang_patience
        limits = HangLimits(settings.hang_s, settings.start_limit_s, patience)
        return judge(views, limits, self._longest_before_s)

    def ended(self, before: float) -> dict[int, bool]:
        """Return the ranks that reached the end of their script at `before` (Unix time) or earlier, and
        whether they have ended with exit code 0; False: that is not known."""
        ago_s, each = self._state.now - before, self._state.ranks_per_node
        beats = self._beats()
        reported = {first for first, *_ in beats}
        places = [self._state.places[name] * each for name in self._state.finished if name in self._nodes]
        gone = {first + i for first in places if first not in reported for i in range(each)}
        seen = {
            first + i: report.phase == DONE
            for first, _, beat, since_s in beats
            for i, report in enumerate(beat.ranks)
            if report.phase in OVER and self._quiet_s(report, since_s) >= ago_s
        }
        return {**dict.fromkeys(gone, True), **seen}

    def attempt_over(self) -> None:
        """Remember what this attempt showed about step times. A step that was long once, in storage that
        stood still for example, counts half after each attempt without one: hangs would be found late for
        ever."""
        seen = [beat.longest_s for beat, _ in self._placed() if beat.attempt == self._state.attempt]
        if any(seen):
            self._longest_before_s = max(*seen, self._longest_before_s / 2)

    def _placed(self) -> list[tuple[msg.Beat, float]]:
        return [self._nodes[name] for name in self._state.placement if name in self._nodes]

    def _is_whole(self, beat: msg.Beat) -> bool:
        return (
            beat.attempt == self._state.attempt
            and len(beat.ranks) == self._state.ranks_per_node > beat.slowest
            and (beat.trained is None or len(beat.trained) == len(beat.ranks))
        )

    def _moves(self) -> bool:
        """Return True if no rank is stopped and one has just done something: then the ranks of thousands of
        nodes need not be examined."""
        hang_s = self._state.settings.hang_s
        floor_s = IDLE_FLOOR_S if hang_s is None else hang_s
        placed, now = self._placed(), self.clock.now
        return not any(beat.stopped for beat, _ in placed) and any(
            beat.quiet_s is not None and beat.quiet_s + now - at < floor_s for beat, at in placed
        )

    def _beats(self) -> list[tuple[int, str, msg.Beat, float]]:
        """Return (first rank, node, its report, seconds since it) for every node of the attempt that is not
        lost; [] until all of these have reported."""
        beats = []
        for place, name in enumerate(self._state.placement):
            if name not in self._nodes:
                continue
            beat, at = self._nodes[name]
            if not self._is_whole(beat):
                if name in self._state.finished:
                    continue  # all its ranks have ended, and are not reported to a supervisor that took over
                return []
            beats.append((place * self._state.ranks_per_node, name, beat, self.clock.now - at))
        return beats

    def _views(self) -> list[RankView]:
        """Return every rank of these nodes."""
        return [
            self._view(first + i, name, report, since_s)
            for first, name, beat, since_s in self._beats()
            for i, report in enumerate(beat.ranks)
        ]

    def _view(self, rank: int, node: str, report: msg.RankReport, since_s: float) -> RankView:
        """Return a rank whose node reported `since_s` ago."""
        return RankView(
            rank, node, report.phase, report.beats, self._quiet_s(report, since_s), report.longest_s,
            report.idle_s + since_s if report.idle_s else 0.0,
            report.stopped_s + since_s if report.stopped_s else 0.0,
        )  # fmt: skip

    def _quiet_s(self, report: msg.RankReport, since_s: float) -> float:
        """For how long this rank has done nothing; since the launch if its script has not begun."""
        if report.quiet_s is not None:
            return report.quiet_s + since_s
        incident = self._state.incident
        launched_at = incident.launched_at if incident else None
        return self._state.now - (launched_at or self._state.now) + since_s


class Hangs:
    """Watches for hangs. Waits are measured by the clock of `reports`, which stands still while the
    supervisor does."""

    def __init__(self, state: RunState, reports: Reports) -> None:
        self._state, self._reports = state, reports
        self._begin_anew()
        self._were: tuple[float, dict[int, RankPlace]] = 0.0, {}  # see `seen`
        self._asked_at = 0.0
        self._number = 0
        self._answers: dict[int, RankPlace] = {}
        # For people, before a hang is certain: that ranks may hang, when they are restarted if none moves
        # (Unix time; 0: not known), and for which of them the others wait.
        self.silent, self.restart_at = "", 0.0
        self.late: tuple[int, ...] = ()

    def on_time(self, now: float) -> list[Effect]:
        """Look for hangs. To be called often while the ranks run."""
        self.silent, self.restart_at, self.late = "", 0.0, ()
        if self._state.phase is not Phase.RUNNING or self._state.alone or self._leaves(now):
            self._begin_anew()
            self._were = 0.0, {}
            return []
        verdict = self._reports.hang()
        if verdict is not None:
            self._tell(verdict, now)
        if verdict is None:
            if stands := self._stands():
                self._were = now, stands if self._reports.ended(now) else {}
            self._begin_anew()
            return []
        effects: list[Effect] = []
        evidence = verdict.evidence
        if not verdict.certain:
            effects = self._look()
            patience, starting = self._state.hang_patience, verdict.starting
            if not self._ranks.stuck(patience, idle=verdict.idle, starting=starting):
                return effects
            evidence += f"; {self._ranks.evidence()}"
        self._begin_anew()
        return [*effects, Record(self._hung(verdict, evidence, now))]

    def _begin_anew(self) -> None:
        """Nothing has been asked in the silence to come."""
        self._ranks, self._asked = SilentRanks(max(TORCH_LIMIT_S, self._state.time_out_s)), False

    def quiet(self) -> str:
        """Say since when no step was done, if that is unusually long but may still be no hang; else ""."""
        state = self._state
        reach = self._reports.reach() if state.phase is Phase.RUNNING else None
        ago_s = state.now - state.up_at if reach is None else reach.ago_s
        if (
            state.phase is not Phase.RUNNING
            or state.alone
            or ago_s < max(QUIET_S, QUIET_STEPS * state.step_s)
        ):
            return ""
        return self._since(ago_s, first=reach is None)

    def _leaves(self, now: float) -> bool:
        """Whether ranks have caught a signal, and some have ended: the others may save for as long as Slurm
        leaves them. Without a signal no rank is examined: that takes 30 ms for those of 2,000 nodes."""
        if not self._state.may_leave(now):
            return False
        return leaving.begun(self._state) or bool(self._reports.ended(now))

    def _tell(self, verdict: HangVerdict, now: float) -> None:
        """Say what is known of a silence: since when, who is where, and what will happen when."""
        told, patience = self._since(verdict.silent_s, first=verdict.starting), self._state.hang_patience
        if places := self._ranks.places():
            left_s = self._ranks.left_s(
                patience, idle=verdict.idle, starting=verdict.starting, now_s=self._reports.clock.now
            )
            self.silent, self.restart_at, self.late = f"{told}: {places}", now + left_s, self._ranks.late()
        else:
            why = verdict.evidence.partition("; ")[2] or verdict.evidence
            self.silent = f"{told}; {why}; their stacks are read now"

    def _since(self, silent_s: float, *, first: bool) -> str:
        usual = f" (normally {spoken_s(self._state.step_s)})" if self._state.step_s and not first else ""
        return f"no {'first ' if first else ''}step for {spoken_s(silent_s)}{usual}"

    def on_looked(self, message: msg.Looked) -> None:
        """Take in what a node's agent saw."""
        if (message.attempt, message.number) == (self._state.attempt, self._number):
            self._answers.update(message.stands)

    def seen(self, now: float) -> list[Effect]:
        """Record where silent ranks were at the newest look, if all are being stopped now because one of them
        has failed: it waited until torch's time-out, say. It may have been seen to end before."""
        if self._state.phase is not Phase.STOPPING:
            return []
        at, before = self._were
        stands = self._stands() or (before if now < at + ENDS_WITHIN_S else {})
        self._begin_anew()
        self._were = 0.0, {}
        effects: list[Effect] = []
        for place, node in enumerate(self._state.placement if stands else ()):
            first = place * self._state.ranks_per_node
            ranks = [rank for rank in range(first, first + self._state.ranks_per_node) if rank in stands]
            kinds, places = tuple(stands[n].kind for n in ranks), tuple(stands[n].text for n in ranks)
            taken = ev.StacksTaken(
                t=now, node=node, attempt=self._state.attempt, ranks=tuple(ranks), kinds=kinds, places=places
            )
            effects += [Record(taken)] if ranks else []
        return effects

    def _stands(self) -> dict[int, RankPlace]:
        return {**self._ranks.stands, **self._answers} if self._asked else {}

    def _look(self) -> list[Effect]:
        """Ask all nodes again, once the answers to the last question are counted."""
        at = self._reports.clock.now
        if at - self._asked_at < self._ranks.interval_s():
            return []
        if self._asked:
            self._ranks.add(self._asked_at, {**self._silent(), **self._answers})
        self._number += 1
        self._asked, self._asked_at, self._answers = True, at, {}
        look = msg.Look(attempt=self._state.attempt, number=self._number)
        return [Send(node, look) for node in self._state.placement]

    def _silent(self) -> dict[int, RankPlace]:
        """The ranks without an answer this time: their agent is slow, or their node in a bad state. Nodes
        whose ranks have all ended do not answer."""
        count = self._state.ranks_per_node
        return {
            place * count + local: RankPlace(UNKNOWN, "no answer")
            for place, node in enumerate(self._state.placement)
            if node not in self._state.finished
            for local in range(count)
        }

    def _hung(self, verdict: HangVerdict, evidence: str, now: float) -> ev.RanksHung:
        return ev.RanksHung(
            t=now, attempt=self._state.attempt, ranks=verdict.ranks, node=verdict.node,
            silent_s=verdict.silent_s, limit_s=verdict.limit_s, evidence=evidence,
        )  # fmt: skip
