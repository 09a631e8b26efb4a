"""How often a run's newest checkpoint is copied to storage that outlives its nodes."""

from __future__ import annotations

from jurymast.core.cadence import durable_interval_s, durable_share
from jurymast.core.copies import SHARED
from jurymast.core.failure_rate import INFRASTRUCTURE
from jurymast.core.optimum import Saving
from jurymast.core.state import RunState

# Whatever would lose least: the storage is left idle nine tenths of the time.
IDLE_SHARE = 9.0


def durable_every_s(state: RunState, took_s: float, now: float) -> float | None:
    """Seconds between durable copies, each of which takes `took_s`, that lose least by what is known of saves
    and failures; None until a save was measured. How many failures the tiers in memory did not survive is
    seen from where the run was restored from."""
    known, settings = state.cadence, state.settings
    if known is None or not known.stall_s:
        return None
    struck = [one for one in state.incidents if one.charged == INFRASTRUCTURE and one.tiers]
    share = durable_share(
        len(struck),
        sum(1 for incident in struck if SHARED in incident.tiers),
        copies_elsewhere=bool(settings.replicas or settings.parity) and len(state.nodes) > 1,
    )
    cheap = Saving(known.stall_s, known.drain_s, known.slowdown)
    durable = Saving(0.0, took_s, known.slowdown)
    return durable_interval_s(cheap, durable, known.mtbf_s, share, settings.max_loss_s, now - state.began_at)
