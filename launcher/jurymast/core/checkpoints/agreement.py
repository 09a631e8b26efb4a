"""Decides when all ranks save, and brings them to agree on it.

`worker.link` describes how ranks agree; this is the proposing side. Everything here is learned anew from
heartbeats, so a supervisor that takes over continues; an agreed schedule is journalled before ranks are told.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from jurymast.core.checkpoints.slowdown import Slowdown
from jurymast.core.judges.cadence import (
    FIRST_SHARE,
    SHORTEST_S,
    best_interval_s,
    first_interval_s,
    lately_s,
    moved,
    why_interval,
)
from jurymast.core.judges.forecast import SLOWDOWN, Saving
from jurymast.core.state import events as ev
from jurymast.core.state import messages as msg
from jurymast.core.state.effects import Effect, Record, Send
from jurymast.core.state.images import PEER
from jurymast.core.state.messages import Beat, CadenceReport, RankReport
from jurymast.core.state.run import Phase, RunState, expected_mtbf_s
from jurymast.core.state.schedule import Schedule

AS_ASKED = "as the script or the policy asks"
CLOSE = "as failures come close to each other"
LOOK_INTERVAL_S = 0.5
# Between two changes; the first schedules of an attempt go by the times of its first steps.
HOLD_S = 5.0
SAMPLE_S = 2.0
RECENT = 9
# A proposal takes effect this many heartbeats ahead: one to show it, one for messages on their way.
MARGIN_BEATS = 3.0
MARGIN_MAX_S = 60.0
# A requested save that was skipped because the ranks' memory was busy is tried again this often.
TRIES = 3


@dataclass
class _Seen:
    """What a node's newest heartbeat shows: the steps of its fastest and slowest rank, the oldest schedule
    that a rank has settled last, and the agent's page."""

    fastest: int
    slowest: int
    settled: int
    number: int
    decided: int


def _see(ranks: list[RankReport], report: CadenceReport) -> _Seen | None:
    """Read a heartbeat; None until every rank has done a step with its Checkpointer."""
    if not all(rank.explicit and rank.beats for rank in ranks):
        return None
    steps = [rank.step for rank in ranks]
    settled = min(rank.settled for rank in ranks)
    return _Seen(max(steps), min(steps), settled, report.number, report.decided)


@dataclass(frozen=True)
class _Wait:
    """A wait for a save of what all ranks had done of an attempt, at most until `until`. `moves`: after it
    the ranks are ended, and placed anew."""

    attempt: int
    done: int
    until: float
    moves: bool


@dataclass(frozen=True)
class NextSave:
    """Ranks saved at step `latest`, unless they could not; they save next in `in_s`, and then every
    `every_s`, in seconds."""

    latest: int
    in_s: float
    every_s: float


class Agreement:
    """Proposes and settles schedules of saves. Times are the supervisor's clock. A request is proposed at the
    next `look`. `slowdown` is expected of copies until it is measured."""

    def __init__(self, state: RunState, slowdown: float = SLOWDOWN) -> None:
        self.state = state
        self.samples: deque[float] = deque(maxlen=RECENT)  # seconds per step
        self._expected = slowdown
        self._measured = Slowdown()
        self._copying_since = math.inf
        self._look_at = 0.0
        self._attempt = 0
        self._waiting: dict[str, _Wait] = {}  # by what the save is asked for
        self._begin()

    def _begin(self) -> None:
        """Begin a new attempt, whose pages are blank. The step time is still known; the state knows what
        saves cost."""
        self._attempt = self.state.attempt
        self._places = frozenset(self.state.placement)
        self._first_place = next(iter(self.state.placement), "")
        self._measured.begin()
        # Each node's newest heartbeat, and what all of them showed when they were last looked at: thousands
        # of nodes are only while there is something to decide.
        self._heard: dict[str, tuple[list[RankReport], CadenceReport]] = {}
        self._seen: dict[str, _Seen] = {}
        self._all_step = False  # all ranks have done a step
        self._adopted = False  # whether an earlier supervisor's schedule was looked for
        self._settled = 0  # the newest schedule that all ranks have settled
        self._steps: int | None = None  # the script's own cadence
        self._seconds: float | None = None
        self._current: Schedule | None = None
        self._decided = 0
        self._shown: set[str] = set()
        self._every = 0  # steps between saves as confirmed last
        self._changed_at = -math.inf
        self._proposed: ev.CadenceSet | None = None
        self._asks: list[str] = []
        self._tries = TRIES
        self._margin_s = MARGIN_BEATS * self.state.settings.heartbeat_s
        self._saved_step = -1
        self._stays_at = math.inf  # the step at which all ranks wait to be placed anew
        self._first: tuple[int, float] | None = None  # the first step seen, and when
        self._sampled: tuple[int, float] | None = None

    # ---- what is heard

    def on_heartbeat(self, node: str, beat: Beat, now: float) -> list[Effect]:
        """Process a heartbeat. Those of ranks with a Checkpointer carry the cadence."""
        if self._attempt != self.state.attempt:
            self._begin()
        report, ranks = beat.cadence, beat.ranks
        if beat.attempt != self._attempt or node not in self._places or report is None or not ranks:
            return []
        self._heard[node] = ranks, report
        if node == self._first_place and (ago_s := ranks[0].beat_s) is not None:  # all ranks step together
            self._measured.on_step(ranks[0].step, now - ago_s)
        current = self._current
        shown = self._decided and (report.number, report.decided)
        if current is None or shown == (current.number, self._decided):
            return []  # the usual case: thousands of nodes report twice a second
        seen = _see(ranks, report)
        if seen is None or self.state.phase is not Phase.RUNNING:
            return []
        return self._answer(node, seen, current, now)

    def on_event(self, event: ev.Event) -> None:
        """Process what the journal says about saves."""
        if not isinstance(event, ev.Saved):
            return
        if event.copied:
            self._measured.on_copied(event.t, event.seconds)
        if event.copied or event.attempt != self._attempt:
            return
        if event.ok:
            self._saved_step = max(self._saved_step, event.step)
            self._measured.on_saved(event.step, event.stall_s, self._copying_since, event.t)
        elif self.state.cadence is not None and event.step == self.state.cadence.first_step:
            by = self.state.cadence.by
            if by and self._tries > 0:
                self._tries -= 1
                self._asks.append(by)
            elif by:  # ranks that wait to be placed anew wait for nothing
                waits = self._waiting.items()
                self._waiting = {who: replace(it, until=-math.inf) if it.moves else it for who, it in waits}

    def ask(self, by: str) -> bool:
        """Save as soon as all ranks can do so at one step. False if the run has no Checkpointer, or has not
        done a step with it yet."""
        if not self._heard or self._attempt != self.state.attempt:
            return False
        self._look_at = 0.0
        if by not in self._asks:
            self._asks.append(by)
        self._tries = TRIES
        return True

    def save_to_move(self, by: str, limit_s: float, now: float) -> bool:
        """Request a save at whose step the ranks wait to be placed anew: `saved_first` then reports that all
        steps are saved. False if that is impossible."""
        return self.save_first(by, limit_s, now, moves=True)

    def save_first(self, by: str, limit_s: float, now: float, *, moves: bool = False) -> bool:
        """Request a save, after which `saved_first` reports that all steps done by now are saved. False if
        that is impossible."""
        if self.state.phase is not Phase.RUNNING or not self.ask(by):
            return False
        self._see_all()
        self._waiting[by] = _Wait(self._attempt, self._slowest(), now + limit_s, moves)
        return True

    def saved_first(self, now: float) -> list[tuple[str, bool]]:
        """Return who no longer has to wait for a save, and whether it was done in time."""
        over = []
        for by, wait in list(self._waiting.items()):
            runs = (self.state.attempt, self.state.phase) == (wait.attempt, Phase.RUNNING)
            saved = runs and self._saved_step >= (self._stays_at if wait.moves else wait.done)
            if saved or not runs or now >= wait.until:
                del self._waiting[by]
                over.append((by, saved))
        return over

    # ---- bringing ranks to agree

    def _answer(self, node: str, seen: _Seen, current: Schedule, now: float) -> list[Effect]:
        """React to one node's heartbeat: send what it lacks, or decide."""
        if seen.number != current.number or (self._decided and seen.decided != self._decided):
            return self._send([node], current)
        if self._decided:
            return []
        if seen.fastest >= current.at:
            return self._decide(current, -current.number, now)
        self._shown.add(node)
        return self._decide(current, current.number, now) if self._shown == self._places else []

    def _send(self, nodes: Iterable[str], schedule: Schedule) -> list[Effect]:
        order = msg.CadenceSet(attempt=self._attempt, schedule=schedule, decided=self._decided)
        return [Send(node, order) for node in nodes]

    def _decide(self, current: Schedule, decided: int, now: float) -> list[Effect]:
        """Settle the proposal: `decided` is its number, or negative if it came too late."""
        proposed, effects = self._proposed, list[Effect]()
        self._decided, self._proposed = decided, None
        if proposed is not None and decided > 0:
            self._every, self._changed_at = current.every or self._every, now
            self._margin_s = MARGIN_BEATS * self.state.settings.heartbeat_s
            self._stays_at = current.first if current.stays else math.inf
            effects = [Record(proposed)]  # before ranks hear of it
        elif proposed is not None:
            self._margin_s = min(2.0 * self._margin_s, MARGIN_MAX_S)
            self._asks += [proposed.by] if proposed.by else []
        return effects + self._send(self._places, current)

    def _adopt(self, now: float) -> list[Effect]:
        """Settle what an earlier supervisor left undecided: confirm it if it was journalled or sent."""
        if self._current is not None or self._adopted:
            return []
        self._adopted = True
        number = max(seen.number for seen in self._seen.values())
        if number == 0:
            return []
        self._current = Schedule(number, 0, 0, 0)
        told = self.state.cadence
        self._every = told.every_steps if told is not None else 0
        confirmed = any(seen.decided == number for seen in self._seen.values())
        if told is not None and told.number == number:
            confirmed, self._stays_at = True, told.first_step if told.stays else math.inf
        return self._decide(self._current, number if confirmed else -number, now)

    # ---- deciding

    def on_time(self, now: float, *, copying: bool = False) -> list[Effect]:
        """Propose what is due; cheap if nothing is. `copying`: agents write copies to storage."""
        self._copying_since = min(self._copying_since, now) if copying else math.inf
        if now < self._look_at or self.state.phase is not Phase.RUNNING:
            return []
        self._look_at = now + LOOK_INTERVAL_S
        if self._attempt != self.state.attempt or len(self._heard) < len(self._places):
            return []
        self._all_step = self._all_step or self._see_all()
        if not self._all_step:
            return []
        self._measure(now)
        if adopted := self._adopt(now):
            return adopted
        if self._undecided():
            return []
        if self._stays_at < math.inf and not any(wait.moves for wait in self._waiting.values()):
            self._see_all()
            return self._propose(0, 0.0, "no rank is placed anew: all go on", now)
        if not self.samples:
            return []
        self._look_at = now + SAMPLE_S
        if self._asks:
            stays = any(wait.moves for asked, wait in self._waiting.items() if asked in self._asks)
            by, self._asks = "; ".join(self._asks), []
            self._see_all()
            return self._propose(0, 0.0, f"requested by {by}", now, by, stays=stays)
        if self._steps is None and now >= self._changed_at + HOLD_S:
            interval_s, reason = self._interval(now)
            every = max(1, round(interval_s / self.step_s))
            if moved(self._every, every):
                self._see_all()
                return self._propose(every, interval_s, reason, now)
        return []

    def _see_all(self) -> bool:
        """Whether all ranks of every node have done a step in this attempt."""
        seen = {node: _see(ranks, report) for node, (ranks, report) in self._heard.items()}
        self._seen = {node: one for node, one in seen.items() if one is not None}
        for _, report in self._heard.values():  # it is one script: they all say the same
            self._steps, self._seconds = report.steps, report.seconds
            break
        return len(self._seen) == len(self._places)

    def _undecided(self) -> bool:
        current = self._current
        if current is None or self._settled == current.number:
            return False
        self._see_all()
        if not self._decided or any(seen.settled < current.number for seen in self._seen.values()):
            return True
        self._settled = current.number
        return False

    def _slowest(self) -> int:
        return min((seen.slowest for seen in self._seen.values()), default=0)

    @property
    def step_s(self) -> float:
        """Return the seconds per step, saves included. There must be samples."""
        return median(self.samples or [1.0])

    def next_save(self) -> NextSave | None:
        """Return when ranks save next, as far as heartbeats show it; None if that is not known."""
        agreed = self.state.cadence
        if agreed is None or not agreed.every_steps or not self._heard or not self.samples:
            return None
        ranks, _ = next(iter(self._heard.values()))
        done = min(rank.step for rank in ranks) - agreed.first_step
        left = agreed.every_steps - done % agreed.every_steps if done >= 0 else -done
        latest = agreed.first_step + done // agreed.every_steps * agreed.every_steps
        return NextSave(latest, left * self.step_s, agreed.every_steps * self.step_s)

    @property
    def slowdown(self) -> float:
        """The share by which steps are slower while copies are under way: measured, or as an earlier
        supervisor measured it, or else expected."""
        if (share := self._measured.share) is not None:
            return share
        told = self.state.cadence
        return (told.slowdown if told else 0.0) or self._expected

    def _measure(self, now: float) -> None:
        """Take a sample of the step time every few seconds; all ranks step together."""
        ranks, _ = next(iter(self._heard.values()))
        step = min(rank.step for rank in ranks)
        if self._first is None:
            self._first = self._sampled = (step, now)
        before, at = self._sampled or (step, now)
        if step > before and now >= at + SAMPLE_S:
            self.samples.append((now - at) / (step - before))
            self._sampled = (step, now)

    @property
    def saving(self) -> Saving | None:
        """Return what a save costs in this run; None before the first. A copy is safe once other nodes hold
        it."""
        if not self.state.stalls:
            return None
        peer = self.state.saved.get(PEER)
        return Saving(median(self.state.stalls), peer.seconds if peer else 0.0, self.slowdown)

    def _interval(self, now: float) -> tuple[float, str]:
        """Return the wanted time between saves, in seconds, and the reason."""
        if self._seconds is not None:
            return self._seconds, AS_ASKED
        saving, most_s = self.saving, self.state.settings.max_loss_s
        mtbf_s, close = self._mtbf_s(now)
        if saving is None:
            soon_s = FIRST_SHARE * mtbf_s if close else most_s
            return min(first_interval_s(mtbf_s), soon_s, most_s), "early, to learn what a save costs"
        best_s = best_interval_s(saving, mtbf_s, most_s)
        if close:
            return max(best_s, SHORTEST_S), CLOSE
        return best_s, why_interval(saving, mtbf_s, most_s)

    def _mtbf_s(self, now: float) -> tuple[float, bool]:
        """The mean time between failures that counts, and whether that is because the last ones came close to
        each other."""
        expected_s = expected_mtbf_s(self.state, now)
        lately = lately_s(self.state.incidents, now - self.state.up_at, expected_s)
        return (expected_s, False) if lately is None else (lately, True)

    def _propose(
        self, every: int, interval_s: float, reason: str, now: float, by: str = "", *, stays: bool = False
    ) -> list[Effect]:
        """Propose a schedule. `every` 0: one save now, then continue with the current schedule."""
        ahead_s = self._margin_s + self.state.settings.heartbeat_s
        fastest = max(seen.fastest for seen in self._seen.values())
        at = fastest + math.ceil(ahead_s / self.step_s) + 2
        base = max(self._saved_step, self._first[0] if self._first else 0)
        first = at if by else max(at, base + every)
        repeat = every or (self._every if self._steps is None else 0)
        number = max(seen.number for seen in self._seen.values()) + 1
        self._current, self._decided, self._shown = Schedule(number, at, first, repeat, stays), 0, set()
        saving = self.saving or Saving(0.0)
        told = self.state.cadence
        self._proposed = ev.CadenceSet(
            t=now, attempt=self._attempt, number=number, from_step=at, first_step=first,
            every_steps=repeat, reason=reason, by=by, stays=stays, step_s=round(self.step_s, 6),
            interval_s=round(interval_s or (told.interval_s if told else 0.0), 3),
            stall_s=round(saving.stall_s, 6), copy_s=round(saving.copy_s, 3),
            slowdown=round(saving.slowdown, 4), mtbf_s=round(self._mtbf_s(now)[0], 1),
        )  # fmt: skip
        return self._send(self._places, self._current)
