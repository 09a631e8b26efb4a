"""How the nodes that have images of a state write it to shared storage together, as one checkpoint.

They send no messages but leave files at a meeting place on that storage. The leading node opens the place;
each node announces its images there; the leader says who writes what of them; each node writes its share and
says so; then the leader seals and publishes the whole. A node that fails tells the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from jurymast.core.checkpoints.copies import Key

# The first node to fail tells the supervisor why, which then cancels the others: they wait this long for it.
CAUSE_FIRST_S = 3.0


class Do(Enum):
    """What a node does next. The event that answers is `done`, unless the action names another, or
    `failed`."""

    OPEN = "make the place, and sweep what others left half-done; the lead"
    FIND_PLACE = "look for it; `saw_place`"
    ANNOUNCE = "put what this node's images are like there"
    READ_LAYOUTS = "look what others have announced; `saw_layouts`"
    SHARE_OUT = "decide who writes what, and put that there; the lead"
    FIND_SHARES = "look for that; `saw_shares`"
    WRITE = "this node's share, and then that it is there"
    READ_PARTS = "look who is done; `saw_parts`"
    SEAL = "make one checkpoint of all parts; `sealed`; the lead"
    PUBLISH = "give it its name; the lead"
    CLEAN_UP = "remove the place; the lead"


@dataclass(frozen=True)
class Wait:
    """Look again after a while; `failed` if that takes too long."""


@dataclass(frozen=True)
class Pause:
    """Wait this many seconds, or until cancelled; answered by `done`."""

    seconds: float


@dataclass(frozen=True)
class ReadWhy:
    """Read once more why this rank's node failed; answered by `others_failed`."""

    rank: int


@dataclass(frozen=True)
class TellOthers:
    """Tell the other nodes why this one fails, if possible; answered by `done`."""

    why: str


@dataclass(frozen=True)
class Complete:
    """The write succeeded. `published`: the checkpoint has its final name, or had it already (`existing`)."""

    existing: bool = False
    published: bool = False


@dataclass(frozen=True)
class Fail:
    """Tell the supervisor why this node fails."""

    why: str


# All parts were there already.
THERE = Complete(existing=True, published=True)
Next = Do | Wait | Pause | ReadWhy | TellOthers | Complete | Fail


@dataclass(frozen=True)
class Announced:
    """An image that some node has announced."""

    rank: int
    key: Key
    world: int


class Meeting:
    """One node's part in writing a checkpoint. Every event returns what to do next."""

    def __init__(self, key: Key, world: int, *, leads: bool) -> None:
        self._key, self._world, self._leads = key, world, leads
        self._doing: Do = Do.OPEN if leads else Do.FIND_PLACE
        self._ranks: set[int] = set()  # the ranks whose images were announced
        self._messages: set[str] = set()  # in which that was
        self._asked_why = False
        self._closing: list[Next] = []  # remaining actions, the end last

    def check(self) -> None:
        """Check the invariants. Raises AssertionError."""
        assert len(self._ranks) <= self._world, "more images than ranks"
        assert self._leads or not self._ranks, "who follows reads no layouts"
        assert not self._closing or isinstance(self._closing[-1], Complete | Fail | ReadWhy), (
            "no end is in sight"
        )

    def begin(self, *, unseen: str, rolled_back: bool, existing: bool) -> Next:
        """Start. `unseen`: what this node cannot see of the storage, or ""; `existing`: a complete checkpoint
        of this step exists."""
        step, attempt = self._key
        if unseen:
            return Fail(f"{unseen} is not visible on this node: is the shared storage mounted?")
        if rolled_back:
            return Fail(f"step {step} of attempt {attempt} was rolled back, so it is not written")
        return THERE if existing else self._doing

    # ---- one after the other

    def done(self) -> Next:
        """The last action is done and needs no other answer."""
        if self._closing:
            return self._closing.pop(0)
        match self._doing:
            case Do.OPEN | Do.FIND_PLACE:
                return self._do(Do.ANNOUNCE)
            case Do.ANNOUNCE:
                return self._do(Do.READ_LAYOUTS if self._leads else Do.FIND_SHARES)
            case Do.SHARE_OUT | Do.FIND_SHARES:
                return self._do(Do.WRITE)
            case Do.WRITE:
                return self._do(Do.READ_PARTS) if self._leads else Complete()
            case Do.SEAL:
                return self._do(Do.PUBLISH)
            case Do.PUBLISH:
                return Complete(published=True)
            case _:
                raise AssertionError(f"to {self._doing.value}: that has another answer")

    def _do(self, what: Do) -> Next:
        self._doing = what
        return what

    def saw_place(self, *, there: bool, existing: bool) -> Next:
        """Handle a look at the place. `existing` as in `begin`: then the place is no longer needed."""
        if existing:
            return THERE
        return self.done() if there else Wait()

    def saw_layouts(self, found: Mapping[str, Iterable[Announced]]) -> Next:
        """Take in images that were not seen before, by the message that announced them."""
        for message, images in found.items():
            self._messages.add(message)
            for image in images:
                if (image.key, image.world) != (self._key, self._world):
                    why = f"rank {image.rank} has an image of another state, step {image.key[0]}"
                    return self.failed(why)
                if not 0 <= image.rank < self._world:
                    return self.failed(
                        f"{message} names rank {image.rank}, and there are {self._world} ranks"
                    )
                self._ranks.add(image.rank)
        return self._do(Do.SHARE_OUT) if len(self._ranks) == self._world else Wait()

    def saw_shares(self, *, there: bool) -> Next:
        return self.done() if there else Wait()

    def saw_parts(self, of: Collection[str]) -> Next:
        """Take in finished images. `of`: the messages in which their nodes had announced them."""
        return self._do(Do.SEAL) if self._messages.issubset(of) else Wait()

    def sealed(self, *, rolled_back: bool) -> Next:
        if rolled_back:
            return self.failed(f"step {self._key[0]} was rolled back meanwhile")
        return self.done()

    # ---- when it does not go well

    def others_failed(self, rank: int, why: str) -> Next:
        """The node of this rank says that it failed. `why` is "" while the reason is not yet there, or had no
        room."""
        if why or self._asked_why:
            return self._close([Fail(f"rank {rank}: {why or 'its node has failed'}")])
        self._asked_why = True
        self._closing = [ReadWhy(rank)]
        return Pause(CAUSE_FIRST_S)

    def failed(self, why: str, *, gone: bool = False, existing: bool = False) -> Next:
        """The last action failed. `gone`: the place no longer exists; `existing`: but a complete checkpoint
        of this step does, because the ranks have saved it themselves meanwhile."""
        if self._closing:
            return self.done()  # the end does not depend on it
        if self._doing in (Do.OPEN, Do.FIND_PLACE):
            return Fail(why)  # there is no place, and nobody to be told
        if existing and self._leads:
            return self._close([THERE])
        if gone:
            given_up = Fail("rank 0's node gave up: its directory is gone")
            return self._close([Pause(CAUSE_FIRST_S), given_up])
        return self._close([TellOthers(why), Fail(why)])

    def _close(self, steps: list[Next]) -> Next:
        *before, end = steps
        self._closing = [*before, *([Do.CLEAN_UP] if self._leads else []), end]
        return self._closing.pop(0)
