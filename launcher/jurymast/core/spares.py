"""How many spare nodes a run asks for."""

from __future__ import annotations

# One idle node in 32 costs 3 % of the allocation. It is the plain rule until the failure rate, the time a
# replacement takes and the price of a stop are weighed against each other.
ACTIVE_PER_SPARE = 32


def auto_spares(active: int) -> int:
    """Spare nodes for `active` nodes under `spares: auto`: one in 32, rounded up, at least one."""
    return max(1, -(-active // ACTIVE_PER_SPARE))
