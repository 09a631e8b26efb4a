"""What a run's GPU-hours cost, where the policy has a price and the nodes told of GPUs, and the energy that
the GPUs used, where their counters can be read. Waiting in the queue costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.goodput import DOUBTFUL, Account
from jurymast.core.state.settings import Price

WAITING = ("queue_wait", "requeue_wait")  # without nodes
STEP = "step"
JOULES_A_KWH = 3.6e6


def cost_json(account: Account, price: Price | None) -> dict[str, Any] | None:
    """In the price's currency; None if it is not known."""
    if price is None or not account.gpus:
        return None
    seconds = {name: account.gpus * us / 1e6 for name, us in account.totals.items() if name not in WAITING}
    spent = {name: price.of(each) for name, each in seconds.items()}
    total, counted = sum(spent.values()), spent.get(STEP, 0.0)
    doubtful = sum(spent.get(name, 0.0) for name in DOUBTFUL)
    return {
        "gpu_hour": price.gpu_hour, "currency": price.currency,
        "gpu_hours": sum(seconds.values()) / 3600.0, "total": total, "counted": counted,
        "doubtful": doubtful, "else": total - counted - doubtful, "categories": spent,
    }  # fmt: skip


def gpu_seconds(account: Account) -> float:
    """While nodes were allocated; 0.0 if no node has told of GPUs."""
    return account.gpus * sum(us for name, us in account.totals.items() if name not in WAITING) / 1e6


def energy_json(joules: float, gpu_seconds: float) -> dict[str, float | None] | None:
    """None if no counter was read. The power is that of a GPU while it was allocated, on average; None if
    nobody said how many there are. What was used after the last reading of a counter is in neither."""
    if not joules:
        return None
    return {"kwh": joules / JOULES_A_KWH, "gpu_watts": joules / gpu_seconds if gpu_seconds else None}


def energy_text(found: Mapping[str, Any]) -> str:
    power = f", {found['gpu_watts']:,.0f} W a GPU on average" if found["gpu_watts"] else ""
    return f"at least {kwh_text(found)}{power} (by the GPUs' counters)"


def kwh_text(found: Mapping[str, Any]) -> str:
    return f"{found['kwh']:,.{3 if found['kwh'] < 10 else 1}f} kWh"


def cost_text(found: Mapping[str, Any]) -> str:
    currency = found["currency"]
    told = (
        f"{money(found['total'], currency)} for {found['gpu_hours']:,.1f} GPU-hours at "
        f"{found['gpu_hour']:g} {currency}: {money(found['counted'], currency)} in steps that counted, "
        f"{money(found['else'], currency)} in all else"
    )
    return told + (f", {money(found['doubtful'], currency)} unclear" if found["doubtful"] else "")


def money(value: float, currency: str) -> str:
    return f"{value:,.{0 if abs(value) >= 1000 else 2}f} {currency}"
