"""The agent's part in checkpoints: the keeper's memory, and the drainer that copies it to storage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jurymast.core import copies as cp
from jurymast.core import messages as msg
from jurymast.core import within
from jurymast.core.foresight import Room
from jurymast.core.settings import RunPlan
from jurymast.errors import never
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.loans import Loan
from jurymast.keeper.page import PAGE_VARIABLE
from jurymast.rundir import RunDirectory
from jurymast.storage import local
from jurymast.storage.drainer import Drainer
from jurymast.storage.orders import Answer, Done, Failed, Image, Upload, Warm, WriteLocal, WriteShared


class Keeping:
    """Carries out the supervisor's orders about checkpoints. `tell` says something to it."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, tell: Callable[[msg.AboutCheckpoints], None]
    ) -> None:
        self._plan = plan
        self._run_directory = directory.root
        self._tell = tell
        settings = plan.settings
        self._local = local_root(settings.local_path, plan.run) if settings.local_path else None
        # A script may have its checkpoints elsewhere, and keep another number of them.
        self._shared, self._keep = directory.checkpoints.absolute(), settings.keep
        self._keeper = Keeper(directory.secret(), node, plan.ranks_per_node, tell, local_root=self._local)
        self._drainer = Drainer()
        self._drains: dict[str, tuple[asyncio.Task[None], str]] = {}
        self._foreseen: dict[int, tuple[int, int]] = {}  # by local rank
        self._leads = False  # rank 0 is here: this node brings shared checkpoints together
        self._warming: asyncio.Future[Answer] | None = None
        self.run_is_over = False  # nobody will restore from this node's disk any more

    async def start(self) -> None:
        """Serve other agents, and see what earlier allocations left on this node's disk."""
        await self._keeper.start()

    def environment(self) -> dict[str, str]:
        """For the ranks; empty when the policy wants no checkpoints in memory."""
        return {PAGE_VARIABLE: self._keeper.page_path} if self._plan.settings.memory else {}

    @property
    def data_port(self) -> int:
        return self._keeper.port

    def inventory(self) -> tuple[msg.CopyReport, ...]:
        return tuple(self._keeper.inventory())

    def room(self) -> Room:
        return self._keeper.room()

    def look(self) -> None:
        """What ranks have published or asked for since; at every heartbeat."""
        self._keeper.look()

    def heard(self, event: within.ForKeeper) -> None:
        match event:
            case within.Checkpoints():
                self._shared, self._keep = Path(event.directory), event.keep
                if self._leads and self._warming is None:
                    self._warming = asyncio.ensure_future(self._drainer.drain(Warm()))
            case within.Foreseen():
                self._foresee(event)
            case within.Image():
                self._keeper.image_published(event.local_rank, event.slot, event.stall_s)
            case _:
                never(event)

    def _foresee(self, event: within.Foreseen) -> None:
        self._foreseen[event.local_rank] = event.image_bytes, event.own_bytes
        if len(self._foreseen) == self._plan.ranks_per_node:
            image, own = (sum(sizes) for sizes in zip(*self._foreseen.values(), strict=True))
            self._tell(msg.Foreseen(image_bytes=image, own_bytes=own, room=self.room()))

    def launch(self, order: msg.Launch) -> None:
        """The ranks of an earlier attempt are gone, those of this one are about to start."""
        count = self._plan.ranks_per_node
        first = order.rank * count
        self._leads = first == 0
        self._foreseen.clear()
        here = list(range(first, first + count))
        self._keeper.launch(order.attempt, here, order.world * count, order.restore)

    def obey(self, order: msg.CheckpointOrder) -> None:
        match order:
            case msg.Committed():
                self._keeper.committed(order.step, order.attempt)
            case msg.Void():
                self._keeper.void(order.step, order.attempt)
            case msg.Replicate():
                self._keeper.replicate(order)
            case msg.Forget():
                self._keeper.forget(order.step, order.attempt, order.ranks)
            case msg.ForgetNewer():
                self._keeper.forget_newer(order.step)
            case msg.Drain():
                self._begin_drain(order)
            case msg.CancelDrain():
                if order.id in self._drains:
                    self._drains[order.id][0].cancel()
            case _:
                never(order)

    def _begin_drain(self, order: msg.Drain) -> None:
        """A supervisor orders one at a time: what an earlier one, maybe dead, ordered for the tier is void,
        and may be waiting for a node that is gone."""
        for task, tier in list(self._drains.values()):
            if tier == order.tier:
                task.cancel()
        task = asyncio.ensure_future(self._drain(order))
        self._drains[order.id] = task, order.tier
        task.add_done_callback(lambda _: self._drains.pop(order.id, None))

    async def _drain(self, order: msg.Drain) -> None:
        """Copy images of this node to a tier, and say how that went."""
        loans: list[Loan] = []
        try:
            for rank in order.ranks:
                loan = await self._keeper.lend(order.step, order.attempt, rank)
                if loan is None:
                    answer: Answer = Failed(why=f"the image of rank {rank} is not here any more")
                    break
                loans.append(loan)
            else:
                answer = await self._drainer.drain(self._order(order, loans))
        finally:
            for loan in loans:
                loan.give_back()
        ok = isinstance(answer, Done)
        size_bytes, why = (answer.bytes, "") if isinstance(answer, Done) else (0, answer.why)
        self._tell(msg.Drained(id=order.id, tier=order.tier, ok=ok, size_bytes=size_bytes, why=why))
        if ok and order.tier == cp.LOCAL and self._local is not None:
            self._keeper.scan_local(self._local)

    def _order(self, drain: msg.Drain, loans: list[Loan]) -> WriteLocal | WriteShared | Upload:
        step, attempt, run = drain.step, drain.attempt, self._plan.run
        if drain.tier == cp.OBJECT:
            url = self._plan.settings.object_url or ""
            return Upload(root=str(self._shared), step=step, url=url, run=run)
        images = tuple(
            Image(rank=loan.manifest.rank, path=loan.path, manifest=loan.manifest.to_bytes().decode())
            for loan in loans
        )
        if drain.tier == cp.LOCAL:
            return WriteLocal(root=str(self._local), step=step, attempt=attempt, images=images)
        return WriteShared(
            root=str(self._shared), step=step, attempt=attempt, world=drain.world, images=images,
            nonce=drain.id, lead=drain.lead, run=run, run_directory=str(self._run_directory), keep=self._keep,
        )  # fmt: skip

    async def close(self) -> None:
        running: list[asyncio.Future[Any]] = [task for task, _ in self._drains.values()]
        running += [self._warming] if self._warming is not None else []
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._drainer.close()
        await self._keeper.close()
        if self.run_is_over and self._local is not None:
            await asyncio.to_thread(local.remove, self._local)


def local_root(path: str, run: str) -> Path:
    """Where this run keeps images on a node's own disk. Other users' names are not in the way."""
    return Path(os.path.expandvars(path)) / f"jurymast-{os.getuid()}" / run


def own_domain() -> str:
    return failure_domain(
        os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    )


def failure_domain(address: str, pattern: str) -> str:
    """The switches above this node, from Slurm's SLURM_TOPOLOGY_ADDR (`spine.leaf.node`) and its pattern
    (`switch.switch.node`); "" when the site has told Slurm of none."""
    switches = pattern.count(".")
    return ".".join(address.split(".")[:switches])
