"""The agent's part in health: the probe child, and this node's clock beside the supervisor's."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

from jurymast.core import messages as msg
from jurymast.core.nodes.findings import HOST, NOT_OBSERVABLE, Finding, Verdict
from jurymast.core.settings import RunPlan
from jurymast.health.probe import Context, granted_gpus
from jurymast.health.watcher import Watcher, names_to_ask
from jurymast.rundir import RunDirectory

# Offsets of the clock are worth looking a limit up from here on, seconds.
OFFSET_WORTH_S = 0.1
OFFSETS = 10
KEPT_MAX = 200
CLOSE_LIMIT_S = 5.0
Key = tuple[str, str, str]


class Probing:
    """Tells the supervisor what is found, and keeps it for one that comes later. `tell` says something to it;
    what nobody hears is in the next hello."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, tell: Callable[[msg.Health], None]
    ) -> None:
        self._tell = tell
        self._context = context_for(directory, plan, node, os.environ, time.time())
        self._watcher = Watcher(self._context, names_to_ask(plan.settings.probes_off), self._found)
        self._watching: asyncio.Future[None] | None = None
        self._last: dict[Key, Finding] = {}  # the newest word on each, also that it is over
        self._offsets: deque[float] = deque(maxlen=OFFSETS)

    def start(self) -> None:
        """Begin to look; once. Called when nothing else on this node is in a hurry."""
        if self._watching is None:
            self._watching = asyncio.ensure_future(self._watcher.run())
            self._watching.add_done_callback(self._stopped)

    def known(self) -> tuple[Finding, ...]:
        """For a hello: the newest word on each, and the newest events."""
        events = [finding for finding in self._watcher.findings() if finding.once]
        return (*self._last.values(), *events)

    def findings(self) -> list[Finding]:
        """All that hold now, and the newest events."""
        own = self._last.get(("agent", "clock-offset", ""))
        held = [own] if own is not None and own.verdict is not Verdict.OK else []
        return [*self._watcher.findings(), *held]

    def new_supervisor(self) -> None:
        """Another machine's clock from here on."""
        self._offsets.clear()

    def clock(self, theirs: float) -> None:
        """The supervisor's clock, seconds since the epoch, as it just arrived. The smallest of the last
        offsets has waited least on the way: what is left of it is the clocks' own."""
        self._offsets.append(time.time() - theirs)
        if len(self._offsets) < OFFSETS:
            return
        offset = min(self._offsets, key=abs)
        known = self._last.get(("agent", "clock-offset", ""))
        if abs(offset) < OFFSET_WORTH_S and known is None:
            return
        from jurymast.health.tables import threshold  # reads YAML: not in every agent's memory

        limit = threshold(self._context, "clock-offset-s")
        verdict = Verdict.SUSPECT if abs(offset) > limit else Verdict.OK
        where = f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the supervisor's"
        if verdict is (known.verdict if known else Verdict.OK):
            return
        self._found(
            Finding(
                probe="agent", code="clock-offset", verdict=verdict, kind=HOST, at=time.time(),
                message=f"this node's clock is {where} (limit {limit:g} s)",
            )
        )  # fmt: skip

    def _stopped(self, watching: asyncio.Future[None]) -> None:
        """A mistake in the watcher must be heard of, and is no reason to end the ranks."""
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self._found(
                Finding(
                    probe="agent", code="no-probes", verdict=Verdict.UNKNOWN, kind=HOST, at=time.time(),
                    message=f"the node's health is not observed any more: {error!r}",
                )
            )  # fmt: skip

    def _found(self, finding: Finding) -> None:
        if finding.code == NOT_OBSERVABLE:
            return  # true of most nodes, and changes nothing
        key = (finding.probe, finding.code, finding.device)
        if not finding.once and (key in self._last or len(self._last) < KEPT_MAX):
            self._last[key] = finding
        self._tell(msg.Health(finding=finding))

    async def close(self) -> None:
        await self._watcher.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching], timeout=CLOSE_LIMIT_S)


def context_for(
    directory: RunDirectory, plan: RunPlan, node: str, environment: Mapping[str, str], now: float
) -> Context:
    """What this node's probes may know of the run. `now`: seconds since the epoch."""
    settings = plan.settings
    return Context(
        node=node,
        thresholds=settings.thresholds,
        xid=settings.xid,
        paths=(str(directory.root),),
        data_paths=settings.data_paths,
        local_path=os.path.expandvars(settings.local_path),
        gpus=granted_gpus(environment),
        started_at=now,
    )
