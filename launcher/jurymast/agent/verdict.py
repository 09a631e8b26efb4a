"""The agent's part in telling the site that its node is bad."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from jurymast.cluster.verdicts import boot_id, leave, verdict
from jurymast.core import messages as msg
from jurymast.core.settings import RunPlan
from jurymast.errors import ClusterUnavailableError


async def leave_verdict(
    order: msg.LeaveVerdict, plan: RunPlan, node: str, say: Callable[[msg.VerdictLeft], None]
) -> None:
    """Carry the supervisor's order out, and say that it is done or why it could not be."""
    why = ""
    try:
        values = verdict(node, boot_id(), order.job, plan.run, order.finding, time.time())
        await asyncio.to_thread(leave, Path(plan.settings.spool), values)
    except ClusterUnavailableError as error:
        why = str(error)
    say(msg.VerdictLeft(why=why))
