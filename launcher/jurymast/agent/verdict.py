"""The agent's part in telling the site that its node is bad."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from jurymast.cluster.verdicts import boot_id, leave, verdict
from jurymast.core.health import Finding
from jurymast.core.settings import RunPlan
from jurymast.errors import ClusterUnavailableError
from jurymast.wire.messages import Message


async def leave_verdict(order: Message, plan: RunPlan, node: str, say: Callable[[Message], None]) -> None:
    """Carry the supervisor's order out, and say that it is done or why it could not be."""
    why = ""
    try:
        finding = Finding.from_json(order["finding"])
        values = verdict(node, boot_id(), str(order["job"]), plan.run, finding, time.time())
        await asyncio.to_thread(leave, Path(plan.settings.spool), values)
    except (ClusterUnavailableError, KeyError, TypeError, ValueError) as error:
        why = str(error)
    say({"say": "verdict", "why": why})
