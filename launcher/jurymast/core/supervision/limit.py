"""Slurm's time limit: when it ends the job, and when the last checkpoint has to be begun for that."""

from __future__ import annotations

import math

ASK_EVERY_S = 60.0
# At least this long before the limit, and as long as Slurm's own warning (--signal=B:USR2@120).
LEAST_S = 120.0
# Slurm's signals come up to this much earlier than asked for. A limit that is moved by less was warned of.
MOVED_S = 60.0
# A job that is to be requeued at its limit is so this long before it, besides the last checkpoint, or this
# share of its time.
RENEW_S, RENEW_SHARE = 45.0, 0.25
# A write that is under way ends, and then the newest checkpoint is written.
WRITES = 2


class TimeLimit:
    """What Slurm said last of the time limit, which may be moved at any time. `now` is the supervisor's
    clock, as are `ends_at` and `ask_at`, from when on Slurm is to be asked again."""

    def __init__(self, signal_s: float, keeps_s: float = 0.0) -> None:
        """`signal_s`: a signal that the job asked for comes so long before the limit, or up to a minute
        earlier, and may end what it reaches; 0.0: none does. `keeps_s`: so long before the limit a function
        is told that keeps its own state, if that is longer than others have."""
        self.most_s = max(RENEW_S, keeps_s)
        self._sooner_s = signal_s + MOVED_S if signal_s else 0.0
        self.ends_at = math.inf
        self.ask_at = -math.inf
        self._warned_for = -math.inf

    def asked(self, now: float) -> None:
        self.ask_at = now + ASK_EVERY_S

    def answered(self, ends_in_s: float | None, now: float) -> None:
        """Slurm ends the job in so many seconds; infinity: never; None: it did not say."""
        if ends_in_s is not None:
            self.ends_at = now + ends_in_s

    @property
    def unwarned(self) -> bool:
        return self._warned_for + MOVED_S < self.ends_at < math.inf

    def is_near(self, write_s: float, save_s: float, now: float) -> bool:
        """Whether the last checkpoint has to be begun: ranks save in `save_s`, and a write takes
        `write_s`."""
        return self.unwarned and now >= self.ends_at - self._sooner_s - max(
            LEAST_S, WRITES * write_s + save_s
        )

    def is_up(self, began_at: float, write_s: float, now: float) -> bool:
        """Whether a job that began at `began_at` has to be requeued now, if that is wanted at its limit."""
        return self.ends_at < math.inf and now >= self.ends_at - self.renew_s(began_at) - WRITES * write_s

    def renew_s(self, began_at: float) -> float:
        """How long before its limit a job that began at `began_at` is requeued, besides the last write."""
        return min(self.most_s, RENEW_SHARE * (self.ends_at - began_at))

    def warned(self, now: float) -> None:
        """Slurm itself has warned, of this limit or of something else."""
        if now >= self.ends_at - self._sooner_s - LEAST_S - MOVED_S:
            self.begun()

    def begun(self) -> None:
        """The last checkpoint of this limit is begun."""
        self._warned_for = self.ends_at

    @property
    def hurried_until(self) -> float:
        """Until when the newest checkpoint is written again and again; in the past if nothing is begun."""
        return self._warned_for
