"""A node's part in a checkpoint on shared storage: the real `Meeting` over storage that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jurymast.core import messages as msg
from jurymast.core.checkpoints.meeting import (
    Announced,
    Do,
    End,
    Fail,
    Meeting,
    Next,
    Pause,
    ReadWhy,
    Tell,
    Wait,
)
from jurymast.sim.cluster.storage import Place, Token

if TYPE_CHECKING:
    from jurymast.sim.cluster.agent import SimAgent

LOOK_S, COPY_S = 0.05, (0.05, 0.4)


class SimWrite:
    """`over` hears why it failed, or ""; nobody does once it is `cancelled`."""

    def __init__(self, agent: SimAgent, order: msg.Write, token: Token, over: Callable[[str], None]) -> None:
        self._agent, self._order, self._token, self._over = agent, order, token, over
        self._key = order.step, order.attempt
        self._machine = Meeting(self._key, order.world, leads=order.lead)
        self._layout = f"layout-r{order.ranks[0]:05d}"
        self._looking: Do = Do.FIND_PLACE
        self.cancelled = False
        self._on_storage(self._begin)

    @property
    def _places(self) -> dict[str, Place]:
        return self._agent.cluster.disk.places

    def _on_storage(self, work: Callable[[], Next], *, writes: bool = False, after_s: float = 0.0) -> None:
        agent = self._agent
        storage, name = agent.cluster.storage, agent.site.name

        def done(following: Next | OSError) -> None:
            if isinstance(following, OSError):
                gone = isinstance(following, FileNotFoundError)
                following = self._machine.failed(str(following), gone=gone, existing=self._exists())
            self._machine.check()
            self._go_on(following)

        def checked() -> Next:
            if not storage.sees_checkpoints(name):
                raise OSError(f"{name} does not see the storage")
            return work()

        agent.world.after(
            after_s, agent.process, lambda: storage.do(name, agent.process, checked, done, writes=writes)
        )

    def _exists(self) -> bool:
        return any(step == self._key[0] for step, _ in self._agent.cluster.disk.shared)

    def _begin(self) -> Next:
        void = self._agent.cluster.disk.is_void(self._key)
        return self._machine.begin(unseen="", rolled_back=void, existing=self._exists())

    def _go_on(self, what: Next) -> None:
        if self.cancelled:
            return
        match what:
            case End():
                self._over("")
            case Fail(why):
                self._over(why)
            case Wait():
                self._on_storage(lambda: self._look(self._looking), after_s=LOOK_S)
            case Pause(seconds):
                self._on_storage(self._machine.done, after_s=seconds)
            case Do.FIND_PLACE | Do.READ_LAYOUTS | Do.FIND_SHARES | Do.READ_PARTS:
                self._looking = looking = what
                self._on_storage(lambda: self._look(looking))
            case Do.WRITE:
                copy_s = self._agent.world.between(*COPY_S)
                self._on_storage(lambda: self._write(what), writes=True, after_s=copy_s)
            case _:
                self._on_storage(lambda: self._write(what), writes=what is not Do.CLEAN_UP)

    @property
    def _place(self) -> Place:
        if self._order.id not in self._places:
            raise FileNotFoundError("the place is gone")
        return self._places[self._order.id]

    def _look(self, what: Do) -> Next:
        machine = self._machine
        if what is Do.FIND_PLACE:
            there = self._order.id in self._places
            return machine.saw_place(there=there, existing=not there and self._exists())
        place = self._place
        for rank, why in place.failed.items():
            return machine.others_failed(rank, why)
        match what:
            case Do.READ_LAYOUTS:
                return machine.saw_layouts(place.layouts)
            case Do.FIND_SHARES:
                return machine.saw_shares(there=place.shared_out)
            case _:
                return machine.saw_parts(place.done)

    def _write(self, what: Next) -> Next:
        """Something there."""
        order, disk = self._order, self._agent.cluster.disk
        match what:
            case Do.OPEN:
                self._places.clear()
                self._places[order.id] = Place()
            case Do.CLEAN_UP:
                self._places.pop(order.id, None)
            case Do.ANNOUNCE:
                images = [Announced(rank, self._key, order.world) for rank in order.ranks]
                self._place.layouts[self._layout] = images
            case Do.SHARE_OUT:
                self._place.shared_out = True
            case Do.WRITE:
                self._place.done.add(self._layout)
            case Do.SEAL:
                assert len(self._place.done) == len(self._place.layouts), "a part is missing"
                return self._machine.sealed(rolled_back=disk.is_void(self._key))
            case Do.PUBLISH:
                assert self._place.shared_out, "published before it was written"
                del self._places[order.id]
                disk.publish(self._key, self._token)
            case Tell(why):
                self._place.failed[order.ranks[0]] = why
            case ReadWhy(rank):
                return self._machine.others_failed(rank, self._place.failed.get(rank, ""))
            case _:
                raise AssertionError(f"{what} is nothing to do")
        return self._machine.done()
