"""When a simulated run saves: `core.checkpoints.agreement` decides, ranks follow as in `worker.schedule`.

All ranks go in step, and all agents hear at once what they are told, so that one page stands for all. Ranks
are looked at about once a save, so that the time a step takes has its share of a save's in it; a run looks
every two seconds.
"""

from __future__ import annotations

from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.checkpoints.agreement import SAMPLE_S, Agreement
from jurymast.core.checkpoints.cadence import NEVER, Cadence, next_save_step, parse_cadence
from jurymast.core.effects import Effect, Record, Send
from jurymast.core.planning.failure_rate import mtbf_s
from jurymast.core.planning.optimum import Saving, optimal_s, young_s
from jurymast.core.run.state import RunState
from jurymast.sim.durations import Durations
from jurymast.worker.schedule import SCHEDULE_BYTES, ScheduleFollower, ScheduleRecord


class SimRanks:
    """`asked` is what the script asks for. Times are the simulation's, steps count from the run's start."""

    def __init__(self, state: RunState, asked: Cadence) -> None:
        self._state, self._asked = state, asked
        self._agreement = Agreement(state)
        self._begin()

    def _begin(self) -> None:
        """A new attempt: its page is blank."""
        self._attempt = self._state.attempt
        self._record = ScheduleRecord(memoryview(bytearray(SCHEDULE_BYTES)))
        self._settled = 0
        self._follower = ScheduleFollower(self._record, self._settle)

    def _settle(self, number: int) -> None:
        self._settled = number

    def look(self, step: int, now: float) -> tuple[list[ev.Event], float | None]:
        """The ranks have done `step`: all heartbeats say so, and what is due is decided. Returns what is to
        be recorded, and after how many seconds another look is needed (None: not before the next save)."""
        if self._attempt != self._state.attempt:
            self._begin()
        if self._is_decided:
            self._follower.due(step)
        beat = self._beat(step)
        events: list[ev.Event] = []
        for node in self._state.placement:
            events += self._do(self._agreement.beat(node, beat, now))
        events += self._do(self._agreement.look(now))
        if not self._is_decided:
            return events, self._state.settings.heartbeat_s
        nothing = not self._record.number and self._asked.steps is None
        return events, SAMPLE_S if nothing else None

    def heard(self, save: ev.Saved) -> None:
        self._agreement.heard(save)

    def next_save(self, step: int) -> int:
        """The first step after `step` that is to be saved; NEVER if there is none."""
        if self._asked.steps is not None:
            return min(NEVER, next_save_step(step, self._asked.steps))
        return self._follower.next_due(step)

    @property
    def steady(self) -> bool:
        """Whether saves go on as they are."""
        return self._settled == self._record.number

    @property
    def _is_decided(self) -> bool:
        """Else ranks would have to wait, if they were that far."""
        return self._record.number == abs(self._record.decided)

    def _beat(self, step: int) -> msg.Beat:
        rank = msg.RankReport(
            step=step, beats=1, explicit=True, phase="stepping", quiet_s=0.0, beat_s=0.0, longest_s=0.0,
            settled=self._settled, idle_s=0.0, stopped_s=0.0,
        )  # fmt: skip
        record, asked = self._record, self._asked
        page = msg.CadenceReport(record.number, record.decided, asked.steps, asked.seconds)
        return msg.Beat(self._attempt, [rank], page)

    def _do(self, effects: list[Effect]) -> list[ev.Event]:
        events: list[ev.Event] = []
        for effect in effects:
            if isinstance(effect, Record):
                events.append(effect.event)
            elif isinstance(effect, Send) and isinstance(effect.message, msg.CadenceSet):
                self._record.take(effect.message.schedule, effect.message.decided)
        return events


def asked_cadence(text: str, nodes: int, rate: float, durations: Durations) -> Cadence:
    """What `--cadence` says: `fixed:60m` (or `60m`), `young` (at the true `rate` per 1,000 node-days),
    `optimum` (the same with the exact formula) or `adaptive`, as a run decides by itself.

    Raises ValueError.
    """
    word = text.strip().lower()
    if word in ("adaptive", "auto"):
        return Cadence()
    if word in ("young", "optimum"):
        if rate <= 0.0:
            return Cadence(steps=NEVER)
        cost_s = Saving(durations.stall_s, durations.copy_s, durations.slowdown).cost_s
        best_s = (young_s if word == "young" else optimal_s)(cost_s, mtbf_s(nodes, rate))
        return Cadence(steps=max(1, round(best_s / durations.step_s)))
    asked = parse_cadence(word.removeprefix("fixed:"))
    if asked.automatic:
        raise ValueError(f"{text!r} is not a cadence; write 'fixed:60m', 'young' or 'adaptive'")
    return asked
