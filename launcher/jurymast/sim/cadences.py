"""When a simulated run saves: `core.checkpoints.agreement` decides, and ranks follow as in `worker.schedule`.

All ranks step together, and all agents receive messages at once, so one page stands for all. Ranks are looked
at about once per save, so the measured step time includes a save's share; a real run looks every two seconds.
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
    """All ranks of a simulated run. `asked` is the cadence that the script requests. Times are the
    simulation's; steps count from the start of the run."""

    def __init__(self, state: RunState, asked: Cadence) -> None:
        self._state, self._asked = state, asked
        self._agreement = Agreement(state)
        self._begin()

    def _begin(self) -> None:
        """Start a new attempt, whose page is blank."""
        self._attempt = self._state.attempt
        self._record = ScheduleRecord(memoryview(bytearray(SCHEDULE_BYTES)))
        self._settled = 0
        self._follower = ScheduleFollower(self._record, self._settle)

    def _settle(self, number: int) -> None:
        self._settled = number

    def look(self, step: int, now: float) -> tuple[list[ev.Event], float | None]:
        """Process heartbeats that report `step`, and make the decisions that are due. Returns the events to
        record, and the seconds until the next look (None: not before the next save)."""
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
        """Return the first step after `step` that is to be saved; NEVER if there is none."""
        if self._asked.steps is not None:
            return min(NEVER, next_save_step(step, self._asked.steps))
        return self._follower.next_due(step)

    @property
    def steady(self) -> bool:
        """Return whether the schedule of saves will not change."""
        return self._settled == self._record.number

    @property
    def _is_decided(self) -> bool:
        """Whether the schedule is decided; otherwise ranks that get this far would have to wait."""
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
    """Return the cadence that `--cadence` requests: `fixed:60m` (or `60m`), `young` (Young's formula at the
    true `rate` per 1,000 node-days), `optimum` (the same with the exact formula) or `adaptive`, which a run
    decides by itself.

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
