"""What a run's GPU-hours cost, where the policy has a price and the nodes told of GPUs. Waiting in the queue
costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jurymast.core.goodput import DOUBTFUL, Account
from jurymast.core.state.settings import Price

WAITING = ("queue_wait", "requeue_wait")  # without nodes
STEP = "step"


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
