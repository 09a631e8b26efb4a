"""The agent's part in health: the probe child, this node's clock, reports to the supervisor, and the report
to the site that this node is bad."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from jurymast.cluster.verdicts import boot_id, leave, verdict
from jurymast.core import messages as msg
from jurymast.core.nodes.findings import HOST, Finding, Verdict
from jurymast.core.nodes.own_health import OwnHealth
from jurymast.core.settings import RunPlan
from jurymast.errors import ClusterUnavailableError
from jurymast.health.probe import Context, granted_gpus
from jurymast.health.watcher import ProbeWatcher, names_to_ask
from jurymast.rundir import RunDirectory

CLOSE_LIMIT_S = 5.0


class Probing:
    """Reports findings to the supervisor, and keeps them for the next one. `tell` sends it a message;
    findings that reach no supervisor are in the next hello."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, tell: Callable[[msg.HealthFound], None]
    ) -> None:
        self._tell = tell
        settings = plan.settings
        self._context = Context(
            node=node, thresholds=settings.thresholds, xid=settings.xid, paths=(str(directory.root),),
            data_paths=settings.data_paths, local_path=os.path.expandvars(settings.local_path),
            gpus=granted_gpus(os.environ), started_at=time.time(),
        )  # fmt: skip
        self._watcher = ProbeWatcher(self._context, names_to_ask(settings.probes_off), self._found)
        self._watching: asyncio.Future[None] | None = None
        self._own = OwnHealth()

    def start(self) -> None:
        """Start the probes, once. Called when nothing else on this node is urgent."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watcher.run())
            self._watching.add_done_callback(self._stopped)

    def known(self) -> tuple[Finding, ...]:
        """Return findings for a hello: the newest of each kind, and the newest events."""
        events = [finding for finding in self._watcher.findings() if finding.once]
        return (*self._own.known(), *events)

    def findings(self) -> list[Finding]:
        """Return all findings that hold now, and the newest events."""
        return [*self._watcher.findings(), *self._own.holding()]

    def new_supervisor(self) -> None:
        self._own.new_supervisor()

    def clock(self, theirs: float) -> None:
        """Compare this node's clock with the supervisor's Unix time, which has just arrived."""
        offset = self._own.clock(theirs, time.time())
        if offset is None:
            return
        from jurymast.health.tables import threshold  # loads YAML, which not every agent needs

        limit = threshold(self._context, "clock-offset-s")
        if finding := self._own.judge(offset, limit, time.time()):
            self._found(finding)

    def _stopped(self, watching: asyncio.Future[None]) -> None:
        """Report an error in the watcher, which is no reason to end the ranks."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._found(
                Finding(
                    probe="agent", code="no-probes", verdict=Verdict.UNKNOWN, kind=HOST, at=time.time(),
                    message=f"the node's health is no longer observed: {error!r}",
                )
            )  # fmt: skip

    def _found(self, finding: Finding) -> None:
        if self._own.found(finding):
            self._tell(msg.HealthFound(finding=finding))

    async def close(self) -> None:
        await self._watcher.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching], timeout=CLOSE_LIMIT_S)


async def leave_verdict(
    order: msg.LeaveVerdict, plan: RunPlan, node: str, say: Callable[[msg.VerdictLeft], None]
) -> None:
    """Carry out the supervisor's order to leave a verdict, and report that it is done, or why not."""
    why = ""
    try:
        values = verdict(node, boot_id(), order.job, plan.run, order.finding, time.time())
        await asyncio.to_thread(leave, Path(plan.settings.spool), values)
    except ClusterUnavailableError as error:
        why = str(error)
    say(msg.VerdictLeft(why=why))
