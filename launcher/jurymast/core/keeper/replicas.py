"""Parts of other nodes' images, or the XOR of several, held here in case one of those nodes is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jurymast.core import messages as msg
from jurymast.core.checkpoints.copies import ALL, COMMON, MEMORY, PEER
from jurymast.core.keeper import effects as do
from jurymast.core.keeper.copies import Image, KeptCopy
from jurymast.core.keeper.holding import Holding
from jurymast.core.keeper.memory import Buffer, Claim, kernel_refusal
from jurymast.core.keeper.work import Filled, Found, Work, Works
from jurymast.core.texts import memory_size

AT_ONCE = 2
Name = tuple[Image, str, tuple[int, ...]]


class Replica(Work):
    """One order. It waits for its turn, finds the images' manifests, takes memory, and fills it."""

    def __init__(self, replicas: OwnReplicas, order: msg.Replicate) -> None:
        super().__init__(replicas.works)
        self._replicas = replicas
        self.order = order
        self.image: Image = (order.step, order.attempt, order.rank)
        self.group = tuple(sorted(order.group))
        self.name: Name = (self.image, order.part, self.group)
        members = {one.rank: one for one in order.members}
        if self.group:
            self._wanted = tuple(members[rank] for rank in self.group)
        else:
            self._wanted = (msg.Member(rank=order.rank, sources=order.sources),)
        self._extent = (0, 0)

    def begin(self) -> None:
        step, attempt, _ = self.image
        self.do(do.FindImages(self.number, step, attempt, self._wanted))

    def found(self, found: Found) -> None:
        self.why += found.passed_over
        if self.stopped or len(found.reports) < len(self._wanted):
            if len(found.reports) < len(self._wanted):
                self.why.append(f"no node has the image of rank {self._wanted[len(found.reports)].rank}")
            self._over()
        elif self.group:
            length = mixed_bytes(found.reports, self.order.part)
            asked = f"the parity of {len(self.group)} ranks, {memory_size(length)}"
            self._claim(asked, length, (0, length))
        else:
            # It may become a slot, but for now memory is taken only for this part.
            start, end = extent(found.reports[0], self.order.part)
            asked = f"a replica of rank {self.image[2]}, {memory_size(end - start)}"
            self._claim(asked, found.slot_bytes, (start, end))

    def _claim(self, asked: str, capacity: int, extent: tuple[int, int]) -> None:
        self._extent = extent
        self.memory.claim(Claim(self, asked, 1, capacity, extent))

    def granted(self, buffers: list[Buffer]) -> None:
        self.own(buffers[0])
        order, (start, end), buffer = self.order, self._extent, buffers[0].number
        if self.stopped:
            self._over()
        elif self.group:
            self.do(do.Mix(self.number, order.part, buffer, end, self._wanted))
        else:
            self.do(
                do.Fetch(
                    self.number, self.image, PEER, order.part, buffer, start, end, order.sources, behind=False
                )
            )

    def refused(self, why: str) -> None:
        self.tell(msg.Refused(why=why, group=self.group))
        self.why.append(why)
        self._over()

    def fetched(self, fetched: Filled, now: float) -> None:
        self.took(fetched)
        if fetched.refused:
            self.refused(kernel_refusal(fetched.refused))
            return
        if fetched.copy is not None and not self.stopped:
            self.holding.hold(fetched.copy)
        self._over()

    def _over(self) -> None:
        self.end()
        self._replicas.ended(self)
        if not self.stopped and not self._replicas.here(self.name):
            step, attempt, rank = self.image
            why = "; ".join(self.why) or "no node has all of it"
            self.tell(
                msg.Unreplicated(
                    step=step, attempt=attempt, rank=rank, part=self.order.part, why=why, group=self.group
                )
            )


class OwnReplicas:
    """The replicas on this node. One counts when all of it is here and verified; until then every older one
    stays."""

    def __init__(self, works: Works) -> None:
        self.works = works
        self._holding: Holding = works.holding
        self.wanted: dict[Name, Replica] = {}  # and nobody has said otherwise
        self.waiting: list[Replica] = []
        self.running: list[Replica] = []

    def check(self) -> None:
        assert len(self.running) <= AT_ONCE, "too many replicas at a time"
        assert not self.waiting or len(self.running) == AT_ONCE, "a replica waits for nothing"
        going = {id(one) for one in (*self.waiting, *self.running)}
        assert {id(one) for one in self.wanted.values()} <= going, "an order is forgotten"
        assert not any(one.stopped for one in self.wanted.values())

    def here(self, name: Name) -> list[KeptCopy]:
        image, part, group = name
        found = self._holding.find(image, (MEMORY, PEER), group)
        return [copy for copy in found if copy.part in (ALL, part)]

    def order(self, order: msg.Replicate) -> None:
        name = ((order.step, order.attempt, order.rank), order.part, tuple(sorted(order.group)))
        here = self.here(name)
        if here:
            self._holding.tell(msg.Held(copies=tuple(copy.report for copy in here)))
        elif name not in self.wanted:
            self.wanted[name] = one = Replica(self, order)
            self.waiting.append(one)
            self._next()

    def _next(self) -> None:
        while self.waiting and len(self.running) < AT_ONCE:
            one = self.waiting.pop(0)
            self.running.append(one)
            one.begin()

    def ended(self, one: Replica) -> None:
        self.running.remove(one)
        if self.wanted.get(one.name) is one:
            del self.wanted[one.name]
        self._next()

    def stop(self, gone: Callable[[Replica], bool]) -> None:
        """Stop making these replicas, without a report."""
        for one in [one for one in self.wanted.values() if gone(one)]:
            del self.wanted[one.name]
            if one in self.waiting:
                self.waiting.remove(one)
                one.end()
            else:
                one.stop()


def extent(report: msg.CopyReport, part: str) -> tuple[int, int]:
    """Return [start, end) of a part in its image."""
    if part == ALL:
        return 0, report.size_bytes
    return (0, report.common_bytes) if part == COMMON else (report.common_bytes, report.size_bytes)


def mixed_bytes(members: Sequence[msg.CopyReport], part: str) -> int:
    """Return the size of the XOR of this part of these images: that of the longest part."""
    common = max(one.common_bytes for one in members) if part == ALL else 0
    return common + max(one.size_bytes - one.common_bytes for one in members)
