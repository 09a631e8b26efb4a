"""The agent's part in checkpoints: the keeper's memory, and the drainer that copies it to storage."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jurymast.core import copies as cp
from jurymast.core.settings import RunPlan
from jurymast.keeper.keeper import Keeper
from jurymast.keeper.loans import Loan
from jurymast.keeper.page import PAGE_VARIABLE
from jurymast.rundir import RunDirectory
from jurymast.storage import local
from jurymast.storage.drainer import Drainer
from jurymast.wire.messages import Message


class Keeping:
    """Carries out the supervisor's orders about checkpoints. `tell` says something to it."""

    def __init__(
        self, directory: RunDirectory, plan: RunPlan, node: str, tell: Callable[[Message], None]
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
        self._warming: asyncio.Future[Message] | None = None
        self.run_is_over = False  # nobody will restore from this node's disk any more

    async def start(self) -> None:
        """Serve other agents, and see what earlier allocations left on this node's disk."""
        await self._keeper.start()

    def environment(self) -> dict[str, str]:
        """For the ranks; empty when the policy wants no checkpoints in memory."""
        return {PAGE_VARIABLE: self._keeper.page_path} if self._plan.settings.memory else {}

    def hello(self) -> Message:
        return {
            "data_port": self._keeper.port, "copies": self._keeper.inventory(), "room": self._room(),
            "domain": failure_domain(
                os.environ.get("SLURM_TOPOLOGY_ADDR", ""), os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
            ),
        }  # fmt: skip

    def look(self) -> None:
        """What ranks have published or asked for since; at every heartbeat."""
        self._keeper.look()

    def heard(self, event: Message) -> bool:
        """A rank's word. True when it was about memory, and is not for the supervisor as it is."""
        if event.get("event") == "Checkpoints":
            self._shared, self._keep = Path(event["directory"]), int(event["keep"])
            if self._leads and self._warming is None:
                order = {"do": "warm", "tier": cp.SHARED}
                self._warming = asyncio.ensure_future(self._drainer.drain(order))
            return True
        if event.get("event") == "Foreseen":
            self._foresee(event)
            return True
        if event.get("event") != "Image":
            return False
        self._keeper.image_published(
            int(event["local_rank"]), int(event["slot"]), float(event.get("stall_s") or 0.0)
        )
        return True

    def _foresee(self, event: Message) -> None:
        self._foreseen[int(event["local_rank"])] = int(event["image_bytes"]), int(event["own_bytes"])
        if len(self._foreseen) == self._plan.ranks_per_node:
            image, own = (sum(sizes) for sizes in zip(*self._foreseen.values(), strict=True))
            self._tell({"say": "foreseen", "image_bytes": image, "own_bytes": own, "room": self._room()})

    def _room(self) -> dict[str, Any]:
        room = self._keeper.room()
        return {"bytes": room.free, "limit": room.limit}

    def launch(self, message: Message) -> None:
        """The ranks of an earlier attempt are gone, those of this one are about to start."""
        count = self._plan.ranks_per_node
        first = int(message["rank"]) * count
        world = int(message["world"]) * count
        ranks = list(range(first, first + count))
        self._leads = first == 0
        self._foreseen.clear()
        self._keeper.launch(int(message["attempt"]), ranks, world, message.get("restore"))

    def obey(self, message: Message) -> bool:
        """True when the order was about checkpoints."""
        order = message["do"]
        if order == "committed":
            self._keeper.committed(int(message["step"]), int(message["attempt"]))
        elif order == "void":
            self._keeper.void(int(message["step"]), int(message["attempt"]))
        elif order == "replicate":
            self._keeper.replicate(message)
        elif order == "forget":
            self._keeper.forget(message["images"])
        elif order == "forget newer":
            self._keeper.forget_newer(int(message["step"]))
        elif order == "drain":
            self._begin_drain(message)
        elif order == "cancel drain":
            running = self._drains.get(message["id"])
            if running is not None:
                running[0].cancel()
        else:
            return False
        return True

    def _begin_drain(self, message: Message) -> None:
        """A supervisor orders one at a time: what an earlier one, maybe dead, ordered for the tier is void,
        and may be waiting for a node that is gone."""
        for task, tier in list(self._drains.values()):
            if tier == message["tier"]:
                task.cancel()
        task = asyncio.ensure_future(self._drain(message))
        self._drains[message["id"]] = task, message["tier"]
        task.add_done_callback(lambda _: self._drains.pop(message["id"], None))

    async def _drain(self, message: Message) -> None:
        """Copy images of this node to a tier, and say how that went."""
        step, attempt, tier = int(message["step"]), int(message["attempt"]), message["tier"]
        loans: list[Loan] = []
        try:
            for rank in message["ranks"]:
                loan = await self._keeper.lend(step, attempt, int(rank))
                if loan is None:
                    answer = {"said": "failed", "why": f"the image of rank {rank} is not here any more"}
                    break
                loans.append(loan)
            else:
                answer = await self._drainer.drain(self._order(message, loans))
        finally:
            for loan in loans:
                loan.give_back()
        ok = answer["said"] == "done"
        self._tell(
            {
                "say": "drained", "id": message["id"], "tier": tier, "step": step, "attempt": attempt,
                "ok": ok, "size_bytes": int(answer.get("bytes") or 0), "why": str(answer.get("why") or ""),
            }
        )  # fmt: skip
        if ok and tier == cp.LOCAL and self._local is not None:
            self._keeper.scan_local(self._local)

    def _order(self, message: Message, loans: list[Loan]) -> Message:
        tier = message["tier"]
        images = [
            {"rank": loan.manifest.rank, "path": loan.path, "manifest": loan.manifest.to_bytes().decode()}
            for loan in loans
        ]
        order: dict[str, Any] = {
            "do": "drain", "tier": tier, "step": message["step"], "attempt": message["attempt"],
            "world": message["world"], "images": images,
        }  # fmt: skip
        if tier == cp.LOCAL:
            return {**order, "root": str(self._local)}
        order = {**order, "root": str(self._shared), "lead": message["lead"], "nonce": message["id"]}
        order["run"] = self._plan.run
        if tier == cp.OBJECT:
            return {**order, "url": self._plan.settings.object_url}
        return {**order, "keep": self._keep, "run_directory": str(self._run_directory)}

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


def failure_domain(address: str, pattern: str) -> str:
    """The switches above this node, from Slurm's SLURM_TOPOLOGY_ADDR (`spine.leaf.node`) and its pattern
    (`switch.switch.node`); "" when the site has told Slurm of none."""
    switches = pattern.count(".")
    return ".".join(address.split(".")[:switches])
