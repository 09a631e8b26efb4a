"""The agent's part in checkpoints: the keeper's memory, and the processes that write images to storage, which
it starts, gives orders, and kills if they hang. `core.agent.machine` decides about the writes."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
import threading
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from jurymast import background, foreign
from jurymast.child import Child
from jurymast.core.state import images as im
from jurymast.core.state import messages as msg
from jurymast.core.state import within
from jurymast.core.state.message import Strange
from jurymast.core.state.messages import WritePhase
from jurymast.core.state.settings import RunPlan
from jurymast.keeper.copies import remove_local_copies
from jurymast.keeper.keeper import Keeper, Loan
from jurymast.keeper.manifest import PAGE_VARIABLE
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
from jurymast.wire.protocol import Access

NEVER = math.inf
# Seconds that an order gets after its limit to give up by itself, and a killed process to end.
GRACE_S = 10.0
GONE_S = 2.0


class Phases:
    """Those of an order. `reached` is called with each that is done, and `advanced` from time to time with
    the bytes that are written. `turns` are the orders to go on, which may come before the process has the
    order itself."""

    def __init__(
        self, reached: Callable[[WritePhase], None], advanced: Callable[[int], None] = lambda size: None
    ) -> None:
        self.reached, self.advanced = reached, advanced
        self.turns: asyncio.Queue[msg.ContinueWrite] = asyncio.Queue()


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
                if isinstance(answer, Strange) or answer.id != order.id:
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
            return f"the storage process was killed by {signal.Signals(-code).name}"
        return f"the storage process ended with {code}"

    async def kill(self) -> None:
        """Send SIGKILL and wait a moment, but not longer: a process that waits for storage that hangs ends
        only when storage answers."""
        if self._child is not None:
            await self._child.kill(GONE_S)


class Keeping:
    """Carries out the supervisor's orders about checkpoints. `tell` sends it a message; `write_reached` is
    called with a write's id and the phase whose end it has reached, `write_ended` at the end of each write,
    with its id."""

    def __init__(
        self,
        directory: RunDirectory,
        plan: RunPlan,
        node: str,
        tell: Callable[[msg.AboutCheckpoints], None],
        write_reached: Callable[[str, WritePhase], None],
        write_ended: Callable[[str], None],
        oom_kills: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._run_directory = directory.root
        self._tell = tell
        self._write_reached, self._write_ended = write_reached, write_ended
        settings = plan.settings
        self._local = local_root(settings.local_path, plan.run) if settings.local_path else None
        # A script may write its checkpoints elsewhere, and keep another number of them.
        self._shared, self._keep = directory.checkpoints.absolute(), settings.keep
        access = Access(directory.secret(), encrypt=settings.encrypt)
        self.keeper = Keeper(access, node, plan.ranks_per_node, tell, local_root=self._local)
        self._storage = StorageProcesses(oom_kills=oom_kills)
        self._writes: dict[str, asyncio.Task[None]] = {}
        self._phases: dict[str, Phases] = {}  # of these
        self._warming: asyncio.Future[orders.Answer] | None = None
        self.run_is_over = False  # if true, nobody restores from this node's disk any more

    def environment(self) -> dict[str, str]:
        """Return variables for the ranks; {} if the policy wants no checkpoints in memory."""
        return {PAGE_VARIABLE: self.keeper.page_path} if self._plan.settings.memory else {}

    def checkpoints_at(self, event: within.CheckpointsKept) -> None:
        self._shared, self._keep = Path(event.directory), event.keep

    def warm(self) -> None:
        """Start, once, the process that completes shared checkpoints, so that it is ready when needed."""
        self._warming = background.start(self._storage.carry_out(orders.Warm()))

    def launch(self, order: msg.Launch) -> None:
        """Prepare for an attempt whose ranks are about to start; those of earlier attempts are gone."""
        count = self._plan.ranks_per_node
        first = order.rank * count
        here = list(range(first, first + count))
        self.keeper.launch(order.attempt, here, order.world * count, order.restore)

    def write(self, order: msg.Write) -> None:
        phases = self._phases[order.id] = Phases(
            lambda phase: self._write_reached(order.id, phase),
            lambda size: self._tell(msg.WriteProgress(id=order.id, size_bytes=size)),
        )
        task = self._writes[order.id] = background.start(self._write(order, phases))
        task.add_done_callback(lambda _: self._ended(order.id))

    def continue_write(self, order: msg.ContinueWrite) -> None:
        self._phases[order.id].turns.put_nowait(order)

    def cancel_write(self, id: str) -> None:
        self._writes[id].cancel()

    def _ended(self, id: str) -> None:
        del self._writes[id], self._phases[id]
        self._write_ended(id)

    async def _write(self, order: msg.Write, phases: Phases) -> None:
        """Write images of this node to a tier, and report the result in any case: the supervisor waits for
        it."""
        answer: orders.Answer
        try:
            answer = await self._written(order, phases)
        except Exception as error:
            background.logged(error)
            answer = orders.StorageFailed(why=f"unexpected {type(error).__name__}: {error}")
        ok = isinstance(answer, orders.Done)
        size_bytes, why = (answer.bytes, "") if isinstance(answer, orders.Done) else (0, answer.why)
        self._tell(msg.Written(id=order.id, tier=order.tier, ok=ok, size_bytes=size_bytes, why=why))
        if ok and order.tier == im.LOCAL and self._local is not None:
            self.keeper.scan_local(self._local)

    async def _written(self, order: msg.Write, phases: Phases) -> orders.Answer:
        loans: list[Loan] = []
        try:
            for rank in order.ranks:
                loan = await self.keeper.lend(order.step, order.attempt, rank)
                if loan is None:
                    return orders.StorageFailed(why=f"the image of rank {rank} is no longer here")
                loans.append(loan)
            return await self._storage.carry_out(self._order(order, loans), phases)
        finally:
            for loan in loans:
                loan.give_back()

    def _order(self, write: msg.Write, loans: list[Loan]) -> orders.AnyOrder:
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
        running: list[asyncio.Future[Any]] = [*self._writes.values()]
        running += [self._warming] if self._warming is not None else []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._storage.close()
        await self.keeper.close()
        if self.run_is_over and self._local is not None:
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
    name, it is one with a name that nobody can foresee, which is found again."""
    disk = Path(os.path.expandvars(path))
    usual = disk / f"jurymast-{os.getuid()}"
    chosen = [usual]

    def choose() -> None:
        try:
            if foreign.owns(usual) or not foreign.is_taken(usual):
                return
            mine = [place for place in foreign.found(disk, f"{usual.name}-*") if foreign.owns(place)]
            chosen[0] = min(mine) if mine else Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=disk))
        except OSError:
            pass  # the first write reports it

    thread = threading.Thread(target=choose, daemon=True)
    thread.start()
    thread.join(LOCAL_DISK_LIMIT_S)
    return chosen[0] / run


def own_domain() -> str:
    return failure_domain(
        os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    )


def failure_domain(address: str, pattern: str) -> str:
    """Return the switches above this node, from Slurm's SLURM_TOPOLOGY_ADDR (`spine.leaf.node`) and its
    pattern (`switch.switch.node`); "" if Slurm's configuration has none."""
    switches = pattern.count(".")
    return ".".join(address.split(".")[:switches])
