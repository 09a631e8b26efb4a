"""What becomes of a node that left the run for a bad finding: the site is told, and Slurm gets it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jurymast.cluster.control import give_back
from jurymast.core import events as ev
from jurymast.core import messages as msg
from jurymast.core.health import Finding, Verdict
from jurymast.core.state import Phase, RunState
from jurymast.errors import ClusterUnavailableError

# munge on a busy node; the health check looks every few minutes anyway.
ANSWER_LIMIT_S = 30.0
POLL_S = 0.5


class SickNodes:
    """`tell` sends a message to a node's agent, `feed` takes an event, `spawn` runs a task."""

    def __init__(
        self,
        state: RunState,
        tell: Callable[[str, msg.ToAgent], None],
        feed: Callable[[ev.Event], None],
        now: Callable[[], float],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._state = state
        self._tell = tell
        self._feed = feed
        self._now = now
        self._spawn = spawn
        self._answers: dict[str, asyncio.Future[str]] = {}
        self._refused = False  # this site does not let a running job give nodes back
        self._giving = asyncio.Lock()  # each asks Slurm what is left, then says what is to stay

    def dismissed(self, name: str) -> None:
        """The node is out of the run: if for a finding, that is not the end of it."""
        node = self._state.nodes[name]
        job = self._state.allocation.rpartition(".")[0]
        finding = worst(node.findings.values()) if node.bad else None
        if finding is not None and job.isdigit() and self._state.settings.bad_nodes != "report":
            self._spawn(self._hand_over(name, job, finding))

    def answered(self, node: str, message: msg.VerdictLeft) -> None:
        """The agent has left a verdict, or says why it could not."""
        waiting = self._answers.get(node)
        if waiting is not None and not waiting.done():
            waiting.set_result(message.why)

    async def _hand_over(self, name: str, job: str, finding: Finding) -> None:
        if self._state.settings.bad_nodes == "drain":
            await self._tell_site(name, job, finding)
        # Many nodes may turn out to have the same, and then none was to blame. And what the node holds may be
        # needed to restore from.
        await asyncio.sleep(self._state.settings.together_s)
        await self._recovered()
        node = self._state.nodes.get(name)
        if node is None or not node.bad or name == self._state.host or self._refused or self._is_over():
            return
        async with self._giving:
            try:
                gone = await asyncio.to_thread(give_back, job, name)
            except ClusterUnavailableError as error:
                self._refused = True
                self._note(name, f"Slurm does not take {name} back from the running job: {error}")
                return
        if gone:
            self._note(name, f"{name} was given back to Slurm, the job goes on without it")

    async def _tell_site(self, name: str, job: str, finding: Finding) -> None:
        """By the agent on the node itself: there the verdict's place may be on a disk of its own."""
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        self._tell(name, msg.LeaveVerdict(job=job, finding=finding))
        try:
            why = await asyncio.wait_for(answer, ANSWER_LIMIT_S)
        except asyncio.TimeoutError:
            why = f"its agent gave no answer within {ANSWER_LIMIT_S:.0f} s"
        finally:
            del self._answers[name]
        spool = self._state.settings.spool
        told = (
            f"could not be told that {name} is bad: {why}" if why else f"was told in {spool}: {finding.code}"
        )
        self._note(name, f"the site {told}")

    async def _recovered(self) -> None:
        while not self._is_over() and (
            self._state.incident is not None or self._state.phase is not Phase.RUNNING
        ):
            await asyncio.sleep(POLL_S)

    def _is_over(self) -> bool:
        return self._state.ended or self._state.phase is Phase.REQUEUED

    def _note(self, node: str, message: str) -> None:
        self._feed(ev.Noted(t=self._now(), node=node, message=message))


def worst(findings: Any) -> Finding | None:
    """The newest finding that takes a node out."""
    bad = [finding for finding in findings if finding.verdict is Verdict.BAD]
    return max(bad, key=lambda finding: finding.at, default=None)
