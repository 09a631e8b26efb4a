"""A node's storage: the processes that write images to it, which the agent starts, gives orders, and kills if
they hang; and where this run's images are."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from jurymast import background, foreign
from jurymast.agent.io import Phases
from jurymast.child import Child
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.message import Unreadable
from jurymast.core.state.settings import RunPlan
from jurymast.core.state.texts import signal_name
from jurymast.keeper.copies import remove_local_copies
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.rundir import RunDirectory
from jurymast.storage import orders
from jurymast.storage.orders import (
    Answer,
    AnyOrder,
    Cancel,
    Continue,
    Progress,
    Reached,
    StorageFailed,
    Told,
    read_answer,
)

NEVER = math.inf
# Seconds that an order gets after its limit to give up by itself, and a killed process to end.
GRACE_S = 10.0
GONE_S = 2.0


class StorageProcesses:
    """Carries out orders, at most one per tier at a time. Each tier has its own process, started at its first
    order, so that storage that hangs delays nothing else. All methods are called in the event loop.
    """

    def __init__(
        self, *, grace_s: float = GRACE_S, oom_kills: Callable[[], int | None] = lambda: None
    ) -> None:
        """`oom_kills` returns how many processes of the node were killed lately for want of memory."""
        self._grace_s, self._oom_kills = grace_s, oom_kills
        self._tiers: dict[str, _Tier] = {}
        self._next_id = 0

    async def carry_out(self, order: AnyOrder, phases: Phases | None = None) -> Answer:
        """Have `order` carried out, under a new number, phase by phase if it has `phases`. Storage errors are
        answers, and never raised.

        Cancelling the task that awaits this cancels the order, and waits until nothing is written any more.
        """
        tier = self._tiers.setdefault(order.tier, _Tier(order.tier, self._grace_s, self._oom_kills))
        self._next_id += 1
        numbered = msgspec.structs.replace(order, id=self._next_id)  # before others come, in the wait
        async with tier.lock:
            return await tier.carry_out(numbered, phases or Phases(lambda phase: None))

    async def close(self) -> None:
        """End all processes."""
        for tier in self._tiers.values():
            await tier.kill()


class _Tier:
    def __init__(self, name: str, grace_s: float, oom_kills: Callable[[], int | None]) -> None:
        self.lock = asyncio.Lock()
        self._name, self._grace_s, self._oom_kills = name, grace_s, oom_kills
        self._child: Child | None = None
        self._late_at = NEVER  # when a process that says nothing hangs

    async def carry_out(self, order: AnyOrder, phases: Phases) -> Answer:
        """Carry out an order, with the lock held. A process that remains is idle."""
        try:
            child = await self._ready()
        except OSError as error:
            return StorageFailed(why=f"the storage process cannot be started: {error}")
        if child is None:
            return StorageFailed(
                why=f"{self._name} storage still hangs: its killed process has not ended yet"
            )
        self._give(order.limit_s)
        work = background.start(self._talk(child, order, phases), background.to_its_awaiter)
        going_on = background.start(self._go_on(child, order, phases), background.to_its_awaiter)
        try:
            while not work.done() and (left_s := self._late_at - asyncio.get_running_loop().time()) > 0:
                # Not longer than that: meanwhile the order may go on after a wait for the other nodes.
                await asyncio.wait(
                    [work, going_on], timeout=min(left_s, order.limit_s), return_when=FIRST_COMPLETED
                )
                if going_on.done():
                    going_on.result()  # it ends only by an error
            if not work.done():
                await self.kill()
                place = getattr(order, "root", "")
                return StorageFailed(
                    why=f"{self._name} storage hangs at {place}: no progress for {order.limit_s:.0f} s; "
                    "its process was killed"
                )
            return work.result() or StorageFailed(why=await self._why_ended())
        except BaseException:  # above all when this is cancelled
            self._tell(child, Cancel(id=order.id))
            done, _ = await asyncio.wait([work], timeout=self._grace_s)
            if not done:
                await self.kill()
            raise
        finally:
            work.cancel()
            going_on.cancel()

    def _give(self, limit_s: float) -> None:
        self._late_at = asyncio.get_running_loop().time() + limit_s + self._grace_s

    async def _go_on(self, child: Child, order: AnyOrder, phases: Phases) -> None:
        while True:
            turn = await phases.turns.get()
            self._give(order.limit_s)
            self._tell(child, Continue(id=order.id, phase=turn.phase, parts=turn.parts))

    async def _ready(self) -> Child | None:
        """Return a process that takes orders; None while a killed one has not ended."""
        if self._child is not None and self._child.code is None:
            return None if self._child.killed else self._child
        self._child = await Child.start("jurymast.storage")
        return self._child

    async def _talk(self, child: Child, order: AnyOrder, phases: Phases) -> Answer | None:
        """Return the order's answer; None if the process ended before it answered."""
        try:
            self._tell(child, order)
            await child.told()
            while line := await child.hear():
                answer = read_answer(line)
                if isinstance(answer, Unreadable) or answer.id != order.id:
                    continue
                match answer:
                    case Reached():  # it waits for the other nodes, for which their agents answer
                        self._late_at = NEVER
                        phases.reached(answer.phase)
                    case Progress():
                        self._give(order.limit_s)
                        phases.advanced(answer.bytes)
                    case _:
                        return answer
        except (ConnectionError, ValueError):
            pass
        return None

    @staticmethod
    def _tell(child: Child, told: Told) -> None:
        child.tell(msgspec.json.encode(told))

    async def _why_ended(self) -> str:
        assert self._child is not None
        await self._child.gone(GONE_S)
        await self.kill()
        code = self._child.code
        if code == -signal.SIGKILL and self._oom_kills():
            return "the storage process was killed, because the memory of the job on this node ran out"
        if code is not None and code < 0:
            return f"the storage process was killed by {signal_name(-code)}"
        return f"the storage process ended with {code}"

    async def kill(self) -> None:
        """Send SIGKILL and wait a moment, but not longer: a process that waits for storage that hangs ends
        only when storage answers."""
        if self._child is not None:
            await self._child.kill(GONE_S)


class NodeStorage:
    """See `agent.io.StorageAccess`. `local`: the directory of this run's images on the node's own disk."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        keeper: Keeper,
        local: Path | None,
        oom_kills: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._plan, self._keeper, self._local = plan, keeper, local
        self._run_directory = directory.root
        # A script may write its checkpoints elsewhere, and keep another number of them.
        self._shared, self._keep = directory.checkpoints.absolute(), plan.settings.keep
        self._processes = StorageProcesses(oom_kills=oom_kills)
        self._warming: asyncio.Future[orders.Answer] | None = None

    def checkpoints_at(self, event: within.CheckpointsKept) -> None:
        self._shared, self._keep = Path(event.directory), event.keep

    def warm(self) -> None:
        self._warming = background.start(self._processes.carry_out(orders.Warm()))

    async def write(self, order: msg.Write, loans: list[Loan], phases: Phases) -> Answer:
        answer = await self._processes.carry_out(self.order(order, loans), phases)
        if isinstance(answer, orders.Done) and order.tier == im.LOCAL and self._local is not None:
            self._keeper.scan_local(self._local)
        return answer

    def order(self, write: msg.Write, loans: list[Loan]) -> AnyOrder:
        step, attempt, run = write.step, write.attempt, self._plan.run
        root = write.root or str(self._shared)
        if write.tier == im.OBJECT:
            url = self._plan.settings.object_url or ""
            return orders.Upload(
                root=root, step=step, url=url, run=run, run_directory=str(self._run_directory),
                keep=self._plan.settings.object_keep,
            )  # fmt: skip
        images = tuple(map(lent_image, loans))
        if write.tier == im.LOCAL:
            return orders.WriteLocal(root=str(self._local), step=step, attempt=attempt, images=images)
        return orders.WriteShared(
            root=root, step=step, attempt=attempt, world=write.world, images=images,
            nonce=write.id, lead=write.lead, run=run, run_directory=str(self._run_directory), keep=self._keep,
        )  # fmt: skip

    async def close(self) -> None:
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.gather(self._warming, return_exceptions=True)
        await self._processes.close()

    async def forget_local(self) -> None:
        if self._local is not None:
            await asyncio.to_thread(remove_local_copies, self._local)


def lent_image(loan: Loan) -> orders.ImageAt:
    """Return what an order says of a lent image."""
    return orders.ImageAt(
        rank=loan.manifest.rank,
        path=loan.path,
        common_path=loan.common_path,
        manifest=loan.manifest_bytes.decode(),
    )


# A local disk that does not answer must not keep an agent from starting.
LOCAL_DISK_LIMIT_S = 5.0


def local_root(path: str, run: str) -> Path:
    """Return the directory of this run's images on a node's own disk. If another user has taken the usual
    name, it is one with a name that nobody can foresee, which is found again. Either is made at once: until
    the first image is written, somebody else could take the name."""
    disk = Path(os.path.expandvars(path))
    usual = disk / f"jurymast-{os.getuid()}"
    chosen = [usual]

    def choose() -> None:
        try:
            if foreign.owns(usual):
                return
            with suppress(FileExistsError):
                usual.mkdir(mode=0o700)
                return
            if foreign.owns(usual):  # another agent of this user's was faster
                return
            mine = [place for place in foreign.found(disk, f"{usual.name}-*") if foreign.owns(place)]
            chosen[0] = min(mine) if mine else Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=disk))
        except OSError:
            pass  # the first write reports it

    thread = threading.Thread(target=choose, daemon=True)
    thread.start()
    thread.join(LOCAL_DISK_LIMIT_S)
    return chosen[0] / run


def remove_left_behind(local: Path, runs: Path) -> None:
    """Remove the images of other runs of this user from the node's own disk, if those have ended: a run that
    was requeued may have ended on other nodes. `runs` has the run directories; what it does not have may be
    another's, and stays. Best effort: may take long."""
    for place in foreign.found(local.parent, "*"):
        with suppress(OSError, ValueError):
            if place != local and foreign.owns(place) and RunDirectory(runs / place.name).has_ended():
                remove_local_copies(place)


def own_domain() -> str:
    return failure_domain(
        os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    )


def failure_domain(address: str, pattern: str) -> str:
    """Return the switches above this node, from Slurm's SLURM_TOPOLOGY_ADDR (`spine.leaf.node`) and its
    pattern (`switch.switch.node`); "" if Slurm's configuration has none."""
    switches = pattern.count(".")
    return ".".join(address.split(".")[:switches])
