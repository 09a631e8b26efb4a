"""How often a run's newest checkpoint is copied to storage that outlives its nodes, and when that is late."""

from __future__ import annotations

from jurymast.core.checkpoints.cadence import durable_interval_s, durable_share
from jurymast.core.checkpoints.copies import RATES
from jurymast.core.planning.optimum import Saving
from jurymast.core.run.state import RunState

# Whatever would lose least: the storage is left idle nine tenths of the time.
IDLE_SHARE = 9.0
# A copy that takes this long, and three times as long as the one before, is slower than storage should be.
LATE_S = 15.0
LATE_TIMES = 3.0
# What the first one may take besides: its process has to start and to import torch.
FIRST_S = 15.0


def durable_every_s(state: RunState, took_s: float, now: float) -> float | None:
    """Seconds between durable copies, each of which takes `took_s`, that lose least by what is known of saves
    and failures; None until a save was measured. How many failures the tiers in memory did not survive is
    seen from where the run was restored from."""
    known, settings = state.cadence, state.settings
    if known is None or not known.stall_s:
        return None
    share = durable_share(
        *state.restores(),
        copies_elsewhere=bool(settings.replicas or settings.parity) and len(state.nodes) > 1,
    )
    cheap = Saving(known.stall_s, known.copy_s, known.slowdown)
    durable = Saving(0.0, took_s, known.slowdown)
    return durable_interval_s(cheap, durable, known.mtbf_s, share, settings.max_loss_s, now - state.began_at)


def late_after_s(state: RunState, tier: str, size_bytes: int, nodes: int) -> float:
    """How long a copy to the tier may take before somebody should hear that the storage is slow, or hangs."""
    known = state.saved.get(tier)
    usual_s = known.seconds if known is not None else 0.0
    if not usual_s:
        usual_s = FIRST_S + size_bytes / (RATES[tier] * nodes)
    return LATE_S + LATE_TIMES * usual_s
